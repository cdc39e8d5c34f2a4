"""Spool files: one record after the other, each a length (u32, little-endian) and a JSON object.

The object holds the event as it was pushed, its payload byte for byte, and as its last key ``crc``, the
CRC-32 of everything before it. Records without ``crc``, ``messageId`` or ``ts`` are read too. A reader
takes what is sound: a file may end in the middle of a record when the broker was killed, and a disk may
return something else than was written.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from zlib import crc32

import msgspec

from queen.engine.dedup import Key
from queen.engine.frames import Frame
from queen.engine.identifiers import DEFAULT_TENANT, parse_uuid, uuid_text

_LENGTH = struct.Struct("<I")
_CRC = b',"crc":"'
_CRC_SIZE = len(_CRC) + 10  # eight digits, the quote and the brace

_encode = msgspec.json.Encoder().encode


class BadRecord(ValueError):
    """The bytes are no record."""


@dataclass(slots=True)
class Event:
    """One spooled message: where it goes, and the frame it will be. ``at`` is when, in epoch milliseconds."""

    key: Key
    frame: Frame
    at: int = 0


class _Body(msgspec.Struct, rename="camel"):
    queue: str
    partition: str
    transaction_id: str
    payload: msgspec.Raw
    tenant: str | None = None
    producer_sub: str | None = None
    encrypted: bool = False
    message_id: str | None = None
    ts: int = 0


class _Address(msgspec.Struct):
    """What a record says of where it goes, read without the rest."""

    queue: str
    partition: str
    tenant: str | None = None


_decode_body = msgspec.json.Decoder(_Body).decode
_decode_address = msgspec.json.Decoder(_Address).decode


def encode(events: Iterable[Event]) -> bytes:
    """The records of events, ready to be appended to a file."""
    parts: list[bytes] = []
    now = time.time_ns() // 1_000_000
    for event in events:
        tenant, queue, partition = event.key
        frame = event.frame
        body = b"".join(
            (
                b"{" if tenant == DEFAULT_TENANT else b'{"tenant":"%s",' % uuid_text(tenant).encode(),
                b'"queue":',
                _text(queue),
                b',"partition":',
                _text(partition),
                b',"transactionId":',
                _text(frame.transaction_id),
                b"" if frame.subject is None else b',"producerSub":' + _text(frame.subject),
                b',"encrypted":true,"payload":' if frame.encrypted else b',"encrypted":false,"payload":',
                frame.payload,
                b',"messageId":"%s","ts":%d' % (uuid_text(frame.message_id).encode(), event.at or now),
            )
        )
        parts += (_LENGTH.pack(len(body) + _CRC_SIZE), body, b'%s%08x"}' % (_CRC, crc32(body)))
    return b"".join(parts)


def _text(value: bytes) -> bytes:
    return _encode(value.decode())


def decode(body: bytes) -> Event:
    """The event of one record's body. Raises `BadRecord`, also when the checksum is another."""
    if body[-_CRC_SIZE : -_CRC_SIZE + len(_CRC)] == _CRC:
        crc = b"%08x" % crc32(body[:-_CRC_SIZE])
        if body[-10:-2] != crc:
            raise BadRecord("the checksum is wrong")
    try:
        record = _decode_body(body)
        tenant = DEFAULT_TENANT if record.tenant is None else parse_uuid(record.tenant)
        message_id = b"" if record.message_id is None else parse_uuid(record.message_id)
        if tenant is None or message_id is None:
            raise BadRecord("an id is no UUID")
        return Event(
            (tenant, record.queue.encode(), record.partition.encode()),
            Frame(
                message_id,
                record.transaction_id.encode(),
                bytes(record.payload),
                subject=None if record.producer_sub is None else record.producer_sub.encode(),
                encrypted=record.encrypted,
            ),
            record.ts,
        )
    except (msgspec.DecodeError, UnicodeError) as error:
        raise BadRecord(str(error)) from None


@dataclass(slots=True)
class Contents:
    """What a file holds: its sound events in order, and what is wrong with it, if something is."""

    events: list[Event]
    fault: str | None = None


def parse(data: bytes) -> Contents:
    """Reads all sound records.

    A record that can't be read is left out; when nothing sound follows it at the place that its length
    names, nothing behind it can be told apart either, and reading ends there.
    """
    contents = Contents([])
    for body, end in _bodies(data):
        if body is None:
            contents.fault = contents.fault or f"the record at the end is cut, after {len(contents.events)} events"
            break
        try:
            contents.events.append(decode(body))
        except BadRecord as error:
            contents.fault = contents.fault or f"record {len(contents.events)}: {error}"
            if not _sound_at(data, end):
                break
    return contents


def count(data: bytes) -> int:
    """How many records there are, going by the lengths alone."""
    return sum(body is not None for body, _ in _bodies(data))


def partitions(data: bytes) -> tuple[int, set[Key]]:
    """How many records there are, and the partitions that they go to."""
    found: set[Key] = set()
    total = 0
    for body, _ in _bodies(data):
        if body is None:
            break
        total += 1
        try:
            address = _decode_address(body)
            tenant = DEFAULT_TENANT if address.tenant is None else parse_uuid(address.tenant)
            if tenant is not None:
                found.add((tenant, address.queue.encode(), address.partition.encode()))
        except (msgspec.DecodeError, UnicodeError):
            continue
    return total, found


def _bodies(data: bytes) -> Iterator[tuple[bytes | None, int]]:
    """Each record's body with the place where it ends; None for one that is cut, and then no more."""
    at, size = 0, len(data)
    while at < size:
        start = at + _LENGTH.size
        length = _LENGTH.unpack_from(data, at)[0] if start <= size else 0
        at = start + length
        if not length or at > size:
            yield None, size
            return
        yield data[start:at], at


def _sound_at(data: bytes, at: int) -> bool:
    body, _ = next(_bodies(data[at:]), (None, 0))
    if body is None:
        return at == len(data)
    try:
        decode(body)
    except BadRecord:
        return False
    return True
