"""What a worker takes from clients that send slowly, too much or nothing at all, and how it ends them."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from tests.broker import Broker, wait_until
from tests.conftest import Brokers, Database


def head(length: int, path: str = "/api/v1/push") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()


def response(client: socket.socket) -> tuple[int, Any]:
    """Read one response to the end of its connection."""
    data = b""
    with suppress(ConnectionResetError):
        while part := client.recv(65536):
            data += part
    top, _, body = data.partition(b"\r\n\r\n")
    assert b"application/json" in top, data
    return int(top.split()[1]), json.loads(body)


def push(broker: Broker, size: int = 10) -> int:
    return broker.request("POST", "/api/v1/push", {"items": [{"queue": "q", "payload": "x" * size}]}).status


def test_large_bodies_that_nobody_finishes_leave_room_for_small_ones(brokers: Brokers) -> None:
    broker = brokers({"QUEEN_MAX_BODY_BYTES": str(1 << 20), "QUEEN_BODY_ROOM_MB": "4"})
    with ExitStack() as stack:
        clients = [stack.enter_context(broker.connect()) for _ in range(40)]
        for client in clients:
            with suppress(OSError):  # refused while it sends
                client.sendall(head(1 << 20) + b"[" * 600_000)
        wait_until(lambda: len(select.select(clients, [], [], 0)[0]) > 20, 30, "most are refused")
        status, body = response(select.select(clients, [], [], 0)[0][0])
        assert (status, "try again" in body["error"]) == (503, True)
        assert push(broker) == 201
        assert push(broker, 500_000) == 503
    wait_until(lambda: push(broker, 500_000) == 201, what="those that left give their room back")


def test_a_body_that_announces_much_and_sends_little_takes_little(brokers: Brokers) -> None:
    broker = brokers({"QUEEN_MAX_BODY_BYTES": str(1 << 20), "QUEEN_BODY_ROOM_MB": "2"})
    with ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(broker.connect()).sendall(head(1 << 20) + b"[")
        assert push(broker, 500_000) == 201


@pytest.mark.parametrize("start", [head(1000) + b"{", head(100_000).replace(b"100000", b"900000") + b"[" * 50_000])
def test_a_body_that_does_not_come_in_time_is_given_up(brokers: Brokers, start: bytes) -> None:
    broker = brokers({"QUEEN_BODY_TIMEOUT_MS": "1000"})
    with broker.connect() as client:
        client.sendall(start)
        assert response(client) == (408, {"error": "the request body did not come in time"})


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"NONSENSE\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"GET /%b HTTP/1.1\r\n\r\n" % (b"x" * 20_000), 414),
        (b"GET / HTTP/1.1\r\nH: %b\r\n\r\n" % (b"x" * 20_000), 431),
        (b"GET / HTTP/1.1\r\nBad Header: 1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: nonsense\r\n\r\n", 501),
    ],
)
def test_what_is_no_request_is_refused_in_json(broker: Broker, request_: bytes, status: int) -> None:
    with broker.connect() as client:
        with suppress(OSError):
            client.sendall(request_)
        code, body = response(client)
    assert code == status
    assert list(body) == ["error"] and isinstance(body["error"], str) and body["error"]


def test_a_stop_does_not_wait_for_connections_without_a_request(broker: Broker) -> None:
    with broker.connect() as silent, broker.connect() as halfway:
        halfway.sendall(b"GET /status HTTP/1.1\r\nHo")
        assert broker.request("GET", "/status").status == 200  # both have been accepted
        started = time.monotonic()
        os.kill(broker.pid, signal.SIGTERM)
        wait_until(lambda: not broker.running, 15, "the broker has stopped")
        assert time.monotonic() - started < 15  # gunicorn alone waits for 20 s
        assert silent.recv(1) == halfway.recv(1) == b""


def test_the_broker_s_connections_are_divided_among_its_workers(brokers: Brokers, database: Database) -> None:
    broker = brokers({"DB_POOL_SIZE": "9"}, workers=2)
    wait_until(lambda: broker.log().count("listening") == 2, 30, "both workers serve")
    assert broker.log().count("pool=4") >= 2
