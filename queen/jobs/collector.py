"""The collector: what a worker measures of itself, told to its siblings and stored once a minute.

Every worker does this for itself. Who reads adds up.
"""

from __future__ import annotations

import os
import resource
import time
from dataclasses import asdict, dataclass
from typing import Any

import gevent

from queen.db import metrics
from queen.db.errors import StatementFailed, Unavailable
from queen.engine import figures
from queen.engine.engine import Engine
from queen.engine.hotlist import Key
from queen.engine.identifiers import uuid_text
from queen.log import Log
from queen.settings import Settings

log = Log("metrics")

_LAG_SLEEP = 0.1
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True)
class Lag:
    """How much later than it should a sleeping greenlet woke, in milliseconds."""

    count: int = 0
    sum: float = 0.0
    most: float = 0.0

    def add(self, milliseconds: float) -> None:
        self.count += 1
        self.sum += milliseconds
        self.most = max(self.most, milliseconds)

    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else 0.0


class Collector:
    """Measures one worker. `sample` once a second, `flush` once a minute, `watch` all the time."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self._settings = settings
        self._engine = engine
        self._started = time.time()
        self._lag = Lag()  # since the start
        self._recent = Lag()  # since the last flush
        self._stored = engine.counters.total.copy()
        self._stored_errors = 0
        self._parked: dict[Key, int] = {}
        self._samples = 0
        self._least_idle = 1 << 30
        self._flushed = time.monotonic()
        self._cpu = resource.getrusage(resource.RUSAGE_SELF)

    def watch(self) -> None:
        """One look at how late a short sleep ends."""
        slept = time.monotonic()
        gevent.sleep(_LAG_SLEEP)
        late = max(time.monotonic() - slept - _LAG_SLEEP, 0.0) * 1000
        self._lag.add(late)
        self._recent.add(late)

    def sample(self) -> None:
        """Counts what is parked, and tells the siblings how this worker is."""
        self._samples += 1
        parked: dict[str, int] = {}
        for key, lane in self._engine.hotlist.lanes.items():
            count = lane.sleepers
            if count:
                self._parked[key] = self._parked.get(key, 0) + count
                name = key[1].decode()
                parked[name] = parked.get(name, 0) + count
        size, idle, waiting = self._pool()
        self._least_idle = min(self._least_idle, idle)
        figures.publish(
            self._engine.siblings.directory,
            self._engine.siblings.instance,
            {
                "started": self._started,
                "rss": resident_bytes(),
                "counts": asdict(self._engine.counters.total),
                "parked": parked,
                "lag_count": self._lag.count,
                "lag_ms": self._lag.sum,
                "pool_size": size,
                "pool_idle": idle,
                "pool_waiting": waiting,
            },
        )

    def flush(self) -> None:
        """Stores what happened since the last time. What can't be stored counts for the next time."""
        total = self._engine.counters.total.copy()
        errors = self._engine.database.errors
        queues = self._engine.counters.take()
        try:
            metrics.record(
                self._engine.database, self._worker_row(errors), self._system_row(), self._queue_rows(queues)
            )
        except (Unavailable, StatementFailed) as error:
            self._engine.counters.give_back(queues)
            log.sampled(60, "metrics not stored", error=error)
            return
        self._stored = total
        self._stored_errors = errors
        self._engine.counters.total.max_lag_ms = 0
        self._recent = Lag()
        self._parked = {}
        self._samples = 0
        self._least_idle = 1 << 30
        self._flushed = time.monotonic()
        self._cpu = resource.getrusage(resource.RUSAGE_SELF)

    def close(self) -> None:
        """The worker is leaving: stores the rest, and is no longer counted among its siblings."""
        self.flush()
        figures.withdraw(self._engine.siblings.directory, self._engine.siblings.instance)

    def _pool(self) -> tuple[int, int, int]:
        """Connections open at most, idle ones, and requests that wait for one."""
        seen = self._engine.database.statistics()
        size, taken = self._engine.database.size, seen.get("pool_size", 0) - seen.get("pool_available", 0)
        return size, size - taken, seen.get("requests_waiting", 0)

    def _worker_row(self, errors: int) -> dict[str, Any]:
        done = self._engine.counters.total.since(self._stored)
        size, idle, _ = self._pool()
        return {
            "hostname": self._settings.server_id,
            "worker_id": os.getpid(),
            "pid": os.getpid(),
            "avg_event_loop_lag_ms": round(self._recent.mean),
            "max_event_loop_lag_ms": round(self._recent.most),
            "avg_free_slots": idle,
            "min_free_slots": min(self._least_idle, idle),
            "db_connections": size - idle,
            "jobs_done": done.push_requests,
            "push_request_count": done.push_requests,
            "pop_request_count": done.pop_requests,
            "ack_request_count": done.ack_requests,
            "transaction_count": done.transactions,
            "push_message_count": done.push_messages,
            "pop_message_count": done.pop_messages,
            "ack_message_count": done.ack_messages,
            "ack_success_count": done.ack_success,
            "ack_failed_count": done.ack_failed,
            "lag_count": done.lag_count,
            "avg_lag_ms": done.lag_ms // max(done.lag_count, 1),
            "max_lag_ms": done.max_lag_ms,
            "db_error_count": errors - self._stored_errors,
            "dlq_count": done.dead_letters,
        }

    def _system_row(self) -> dict[str, Any]:
        """One sample; of the processor's time in hundredths of a percent of one core."""
        size, idle, _ = self._pool()
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = max(time.monotonic() - self._flushed, 0.001)
        return {
            "hostname": self._settings.server_id,
            "port": self._settings.port,
            "worker_id": f"worker-{os.getpid()}",
            "sample_count": max(self._samples, 1),
            "metrics": {
                "cpu": {
                    "user_us": _same(round((used.ru_utime - self._cpu.ru_utime) / seconds * 10_000)),
                    "system_us": _same(round((used.ru_stime - self._cpu.ru_stime) / seconds * 10_000)),
                },
                "memory": {"rss_bytes": _same(resident_bytes()), "virtual_bytes": _same(0)},
                "database": {
                    "pool_size": _same(size),
                    "pool_idle": _same(idle),
                    "pool_active": _same(size - idle),
                },
                "uptime_seconds": _same(round(time.time() - self._started)),
            },
        }

    def _queue_rows(self, queues: dict[Key, Any]) -> list[dict[str, Any]]:
        """One row for each queue with any activity, a parked pop included."""
        parked = {key: round(count / max(self._samples, 1)) for key, count in self._parked.items()}
        rows = []
        for key in {*queues, *(key for key, count in parked.items() if count)}:
            tally = queues.get(key) or type(self._stored)()
            rows.append(
                {
                    "tenant": uuid_text(key[0]),
                    "queue": key[1].decode(),
                    "pop_count": tally.pop_messages,
                    "pop_empty_count": tally.pop_empty,
                    "push_request_count": tally.push_requests,
                    "push_message_count": tally.push_messages,
                    "ack_request_count": tally.ack_requests,
                    "ack_success_count": tally.ack_success,
                    "ack_failed_count": tally.ack_failed,
                    "transaction_count": tally.transactions,
                    "lag_count": tally.lag_count,
                    "lag_ms": tally.lag_ms,
                    "max_lag_ms": tally.max_lag_ms,
                    "parked_count": parked.get(key, 0),
                }
            )
        return rows


def resident_bytes() -> int:
    """The memory of this process."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE


def _same(value: int) -> dict[str, int]:
    """A figure in the form of the table, which has room for several samples."""
    return {"avg": value, "min": value, "max": value, "last": value}
