"""Brokers that are peers of one another, and what tests ask them."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

import psutil

from queen.db.embedded import free_port
from tests.broker import Broker, wait_until
from tests.conftest import Brokers

LONG = 30.0


def cluster(brokers: Brokers, count: int, env: Mapping[str, str] | None = None, workers: int = 1) -> list[Broker]:
    """Start brokers that are peers of one another, and return when all are connected."""
    ports = [free_port() for _ in range(count)]
    started = [
        brokers(
            {
                "QUEEN_MESH_PORT": str(ports[here]),
                "QUEEN_MESH_PEERS": ",".join(f"127.0.0.1:{port}" for port in ports if port != ports[here]),
                **(env or {}),
            },
            workers=workers,
            wait=False,
        )
        for here in range(count)
    ]
    for broker in started:
        wait_serving(broker, workers)
    for broker in started:
        wait_connected(broker, count - 1)
    return started


def wait_serving(broker: Broker, workers: int) -> None:
    """Wait until each worker of a broker serves."""
    broker.wait_healthy()
    wait_until(lambda: broker.log().count(" boot: listening ") >= workers, LONG, "all workers serve")


def wait_connected(broker: Broker, peers: int) -> None:
    """Wait until a broker is connected to all its peers and has heard from them."""

    def connected() -> bool:
        body = stats(broker)
        return all(peer["connected"] for peer in body["peers"]) and body["servers_alive"] == peers

    wait_until(connected, LONG, f"{broker.name} is connected")


def stats(broker: Broker) -> dict[str, Any]:
    """The broker's own view of the mesh."""
    body: dict[str, Any] = broker.request("GET", "/internal/api/shared-state/stats").json()
    return body


def mesh_port(broker: Broker) -> int:
    port: int = stats(broker)["port"]
    return port


def listener_pid(port: int) -> int | None:
    """The process that listens on a port."""
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
            return connection.pid
    return None


class Consumer:
    """A consumer that waits at one broker, pop after pop, and notes when each message came.

    Takes what follows ``/api/v1/pop/`` in its pops, and more of their query.
    """

    def __init__(self, broker: Broker, target: str, timeout: int = 1000, **params: Any) -> None:
        query = urlencode({"autoAck": "true", "wait": "true", "timeout": timeout, **params})
        path, _, more = target.partition("?")
        self._broker = broker
        self._target = f"/api/v1/pop/{path}?{more}&{query}".replace("pop/?", "pop?")
        self.came: dict[str, float] = {}
        self._stop = False
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Consumer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()

    def _run(self) -> None:
        while not self._stop:
            # The broker may be killed under it.
            with contextlib.suppress(OSError, http.client.HTTPException):
                answer = self._broker.request("GET", self._target)
                for message in answer.json()["messages"] if answer.status == 200 else []:
                    self.came[message["data"]] = time.monotonic()

    def has(self, payload: str) -> bool:
        return payload in self.came

    def wait(self, payload: str) -> float:
        """Wait for a message; how many seconds after the call it came, below zero if it was there already."""
        started = time.monotonic()
        wait_until(lambda: self.has(payload), LONG, f"{payload} comes")
        return self.came[payload] - started


class Line:
    """A connection that is kept, and so stays with one worker of a broker: any, or another than that of a line."""

    def __init__(self, broker: Broker, elsewhere: Line | None = None) -> None:
        self.worker = 0
        while not self.worker or (elsewhere is not None and self.worker == elsewhere.worker):
            self._connection = http.client.HTTPConnection("127.0.0.1", broker.port, timeout=60)
            self._connection.connect()
            self.worker = wait_until(lambda: self._accepted_by(broker), LONG, "a worker takes the connection")

    def _accepted_by(self, broker: Broker) -> int:
        port = self._connection.sock.getsockname()[1]
        for pid in broker.worker_pids():
            with contextlib.suppress(psutil.NoSuchProcess):
                peers = (one.raddr for one in psutil.Process(pid).net_connections("tcp") if one.raddr)
                if port in (peer.port for peer in peers):
                    return pid
        return 0

    def request(self, method: str, target: str, body: Any = None) -> Any:
        """What the worker answers, decoded; None when that is nothing."""
        payload = None if body is None else json.dumps(body)
        self._connection.request(method, target, payload, {"Content-Type": "application/json"})
        answer = self._connection.getresponse().read()
        return json.loads(answer) if answer else None

    def close(self) -> None:
        self._connection.close()


def latencies(pusher: Broker, popper: Broker, queue: str, count: int) -> list[float]:
    """Push messages one by one, each when the consumer waits again; seconds until it had each."""
    took = []
    with Consumer(popper, f"queue/{queue}") as consumer:
        for number in range(count):
            payload = f"{queue}-{number}"
            time.sleep(0.03)  # the consumer is back in its wait, or will find the message there
            sent = time.monotonic()
            pusher.push([{"queue": queue, "payload": payload}])
            consumer.wait(payload)
            took.append(consumer.came[payload] - sent)
    return took


def quantile(values: list[float], share: float) -> float:
    """The value below which that share of them is."""
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]
