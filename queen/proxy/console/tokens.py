"""Session tokens: JWTs that this proxy signs, or only verifies, with one pinned algorithm.

HS256 with a secret, or EdDSA with an Ed25519 key; the public key alone makes a host that knows the sessions
another one started.
"""

from __future__ import annotations

import base64
import hashlib
import time
import uuid
from dataclasses import dataclass
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from queen.proxy.principals import ROLES
from queen.proxy.refusals import Refusal, unauthorized
from queen.proxy.settings import ProxySettings
from queen.settings import SettingsError

_REQUIRED = ["sub", "iss", "iat", "exp", "jti", "role"]


@dataclass(frozen=True, slots=True)
class Claims:
    """What a verified token says. ``parent`` is the session of the cookie that a short token was made from."""

    user_id: str
    jti: str
    expires_at: int
    role: str
    cluster: str | None
    parent: str | None


class Signer:
    """Signs and verifies; ``mode`` is ``mint``, ``verify-only`` or ``no-identity``."""

    def __init__(self, settings: ProxySettings) -> None:
        """Takes its key from the settings. Raises `SettingsError` that names an unusable one."""
        self._issuer = settings.jwt_iss
        self._signing: Any = None
        self._verifying: Any = None
        self._algorithm = "EdDSA"
        self._public: Ed25519PublicKey | None = None
        if settings.jwt_ed25519_pem:
            self._signing = _private_key(settings.jwt_ed25519_pem)
            self._public = self._verifying = self._signing.public_key()
        elif settings.jwt_ed25519_pub_pem:
            self._public = self._verifying = _public_key(settings.jwt_ed25519_pub_pem)
        elif settings.jwt_secret:
            self._signing = self._verifying = settings.jwt_secret
            self._algorithm = "HS256"
        self.kid = "hs" if self._public is None else hashlib.sha256(self._raw()).digest()[:16].hex()

    @property
    def mode(self) -> str:
        if self._signing is not None:
            return "mint"
        return "verify-only" if self._verifying is not None else "no-identity"

    def mint(self, user_id: str, seconds: int, parent: str | None = None) -> str:
        """A new token of a user; raises `Refusal` 503 when this host has no key to sign with."""
        if self._signing is None:
            raise Refusal(503, "not_configured", "no JWT signer")
        now = int(time.time())
        claims = {
            "sub": user_id,
            "iss": self._issuer,
            "iat": now,
            "exp": now + seconds,
            "jti": str(uuid.uuid4()),
            "role": "viewer",
        }
        if parent:
            claims["parent"] = parent
        return jwt.encode(claims, self._signing, algorithm=self._algorithm, headers={"kid": self.kid})

    def verify(self, token: str) -> Claims:
        """What a token says; raises `Refusal` 401 unless it is ours, whole and in its time."""
        if self._verifying is None:
            raise unauthorized("invalid credential")
        try:
            claims = jwt.decode(
                token,
                self._verifying,
                algorithms=[self._algorithm],
                issuer=self._issuer,
                options={"require": _REQUIRED, "verify_aud": False},
            )
            return _claims(claims)
        except (jwt.InvalidTokenError, ValueError) as error:
            raise unauthorized("invalid credential") from error

    def jwks(self) -> dict[str, Any]:
        """The public key for others; none under a secret."""
        if self._public is None:
            return {"keys": []}
        x = base64.urlsafe_b64encode(self._raw()).rstrip(b"=").decode()
        return {"keys": [{"kty": "OKP", "crv": "Ed25519", "alg": "EdDSA", "use": "sig", "kid": self.kid, "x": x}]}

    def _raw(self) -> bytes:
        assert self._public
        return self._public.public_bytes(Encoding.Raw, PublicFormat.Raw)


def _claims(claims: dict[str, Any]) -> Claims:
    """Raises ValueError for claims that no token of ours has."""
    jti, role = claims["jti"], claims["role"]
    cluster, parent = claims.get("cluster"), claims.get("parent")
    if not isinstance(jti, str) or not jti or role not in ROLES:
        raise ValueError("jti or role")
    if not all(value is None or isinstance(value, str) for value in (cluster, parent)):
        raise ValueError("cluster or parent")
    return Claims(str(uuid.UUID(claims["sub"])), jti, int(claims["exp"]), role, cluster, parent)


def _private_key(pem: str) -> Ed25519PrivateKey:
    try:
        key = load_pem_private_key(pem.encode(), None)
    except (ValueError, TypeError) as error:
        raise SettingsError(f"QUEEN_PROXY_JWT_ED25519_PEM is no private key in PEM: {error}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise SettingsError("QUEEN_PROXY_JWT_ED25519_PEM is no Ed25519 key")
    return key


def _public_key(pem: str) -> Ed25519PublicKey:
    try:
        key = load_pem_public_key(pem.encode())
    except ValueError as error:
        raise SettingsError(f"QUEEN_PROXY_JWT_ED25519_PUB_PEM is no public key in PEM: {error}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise SettingsError("QUEEN_PROXY_JWT_ED25519_PUB_PEM is no Ed25519 key")
    return key
