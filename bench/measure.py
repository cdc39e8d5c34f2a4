"""Samples at the edges of a measurement, and the figures of what lies between two of them."""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from bench.cpu import Tree, is_local, listener, postmaster_of
from bench.database import Counters, Database
from bench.loop import KIND_NAMES, Loop

Figures = dict[str, object]
SAMPLES_KEPT = 5
_IDS = re.compile(r"[0-9a-f-]{36}|\d+")


@dataclass
class Counts:
    """What the clients of one run counted, from its first request on."""

    pushed: int = 0
    consumed: int = 0
    empty_pops: int = 0
    errors: int = 0
    error_samples: list[str] = field(default_factory=list)
    statuses: dict[str, int] = field(default_factory=dict)
    _shapes: set[str] = field(default_factory=set)

    def error(self, what: str, status: int, body: bytes) -> None:
        """Count an answer that is not the one a healthy broker gives; keep the first few that differ."""
        self.errors += 1
        if len(self.error_samples) < SAMPLES_KEPT:
            text = body[:200].decode("utf-8", "replace").strip()
            shape = _IDS.sub("", text)
            if shape not in self._shapes:
                self._shapes.add(shape)
                self.error_samples.append(f"{what}: {status or 'connection lost'} {text}")


@dataclass(frozen=True)
class Sample:
    """Everything cumulative at one moment."""

    at_ns: int
    pushed: int
    consumed: int
    empty_pops: int
    seen: tuple[int, ...]
    broker_ns: int | None
    postgres_ns: int | None
    bench_ns: int
    database: Counters | None


class Machine:
    """Where broker, database and generator run, as far as it can be seen from here."""

    def __init__(self, host: str, port: int, database: Database | None) -> None:
        self.database = database
        self.load_before = os.getloadavg()
        root = postmaster_of(database.backend) if database else None
        self.postgres = Tree(root) if root else None
        broker = listener(port) if is_local(host) else None
        outside = frozenset({root} if root else ()) | {os.getpid()}
        self.broker = Tree(broker, outside) if broker else None

    def notes(self) -> list[str]:
        """What can't be reported, and why."""
        notes = []
        if self.broker is None:
            notes.append("no CPU of the broker: no process of this machine is seen to listen on its port")
        if self.database is None:
            notes.append("no PostgreSQL figures: give --pg or the PG_* variables")
        elif self.postgres is None:
            notes.append("no CPU of PostgreSQL: its processes are not on this machine")
        return notes

    def describe(self) -> Figures:
        """The machine and the versions, for the report."""
        return {
            "cores": len(os.sched_getaffinity(0)),
            "load_before": [round(value, 2) for value in self.load_before],
            "kernel": platform.release(),
            "python": platform.python_version(),
            "postgresql": self.database.version if self.database else None,
        }


def open_window(machine: Machine, loop: Loop, counts: Counts) -> Sample:
    """Read every counter, the clock last."""
    database = machine.database.counters() if machine.database else None
    return replace(_sample(machine, loop, counts), database=database)


def close_window(machine: Machine, loop: Loop, counts: Counts) -> Sample:
    """Read every counter, the clock first, so that the cost of asking PostgreSQL is not in between."""
    closing = _sample(machine, loop, counts)
    database = machine.database.counters() if machine.database else None
    return replace(closing, database=database)


def _sample(machine: Machine, loop: Loop, counts: Counts) -> Sample:
    return Sample(
        at_ns=time.perf_counter_ns(),
        pushed=counts.pushed,
        consumed=counts.consumed,
        empty_pops=counts.empty_pops,
        seen=tuple(len(tally.latencies) for tally in loop.tallies),
        broker_ns=machine.broker.cpu_ns() if machine.broker else None,
        postgres_ns=machine.postgres.cpu_ns() if machine.postgres else None,
        bench_ns=time.process_time_ns(),
        database=None,
    )


def percentiles(values: Iterable[float]) -> Figures:
    """p50, p99 and max in milliseconds of latencies in nanoseconds."""
    ordered = sorted(values)
    if not ordered:
        return {"p50": None, "p99": None, "max": None, "count": 0}
    last = len(ordered) - 1

    def at(share: float) -> float:
        return round(ordered[min(last, int(share * len(ordered)))] / 1e6, 3)

    return {"p50": at(0.5), "p99": at(0.99), "max": at(1.0), "count": len(ordered)}


def latencies(loop: Loop, before: Sample, after: Sample) -> dict[str, Figures]:
    """Percentiles by kind of request, of the requests that began and ended between two samples.

    One that began before, say a long poll of the very start, says nothing about the time between.
    """
    report: dict[str, Figures] = {}
    for kind, name in enumerate(KIND_NAMES):
        tally, window = loop.tallies[kind], slice(before.seen[kind], after.seen[kind])
        pairs = zip(tally.starts[window], tally.latencies[window], strict=True)
        values = [latency for start, latency in pairs if start >= before.at_ns]
        if values:
            report[name] = percentiles(values)
    return report


def per_thousand(ns: int | None, messages: float) -> float | None:
    """CPU seconds per 1000 messages."""
    return round(ns / 1e6 / messages, 6) if ns is not None and messages else None


def between(loop: Loop, before: Sample, after: Sample, messages: float) -> Figures:
    """The figures every scenario has; `messages` is what costs are divided by."""
    seconds = (after.at_ns - before.at_ns) / 1e9
    bench_ns = after.bench_ns - before.bench_ns
    requests = sum(after.seen) - sum(before.seen)
    figures: Figures = {
        "seconds": round(seconds, 3),
        "pushed_per_s": round((after.pushed - before.pushed) / seconds, 1),
        "consumed_per_s": round((after.consumed - before.consumed) / seconds, 1),
        "requests_per_s": round(requests / seconds, 1),
        "empty_pops": after.empty_pops - before.empty_pops,
        "latency_ms": latencies(loop, before, after),
        "cpu_s_per_1000": {
            "broker": per_thousand(_difference(after.broker_ns, before.broker_ns), messages),
            "postgresql": per_thousand(_difference(after.postgres_ns, before.postgres_ns), messages),
            "bench": per_thousand(bench_ns, messages),
        },
        "bench_core_share": round(bench_ns / 1e9 / seconds, 3),
        "bench_us_per_request": round(bench_ns / 1e3 / requests, 2) if requests else None,
    }
    if before.database and after.database and messages:
        old, new = before.database, after.database
        figures["commits_per_message"] = round((new.commits - old.commits) / messages, 5)
        writes = new.write_transactions - old.write_transactions
        figures["write_transactions_per_message"] = round(writes / messages, 5)
        figures["wal_bytes_per_message"] = round((new.wal_bytes - old.wal_bytes) / messages, 1)
    return figures


def _difference(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else after - before


def say(text: str) -> None:
    """Progress, on standard error so that the report stays clean."""
    print(text, file=sys.stderr, flush=True)
