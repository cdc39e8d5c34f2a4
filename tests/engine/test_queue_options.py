"""What each option of a queue does to its messages, through the engine and on the clock."""

from __future__ import annotations

import time
from typing import Any

import gevent
import pytest

from tests.engine.conftest import TENANT, Lab, LocalBroker, append, ids, offsets

KEYS = "abcde"


def lease_seconds(lab: Lab, queue: str, partition: str = "Default") -> float:
    """Return how long a fresh lease of the group lasts."""
    cursor = lab.cursor(queue, partition)
    return float((cursor.lease_expires_at - cursor.lease_acquired_at).total_seconds())


# leaseTime


@pytest.mark.parametrize(
    ("configured", "asked", "seconds"),
    [(90, 0, 90), (90, 7, 7), (90, -1, 90), (0, 0, 60), (-5, 0, 60), (0, 20, 20), (1_000_000, 0, 1_000_000)],
)
def test_a_lease_lasts_as_asked_else_as_configured_else_a_minute(
    lab: Lab, queue: str, broker: LocalBroker, configured: int, asked: int, seconds: int
) -> None:
    lab.configure(queue, leaseTime=configured)
    broker.accept(queue, "a")
    assert broker.pop(queue, lease=max(asked, 0))
    assert lease_seconds(lab, queue) == seconds


def test_a_queue_nobody_configured_leases_for_a_minute(lab: Lab, queue: str, broker: LocalBroker) -> None:
    broker.accept(queue, "a")
    broker.pop(queue, "Default")
    assert lease_seconds(lab, queue) == 60
    lab.configure(queue)  # what is omitted there is five
    lab.expire_leases(queue)
    broker.pop(queue, "Default")
    assert lease_seconds(lab, queue) == 300


def test_each_queue_of_a_discovery_has_its_own_lease(lab: Lab, queue: str, broker: LocalBroker) -> None:
    for k, seconds in enumerate((30, 70)):
        lab.configure(f"{queue}{k}", leaseTime=seconds, namespace=queue)
        broker.accept(f"{queue}{k}", "a")
    assert len(broker.pop(None, namespace=queue, partitions=2)) == 2
    assert [lease_seconds(lab, f"{queue}{k}") for k in range(2)] == [30, 70]


def test_a_new_lease_time_is_for_new_leases(lab: Lab, queue: str, broker: LocalBroker) -> None:
    lab.configure(queue, leaseTime=30)
    broker.accept(queue, *KEYS)
    broker.pop(queue, batch=1)
    lab.configure(queue, leaseTime=500)
    assert lease_seconds(lab, queue) == 30
    lab.expire_leases(queue)
    broker.pop(queue, "Default", batch=1)
    assert lease_seconds(lab, queue) == 500


def test_a_lease_really_runs_out_and_the_batch_comes_again_by_itself(lab: Lab, queue: str, broker: LocalBroker) -> None:
    lab.configure(queue, leaseTime=1)
    broker.accept(queue, *KEYS)
    first = broker.pop(queue)
    leased = time.monotonic()
    again = broker.pop(queue, timeout=10)
    assert 0.9 < time.monotonic() - leased < 4
    assert ids(again) == ids(first)
    assert broker.ack([(first[0], "completed")])[0].error == "invalid or expired lease"


# retryLimit, deadLetterQueue, dlqAfterMaxRetries


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_a_limit_of_n_gives_n_redeliveries(lab: Lab, queue: str, broker: LocalBroker, limit: int) -> None:
    lab.configure(queue, retryLimit=limit)
    broker.accept(queue, *KEYS)
    deliveries = 0
    while (messages := broker.pop(queue, "Default", batch=2)) and messages[0].offset == 0:
        deliveries += 1
        broker.ack([(messages[0], "failed")], errors={"a": f"failure {deliveries}"})
    assert deliveries == limit + 1
    assert [(d.offset, d.error) for d in lab.dead_letters(queue)] == [(0, f"failure {limit + 1}")]


def test_a_changed_limit_holds_for_the_next_failure(lab: Lab, queue: str, broker: LocalBroker) -> None:
    lab.configure(queue, retryLimit=5)
    broker.accept(queue, *KEYS)
    for _ in range(3):
        broker.ack([(broker.pop(queue, "Default")[0], "failed")])
    lab.configure(queue, retryLimit=3)
    assert lab.cursor(queue).batch_retry_count == 3
    (result,) = broker.ack([(broker.pop(queue, "Default")[0], "failed")])
    assert result.dlq


