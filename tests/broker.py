"""A real broker to test against: gunicorn processes, and HTTP that sends exactly what a test says.

Tests go through processes and sockets because that is where the promises are made: what a killed
worker leaves behind, or what an odd request path does, can't be seen from inside.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from email.message import Message
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, urlencode

import psutil

from queen.db.embedded import Guard, free_port

ROOT = Path(__file__).resolve().parent.parent
HOST = "127.0.0.1"

# Variables of the caller's shell that would change what a broker does.
_FOREIGN = ("PG", "PXDB_", "QUEEN_", "JWT_", "FILE_BUFFER_", "GUNICORN_", "WEB_CONCURRENCY", "PORT")

T = TypeVar("T")


def wait_until(predicate: Callable[[], T], timeout: float = 10.0, what: str = "") -> T:
    """Call `predicate` until it returns something true, and return that.

    This is how tests wait: for what they need, never for a time. Raises AssertionError, naming `what`,
    when the timeout passes first.
    """
    deadline = time.monotonic() + timeout
    while not (result := predicate()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout} s: {what or predicate}")
        time.sleep(0.02)
    return result


class Response(NamedTuple):
    """What came back: unpack it, or ask `json()`."""

    status: int
    headers: Message
    body: bytes

    def json(self) -> Any:
        """Return the decoded body; numbers and duplicate keys as Python's json has them."""
        return json.loads(self.body)


