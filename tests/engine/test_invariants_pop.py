"""What a pop promises: one holder at a time, in order, in bounds, in nobody's way, whatever is switched on."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import gevent
import pytest

from queen.engine.identifiers import QUEUE_MODE
from tests.engine.conftest import (
    TENANT,
    Address,
    Lab,
    LocalBroker,
    Message,
    Rough,
    append,
    ids,
    offsets,
    together,
)

KEYS = "abcde"


def cursors(lab: Lab, queue: str, group: str) -> list[Any]:
    """Return a group's cursor rows with the versions they are."""
    return lab.rows(
        "SELECT c.ctid::text, c.* FROM queen.log_consumers c JOIN queen.log_partitions p ON p.id = c.partition_id"
        " JOIN queen.queues q ON q.id = p.queue_id WHERE q.name = %s AND c.consumer_group = %s ORDER BY p.id",
        queue,
        group,
    )


def test_C1_a_partition_has_one_live_lease_of_a_group(rough: Rough) -> None:
    assert rough.broken("C1") == []


def test_C1_twenty_pops_at_once_get_every_partition_once(lab: Lab, queue: str) -> None:
    brokers = [lab.broker(), lab.broker(QUEEN_HOTLIST="0"), lab.broker(QUEEN_POP_FUSION="0")]
    for k in range(8):
        brokers[0].accept(queue, *KEYS, partition=f"p{k}")
    assert len(brokers[0].pop(queue, group="h")) == 5  # first contact behind us
    with lab.ledger() as ledger:
        for _ in range(5):

            def pop(k: int) -> Callable[[], list[Message]]:
                return lambda: brokers[k % 3].pop(
                    queue, f"p{k % 8}" if k % 5 == 0 else None, partitions=2, timeout=0.05
                )

            popped = together(*(pop(k) for k in range(20)))
            held: dict[str, set[str]] = defaultdict(set)
            for message in (message for batch in popped for message in batch):
                held[message.partition].add(message.lease)
            assert all(len(leases) == 1 for leases in held.values())
            lab.seek(queue, at="epoch")
        assert ledger.violations(backwards=True) == []


def test_C1_a_claim_that_ignores_leases_is_reported(lab: Lab, queue: str, broker: LocalBroker) -> None:
    broker.accept(queue, *KEYS)
    condition = "(c.worker_id IS NULL OR c.lease_expires_at IS NULL OR c.lease_expires_at < v_now)"
    with lab.ledger() as ledger, lab.broken("log_claim_v1", (condition, "true")):
        assert broker.pop(queue, "Default", batch=2)
        assert broker.pop(queue, "Default", batch=2)
        assert any(finding.startswith("C1") for finding in ledger.violations())


def test_C2_a_batch_is_in_order_and_begins_behind_what_is_committed(rough: Rough) -> None:
    """From the ledger: what was committed when each batch was leased; from the pops: what it held."""
    began = {
        (row.worker, str(row.pid)): row.committed
        for row in rough.lab.rows(
            "SELECT (new).worker_id AS worker, (new).partition_id AS pid, (new).committed FROM ledger.cursors"
            " WHERE (new).worker_id IS NOT NULL AND (new).lease_acquired_at IS DISTINCT FROM (old).lease_acquired_at"
        )
    }
    checked = 0
    for _, batch in rough.delivered:
        lanes: dict[str, list[Message]] = defaultdict(list)
        for message in batch:
            lanes[message.partition_id].append(message)
        order = [m.partition_id for m in batch]
        assert order == [pid for pid, lane in lanes.items() for _ in lane]  # partition by partition
        for pid, lane in lanes.items():
            first = lane[0].offset
            assert offsets(lane) == list(range(first, first + len(lane)))
            if lane[0].lease:
                assert first == began[lane[0].lease, pid] + 1
                checked += 1
    assert checked > 50


def test_C2_C3_a_batch_is_contiguous_over_what_is_left_of_the_log(lab: Lab, queue: str, broker: LocalBroker) -> None:
    """Segments of three; the front is removed in the middle of a group's work."""
    for k in range(0, 12, 3):
        broker.accept(queue, f"m{k}", f"m{k + 1}", f"m{k + 2}")
    broker.complete(broker.pop(queue, batch=2))
    assert offsets(broker.pop(queue, "Default", batch=3)) == [2, 3, 4]
    lab.expire_leases(queue)
    lab.drop_front(queue, 6)
    messages = broker.pop(queue, "Default", batch=4)
    assert offsets(messages) == [6, 7, 8, 9]
    cursor = lab.cursor(queue)
    assert (cursor.committed, cursor.batch_end) == (1, 9)
    broker.complete(messages[:1])
    assert lab.committed(queue) == 6
    broker.complete(messages[1:])
    assert offsets(broker.drain(queue)) == [10, 11]


