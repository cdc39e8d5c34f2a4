"""The spool directory: one per broker, with the files that wait, and in ``failed/`` those set aside.

``queen-<epoch ms>-<sequence>-<pid>`` is a file's name, so that names sort by age; it ends in ``.tmp`` while a
worker appends to it, and holds its lock, and in ``.buf`` when it is complete. Nothing here switches
greenlets: callers run what reads or writes much in a thread.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from queen.log import Log

log = Log("spool")

_NAME = re.compile(r"queen-(\d{13})-\d{8}(?:-\d+)?\.(?:tmp|buf)")
_LOCK = ".lock"
_LOCK_SECONDS = 2.0
_FREE_BYTES = 16 << 20  # never filled, so that the machine stays usable


class SpoolInUse(Exception):
    """Another broker uses the directory; the message names it."""


class SpoolFull(OSError):
    """The configured size, or nearly all of the disk, is used."""


class SpoolDirectory:
    """Where the files are. ``ready`` tells that they can be written; ``fault`` says why not."""

    def __init__(self, configured: str, max_megabytes: int = 0) -> None:
        self.path = Path(configured)
        self.fault = ""
        self._max_bytes = max_megabytes << 20
        self._lock = -1
        self._last_stamp = 0
        self._sequence = 0

    @property
    def ready(self) -> bool:
        return not self.fault

    @property
    def failed(self) -> Path:
        """The directory of the files that were set aside."""
        return self.path / "failed"

    def open(self, broker: str) -> None:
        """Makes the directory and proves that it takes files; else the one for temporary files has to do.

        Takes what all workers of this broker, and no others, are called. Raises `SpoolInUse` when another
        broker has the directory.
        """
        fallback = Path(tempfile.gettempdir()) / "queen-buffers"
        try:
            self._prepare(broker)
            return
        except OSError as error:
            log.warning(
                "could not create spool dir; falling back", dir=self.path, error=_reason(error), fallback=fallback
            )
        self.path = fallback
        try:
            fallback.mkdir(mode=0o700, exist_ok=True)
            _belongs_to_us(fallback)
            self._prepare(broker)
        except OSError as error:
            self.fault = _reason(error)
            log.error(
                "fallback spool dir also failed; buffering WILL fail until FILE_BUFFER_DIR names a writable directory",
                dir=self.path,
                error=self.fault,
            )

    def _prepare(self, broker: str) -> None:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._take_lock(broker)
        probe = self.path / f".probe-{os.getpid()}"
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, b"queen")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
            probe.unlink()
        try:
            self.failed.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            log.warning("could not create failed/: poison files stay where they are", error=_reason(error))
        stamps = [int(match[1]) for match in map(_NAME.fullmatch, os.listdir(self.path)) if match]
        self._last_stamp = max(stamps, default=0)

    def _take_lock(self, broker: str) -> None:
        """Shares the lock with the workers of this broker, whose name is in the file.

        The first of them holds it alone while it writes the name. A lock is not converted in one step, so
        the name is looked at again afterwards.
        """
        name = f"{socket.gethostname()}:{broker}"
        lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            if _lock(lock, fcntl.LOCK_EX):
                os.ftruncate(lock, 0)
                os.pwrite(lock, name.encode(), 0)
            if _lock(lock, fcntl.LOCK_SH):
                if os.pread(lock, 4096, 0) == name.encode():
                    break
                holder = os.pread(lock, 4096, 0).decode(errors="replace")
                os.close(lock)
                raise SpoolInUse(
                    f"FILE_BUFFER_DIR {self.path} is in use by another broker ({holder}); give each its own"
                )
            if time.monotonic() > deadline:
                os.close(lock)
                raise SpoolInUse(f"FILE_BUFFER_DIR {self.path} is in use by another broker; give each its own")
            time.sleep(0.01)
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = lock

    def create(self) -> tuple[int, str]:
        """Opens a new file for appending, locked for this process; its descriptor and its stem.

        Raises `OSError`, and `SpoolFull` (see `room`).
        """
        while True:
            self._last_stamp = max(time.time_ns() // 1_000_000, self._last_stamp)
            stem = f"queen-{self._last_stamp:013d}-{self._sequence:08d}-{os.getpid()}"
            self._sequence += 1
            path = self.path / f"{stem}.tmp"
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
            # A file without a lock is one that a dead worker left: whoever drains may have taken it already.
            if _lock(descriptor, fcntl.LOCK_EX) and path.exists():
                self.sync()
                return descriptor, stem
            os.close(descriptor)

    def room(self, size: int) -> None:
        """Raises `SpoolFull` when ``size`` more bytes are not to be written."""
        disk = os.statvfs(self.path)
        if disk.f_bavail * disk.f_frsize < _FREE_BYTES + size:
            raise SpoolFull(f"less than {_FREE_BYTES >> 20} MB are free on the disk of {self.path}")
        if self._max_bytes and sum(self.sizes().values()) + size > self._max_bytes:
            raise SpoolFull(f"{self.path} has reached FILE_BUFFER_MAX_MB={self._max_bytes >> 20}")

    def finalise(self, stem: str) -> None:
        """Gives a file that is written and synced its final name; `sync` makes that safe."""
        (self.path / f"{stem}.tmp").rename(self.path / f"{stem}.buf")

    def adopt(self, own: str | None) -> None:
        """Finalises the files of dead workers: those that nobody holds locked. ``own`` is not looked at."""
        for name in self._names(".tmp"):
            stem = name.removesuffix(".tmp")
            if stem == own:
                continue
            with suppress(FileNotFoundError):
                descriptor = os.open(self.path / name, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    if _lock(descriptor, fcntl.LOCK_EX):
                        os.fsync(descriptor)
                        self.finalise(stem)
                        self.sync()
                finally:
                    os.close(descriptor)

    def complete(self) -> list[str]:
        """The names of the files that can be drained, oldest first."""
        return self._names(".buf")

    def stems(self) -> set[str]:
        """The stems of the files that wait. One that is being renamed may be missing: see `present`."""
        return {name[:-4] for name in self._names(".tmp", ".buf")}

    def present(self, stem: str) -> bool:
        """Whether a file waits. It may be renamed meanwhile, hence three looks."""
        return any((self.path / f"{stem}.{end}").exists() for end in ("buf", "tmp", "buf"))

    def sizes(self, folder: str = "") -> dict[str, int]:
        """The files that wait, or those of a folder, with their sizes in bytes."""
        found: dict[str, int] = {}
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.path / folder) as entries:
            for entry in entries:
                if entry.name.endswith((".tmp", ".buf")):
                    with suppress(FileNotFoundError):
                        found[entry.name] = entry.stat().st_size
        return found

    def remove(self, name: str) -> None:
        """Deletes a file that was drained."""
        (self.path / name).unlink()
        self.sync()

    def set_aside(self, name: str) -> Path | None:
        """Moves a file to ``failed/``, or renames it in place to ``.bad`` if that can't be; never deletes.

        Returns where it is now, None when it could be neither.
        """
        source = self.path / name
        for target in (self.failed / name, source.with_suffix(".bad")):
            try:
                source.rename(target)
                self.sync()
                return target
            except OSError as error:
                log.warning("could not set a spool file aside", spool_file=name, dest=target, error=_reason(error))
        return None

    def keep(self, name: str, data: bytes) -> Path:
        """Writes a file into ``failed/``, to the disk. Raises `OSError`."""
        target = self.failed / name
        unfinished = target.with_suffix(".new")
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        unfinished.rename(target)
        _sync(self.failed)
        return target

    def sync(self) -> None:
        """Writes the directory itself to the disk: names are not safe before."""
        _sync(self.path)

    def _names(self, *endings: str) -> list[str]:
        with suppress(FileNotFoundError, NotADirectoryError):
            return sorted(name for name in os.listdir(self.path) if name.endswith(endings))
        return []


def begun_at(name: str) -> float:
    """When a file was begun, in seconds since the epoch, by its name; 0 for a foreign name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) / 1000 if match else 0.0


def _belongs_to_us(path: Path) -> None:
    """Raises `OSError` for a directory that somebody else could put files into: they would be pushed as ours."""
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "it is not a directory that only this user can write to")


def _lock(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
