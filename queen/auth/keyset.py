"""The public keys of an identity provider, fetched from its key-set URL (JWKS) and kept up to date."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import gevent
from gevent.lock import BoundedSemaphore
from jwt.algorithms import OKPAlgorithm, RSAAlgorithm
from jwt.exceptions import PyJWTError

from queen import codec
from queen.log import Log
from queen.settings import Settings

log = Log("auth")

_MOST_BYTES = 1 << 20
_REFETCH_SECONDS = 5.0


class FetchError(Exception):
    """The key set can't be had; says why."""


@dataclass(frozen=True, slots=True)
class PublicKey:
    """One key of a set. An empty ``algorithm`` is for every algorithm of its family, RS or EdDSA."""

    kid: str
    family: str
    algorithm: str
    key: Any


class KeySet:
    """The keys of one URL. Reading them blocks only who meets an unknown key, and no two fetch at a time."""

    def __init__(self, settings: Settings, changed: Callable[[], None]) -> None:
        self._url = settings.jwt_jwks_url
        self._timeout = settings.jwt_jwks_timeout_ms / 1000
        self._interval = settings.jwt_jwks_refresh_seconds
        self._changed = changed
        self._keys: list[PublicKey] = []
        self._members: list[Any] = []
        self._tried_at = -_REFETCH_SECONDS
        self._fetching = BoundedSemaphore(1)

    def start(self) -> None:
        """Fetches the keys and starts keeping them up to date. Without them the broker serves too."""
        try:
            self._fetch()
            log.info("JWKS pre-fetch OK", keys=len(self._keys))
        except FetchError as error:
            log.warning("JWKS pre-fetch failed (will retry on demand)", error=error)
        gevent.spawn(self._refresh)

    def find(self, kid: str | None, family: str, algorithm: str) -> Any:
        """The key for a token, or None. An unknown key id has the set fetched again, every 5 seconds at most."""
        key = self._find(kid, family, algorithm)
        if key is None:
            with self._fetching:
                if time.monotonic() - self._tried_at >= _REFETCH_SECONDS:
                    self._try_to_fetch()
            key = self._find(kid, family, algorithm)
        return key

    def _find(self, kid: str | None, family: str, algorithm: str) -> Any:
        fitting = [k for k in self._keys if k.family == family and k.algorithm in ("", algorithm)]
        if kid is not None:
            return next((k.key for k in fitting if k.kid == kid), None)
        # A token that doesn't say which key must leave no choice.
        of_family = sum(k.family == family for k in self._keys)
        return fitting[0].key if fitting and of_family == 1 else None

    def _refresh(self) -> None:
        while True:
            gevent.sleep(self._interval)
            with self._fetching:
                self._try_to_fetch()

    def _try_to_fetch(self) -> None:
        try:
            self._fetch()
        except FetchError as error:
            log.sampled(60, "JWKS refresh failed; the keys of before stay", error=error)

    def _fetch(self) -> None:
        self._tried_at = time.monotonic()
        try:
            body = codec.loads(self._get())
        except codec.JsonError as error:
            raise FetchError(f"not JSON: {error}") from None
        members = body.get("keys") if isinstance(body, dict) else None
        if not isinstance(members, list):
            raise FetchError("the body has no array called keys")
        if members != self._members:
            self._members = members
            self._keys = [key for member in members if (key := _public_key(member)) is not None]
            self._changed()

    def _get(self) -> bytes:
        """The body of a plain GET: no redirects, at most 1 MiB, all within the timeout."""
        try:
            url = urlsplit(self._url)
            secure = url.scheme == "https"
            if not url.hostname or url.scheme not in ("http", "https"):
                raise FetchError("JWT_JWKS_URL must start with https:// (or http://) and name a host")
            kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
            connection = kind(url.hostname, url.port, timeout=self._timeout)
            target = (url.path or "/") + (f"?{url.query}" if url.query else "")
            try:
                with gevent.Timeout(self._timeout, FetchError(f"no answer within {self._timeout:g} s")):
                    connection.request("GET", target, headers={"Accept": "application/json"})
                    response = connection.getresponse()
                    if response.status != 200:
                        raise FetchError(f"status {response.status}")
                    body = response.read(_MOST_BYTES + 1)
            finally:
                connection.close()
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise FetchError(str(error) or type(error).__name__) from None
        if len(body) > _MOST_BYTES:
            raise FetchError(f"the body is longer than {_MOST_BYTES} bytes")
        return body


def _public_key(member: Any) -> PublicKey | None:
    """A key of the set, or None when it is of a kind that no token here uses."""
    if not isinstance(member, dict) or member.get("use", "sig") != "sig":
        return None
    kid, algorithm = member.get("kid", ""), member.get("alg", "")
    if not isinstance(kid, str) or not isinstance(algorithm, str):
        return None
    try:
        if member.get("kty") == "RSA":
            key: Any = RSAAlgorithm.from_jwk({"kty": "RSA", "n": member["n"], "e": member["e"]})
            return PublicKey(kid, "RS", algorithm, key)
        if member.get("kty") == "OKP" and member.get("crv") == "Ed25519":
            key = OKPAlgorithm.from_jwk({"kty": "OKP", "crv": "Ed25519", "x": member["x"]})
            return PublicKey(kid, "EdDSA", algorithm, key)
    except (PyJWTError, KeyError, TypeError, ValueError, AttributeError, OverflowError):
        log.sampled(60, "JWKS key skipped: it can't be read", kid=kid[:80])
    return None
