"""Rates and parked polls: counted always, refused only where the proxy enforces.

Everything is plain memory of this one process, exact and lost at a restart.
"""

from __future__ import annotations

import math
import time

from queen.log import Log
from queen.proxy.clusters import Cluster
from queen.proxy.refusals import Refusal, rate_limited

log = Log("limits")

_IDLE_SECONDS = 600.0
_SWEEP_SECONDS = 120.0
_PARKED_RETRY_SECONDS = 5
_LOG_SECONDS = 1.0


class Bucket:
    """Tokens that come back with time. ``take`` either takes all it is asked for or nothing."""

    __slots__ = ("burst", "rate", "tokens", "touched")

    def __init__(self, rate: int, burst: int, now: float) -> None:
        self.rate = rate
        self.burst = burst
        self.tokens = float(burst)
        self.touched = now

    def adjust(self, rate: int, burst: int, now: float) -> None:
        """Brings it to this moment, and to limits that may have changed: more keeps the count, less clamps it."""
        self.tokens = min(self.tokens + (now - self.touched) * self.rate, float(self.burst))
        self.rate = rate
        self.burst = burst
        self.tokens = min(self.tokens, float(burst))
        self.touched = now

    def take(self, tokens: int) -> int:
        """0 when taken, else the seconds after which to ask again, from 1 to 60."""
        # What exceeds the burst can never be there at once: it is let through when the bucket is full.
        wanted = min(tokens, self.burst)
        if self.tokens >= wanted:
            self.tokens -= tokens
            return 0
        return max(1, min(60, math.ceil((wanted - self.tokens) / self.rate)))


class Limits:
    """The buckets and the parked polls of all clusters."""

    def __init__(self, enforce: bool, cell_max_parked: int) -> None:
        self._enforce = enforce
        self._cell_max_parked = cell_max_parked
        self._requests: dict[str, Bucket] = {}
        self._messages: dict[str, Bucket] = {}
        self._parked: dict[str, int] = {}
        self._parked_in_cell = 0
        self._swept = time.monotonic()
        self._logged: dict[tuple[str, str], tuple[float, int]] = {}

    def take_request(self, cluster: Cluster, rid: str) -> None:
        """One request; raises `Refusal` 429."""
        limits = cluster.limits
        if limits.max_req_per_sec is not None:
            bucket = _bucket(self._requests, cluster.id, limits.max_req_per_sec, limits.req_burst)
            if seconds := bucket.take(1):
                self.decide(cluster, rid, "requests", rate_limited("request rate limit exceeded", seconds))
            self._sweep(bucket.touched)

    def take_messages(self, cluster: Cluster, count: int, rid: str) -> None:
        """Messages about to be pushed; raises `Refusal` 429."""
        limits = cluster.limits
        if limits.max_msgs_per_sec is not None and count:
            bucket = _bucket(self._messages, cluster.id, limits.max_msgs_per_sec, limits.msgs_burst)
            if seconds := bucket.take(count):
                self.decide(cluster, rid, "messages", rate_limited("message rate limit exceeded", seconds))

    def charge_delivered(self, cluster: Cluster, count: int) -> None:
        """Messages that were delivered: taken without asking, so that the next push may have to wait."""
        limits = cluster.limits
        if limits.max_msgs_per_sec is not None and count:
            _bucket(self._messages, cluster.id, limits.max_msgs_per_sec, limits.msgs_burst).tokens -= count

    def park(self, cluster: Cluster, rid: str) -> None:
        """Takes a parked slot, given back by `unpark`; raises `Refusal` 429."""
        parked = self._parked.get(cluster.id, 0)
        most = cluster.limits.max_parked_pops
        if (most is not None and parked >= most) or self._parked_in_cell >= self._cell_max_parked:
            self.decide(cluster, rid, "parked", rate_limited("too many parked consumers", _PARKED_RETRY_SECONDS))
        self._parked[cluster.id] = parked + 1
        self._parked_in_cell += 1

    def unpark(self, cluster: Cluster) -> None:
        left = self._parked[cluster.id] - 1
        if left:
            self._parked[cluster.id] = left
        else:
            del self._parked[cluster.id]
        self._parked_in_cell -= 1

    @property
    def parked(self) -> int:
        """The polls parked now."""
        return self._parked_in_cell

    def decide(self, cluster: Cluster, rid: str, kind: str, refusal: Refusal) -> None:
        """Logs a limit that was met; raises the refusal where the proxy enforces."""
        now = time.monotonic()
        last, suppressed = self._logged.get((cluster.id, kind), (-_LOG_SECONDS, 0))
        if now - last < _LOG_SECONDS:
            self._logged[cluster.id, kind] = (last, suppressed + 1)
        else:
            self._logged[cluster.id, kind] = (now, 0)
            fields = {"suppressed": suppressed} if suppressed else {}
            verdict = {"blocked": True} if self._enforce else {"would_block": True}
            log.warning(refusal.text, kind=kind, cluster=cluster.slug, rid=rid, **verdict, **fields)
        if self._enforce:
            raise refusal

    def _sweep(self, now: float) -> None:
        if now - self._swept < _SWEEP_SECONDS:
            return
        self._swept = now
        for buckets in (self._requests, self._messages):
            for key in [key for key, bucket in buckets.items() if now - bucket.touched > _IDLE_SECONDS]:
                # One that deliveries have drawn below nothing keeps its debt until time has paid it.
                if buckets[key].tokens + _IDLE_SECONDS * buckets[key].rate >= 0:
                    del buckets[key]
        for pair in [pair for pair, (last, _) in self._logged.items() if now - last > _IDLE_SECONDS]:
            del self._logged[pair]


def _bucket(buckets: dict[str, Bucket], key: str, rate: int, burst: int | None) -> Bucket:
    capacity = 2 * rate if burst is None else burst
    now = time.monotonic()
    bucket = buckets.get(key)
    if bucket is None:
        bucket = buckets[key] = Bucket(rate, capacity, now)
    else:
        bucket.adjust(rate, capacity, now)
    return bucket
