"""Message and lease ids (UUIDv7, RFC 9562), and the fingerprint of a transaction id."""

from __future__ import annotations

import os
import re
import time
from hashlib import blake2b

DEFAULT_TENANT = bytes.fromhex("00000000000000000000000000000001")
NO_MESSAGE = "00000000-0000-0000-0000-000000000000"
QUEUE_MODE = "__QUEUE_MODE__"

_RANDOM_BYTES = 8 * 512
_DIGITS = re.compile("[0-9a-fA-F]{32}").fullmatch


class Minter:
    """Mints UUIDv7s that only grow, since stream runners sort by them.

    The 12 bits behind the millisecond count within it and overflow into the next one, so a burst runs
    ahead of the clock rather than repeating itself.
    """

    __slots__ = ("_at", "_last", "_random")

    def __init__(self) -> None:
        self._last = 0  # milliseconds << 12 | counter
        self._random = b""
        self._at = 0

    def mint(self) -> bytes:
        """The 16 bytes of a fresh id."""
        stamp = time.time_ns() // 1_000_000 << 12
        if stamp <= self._last:
            stamp = self._last + 1
        self._last = stamp
        at = self._at
        if at == len(self._random):
            self._random = os.urandom(_RANDOM_BYTES)
            at = 0
        self._at = at + 8
        tail = self._random[at : at + 8]
        head = (stamp >> 12 << 16 | 0x7000 | stamp & 0xFFF).to_bytes(8, "big")
        return head + bytes((tail[0] & 0x3F | 0x80,)) + tail[1:]


def uuid_text(value: bytes) -> str:
    """The 16 bytes of a UUID in its usual form, lower case."""
    h = value.hex()
    return f"{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}"


def parse_uuid(text: str) -> bytes | None:
    """The 16 bytes of a UUID in the forms PostgreSQL reads, or None."""
    digits = text.strip().removeprefix("{").removesuffix("}").replace("-", "")
    return bytes.fromhex(digits) if _DIGITS(digits) else None


def fingerprint(transaction_id: bytes) -> bytes:
    """The 128-bit BLAKE2b that stands for a transaction id in the hash sidecar."""
    return blake2b(transaction_id, digest_size=16).digest()
