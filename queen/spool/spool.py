"""The spool of one worker: it takes pushes to the disk, and looks after what is there."""

from __future__ import annotations

import time
from dataclasses import dataclass

import gevent
from gevent.event import Event
from gevent.hub import get_hub

from queen.engine.engine import Engine
from queen.engine.flags import Flag
from queen.log import Log
from queen.settings import Settings
from queen.spool import records
from queen.spool.backlog import Backlog
from queen.spool.directory import SpoolDirectory, begun_at
from queen.spool.drain import Drain
from queen.spool.intake import Intake
from queen.spool.journal import Entry, Journal

log = Log("spool")

_FILES = 10  # drained in one cycle
_AGE_SECONDS = 5.0  # after which a file is complete, whatever the database does
_IDLE_SECONDS = 1.0
_RECOVERY_SECONDS = 30.0


@dataclass(slots=True)
class Statistics:
    """The spool in numbers: those of the whole broker, but ``failed``, which is this worker's."""

    pending: int  # events on the disk
    failed: int  # events that could not be written
    healthy: bool  # whether the database seems to be there
    files: int  # complete, waiting to be drained
    bytes: int
    oldest_seconds: float
    quarantined_files: int
    quarantined_events: int
    writable: bool


class Spool:
    """Accepts pushes through ``intake``, and drains in the background."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self._settings = settings
        self._engine = engine
        self.directory = SpoolDirectory(settings.file_buffer_dir, settings.file_buffer_max_mb)
        self._backlog = Backlog()
        self._news = Event()
        self._journal = Journal(
            self.directory,
            settings.file_buffer_events_per_file,
            settings.file_buffer_fsync == "always",
            self._written,
        )
        self._drain = Drain(self.directory, self._backlog, engine.pusher, settings.file_buffer_max_batch)
        self.intake = Intake(engine, self._journal, self._backlog, settings.file_buffer_sticky)
        self._counts: dict[tuple[str, int], int] = {}  # events in files of other workers, by name and size
        self._degraded = False
        self._loop: gevent.Greenlet[[], None] | None = None

    def open(self) -> None:
        """Takes the directory. Raises `SpoolInUse` when another broker has it."""
        self.directory.open(str(self._engine.siblings.directory))

    def start(self) -> None:
        """Drains what an earlier run left, for half a minute at most, and goes on in the background."""
        s = self._settings
        log.info("drain loop started", dir=self.directory.path, flush_ms=s.file_buffer_flush_ms)
        if self._engine.siblings.holder:
            get_hub().threadpool.apply(self.directory.adopt, (self._journal.stem,))
        for name in self.directory.complete():
            self._look_into(name)
        self._recover()
        self._engine.flags.watch(self._flag_changed)
        self._loop = gevent.spawn(self._run)

    def rest(self) -> None:
        """Ends the background work. Pushes are still taken."""
        if self._loop is not None:
            self._loop.kill()

    def close(self) -> None:
        """Leaves a complete file behind, on the disk."""
        try:
            self._journal.finalise()
        except OSError as error:
            log.error("the active spool file could not be finalised", error=error)
        pending = self.statistics().pending
        if pending:
            Log("shutdown").warning("spool has undrained events at shutdown", pending=pending)

    def statistics(self) -> Statistics:
        """Counts what is on the disk."""
        counted: Statistics = get_hub().threadpool.apply(self._count)
        return counted

    def _look_into(self, name: str) -> None:
        """Takes note of a file of an earlier run."""
        try:
            data = get_hub().threadpool.apply((self.directory.path / name).read_bytes)
            count, keys = get_hub().threadpool.apply(records.partitions, (data,))
        except OSError as error:
            log.warning("spool file can't be read", spool_file=name, error=error)
            return
        self._backlog.add(name.removesuffix(".buf"), count, keys)

    def _recover(self) -> None:
        waiting = len(self.directory.complete())
        if not waiting or not self._engine.siblings.holder or self._engine.flags.push_maintenance:
            return
        log.info("startup recovery draining spool files", count=waiting)
        deadline = time.monotonic() + _RECOVERY_SECONDS
        while self.directory.complete():
            if time.monotonic() > deadline:
                log.warning(
                    "startup recovery hit cap; leaving remaining spool for the drain loop",
                    cap_secs=int(_RECOVERY_SECONDS),
                )
                return
            if not self._drain.run(1):
                log.warning("startup recovery of file failed; will retry in drain loop")
                return

    def _written(self, entry: Entry) -> None:
        self._backlog.add(entry.stem, entry.count, entry.keys)
        self._news.set()

    def _flag_changed(self, flag: Flag, enabled: bool) -> None:
        if flag is Flag.PUSH_MAINTENANCE and not enabled:
            self._news.set()

    def _run(self) -> None:
        interval = self._settings.file_buffer_flush_ms / 1000
        while True:
            started = time.monotonic()
            self._news.clear()
            busy = False
            try:
                busy = self._cycle()
            except Exception:
                log.exception("spool cycle failed")
            if not busy:
                self._news.wait(_IDLE_SECONDS)
            gevent.sleep(max(interval - (time.monotonic() - started), 0))

    def _cycle(self) -> bool:
        """Does what is to be done; whether something is left."""
        database = self._engine.database
        if self._settings.file_buffer_fsync == "interval":
            self._journal.sync()
        healthy = database.healthy or database.probe()
        self._tell(healthy)
        if self._engine.flags.push_maintenance:
            return False
        if healthy or self._journal.age > _AGE_SECONDS:
            self._journal.finalise()
        if healthy and self._engine.siblings.holder:
            get_hub().threadpool.apply(self.directory.adopt, (self._journal.stem,))
            self._drain.run(_FILES)
        waiting = self.directory.stems()
        for stem in self._backlog.files:
            if stem not in waiting and not self.directory.present(stem):
                self._backlog.remove(stem)
        return not self._backlog.empty or bool(self.directory.complete())

    def _tell(self, healthy: bool) -> None:
        """Logs that pushes go to the disk for want of a database, and that they don't any more."""
        if healthy == self._degraded:
            self._degraded = not healthy
            pending = self.statistics().pending
            if healthy:
                log.info("DB recovered — leaving buffered mode", pending=pending)
            else:
                log.warning("DB down — entering buffered mode (degraded durability)", pending=pending)

    def _count(self) -> Statistics:
        waiting, aside = self.directory.sizes(), self.directory.sizes("failed")
        counts = {(name, size): self._events(name, size) for name, size in waiting.items()}
        counts |= {(f"failed/{name}", size): self._events(f"failed/{name}", size) for name, size in aside.items()}
        self._counts = counts
        complete = [size for name, size in waiting.items() if name.endswith(".buf")]
        begun = min(filter(None, map(begun_at, waiting)), default=0)
        return Statistics(
            pending=sum(counts[item] for item in waiting.items()),
            failed=self.intake.failed,
            healthy=self._engine.database.healthy,
            files=len(complete),
            bytes=sum(complete),
            oldest_seconds=max(time.time() - begun, 0.0) if begun else 0.0,
            quarantined_files=len(aside),
            quarantined_events=sum(counts[f"failed/{name}", size] for name, size in aside.items()),
            writable=self.directory.ready,
        )

    def _events(self, name: str, size: int) -> int:
        known = self._backlog.count(name[:-4])
        if known is None:
            known = self._counts.get((name, size))
        if known is None:
            try:
                known = records.count((self.directory.path / name).read_bytes())
            except OSError:
                known = 0
        return known
