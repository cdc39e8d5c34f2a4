"""Retention: deletes what the options of queues let go, at one broker at a time.

A cycle asks for the partitions that have something to delete, and takes bites off them. What it costs
depends on how much there is to delete, not on how many partitions exist.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import psycopg
from gevent.pool import Pool

from queen.db import metrics, retention
from queen.db.database import Database
from queen.db.errors import ConnectionLost, StatementFailed, Unavailable
from queen.db.retention import Due, Place
from queen.engine.identifiers import uuid_text
from queen.jobs.lock import SessionLock
from queen.log import Log
from queen.settings import Settings

log = Log("retention")

LOCK = 737001

_DAY = 86_400
_CLEANUP_SECONDS = 60.0
_CLEANUP_BATCHES = 10
_WALK_BATCH = 5000
_PURGE_BATCH = 10_000

Step = Callable[[Database, Due, int], tuple[int, bool]]
Page = Callable[[Due | None, int], list[Due]]


@dataclass(slots=True)
class Swept:
    """What one cycle deleted."""

    queues: int = 0
    segments_deleted: int = 0
    txns_purged: int = 0
    max_wait_evicted: int = 0
    partitions_deleted: int = 0
    metrics_purge: int = 0
    due: int = 0
    touched: set[bytes] = field(default_factory=set)


class Retention:
    """The retention job of one broker. ``stopping`` tells a long cycle to come to its end."""

    def __init__(self, settings: Settings, database: Database, lock: SessionLock, stopping: Callable[[], bool]) -> None:
        self._database = database
        self._lock = lock
        self._stopping = stopping
        self._batch = settings.retention_batch_size
        self._parallelism = settings.retention_parallelism
        self._cap = settings.retention_due_cap or self._batch * self._parallelism * 5
        self._cleanup_seconds = settings.partition_cleanup_days * _DAY if settings.partition_cleanup else None
        self._metrics_seconds = settings.metrics_retention_days * _DAY
        self._walk_seconds = settings.retention_safety_walk_ms / 1000
        self._walked = time.monotonic()
        self._cleaned = float("-inf")
        # Where each phase goes on when the partitions that are due were more than a cycle's share.
        self._places: dict[str, Due | None] = {}
        self._cleanup_place: Place | None = None

    def cycle(self) -> Swept | None:
        """One pass over what is due; None when another broker is at it. Raises what statements raise."""
        try:
            if not self._lock.acquire():
                return None
        except psycopg.Error as error:
            raise Unavailable(str(error).strip()) from None
        try:
            return self._sweep()
        finally:
            self._lock.release()

    def _sweep(self) -> Swept:
        started = time.monotonic()
        swept = Swept()
        now = retention.now(self._database)
        database = self._database

        def rules(after: Due | None, limit: int) -> list[Due]:
            return retention.retention_due(database, now, False, after, limit)

        def hashes(after: Due | None, limit: int) -> list[Due]:
            return retention.txns_due(database, now, after, limit)

        def evictions(after: Due | None, limit: int) -> list[Due]:
            return retention.retention_due(database, now, True, after, limit)

        swept.segments_deleted = self._phase("rules", rules, retention.retention_step, swept)
        swept.txns_purged = self._phase("hashes", hashes, retention.purge_step, swept)
        swept.max_wait_evicted = self._phase("evictions", evictions, retention.evict_step, swept)
        if time.monotonic() - self._cleaned >= _CLEANUP_SECONDS:
            self._cleaned = time.monotonic()
            swept.partitions_deleted = self._clean_up(now)
            swept.metrics_purge = self._purge_metrics(now)
            self._walk()
        swept.queues = len(swept.touched)
        self._report(swept, started)
        return swept

    def _goes_on(self) -> bool:
        """Whether the cycle may take another step: not without the lock, which a lost connection frees."""
        return not self._stopping() and self._lock.held

    def _phase(self, name: str, page: Page, step: Step, swept: Swept) -> int:
        """Takes the steps of one page of due partitions, some at a time; how many rows they deleted."""
        rows = page(self._places.get(name), self._cap)
        self._places[name] = rows[-1] if rows and rows[-1].more else None
        todo = iter([row for row in rows if row.due])
        deleted: list[int] = []

        def work() -> None:
            for due in todo:
                if not self._goes_on():
                    return
                swept.due += 1
                done = False
                try:
                    while not done and self._goes_on():
                        count, done = step(self._database, due, self._batch)
                        if count:
                            deleted.append(count)
                            swept.touched.add(due.queue_id)
                except ConnectionLost:
                    raise
                except StatementFailed as error:
                    # Somebody sits on this partition; the next lap comes by again.
                    log.sampled(30, "step failed", error=error, partition_id=uuid_text(due.partition_id))

        if self._parallelism == 1:
            work()
        else:
            workers = Pool(self._parallelism)
            started = [workers.spawn(work) for _ in range(self._parallelism)]
            try:
                workers.join(raise_error=True)
            finally:
                workers.kill()
            for worker in started:
                worker.get()
        return sum(deleted)

    def _clean_up(self, now: int) -> int:
        """Removes partitions that have long been empty, a few batches a minute."""
        removed = 0
        if self._cleanup_seconds is None:
            return removed
        for _ in range(_CLEANUP_BATCHES):
            if not self._goes_on():
                break
            cutoff = now - self._cleanup_seconds * 1_000_000
            place = retention.cleanup_step(self._database, cutoff, self._cleanup_place, self._batch)
            removed += place.changed
            self._cleanup_place = place if place.seen == self._batch else None
            if self._cleanup_place is None:
                break
        return removed

    def _purge_metrics(self, now: int) -> int:
        """Deletes old figures and old history. What goes wrong here is no reason to keep messages."""
        try:
            return metrics.purge(self._database, now - self._metrics_seconds * 1_000_000, _PURGE_BATCH)
        except ConnectionLost:
            raise
        except StatementFailed as error:
            log.sampled(60, "metrics purge failed", error=error)
            return 0

    def _walk(self) -> None:
        """Once a day looks whether the ages that everything here goes by are right."""
        if not self._walk_seconds or time.monotonic() - self._walked < self._walk_seconds:
            return
        self._walked = time.monotonic()
        place: Place | None = None
        mended = 0
        while self._goes_on():
            place = retention.walk_step(self._database, place, _WALK_BATCH)
            mended += place.changed
            if place.seen < _WALK_BATCH:
                break
        if mended:
            log.warning("ages of partitions were wrong and are mended", partitions=mended)

    def _report(self, swept: Swept, started: float) -> None:
        fields = {key: value for key, value in asdict(swept).items() if key not in ("touched", "due")}
        say = log.info if any(fields.values()) else log.debug
        say("swept", **fields, elapsed_ms=int((time.monotonic() - started) * 1000), due=swept.due)
