"""The mesh's wire format: ``u32 length, big endian | u8 tag | JSON payload``; the length counts the tag.

Unknown tags and unknown keys are ignored by whoever reads them, so that versions can differ. A length is
checked before anything of that size is allocated.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from enum import IntEnum
from functools import lru_cache
from typing import Any

from queen import codec
from queen.engine.hints import PartitionKey
from queen.engine.identifiers import uuid_text

LIMIT = 16 * 1024 * 1024
LARGE = 256 * 1024  # a length from which a frame is read by one connection at a time
ITEMS_LIMIT = 200_000

_BATCH_BYTES = 8 * 1024 * 1024
_CHUNK = 65_536
# A value costs its reader a hundred bytes, whatever it costs its writer. No batch has more than these.
_MOST_OBJECTS = ITEMS_LIMIT + 1
_MOST_VALUES = 4 * ITEMS_LIMIT

_length = struct.Struct(">I")


class Tag(IntEnum):
    """What a frame says. The last two pass only between the workers of one broker."""

    MESSAGE_AVAILABLE = 1
    MESSAGE_AVAILABLE_BATCH = 2
    HEARTBEAT = 3
    HELLO = 4
    HOTLIST_DIRTY_BATCH = 5
    QUEUE_CONFIG_SET = 10
    QUEUE_CONFIG_DELETE = 11
    MAINTENANCE_MODE_SET = 40
    POP_MAINTENANCE_MODE_SET = 41
    QUESTION = 200
    ANSWER = 201


class BadFrame(Exception):
    """A length that no frame may have, or an end in the middle of one: the connection is of no more use."""


class Unwelcome(Exception):
    """A whole frame, but one after which its sender isn't heard any more. The message says why, for the log."""


def encode(tag: int, payload: bytes = b"") -> bytes:
    """The bytes of a frame."""
    return b"%b%c%b" % (_length.pack(1 + len(payload)), tag, payload)


def encode_object(tag: Tag, value: dict[str, Any]) -> bytes:
    """The bytes of a frame whose payload is an object."""
    return encode(tag, codec.dumps(value))


@lru_cache(maxsize=8192)
def item(key: PartitionKey, group: bytes | None = None) -> bytes:
    """One element of a batch. Cached: producers repeat their partitions."""
    tenant, queue, partition = key
    value = {"queue": queue.decode(), "partition": partition.decode(), "tenant": uuid_text(tenant)}
    if group is not None:
        value["group"] = group.decode()
    return codec.dumps(value)


def batches(tag: Tag, items: Iterable[bytes]) -> Iterator[bytes]:
    """Frames that carry the items, each well below the limit; none without items."""
    size = 0
    part: list[bytes] = []
    for element in items:
        if part and size + len(element) > _BATCH_BYTES:
            yield encode(tag, b'{"items":[%b]}' % b",".join(part))
            part, size = [], 0
        part.append(element)
        size += len(element) + 1
    if part:
        yield encode(tag, b'{"items":[%b]}' % b",".join(part))


def decode_object(payload: bytes) -> dict[str, Any] | None:
    """The object that a payload spells, or None. A large one that is mostly punctuation is none of ours."""
    if len(payload) >= LARGE and (payload.count(b"{") > _MOST_OBJECTS or _values(payload) > _MOST_VALUES):
        return None
    try:
        value = codec.loads(payload)
    except codec.JsonError:
        return None
    return value if isinstance(value, dict) else None


def _values(payload: bytes) -> int:
    """At least as many as the JSON values in a payload: each but the first stands behind one of these."""
    return payload.count(b",") + payload.count(b"[") + payload.count(b"{")


class FrameReader:
    """Reads frames from ``receive(count)``, which gives some bytes and none at the end.

    ``large`` is entered to read a frame of `LARGE` bytes or more, so that many connections together can't
    make this process hold many such frames.
    """

    __slots__ = ("_buffer", "_large", "_receive")

    def __init__(self, receive: Callable[[int], bytes], large: Callable[[], AbstractContextManager[Any]]) -> None:
        self._receive = receive
        self._large = large
        self._buffer = bytearray()

    def read(self, limit: int = LIMIT) -> tuple[int, bytes] | None:
        """Tag and payload of the next frame; None at an end between frames. Raises `BadFrame`."""
        if not self._fill(4, may_end=True):
            return None
        (length,) = _length.unpack_from(self._buffer)
        if not 1 <= length <= limit:
            raise BadFrame(f"length {length}")
        if length < LARGE:
            return self._rest(4 + length)
        with self._large():
            return self._rest(4 + length)

    def _rest(self, size: int) -> tuple[int, bytes]:
        self._fill(size)
        with memoryview(self._buffer) as view:
            tag, payload = view[4], bytes(view[5:size])
        del self._buffer[:size]
        return tag, payload

    def _fill(self, size: int, may_end: bool = False) -> bool:
        while (missing := size - len(self._buffer)) > 0:
            part = self._receive(min(max(missing, 4096), _CHUNK))
            if not part:
                if may_end and not self._buffer:
                    return False
                raise BadFrame("cut short")
            self._buffer += part
        return True
