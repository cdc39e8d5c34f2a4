"""A chart of usage as rectangles: the template draws them as SVG, without any script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from queen.proxy.pxdb import Row

WIDTH = 720.0
HEIGHT = 160.0

_GAP = 0.25


@dataclass(frozen=True, slots=True)
class Bar:
    """A rectangle; (0, 0) is the upper left corner of the chart."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Step:
    """One step of time with the bars of what was pushed and what was delivered."""

    at: datetime
    pushed: int
    delivered: int
    x: float
    width: float
    pushed_bar: Bar
    delivered_bar: Bar


@dataclass(frozen=True, slots=True)
class Chart:
    """Steps in their order, the value at the top, and the sums."""

    steps: Sequence[Step]
    top: int
    pushed: int
    delivered: int
    requests: int


def chart(rows: Sequence[Row]) -> Chart:
    """The chart of rows with step, pushed, delivered and reqs."""
    top = _round_up(max((max(row["pushed"], row["delivered"]) for row in rows), default=0))
    width = WIDTH / max(len(rows), 1)
    bar = width * (1 - _GAP) / 2
    steps = []
    for number, row in enumerate(rows):
        x = number * width
        left = x + width * _GAP / 2
        steps.append(
            Step(
                row["step"],
                row["pushed"],
                row["delivered"],
                round(x, 2),
                round(width, 2),
                _bar(left, bar, row["pushed"], top),
                _bar(left + bar, bar, row["delivered"], top),
            )
        )
    return Chart(
        steps,
        top,
        sum(row["pushed"] for row in rows),
        sum(row["delivered"] for row in rows),
        sum(row["reqs"] for row in rows),
    )


def _bar(x: float, width: float, value: int, top: int) -> Bar:
    # What isn't nothing is seen.
    height = max(value / top * HEIGHT, 1.5) if value else 0.0
    return Bar(round(x, 2), round(HEIGHT - height, 2), round(width, 2), round(height, 2))


def _round_up(value: int) -> int:
    """The next number that reads well at the top of a chart; at least 1."""
    unit = 1
    while True:
        for tenths in (10, 15, 20, 25, 30, 40, 50, 60, 80):
            if tenths * unit % 10 == 0 and tenths * unit // 10 >= value:
                return tenths * unit // 10
        unit *= 10
