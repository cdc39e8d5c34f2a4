"""What is told of pushes and moved cursors, gathered for a few milliseconds when there is much of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

import gevent
from gevent.event import Event

from queen.engine.hints import PartitionKey
from queen.mesh.frames import Tag, batches, item

_WAKE_SECONDS = 0.005  # between two flushes of wakes, on average
_AT_ONCE = 20  # of them that may come closer together
_DIRTY_SECONDS = 0.02
_MOST_KEYS = 200_000
_FLUSH_KEYS = 50_000

_TURN = 1000

Send = Callable[[bytes], None]
T = TypeVar("T")


class Outbox:
    """Gathers hints. One leaves at once, until there are more than one in 5 ms: then they leave together.

    Wakes go to siblings and peers. Peers also get dirty hints, every 20 ms, which say the same once more:
    older brokers mark their candidates by these. Moved cursors go to both.
    """

    def __init__(self, to_all: Send, to_peers: Send, dirty: bool) -> None:
        self._to_all = to_all
        self._to_peers = to_peers
        self._dirty_hints = dirty
        self._pushed: dict[PartitionKey, None] = {}
        self._dirty: dict[PartitionKey, None] = {}
        self._moved: dict[tuple[PartitionKey, bytes], None] = {}
        self._news = Event()
        self._dirty_news = Event()
        self._loops: list[gevent.Greenlet[[], None]] = []

    def start(self) -> None:
        self._loops = [gevent.spawn(self._send_wakes), gevent.spawn(self._send_dirty)]

    def stop(self) -> None:
        gevent.killall(self._loops, block=False)

    def pushed(self, key: PartitionKey, peers: bool) -> None:
        """A partition got messages; ``peers`` tells whether there are any besides siblings."""
        if key in self._pushed:
            return
        if len(self._pushed) < _MOST_KEYS:
            self._pushed[key] = None
            self._news.set()
        if peers and self._dirty_hints and len(self._dirty) < _MOST_KEYS:
            self._dirty[key] = None
            self._dirty_news.set()

    def moved(self, key: PartitionKey, group: bytes) -> None:
        if len(self._moved) < _MOST_KEYS:
            self._moved[key, group] = None
            self._dirty_news.set()

    def flush(self) -> None:
        """Sends the wakes gathered so far."""
        if self._pushed:
            pushed, self._pushed = self._pushed, {}
            for frame in batches(Tag.MESSAGE_AVAILABLE_BATCH, map(item, _in_turns(pushed))):
                self._to_all(frame)

    def _send_wakes(self) -> None:
        paid = 0.0  # until when the flushes so far have used up their time
        while True:
            self._news.wait()
            self._news.clear()
            self.flush()
            now = time.monotonic()
            paid = max(paid, now - _AT_ONCE * _WAKE_SECONDS) + _WAKE_SECONDS
            if paid > now:
                gevent.sleep(paid - now)

    def _send_dirty(self) -> None:
        while True:
            self._dirty_news.wait()
            gevent.sleep(_DIRTY_SECONDS)
            self._dirty_news.clear()
            self.flush()  # a dirty hint that comes behind its wake is known to be old news
            dirty, moved = _take(self._dirty), _take(self._moved)
            for frame in batches(Tag.HOTLIST_DIRTY_BATCH, map(item, _in_turns(dirty))):
                self._to_peers(frame)
            for frame in batches(Tag.HOTLIST_DIRTY_BATCH, (item(key, group) for key, group in _in_turns(moved))):
                self._to_all(frame)
            if self._dirty or self._moved:
                self._dirty_news.set()


def _take(waiting: dict[T, None]) -> list[T]:
    """Removes the oldest of what waits, as much as one flush may carry."""
    taken = list(islice(waiting, _FLUSH_KEYS))
    for key in taken:
        del waiting[key]
    return taken


def _in_turns(keys: Iterable[T]) -> Iterator[T]:
    """The keys, with a turn for other greenlets now and then."""
    for position, key in enumerate(keys):
        if position % _TURN == _TURN - 1:
            gevent.sleep(0)
        yield key