def test_C3_every_leased_batch_lies_between_the_cursor_and_the_end(rough: Rough) -> None:
    assert rough.broken("C3") == []


def test_a_cursor_on_an_emptied_partition_is_sealed(lab: Lab, queue: str, broker: LocalBroker) -> None:
    broker.accept(queue, *KEYS)
    broker.complete(broker.pop(queue, batch=1))
    lab.drop_front(queue, 5)
    assert broker.pop(queue, "Default") == []
    assert lab.committed(queue) == 4
    broker.accept(queue, "f")
    assert offsets(broker.pop(queue, "Default")) == [5]


def test_deferred_messages_are_not_taken_for_an_emptied_partition(lab: Lab, queue: str, broker: LocalBroker) -> None:
    lab.configure(queue, delayedProcessing=1000)
    broker.accept(queue, *KEYS)
    assert broker.pop(queue, "Default") == []
    assert lab.committed(queue) == -1


def test_C4_nothing_younger_than_the_delay_is_delivered(lab: Lab, queue: str, broker: LocalBroker) -> None:
    lab.configure(queue, delayedProcessing=100)
    broker.accept(queue, "a", "b")
    lab.age(queue, 40)
    broker.accept(queue, "c")
    lab.age(queue, 58)
    assert broker.pop(queue, "Default") == []
    lab.age(queue, 3)
    assert ids(broker.pop(queue, "Default", batch=1)) == ["a"]
    lab.expire_leases(queue)
    assert ids(broker.pop(queue, "Default")) == ["a", "b"]
    lab.expire_leases(queue)
    assert ids(broker.pop(queue, "Default", auto_ack=True)) == ["a", "b"]
    lab.configure(queue, delayedProcessing=0)
    assert ids(broker.pop(queue, "Default")) == ["c"]


@pytest.mark.parametrize("hotlist", ["1", "0"])
def test_C4_a_real_delay_on_every_route(lab: Lab, queue: str, hotlist: str) -> None:
    broker = lab.broker(QUEEN_HOTLIST=hotlist)
    lab.configure(queue, delayedProcessing=1, namespace=queue)
    routes: list[Callable[[], list[Message]]] = [
        lambda: broker.pop(queue, group="any", timeout=10),
        lambda: broker.pop(queue, "Default", group="one", timeout=10),
        lambda: broker.pop(None, group="all", namespace=queue, timeout=10),
    ]
    assert (
        together(*(lambda route=route: gevent.with_timeout(0.05, route, timeout_value=[]) for route in routes))
        == [[]] * 3
    )
    broker.accept(queue, "a")
    pushed = time.monotonic()
    arrived: list[float] = []

    def delivered(route: Callable[[], list[Message]]) -> None:
        assert ids(route()) == ["a"]
        arrived.append(time.monotonic() - pushed)

    together(*(lambda route=route: delivered(route) for route in routes))
    assert min(arrived) >= 0.95
    assert max(arrived) < 4


@pytest.mark.parametrize("hotlist", ["1", "0"])
@pytest.mark.parametrize("fusion", ["1", "0"])
def test_C5_a_pop_keeps_to_batch_and_partitions(lab: Lab, queue: str, hotlist: str, fusion: str) -> None:
    broker = lab.broker(QUEEN_HOTLIST=hotlist, QUEEN_POP_FUSION=fusion)
    for k in range(6):
        broker.accept(queue, *(f"m{n}" for n in range(4)), partition=f"p{k}")
    for first in (True, False):  # by a scan, then by the ring
        for batch, partitions in ((1, 1), (3, 1), (5, 1), (5, 2), (9, 2), (10, 10), (100, 3), (1, 5)):
            messages = broker.pop(queue, group="g" if first else "h", batch=batch, partitions=partitions)
            lanes = {m.partition for m in messages}
            assert len(messages) == min(batch, 4 * partitions, 24)
            assert len(lanes) <= partitions
            leases = lab.one("SELECT count(*) FROM queen.log_consumers WHERE worker_id = %s", messages[0].lease)
            assert leases == len(lanes)
            lab.seek(queue, "g" if first else "h", at="epoch")
            broker.engine.group_moved(TENANT, queue, "g" if first else "h", None)


