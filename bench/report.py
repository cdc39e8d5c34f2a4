"""What is printed: a table a person reads, and one line of JSON that a program reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]

_COST_COLUMNS = ("broker", "postgresql", "bench")


def line_of(document: Row) -> str:
    """The last line of the output."""
    return json.dumps(document, separators=(",", ":"))


def number(value: object, digits: int = 0) -> str:
    """A figure for a table; a dash for what could not be measured."""
    if not isinstance(value, (int, float)):
        return "-"
    return f"{value:,.{digits}f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they must be, the first to the left and the others to the right."""
    widths = [max(len(row[n]) for row in [head, *rows]) for n in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        return "  ".join(cells).rstrip()

    return "\n".join([line(head), "  ".join("-" * width for width in widths), *map(line, rows)])


def title(row: Row) -> str:
    """What was run, in a few words."""
    name = row["scenario"]
    if name == "hello":
        return f"hello, {row['connections']} connections"
    lanes = "1 lane" if row["partitions"] == 1 else f"{row['partitions']} lanes"
    if name == "idle":
        return f"idle, {row['connections']} parked pops"
    words = [f"{'pop+ack' if name == 'pop' else name} b{row['batch']}", lanes]
    if row["groups"] > 1:
        words.append(f"{row['groups']} groups")
    if name == "latency":
        words.append(f"{row['rate']:g} msg/s")
    return ", ".join(words)


def detail(row: Row, runs: Sequence[Row], key: str) -> str:
    """Everything about one row."""
    lines = [title(row), "  " + _throughput(row)]
    if len(runs) > 1:
        unit = "ms of CPU/s" if row["scenario"] == "idle" else "/s"
        each = ", ".join(number(run[key]) for run in runs)
        lines.append(f"  runs: {each} {unit} (shown: the median run)")
    if row.get("latency_ms"):
        cells = [
            [f"  {name}", *(number(value[part], 2) for part in ("p50", "p99", "max")), number(value["count"])]
            for name, value in row["latency_ms"].items()
        ]
        lines.append(table(["  ms", "p50", "p99", "max", "count"], cells))
    lines.append("  " + _cost(row))
    lines.append("  " + _health(row))
    lines += [f"  ! {text}" for text in row.get("warnings", [])]
    lines += [f"  ! {text}" for text in row.get("error_samples", [])]
    return "\n".join(line for line in lines if line.strip())


def _throughput(row: Row) -> str:
    if row["scenario"] == "idle":
        cpu = row["cpu_ms_per_s"]
        memory = row["broker_rss_bytes_per_parked_pop"]
        return (
            f"CPU ms per second: broker {number(cpu['broker'], 2)}, PostgreSQL {number(cpu['postgresql'], 2)}"
            f"; broker memory {number(memory)} bytes per parked pop"
            f"; write transactions/s {number(row.get('write_transactions_per_s'), 1)}"
        )
    if row["scenario"] == "hello":
        return f"{number(row['requests_per_s'])} requests/s"
    parts = [f"{number(row['requests_per_s'])} requests/s in {row['seconds']:.1f} s"]
    if "connections" in row:
        parts.append(f"{row['connections']} connection{'s' * (row['connections'] > 1)}")
    else:
        parts.append(f"{row['producers']} producers, {row['consumers']} consumers")
    if row["scenario"] != "pop":
        parts.insert(0, f"pushed {number(row['pushed_per_s'])}/s")
    if row["scenario"] != "push":
        parts.insert(-2, f"consumed {number(row['consumed_per_s'])}/s")
    return ", ".join(parts)


def _cost(row: Row) -> str:
    costs = row.get("cpu_s_per_1000")
    if not costs:
        return ""
    unit = "requests" if row["scenario"] == "hello" else "messages"
    parts = [
        f"CPU s per 1000 {unit}: broker {number(costs['broker'], 4)}, "
        f"PostgreSQL {number(costs['postgresql'], 4)}, generator {number(costs['bench'], 4)}"
        f" ({row['bench_core_share']:.0%} of a core)"
    ]
    if "commits_per_message" in row:
        parts.append(
            f"\n  per message: {number(row['commits_per_message'], 4)} commits, "
            f"{number(row['write_transactions_per_message'], 4)} write transactions, "
            f"{number(row['wal_bytes_per_message'])} bytes of WAL"
        )
    return "".join(parts)


def _health(row: Row) -> str:
    parts = [f"errors {row['errors']}"]
    for key, name in (
        ("empty_pops", "empty pops"),
        ("answered_while_parked", "pops answered while parked"),
        ("reconnects", "reconnects"),
        ("lost", "lost"),
        ("duplicates", "duplicates"),
        ("left_behind", "left behind"),
    ):
        if key in row:
            parts.append(f"{name} {number(row[key])}")
    if row.get("push_statuses"):
        parts.append(f"statuses {row['push_statuses']}")
    return ", ".join(parts)


def summary(medians: Sequence[Row], hello: float | None) -> str:
    """One line a row, with throughput as a multiple of the hello view's requests per second."""
    head = ["row", "pushed/s", "consumed/s", "x H", "p50 ms", "p99 ms", *(f"{n} us" for n in _COST_COLUMNS)]
    head += ["commits", "errors"]
    return table(head, [_summary_line(row, hello) for row in medians])


def _summary_line(row: Row, hello: float | None) -> list[str]:
    costs = row.get("cpu_s_per_1000") or {}
    kinds = row.get("latency_ms") or {}
    main: Row = next((value for name, value in kinds.items() if name != "empty pop"), {})
    rate = row.get("messages_per_s")
    return [
        title(row),
        number(row.get("pushed_per_s") or None),
        number(row.get("consumed_per_s") or None),
        number(rate / hello if hello and rate and row["scenario"] != "latency" else None, 2),
        number(main.get("p50"), 2),
        number(main.get("p99"), 2),
        *(number(_micros(costs.get(name)), 1) for name in _COST_COLUMNS),
        number(row.get("commits_per_message"), 3),
        number(row["errors"]),
    ]


def _micros(seconds_per_thousand: float | None) -> float | None:
    return None if seconds_per_thousand is None else seconds_per_thousand * 1000


def round_trips(medians: Sequence[Row]) -> Row:
    """Server CPU in microseconds per message pushed, popped and acknowledged, by batch size.

    Only where a push row and a pop row of the same shape were measured, with both servers seen.
    """
    shapes: dict[tuple[int, int], dict[str, float]] = {}
    for row in medians:
        costs = row.get("cpu_s_per_1000") or {}
        broker, postgresql = costs.get("broker"), costs.get("postgresql")
        if row["scenario"] in ("push", "pop") and broker is not None and postgresql is not None:
            shape = (row["partitions"], row["batch"])
            shapes.setdefault(shape, {})[row["scenario"]] = (broker + postgresql) * 1000
    return {
        f"{lanes} lane{'s' * (lanes > 1)}, b{batch}": round(sum(parts.values()), 2)
        for (lanes, batch), parts in shapes.items()
        if len(parts) == 2
    }


def machine_line(machine: Row) -> str:
    """Where the figures come from."""
    load = " ".join(str(value) for value in machine["load_before"])
    return (
        f"{machine['cores']} cores, load before {load}, kernel {machine['kernel']}, "
        f"Python {machine['python']}, PostgreSQL {machine['postgresql'] or 'unknown'}"
    )
