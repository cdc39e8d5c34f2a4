"""Metrics of the whole broker: as JSON, and as text that Prometheus reads."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from flask import Blueprint

from queen.api.answers import Answer, json_answer
from queen.api.http import Request, direct
from queen.db import metrics as stored
from queen.db.errors import StatementFailed, Unavailable
from queen.engine import figures
from queen.log import Log

blueprint = Blueprint("metrics", __name__)

log = Log("metrics")

# Of the totals of all brokers: the end of the family's name, and the column.
_CLUSTER = {
    "push_requests": "push_request_count",
    "pop_requests": "pop_request_count",
    "ack_requests": "ack_request_count",
    "transactions": "transaction_count",
    "push_messages": "push_message_count",
    "pop_messages": "pop_message_count",
    "ack_messages": "ack_message_count",
    "db_errors": "db_error_count",
    "dlq": "dlq_count",
}
_QUEUES = {
    "pop_messages_per_minute": "pop_count",
    "pop_empty_per_minute": "pop_empty_count",
    "push_requests_per_minute": "push_request_count",
    "push_messages_per_minute": "push_message_count",
    "transactions_per_minute": "transaction_count",
    "parked_consumers": "parked_count",
    "metrics_age_seconds": "age_seconds",
}

Labels = dict[str, str]
Sample = tuple[Labels, float | int]


@blueprint.get("/metrics")
@direct
def metrics(request: Request) -> Answer:
    """The figures of this broker since its workers started; some have no meaning here and are 0."""
    workers = figures.gather(request.engine.siblings.directory)
    counts = _counts(workers)
    return json_answer(
        {
            "uptime": _uptime(workers),
            "requests": {
                "total": counts["push_requests"] + counts["pop_requests"] + counts["ack_requests"],
                "rate": 0,
            },
            "messages": {
                "total": counts["push_messages"] + counts["pop_messages"] + counts["ack_messages"],
                "rate": 0,
            },
            "database": {
                "poolSize": _sum(workers, "pool_size"),
                "idleConnections": _sum(workers, "pool_idle"),
                "waitingRequests": _sum(workers, "pool_waiting"),
            },
            "memory": {"rss": _sum(workers, "rss"), "heapTotal": 0, "heapUsed": 0, "external": 0, "arrayBuffers": 0},
            "cpu": {"user": 0, "system": 0},
        }
    )


@blueprint.get("/metrics/prometheus")
@direct
def prometheus(request: Request) -> Answer:
    """The same and more. What needs the database is left out while it is away: the answer is always 200."""
    families = [*_of_broker(request)]
    try:
        families += _of_cluster(stored.summary(request.engine.database))
    except (Unavailable, StatementFailed) as error:
        log.sampled(60, "cluster metrics can't be read", error=error)
    return Answer(
        200, "".join(families).encode(), (("Cache-Control", "no-cache"),), "text/plain; version=0.0.4; charset=utf-8"
    )


def _of_broker(request: Request) -> Iterator[str]:
    workers = figures.gather(request.engine.siblings.directory)
    counts = _counts(workers)
    yield _family("uptime_seconds", "gauge", "Seconds since the broker started", [({}, _uptime(workers))])
    yield _family("process_resident_memory_bytes", "gauge", "Memory of all workers", [({}, _sum(workers, "rss"))])
    for verb in ("push", "pop", "ack"):
        for what in ("requests", "messages"):
            name = f"process_{verb}_{what}_total"
            yield _family(name, "counter", f"{verb} {what} of this broker", [({}, counts[f"{verb}_{what}"])])
    parked: dict[str, int] = {}
    for worker in workers:
        for queue, count in worker["parked"].items():
            parked[queue] = parked.get(queue, 0) + count
    yield _family(
        "parked_long_polls", "gauge", "Pops waiting at this broker", [({"queue": q}, n) for q, n in parked.items()]
    )
    lag = _sum(workers, "lag_ms") / max(_sum(workers, "lag_count"), 1)
    yield _family("event_loop_lag_avg_milliseconds", "gauge", "How late greenlets run", [({}, round(lag, 3))])
    size, idle = _sum(workers, "pool_size"), _sum(workers, "pool_idle")
    for state, value in (("size", size), ("idle", idle), ("active", size - idle)):
        yield _family(f"db_pool_{state}", "gauge", f"Connections to PostgreSQL: {state}", [({}, value)])
    enabled = int(request.engine.flags.push_maintenance)
    yield _family("maintenance_mode_enabled", "gauge", "Whether pushes are diverted", [({}, enabled)])
    spool = request.spool.statistics()
    for name, about, number in (
        ("pending", "Pushes on the disk", spool.pending),
        ("failed", "Pushes that could not be written to it", spool.failed),
        ("db_healthy", "Whether the database seems to be there", int(spool.healthy)),
        ("bytes", "Bytes on it", spool.bytes),
        ("oldest_age_seconds", "Age of the oldest file on it", spool.oldest_seconds),
        ("quarantined_files", "Files put aside", spool.quarantined_files),
        ("quarantined_events", "Pushes in them", spool.quarantined_events),
    ):
        yield _family(f"file_buffer_{name}", "gauge", about, [({}, number)])


def _of_cluster(summary: dict[str, Any]) -> Iterator[str]:
    totals: dict[str, Any] = summary.get("totals") or {}
    scope = {"scope": "cluster"}
    for name, column in _CLUSTER.items():
        yield _family(f"cluster_{name}_total", "counter", "Of all brokers, ever", [(scope, totals.get(column, 0))])
    outcomes: list[Sample] = [
        ({**scope, "result": result}, totals.get(f"ack_{result}_count", 0)) for result in ("success", "failed")
    ]
    yield _family("cluster_ack_total", "counter", "Acks of all brokers, ever", outcomes)
    queues = summary["queues"]
    for name, column in _QUEUES.items():
        yield _family(
            f"queue_{name}", "gauge", "Of the last minute", [({"queue": q["name"]}, q[column]) for q in queues]
        )
    lags: list[Sample] = [
        ({"queue": q["name"], "stat": stat}, q[f"{stat}_lag_ms"]) for q in queues for stat in ("avg", "max")
    ]
    yield _family("queue_pop_lag_milliseconds", "gauge", "Age of messages when they were delivered", lags)
    acks: list[Sample] = [
        ({"queue": q["name"], "result": result}, q[f"ack_{result}_count"])
        for q in queues
        for result in ("success", "failed")
    ]
    yield _family("queue_ack_per_minute", "gauge", "Of the last minute", acks)
    dead: dict[str, int] = summary["deadLetters"]
    yield _family("dlq_depth", "gauge", "Dead letters", [(scope, sum(dead.values()))])
    yield _family("dlq_depth_by_queue", "gauge", "Dead letters", [({"queue": q}, n) for q, n in dead.items()])


def _family(name: str, kind: str, about: str, samples: Iterable[Sample]) -> str:
    lines = [f"# HELP queen_{name} {about}\n# TYPE queen_{name} {kind}\n"]
    for labels, value in samples:
        text = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
        lines.append(f"queen_{name}{{{text}}} {value}\n" if text else f"queen_{name} {value}\n")
    return "".join(lines)


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _counts(workers: list[dict[str, Any]]) -> dict[str, int]:
    names = [f"{verb}_{what}" for verb in ("push", "pop", "ack") for what in ("requests", "messages")]
    return {name: sum(worker["counts"][name] for worker in workers) for name in names}


def _sum(workers: list[dict[str, Any]], name: str) -> int:
    return sum(worker[name] for worker in workers)


def _uptime(workers: list[dict[str, Any]]) -> int:
    return int(time.time() - min((worker["started"] for worker in workers), default=time.time()))
