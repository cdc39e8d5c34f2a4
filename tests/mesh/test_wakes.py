"""What a push at one broker does to a pop that is parked at another: with the mesh, without it, and when its
frames go nowhere."""

from __future__ import annotations

import socket
import statistics
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from queen.db.embedded import free_port
from tests.broker import wait_until
from tests.conftest import Brokers
from tests.mesh.cluster import LONG, Consumer, cluster, latencies, stats

# A pop that is not woken looks by itself this often.
SLOW_LOOK = {"POP_WAIT_MAX_INTERVAL_MS": "5000"}
SECRET = {"QUEEN_SYNC_SECRET": "s3cr3t"}


@contextmanager
def black_hole() -> Iterator[int]:
    """A port where everything is accepted and nothing comes of it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        swallowed: list[socket.socket] = []

        def swallow() -> None:
            with suppress(OSError):
                while True:
                    swallowed.append(server.accept()[0])

        thread = threading.Thread(target=swallow, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in swallowed:
            connection.close()


@pytest.mark.parametrize("count", [2, 3])
def test_a_push_at_one_broker_wakes_a_pop_at_another(brokers: Brokers, count: int) -> None:
    several = cluster(brokers, count, {**SECRET, **SLOW_LOOK})
    took = latencies(several[0], several[-1], "orders", 20)
    # Milliseconds on a quiet machine; without a wake it would be seconds.
    assert statistics.median(took) < 0.5


def test_without_the_mesh_a_pop_looks_for_itself(brokers: Brokers) -> None:
    env = {"POP_WAIT_MAX_INTERVAL_MS": "400"}
    with black_hole() as nowhere:
        here = brokers({**env, "QUEEN_MESH_PEERS": f"127.0.0.1:{nowhere},127.0.0.1:{free_port()}"}, wait=False)
        there = brokers({**env, "QUEEN_SYNC_ENABLED": "0", "QUEEN_MESH_PEERS": "127.0.0.1"}, wait=False)
        here.wait_healthy()
        there.wait_healthy()
        wait_until(lambda: stats(here)["peers"][0]["connected"], LONG, "what is sent goes nowhere")
        for pusher, popper in ((here, there), (there, here)):
            took = latencies(pusher, popper, f"at-{popper.name}", 3)
            assert statistics.median(took) < 0.4 + 2.0
        assert stats(here)["messages_sent"] > 0
        assert stats(there) == {
            "enabled": False,
            "reason": "no_peers",
            "maintenance_mode": False,
            "pop_maintenance_mode": False,
        }
        assert "mesh:" not in there.log()


def test_waiting_pops_of_every_shape_are_woken(brokers: Brokers) -> None:
    """One partition, any partition, any queue of a namespace, and several groups at once."""
    here, there = cluster(brokers, 2, SLOW_LOOK)
    here.request("POST", "/api/v1/configure", {"queue": "orders", "namespace": "shop", "options": {}})
    with ExitStack() as stack:
        consumers = [
            stack.enter_context(Consumer(there, target, consumerGroup=f"g{number}", subscriptionMode="all"))
            for number, target in enumerate(["queue/orders", "queue/orders/partition/eu", "?namespace=shop"])
        ]
        for payload in ("first", "second", "third"):
            took = []
            here.push([{"queue": "orders", "partition": "eu", "payload": payload}])
            for consumer in consumers:
                took.append(consumer.wait(payload))
            assert payload == "first" or max(took) < 4.0


def test_a_list_of_peers_may_name_the_broker_itself(brokers: Brokers) -> None:
    ports = [free_port(), free_port()]
    peers = ",".join(f"127.0.0.1:{port}" for port in ports)
    here, there = (brokers({**SLOW_LOOK, "QUEEN_MESH_PORT": str(port), "QUEEN_MESH_PEERS": peers}) for port in ports)
    for broker in (here, there):
        wait_until(lambda broker=broker: all(p["connected"] for p in stats(broker)["peers"]), LONG, "all connected")  # type: ignore[misc]
        wait_until(lambda broker=broker: stats(broker)["servers_alive"] == 1, LONG, "hears the other, not itself")  # type: ignore[misc]
    assert statistics.median(latencies(here, there, "orders", 10)) < 0.5
    assert stats(here)["servers_alive"] == 1


def test_somebody_can_wake_a_queue_by_hand(brokers: Brokers) -> None:
    """With the partition, or without: then the broker looks which it was. The push goes past the mesh."""
    here, there = cluster(brokers, 2, SLOW_LOOK)
    aside = brokers()
    for name, body in (("a", {"queue": "a", "partition": "Default"}), ("b", {"queue": "b"})):
        with Consumer(there, f"queue/{name}") as consumer:
            aside.push([{"queue": name, "payload": "first"}])
            consumer.wait("first")
            aside.push([{"queue": name, "payload": "second"}])
            assert here.request("POST", "/internal/api/notify", body).json() == {"status": "ok"}
            consumer.wait("second")
            # Its own look would do too; two wakes in a row don't both meet one.
            aside.push([{"queue": name, "payload": "third"}])
            assert here.request("POST", "/internal/api/notify", body).json() == {"status": "ok"}
            took = consumer.wait("third")
            assert took < 4.0
    for wrong in ({}, [], {"queue": ""}, {"queue": 7}):
        answer = here.request("POST", "/internal/api/notify", wrong)
        assert (answer.status, answer.json()) == (400, {"error": "queue is required"})


def test_a_wake_for_what_cannot_be_does_not_harm_the_pops_of_its_queue(brokers: Brokers) -> None:
    """Names that PostgreSQL refuses, or that no partition has, come to nothing wherever they arrive."""
    here, there = cluster(brokers, 2)
    for broker in (here, there):
        broker.push([{"queue": "orders", "payload": f"before {broker.name}"}])
        with Consumer(broker, "queue/orders", consumerGroup=broker.name, subscriptionMode="all") as consumer:
            consumer.wait(f"before {broker.name}")
            for partition in ("\0", "a\0b", "x" * 100_000, "nobody", ""):
                body = {"queue": "orders", "partition": partition}
                assert here.request("POST", "/internal/api/notify", body).status == 200
            here.push([{"queue": "orders", "payload": f"after {broker.name}"}])
            consumer.wait(f"after {broker.name}")
        assert "pop failed" not in broker.log()
