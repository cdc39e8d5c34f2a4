"""Which class a request is of, by method and path alone. What nobody classified is blocked."""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from typing import NamedTuple


class Class(Enum):
    """What a request needs: see `queen.proxy.principals`."""

    BLOCKED = "blocked"
    OPERATOR = "operator"
    PRODUCE = "produce"
    CONSUME = "consume"
    QUEUE_ADMIN = "queue admin"
    GATED = "gated"
    READ = "read"


class Route(NamedTuple):
    """A class. A gated one names the feature of the plan and what the operation does to storage:

    read, grow (blocked like a push), open (never blocked: the way back under a quota) or mixed (its body tells).
    """

    of: Class
    feature: str = ""
    kind: str = ""


BLOCKED = Route(Class.BLOCKED)
_OPERATOR = Route(Class.OPERATOR)
_PRODUCE = Route(Class.PRODUCE)
_CONSUME = Route(Class.CONSUME)
_QUEUE_ADMIN = Route(Class.QUEUE_ADMIN)
_READ = Route(Class.READ)

_OPERATORS = frozenset(
    {
        "/api/v1/status",
        "/api/v1/status/buffers",
        "/api/v1/analytics/system-metrics",
        "/api/v1/analytics/worker-metrics",
        "/api/v1/analytics/postgres-stats",
        "/api/v1/system/maintenance",
        "/api/v1/system/maintenance/pop",
        "/metrics/prometheus",
    }
)
_CLOSED = frozenset({"/api/v1/stats/refresh", "/metrics", "/status", "/api/v1/pop", "/api/v1/pop/"})
_CLOSED_BELOW = ("/api/v1/migration", "/api/v1/system", "/internal")
_EPHEMERAL = {
    ("POST", "push"): "grow",
    ("POST", "ack"): "open",
    ("POST", "configure"): "open",
    ("POST", "reset"): "open",
    ("GET", "pop"): "open",
    ("GET", "queues"): "read",
}
_READ_BELOW = ("resources", "status", "analytics", "consumer-groups", "traces", "messages")
_SEEN = ("GET", "HEAD")


@lru_cache(maxsize=8192)
def classify(method: str, path: str) -> Route:
    """The class of a request; ``path`` as it was sent, without the query."""
    if path in _OPERATORS:
        return _OPERATOR
    if path in _CLOSED or path.startswith(_CLOSED_BELOW):
        return BLOCKED
    # Paths that the broker might read otherwise than we do are nobody's.
    if "//" in path or "/./" in path or "/../" in path or path.endswith(("/.", "/..")) or not path.isascii():
        return BLOCKED
    if path.startswith("/api/v1/"):
        return _api(method, path[8:])
    if path.startswith("/streams/"):
        kind = "mixed" if method == "POST" and path == "/streams/v1/cycle" else "open"
        return Route(Class.GATED, "streams", kind)
    if path == "/api" or path.startswith("/api/"):
        return BLOCKED
    return _READ if method in _SEEN else BLOCKED


def _api(method: str, rest: str) -> Route:
    if rest in ("push", "transaction"):
        return _PRODUCE
    if rest in ("ack", "ack/batch") or rest.startswith(("pop/queue/", "lease/")):
        return _CONSUME
    if rest == "configure":
        return _QUEUE_ADMIN
    head, _, tail = rest.partition("/")
    if head in ("kv", "timers", "ephemeral"):
        return _gated(method, head, tail)
    if method == "DELETE" and (rest == "dlq" or rest.startswith(("resources/queues/", "messages/"))):
        return _QUEUE_ADMIN
    if method in ("DELETE", "POST") and head == "consumer-groups":
        return _QUEUE_ADMIN
    if method == "POST" and is_retry(rest):
        return _QUEUE_ADMIN
    if method == "POST" and rest == "traces":
        return Route(Class.GATED, "traces", "open")
    if method in _SEEN and (head in _READ_BELOW or rest == "dlq"):
        return _READ
    return BLOCKED


def is_retry(rest: str) -> bool:
    """Whether a path below /api/v1/ is the retry of a dead letter, which pushes a message."""
    parts = rest.split("/")
    return len(parts) == 4 and parts[0] == "messages" and parts[3] == "retry" and all(parts)


def _gated(method: str, feature: str, tail: str) -> Route:
    if feature == "ephemeral":
        kind = _EPHEMERAL.get((method, tail))
        parts = tail.split("/")
        if method == "GET" and len(parts) == 3 and parts[0] == "queues" and parts[2] == "depth":
            kind = "read"
        elif method == "DELETE" and len(parts) == 2 and parts[0] == "queue":
            kind = "open"
    elif not tail:
        kind = "mixed" if method == "POST" else None
    elif feature == "kv":
        kind = {"GET": "read", "PUT": "grow", "DELETE": "open"}.get(method)
    else:
        kind = {"GET": "read", "DELETE": "open"}.get(method)
    return BLOCKED if kind is None else Route(Class.GATED, feature, kind)
