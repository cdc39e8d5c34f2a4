"""Brokers as peers: what they tell each other besides wakes, who is let in, and who is missed."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from queen.db.embedded import free_port
from queen.mesh.frames import FrameReader, Tag, decode_object, encode, encode_object
from queen.mesh.hello import hello
from tests.broker import Broker, wait_until
from tests.conftest import Brokers
from tests.mesh.cluster import LONG, Consumer, cluster, latencies, mesh_port, stats, wait_connected

SLOW_LOOK = {"POP_WAIT_MAX_INTERVAL_MS": "5000"}
SECRET = "s3cr3t"
TENANT = "00000000-0000-0000-0000-000000000001"


def shared_state(broker: Broker) -> tuple[bool, bool]:
    """Both flags, from memory."""
    body = broker.request("GET", "/api/v1/system/shared-state").json()
    return body["maintenance_mode"], body["pop_maintenance_mode"]


@contextmanager
def dialled(broker: Broker, data: bytes = b"") -> Iterator[socket.socket]:
    """A connection to a broker's mesh port, with some bytes sent."""
    with socket.create_connection(("127.0.0.1", mesh_port(broker)), LONG) as connection:
        connection.sendall(data)
        yield connection


def original_hello(server_id: str) -> bytes:
    """A HELLO as the first releases sent it, without a secret."""
    return encode_object(Tag.HELLO, {"server_id": server_id, "nonce": "0" * 32, "mac": ""})


def test_a_flip_reaches_the_peer_and_outlives_it(brokers: Brokers) -> None:
    here, there = cluster(brokers, 2)
    for path, flags in (
        ("maintenance/pop", (False, True)),
        ("maintenance", (True, True)),
    ):
        started = time.monotonic()
        assert here.request("POST", f"/api/v1/system/{path}", {"enabled": True}).status == 200
        wait_until(lambda flags=flags: shared_state(there) == flags, LONG, "the peer has the flag")  # type: ignore[misc]
        assert time.monotonic() - started < 10, "a second on a quiet machine"
    assert stats(there)["maintenance_mode"] is True
    there.restart()
    assert shared_state(there) == (True, True)
    here.request("POST", "/api/v1/system/maintenance/pop", {"enabled": False})
    wait_until(lambda: shared_state(there) == (True, False), LONG, "the peer has the flag, as soon as it is back")


def test_a_changed_queue_is_new_at_the_peer_at_once(brokers: Brokers) -> None:
    """The delay of a queue is remembered where it is popped, for half a minute unless somebody says it changed."""
    here, there = cluster(brokers, 2, SLOW_LOOK)
    configure = {"queue": "orders", "options": {"delayedProcessing": 3600}}
    here.request("POST", "/api/v1/configure", configure)
    here.push([{"queue": "orders", "payload": "late"}])
    with Consumer(there, "queue/orders") as consumer:
        time.sleep(0.5)
        assert not consumer.came
        here.request("POST", "/api/v1/configure", {"queue": "orders", "options": {"delayedProcessing": 0}})
        assert consumer.wait("late") < 4.0


def test_a_group_that_is_moved_back_starts_over_at_the_peer(brokers: Brokers) -> None:
    here, there = cluster(brokers, 2, SLOW_LOOK)
    for number in range(20):
        here.push([{"queue": "orders", "partition": f"p{number}", "payload": f"m{number}"}])
    with Consumer(there, "queue/orders", consumerGroup="g", subscriptionMode="all") as consumer:
        for path in ("", "/partitions/p7"):
            for number in range(20):
                consumer.wait(f"m{number}")
            consumer.came.clear()
            answer = here.request(
                "POST",
                f"/api/v1/consumer-groups/g/queues/orders{path}/seek",
                {"timestamp": "2020-01-01T00:00:00Z"},
            )
            assert answer.status == 200
            assert consumer.wait("m7") < 4.0
            if path:
                assert set(consumer.came) == {"m7"}


def test_a_peer_with_another_secret_is_told_nothing_and_believed_nothing(brokers: Brokers) -> None:
    ports = [free_port(), free_port()]
    here, there = (
        brokers(
            {
                **SLOW_LOOK,
                "QUEEN_MESH_PORT": str(ports[at]),
                "QUEEN_MESH_PEERS": f"127.0.0.1:{ports[1 - at]}",
                "QUEEN_SYNC_SECRET": f"secret {at}",
            }
        )
        for at in range(2)
    )
    for broker in (here, there):
        wait_until(lambda broker=broker: stats(broker)["handshake_failures"] >= 2, LONG, "refusals")  # type: ignore[misc]
        body = stats(broker)
        assert body["signature_failures"] == body["handshake_failures"]
        assert (body["messages_received"], body["servers_alive"], body["servers_dead"]) == (0, 0, 0)
        assert broker.push([{"queue": broker.name, "payload": 1}])[0]["status"] == "queued"
        assert "handshake refused" in broker.log()
        assert "secret 0" not in broker.log()
        wait_until(lambda broker=broker: "closing the connection at once" in broker.log(), LONG, "a warning")  # type: ignore[misc]
    here.request("POST", "/api/v1/system/maintenance/pop", {"enabled": True})
    assert shared_state(there) == (False, False)