@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize("two", [True, False])
def test_either_flag_turns_dead_letters_on(lab: Lab, queue: str, broker: LocalBroker, one: bool, two: bool) -> None:
    lab.configure(queue, retryLimit=0, deadLetterQueue=one, dlqAfterMaxRetries=two)
    broker.accept(queue, *KEYS)
    messages = broker.pop(queue)
    broker.ack([(messages[1], "failed")])
    assert len(lab.dead_letters(queue)) == (one or two)
    assert offsets(broker.pop(queue, "Default")) == [2, 3, 4]  # passed over either way


# delayedProcessing


def test_a_shorter_delay_is_obeyed_at_once_here_and_soon_elsewhere(lab: Lab, queue: str) -> None:
    here, there = lab.broker(), lab.broker()
    lab.configure(queue, delayedProcessing=1000)
    assert here.pop(queue) == there.pop(queue, group="h") == []
    here.accept(queue, *KEYS)
    assert here.pop(queue, timeout=0.3) == there.pop(queue, group="h", timeout=0.5) == []
    lab.configure(queue, delayedProcessing=0)
    here.engine.queue_changed(TENANT, queue)
    assert ids(here.pop(queue, timeout=3)) == list(KEYS)
    # The other one wasn't told. It reads the options again within half a minute, of which the wait is spared here.
    (lane,) = (lane for (_, name), lane in there.engine.hotlist.lanes.items() if name == queue.encode())
    lane.flow_read = float("-inf")
    assert ids(there.pop(queue, group="h", timeout=3)) == list(KEYS)


# windowBuffer


def test_a_window_holds_a_partition_back_until_it_is_quiet(lab: Lab, queue: str) -> None:
    """In SQL, on every route without a ring: no message while the newest is younger than the window."""
    broker = lab.broker(QUEEN_HOTLIST="0")
    lab.configure(queue, windowBuffer=100)
    append(lab.operations, queue, "a")
    lab.age(queue, 150)
    append(lab.operations, queue, "b")
    for partition in (None, "Default"):
        assert broker.pop(queue, partition) == []
    assert lab.committed(queue) == -1
    lab.age(queue, 101)
    assert ids(broker.pop(queue)) == ["a", "b"]


def test_a_window_holds_a_discovery_back_too(lab: Lab, queue: str, broker: LocalBroker) -> None:
    lab.configure(queue, windowBuffer=100, namespace=queue)
    broker.accept(queue, "a")
    assert broker.pop(None, namespace=queue) == []
    lab.age(queue, 101)
    assert ids(broker.pop(None, namespace=queue)) == ["a"]


def test_with_the_ring_a_window_begins_with_the_first_mark(lab: Lab, queue: str, broker: LocalBroker) -> None:
    """A partition that is written all the time would never be quiet."""
    lab.configure(queue, windowBuffer=1)
    assert broker.pop(queue) == []
    writing = True

    def writer() -> int:
        k = 0
        while writing:
            broker.accept(queue, f"m{k}")
            k += 1
            gevent.sleep(0.1)
        return k

    started = time.monotonic()
    pushing = gevent.spawn(writer)
    messages = broker.pop(queue, timeout=10)
    took = time.monotonic() - started
    writing = False
    assert 0.9 < took < 1.9
    assert ids(messages) == [f"m{k}" for k in range(len(messages))]
    assert 5 < len(messages) <= pushing.get(timeout=5)


def test_with_the_ring_a_window_ends_when_enough_is_there(lab: Lab, queue: str, broker: LocalBroker) -> None:
    lab.configure(queue, windowBuffer=60)
    assert broker.pop(queue) == []
    broker.accept(queue, *(f"m{k}" for k in range(60)))
    assert broker.pop(queue, timeout=0.2) == []
    broker.accept(queue, *(f"n{k}" for k in range(60)))
    started = time.monotonic()
    assert len(broker.pop(queue, timeout=10)) == 120
    assert time.monotonic() - started < 1


