"""The tenant a request acts for, from the header that a proxy sets."""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from typing import Any

from queen.auth.denied import Denied
from queen.engine.identifiers import DEFAULT_TENANT
from queen.settings import Settings

_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}").fullmatch


class Tenancy:
    """Reads the tenant of a request, when tenancy is on."""

    def __init__(self, settings: Settings) -> None:
        self._networks = [ipaddress.ip_network(text, strict=False) for text in settings.proxy_networks()]
        self._trusts = lru_cache(maxsize=1024)(self._is_trusted)

    def tenant(self, environ: dict[str, Any]) -> bytes:
        """The tenant in 16 bytes; raises `Denied`: 400 for a bad header, 403 for one from a stranger.

        gunicorn joins a header that came twice with a comma, so that one is refused as well.
        """
        text: str | None = environ.get("HTTP_X_QUEEN_TENANT")
        if text is None:
            return DEFAULT_TENANT
        if self._networks and not self._trusts(environ.get("REMOTE_ADDR", "")):
            raise Denied(403, "tenant header not accepted from this peer")
        return _parse(text)

    def _is_trusted(self, peer: str) -> bool:
        try:
            address = ipaddress.ip_address(peer)
        except ValueError:
            return False
        mapped = getattr(address, "ipv4_mapped", None)
        return any((mapped or address) in network for network in self._networks)


@lru_cache(maxsize=16384)
def _parse(text: str) -> bytes:
    value = text.strip(" \t")
    if not value:
        return DEFAULT_TENANT
    if not _UUID(value):
        raise Denied(400, "invalid x-queen-tenant header (must be a UUID)")
    return bytes.fromhex(value.replace("-", ""))
