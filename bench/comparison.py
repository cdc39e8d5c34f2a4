"""A comparison as a table on the terminal and as a page's table and plot."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from bench.plot import bars
from bench.report import number, table

ROWS = ("push b1", "push b10", "push b100", "consume b1", "consume b10", "consume b100")
HEAD = ("system", *ROWS, "both b100, in / out", "p50 / p99 ms", "server us", "client us")

_BEGIN = ".. Written by scripts/bench compare --write docs:"
_END = ".. End of what it writes."

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
    """Write the plot, and the tables between two marks of the page: not every reader of it resolves includes."""
    page = directory / "performance.rst"
    before, rest = page.read_text().split(_BEGIN, 1)
    after = rest.split(_END, 1)[1]
    page.write_text(f"{before}{_BEGIN}\n\n{_restructured(document)}\n\n{_END}{after}")
    series = {title: [_rate(rows, name) for name in ROWS] for title, rows in document["medians"].items()}
    (directory / "performance.svg").write_text(bars(ROWS, series, "messages per second, log scale"))


def _rate(rows: Figures, name: str) -> float:
    return float(next(iter(rows[name]["rates"].values()))) if name in rows else 0.0


def _simple_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of reStructuredText that reads well as it is, too."""
    widths = [max(len(row[n]) for row in [head, *rows]) for n in range(len(head))]
    rule = "  ".join("=" * width for width in widths)
    made = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    top = "  ".join(cell.ljust(width) for cell, width in zip(head, widths, strict=True)).rstrip()
    return "\n".join([rule, top, rule, *made, rule])


def _restructured(document: Figures) -> str:
    whole = lines(document)
    last = 1 + len(ROWS)
    parts = [
        "Messages per second:",
        _simple_table(HEAD[:last], [line[:last] for line in whole]),
        "Both at once, the time from push to receipt, and CPU per message:",
        _simple_table([HEAD[0], *HEAD[last:]], [[line[0], *line[last:]] for line in whole]),
        fill(f"{_settings(document)}.", 112),
        _simple_table(
            ("system", "version", "lanes", "an answered push is"),
            [
                [title, document["versions"].get(title, "this checkout"), *document["facts"][title]]
                for title in document["medians"]
            ],
        ),
        *(fill(f"{title}: not available: {why}", 112) for title, why in document["not_available"].items()),
    ]
    return "\n\n".join(parts)
