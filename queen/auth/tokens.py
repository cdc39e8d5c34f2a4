"""JSON web tokens: algorithm, key, signature, then claims. What they allow is `queen.auth.access`'s matter."""

from __future__ import annotations

import math
import time
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from queen import codec
from queen.auth.denied import Denied
from queen.auth.keyset import KeySet
from queen.log import Log
from queen.settings import JWT_ALGORITHMS, Settings

log = Log("auth")

_WEAK_SECRET_BYTES = 32
_ACCEPTED = {"RS256": ("RS256", "RS384", "RS512"), "auto": JWT_ALGORITHMS}


class Verifier:
    """Checks tokens against the keys and claims of the settings."""

    def __init__(self, settings: Settings, keys: KeySet | None) -> None:
        self._settings = settings
        self._accepted = frozenset(_ACCEPTED.get(settings.jwt_algorithm, (settings.jwt_algorithm,)))
        self._secret = settings.jwt_secret.encode()
        self._public_key = _read_public_key(settings.jwt_public_key)
        self._keys = keys
        self._jws = jwt.PyJWS(sorted(self._accepted))
        if any(name.startswith("HS") for name in self._accepted) and 0 < len(self._secret) < _WEAK_SECRET_BYTES:
            log.warning("JWT_SECRET is short: it can be guessed from any token", bytes=len(self._secret), advised=32)

    def verify(self, token: str) -> dict[str, Any]:
        """The claims of a token; raises `Denied`, a 401 unless the broker's own keys are missing (500)."""
        try:
            header = self._jws.get_unverified_header(token)
        except (jwt.PyJWTError, ValueError, RecursionError, TypeError):
            raise Denied(401, "Bad token header") from None
        algorithm = header.get("alg")
        if not isinstance(algorithm, str) or algorithm not in self._accepted:
            raise Denied(401, "Unsupported token algorithm")
        key = self._key(algorithm, header.get("kid"))
        try:
            payload = self._jws.decode(token, key, algorithms=[algorithm])
        except (jwt.PyJWTError, ValueError, RecursionError, TypeError):
            raise Denied(401, "Invalid token signature") from None
        try:
            claims = codec.loads(payload)
        except codec.JsonError:
            claims = None
        if not isinstance(claims, dict):
            raise Denied(401, "Invalid token claims")
        self._check(claims)
        return claims

    def _key(self, algorithm: str, kid: Any) -> Any:
        if algorithm.startswith("HS"):
            if not self._secret:
                raise Denied(500, "HS secret not configured")
            return self._secret
        family = "EdDSA" if algorithm == "EdDSA" else "RS"
        if self._settings.jwt_public_key:
            wanted, name = (Ed25519PublicKey, "Ed") if family == "EdDSA" else (RSAPublicKey, "RSA")
            if isinstance(self._public_key, wanted):
                return self._public_key
            if self._public_key is not None and self._settings.jwt_algorithm == "auto":
                raise Denied(401, "Unsupported token algorithm")  # a good key, but for the other family
            raise Denied(500, f"invalid {name} public key PEM")
        key = None
        if self._keys is not None and (kid is None or isinstance(kid, str)):
            key = self._keys.find(kid, family, algorithm)
        if key is None:
            raise Denied(401, "Unknown key ID")
        return key

    def _check(self, claims: dict[str, Any]) -> None:
        """The claims about time, in whole seconds, and about whom a token is of and for."""
        settings, now, skew = self._settings, int(time.time()), self._settings.jwt_clock_skew
        expires, since, issued = (_moment(claims, name) for name in ("exp", "nbf", "iat"))
        if expires is None and settings.jwt_require_exp:
            raise Denied(401, "Invalid token claims")
        if expires is not None and now > expires + skew:
            raise Denied(401, "Token has expired")
        if since is not None and now + skew < since:
            raise Denied(401, "Token not yet valid")
        if issued is not None and issued > now + skew:
            raise Denied(401, "Token issued in the future")
        if settings.jwt_issuer and claims.get("iss") != settings.jwt_issuer:
            raise Denied(401, "Invalid token issuer")
        audience = claims.get("aud")
        if settings.jwt_audience and settings.jwt_audience not in (
            audience if isinstance(audience, list) else [audience]
        ):
            raise Denied(401, "Invalid token audience")


def _moment(claims: dict[str, Any], name: str) -> float | None:
    """A claim in seconds. One that is there and no number is refused: taken as absent it would never end."""
    if name not in claims:
        return None
    value = claims[name]
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise Denied(401, "Invalid token claims")
    return number


def _read_public_key(pem: str) -> Any:
    """The key of a PEM text, or None when it is none; then every token that needs it gets a 500."""
    if not pem:
        return None
    try:
        return load_pem_public_key(pem.encode())
    except Exception as error:
        # The library raises several kinds; none must keep a broker from serving its public routes.
        log.error("JWT_PUBLIC_KEY is not a public key in PEM form: tokens can't be checked", error=type(error).__name__)
        return None
