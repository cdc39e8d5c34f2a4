"""Passwords as they are kept: argon2id, and the two older forms that SQL writes.

Hashing takes tens of milliseconds and 64 MiB, so it runs in the hub's thread pool, a few at a time.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import Any

import gevent
from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError
from gevent.lock import BoundedSemaphore

from queen.proxy.pxdb import Pxdb

SHORTEST = 10
LONGEST = 1024

_AT_A_TIME = 2
_ITERATED = re.compile(r"\$sha256i\$(\d{1,7})\$([0-9a-f]{2,128})\$([0-9a-f]{64})")


class Passwords:
    """Hashes and verifies for one process."""

    def __init__(self, pxdb: Pxdb) -> None:
        self._pxdb = pxdb
        self._hasher = PasswordHasher()
        self._turn = BoundedSemaphore(_AT_A_TIME)
        # Of a password that nobody has: what an unknown address is verified against, for the same time.
        self._nobody: str | None = None

    def hash(self, password: str) -> str:
        """The form to keep of a new password."""
        return str(self._run(self._hasher.hash, password))

    def verify(self, password: str, kept: str | None) -> bool:
        """Whether a password is the kept one; None, no password, takes the time of a wrong one.

        Raises `Unavailable`, since bcrypt is the database's.
        """
        if len(password) > LONGEST:
            return False
        if kept is None:
            if self._nobody is None:
                self._nobody = self.hash(hashlib.sha256(repr(id(self)).encode()).hexdigest())
            self._run(_verify_argon2, self._hasher, password, self._nobody)
            return False
        if kept.startswith("$argon2"):
            return bool(self._run(_verify_argon2, self._hasher, password, kept))
        if kept.startswith("$sha256i$"):
            return bool(self._run(_verify_iterated, password, kept))
        if kept.startswith("$2") and "\x00" not in password:
            row = self._pxdb.row("SELECT public.crypt(%s, %s) = %s AS ok", (password, kept, kept))
            return bool(row and row["ok"])
        return False

    def outdated(self, kept: str) -> bool:
        """Whether a password that was just verified should be hashed anew."""
        return not kept.startswith("$argon2") or self._hasher.check_needs_rehash(kept)

    def _run(self, function: Any, *arguments: Any) -> Any:
        with self._turn:
            return gevent.get_hub().threadpool.apply(function, arguments)


def fault(password: str) -> str | None:
    """What is wrong with a new password, in words for its owner; None when nothing is."""
    if len(password) < SHORTEST:
        return f"A password needs at least {SHORTEST} characters."
    if len(password) > LONGEST:
        return f"A password has at most {LONGEST} characters."
    return None


def _verify_argon2(hasher: PasswordHasher, password: str, kept: str) -> bool:
    try:
        return hasher.verify(kept, password)
    except (VerificationError, InvalidHashError):
        return False


def _verify_iterated(password: str, kept: str) -> bool:
    """What the database's own hash_password writes where it has no bcrypt."""
    match = _ITERATED.fullmatch(kept)
    if match is None:
        return False
    secret = password.encode("utf-8", "surrogatepass")
    digest = hashlib.sha256(bytes.fromhex(match[2]) + secret).digest()
    for _ in range(int(match[1]) - 1):
        digest = hashlib.sha256(digest + secret).digest()
    return hmac.compare_digest(digest.hex(), match[3])
