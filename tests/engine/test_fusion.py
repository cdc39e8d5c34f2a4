"""Fusion: fire when idle, gather while a flush is under way, never two flushes of a key at a time."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable

import gevent
import pytest
from gevent.event import Event

from queen.engine.fusion import Fusion
from tests.engine.conftest import Lab, LocalBroker, together
from tests.faults.log_check import Log

Bundle = list[tuple[str, list[int]]]


class Flushes:
    """Stands in for the database: takes bundles, and holds each until it is let go."""

    def __init__(self, bundle_max: int = 16, inflight_max: int = 8) -> None:
        self.begun: list[Bundle] = []
        self.gates: list[Event] = []
        self.fusion: Fusion[str, int] = Fusion(self._flush, bundle_max, inflight_max)

    def _flush(self, bundle: Bundle) -> None:
        self.begun.append(bundle)
        self.gates.append(Event())
        self.gates[-1].wait()

    def submit(self, *jobs: tuple[str, int]) -> None:
        for key, job in jobs:
            self.fusion.submit(key, job)
        gevent.idle()

    def finish(self, number: int) -> None:
        self.gates[number].set()
        gevent.idle()


def test_a_job_alone_is_flushed_at_once() -> None:
    flushes = Flushes()
    flushes.submit(("a", 1))
    assert flushes.begun == [[("a", [1])]]


def test_what_arrives_during_a_flush_goes_together_with_the_next() -> None:
    flushes = Flushes()
    flushes.submit(("a", 1))
    flushes.submit(("a", 2), ("a", 3))
    flushes.submit(("a", 4))
    assert len(flushes.begun) == 1
    flushes.finish(0)
    assert flushes.begun == [[("a", [1])], [("a", [2, 3, 4])]]


def test_another_key_does_not_wait() -> None:
    flushes = Flushes()
    flushes.submit(("a", 1))
    flushes.submit(("b", 2))
    assert flushes.begun == [[("a", [1])], [("b", [2])]]


def test_keys_that_wait_for_a_flusher_share_a_bundle() -> None:
    flushes = Flushes(bundle_max=3, inflight_max=1)
    flushes.submit(("a", 1))
    flushes.submit(("b", 2), ("c", 3), ("d", 4), ("e", 5), ("b", 6))
    flushes.finish(0)
    assert flushes.begun[1] == [("b", [2, 6]), ("c", [3]), ("d", [4])]
    flushes.finish(1)
    assert flushes.begun[2] == [("e", [5])]


def test_the_number_of_flushes_at_a_time_is_bounded() -> None:
    flushes = Flushes(inflight_max=2)
    for k in range(5):
        flushes.submit((f"k{k}", k))
    assert len(flushes.begun) == 2
    flushes.finish(0)
    assert flushes.begun[2] == [("k2", [2]), ("k3", [3]), ("k4", [4])]


def test_a_key_of_a_bundle_in_flight_is_not_flushed_beside_it() -> None:
    flushes = Flushes(bundle_max=2, inflight_max=8)
    flushes.fusion.submit("a", 1)
    flushes.submit(("b", 2))
    assert flushes.begun == [[("a", [1]), ("b", [2])]]
    flushes.submit(("b", 3), ("c", 4))
    assert flushes.begun[1:] == [[("c", [4])]]
    flushes.finish(1)
    assert len(flushes.begun) == 2
    flushes.finish(0)
    assert flushes.begun[2:] == [[("b", [3])]]


def test_a_flush_that_fails_stops_nobody() -> None:
    calls: list[Bundle] = []

    def flush(bundle: Bundle) -> None:
        calls.append(bundle)
        gevent.sleep(0)
        if len(calls) == 1:
            raise RuntimeError("of no concern")

    fusion: Fusion[str, int] = Fusion(flush, 16, 1)
    fusion.submit("a", 1)
    gevent.sleep(0)
    fusion.submit("a", 2)
    assert fusion.drain(5)
    assert calls == [[("a", [1])], [("a", [2])]]


def test_draining_waits_for_everything() -> None:
    flushes = Flushes()
    assert flushes.fusion.drain(0)
    flushes.submit(("a", 1), ("a", 2))
    assert not flushes.fusion.drain(0.01)
    gevent.spawn_later(0.01, flushes.finish, 0)
    gevent.spawn_later(0.03, lambda: flushes.finish(len(flushes.gates) - 1))
    assert flushes.fusion.drain(5)


@pytest.mark.parametrize(("bundle_max", "inflight_max"), [(1, 1), (1, 8), (4, 2), (16, 8)])
def test_whatever_comes_each_key_keeps_its_order_and_loses_nothing(bundle_max: int, inflight_max: int) -> None:
    dice = random.Random(bundle_max)
    flushed: dict[str, list[int]] = defaultdict(list)
    flying: set[str] = set()
    most = 0

    def flush(bundle: Bundle) -> None:
        nonlocal most
        keys = {key for key, _ in bundle}
        assert len(keys) == len(bundle) <= bundle_max
        assert not keys & flying
        flying.update(keys)
        most = max(most, len(flying))
        for _ in range(dice.randrange(4)):
            gevent.sleep(0)
        for key, jobs in bundle:
            flushed[key] += jobs
        flying.difference_update(keys)

    fusion: Fusion[str, int] = Fusion(flush, bundle_max, inflight_max)
    sent: dict[str, list[int]] = defaultdict(list)
    for job in range(2000):
        key = f"k{dice.randrange(12)}"
        sent[key].append(job)
        fusion.submit(key, job)
        if dice.random() < 0.3:
            gevent.sleep(0)
    assert fusion.drain(10)
    assert flushed == sent
    assert most <= bundle_max * inflight_max


# In the engine: how many transactions requests make.


def test_pushes_at_once_share_segments_and_transactions(lab: Lab, queue: str, broker: LocalBroker) -> None:
    broker.accept(queue, "warm")
    before = broker.engine.pusher.fusion.flushes

    def pusher(number: int) -> Callable[[], None]:
        def run() -> None:
            for k in range(5):
                broker.accept(queue, f"{number}-{k}", partition=f"p{number % 4}")

        return run

    together(*(pusher(number) for number in range(40)))
    assert broker.engine.pusher.fusion.flushes - before < 100
    segments = lab.one(
        "SELECT count(*) FROM queen.log_segments s JOIN queen.log_partitions p ON p.id = s.partition_id"
        " JOIN queen.queues q ON q.id = p.queue_id WHERE q.name = %s",
        queue,
    )
    assert segments < 100
    assert len([m for m in Log.read(lab.sql).messages if m.queue == queue]) == 201


def test_acks_at_once_share_transactions(lab: Lab, queue: str, broker: LocalBroker) -> None:
    for k in range(32):
        broker.accept(queue, "a", partition=f"p{k}")
    messages = broker.pop(queue, batch=32, partitions=32)
    assert len(messages) == 32
    before = broker.engine.acker.fusion.flushes
    together(*(lambda m=m: broker.complete([m]) for m in messages))
    assert broker.engine.acker.fusion.flushes - before < 16
    assert {lab.committed(queue, f"p{k}") for k in range(32)} == {0}


def test_acks_of_one_cursor_are_carried_out_in_their_order(lab: Lab, queue: str, broker: LocalBroker) -> None:
    """They share a flush: the second sees what the first did."""
    broker.accept(queue, *"abcdef")
    messages = broker.pop(queue)
    with lab.database.connect(autocommit=False) as blocker:
        blocker.execute("SELECT 1 FROM queen.log_consumers FOR UPDATE")
        acks = []
        for k, status in ((0, "completed"), (2, "completed"), (1, "failed"), (4, "dlq")):
            acks.append(gevent.spawn(broker.ack, [(messages[k], status)]))
            gevent.idle()
        blocker.rollback()
    results = [ack.get(timeout=10)[0] for ack in acks]
    assert [r.success for r in results] == [True, True, False, True]
    assert results[3].dlq
    assert lab.committed(queue) == 4
