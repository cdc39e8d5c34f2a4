"""The workers of one broker: the directory where they meet, and the one among them that is the *holder*.

Some things only one worker of a broker may do: hold the mesh's TCP port, drain the spool, run the periodic
jobs. It is the one that has the lock on a file of the run directory. The kernel releases the lock when
its process ends in any way, and another worker has it within a second.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

import gevent
from gevent.event import Event

from queen.log import Log

log = Log("siblings")

_TRY_SECONDS = 0.5
_LOCK = "holder"


class RunDirectoryError(Exception):
    """The run directory can't be used; the message names it and the remedy."""


class Siblings:
    """This worker among those of its broker. ``instance`` is its random name, of 16 hex digits."""

    def __init__(self, directory: str = "") -> None:
        self._configured = directory
        self._lock = -1
        self._loop: gevent.Greenlet[[], None] | None = None
        self._held = Event()
        self._temporary = False
        self.directory = Path()
        self.instance = secrets.token_hex(8)

    @property
    def holder(self) -> bool:
        """Whether this worker is the one that does what only one may do."""
        return self._lock >= 0

    def wait_holder(self, seconds: float | None = None) -> bool:
        """Sleeps until this worker is the holder; False when the seconds are over first."""
        return bool(self._held.wait(seconds))

    def start(self) -> None:
        """Enters the run directory, and becomes the holder now if there is none. Raises `RunDirectoryError`."""
        self.directory, self._temporary = run_directory(self._configured)
        self._try()
        self._loop = gevent.spawn(self._keep_trying)

    def stop(self) -> None:
        """Leaves the place of the holder to another."""
        if self._loop is not None:
            self._loop.kill()
        if self._lock >= 0:
            if self._temporary:
                # Whoever waits for this lock has another file to lock; the last of the workers tidies up.
                with suppress(OSError):
                    os.unlink(self.directory / _LOCK)
            os.close(self._lock)
            self._lock = -1
            self._held.clear()
        if self._temporary:
            with suppress(OSError):
                self.directory.rmdir()

    def _is_current(self, lock: int) -> bool:
        """Whether a lock is still that of the file of its name, which a holder that left may have removed."""
        try:
            return os.path.samestat(os.fstat(lock), os.stat(self.directory / _LOCK))
        except FileNotFoundError:
            return False

    def _keep_trying(self) -> None:
        while not self.holder:
            gevent.sleep(_TRY_SECONDS)
            with suppress(OSError):
                self._try()

    def _try(self) -> None:
        path = self.directory / _LOCK
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise RunDirectoryError(f"QUEEN_RUN_DIR {self.directory} can't be used: {error.strerror}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return
        if not self._is_current(lock):
            os.close(lock)
            return
        self._lock = lock
        self._held.set()
        log.debug("this worker is the holder", directory=self.directory)


def run_directory(configured: str) -> tuple[Path, bool]:
    """The directory where the workers of this broker meet, made if it is missing; whether it is temporary.

    The one configured, else systemd's, else one below the directory for temporary files that belongs to
    this user and to the master of this worker, and goes with the last of its workers. Raises
    `RunDirectoryError` when others could write to it.
    """
    given = configured or os.environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    if given:
        path = Path(given)
        _enter(path)
        return path, False
    home = Path(tempfile.gettempdir()) / f"queen-{os.getuid()}"
    path = home / str(os.getppid())
    _enter(home)
    _enter(path)
    return path, True


def _enter(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise RunDirectoryError(f"QUEEN_RUN_DIR {path} can't be made: {error.strerror}") from None
    open_to_others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or open_to_others:
        raise RunDirectoryError(
            f"QUEEN_RUN_DIR {path} must be a directory of the broker's user that nobody else can write to; "
            "name another one or correct its owner and mode"
        )
