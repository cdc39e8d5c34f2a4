"""Whom to dial and whom to let in: the peer list and the allow-list."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Sequence
from dataclasses import dataclass

import gevent
from gevent import socket

from queen.log import Log

log = Log("mesh")

_REFRESH_SECONDS = 30.0
_PAUSE_SECONDS = 1.0

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class Peer:
    """A broker to dial. Its name is resolved again at every dial."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_peers(text: str, default_port: int, variable: str = "QUEEN_MESH_PEERS") -> tuple[list[Peer], list[str]]:
    """The peers of a list ``host[:port], ...`` and what is to be warned of. Each peer once, in order."""
    peers: dict[Peer, None] = {}
    warnings: list[str] = []
    for raw in text.split(","):
        entry = raw.strip().removeprefix("http://").removeprefix("https://").partition("/")[0].strip()
        if not entry:
            continue
        host, port = _split(entry)
        number = _port(port) if port is not None else default_port
        if not host or number == 0:
            warnings.append(f'{variable}: "{raw.strip()}" can\'t be dialled; skipped')
            continue
        if number is None:
            warnings.append(f'{variable}: "{raw.strip()}" has no usable port; using {default_port}')
            number = default_port
        peers[Peer(host, number)] = None
    return list(peers), warnings


def _split(entry: str) -> tuple[str, str | None]:
    """Host and the text of its port, if it has one. More than one colon outside brackets is an IPv6 address."""
    if entry.startswith("["):
        host, _, tail = entry[1:].partition("]")
        return host.strip(), tail.strip().removeprefix(":").strip() if tail.strip() else None
    if entry.count(":") > 1 and _is_address(entry):
        return entry, None
    host, colon, port = entry.rpartition(":")
    return (host.strip(), port.strip()) if colon else (entry, None)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _port(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= 65_535 else None


class AllowList:
    """Which addresses may connect: ``any``, ``peers`` (what the peers' names resolve to, and loopback), or
    networks separated by commas."""

    def __init__(self, rule: str, peers: Sequence[Peer]) -> None:
        self._peers = peers if rule == "peers" else ()
        self._networks = None if rule in ("any", "peers") else parse_networks(rule)
        self._any = rule == "any"
        self._addresses: set[str] = set()
        self._asked = float("-inf")

    def allows(self, address: str) -> bool:
        """Whether a connection from an address is welcome. One from a stranger has the names looked up anew,
        so that a peer that moved is let in at its next attempt."""
        if self._any:
            return True
        ip = _canonical(address)
        if ip is None:
            return False
        if self._networks is not None:
            return any(ip in network for network in self._networks)
        if ip.is_loopback or str(ip) in self._addresses:
            return True
        if time.monotonic() - self._asked > _PAUSE_SECONDS:
            gevent.spawn(self.refresh)
        return False

    def refresh(self) -> None:
        """Looks up the names of the peers. A name that can't be looked up now keeps what it had."""
        self._asked = time.monotonic()
        found: set[str] = set()
        for peer in self._peers:
            try:
                answers = socket.getaddrinfo(peer.host, peer.port, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError) as error:
                log.sampled(30, "peer name can't be resolved", peer=peer, error=error)
                found |= self._addresses
                continue
            found |= {str(ip) for *_, where in answers if (ip := _canonical(str(where[0])))}
        self._addresses = found

    def keep_fresh(self) -> None:
        """Looks the names up again and again; runs as long as the listener does."""
        while self._peers:
            self.refresh()
            gevent.sleep(_REFRESH_SECONDS)


def parse_networks(text: str) -> list[Network]:
    """The networks of a list of CIDRs or addresses; raises ValueError naming the one that is neither."""
    return [ipaddress.ip_network(part.strip(), strict=False) for part in text.split(",") if part.strip()]


def _canonical(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
    return ip.ipv4_mapped or ip if isinstance(ip, ipaddress.IPv6Address) else ip
