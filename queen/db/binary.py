"""PostgreSQL's binary format for the few types the data plane sends and receives.

The drivers' text default for an array of byte strings costs ten times as much, and even a binary
adapter costs more than the query: here a parameter is one join, a result one unpack. Formats are those
of the ``*_send`` and ``*_recv`` functions of PostgreSQL's sources.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache

OID_BYTEA = 17
OID_INT8 = 20
OID_INT4 = 23
OID_TEXT = 25
OID_TIMESTAMPTZ = 1184
OID_UUID = 2950

_ARRAY = struct.Struct("!iiIii")  # dimensions, has nulls, element type, length, lower bound
_EMPTY = struct.Struct("!iiI")
_INT4 = struct.Struct("!i")
_INT8 = struct.Struct("!q")
_NULL = b"\xff\xff\xff\xff"
_POSTGRES_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)

TRUE = b"\x01"
FALSE = b"\x00"


def int4(value: int) -> bytes:
    return _INT4.pack(value)


def int8(value: int) -> bytes:
    return _INT8.pack(value)


def boolean(value: bool) -> bytes:
    return TRUE if value else FALSE


def array(oid: int, values: Sequence[bytes | None]) -> bytes:
    """A one-dimensional array of already encoded elements; None is a null."""
    if not values:
        return _EMPTY.pack(0, 0, oid)
    parts = [_ARRAY.pack(1, 1 if None in values else 0, oid, len(values), 1)]
    pack = _INT4.pack
    for value in values:
        if value is None:
            parts.append(_NULL)
        else:
            parts.append(pack(len(value)))
            parts.append(value)
    return b"".join(parts)


def byteas(values: Sequence[bytes | None]) -> bytes:
    return array(OID_BYTEA, values)


def texts(values: Sequence[bytes | None]) -> bytes:
    """Elements are UTF-8."""
    return array(OID_TEXT, values)


def uuids(values: Sequence[bytes | None]) -> bytes:
    """Elements are the 16 bytes of a UUID."""
    return array(OID_UUID, values)


def times(values: Sequence[int | None]) -> bytes:
    """Elements are microseconds since 2000-01-01 UTC."""
    return array(OID_TIMESTAMPTZ, [None if value is None else int8(value) for value in values])


def int4s(values: Sequence[int]) -> bytes:
    if not values:
        return _EMPTY.pack(0, 0, OID_INT4)
    flat = [part for value in values for part in (4, value)]
    return struct.pack(f"!iiIii{len(flat)}i", 1, 0, OID_INT4, len(values), 1, *flat)


def int8s(values: Sequence[int]) -> bytes:
    if not values:
        return _EMPTY.pack(0, 0, OID_INT8)
    flat = [part for value in values for part in (8, value)]
    return struct.pack(f"!iiIii{'iq' * len(values)}", 1, 0, OID_INT8, len(values), 1, *flat)


def read_int4(data: bytes) -> int:
    value: int = _INT4.unpack(data)[0]
    return value


def read_int8(data: bytes) -> int:
    value: int = _INT8.unpack(data)[0]
    return value


def read_int4s(data: bytes) -> list[int]:
    """An array of int4 without nulls."""
    count = (len(data) - _ARRAY.size) // 8 if len(data) > _EMPTY.size else 0
    return list(struct.unpack_from(f"!{2 * count}i", data, _ARRAY.size)[1::2]) if count else []


def read_int8s(data: bytes) -> list[int]:
    """An array of int8 without nulls."""
    count = (len(data) - _ARRAY.size) // 12 if len(data) > _EMPTY.size else 0
    return list(struct.unpack_from("!" + "iq" * count, data, _ARRAY.size)[1::2]) if count else []


def read_timestamp(data: bytes) -> datetime:
    """A timestamptz: microseconds since 2000-01-01 UTC."""
    return _POSTGRES_EPOCH + timedelta(microseconds=read_int8(data))


def now() -> int:
    """This machine's clock, in microseconds since 2000-01-01 UTC."""
    return int((time.time() - _POSTGRES_EPOCH.timestamp()) * 1_000_000)


def timestamp_text(microseconds: int) -> str:
    """Microseconds since 2000-01-01 as ``YYYY-MM-DDTHH:MM:SS.ffffffZ``, the wire's form of a time."""
    seconds, fraction = divmod(microseconds, 1_000_000)
    return f"{_second_text(seconds)}.{fraction:06d}Z"


@lru_cache(maxsize=1024)
def _second_text(seconds: int) -> str:
    return f"{_POSTGRES_EPOCH + timedelta(seconds=seconds):%Y-%m-%dT%H:%M:%S}"
