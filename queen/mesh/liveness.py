"""Who is alive: when something was last heard from each peer, by the id it announced."""

from __future__ import annotations

import time

import gevent

from queen.log import Log

log = Log("mesh")

_MOST = 256
_FORGET_SECONDS = 3600.0


class Liveness:
    """The peers heard of. ``threshold`` is the silence, in seconds, after which one counts as dead."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._heard: dict[str, float] = {}
        self._down: set[str] = set()

    def seen(self, server_id: str) -> None:
        """Something came from a peer."""
        if server_id not in self._heard and len(self._heard) >= _MOST:
            oldest = min(self._heard, key=self._heard.__getitem__)
            self._forget(oldest)
        self._heard[server_id] = time.monotonic()

    def ages(self) -> dict[str, float]:
        """Seconds since something was heard, by server id."""
        now = time.monotonic()
        return {server_id: now - then for server_id, then in self._heard.items()}

    def check(self) -> None:
        """Logs what changed since the last check, and forgets who has been silent for an hour."""
        for server_id, age in self.ages().items():
            if age > self._threshold and server_id not in self._down:
                self._down.add(server_id)
                log.warning("peer down", peer=server_id, threshold_ms=round(self._threshold * 1000))
            elif age <= self._threshold and server_id in self._down:
                self._down.discard(server_id)
                log.info("peer recovered", peer=server_id)
            if age > _FORGET_SECONDS:
                self._forget(server_id)

    def monitor(self) -> None:
        while True:
            gevent.sleep(max(self._threshold / 2, 0.25))
            self.check()

    def _forget(self, server_id: str) -> None:
        del self._heard[server_id]
        self._down.discard(server_id)
