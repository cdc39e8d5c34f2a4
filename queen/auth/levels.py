"""Which roles a route takes: one table over all routes, looked up with the route that will be served.

Judging the matched route and not the text of the path leaves no way to have one path judged and another
served. A route that the table doesn't know needs an admin; a path that leads to no route needs read-write, so
that strangers can't tell what exists.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto


class Level(Enum):
    """What a route demands of a token. They are sets of roles, not a ladder: see `PASSES`."""

    PUBLIC = auto()
    READ_ONLY = auto()
    WRITE_ONLY = auto()
    READ_WRITE = auto()
    ADMIN = auto()


PASSES = {
    "admin": frozenset({Level.READ_ONLY, Level.WRITE_ONLY, Level.READ_WRITE, Level.ADMIN}),
    "read-write": frozenset({Level.READ_ONLY, Level.WRITE_ONLY, Level.READ_WRITE}),
    "read-only": frozenset({Level.READ_ONLY}),
    "write-only": frozenset({Level.WRITE_ONLY}),
}


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked of a caller of a route. ``scoped``: it shows and changes things of one tenant only."""

    level: Level
    scoped: bool


# Method and path with * for each parameter. Below "cell": routes about the broker itself, for its operators.
_TABLE = """
scoped write-only
POST /api/v1/push
POST /api/v1/timers
POST /api/v1/ephemeral/push
scoped read-write
GET /api/v1/pop
GET /api/v1/pop/queue/*
GET /api/v1/pop/queue/*/partition/*
POST /api/v1/ack
POST /api/v1/ack/batch
POST /api/v1/lease/*/extend
POST /api/v1/transaction
POST /api/v1/configure
DELETE /api/v1/messages/*/*
POST /api/v1/messages/*/*/retry
POST /api/v1/dlq/*/replay
POST /api/v1/consumer-groups/*/subscription
POST /api/v1/consumer-groups/*/queues/*/seek
POST /api/v1/consumer-groups/*/queues/*/partitions/*/seek
POST /api/v1/traces
POST /api/v1/kv
PUT /api/v1/kv/*/*
DELETE /api/v1/kv/*/*
DELETE /api/v1/timers/*/*
GET /api/v1/ephemeral/pop
POST /api/v1/ephemeral/ack
POST /api/v1/ephemeral/configure
POST /api/v1/ephemeral/reset
DELETE /api/v1/ephemeral/queue/*
POST /streams/v1/queries
POST /streams/v1/cycle
scoped read-only
GET /api/v1/resources/queues
GET /api/v1/resources/queues/*
GET /api/v1/resources/queues/*/depth
GET /api/v1/resources/overview
GET /api/v1/resources/namespaces
GET /api/v1/resources/tasks
GET /api/v1/consumer-groups
GET /api/v1/consumer-groups/lagging
GET /api/v1/consumer-groups/*
GET /api/v1/messages
GET /api/v1/messages/*/*
GET /api/v1/dlq
GET /api/v1/traces/names
GET /api/v1/traces/by-name/*
GET /api/v1/traces/*/*
GET /api/v1/status/queues
GET /api/v1/status/queues/*
GET /api/v1/status/analytics
GET /api/v1/analytics/queue-lag
GET /api/v1/analytics/queue-ops
GET /api/v1/analytics/queue-parked-replicas
GET /api/v1/analytics/retention
GET /api/v1/kv/*/*
GET /api/v1/timers/*
GET /api/v1/timers/*/*
GET /api/v1/ephemeral/queues
GET /api/v1/ephemeral/queues/*/depth
POST /streams/v1/state/get
scoped admin
DELETE /api/v1/resources/queues/*
DELETE /api/v1/consumer-groups/*
DELETE /api/v1/consumer-groups/*/queues/*
DELETE /api/v1/dlq
POST /internal/api/notify
cell public
GET /health
GET /metrics
GET /metrics/prometheus
GET /
GET /assets/*
GET /auth/me
GET /auth/login
POST /auth/logout
cell read-only
GET /status
GET /api/v1/status
GET /api/v1/status/buffers
GET /api/v1/analytics/system-metrics
GET /api/v1/analytics/worker-metrics
GET /api/v1/analytics/postgres-stats
cell admin
POST /api/v1/stats/refresh
GET /api/v1/system/maintenance
POST /api/v1/system/maintenance
GET /api/v1/system/maintenance/pop
POST /api/v1/system/maintenance/pop
GET /api/v1/system/shared-state
GET /api/v1/system/kv-timers
POST /api/v1/system/kv-timers
GET /api/v1/system/ephemeral
POST /api/v1/system/ephemeral
GET /internal/api/shared-state/stats
GET /internal/api/inter-instance/stats
"""

UNCLASSIFIED = Demand(Level.ADMIN, scoped=False)
_PARAMETER = re.compile(r"<[^>]*>")


def _read(table: str) -> dict[tuple[str, str], Demand]:
    demands: dict[tuple[str, str], Demand] = {}
    demand = UNCLASSIFIED
    for line in table.strip().splitlines():
        first, second = line.split()
        if first in ("scoped", "cell"):
            demand = Demand(Level[second.upper().replace("-", "_")], first == "scoped")
        else:
            demands[first, second] = demand
    return demands


DEMANDS = _read(_TABLE)


def demand_of_route(method: str, rule: str) -> Demand:
    """What a registered route asks; ``rule`` is its pattern, as in ``/api/v1/pop/queue/<queue>``."""
    return DEMANDS.get(("GET" if method == "HEAD" else method, _PARAMETER.sub("*", rule)), UNCLASSIFIED)


def demand_of_nothing(path: str) -> Demand:
    """What a path asks that leads to no route. The start page and its files need no token, there or not."""
    public = path == "/" or path.startswith(("/assets/", "/favicon"))
    return Demand(Level.PUBLIC if public else Level.READ_WRITE, scoped=False)
