"""One server process that a script starts, watches and ends, and how such a script is ended itself.

Nothing of it outlives the script: a stop waits for the process and kills what is left of its group, and
after a SIGKILL of the script a guard outside of it asks the process to stop.
"""

from __future__ import annotations

import errno
import http.client
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from _checkout import ROOT, fail

if TYPE_CHECKING:
    from queen.db.embedded import Guard

STOP_SECONDS = 40.0
MAX_LOG_BYTES = 16 * 1024 * 1024


class Service:
    """A server process with a name, a log that it appends to and an HTTP path that says it is well."""

    def __init__(
        self,
        name: str,
        command: list[str],
        environment: dict[str, str],
        log: Path,
        address: str,
        port: int,
        health: str,
    ) -> None:
        """Describe it; nothing is started yet. Takes the arguments of Python's interpreter as the command."""
        self.name = name
        self.address = address
        self.port = port
        self.log = log
        self._command = command
        self._environment = environment
        self._health = health
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: Guard | None = None

    @property
    def pid(self) -> int | None:
        """Its process id, or None when it doesn't run."""
        return self._process.pid if self._process and self._process.poll() is None else None

    @property
    def url(self) -> str:
        """Where it answers."""
        return url_of(self.address, self.port)

    def start(self) -> None:
        """Start it out of reach of the terminal: Ctrl-C stops it when it is its turn."""
        from queen.db.embedded import Guard

        if self.log.exists() and self.log.stat().st_size > MAX_LOG_BYTES:
            self.log.replace(self.log.with_suffix(".old"))
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, *self._command],
                cwd=ROOT,
                env={**self._environment, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._guard = Guard(self._process.pid, signal.SIGTERM)

    def ask_to_stop(self) -> None:
        """Let it finish what it does; doesn't wait."""
        if self._process and self._process.poll() is None:
            self._process.terminate()

    def stop(self) -> None:
        """Ask it to finish what it does, and don't wait for ever. Harmless when it doesn't run."""
        if not self._process:
            return
        self.ask_to_stop()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        # Whatever is left: workers of a master that was killed, or a master that doesn't stop.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._guard:
            self._guard.dismiss()
        self._process = self._guard = None

    def healthy(self) -> bool:
        """Whether it answers 200 on its health path."""
        return is_healthy(self.address, self.port, self._health)

    def tail(self, lines: int = 20) -> str:
        """Return the last lines of its log."""
        return tail(self.log, lines)


def is_healthy(address: str, port: int, path: str) -> bool:
    """Whether a server answers 200 on its health path within 5 seconds."""
    connection = http.client.HTTPConnection(reachable(address), port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def tail(path: Path, lines: int = 20) -> str:
    """Return the last lines of a log, empty when there is none."""
    with suppress(FileNotFoundError):
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    return ""


def gunicorn(configuration: str, application: str) -> list[str]:
    """Return the interpreter's arguments that serve an application of this checkout."""
    return ["-m", "gunicorn", "-k", "gevent", "-c", configuration, application]


def check_port(address: str, port: int, remedy: str) -> None:
    """End with a clear message and the remedy if nothing could listen there, before anything is made."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.strip("[]"), port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                fail(f"Port {port} on {address} is in use by another program. {remedy}")
            fail(f"Queen can't listen on {address}, port {port}: {error}.")


def reachable(address: str) -> str:
    """Return an address to connect to for one to listen on."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address.strip("[]"), address.strip("[]"))


def url_of(address: str, port: int) -> str:
    """Return the URL to show."""
    host = reachable(address)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def stop_like_ctrl_c() -> None:
    """Make SIGTERM, and the end of the terminal unless `nohup` said otherwise, stop us as Ctrl-C does.

    SIGINT is named too: a shell script starts what it runs in the background with that one ignored.
    """
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    for number in numbers:
        signal.signal(number, signal.default_int_handler)


def ignore_signals() -> None:
    """Let nothing interrupt the clean-up, which has its own limits of time."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
