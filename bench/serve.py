"""Servers that the generator starts by itself: the hello view, and with --serve a whole broker."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.admin import call, wait_until_healthy
from bench.database import conninfo_from_environment
from bench.measure import say
from bench.workload import Target

_ROOT = Path(__file__).resolve().parent.parent
_HOST = "127.0.0.1"
_START_SECONDS = 60.0
_STOP_SECONDS = 40.0


class ServeError(RuntimeError):
    """A server could not be started; the message says why."""


def free_port() -> int:
    """A port of the loopback address that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def gunicorn(arguments: list[str], port: int, environment: dict[str, str]) -> Iterator[None]:
    """Run gunicorn while the block runs; its output goes to a file that is shown when it fails."""
    command = [sys.executable, "-m", "gunicorn", "-k", "gevent", "-b", f"{_HOST}:{port}", *arguments]
    with tempfile.NamedTemporaryFile("w+", prefix="bench-", suffix=".log") as log:
        process = subprocess.Popen(
            command, cwd=_ROOT, env=os.environ | environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            yield
        except ServeError as error:
            process.poll()
            log.seek(0)
            raise ServeError(f"{error}\n{log.read()[-4000:]}") from None
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop gracefully, and for sure."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def hello_server(connections: int) -> Iterator[Target]:
    """One gevent worker with the hello view."""
    port = free_port()
    limit = str(max(1000, 2 * connections))
    arguments = ["-w", "1", "--worker-connections", limit, "bench.hello_app:app"]
    with gunicorn(arguments, port, {}):
        target = Target(_HOST, port)
        _wait_for_page(target)
        yield target


def _wait_for_page(target: Target) -> None:
    failure = wait_until_healthy(target, _START_SECONDS, "/")
    if failure:
        raise ServeError(f"the hello view does not answer: {failure}")


@contextlib.contextmanager
def database() -> Iterator[tuple[dict[str, str], str]]:
    """The PG_* variables of a broker and a connection string: of the environment, or of a new server."""
    conninfo = conninfo_from_environment()
    if conninfo:
        yield {}, conninfo
        return
    try:
        from queen.db.embedded import EmbeddedError, EmbeddedServer
    except ImportError as error:
        raise ServeError(f"--serve needs the project with its extra `embedded`, or PG_HOST: {error}") from None
    directory = Path(tempfile.mkdtemp(prefix="queen-bench-"))
    directory.chmod(0o711)  # as root, PostgreSQL runs as another account, which must get in
    server = EmbeddedServer(directory / "postgresql")
    try:
        say("starting an embedded PostgreSQL ...")
        server.start()
        yield server.environment(), server.dsn()
    except EmbeddedError as error:
        raise ServeError(str(error)) from None
    finally:
        with contextlib.suppress(EmbeddedError):
            server.destroy()
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def broker() -> Iterator[tuple[Target, str]]:
    """A broker as the documentation starts it, on a free port, with its database."""
    config = _ROOT / "conf" / "gunicorn.conf.py"
    with database() as (environment, conninfo), tempfile.TemporaryDirectory(prefix="queen-bench-spool-") as spool:
        port = free_port()
        say(f"starting a broker on {_HOST}:{port} ...")
        environment |= {"PORT": str(port), "QUEEN_BIND_ADDR": _HOST, "FILE_BUFFER_DIR": spool}
        with gunicorn(["-c", str(config), "queen.wsgi"], port, environment):
            target = Target(_HOST, port)
            failure = wait_until_healthy(target, _START_SECONDS)
            if failure:
                raise ServeError(f"the broker is not healthy: {failure}")
            yield target, conninfo


def version_of(target: Target) -> str:
    """The health answer of a broker, as text; empty when there is none."""
    try:
        status, body = call(target, "GET", "/health")
    except OSError:
        return ""
    return body.decode("utf-8", "replace") if status == 200 else ""
