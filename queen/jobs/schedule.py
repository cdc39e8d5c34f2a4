"""Which jobs a worker runs, and when."""

from __future__ import annotations

from collections.abc import Callable

from queen.db.database import conninfo
from queen.engine.engine import Engine
from queen.jobs import collector, reconcile, retention, statistics
from queen.jobs.lock import SessionLock
from queen.jobs.loop import Loop
from queen.log import Log
from queen.settings import Settings

_RECONCILE_SECONDS = 5.0
_FIRST_BYTES_SECONDS = 10.0
_SAMPLE_MS = 1000
_COUNTING_SHARE = 0.05  # of the time, at most: a million partitions take more than a second


class Schedule:
    """The jobs of one worker. Some are done by one worker for its whole broker: by the holder among them."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        s = self._settings = settings
        self._lock = SessionLock(conninfo(s), retention.LOCK, retention.log)
        sweep = retention.Retention(s, engine.database, self._lock, lambda: sweeping.stopping)
        counts = statistics.Statistics(engine.database)
        passes = reconcile.Reconcile(engine)
        self._collector = collector.Collector(s, engine)

        def by_holder(cycle: Callable[[], object]) -> Callable[[], None]:
            def run() -> None:
                if engine.siblings.holder:
                    cycle()

            return run

        def every(
            ms: int, log: Log, cycle: Callable[[], object], first: float | None = None, share: float = 1.0
        ) -> Loop:
            return Loop(log, ms / 1000, cycle, None if first is None else min(first, ms / 1000), share)

        sweeping = every(s.retention_interval_ms, retention.log, by_holder(sweep.cycle))
        self._loops = [
            sweeping,
            every(s.stats_interval_ms, statistics.log, by_holder(counts.refresh), share=_COUNTING_SHARE),
            every(
                s.retained_bytes_interval_ms,
                statistics.log,
                by_holder(counts.add_up_bytes),
                _FIRST_BYTES_SECONDS,
                _COUNTING_SHARE,
            ),
            every(s.cache_refresh_ms, reconcile.log, passes.cycle, _RECONCILE_SECONDS),
            every(s.metrics_flush_ms, collector.log, self._collector.flush),
            every(_SAMPLE_MS, collector.log, self._collector.sample, 0.0),
            every(_SAMPLE_MS, collector.log, self._collector.watch),
        ]

    def start(self) -> None:
        s = self._settings
        for loop in self._loops:
            loop.start()
        retention.log.info(
            "service started",
            interval_ms=s.retention_interval_ms,
            advisory_lock=retention.LOCK,
            batch_size=s.retention_batch_size,
            metrics_retention_days=s.metrics_retention_days,
        )
        collector.log.info("collector started", flush_ms=s.metrics_flush_ms, replica=s.server_id)
        reconcile.log.info("state reconcile loop started", interval_ms=s.cache_refresh_ms)

    def stop(self) -> None:
        """Ends every job, in the middle of a cycle if it takes long. Locks are free then."""
        for loop in self._loops:
            loop.stop()
        self._collector.close()
        self._lock.close()
