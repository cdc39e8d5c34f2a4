"""Whether a request may pass: skip paths, the route's level, the token and its roles.

A token that was verified is remembered until it expires, so that a busy client costs a look-up per request.
Only good tokens are, within a bound; those of a key that was withdrawn are forgotten with it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from queen.auth.denied import Denied
from queen.auth.keyset import KeySet
from queen.auth.levels import PASSES, Demand, Level
from queen.auth.tokens import Verifier
from queen.engine.identifiers import parse_uuid
from queen.log import Log
from queen.settings import Settings

log = Log("boot")

_MOST_TOKENS = 4096
_FORBIDDEN = "Insufficient permissions"


@dataclass(frozen=True, slots=True)
class Caller:
    """What a good token says: what it passes, for how long, who it is, and the one tenant it is for.

    ``tenant`` is None for a token that is bound to none, ``until`` in seconds since 1970.
    """

    passes: frozenset[Level]
    subject: bytes | None
    tenant: bytes | None
    until: float


class Access:
    """The gate of one worker, when authentication is on."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._callers: OrderedDict[str, Caller] = OrderedDict()
        self._generation = 0
        uses_keys = settings.jwt_jwks_url and not settings.jwt_algorithm.startswith("HS")
        self._keys = KeySet(settings, self._forget) if uses_keys else None
        self._verifier = Verifier(settings, self._keys)
        paths = [path for part in settings.jwt_skip_paths.split(",") if (path := part.strip())]
        self._skipped = frozenset(paths)
        self._skipped_prefixes = tuple(path for path in paths if len(path) > 1 and path.endswith("/"))
        roles = {
            "admin": settings.jwt_role_admin,
            "read-write": settings.jwt_role_read_write,
            "read-only": settings.jwt_role_read_only,
            "write-only": settings.jwt_role_write_only,
        }
        self._roles = [(word, PASSES[role]) for role, word in roles.items() if word]

    def start(self) -> None:
        """Fetches the key set, if there is one. Call it in the worker, before the first request."""
        if self._keys is not None:
            self._keys.start()

    def check(self, environ: dict[str, Any], path: str, demand: Demand) -> Caller | None:
        """Lets a request pass and says whose it is: None on a skipped path and a public route.

        Takes the raw path, without the query. Raises `Denied`: 401, or 403 for a role that is not enough.
        """
        if demand.level is Level.PUBLIC or path in self._skipped or path.startswith(self._skipped_prefixes):
            return None
        header: str | None = environ.get("HTTP_AUTHORIZATION")
        if header is None or not header.isascii():
            raise Denied(401, "Authentication required")
        caller = self._callers.get(header)
        if caller is None:
            caller = self._verify(header)
        elif int(time.time()) > caller.until:
            self._callers.pop(header, None)
            raise Denied(401, "Token has expired")
        if demand.level not in caller.passes:
            raise Denied(403, _FORBIDDEN)
        if caller.tenant is not None and not demand.scoped:
            raise Denied(403, _FORBIDDEN)  # what is of the whole cell is not for one tenant
        return caller

    def check_tenant(self, caller: Caller | None, tenant: bytes) -> None:
        """Refuses a token on another tenant than its own, where tokens name one. Raises a 403 `Denied`."""
        if caller is None or not self._settings.jwt_tenant_claim:
            return
        if caller.tenant != tenant and not (caller.tenant is None and Level.ADMIN in caller.passes):
            raise Denied(403, _FORBIDDEN)

    def _verify(self, header: str) -> Caller:
        generation = self._generation
        token = header[7:] if header[:7].lower() == "bearer " else header
        caller = self._caller(self._verifier.verify(token.strip()))
        if generation == self._generation:  # the keys didn't change meanwhile
            self._callers[header] = caller
            if len(self._callers) > _MOST_TOKENS:
                self._callers.popitem(last=False)
        return caller

    def _forget(self) -> None:
        self._generation += 1
        self._callers.clear()

    def _caller(self, claims: dict[str, Any]) -> Caller:
        settings = self._settings
        single, several = claims.get(settings.jwt_roles_claim), claims.get(settings.jwt_roles_array_claim)
        words = ([single] if isinstance(single, str) else []) + (several if isinstance(several, list) else [])
        passes = frozenset[Level]().union(*(levels for word, levels in self._roles if word in words))
        subject, expires = claims.get("sub"), claims.get("exp")
        return Caller(
            passes,
            _subject(subject) if isinstance(subject, str) and subject else None,
            self._tenant(claims) if settings.jwt_tenant_claim else None,
            float("inf") if expires is None else float(expires) + settings.jwt_clock_skew,
        )

    def _tenant(self, claims: dict[str, Any]) -> bytes | None:
        if self._settings.jwt_tenant_claim not in claims:
            return None
        value = claims[self._settings.jwt_tenant_claim]
        tenant = parse_uuid(value) if isinstance(value, str) else None
        if tenant is None:
            raise Denied(401, "Invalid token claims")
        return tenant


def _subject(text: str) -> bytes:
    """A subject as it is stored beside messages, in columns that take no NUL."""
    try:
        if "\x00" not in text:
            return text.encode()
    except UnicodeEncodeError:
        pass
    raise Denied(401, "Invalid token claims")


def log_state(settings: Settings) -> None:
    """Tells at the start what protects the broker, and what doesn't."""
    if settings.jwt_enabled:
        log.info("JWT auth ENABLED", algorithm=settings.jwt_algorithm, skip_paths=settings.jwt_skip_paths)
    else:
        message = "JWT auth disabled — API and dashboard are open (standalone)"
        local = settings.bind_addr.strip() in ("localhost", "::1", "[::1]") or settings.bind_addr.startswith("127.")
        if local:
            log.info(message)
        else:
            log.warning(message, addr=settings.bind_addr, remedy="set JWT_ENABLED, or close the port to strangers")
    if settings.tenancy_header:
        log.info("QUEEN_TENANCY_HEADER on — native tenant scoping ENABLED", header="x-queen-tenant")