def test_a_peer_that_is_killed_is_reported_down_once_and_back_once(brokers: Brokers) -> None:
    env = {"QUEEN_SYNC_HEARTBEAT_MS": "100", "QUEEN_SYNC_DEAD_THRESHOLD_MS": "3000", **SLOW_LOOK}
    here, there = cluster(brokers, 2, env)
    assert "mesh: started server_id=broker-1 port=" in here.log()
    assert 'peers=1 auth="off"' in here.log()
    assert "QUEEN_SYNC_SECRET is empty" in here.log()
    there.kill()
    wait_until(lambda: "mesh: peer down peer=broker-2 threshold_ms=3000" in here.log(), LONG, "reported down")
    body = stats(here)
    assert (body["servers_alive"], body["servers_dead"]) == (0, 1)
    assert body["peers"][0] == {
        "host": "127.0.0.1",
        "port": body["peers"][0]["port"],
        "connected": False,
        "resolved": False,
        "resolved_ip": None,
    }
    # What is said meanwhile is for nobody: it is stale when the peer is back.
    before = body["messages_dropped"]
    for number in range(20):
        here.push([{"queue": "orders", "partition": f"p{number}", "payload": number}])
    there.restart()
    wait_until(lambda: "mesh: peer recovered peer=broker-2" in here.log(), LONG, "reported back")
    wait_connected(here, 1)
    assert stats(here)["messages_dropped"] > before
    assert [here.log().count(line) for line in ("mesh: peer down", "mesh: peer recovered")] == [1, 1]


def test_a_port_that_is_taken_is_tried_again(brokers: Brokers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        env = {"QUEEN_MESH_PORT": str(taken.getsockname()[1]), "QUEEN_MESH_PEERS": f"127.0.0.1:{free_port()}"}
        broker = brokers(env)
        wait_until(lambda: "bind_error" in stats(broker), LONG, "the port is taken")
        body = stats(broker)
        assert (body["enabled"], body["reason"]) == (False, "no_peers")
        assert broker.push([{"queue": "orders", "payload": 1}])[0]["status"] == "queued"
        time.sleep(0.6)
    wait_until(lambda: stats(broker)["enabled"], LONG, "the port is free, and the mesh is up")
    assert broker.log().count("TCP mesh bind failed, continuing with local waker only") == 1


def test_without_peers_nothing_listens_and_the_log_says_so(brokers: Brokers) -> None:
    port = free_port()
    broker = brokers({"QUEEN_MESH_PORT": str(port)})
    assert "mesh: mesh sync enabled but no peers configured — local waker only" in broker.log()
    for route in ("shared-state", "inter-instance"):
        assert broker.request("GET", f"/internal/api/{route}/stats").json() == {
            "enabled": False,
            "reason": "no_peers",
            "maintenance_mode": False,
            "pop_maintenance_mode": False,
        }
    with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), LONG):
        raise AssertionError("something listens on the mesh port")


