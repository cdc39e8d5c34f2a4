"""Admission of pushes: how much may be under way, so that no load makes the broker collapse.

A push is admitted while the work under way stays below a bound; what is admitted commits within a second or
so, and its memory is bounded. The next ones stand in line with their bodies undecoded, small ones in front,
since a small client should not pay for the large batches of another. Whoever finds even the line full, or
stands in it too long, is refused, and not at once: a client that tries again at once would make the broker
spend its time on refusals.

Large pushes also leave room for the consumers. A batch is one request of its producer and two of its
consumer, a pop and an ack: served in turn, the producers would get ahead without end. So while there are
consumers, no more large pushes are under way than half of their requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import gevent
from gevent.event import Event

from queen.log import Log

log = Log("admission")

_REQUEST_WORK = 16  # kilobytes of body that cost as much as what a request costs besides
_SMALL = 2 * _REQUEST_WORK
_LARGE = 8  # pushes that may be under way beside any number of consumers
_PATIENCE_SECONDS = 5.0
_REFUSAL_SECONDS = 1.0


class Overloaded(Exception):
    """More pushes are under way than can be done soon: this one was not accepted."""


@dataclass(slots=True, eq=False)
class _Waiting:
    work: int
    admitted: bool = False
    turn: Event = field(default_factory=Event)


class Admission:
    """The pushes under way in one worker, in kilobytes of work, and the line in front of it.

    ``consuming`` counts the pops and acks under way; who serves one adds it and takes it off again.
    """

    def __init__(self, most: int) -> None:
        self.consuming = 0
        self._most = most
        self._under_way = 0
        self._large_under_way = 0
        self._in_line = 0
        self._small: deque[_Waiting] = deque()
        self._large: deque[_Waiting] = deque()

    @property
    def waiting(self) -> int:
        """Requests in line."""
        return len(self._small) + len(self._large)

    @contextmanager
    def admit(self, size: int) -> Iterator[None]:
        """Admits a request whose body has ``size`` bytes for as long as the block runs; raises `Overloaded`."""
        work = _REQUEST_WORK + size // 1024
        line = self._small if work <= _SMALL else self._large
        if line or not self._fits(work):
            self._stand_in(line, work)
        else:
            self._enter(work)
        try:
            yield
        finally:
            self._under_way -= work
            self._large_under_way -= work > _SMALL
            if self.waiting:
                self._call_next()

    def _fits(self, work: int) -> bool:
        if work > _SMALL and self.consuming and self._large_under_way >= max(_LARGE, self.consuming // 2):
            return False
        return self._under_way == 0 or self._under_way + work <= self._most

    def _enter(self, work: int) -> None:
        self._under_way += work
        self._large_under_way += work > _SMALL

    def _stand_in(self, line: deque[_Waiting], work: int) -> None:
        if self._under_way + self._in_line + work > 2 * self._most:
            self._refuse(_REFUSAL_SECONDS)
        waiting = _Waiting(work)
        line.append(waiting)
        self._in_line += work
        try:
            waiting.turn.wait(_PATIENCE_SECONDS)
        finally:
            if not waiting.admitted:
                line.remove(waiting)
                self._in_line -= work
        if not waiting.admitted:
            self._refuse(0)

    def _call_next(self) -> None:
        while self.waiting:
            line = self._small or self._large
            if not self._fits(line[0].work):
                return
            waiting = line.popleft()
            self._in_line -= waiting.work
            self._enter(waiting.work)
            waiting.admitted = True
            waiting.turn.set()

    def _refuse(self, seconds: float) -> None:
        log.sampled(10, "overloaded: pushes refused", under_way_kb=self._under_way, in_line=self.waiting)
        gevent.sleep(seconds)
        raise Overloaded(f"overloaded: {self._under_way} kB of pushes are under way; try again")
