"""What a broker gets to see of a request, and what is sent again when it dies: a push never is."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.broker import HOST
from tests.proxy.stage import Proxy

TENANT = "11111111-2222-3333-4444-555555555555"
EMPTY = b"HTTP/1.1 204 No Content\r\nX-Kept: yes\r\nConnection: keep-alive, x-dropped\r\nX-Dropped: no\r\n\r\n"


class Cell:
    """A listener in a broker's place that keeps what it reads, and answers or hangs up as it is told."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []
        self.answers: list[bytes] = []
        self._listener = socket.create_server((HOST, 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while data := connection.recv(1 << 20):
                self.requests.append(data)
                if not self.answers:
                    return
                connection.sendall(self.answers.pop(0))


@pytest.fixture(scope="module")
def cell() -> Iterator[Cell]:
    cell = Cell()
    yield cell
    cell.close()


@pytest.fixture(scope="module")
def proxy(cell: Cell, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """A proxy without a database before the cell."""
    directory: Path = tmp_path_factory.mktemp("dev")
    proxy = Proxy(directory, {}, "proxy")
    try:
        yield proxy.start(
            {
                "QUEEN_PROXY_DEV_CELL_URL": f"http://{HOST}:{cell.port}",
                "QUEEN_PROXY_DEV_CELL_TOKEN": "cell-token",
                "QUEEN_PROXY_DEV_TENANT": TENANT,
                "QUEEN_PROXY_DEV_INSECURE": "true",
            }
        )
    finally:
        proxy.kill()


@pytest.fixture(autouse=True)
def fresh(cell: Cell) -> None:
    cell.requests.clear()
    cell.answers.clear()


def test_headers_are_taken_off_and_put_on(cell: Cell, proxy: Proxy) -> None:
    cell.answers = [EMPTY]
    target = "/api/v1/pop/queue/a%2Fb?batch=1&x=%20"
    sent = {
        "Authorization": "Bearer of-the-client",
        "X-Queen-Tenant": "00000000-0000-0000-0000-000000000001",
        "x_queen_tenant": "00000000-0000-0000-0000-000000000001",
        "Cookie": "a=1; queen_session=secret; b=2",
        "Connection": "close, x-mine",
        "X-Mine": "hop",
        "X-Other": "kept",
        "X-Forwarded-For": "10.0.0.1",
    }
    response = proxy.request("GET", target, None, sent)
    (request,) = cell.requests
    lines = request.decode().split("\r\n")
    headers = [line.partition(": ") for line in lines[1:] if line]
    fields = {name.lower(): value for name, _, value in headers}
    assert len(fields) == len(headers)
    assert lines[0] == f"GET {target} HTTP/1.1"
    assert fields.pop("x-queen-request-id") == response.headers["x-queen-request-id"]
    assert fields == {
        "host": f"{HOST}:{cell.port}",
        "authorization": "Bearer cell-token",
        "x-queen-tenant": TENANT,
        "cookie": "a=1; b=2",
        "x-other": "kept",
        "x-forwarded-for": f"10.0.0.1, {HOST}",
    }
    assert (response.status, response.headers["X-Kept"], response.headers["X-Dropped"]) == (204, "yes", None)


@pytest.mark.parametrize(
    ("method", "target", "sent", "status"),
    [
        ("POST", "/api/v1/push", 1, 502),
        ("POST", "/api/v1/ack", 1, 502),
        ("GET", "/api/v1/resources/queues", 1, 502),
        ("GET", "/api/v1/pop/queue/q", 1, 502),
        ("GET", "/api/v1/pop/queue/q?wait=true", 2, 502),
        ("GET", "/api/v1/pop/queue/q?wait=true&autoAck=true", 1, 502),
    ],
)
def test_what_reached_a_fresh_connection(
    cell: Cell, proxy: Proxy, method: str, target: str, sent: int, status: int
) -> None:
    body = {"items": []} if method == "POST" else None
    assert proxy.request(method, target, body).status == status
    assert len(cell.requests) == sent


@pytest.mark.parametrize(
    ("method", "target", "sent"),
    [
        ("POST", "/api/v1/push", 1),
        ("DELETE", "/api/v1/resources/queues/q", 1),
        ("GET", "/api/v1/resources/queues", 2),
        ("GET", "/api/v1/pop/queue/q", 2),
        ("GET", "/api/v1/pop/queue/q?autoAck=true", 1),
    ],
)
def test_what_reached_a_kept_connection(cell: Cell, proxy: Proxy, method: str, target: str, sent: int) -> None:
    cell.answers = [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"]
    assert proxy.request("GET", "/api/v1/resources/queues").body == b"{}"
    cell.requests.clear()
    assert proxy.request(method, target, {"items": []} if method == "POST" else None).status == 502
    assert len(cell.requests) == sent


def test_bodies_pass_as_they_are(cell: Cell, proxy: Proxy) -> None:
    body = b'[{"status":"queued" , "x":"\\ud800"}]'
    cell.answers = [
        b"HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    ]
    sent = b'{ "items" : [ {"queue":"q","payload": 1.0 , "a":1, "a":2} ] }'
    response = proxy.request("POST", "/api/v1/push", sent)
    assert (response.status, response.body) == (201, body)
    assert cell.requests[0].endswith(b"\r\n\r\n" + sent)
