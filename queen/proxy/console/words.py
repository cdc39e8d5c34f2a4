"""How numbers, sizes and times read on the pages."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from markupsafe import Markup, escape

DASH = "\u2013"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_SPANS = ((86_400, "day"), (3600, "hour"), (60, "minute"), (1, "second"))


def number(value: Any) -> str:
    """A whole number in groups of three; a dash for none."""
    return DASH if value is None else f"{int(value):,}".replace(",", "\u202f")


def size(value: Any) -> str:
    """Bytes in the unit that reads best; a dash for none."""
    if value is None:
        return DASH
    amount, unit = float(value), 0
    while amount >= 1024 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1024, unit + 1
    return f"{amount:.1f}".removesuffix(".0") + f"\u00a0{_UNITS[unit]}"


def span(value: Any) -> str:
    """Seconds in the unit that reads best; a dash for none."""
    if value is None:
        return DASH
    for seconds, unit in _SPANS:
        if value >= seconds and (value % seconds == 0 or unit == "second"):
            count = int(value // seconds)
            return f"{number(count)}\u00a0{unit}{'' if count == 1 else 's'}"
    return "0\u00a0seconds"


def limit(value: Any) -> str:
    """A limit: a number, or that there is none."""
    return "unlimited" if value is None else number(value)


def moment(value: datetime | str | None) -> Markup:
    """A time in UTC, which the page's script turns into the reader's own; a dash for none."""
    if value is None:
        return Markup(DASH)
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            return Markup(escape(value))
    value = value.astimezone(UTC)
    return Markup('<time datetime="{}">{}</time>').format(
        value.isoformat(timespec="seconds").replace("+00:00", "Z"), f"{value:%Y-%m-%d %H:%M} UTC"
    )