class Broker:
    """One broker: a gunicorn master with its workers, on a port that stays across restarts."""

    application = "-c conf/gunicorn.conf.py queen.wsgi"
    health_path = "/health"

    def __init__(self, directory: Path, postgres: Mapping[str, str], name: str = "broker") -> None:
        """Describe a broker; nothing is started yet.

        Takes a directory for its log, spool and sockets (made when missing), the PG_* variables of its
        database, and a name for its log and mesh identity.
        """
        self.name = name
        self.directory = directory
        self.port = free_port()
        self.url = f"http://{HOST}:{self.port}"
        self._log_path = directory / "log"
        self._base_env = dict(postgres)
        self._env: dict[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: Guard | None = None
        directory.mkdir(parents=True, exist_ok=True)

    # The process.

    def start(self, env: Mapping[str, str] | None = None, workers: int = 1, wait: bool = True) -> Broker:
        """Start it with these extra variables and workers; return when it is healthy, or at once."""
        assert not self.running, f"{self.name} runs already"
        self._env = {**self._defaults(), "WEB_CONCURRENCY": str(workers), **(env or {})}
        self._launch()
        if wait:
            self.wait_healthy()
        return self

    def stop(self, timeout: float = 40.0) -> int:
        """Ask for a graceful stop, wait for it, and return the exit status (0 when it doesn't run)."""
        if not self._process:
            return 0
        self._process.terminate()
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} doesn't stop\n{self.log()}") from None
        finally:
            self.kill()

    def wait_exit(self, timeout: float = 40.0) -> int:
        """Wait until a broker that can't start has ended, and return its exit status."""
        assert self._process, f"{self.name} doesn't run"
        return self._process.wait(timeout)

    def kill(self) -> None:
        """Kill master and workers at once with SIGKILL."""
        if self._process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._guard:
            self._guard.dismiss()
        self._process = self._guard = None

    def kill_worker(self) -> int:
        """Kill one worker with SIGKILL and return its process id; the master starts another."""
        pid = wait_until(self.worker_pids, what=f"a worker of {self.name}")[0]
        os.kill(pid, signal.SIGKILL)
        return pid

    def restart(self) -> Broker:
        """Stop it if it runs, and start it as it was started before."""
        self.stop()
        self._launch()
        self.wait_healthy()
        return self

    @property
    def pid(self) -> int:
        """The process id of the gunicorn master."""
        assert self._process, f"{self.name} doesn't run"
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the master lives."""
        return self._process is not None and self._process.poll() is None

    def worker_pids(self) -> list[int]:
        """Return the process ids of the living workers, oldest first."""
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.pid).children()
            return [child.pid for child in children if child.status() != psutil.STATUS_ZOMBIE]
        return []

    def wait_healthy(self, timeout: float = 30.0) -> None:
        """Wait until GET /health answers 200. Raises AssertionError with the log otherwise."""

        def healthy() -> bool:
            if not self.running:
                raise AssertionError(f"{self.name} stopped while starting\n{self.log()}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                return self.request("GET", self.health_path, timeout=5).status == 200
            return False

        try:
            wait_until(healthy, timeout, f"{self.name} is healthy")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log()}") from None

    def log(self) -> str:
        """Return all that it wrote, over all its starts."""
        return self._log_path.read_text(errors="replace") if self._log_path.exists() else ""

    def _defaults(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        return {
            **inherited,
            **self._base_env,
            "PORT": str(self.port),
            "QUEEN_BIND_ADDR": HOST,
            "QUEEN_SERVER_ID": self.name,
            "QUEEN_MESH_PORT": str(free_port()),
            "QUEEN_RUN_DIR": str(self.directory / "run"),
            "FILE_BUFFER_DIR": str(self.directory / "buffers"),
            "PYTHONUNBUFFERED": "1",
        }

    def _launch(self) -> None:
        command = f"-m gunicorn -k gevent {self.application}".split()
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._guard = Guard(self._process.pid, signal.SIGTERM)

    # HTTP.

    def connect(self, timeout: float = 60.0) -> socket.socket:
        """Return a fresh TCP connection, for what `request` can't say."""
        return socket.create_connection((HOST, self.port), timeout)

    def request(
        self,
        method: str,
        target: str | bytes,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 60.0,
    ) -> Response:
        """Send one request on a connection of its own and return the response.

        Takes the target as it goes on the wire: nothing is quoted or normalised. A body of bytes goes
        as it is, any other but None as JSON. Headers replace those that are sent by themselves (Host,
        Connection, Content-Length, Content-Type).
        """
        payload = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        head = _request_head(method, target, f"{HOST}:{self.port}", payload, headers or {})
        with self.connect(timeout) as connection:
            # A server may answer and hang up before it has read everything, and its answer counts.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(head + (payload or b""))
            response = http.client.HTTPResponse(connection, method=method)
            try:
                response.begin()
                return Response(response.status, response.headers, response.read())
            finally:
                response.close()

    def push(self, items: list[dict[str, Any]]) -> Any:
        """Push items and return the answer of each. Raises AssertionError unless all was accepted."""
        return self._expect(self.request("POST", "/api/v1/push", {"items": items}), 201)

    def pop(self, queue: str, partition: str | None = None, **params: Any) -> list[dict[str, Any]]:
        """Pop from a queue, or one of its partitions, and return the messages; none after a 204.

        Takes the query parameters as keywords; True and False go as `true` and `false`.
        """
        target = f"/api/v1/pop/queue/{quote(queue, safe='')}"
        if partition is not None:
            target += f"/partition/{quote(partition, safe='')}"
        for name, value in params.items():
            if isinstance(value, bool):
                params[name] = str(value).lower()
        response = self.request("GET", f"{target}?{urlencode(params)}")
        if response.status == 204:
            return []
        messages: list[dict[str, Any]] = self._expect(response, 200)["messages"]
        return messages

    def ack(self, message: Mapping[str, Any], status: str = "completed", **fields: Any) -> dict[str, Any]:
        """Acknowledge a popped message and return the one element of the answer.

        Keywords are more fields of the request, such as `consumerGroup` and `error`.
        """
        address = {name: message.get(name) for name in ("transactionId", "partitionId", "leaseId")}
        body = {**address, "status": status, **fields}
        answer = self._expect(self.request("POST", "/api/v1/ack", body), 200)
        element: dict[str, Any] = answer[0]
        return element

    def _expect(self, response: Response, status: int) -> Any:
        assert response.status == status, f"{response.status}: {response.body!r}"
        return response.json()


def _request_head(
    method: str, target: str | bytes, host: str, payload: bytes | None, headers: Mapping[str, str]
) -> bytes:
    """Return the request line and headers as bytes."""
    automatic = {"Host": host, "Connection": "close"}
    if payload is not None:
        automatic |= {"Content-Type": "application/json", "Content-Length": str(len(payload))}
    given = {name.lower() for name in headers}
    if "transfer-encoding" in given:
        given.add("content-length")
    fields = {name: value for name, value in automatic.items() if name.lower() not in given} | dict(headers)
    raw_target = target if isinstance(target, bytes) else target.encode("latin-1")
    lines = [b"%s %s HTTP/1.1" % (method.encode(), raw_target)]
    lines += [f"{name}: {value}".encode("latin-1") for name, value in fields.items()]
    return b"\r\n".join(lines) + b"\r\n\r\n"
