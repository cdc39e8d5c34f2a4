"""Makes tokens, good ones and forged ones."""

from __future__ import annotations

import base64
import hmac
import json
import time
from typing import Any

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa

SECRET = "a secret of the tests, which is long enough for each of the algorithms, to the last"


def token(key: Any = SECRET, algorithm: str = "HS256", headers: dict[str, Any] | None = None, **claims: Any) -> str:
    """Return a signed token; it expires in an hour unless told otherwise."""
    return jwt.encode({"exp": int(time.time()) + 3600, **claims}, key, algorithm, headers)


def unsigned(header: dict[str, Any], **claims: Any) -> str:
    """Return a token with this header and no signature."""
    return f"{_part(header)}.{_part(claims)}."


def confused(pem: bytes, **claims: Any) -> str:
    """Return a token whose HMAC key is the text of a public key."""
    signed = f"{_part({'alg': 'HS256'})}.{_part(claims)}"
    return f"{signed}.{_encoded(hmac.digest(pem, signed.encode(), 'sha256'))}"


def raw_claims(payload: bytes, secret: str = SECRET) -> str:
    """Return a well-signed token around any bytes."""
    signed = f"{_part({'alg': 'HS256'})}.{_encoded(payload)}"
    return f"{signed}.{_encoded(hmac.digest(secret.encode(), signed.encode(), 'sha256'))}"


def rsa_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def ed_key() -> ed25519.Ed25519PrivateKey:
    return ed25519.Ed25519PrivateKey.generate()


def pem(key: Any) -> bytes:
    """Return the public half as PEM."""
    encoding, form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    result: bytes = key.public_key().public_bytes(encoding, form)
    return result


def _part(value: dict[str, Any]) -> str:
    return _encoded(json.dumps(value).encode())


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
