"""The scenarios by name, and how several runs of one are compared."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from bench.measure import Figures, Machine
from bench.run import Backlog, Options
from bench.throughput import both, pop, push
from bench.waiting import idle, latency
from bench.workload import Target

SCENARIOS: dict[str, Callable[[Target, Machine, Options, Backlog], Figures]] = {
    "push": push,
    "pop": pop,
    "both": both,
    "latency": latency,
    "idle": idle,
}


def median_run(runs: list[Figures]) -> Figures:
    """The run in the middle, so that all its figures belong together."""

    def key(run: Figures) -> float:
        value = run[primary_key(run)]
        return value if isinstance(value, (int, float)) else 0.0

    ordered = sorted(runs, key=key)
    return ordered[(len(ordered) - 1) // 2]


def primary_key(run: Figures) -> str:
    """The figure by which runs of a scenario are compared."""
    return "server_cpu_ms_per_s" if run["scenario"] == "idle" else "messages_per_s"


def median_of(runs: list[Figures], key: str) -> float:
    """The median of one figure."""
    return statistics.median(value for run in runs if isinstance(value := run[key], (int, float)))
