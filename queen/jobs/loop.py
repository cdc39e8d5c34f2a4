"""A job that runs again and again in a greenlet, until it is stopped."""

from __future__ import annotations

import time
from collections.abc import Callable

import gevent
from gevent.event import Event

from queen.db.errors import StatementFailed, Unavailable
from queen.log import Log

_SHORTEST_PAUSE = 0.01
_ERROR_SECONDS = 30.0
_STOP_SECONDS = 2.0


class Loop:
    """Calls ``cycle`` every so many seconds, counted from start to start, whatever it raises.

    A cycle that takes longer delays the next one; there are never two. ``first`` is the time before the
    first, if it is another. Cycles take no more than ``share`` of the time: what only counts what is there
    must not keep a large database busy.
    """

    def __init__(
        self, log: Log, seconds: float, cycle: Callable[[], object], first: float | None = None, share: float = 1.0
    ) -> None:
        self._log = log
        self._seconds = seconds
        self._first = seconds if first is None else first
        self._cycle = cycle
        self._share = share
        self._stop = Event()
        self._greenlet: gevent.Greenlet[[], None] | None = None
        self._reported = float("-inf")
        self._suppressed = 0

    @property
    def stopping(self) -> bool:
        """Whether a long cycle should come to its end."""
        return self._stop.is_set()

    def start(self) -> None:
        self._greenlet = gevent.spawn(self._run)

    def stop(self) -> None:
        """Waits a little for the cycle under way to end, then ends it wherever it is."""
        self._stop.set()
        if self._greenlet is not None:
            self._greenlet.join(_STOP_SECONDS)
            self._greenlet.kill()

    def _run(self) -> None:
        pause = self._first
        while not self._stop.wait(max(pause, _SHORTEST_PAUSE)):
            started = time.monotonic()
            try:
                self._cycle()
            except Exception as error:
                self._report(error)
            took = time.monotonic() - started
            pause = max(self._seconds, took / self._share) - took

    def _report(self, error: Exception) -> None:
        """One line in half a minute: what fails in every cycle must not bury the log."""
        now = time.monotonic()
        if now - self._reported < _ERROR_SECONDS:
            self._suppressed += 1
            return
        self._reported = now
        fields = {"suppressed": self._suppressed} if self._suppressed else {}
        self._suppressed = 0
        if isinstance(error, Unavailable | StatementFailed):
            self._log.error("cycle failed", error=error, **fields)
        else:
            self._log.exception("cycle failed", **fields)