def test_a_window_of_a_queue_that_nobody_popped_here_is_kept_by_sql(lab: Lab, queue: str, broker: LocalBroker) -> None:
    lab.configure(queue, windowBuffer=100)
    broker.accept(queue, "a")
    assert broker.pop(queue) == []
    assert lab.committed(queue) == -1


# minPopWaitTime


def fill(lab: Lab, queue: str, broker: LocalBroker, milliseconds: int) -> None:
    """Configure the wait, and let the broker know the queue."""
    lab.configure(queue, minPopWaitTime=milliseconds)
    assert broker.pop(queue) == []


def timed(broker: LocalBroker, queue: str, **arguments: Any) -> tuple[float, list[str]]:
    started = time.monotonic()
    messages = broker.pop(queue, **arguments)
    return time.monotonic() - started, ids(messages)


def test_an_under_full_batch_waits_for_more(lab: Lab, queue: str, broker: LocalBroker) -> None:
    fill(lab, queue, broker, 500)
    broker.accept(queue, "a")
    gevent.spawn_later(0.2, broker.accept, queue, "b")
    took, got = timed(broker, queue, batch=10, timeout=5)
    assert got == ["a", "b"]
    assert 0.45 < took < 1


def test_the_wait_ends_when_the_batch_is_full(lab: Lab, queue: str, broker: LocalBroker) -> None:
    fill(lab, queue, broker, 10_000)
    broker.accept(queue, "a")
    gevent.spawn_later(0.1, broker.accept, queue, "b", "c")
    took, got = timed(broker, queue, batch=3, timeout=20)
    assert got == ["a", "b", "c"]
    assert took < 1


def test_the_wait_ends_with_the_callers_time(lab: Lab, queue: str, broker: LocalBroker) -> None:
    fill(lab, queue, broker, 10_000)
    broker.accept(queue, "a")
    took, got = timed(broker, queue, batch=3, timeout=0.4)
    assert got == ["a"]
    assert took < 5


@pytest.mark.parametrize(
    "arguments", [{"batch": 10}, {"batch": 1, "timeout": 5}, {"batch": 10, "partition": "Default"}]
)
def test_nobody_else_waits(lab: Lab, queue: str, broker: LocalBroker, arguments: dict[str, Any]) -> None:
    """Neither a pop that doesn't wait, nor one for a single message, nor a pinned one."""
    fill(lab, queue, broker, 5_000)
    broker.accept(queue, "a")
    took, got = timed(broker, queue, **arguments)
    assert got == ["a"]
    assert took < 3


def test_the_wait_holds_nothing(lab: Lab, queue: str, broker: LocalBroker) -> None:
    """Another pop that wants less is served meanwhile."""
    fill(lab, queue, broker, 600)
    broker.accept(queue, "a")
    waiting = gevent.spawn(timed, broker, queue, batch=10, timeout=1)
    gevent.sleep(0.05)
    assert lab.cursor(queue) is None
    took, got = timed(broker, queue, batch=1)
    assert (got, took < 0.2) == (["a"], True)
    assert waiting.get(timeout=5)[1] == []


def test_an_empty_queue_is_not_waited_for_longer_than_asked(lab: Lab, queue: str, broker: LocalBroker) -> None:
    fill(lab, queue, broker, 60_000)
    took, got = timed(broker, queue, batch=10, timeout=0.2)
    assert (got, took < 0.6) == ([], True)


# dedupWindowSeconds is in test_dedup; namespace and task:


def test_namespace_and_task_are_taken_from_the_name_until_they_are_configured(
    lab: Lab, queue: str, broker: LocalBroker
) -> None:
    broker.accept(f"{queue}.mail.out", "a")
    assert ids(broker.pop(None, namespace=queue, task="mail")) == ["a"]
    lab.configure(f"{queue}.mail.out", namespace=f"{queue}-new", task="other")
    lab.expire_leases(f"{queue}.mail.out")
    assert broker.pop(None, namespace=queue) == []
    assert ids(broker.pop(None, namespace=f"{queue}-new")) == ["a"]
    lab.expire_leases(f"{queue}.mail.out")
    assert broker.pop(None, namespace=f"{queue}-new", task="mail") == []
    assert ids(broker.pop(None, namespace=f"{queue}-new", task="other")) == ["a"]