def test_a_peer_of_an_older_release_is_understood_and_understands(brokers: Brokers) -> None:
    """The frames are as that release would write them; what it would read is read here."""
    with socket.create_server(("127.0.0.1", 0)) as older:
        older.settimeout(LONG)
        peers = f"127.0.0.1:{older.getsockname()[1]}"
        broker = brokers({**SLOW_LOOK, "QUEEN_MESH_PEERS": peers, "QUEEN_SYNC_HEARTBEAT_MS": "50"})
        connection, _ = older.accept()
        connection.settimeout(LONG)
        frames = FrameReader(connection.recv, suppress)

        def read(wanted: int) -> dict[str, object]:
            while True:
                frame = frames.read()
                assert frame is not None
                if frame[0] == wanted:
                    return decode_object(frame[1]) or {}

        said = read(Tag.HELLO)
        assert said["server_id"] == "broker-1"
        assert said["mac"] == ""
        read(Tag.HEARTBEAT)
        item = {"queue": "orders", "partition": "eu", "tenant": TENANT}
        with Consumer(broker, "queue/orders") as consumer, dialled(broker, original_hello("older")) as ours:
            wait_until(lambda: stats(broker)["servers_alive"] == 1, LONG, "it knows the older one")
            broker.push([{"queue": "orders", "partition": "eu", "payload": "first"}])
            consumer.wait("first")
            assert read(Tag.MESSAGE_AVAILABLE_BATCH) == {"items": [item]}
            assert read(Tag.HOTLIST_DIRTY_BATCH) == {"items": [item]}
            broker.request("POST", "/api/v1/configure", {"queue": "orders", "options": {}})
            assert read(Tag.QUEUE_CONFIG_SET) == {"queue": "orders", "tenant": TENANT}
            broker.request("DELETE", "/api/v1/resources/queues/nothing")
            assert read(Tag.QUEUE_CONFIG_DELETE) == {"queue": "nothing", "tenant": TENANT}
            broker.request("POST", "/api/v1/system/maintenance", {"enabled": True})
            assert read(Tag.MAINTENANCE_MODE_SET) == {"enabled": True}
            broker.request("POST", "/api/v1/system/maintenance", {"enabled": False})
            broker.request("POST", "/api/v1/system/maintenance/pop", {"enabled": False})
            assert read(Tag.POP_MAINTENANCE_MODE_SET) == {"enabled": False}
            broker.request("POST", "/internal/api/notify", {"queue": "orders", "partition": "eu"})
            assert read(Tag.MESSAGE_AVAILABLE) == item
            # And the other way round: without a tenant, as before there were any.
            bare = {"queue": "orders", "partition": "eu"}
            frames_of_old = [
                encode_object(Tag.HEARTBEAT, {"server_id": "older"}),
                encode_object(Tag.MESSAGE_AVAILABLE, bare),
                encode_object(Tag.HOTLIST_DIRTY_BATCH, {"items": [bare]}),
                encode(Tag.MESSAGE_AVAILABLE_BATCH, b"{}"),
                encode_object(Tag.POP_MAINTENANCE_MODE_SET, {"enabled": True}),
            ]
            before = stats(broker)["messages_received"]
            ours.sendall(b"".join(frames_of_old))
            wait_until(lambda: shared_state(broker) == (False, True), LONG, "the flag is taken")
            assert stats(broker)["messages_received"] == before + len(frames_of_old)
        connection.close()


def test_hostile_peers_neither_grow_a_broker_nor_disturb_its_peers(brokers: Brokers) -> None:
    here, there = cluster(brokers, 2, {**SLOW_LOOK, "QUEEN_SYNC_SECRET": SECRET})
    worker = psutil.Process(there.worker_pids()[0])
    latencies(here, there, "before", 5)
    refused = stats(there)["handshake_failures"]
    before = worker.memory_info().rss
    captured = hello("mallory", "", SECRET.encode())
    dice = random.Random(1)
    idle = []
    port = mesh_port(there)
    for number in range(1000):
        connection = socket.create_connection(("127.0.0.1", port), LONG)
        with suppress(OSError):
            if number % 4 == 1:
                connection.sendall(dice.randbytes(dice.randrange(200)))
            elif number % 4 == 2:
                connection.sendall(b"\xff\xff\xff\xff\x02" + bytes(1000))
            elif number % 4 == 3:
                connection.sendall(captured)
        idle.append(connection)
    wait_until(lambda: stats(there)["handshake_failures"] > refused + 400, LONG, "they are refused")
    wait_until(lambda: stats(there)["nonce_replays"] > 0, LONG, "the replays are seen")
    took = latencies(here, there, "orders", 10)
    assert sorted(took)[5] < 0.5
    # One that knows the secret sends what no broker would.
    with dialled(there, hello("mallory", "", SECRET.encode())) as insider:
        for junk in (b"[]," * 1_000_000, b'{"a":{}},' * 300_000, b" " * 8_000_000):
            insider.sendall(encode(Tag.HOTLIST_DIRTY_BATCH, b'{"items":[' + junk + b"1]}"))
        insider.sendall(encode_object(Tag.MAINTENANCE_MODE_SET, {"enabled": "no"}))
        wait_until(lambda: stats(there)["frames_rejected"] >= 3, LONG, "it is rejected")
        took = latencies(here, there, "later", 10)
        assert sorted(took)[5] < 0.5
    for connection in idle:
        connection.close()
    assert worker.memory_info().rss - before < 150_000_000
    wait_connected(there, 2)  # the peer and, for a while, mallory
    assert shared_state(there) == (False, False)
    os.kill(worker.pid, signal.SIGTERM)
