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
# The variant bits of RFC 9562 in the second half of an id, for a whole supply of halves at once.
_KEEP = int.from_bytes(b"\x3f" + b"\xff" * 7) * sum(1 << 64 * k for k in range(512))
_VARIANT = int.from_bytes(b"\x80" + bytes(7)) * sum(1 << 64 * k for k in range(512))
_DIGITS = re.compile("[0-9a-fA-F]{32}").fullmatch


class Minter:
    """Mints UUIDv7s that only grow, since stream runners sort by them.

    The 12 bits behind the millisecond count within it and overflow into the next one, so a burst runs
    ahead of the clock rather than repeating itself.
    """

    __slots__ = ("_at", "_hex", "_last", "_tails")

    def __init__(self) -> None:
        self._last = 0  # milliseconds << 12 | counter
        self._tails = b""  # second halves in store, and the same in hexadecimal
        self._hex = ""
        self._at = 0

    def mint(self) -> bytes:
        """The 16 bytes of a fresh id."""
        return self.mint_many(1)[0][0]

    def mint_text(self) -> str:
        """A fresh id in its usual form."""
        return self.mint_many(1)[1][0]

    def mint_many(self, count: int) -> tuple[list[bytes], list[str]]:
        """Fresh ids, as bytes and as text."""
        ids: list[bytes] = []
        texts: list[str] = []
        first = max(time.time_ns() // 1_000_000 << 12, self._last + 1)
        self._last = first + count - 1
        for stamp in range(first, first + count):
            at = self._at
            if at == len(self._tails):
                self._refill()
                at = 0
            self._at = at + 8
            head = stamp >> 12 << 16 | 0x7000 | stamp & 0xFFF
            ids.append(head.to_bytes(8, "big") + self._tails[at : at + 8])
            front, back = f"{head:016x}", self._hex[2 * at : 2 * at + 16]
            texts.append(f"{front[:8]}-{front[8:12]}-{front[12:]}-{back[:4]}-{back[4:]}")
        return ids, texts

    def _refill(self) -> None:
        tails = int.from_bytes(os.urandom(_RANDOM_BYTES)) & _KEEP | _VARIANT
        self._tails = tails.to_bytes(_RANDOM_BYTES, "big")
        self._hex = self._tails.hex()


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
