"""A comparison as a table on the terminal and as a page's table and plot."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.plot import bars
from bench.report import number, table

ROWS = ("push b1", "push b10", "push b100", "consume b1", "consume b10", "consume b100")
HEAD = ("system", *ROWS, "both b100 in / out", "p50 / p99 ms", "server us", "client us")

Figures = dict[str, Any]


def middle(values: Sequence[float]) -> float:
    """The median."""
    return round(statistics.median(values), 1)


def median(runs: Sequence[Figures]) -> Figures:
    """The run in the middle by its slowest side, so that its figures belong together."""

    def key(run: Figures) -> float:
        if "latency_ms" in run:
            return float(run["latency_ms"]["p50"] or 1e9)
        return float(min(run["rates"].values()))

    ordered = sorted(runs, key=key)
    chosen = dict(ordered[(len(ordered) - 1) // 2])
    chosen["errors"] = sum(run["errors"] for run in runs)
    return chosen


def brief(figures: Figures) -> str:
    """One row of one run, while it goes on."""
    parts = [f"{role} {number(rate)}/s" for role, rate in figures["rates"].items()]
    if "latency_ms" in figures:
        parts.append(f"p50 {number(figures['latency_ms']['p50'], 2)} ms")
    parts.append(f"server {number(figures['server_us'], 1)} us, client {number(figures['client_us'], 1)} us")
    parts.append(f"client {figures['client_cores']} cores")
    if figures["errors"]:
        parts.append(f"{figures['errors']} errors: {figures['error_samples']}")
    return ", ".join(parts)


def _one(rows: Figures, name: str) -> str:
    """Messages per second of a row."""
    found = rows.get(name)
    return number(next(iter(found["rates"].values()))) if found else "-"


def _sum(rows: Figures, key: str) -> str:
    """What a message costs at batch 100, pushed and consumed."""
    parts = [rows[name][key] for name in ("push b100", "consume b100") if name in rows]
    return number(sum(parts), 1) if len(parts) == 2 and None not in parts else "-"


def lines(document: Figures) -> list[list[str]]:
    """The table, one line a system, in the order of the run."""
    made = []
    for title, rows in document["medians"].items():
        both = rows.get("both b100", {}).get("rates", {})
        latency = rows.get("latency", {}).get("latency_ms", {})
        made.append(
            [
                title,
                *(_one(rows, name) for name in ROWS),
                f"{number(both.get('push'))} / {number(both.get('consume'))}",
                f"{number(latency.get('p50'), 1)} / {number(latency.get('p99'), 1)}",
                _sum(rows, "server_us"),
                _sum(rows, "client_us"),
            ]
        )
    return made


def _settings(document: Figures) -> str:
    machine, options = document["machine"], document["options"]
    return (
        f"{machine['cores']} cores ({machine['processor']}), {machine['memory_gib']} GiB, kernel {machine['kernel']}, "
        f"Python {machine['python']}, PostgreSQL {machine['postgresql']}; {options['connections']} connections a side, "
        f"{options['payload']}-byte payloads, windows of {options['seconds']:g} s, "
        f"medians of {options['repeat']}. H = {number(document['hello_requests_per_s'])} requests/s"
    )


def terminal(document: Figures) -> str:
    """What a person reads."""
    made = [table(HEAD, lines(document)), "", _settings(document)]
    made += [f"{title}: not available: {why}" for title, why in document["not_available"].items()]
    for title, rows in document["medians"].items():
        made += [f"{title}, {name}: {row['errors']} errors" for name, row in rows.items() if row["errors"]]
    return "\n".join(made)


def write(document: Figures, directory: Path) -> None:
    """Write the page's table and its plot."""
    (directory / "performance.inc").write_text(_restructured(document))
    series = {title: [_rate(rows, name) for name in ROWS] for title, rows in document["medians"].items()}
    (directory / "performance.svg").write_text(bars(ROWS, series, "messages per second, log scale"))


def _rate(rows: Figures, name: str) -> float:
    return float(next(iter(rows[name]["rates"].values()))) if name in rows else 0.0


def _list_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    made = [".. list-table::", "   :header-rows: 1", ""]
    for row in [head, *rows]:
        made += [f"   {'*' if n == 0 else ' '} - {cell}" for n, cell in enumerate(row)]
    return [*made, ""]


def _restructured(document: Figures) -> str:
    made = [".. Written by scripts/bench compare --write docs; don't edit.", ""]
    made += _list_table(HEAD, lines(document))
    made += [f"{_settings(document)}.", ""]
    facts = [
        [title, document["versions"].get(title, "this checkout"), *document["facts"][title]]
        for title in document["medians"]
    ]
    made += _list_table(("system", "version", "lanes", "an answered push is"), facts)
    for title, why in document["not_available"].items():
        made += [f"{title}: not available: {why}", ""]
    return "\n".join(made)
