"""Segments and frames: how the messages of one flush lie in one blob.

A frame is, little-endian: body length (u32, what follows it), flags (u8), message id (16 bytes), trace id
(16 bytes, if flagged), transaction id (u16 length and bytes), producer subject (the same, if flagged), and
the payload's bytes exactly as they were sent. Frame k of a segment has the offset base + k. A blob is a
tag byte, which says how the rest is stored, and the frames one after the other.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from typing import NamedTuple

from gevent.hub import get_hub

if sys.version_info >= (3, 14):
    from compression.zstd import ZstdError, compress, decompress
else:
    from backports.zstd import ZstdError, compress, decompress

TRACE = 1
SUBJECT = 2
ENCRYPTED = 4
_FLAGS = TRACE | SUBJECT | ENCRYPTED

_HEAD = struct.Struct("<IB16sH")
_LENGTH = struct.Struct("<I")
_SHORT = struct.Struct("<H")
_MINIMUM = 19

_STORED = b"\x00"
_ZSTD = b"\x01"
# Below this a blob lies in its row anyway, and a call of the compressor costs more than the bytes saved.
_COMPRESS_FROM = 2048
# From here on compression takes milliseconds, which no other greenlet should have to wait for.
_THREAD_FROM = 1 << 20


class BadSegment(ValueError):
    """A blob is no segment: a length runs past the end, a frame is too short, or bytes are left over."""


class Frame(NamedTuple):
    """One message of a segment. Ids are raw bytes, texts UTF-8; payload is the JSON as it was sent."""

    message_id: bytes
    transaction_id: bytes
    payload: bytes
    trace_id: bytes | None = None
    subject: bytes | None = None
    encrypted: bool = False


def encode_frame(
    message_id: bytes,
    transaction_id: bytes,
    payload: bytes,
    subject: bytes | None = None,
    trace_id: bytes | None = None,
    encrypted: bool = False,
) -> bytes:
    """The bytes of one frame. Transaction id and subject are at most 65,535 bytes each."""
    if subject is None and trace_id is None and not encrypted:
        length = _MINIMUM + len(transaction_id) + len(payload)
        return b"".join((_HEAD.pack(length, 0, message_id, len(transaction_id)), transaction_id, payload))
    flags = (TRACE if trace_id else 0) | (SUBJECT if subject is not None else 0) | (ENCRYPTED if encrypted else 0)
    body = [bytes((flags,)), message_id, trace_id or b"", _SHORT.pack(len(transaction_id)), transaction_id]
    if subject is not None:
        body += (_SHORT.pack(len(subject)), subject)
    body.append(payload)
    data = b"".join(body)
    return _LENGTH.pack(len(data)) + data


def is_encrypted(frame: bytes) -> bool:
    """Whether an encoded frame says that its payload is sealed."""
    return bool(frame[4] & ENCRYPTED)


def pack(frames: Sequence[bytes], level: int) -> bytes:
    """The blob of encoded frames, compressed at ``level`` when that makes it smaller (0: never)."""
    data = b"".join(frames)
    if level and len(data) >= _COMPRESS_FROM:
        if len(data) >= _THREAD_FROM:
            small = get_hub().threadpool.apply(compress, (data, level))
        else:
            small = compress(data, level)
        if len(small) < len(data):
            return _ZSTD + small
    return _STORED + data


def split(blob: bytes) -> list[bytes]:
    """The encoded frames of a segment, for `decode`; raises `BadSegment`."""
    data = _open(blob)
    size = len(data)
    encoded: list[bytes] = []
    at = 0
    while at < size:
        if at + 4 > size:
            raise BadSegment("a frame's length runs past the end")
        (length,) = _LENGTH.unpack_from(data, at)
        end = at + 4 + length
        if length < _MINIMUM or end > size:
            raise BadSegment("a frame runs past the end" if end > size else "a frame is too short")
        encoded.append(data[at:end])
        at = end
    return encoded


def unpack(blob: bytes, start: int = 0, take: int | None = None) -> list[Frame]:
    """The frames ``start`` to ``start + take`` of a segment; raises `BadSegment`."""
    encoded = split(blob)
    if take is not None and start + take > len(encoded):
        raise BadSegment("the segment holds fewer frames than its row says")
    return [decode(frame) for frame in encoded[start : None if take is None else start + take]]


def _open(blob: bytes) -> bytes:
    tag = blob[:1]
    if tag == _STORED:
        return blob[1:]
    if tag != _ZSTD:
        raise BadSegment("unknown container")
    try:
        if len(blob) >= _THREAD_FROM:
            data: bytes = get_hub().threadpool.apply(decompress, (blob[1:],))
            return data
        return decompress(blob[1:])
    except ZstdError as error:
        raise BadSegment(f"can't decompress: {error}") from None


def decode(data: bytes) -> Frame:
    """One encoded frame; raises `BadSegment`."""
    _, flags, message_id, count = _HEAD.unpack_from(data)
    end = len(data)
    if not flags:
        body = 23 + count
        if body > end:
            raise BadSegment("a transaction id runs past its frame")
        return Frame(message_id, data[23:body], data[body:])
    if flags & ~_FLAGS:
        raise BadSegment("unknown flags")
    at = 21
    trace_id = subject = None
    if flags & TRACE:
        trace_id = data[at : at + 16]
        at += 16
    transaction_id, at = _counted(data, at, end)
    if flags & SUBJECT:
        subject, at = _counted(data, at, end)
    return Frame(message_id, transaction_id, data[at:end], trace_id, subject, bool(flags & ENCRYPTED))


def _counted(data: bytes, at: int, end: int) -> tuple[bytes, int]:
    if at + 2 > end:
        raise BadSegment("a length runs past its frame")
    (count,) = _SHORT.unpack_from(data, at)
    if at + 2 + count > end:
        raise BadSegment("a text runs past its frame")
    return data[at + 2 : at + 2 + count], at + 2 + count
