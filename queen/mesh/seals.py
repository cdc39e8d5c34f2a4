"""Seals: what proves of every frame of a connection that its dialler wrote it, and in which order.

A seal is two keys at the end of the payload, a counter and an HMAC, which those ignore who don't know them:
``..., "_n":1,"_m":"<64 hex>"}``. Only a strict listener asks for it (mesh spec, section 4.8 C).
"""

from __future__ import annotations

import hmac
import re

from queen.mesh.frames import Unwelcome, encode

_DIGITS = 64
_AFTER = _DIGITS + len('"}')
_LONGEST = 128  # of a seal, and more
_SEAL = re.compile(rb'[{,]"_n":([1-9][0-9]{0,18}),"_m":"([0-9a-f]{64})"\}\Z')


def seal_key(secret: bytes, nonce: str) -> bytes:
    """The key of one connection's seals: of the secret and of the nonce in its HELLO."""
    return hmac.digest(secret, b"queen-mesh-frame\n" + nonce.encode(), "sha256")


def _mac(key: bytes, number: int, tag: int, sealed: bytes) -> bytes:
    return hmac.digest(key, b"%b%c%b" % (number.to_bytes(8, "big"), tag, sealed), "sha256").hex().encode()


class Sealer:
    """Seals the frames of one connection that was dialled."""

    __slots__ = ("_key", "_number")

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def seal(self, frame: bytes) -> bytes:
        """The frame with its seal; its payload is an object or empty."""
        self._number += 1
        tag, payload = frame[4], frame[5:]
        start = payload[:-1] + b"," if len(payload) > len(b"{}") else b"{"
        sealed = b'%b"_n":%d,"_m":"' % (start, self._number)
        return encode(tag, b'%b%b"}' % (sealed, _mac(self._key, self._number, tag, sealed)))


class SealCheck:
    """Checks the frames of one accepted connection. Some may be missing, but none comes twice or late."""

    __slots__ = ("_key", "_last")

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._last = 0

    def check(self, tag: int, payload: bytes) -> None:
        """Raises `Unwelcome` for a frame that the dialler didn't write, or that is not newer than the last."""
        seal = _SEAL.search(payload[-_LONGEST:])
        if seal is None:
            raise Unwelcome("frame without a seal")
        number = int(seal[1])
        if not hmac.compare_digest(_mac(self._key, number, tag, payload[:-_AFTER]), seal[2]):
            raise Unwelcome("frame with a broken seal")
        if number <= self._last:
            raise Unwelcome(f"frame {number} came after frame {self._last}")
        self._last = number