def test_C6_nothing_one_group_does_changes_another(lab: Lab, queue: str, broker: LocalBroker) -> None:
    for partition in ("p", "q"):
        broker.accept(queue, *KEYS, partition=partition)
    others = broker.pop(queue, group="other", batch=3, partitions=2)
    broker.complete(others[:1], "other")
    before = cursors(lab, queue, "other")
    assert len(before) == 2

    messages = broker.pop(queue, "p")
    broker.ack([(messages[0], "completed"), (messages[1], "failed")])
    broker.pop(queue, "p", auto_ack=True)
    messages = broker.pop(queue, "q")
    broker.engine.leases.extend(TENANT, messages[0].lease.encode(), 100)
    broker.ack([(messages[3], "dlq")])
    broker.ack([(Address("a", messages[0].partition_id, others[0].lease), "completed")])
    lab.expire_leases(queue)
    lab.seek(queue, at="epoch")
    lab.seek(queue)
    lab.delete_group(queue)

    assert cursors(lab, queue, "other") == before
    assert lab.cursor(queue, "p") is None


def test_C7_new_delivers_exactly_what_is_committed_after_registration(lab: Lab, queue: str) -> None:
    """Groups register while messages come in: each gets a suffix of every partition it found, and all of a
    partition that is born later."""
    broker = lab.broker()
    broker.accept(queue, "old")
    accepted: list[tuple[float, float, str]] = []  # asked, answered, id
    registered: dict[str, tuple[float, float]] = {}
    first: dict[str, list[str]] = {}  # what came in between registration and claim

    def producer(name: str) -> Callable[[], None]:
        def run() -> None:
            for k in range(40):
                asked = time.monotonic()
                broker.accept(queue, f"{name}{k}", partition=f"p{k // 4}")
                accepted.append((asked, time.monotonic(), f"{name}{k}"))

        return run

    def subscriber() -> None:
        for k in range(8):
            asked = time.monotonic()
            first[f"g{k}"] = ids(broker.pop(queue, group=f"g{k}", mode="new", auto_ack=True))
            registered[f"g{k}"] = (asked, time.monotonic())
            gevent.sleep(0.01)

    together(producer("x"), producer("y"), subscriber)
    for group, (asked, answered) in registered.items():
        got = first[group] + ids(broker.drain(queue, group))
        assert len(got) == len(set(got))
        after = {key for pushed, _, key in accepted if pushed > answered}
        before = {key for _, done, key in accepted if done < asked} | {"old"}
        assert after <= set(got)
        assert not before & set(got)


def test_C7_a_partition_being_born_at_registration_is_delivered_whole(
    lab: Lab, queue: str, broker: LocalBroker
) -> None:
    """Its first push is under way when the group registers, and commits afterwards."""
    broker.accept(queue, "old")
    with lab.database.connect(autocommit=False) as blocker:
        blocker.execute("LOCK TABLE queen.log_txns IN SHARE ROW EXCLUSIVE MODE")  # behind the reading of the clock
        push = gevent.spawn(broker.accept, queue, "first", partition="born")
        with gevent.Timeout(10):
            while not lab.one("SELECT 1 FROM pg_locks WHERE NOT granted AND relation = 'queen.log_txns'::regclass"):
                gevent.sleep(0.005)
        assert lab.partition(queue, "born") is None
        assert broker.pop(queue, group="late", mode="new") == []
        blocker.rollback()
    push.get(timeout=10)
    broker.accept(queue, "next", partition="born")
    assert ids(broker.drain(queue, "late")) == ["first", "next"]


def test_C8_auto_acked_messages_come_once_and_others_until_they_are_acked(lab: Lab, queue: str) -> None:
    brokers = [lab.broker(), lab.broker()]
    keys = [f"m{k}" for k in range(60)]
    for k in range(0, 60, 6):
        brokers[0].accept(queue, *keys[k : k + 6], partition=f"p{k % 5}")
    got: list[str] = []

    def taker(broker: LocalBroker) -> Callable[[], None]:
        def run() -> None:
            while messages := broker.pop(queue, batch=4, auto_ack=True, timeout=0.3):
                assert {m.lease for m in messages} == {""}
                got.extend(ids(messages))

        return run

    together(*(taker(broker) for broker in brokers * 3))
    assert sorted(got) == sorted(keys)
    seen: set[str] = set()
    for _ in range(3):  # nobody acks: it all comes again
        batch = brokers[0].pop(queue, group="h", partitions=10)
        assert sorted(ids(batch)) == sorted(keys)
        seen |= {m.lease for m in batch}
        lab.expire_leases(queue, "h")
        brokers[0].engine.group_moved(TENANT, queue, "h", None)
    assert len(seen) == 3


