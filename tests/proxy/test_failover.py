"""Brokers stop and die behind the proxy, clients leave it: nobody downstream has to do anything about it."""

from __future__ import annotations

import contextlib
import threading
import time

import psutil

from tests.broker import Broker, wait_until
from tests.proxy.conftest import Stack


def test_next_push_succeeds_when_a_broker_is_gone(stack: Stack) -> None:
    first, second = stack.brokers
    assert stack.push("failover", 1).status == 201
    for gone, end in ((first, kill), (second, Broker.stop)):
        end(gone)
        assert stack.push("failover", 2).status == 201
        gone.restart()
        assert stack.push("failover", 3).status == 201


def test_poll_that_loses_its_broker_is_answered(stack: Stack) -> None:
    answers: list[int] = []

    def poll() -> None:
        answers.append(stack.pop("lonely", "wait=true&timeout=30000").status)

    thread = threading.Thread(target=poll)
    thread.start()
    wait_until(lambda: _parked(stack) == 1, 10, "the poll is parked")
    holder = next(broker for broker in stack.brokers if _connections(stack, broker.port))
    kill(holder)
    try:
        assert stack.push("lonely", 1).status == 201
        thread.join(60)
        assert answers in ([200], [204], [502])
        assert answers == [200] or stack.pop("lonely").status == 200
    finally:
        holder.restart()


def test_client_that_leaves_takes_no_lease(stack: Stack) -> None:
    for _ in range(5):
        with stack.proxy.connect() as connection:
            head = f"GET /api/v1/pop/queue/left?wait=true&timeout=30000 HTTP/1.1\r\nHost: {stack.acme.slug}.x\r\n"
            connection.sendall(f"{head}Authorization: Bearer {stack.acme.key}\r\n\r\n".encode())
            wait_until(lambda: _parked(stack) >= 1, 10, "the poll is parked")
        wait_until(lambda: _parked(stack) == 0, 10, "the poll is given up")
    assert stack.push("left", 1).status == 201
    assert len(stack.pop("left", "wait=true&timeout=5000").json()["messages"]) == 1


def test_both_brokers_gone_is_a_502_and_the_proxy_stays_healthy(stack: Stack) -> None:
    for broker in stack.brokers:
        kill(broker)
    try:
        started = time.monotonic()
        response = stack.push("nobody", 1)
        assert (response.status, response.json()) == (502, {"code": "bad_gateway", "error": "upstream unreachable"})
        assert time.monotonic() - started < 20
        assert stack.proxy.request("GET", "/healthz").status == 200
    finally:
        for broker in stack.brokers:
            broker.restart()


def kill(broker: Broker) -> None:
    """Kill a broker, and wait until the kernel has closed its workers' connections too."""
    workers = broker.worker_pids()
    broker.kill()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in workers), 20, "the workers are gone")


def _connections(stack: Stack, port: int) -> int:
    """How many connections the proxy has to a broker's port."""
    (pid,) = stack.proxy.worker_pids()
    with contextlib.suppress(psutil.Error):
        peers = (one.raddr for one in psutil.Process(pid).net_connections("tcp") if one.status == "ESTABLISHED")
        return sum(bool(peer) and peer.port == port for peer in peers)
    return 0


def _parked(stack: Stack) -> int:
    """How many polls wait: their connections to a broker are busy, which the kept ones are not."""
    (pid,) = stack.proxy.worker_pids()
    with contextlib.suppress(psutil.Error):
        peers = [one for one in psutil.Process(pid).net_connections("tcp") if one.status == "ESTABLISHED"]
        return sum(bool(one.raddr) and one.laddr.port == stack.proxy.port for one in peers)
    return 0
