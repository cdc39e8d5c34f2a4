"""How often one address may try to sign in."""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

_WINDOW_SECONDS = 60.0
_MOST_ADDRESSES = 50_000

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Throttle:
    """At most so many attempts a minute for each address; the memory of it is bounded."""

    def __init__(self, most: int = 10) -> None:
        self._most = most
        self._attempts: OrderedDict[str, list[float]] = OrderedDict()

    def wait(self, address: str) -> int:
        """0 when the attempt is let through and counted, else the seconds to wait."""
        now = time.monotonic()
        attempts = [at for at in self._attempts.pop(address, []) if now - at < _WINDOW_SECONDS]
        allowed = len(attempts) < self._most
        if allowed:
            attempts.append(now)
        self._attempts[address] = attempts
        while len(self._attempts) > _MOST_ADDRESSES:
            self._attempts.popitem(last=False)
        return 0 if allowed else max(1, int(_WINDOW_SECONDS - (now - attempts[0])) + 1)


def networks(text: str) -> list[Network]:
    """The networks of a comma list of addresses and CIDRs. Raises ValueError that names a wrong one."""
    return [ipaddress.ip_network(part.strip(), strict=False) for part in text.split(",") if part.strip()]


def client_address(environ: dict[str, Any], trusted: Sequence[Network]) -> str:
    """Who is asking: the peer, or whom a trusted peer names.

    An IPv6 address stands for its /64, of which one person has all.
    """
    peer = str(environ.get("REMOTE_ADDR") or "")
    if _within(peer, trusted):
        chain = str(environ.get("HTTP_X_FORWARDED_FOR") or environ.get("HTTP_X_REAL_IP") or "").split(",")
        # From the right, the first one that no trusted proxy has: what is left of it the client may have made up.
        for named in reversed([part.strip() for part in chain if part.strip()]):
            peer = named
            if not _within(peer, trusted):
                break
    try:
        address = ipaddress.ip_address(peer)
    except ValueError:
        return peer[:64]
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(address.ipv4_mapped or ipaddress.ip_network((address, 64), strict=False))


def _within(text: str, trusted: Sequence[Network]) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return any(address in network for network in trusted if network.version == address.version)
