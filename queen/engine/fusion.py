"""Fusion: many requests, one transaction, without a timer.

A job for a key that is idle is flushed at once; what arrives while that flush is in flight waits and
goes together with the next one. A key is never in two flushes at a time, so the order of a key's jobs is
the order of their commits. The size of a flush is what arrived during the previous one: one round trip
at low load, fat commits at high load. Push and ack both run on this loop.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import islice
from typing import Generic, TypeVar

import gevent
from gevent.event import Event

from queen.log import Log

log = Log("fusion")

Key = TypeVar("Key", bound=Hashable)
Job = TypeVar("Job")


class Fusion(Generic[Key, Job]):
    """Runs ``flush`` on bundles of keys with their waiting jobs, a bounded number of flushes at once.

    ``flush`` takes a list of (key, jobs) and must settle every job itself, whatever happens; an
    exception that escapes it is logged and the loop goes on.
    """

    def __init__(
        self,
        flush: Callable[[list[tuple[Key, list[Job]]]], None],
        bundle_max: int,
        inflight_max: int,
        jobs_max: int = 1 << 30,
    ) -> None:
        self._flush = flush
        self._bundle_max = bundle_max
        self._inflight_max = inflight_max
        self._jobs_max = jobs_max
        self._ready: dict[Key, list[Job]] = {}  # keys with waiting jobs, none of them in flight
        self._behind: dict[Key, list[Job]] = {}  # jobs of keys that are in flight
        self._inflight: set[Key] = set()
        self._flushers = 0
        self._idle = Event()
        self._idle.set()
        self.flushes = 0
        self.keys_flushed = 0

    def submit(self, key: Key, job: Job) -> None:
        """Adds a job. It is flushed as soon as its key and a flusher are free."""
        if key in self._inflight:
            self._behind.setdefault(key, []).append(job)
            return
        self._ready.setdefault(key, []).append(job)
        if self._flushers < self._inflight_max:
            self._flushers += 1
            self._idle.clear()
            gevent.spawn(self._run)

    def drain(self, seconds: float) -> bool:
        """Waits until nothing is waiting or in flight; False if that takes longer."""
        return bool(self._idle.wait(seconds))

    def _run(self) -> None:
        try:
            while self._ready:
                bundle = self._next_bundle()
                try:
                    self._flush(bundle)
                except Exception:
                    log.exception("flush failed")
                finally:
                    self._release(bundle)
        finally:
            self._flushers -= 1
            if self._flushers == 0 and not self._ready:
                self._idle.set()

    def _next_bundle(self) -> list[tuple[Key, list[Job]]]:
        """Up to ``bundle_max`` ready keys, those waiting longest first, marked as in flight."""
        bundle: list[tuple[Key, list[Job]]] = []
        size = 0
        for key in list(islice(self._ready, self._bundle_max)):
            jobs = self._ready.pop(key)
            bundle.append((key, jobs))
            self._inflight.add(key)
            size += len(jobs)
            if size >= self._jobs_max:
                break
        self.flushes += 1
        self.keys_flushed += len(bundle)
        return bundle

    def _release(self, bundle: list[tuple[Key, list[Job]]]) -> None:
        for key, _ in bundle:
            self._inflight.discard(key)
            waiting = self._behind.pop(key, None)
            if waiting:
                self._ready[key] = waiting
