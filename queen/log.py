"""Structured logs, one line an event: ``<time> <LEVEL> <target>: <message> key=value``.

Whatever a message or a field holds, it can't break the line: a traceback is a field too.

Every module logs through ``Log(target)``; the target names the part of the broker that speaks (boot,
fusion, hotlist ...) and the fields are what operators grep and graph. With ``json=True`` a line is one
flat JSON object instead. Nothing is logged per message, and what a hot path could repeat goes through
`Log.sampled`.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from datetime import UTC, datetime
from typing import Any

import simplejson

_PREFIX = "queen."
# What a terminal or a reader of lines could take for the end of one, or for a command.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_QUOTED = re.compile('[\\s"\x00-\x1f\x7f-\x9f]')


class Quoted(str):
    """A field's value that is shown in quotes whatever it is: readers of these lines know it so."""

    __slots__ = ()


class Log:
    """A logger bound to one target; fields are keyword arguments."""

    __slots__ = ("_logger", "_windows")

    def __init__(self, target: str) -> None:
        self._logger = logging.getLogger(_PREFIX + target)
        self._windows: dict[str, tuple[float, int]] = {}

    def debug(self, message: str, **fields: Any) -> None:
        self._emit(logging.DEBUG, message, fields)

    def info(self, message: str, **fields: Any) -> None:
        self._emit(logging.INFO, message, fields)

    def warning(self, message: str, **fields: Any) -> None:
        self._emit(logging.WARNING, message, fields)

    def error(self, message: str, **fields: Any) -> None:
        self._emit(logging.ERROR, message, fields)

    def exception(self, message: str, **fields: Any) -> None:
        """An error with the traceback of the exception being handled."""
        self._logger.error(message, extra={"fields": fields}, exc_info=True)

    def sampled(self, seconds: float, message: str, **fields: Any) -> None:
        """A warning at most once per ``seconds``; the next one says how many were ``suppressed``."""
        now = time.monotonic()
        last, suppressed = self._windows.get(message, (-seconds, 0))
        if now - last < seconds:
            self._windows[message] = (last, suppressed + 1)
            return
        self._windows[message] = (now, 0)
        if suppressed:
            fields["suppressed"] = suppressed
        self.warning(message, **fields)

    def _emit(self, level: int, message: str, fields: dict[str, Any]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, message, extra={"fields": fields})


class _Line(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        target = record.name.removeprefix(_PREFIX)
        level = "WARN" if record.levelno == logging.WARNING else record.levelname
        fields: dict[str, Any] = dict(getattr(record, "fields", {}))
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        message = _CONTROL.sub(_escaped, record.getMessage())
        text = " ".join([message, *(f"{key}={_plain(value)}" for key, value in fields.items())])
        return f"{moment:%Y-%m-%dT%H:%M:%S.%f}Z {level:>5} {target}: {text}"


class _JsonLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        level = "WARN" if record.levelno == logging.WARNING else record.levelname
        line = {
            "timestamp": f"{moment:%Y-%m-%dT%H:%M:%S.%f}Z",
            "level": level,
            "message": record.getMessage(),
        }
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        line["target"] = record.name.removeprefix(_PREFIX)
        return str(simplejson.dumps(line, default=str, encoding=None, ignore_nan=True))


def _escaped(match: re.Match[str]) -> str:
    return match.group().encode("unicode_escape").decode()


def _plain(value: Any) -> str:
    """A field's value: one with blanks, quotes or control characters is quoted."""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = str(value)
    if text == "" or isinstance(value, Quoted) or _QUOTED.search(text):
        return _CONTROL.sub(_escaped, simplejson.dumps(text))
    return text


def configure(level: str = "info", json: bool = False) -> None:
    """Sends the broker's logs to standard error. ``level`` is a name, or ``info,target=debug,...``.

    What the libraries have to warn of goes the same way, in the same form.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLine() if json else _Line())
    logging.getLogger().handlers = [handler]
    logging.getLogger("queen").setLevel(logging.INFO)
    for part in level.split(","):
        target, _, name = part.strip().rpartition("=")
        number = _LEVELS.get(name.strip().lower())
        if number is not None:
            suffix = target.strip().replace("::", ".").removeprefix(_PREFIX).strip(".")
            logging.getLogger(f"queen.{suffix}" if suffix and suffix != "queen" else "queen").setLevel(number)


_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL,
}