def test_C8_an_auto_ack_leaves_another_workers_lease_alone(lab: Lab, queue: str, broker: LocalBroker) -> None:
    broker.accept(queue, *KEYS)
    messages = broker.pop(queue, batch=2)
    assert broker.pop(queue, "Default", auto_ack=True) == []
    broker.complete(messages)
    assert offsets(broker.pop(queue, "Default", auto_ack=True)) == [2, 3, 4]


BLOCKERS = {
    "a pop": "SELECT 1 FROM queen.log_consumers WHERE consumer_group = 'g' FOR NO KEY UPDATE",
    "a lock of the cursors": "SELECT 1 FROM queen.log_consumers FOR UPDATE",
    "a push": "UPDATE queen.log_partitions SET last_offset = last_offset",
    "a lock of the partitions": "SELECT 1 FROM queen.log_partitions FOR NO KEY UPDATE",
    "a first contact": "SELECT pg_advisory_xact_lock(hashtextextended(id::text || '/g', 42)) FROM queen.log_partitions",
    "a configuration": "UPDATE queen.queues SET lease_time = lease_time",
}


@pytest.mark.parametrize("route", ["wildcard", "scan", "pinned", "discovery", "first contact"])
@pytest.mark.parametrize("blocker", BLOCKERS)
def test_C9_a_pop_waits_for_nobody(lab: Lab, queue: str, blocker: str, route: str) -> None:
    """Somebody holds the rows and doesn't let go: the pop answers at once, with what is free or nothing."""
    broker = lab.broker(QUEEN_HOTLIST="0" if route == "scan" else "1")
    lab.configure(queue, namespace=queue)
    broker.accept(queue, *KEYS)
    if route != "first contact":
        broker.complete(broker.pop(queue, batch=1))
        broker.engine.group_moved(TENANT, queue, "g", "Default")
    with lab.database.connect(autocommit=False) as other:
        other.execute(BLOCKERS[blocker].encode())
        if route == "discovery":
            pop = lambda: broker.pop(None, namespace=queue)  # noqa: E731
        else:
            pop = lambda: broker.pop(queue, "Default" if route in ("pinned", "first contact") else None)  # noqa: E731
        started = time.monotonic()
        messages = gevent.with_timeout(3, pop)
        assert time.monotonic() - started < 1
        free = blocker not in ("a pop", "a lock of the cursors") or route == "first contact"
        if blocker == "a first contact":
            free = route != "first contact"
        assert bool(messages) == free
        other.rollback()
    if not messages:  # and what was skipped is found as soon as it is free
        assert broker.pop(queue, timeout=3)


def script(lab: Lab, queue: str, broker: LocalBroker) -> list[Any]:
    """Play one long scene; returns everything that was answered."""
    answers: list[Any] = []

    def note(messages: list[Message]) -> list[Message]:
        answers.append(sorted((m.partition, m.offset, m.transaction_id) for m in messages))
        return messages

    lab.configure(queue, retryLimit=1)
    note(broker.pop(queue))
    for k in range(30):
        outcomes = broker.push_items([(queue, f"p{n % 4}", f"m{k % 20}-{n}") for n in range(6)])
        answers.append([o.status for o in outcomes])
    for group in ("g", "h", QUEUE_MODE):
        for _ in range(2):
            messages = note(broker.pop(queue, group=group, batch=1000, partitions=4, timeout=5))
            lanes: dict[str, list[Message]] = defaultdict(list)
            for message in messages:
                lanes[message.partition].append(message)
            answers.append(broker.ack([(m, "completed") for m in lanes["p0"]], group))
            answers.append(broker.ack([(m, "completed") for m in reversed(lanes["p1"])], group))
            answers.append(
                broker.ack([(m, "completed") for m in lanes["p2"][:3]] + [(lanes["p2"][4], "failed")], group)
            )
            answers.append(broker.ack([(m, "retry") for m in lanes["p3"]], group))
            for k in range(4):
                broker.accept(queue, f"{group}-{len(answers)}-{k}", partition=f"p{k}")
            broker.engine.group_moved(TENANT, queue, group, None)
        note(broker.drain(queue, group, batch=1000))
        answers.append([d.offset for d in lab.dead_letters(queue, group)])
        answers.append([lab.committed(queue, f"p{k}", group) for k in range(4)])
    return answers


