"""Statistics: one broker at a time computes them for all."""

from __future__ import annotations

import time

from queen.db import statistics
from queen.db.database import Database
from queen.log import Log

log = Log("stats")


class Statistics:
    """Both computations: the counts of messages, and far less often what is stored."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def refresh(self) -> None:
        """Computes the counts, unless another broker is at it."""
        started = time.monotonic()
        done = statistics.refresh(self._database)
        if done is not None:
            say = log.info if done["queuesUpdated"] else log.debug
            say(
                "refreshed",
                queues=done["queuesUpdated"],
                partitions=done["segPartitions"],
                namespaces=done["namespaces"]["namespacesUpdated"],
                tasks=done["tasks"]["tasksUpdated"],
                elapsed_ms=int((time.monotonic() - started) * 1000),
            )

    def add_up_bytes(self) -> None:
        """Adds up stored segments and bytes, unless another broker is at it."""
        started = time.monotonic()
        changed = statistics.refresh_retained_bytes(self._database)
        if changed is not None:
            log.debug("retained bytes", queues=changed, elapsed_ms=int((time.monotonic() - started) * 1000))
