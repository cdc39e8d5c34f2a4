"""Several workers are one broker: they wake each other, agree on flags and numbers, and share one port."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.broker import Broker, wait_until
from tests.conftest import Brokers
from tests.mesh.cluster import (
    LONG,
    Consumer,
    Line,
    cluster,
    latencies,
    listener_pid,
    mesh_port,
    stats,
    wait_connected,
    wait_serving,
)

WORKERS = 3
SLOW_LOOK = {"POP_WAIT_MAX_INTERVAL_MS": "5000"}
WAITING = "autoAck=true&wait=true&timeout=30000"


@pytest.fixture
def broker(brokers: Brokers) -> Broker:
    """One broker of three workers without peers, all of which serve."""
    broker = brokers(SLOW_LOOK, workers=WORKERS)
    wait_serving(broker, WORKERS)
    return broker


def test_a_push_at_one_worker_wakes_a_pop_at_another(broker: Broker) -> None:
    """Within 10 ms on a quiet machine, most of it what the push and the pop take by themselves."""
    consumer = Line(broker)
    pusher = Line(broker, elsewhere=consumer)
    took = []
    with contextlib.closing(consumer), contextlib.closing(pusher), ThreadPoolExecutor(1) as thread:
        for number in range(30):
            popped = thread.submit(consumer.request, "GET", f"/api/v1/pop/queue/orders?{WAITING}")
            time.sleep(0.03)  # it waits, or will find the message there
            sent = time.monotonic()
            pusher.request("POST", "/api/v1/push", {"items": [{"queue": "orders", "payload": number}]})
            assert [message["data"] for message in popped.result()["messages"]] == [number]
            took.append(time.monotonic() - sent)
    assert statistics.median(took) < 0.1
    assert max(took) < 4.0, "a look of its own would take up to 5 s"


def test_pops_that_wait_at_every_worker_are_woken(broker: Broker) -> None:
    with contextlib.ExitStack() as stack:
        consumers = [
            stack.enter_context(Consumer(broker, "queue/orders", consumerGroup=f"g{n}", subscriptionMode="all"))
            for n in range(4 * WORKERS)
        ]
        for payload in ("first", "second", "third"):
            broker.push([{"queue": "orders", "payload": payload}])
            took = [consumer.wait(payload) for consumer in consumers]
            assert payload == "first" or max(took) < 4.0


@pytest.mark.parametrize("mode", ["maintenance", "maintenance/pop"])
def test_a_flag_is_the_same_at_every_worker_before_the_flip_is_answered(broker: Broker, mode: str) -> None:
    key = "pop_maintenance_mode" if mode.endswith("pop") else "maintenance_mode"

    def answers() -> set[bool]:
        """What the workers have in memory, whichever takes the connections."""
        return {broker.request("GET", "/api/v1/system/shared-state").json()[key] for _ in range(8 * WORKERS)}

    def flip(enabled: bool) -> None:
        assert broker.request("POST", f"/api/v1/system/{mode}", {"enabled": enabled}).status == 200

    flip(True)
    wait_until(lambda: answers() == {True}, LONG, "the workers have found each other")
    for enabled in (False, True, False):
        flip(enabled)
        assert answers() == {enabled}


def test_one_worker_holds_the_port_and_is_replaced_when_it_is_killed(brokers: Brokers) -> None:
    here, there = cluster(brokers, 2, SLOW_LOOK, workers=WORKERS)
    port = mesh_port(here)
    holder = listener_pid(port)
    assert holder in here.worker_pids()
    os.kill(holder, signal.SIGKILL)
    killed = time.monotonic()
    wait_until(lambda: listener_pid(port) not in (None, holder), LONG, "another worker listens")
    took = time.monotonic() - killed
    assert took < 10, "2 s on a quiet machine"
    wait_until(lambda: len(here.worker_pids()) == WORKERS, LONG, "the master has replaced it")
    wait_connected(there, 1)
    assert statistics.median(latencies(there, here, "orders", 10)) < 0.5
    assert here.log().count("bind failed") == 0


def test_numbers_are_those_of_the_broker_whichever_worker_answers(brokers: Brokers) -> None:
    here, there = cluster(
        brokers, 2, {"QUEEN_SYNC_HEARTBEAT_MS": "3600000", "QUEEN_SYNC_DEAD_THRESHOLD_MS": "3600000"}, workers=WORKERS
    )
    for number in range(10):
        here.push([{"queue": "orders", "partition": f"p{number}", "payload": number}])

    def agreed(broker: Broker, key: str) -> int | None:
        """What all answers say, when they say the same."""
        answers = {stats(broker)[key] for _ in range(4 * WORKERS)}
        return answers.pop() if len(answers) == 1 else None

    # A wake and a dirty hint for each push at most, when none of them is sent with another.
    sent = wait_until(lambda: agreed(here, "messages_sent"), LONG, "all workers count the same hints")
    assert 2 <= sent <= 2 * 10
    wait_until(lambda: agreed(there, "messages_received") == agreed(here, "messages_sent"), LONG, "all arrive")
    bodies = [stats(there) for _ in range(4 * WORKERS)]
    assert {(body["servers_alive"], body["servers_dead"]) for body in bodies} == {(1, 0)}
    assert all(peer["connected"] for body in bodies for peer in body["peers"])


def test_what_comes_from_a_peer_reaches_every_worker(brokers: Brokers) -> None:
    here, there = cluster(brokers, 2, SLOW_LOOK, workers=WORKERS)
    took = latencies(here, there, "orders", 20)
    assert statistics.median(took) < 0.5
    assert max(took) < 4.0
    assert here.request("POST", "/api/v1/system/maintenance/pop", {"enabled": True}).status == 200

    def told() -> bool:
        answers = [there.request("GET", "/api/v1/system/shared-state").json() for _ in range(4 * WORKERS)]
        return all(answer["pop_maintenance_mode"] for answer in answers)

    wait_until(told, LONG, "every worker of the peer has heard of the flip")
    assert there.log().count("maintenance flag changed by peer peer=broker-1 flag=pop_maintenance_mode to=true") == 1


def test_a_worker_that_is_killed_leaves_no_socket_behind(broker: Broker) -> None:
    run = broker.directory / "run"
    wait_until(lambda: len(list(run.glob("*.sock"))) == WORKERS, LONG, "each worker has a socket")
    before = set(run.glob("*.sock"))
    broker.kill_worker()

    def replaced() -> bool:
        now = set(run.glob("*.sock"))
        return len(now) == WORKERS and now != before

    wait_until(replaced, LONG, "its socket is gone and its successor's is there")
    assert broker.stop() == 0
    assert list(run.glob("*.sock")) == []
