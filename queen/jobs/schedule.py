"""Which jobs a worker runs, and when."""

from __future__ import annotations

from queen.db.database import conninfo
from queen.engine.engine import Engine
from queen.jobs.lock import SessionLock
from queen.jobs.loop import Loop
from queen.jobs.retention import LOCK, Retention
from queen.jobs.retention import log as retention_log
from queen.settings import Settings


class Schedule:
    """The jobs of one worker. Some are done by one worker for its whole broker: by the holder among them."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self._settings = settings
        self._lock = SessionLock(conninfo(settings), LOCK, retention_log)

        def sweep() -> None:
            if engine.siblings.holder:
                retention.cycle()

        self._retention = Loop(retention_log, settings.retention_interval_ms / 1000, sweep)
        retention = Retention(settings, engine.database, self._lock, lambda: self._retention.stopping)
        self._loops = [self._retention]

    def start(self) -> None:
        s = self._settings
        for loop in self._loops:
            loop.start()
        retention_log.info(
            "service started",
            interval_ms=s.retention_interval_ms,
            advisory_lock=LOCK,
            batch_size=s.retention_batch_size,
            metrics_retention_days=s.metrics_retention_days,
        )

    def stop(self) -> None:
        """Ends every job, in the middle of a cycle if it takes long. Locks are free then."""
        for loop in self._loops:
            loop.stop()
        self._lock.close()
