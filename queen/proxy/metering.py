"""Usage: counted request by request, kept on disk until the database has it.

Each count is appended to a file before its answer goes to the client, so that a proxy that is killed has billed
what its clients saw. A file is one batch, with an id under which the database adds it once, whoever sends it.
"""

from __future__ import annotations

import fcntl
import os
import time
import uuid
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import gevent
from psycopg.types.json import Jsonb

from queen import codec
from queen.log import Log
from queen.proxy.pxdb import Pxdb, Unavailable

log = Log("metering")

_FILE_BYTES = 5 * 1024 * 1024
_FAILURES = 3
_PAUSE_SECONDS = 30.0

Counts = dict[tuple[str, str], list[int]]


class Batch:
    """The counts of one minute, or of a part of it. Without a directory they are in memory only."""

    def __init__(self, minute: int, path: Path | None) -> None:
        self.id = uuid.uuid4()
        self.minute = minute
        self.counts: Counts = {}
        self.size = 0
        self.path = path
        self._file = -1
        if path is not None:
            try:
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_EXCL, 0o600)
                fcntl.flock(self._file, fcntl.LOCK_EX)
                os.write(self._file, codec.dumps({"batch": str(self.id), "minute": minute}) + b"\n")
            except OSError as error:
                log.sampled(10, "usage can't be kept on disk", path=path, error=error)
                self._drop_file()

    def add(self, cluster: str, op: str, msgs: int, bytes_in: int, bytes_out: int) -> None:
        counts = self.counts.setdefault((cluster, op), [0, 0, 0, 0])
        counts[0] += msgs
        counts[1] += 1
        counts[2] += bytes_in
        counts[3] += bytes_out
        if self._file >= 0:
            line = b'["%s","%s",%d,1,%d,%d]\n' % (cluster.encode(), op.encode(), msgs, bytes_in, bytes_out)
            self.size += len(line)
            try:
                os.write(self._file, line)
            except OSError as error:
                log.sampled(10, "usage can't be kept on disk", path=self.path, error=error)

    def write(self, pxdb: Pxdb) -> None:
        """Has the database add it, once, and forgets it; raises `Unavailable`."""
        moment = datetime.fromtimestamp(self.minute * 60, UTC).isoformat()
        rows = [
            {
                "cluster_id": cluster,
                "minute": moment,
                "op_class": op,
                "msgs": counts[0],
                "reqs": counts[1],
                "bytes_in": counts[2],
                "bytes_out": counts[3],
            }
            for (cluster, op), counts in self.counts.items()
        ]
        pxdb.execute("SELECT queen_proxy.add_usage(%s, %s)", (self.id, Jsonb(rows)))
        self._drop_file()

    def _drop_file(self) -> None:
        if self.path is not None:
            with suppress(OSError):
                self.path.unlink()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    @classmethod
    def left_behind(cls, path: Path) -> Batch | None:
        """The batch in a file whose process is gone; None when it lives, or when there is nothing to read."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with os.fdopen(os.dup(descriptor), "rb") as file:
                lines = file.read().split(b"\n")
            head = codec.loads(lines[0])
            batch = cls(int(head["minute"]), None)
            batch.id = uuid.UUID(head["batch"])
        except BlockingIOError:
            os.close(descriptor)
            return None
        except (OSError, codec.JsonError, KeyError, TypeError, ValueError) as error:
            log.warning("a file of usage can't be read and is set aside", path=path, error=error)
            with suppress(OSError):
                path.rename(path.with_suffix(".bad"))
            os.close(descriptor)
            return None
        for line in lines[1:]:
            # The last line may have been cut off when the process was killed.
            with suppress(codec.JsonError, ValueError, TypeError, AttributeError):
                cluster, op, *numbers = codec.loads(line)
                counts = batch.counts.setdefault((str(uuid.UUID(cluster)), str(op)), [0, 0, 0, 0])
                for place, number in enumerate(numbers[:4]):
                    counts[place] += int(number)
        batch.path, batch._file = path, descriptor
        return batch


class Meter:
    """Counts for all clusters, and writes what is complete."""

    def __init__(self, directory: Path | None, pxdb: Pxdb | None) -> None:
        self._directory = directory
        self._pxdb = pxdb
        self._open: Batch | None = None
        self._closed: list[Batch] = []
        self._sequence = 0
        self._recovered = False
        self._failures = 0
        self._retry_at = 0.0

    def add(self, cluster: str, op: str, msgs: int, bytes_in: int, bytes_out: int) -> None:
        """Counts one request of an op class: push, delivery, txn, configure or read."""
        if self._pxdb is None:
            return
        minute = int(time.time()) // 60
        batch = self._open
        if batch is None or batch.minute != minute or batch.size > _FILE_BYTES:
            if batch is not None:
                self._closed.append(batch)
            batch = self._open = self._batch(minute)
        batch.add(cluster, op, msgs, bytes_in, bytes_out)

    def flush(self, everything: bool = False) -> None:
        """Writes the minutes that are over, and what an earlier process left; raises `Unavailable`.

        ``everything``: also the minute that is still open.
        """
        if self._pxdb is None or (time.monotonic() < self._retry_at and not everything):
            return
        self._recover()
        if self._open is not None and (everything or self._open.minute < int(time.time()) // 60):
            self._closed.append(self._open)
            self._open = None
        while self._closed:
            batch = self._closed[0]
            try:
                batch.write(self._pxdb)
            except Unavailable:
                self._failures += 1
                if self._failures >= _FAILURES:
                    self._retry_at = time.monotonic() + _PAUSE_SECONDS
                raise
            self._failures = 0
            # The last flush of a stop may have overtaken us meanwhile: the database counts a batch once.
            if batch in self._closed:
                self._closed.remove(batch)
            gevent.sleep(0)

    def _recover(self) -> None:
        if self._recovered or self._directory is None:
            return
        self._recovered = True
        ours = {batch.path for batch in (*self._closed, self._open) if batch is not None}
        for path in sorted(self._directory.glob("meter-*.buf")):
            if path not in ours and (batch := Batch.left_behind(path)):
                log.info("usage of an earlier process found", path=path.name)
                self._closed.append(batch)

    def _batch(self, minute: int) -> Batch:
        self._sequence += 1
        if self._directory is not None:
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
                name = f"meter-{int(time.time() * 1000)}-{os.getpid()}-{self._sequence}.buf"
                return Batch(minute, self._directory / name)
            except OSError as error:
                log.sampled(60, "the spool directory can't be made", path=self._directory, error=error)
        return Batch(minute, None)
