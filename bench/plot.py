"""Grouped bars on a logarithmic scale, as an SVG that can be read on a light and on a dark page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

_COLOURS = ("#d6336c", "#1c7ed6", "#4dabf7", "#0ca678", "#63c7a0", "#f08c00", "#9775fa", "#868e96")
_BAR = 11
_GAP = 24
_LEFT, _TOP, _HEIGHT, _BELOW = 56, 30, 280, 72
_STYLE = (
    "text{font:12px sans-serif;fill:#333}line{stroke:#ccc}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}line{stroke:#555}}"
)


def bars(groups: Sequence[str], series: Mapping[str, Sequence[float]], title: str) -> str:
    """The picture; a value of zero has no bar."""
    values = [value for one in series.values() for value in one if value > 0]
    low = math.log10(min(values, default=1)) - 0.3  # so that the lowest has a bar too
    high = max(low + 1, math.log10(max(values, default=10)) + 0.1)
    step = len(series) * _BAR + _GAP
    width = _LEFT + len(groups) * step + 10
    bottom = _TOP + _HEIGHT

    def y(value: float) -> float:
        return bottom - _HEIGHT * (math.log10(value) - low) / (high - low)

    made = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + _BELOW}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<text x="{_LEFT}" y="18">{escape(title)}</text>',
    ]
    for power in range(math.ceil(low), math.floor(high) + 1):
        at = y(10**power)
        made.append(f'<line x1="{_LEFT}" x2="{width}" y1="{at:.1f}" y2="{at:.1f}"/>')
        made.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{10**power:,}</text>')
    for place, group in enumerate(groups):
        left = _LEFT + place * step + _GAP / 2
        middle = left + len(series) * _BAR / 2
        made.append(f'<text x="{middle:.1f}" y="{bottom + 18}" text-anchor="middle">{escape(group)}</text>')
        for n, (name, row) in enumerate(series.items()):
            if row[place] > 0:
                top = y(row[place])
                made.append(
                    f'<rect x="{left + n * _BAR:.1f}" y="{top:.1f}" width="{_BAR - 2}" height="{bottom - top:.1f}" '
                    f'fill="{_COLOURS[n % len(_COLOURS)]}"><title>{escape(name)}: {row[place]:,.0f}</title></rect>'
                )
    x, line = float(_LEFT), bottom + 36
    for n, name in enumerate(series):
        if x + 20 + 6.8 * len(name) > width:
            x, line = float(_LEFT), line + 18
        made.append(f'<rect x="{x:.0f}" y="{line}" width="10" height="10" fill="{_COLOURS[n % len(_COLOURS)]}"/>')
        made.append(f'<text x="{x + 14:.0f}" y="{line + 10}">{escape(name)}</text>')
        x += 26 + 6.6 * len(name)
    return "\n".join([*made, "</svg>", ""])
