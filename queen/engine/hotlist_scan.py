"""What fills the hot-list from the database: a ring's reseeds, and one scan for all that is being popped.

A mark can be lost, and another broker's push may come without one. Every poll interval one statement asks
which partitions of the queues popped here were written lately, and one which groups were moved on purpose,
since a cursor that moved backwards writes to no partition; now and then a ring is walked in full.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import gevent
from gevent.event import Event

from queen.db.errors import StatementFailed, Unavailable
from queen.db.operations import Operations
from queen.db.records import Pending
from queen.engine.hotlist import HotList, Lane, Ring
from queen.log import Log
from queen.settings import Settings

log = Log("hotlist")

_PAGE = 10_000
_PAGES = 200
_FLOW_SECONDS = 30.0
_ACTIVE_SECONDS = 5.0
_LOOK_SECONDS = 0.05  # the shortest time between two scans that were asked for
# last_write_at is rewritten only when it is a second old, and a transaction may commit a while after it.
_LATE_MICROSECONDS = 10_000_000


class HotListScan:
    """The scans of one worker; `run` lives as long as the worker does."""

    def __init__(self, settings: Settings, operations: Operations, hotlist: HotList) -> None:
        self._operations = operations
        self._hotlist = hotlist
        self._poll_seconds = settings.pop_wait_max_ms / 1000
        self._reseed_seconds = settings.hotlist_reseed_ms / 1000
        self._full_seconds = settings.hotlist_reseed_full_ms / 1000
        self._sweep_seconds = settings.hotlist_idle_sweep_ms / 1000
        self._since: int | None = None
        self._repairs: dict[tuple[bytes, bytes, bytes], tuple[int, bytes | None]] = {}
        self._asked = Event()
        self.scans = 0
        self.reseeds = 0

    def look(self) -> None:
        """Has the next scan come soon, not when its time has come: there is news of an unknown partition."""
        self._asked.set()

    def run(self) -> None:
        swept = time.monotonic()
        while True:
            gevent.sleep(min(_LOOK_SECONDS, self._poll_seconds))
            self._asked.wait(max(self._poll_seconds - _LOOK_SECONDS, 0))
            self._asked.clear()
            try:
                self._changed()
                self._due_reseeds()
            except (Unavailable, StatementFailed) as error:
                log.sampled(30, "scan failed", error=error)
            except Exception:
                log.exception("scan failed")
            if self._sweep_seconds and time.monotonic() - swept > self._sweep_seconds:
                swept = time.monotonic()
                self._hotlist.sweep(self._sweep_seconds)

    def refresh_flow(self, lane: Lane) -> None:
        """Reads the queue's flow settings when they are older than half a minute.

        If another broker changed them, entries wait for times that no longer hold: the rings start over.
        """
        if time.monotonic() - lane.flow_read > _FLOW_SECONDS:
            flow = self._operations.queue_flow(*lane.key)
            if flow is not None:
                if flow != lane.flow:
                    self._hotlist.forget_queue(*lane.key)
                lane.flow = flow
                lane.flow_read = time.monotonic()

    def reseed(self, ring: Ring) -> None:
        """Walks every partition of the queue that has something for the group into the ring."""
        self.reseeds += 1
        ring.reseeded = ring.reseeded_full = time.monotonic()
        self._take(ring, self.walk(*ring.lane.key, ring.group))

    def walk(self, tenant: bytes, queue: bytes, group: bytes) -> Iterator[Pending]:
        """Every partition of a queue that has something for the group, page by page."""
        after: bytes | None = None
        for _ in range(_PAGES):
            page = self._operations.hotlist_reseed(tenant, queue, group, after, _PAGE)
            yield from page
            if len(page) < _PAGE:
                return
            after = page[-1].name

    def _take(self, ring: Ring, found: Iterable[Pending]) -> None:
        lane = ring.lane
        for pending in found:
            lane.offsets[pending.name] = max(pending.last_offset, lane.offsets.get(pending.name, -1))
            if pending.name not in ring.entries:
                self._hotlist.mark(lane, pending.name, 1, ring.group)

    def _changed(self) -> None:
        """One statement for every queue that is being popped here."""
        now = time.monotonic()
        lanes = [lane for lane in self._hotlist.lanes.values() if now - lane.used < _ACTIVE_SECONDS or lane.sleepers]
        if not lanes:
            self._since = None
            return
        if self._since is None:
            self.look()  # the first answer only tells from when on to ask
        since = None if self._since is None else self._since - _LATE_MICROSECONDS
        self.scans += 1
        self._since, changes = self._operations.hotlist_changed([lane.key for lane in lanes], since)
        for change in changes:
            self._hotlist.heard(lanes[change.queue], change.name, change.last_offset, change.born)
        self.repair()

    def repair(self) -> None:
        """Groups that somebody moved, here or through another broker: any change of a marker counts.

        The latest time seen would not do: transactions commit in another order than they begin.
        """
        known, self._repairs = self._repairs, self._operations.hotlist_repairs()
        for key, marker in self._repairs.items():
            if known.get(key) != marker:
                tenant, queue, group = key
                self._hotlist.group_moved(tenant, queue, group, marker[1])

    def _due_reseeds(self) -> None:
        now = time.monotonic()
        for lane in list(self._hotlist.lanes.values()):
            for ring in list(lane.rings.values()):
                if ring.registered and not now - ring.used > self._full_seconds > 0:
                    self.catch_up(ring)

    def catch_up(self, ring: Ring) -> None:
        """Reseeds a ring whose time for it has come. A pop asks for it before it finds the ring empty."""
        now = time.monotonic()
        if self._full_seconds and now - ring.reseeded_full > self._full_seconds:
            self.reseed(ring)
        elif now - ring.reseeded > self._reseed_seconds:
            self._reseed_window(ring)

    def _reseed_window(self, ring: Ring) -> None:
        """The same for partitions written within some reseed intervals; without full walks, all of them."""
        if not self._full_seconds or self._since is None:
            self.reseed(ring)
            return
        self.reseeds += 1
        ring.reseeded = time.monotonic()
        tenant, queue = ring.lane.key
        since = self._since - int(max(4 * self._reseed_seconds, 120) * 1e6)
        after: Pending | None = None
        for _ in range(_PAGES):
            page = self._operations.hotlist_reseed_window(tenant, queue, ring.group, since, after, _PAGE)
            self._take(ring, page)
            if len(page) < _PAGE:
                return
            after = page[-1]