SWITCHES = {
    "hotlist": {"QUEEN_HOTLIST": "0"},
    "pop fusion": {"QUEEN_POP_FUSION": "0"},
    "dedup cache": {"QUEEN_DEDUP_CACHE": "0"},
    "pending gate": {"QUEEN_POP_PENDING_GATE": "0"},
    "bundles": {"QUEEN_V2_BUNDLE_MAX": "1", "QUEEN_V2_FUSION_MAX_INFLIGHT": "1"},
    "compression": {"QUEEN_V2_ZSTD_LEVEL": "0"},
    "all": {
        "QUEEN_HOTLIST": "0",
        "QUEEN_POP_FUSION": "0",
        "QUEEN_DEDUP_CACHE": "0",
        "QUEEN_POP_PENDING_GATE": "0",
        "QUEEN_V2_BUNDLE_MAX": "1",
    },
}


@pytest.fixture(scope="module")
def reference(module_lab: Lab) -> list[Any]:
    """The answers of a broker with everything on."""
    try:
        return script(module_lab, "reference", module_lab.broker())
    finally:
        module_lab.stop_brokers()


@pytest.mark.parametrize("off", SWITCHES)
def test_C10_results_are_the_same_with_any_of_it_off(lab: Lab, queue: str, reference: list[Any], off: str) -> None:
    assert script(lab, queue, lab.broker(**SWITCHES[off])) == reference


@pytest.mark.parametrize("hotlist", ["1", "0"])
@pytest.mark.parametrize("route", ["wildcard", "pinned", "discovery"])
def test_C11_a_push_whose_hint_was_lost_is_served_within_the_poll_interval(
    lab: Lab, queue: str, route: str, hotlist: str
) -> None:
    broker = lab.broker(QUEEN_HOTLIST=hotlist, POP_WAIT_MAX_INTERVAL_MS="300")
    lab.configure(queue, namespace=queue)
    append(lab.operations, queue, "first")
    assert len(broker.drain(queue)) == 1
    arguments: dict[str, Any] = {
        "wildcard": {"queue": queue},
        "pinned": {"queue": queue, "partition": "Default"},
        "discovery": {"queue": None, "namespace": queue},
    }[route]
    pop = gevent.spawn(lambda: broker.pop(timeout=20, **arguments))
    gevent.sleep(0.05)
    assert not pop.ready()
    append(lab.operations, queue, "second")
    started = time.monotonic()
    assert ids(pop.get(timeout=20)) == ["second"]
    assert time.monotonic() - started < 2


def test_C11_a_partition_left_behind_is_found_by_the_reseed(lab: Lab, queue: str) -> None:
    """Written long ago, of which no scan for changes tells: as if every hint and scan had missed it."""
    broker = lab.broker(QUEEN_HOTLIST_RESEED_MS="200", POP_WAIT_MAX_INTERVAL_MS="100")
    append(lab.operations, queue, "first")
    assert len(broker.drain(queue)) == 1
    append(lab.operations, queue, "second", partition="behind")
    lab.execute(
        "UPDATE queen.log_partitions SET last_write_at = now() - interval '1 minute' WHERE id = %s",
        lab.partition_id(queue, "behind"),
    )
    started = time.monotonic()
    assert ids(broker.pop(queue, timeout=20)) == ["second"]
    assert time.monotonic() - started < 3


def test_C11_a_cursor_moved_back_without_a_hint_is_found_by_the_full_reseed(lab: Lab, queue: str) -> None:
    broker = lab.broker(
        QUEEN_HOTLIST_RESEED_MS="100", QUEEN_HOTLIST_RESEED_FULL_MS="400", POP_WAIT_MAX_INTERVAL_MS="100"
    )
    append(lab.operations, queue, "first")
    assert len(broker.drain(queue)) == 1
    lab.execute("UPDATE queen.log_partitions SET last_write_at = now() - interval '1 day'")
    gevent.sleep(0.2)
    lab.seek(queue, at="epoch")
    assert ids(broker.pop(queue, timeout=20)) == ["first"]


def test_C11_an_idle_ring_looks_before_it_says_that_there_is_nothing(lab: Lab, queue: str) -> None:
    """A pop that doesn't wait, after a time in which nobody popped and somebody else pushed."""
    broker = lab.broker(QUEEN_HOTLIST_RESEED_MS="100", POP_WAIT_MAX_INTERVAL_MS="60000")
    append(lab.operations, queue, "first")
    assert len(broker.drain(queue)) == 1
    append(lab.operations, queue, "second")
    gevent.sleep(0.15)
    assert ids(broker.pop(queue)) == ["second"]
