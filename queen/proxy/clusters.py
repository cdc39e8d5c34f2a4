"""A cluster with everything that decides about its requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LIMITS = (
    "max_req_per_sec",
    "req_burst",
    "max_msgs_per_sec",
    "msgs_burst",
    "max_queues",
    "max_partitions_per_queue",
    "max_parked_pops",
    "max_payload_bytes",
    "max_batch_items",
    "max_retained_bytes",
    "max_retention_seconds",
    "monthly_msgs_quota",
)
FEATURES = frozenset({"streams", "traces", "kv", "timers", "ephemeral"})

_RANK = {"active": 0, "grace": 1, "push_blocked": 1, "suspended": 2, "deleting": 3}
_WORDS = ("active", "push_blocked", "suspended", "deleting")


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits in force; None is no limit."""

    max_req_per_sec: int | None = None
    req_burst: int | None = None
    max_msgs_per_sec: int | None = None
    msgs_burst: int | None = None
    max_queues: int | None = None
    max_partitions_per_queue: int | None = None
    max_parked_pops: int | None = None
    max_payload_bytes: int | None = None
    max_batch_items: int | None = None
    max_retained_bytes: int | None = None
    max_retention_seconds: int | None = None
    monthly_msgs_quota: int | None = None


@dataclass(frozen=True, slots=True)
class Cluster:
    """What a tenant sees as its Queen. ``status`` is the worse of the cluster's and its tenant's.

    ``broker_tenant`` is the tenant that the broker is told, and never leaves the proxy on the client's side.
    """

    id: str
    slug: str
    tenant_id: str
    tenant_slug: str
    status: str
    broker_tenant: str
    cell_slug: str
    base_url: str
    cell_secret: str | None
    plan: str = ""
    features: frozenset[str] = frozenset()
    limits: Limits = field(default_factory=Limits)

    @property
    def closed(self) -> bool:
        """Whether nothing at all is served."""
        return self.status in ("suspended", "deleting")


def from_row(row: dict[str, Any]) -> Cluster:
    """A row of the view resolved_clusters as a cluster."""
    return Cluster(
        id=str(row["id"]),
        slug=row["slug"],
        tenant_id=str(row["tenant_id"]),
        tenant_slug=row["tenant_slug"],
        status=worst(row["tenant_status"], row["status"]),
        broker_tenant=str(row["broker_tenant_uuid"]),
        cell_slug=row["cell_slug"],
        base_url=row["base_url"],
        # A line break that came along with a pasted token would end the header it is sent in.
        cell_secret="".join((row["cell_secret"] or "").split()) or None,
        plan=row["plan"],
        features=frozenset(name for name in FEATURES if row["features"].get(name) is True),
        limits=effective(row["plan_limits"], row["limit_overrides"]),
    )


def worst(*states: str) -> str:
    """The state that rules when several are given; one nobody knows counts as suspended."""
    return _WORDS[max(_RANK.get(state, 2) for state in states)]


def effective(plan: dict[str, Any], overrides: dict[str, Any]) -> Limits:
    """The plan's limits with a cluster's overrides: a number replaces, null lifts, anything else is the plan's."""
    values: dict[str, int | None] = {}
    for name in LIMITS:
        limit = plan.get(name)
        if name in overrides:
            override = overrides[name]
            if override is None or (isinstance(override, int | float) and not isinstance(override, bool)):
                limit = None if override is None else int(override)
        values[name] = limit
    return Limits(**values)
