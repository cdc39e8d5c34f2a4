"""What the mesh counted, summed over the workers of a broker: the body of the internal statistics routes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from queen.mesh.peers import Peer
from queen.settings import Settings

_SUMS = (
    "sent",
    "dropped",
    "received",
    "handshake_failures",
    "frames_rejected",
    "nonce_replays",
    "peers_refused",
    "flips_contradicted",
)


@dataclass(slots=True)
class Numbers:
    """The counters of one worker. ``resolved`` is, by peer, the address it is connected to; ``ages`` the
    seconds since a peer was heard, by server id."""

    resolved: list[str | None] = field(default_factory=list)
    sent: int = 0
    dropped: int = 0
    received: int = 0
    handshake_failures: int = 0
    frames_rejected: int = 0
    nonce_replays: int = 0
    peers_refused: int = 0
    flips_contradicted: int = 0
    ages: dict[str, float] = field(default_factory=dict)
    bind_error: str | None = None

    def as_object(self) -> dict[str, Any]:
        """For a sibling that asks."""
        return asdict(self)

    @classmethod
    def of_object(cls, value: dict[str, Any]) -> Numbers:
        """From a sibling's answer, who may be of another release while workers are being replaced."""
        return cls(**{name: value[name] for name in cls.__slots__ if name in value})


def no_mesh() -> dict[str, Any]:
    """The body of a broker without peers."""
    return {"enabled": False, "reason": "no_peers"}


def broker_body(settings: Settings, peers: Sequence[Peer], workers: Sequence[Numbers]) -> dict[str, Any]:
    """The body of a broker with peers, from the counters of all its workers."""
    bind_error = next((worker.bind_error for worker in workers if worker.bind_error), None)
    if bind_error is not None:
        return {**no_mesh(), "bind_error": bind_error}
    total = {name: sum(getattr(worker, name) for worker in workers) for name in _SUMS}
    ages: dict[str, float] = {}
    for worker in workers:
        for server_id, age in worker.ages.items():
            ages[server_id] = min(age, ages.get(server_id, age))
    dead = sum(age > settings.sync_dead_threshold_ms / 1000 for age in ages.values())
    workers = [worker for worker in workers if len(worker.resolved) == len(peers)]
    return {
        "server_id": settings.server_id,
        "transport": "tcp-mesh",
        "port": settings.mesh_port,
        "peer_count": len(peers),
        "peers": [_peer(peer, [worker.resolved[at] for worker in workers]) for at, peer in enumerate(peers)],
        "servers_alive": len(ages) - dead,
        "servers_dead": dead,
        "messages_sent": total["sent"],
        "messages_received": total["received"],
        "messages_dropped": total["dropped"],
        "signature_failures": total["handshake_failures"],
        "handshake_failures": total["handshake_failures"],
        "sequence_rejections": 0,
        "frames_rejected": total["frames_rejected"],
        "nonce_replays": total["nonce_replays"],
        "peers_refused": total["peers_refused"],
        "flips_contradicted": total["flips_contradicted"],
        "enabled": True,
        "running": True,
    }


def _peer(peer: Peer, resolved: Sequence[str | None]) -> dict[str, Any]:
    """A peer is connected when any worker is."""
    address = next((address for address in resolved if address), None)
    return {
        "host": peer.host,
        "port": peer.port,
        "connected": address is not None,
        "resolved": address is not None,
        "resolved_ip": address,
    }
