"""A cut network between two brokers, each in a network namespace of its own: latency changes, nothing else.

Needs root on Linux, or is skipped.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from queen.db.embedded import Guard
from tests.broker import ROOT, Broker, wait_until
from tests.conftest import Database
from tests.mesh.cluster import LONG, Consumer, latencies, stats, wait_connected

ENV = {
    "POP_WAIT_MAX_INTERVAL_MS": "5000",
    "QUEEN_SYNC_SECRET": "s3cr3t",
    "QUEEN_SYNC_HEARTBEAT_MS": "100",
    "QUEEN_SYNC_DEAD_THRESHOLD_MS": "3000",
    "QUEEN_MESH_ALLOW": "peers",
}


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Net:
    """Two namespaces, linked with each other and each with this one."""

    def __init__(self) -> None:
        self.names = [f"queen{os.getpid()}{letter}" for letter in "ab"]
        block = os.getpid() % 4000
        self._base = f"10.{200 + block // 256}.{block % 256}"
        self._links = [f"q{os.getpid()}{letter}" for letter in "ab"]

    def make(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        for at, (name, link) in enumerate(zip(self.names, self._links, strict=True)):
            ip("link", "add", link, "type", "veth", "peer", "name", "up0", "netns", name)
            ip("address", "add", f"{self.outside(at)}/30", "dev", link)
            ip("link", "set", link, "up")
            ip("-n", name, "address", "add", f"{self.inside(at)}/30", "dev", "up0")
            ip("-n", name, "link", "set", "up0", "up")
        ip("-n", self.names[0], "link", "add", "mesh0", "type", "veth", "peer", "name", "mesh0", "netns", self.names[1])
        for at, name in enumerate(self.names):
            ip("-n", name, "address", "add", f"{self.between(at)}/30", "dev", "mesh0")
        self.mend()

    def remove(self) -> None:
        for name in self.names:
            with suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)

    def outside(self, at: int) -> str:
        return f"{self._base}.{8 * at + 1}"

    def inside(self, at: int) -> str:
        return f"{self._base}.{8 * at + 2}"

    def between(self, at: int) -> str:
        return f"{self._base}.{64 + at + 1}"

    def cut(self) -> None:
        ip("-n", self.names[0], "link", "set", "mesh0", "down")

    def mend(self) -> None:
        for name in self.names:
            ip("-n", name, "link", "set", "mesh0", "up")


class Forwarder:
    """Makes a port of this namespace's loopback reachable at another address."""

    def __init__(self, address: str, target: tuple[str, int]) -> None:
        self._target = target
        self._server = socket.create_server((address, target[1]))
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(self._target)
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    @staticmethod
    def _copy(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


class DistantBroker(Broker):
    """A broker in a namespace."""

    def __init__(self, directory: Path, postgres: Mapping[str, str], name: str, namespace: str, address: str) -> None:
        super().__init__(directory, postgres, name)
        self._namespace = namespace
        self._address = address

    def connect(self, timeout: float = 60.0) -> socket.socket:
        return socket.create_connection((self._address, self.port), timeout)

    def _launch(self) -> None:
        command = "-m gunicorn -k gevent -c conf/gunicorn.conf.py queen.wsgi".split()
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                ["ip", "netns", "exec", self._namespace, sys.executable, *command],
                cwd=ROOT,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._guard = Guard(self._process.pid, signal.SIGTERM)


@pytest.fixture
def net() -> Iterator[Net]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and ip(8)")
    net = Net()
    try:
        try:
            net.make()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces can't be made here: {error.stderr.decode().strip()}")
        yield net
    finally:
        net.remove()


@pytest.fixture
def pair(net: Net, database: Database, tmp_path: Path) -> Iterator[list[DistantBroker]]:
    """Two brokers that reach each other over the link between them, and PostgreSQL over their own."""
    postgres = database.environment()
    target = (postgres["PG_HOST"], int(postgres["PG_PORT"]))
    forwarders, brokers = [], []
    try:
        for at, name in enumerate(net.names):
            forwarders.append(Forwarder(net.outside(at), target))
            broker = DistantBroker(
                tmp_path / f"broker-{at + 1}",
                {**postgres, "PG_HOST": net.outside(at)},
                f"broker-{at + 1}",
                name,
                net.inside(at),
            )
            brokers.append(broker)
            mesh = {
                "QUEEN_MESH_PORT": "6633",
                "QUEEN_MESH_BIND_ADDR": net.between(at),
                "QUEEN_MESH_PEERS": net.between(1 - at),
            }
            broker.start({**ENV, **mesh, "QUEEN_BIND_ADDR": "0.0.0.0"}, wait=False)
        for broker in brokers:
            broker.wait_healthy()
            wait_connected(broker, 1)
        yield brokers
    finally:
        for broker in brokers:
            broker.kill()
        for forwarder in forwarders:
            forwarder.close()


def test_a_cut_between_brokers_costs_latency_and_nothing_else(net: Net, pair: list[DistantBroker]) -> None:
    here, there = pair
    assert statistics.median(latencies(here, there, "whole", 10)) < 0.5

    net.cut()
    with Consumer(there, "queue/whole") as consumer:
        here.push([{"queue": "whole", "payload": "cut"}])
        assert consumer.wait("cut") < 5 + 10
    for broker, other in ((here, there), (there, here)):
        line = f"mesh: peer down peer={other.name} threshold_ms=3000"
        wait_until(lambda broker=broker, line=line: line in broker.log(), LONG, "the cut is noticed")  # type: ignore[misc]
        wait_until(lambda broker=broker: not stats(broker)["peers"][0]["connected"], LONG, "the cut ends it")  # type: ignore[misc]
    assert here.request("POST", "/api/v1/system/maintenance/pop", {"enabled": True}).status == 200
    assert not there.request("GET", "/api/v1/system/shared-state").json()["pop_maintenance_mode"]

    net.mend()
    for broker in pair:
        wait_connected(broker, 1)
    # The flip was missed, and is looked up when the peer is back.
    wait_until(
        lambda: there.request("GET", "/api/v1/system/shared-state").json()["pop_maintenance_mode"], LONG, "the flag"
    )
    here.request("POST", "/api/v1/system/maintenance/pop", {"enabled": False})
    assert statistics.median(latencies(here, there, "mended", 10)) < 0.5
    assert [here.log().count(line) for line in ("mesh: peer down", "mesh: peer recovered")] == [1, 1]
