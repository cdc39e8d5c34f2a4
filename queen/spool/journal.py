"""The file that one worker appends to, and the one fsync for all requests that wait for it.

Whoever finds the journal free writes what all who wait have brought, in their order, and syncs once; the
others find their part done. Writing happens in a thread, since a disk may take its time and the hub must
not stand still. A write that fails half way is cut off again, so what follows it stays readable.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from gevent.hub import get_hub
from gevent.lock import Semaphore
from gevent.monkey import get_original

from queen.engine.dedup import Key
from queen.log import Log
from queen.spool.directory import SpoolDirectory

log = Log("spool")

_FILE_BYTES = 64 << 20

_allocate_lock = get_original("_thread", "allocate_lock")


@dataclass(slots=True, eq=False)
class Entry:
    """What one request brings: its records, how many they are, and the partitions that they are for."""

    data: bytes
    count: int
    keys: set[Key]
    stem: str = ""  # of the file that it is in
    done: bool = False
    error: OSError | None = field(default_factory=lambda: OSError("not written"))


@dataclass(slots=True)
class _File:
    descriptor: int
    stem: str
    size: int = 0
    count: int = 0
    created: float = field(default_factory=time.monotonic)
    synced: bool = True


class Journal:
    """Appends entries to the active file; a new one begins when it holds enough."""

    def __init__(
        self, directory: SpoolDirectory, events_per_file: int, sync: bool, written: Callable[[Entry], None]
    ) -> None:
        """``sync``: an entry counts as written only when it is on the disk. ``written`` hears of each in time:
        before anybody else can have ended the file."""
        self._written = written
        self._directory = directory
        self._events_per_file = events_per_file
        self._sync = sync
        self._file: _File | None = None
        self._waiting: list[Entry] = []
        self._unsafe: list[Entry] = []  # appended to the active file and not on the disk yet
        self._lock = Semaphore(1)
        # A greenlet that is killed leaves its thread at work.
        self._thread_lock = _allocate_lock()
        self.syncs = 0

    @property
    def stem(self) -> str | None:
        """The name of the active file, None when there is none."""
        return None if self._file is None else self._file.stem

    @property
    def age(self) -> float:
        """Seconds since the active file was begun."""
        return 0.0 if self._file is None else time.monotonic() - self._file.created

    def write(self, entry: Entry) -> None:
        """Appends an entry and waits until it is safe. Raises `OSError` when it is not written."""
        self._waiting.append(entry)
        with self._lock:
            if not entry.done:
                entries, self._waiting = self._waiting, []
                self._in_thread(self._write, entries)
                for each in entries:
                    if each.error is None:
                        self._written(each)
        if entry.error is not None:
            raise entry.error

    def sync(self) -> None:
        """Writes to the disk what was written without it. Raises `OSError`."""
        with self._lock:
            if self._file is not None and not self._file.synced:
                self._in_thread(self._sync_file)

    def finalise(self) -> None:
        """Ends the active file, so that it can be drained. Raises `OSError`."""
        with self._lock:
            if self._file is not None:
                self._in_thread(self._finish)

    def _in_thread(self, work: Callable[..., None], *arguments: list[Entry]) -> None:
        def run() -> None:
            with self._thread_lock:
                work(*arguments)

        get_hub().threadpool.apply(run)

    def _write(self, entries: list[Entry]) -> None:
        try:
            for entry in entries:
                try:
                    self._append(entry)
                except OSError as error:
                    entry.error = error
            if self._unsafe:
                with suppress(OSError):  # which the entries have
                    self._sync_file()
        finally:
            for entry in entries:
                entry.done = True

    def _append(self, entry: Entry) -> None:
        self._directory.room(len(entry.data))
        file = self._file
        if file is not None and (file.count >= self._events_per_file or file.size >= _FILE_BYTES):
            self._finish()
        if self._file is None:
            self._file = _File(*self._directory.create())
        file = self._file
        try:
            view = memoryview(entry.data)
            while view:
                view = view[os.write(file.descriptor, view) :]
        except OSError as error:
            try:
                os.ftruncate(file.descriptor, file.size)
            except OSError:
                self._abandon(error)
            raise
        file.size += len(entry.data)
        file.count += entry.count
        file.synced = False
        entry.stem = file.stem
        if self._sync:
            self._unsafe.append(entry)
        else:
            entry.error = None

    def _sync_file(self) -> None:
        """Puts the active file on the disk; what is in it may be promised then."""
        if self._file is None:
            return
        try:
            os.fsync(self._file.descriptor)
        except OSError as error:
            # Nobody knows what of it is there: that will be replayed, but isn't promised. To try again
            # would be of no use, since the next fsync may pass without having written anything.
            self._abandon(error)
            raise
        self._file.synced = True
        self.syncs += 1
        for entry in self._unsafe:
            entry.error = None
        self._unsafe = []

    def _finish(self) -> None:
        file = self._file
        if file is None:
            return
        if not file.synced:
            self._sync_file()
        self._directory.finalise(file.stem)
        self._file = None
        os.close(file.descriptor)
        self._directory.sync()

    def _abandon(self, error: OSError) -> None:
        """Begins another file next time. Without its lock, this one is finalised as a dead worker's would be."""
        for entry in self._unsafe:
            entry.error = error
        self._unsafe = []
        file, self._file = self._file, None
        if file is not None:
            os.close(file.descriptor)
