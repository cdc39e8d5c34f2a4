"""How the connection to PostgreSQL is encrypted, and whether the server is who it says.

TLS is required once it is on, never used only if offered.
"""

from __future__ import annotations

import os
from functools import lru_cache

from queen.settings import Settings


def parameters(settings: Settings) -> dict[str, str]:
    """libpq's parameters for the policy that the settings ask for."""
    if not settings.pg_use_ssl:
        return {"sslmode": "disable"}
    if settings.pg_ssl_root_cert:
        return {"sslmode": "verify-full", "sslrootcert": _root_file(settings.pg_ssl_root_cert.replace("\\n", "\n"))}
    if settings.pg_ssl_reject_unauthorized:
        return {"sslmode": "verify-full", "sslrootcert": "system"}
    return {"sslmode": "require"}


def label(settings: Settings) -> str:
    """The policy's name for the log."""
    if not settings.pg_use_ssl:
        return "plaintext"
    if settings.pg_ssl_root_cert:
        return "supplied-ca"
    return "webpki-roots" if settings.pg_ssl_reject_unauthorized else "accept-any"


def warning(settings: Settings) -> str | None:
    """What an operator should know of the policy, if anything."""
    if not settings.pg_use_ssl:
        return "PG_SSL_ROOT_CERT is given and not used: PG_USE_SSL is off" if settings.pg_ssl_root_cert else None
    if settings.pg_ssl_reject_unauthorized:
        return None
    if settings.pg_ssl_root_cert:
        return "PG_SSL_REJECT_UNAUTHORIZED=false is ignored: the server is verified against PG_SSL_ROOT_CERT"
    return "the connection to PostgreSQL is encrypted, but nobody checks whose server it is"


@lru_cache(maxsize=4)
def _root_file(pem: str) -> str:
    """The path of a file with the certificates: libpq reads no other. It is in memory and ends with the process."""
    number = os.memfd_create("queen-pg-ca")
    os.write(number, pem.encode())
    return f"/proc/self/fd/{number}"
