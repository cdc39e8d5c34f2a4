"""A transaction's pushes and acks are visible together or not at all, and a replay adds nothing."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import gevent
import pytest

from queen.db.errors import Unavailable
from queen.engine.ack import ItemResult
from queen.engine.transaction import TransactionRefused
from tests.engine.conftest import GROUP, Address, Lab, LocalBroker, Message, ids, offsets, together
from tests.faults.log_check import Log

KEYS = "abcde"


@pytest.fixture
def popped(lab: Lab, queue: str, broker: LocalBroker) -> list[Message]:
    """Five messages of the queue, leased by the group."""
    broker.accept(queue, *KEYS)
    return broker.pop(queue)


def state(lab: Lab) -> Any:
    """Return all that a transaction could change, with the versions of the rows."""
    return [
        lab.rows(f"SELECT ctid::text, t::text FROM queen.{table} t ORDER BY ctid")
        for table in ("queues", "log_partitions", "log_segments", "log_txns", "log_consumers", "log_dlq")
    ]


def refused(broker: LocalBroker, *arguments: Any, **keywords: Any) -> TransactionRefused:
    with pytest.raises(TransactionRefused) as caught:
        broker.transact(*arguments, **keywords)
    return caught.value


def test_pushes_and_acks_commit_together(lab: Lab, queue: str, broker: LocalBroker, popped: list[Message]) -> None:
    out = f"{queue}-out"
    done = broker.transact(
        [(out, "p", "x"), (out, "q", None), (out, "p", "y"), (out, "p", "x")], [(m, "completed") for m in popped]
    )
    assert [p.duplicate for p in done.pushed] == [False, False, False, True]
    assert done.pushed[3].message_id == done.pushed[0].message_id
    assert done.acked == [ItemResult(True)] * 5
    stored = {(m.partition, m.offset): m.message_id for m in Log.read(lab.sql).messages if m.queue == out}
    assert stored == {
        ("p", 0): done.pushed[0].message_id,
        ("p", 1): done.pushed[2].message_id,
        ("q", 0): done.pushed[1].message_id,
    }
    assert (lab.committed(queue), lab.cursor(queue).worker_id) == (4, None)


def foreign(lab: Lab, name: str) -> str:
    """Return a partition of another tenant, with a message and a cursor."""
    tenant = uuid.uuid4()
    queue = lab.one("INSERT INTO queen.queues (tenant_id, name) VALUES (%s, %s) RETURNING id", tenant, name)
    partition = lab.one("INSERT INTO queen.log_partitions (queue_id) VALUES (%s) RETURNING id", queue)
    lab.execute("INSERT INTO queen.log_consumers (partition_id, consumer_group) VALUES (%s, %s)", partition, GROUP)
    return str(partition)


Failure = Callable[[Lab, str, list[Message]], tuple[list[Any], list[Any], str, str]]

# What makes a transaction fail: its pushes, its acks, the error's beginning and the reason.
FAILURES: dict[str, Failure] = {
    "a repeat": lambda lab, q, m: (
        [("out", "p", "fresh"), (q, "Default", "c")],
        [(m[0], "completed")],
        f'QDUP duplicate messages in queue "{q}" partition "Default"; transaction rolled back',
        "duplicate",
    ),
    "a repeat alone": lambda lab, q, m: ([(q, "Default", "c")], [], "QDUP", "duplicate"),
    "another's lease": lambda lab, q, m: (
        [("out", "p", "fresh")],
        [(Address("a", m[0].partition_id, "somebody"), "completed")],
        f'QTXN ack failed for partition {m[0].partition_id} group "g": invalid or expired lease',
        "ack_rejected",
    ),
    "an expired lease": lambda lab, q, m: (
        lab.expire_leases(q) or [("out", "p", "fresh")],  # type: ignore[func-returns-value]
        [(m[0], "completed")],
        "QTXN ack failed",
        "ack_rejected",
    ),
    "one good ack, one bad": lambda lab, q, m: (
        [("out", "p", "fresh")],
        [(m[0], "completed"), (Address("a", m[0].partition_id, "somebody"), "completed")],
        "QTXN ack failed",
        "ack_rejected",
    ),
    "an unknown id": lambda lab, q, m: (
        [("out", "p", "fresh")],
        [(m[0], "completed"), (Address("x", m[0].partition_id, m[0].lease), "completed")],
        "QTXN ack references unknown transactionId; transaction rolled back",
        "ack_rejected",
    ),
    "an unknown partition": lambda lab, q, m: (
        [("out", "p", "fresh")],
        [(Address("a", str(uuid.uuid4())), "completed")],
        "QTXN ack references partition",
        "ack_rejected",
    ),
    "another tenant's partition": lambda lab, q, m: (
        [("out", "p", "fresh")],
        [(Address("a", foreign(lab, q)), "completed")],
        "QTXN ack references partition",
        "ack_rejected",
    ),
    "no partition id": lambda lab, q, m: (
        [("out", "p", "fresh")],
        [(Address("a", "no uuid"), "completed")],
        "QTXN ack references partition no uuid not owned by this tenant",
        "ack_rejected",
    ),
    "no queue name": lambda lab, q, m: (
        [("out", "p", "fresh"), ("", "p", "x")],
        [],
        "QMULTI resolved 1 of 2",
        "db_error",
    ),
    "too long a queue name": lambda lab, q, m: (
        [("out", "p", "fresh"), ("q" * 256, "p", "x")],
        [(m[0], "completed")],
        "value too long",
        "payload_too_large",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_T1_a_failure_rolls_everything_back(
    lab: Lab, queue: str, broker: LocalBroker, popped: list[Message], name: str
) -> None:
    pushes, acks, error, reason = FAILURES[name](lab, queue, popped)
    before = state(lab)
    failure = refused(broker, pushes, acks)
    assert (failure.error[: len(error)], failure.reason) == (error, reason)
    assert state(lab) == before


def test_T1_a_group_without_cursor_rolls_everything_back(
    lab: Lab, queue: str, broker: LocalBroker, popped: list[Message]
) -> None:
    before = state(lab)
    failure = refused(broker, [("out", "p", "fresh")], [(popped[0], "completed")], group="nobody")
    assert failure.error.startswith(f'QTXN ack failed for partition {popped[0].partition_id} group "nobody": consumer')
    assert state(lab) == before


def test_T1_a_signal_where_nothing_is_leased_rolls_everything_back(
    lab: Lab, queue: str, broker: LocalBroker, popped: list[Message]
) -> None:
    broker.complete(popped[:3])
    broker.ack([(popped[3], "retry")])
    before = state(lab)
    failure = refused(broker, [("out", "p", "fresh")], [(Address("d", popped[0].partition_id), "failed")])
    assert "no leased batch" in failure.error
    assert state(lab) == before


def test_T1_a_refusal_that_is_overlooked_is_noticed(
    lab: Lab, queue: str, broker: LocalBroker, popped: list[Message]
) -> None:
    before = state(lab)
    with lab.broken("log_transaction_v1", ("IF r.error IS NOT NULL THEN", "IF false THEN")):
        broker.transact([(f"{queue}-out", "p", "x")], [(Address("a", popped[0].partition_id, "somebody"), "completed")])
    assert state(lab) != before


# Where to stop a transaction on its way: what it waits for, and what of it is already done by then.
STOPS = {
    "before it locks": "LOCK TABLE queen.log_partitions IN ACCESS EXCLUSIVE MODE",
    "before it pushes": "LOCK TABLE queen.log_segments IN SHARE ROW EXCLUSIVE MODE",
    "between pushes": "LOCK TABLE queen.log_txns IN SHARE ROW EXCLUSIVE MODE",
    "before it acks": "SELECT 1 FROM queen.log_consumers FOR UPDATE",
    "before it files": "LOCK TABLE queen.log_dlq IN SHARE ROW EXCLUSIVE MODE",
}


@pytest.mark.parametrize("stop", STOPS)
def test_T1_a_transaction_cut_off_on_its_way_leaves_nothing(
    lab: Lab, queue: str, broker: LocalBroker, popped: list[Message], stop: str
) -> None:
    out = f"{queue}-out"
    broker.accept(out, "before")
    before = state(lab)
    pushes = [(out, "Default", "x"), (out, "new", "y")]
    acks = [(popped[0], "completed"), (popped[2], "dlq")]
    with lab.database.connect(autocommit=False) as blocker:
        blocker.execute(STOPS[stop].encode())
        transaction = gevent.spawn(broker.transact, pushes, acks)
        with gevent.Timeout(10):
            while not lab.one(
                "SELECT pg_terminate_backend(l.pid) FROM pg_locks l JOIN pg_stat_activity a USING (pid)"
                " WHERE NOT l.granted AND a.query LIKE '%%log_transaction%%' AND a.datname = current_database()"
            ):
                gevent.sleep(0.005)
        with pytest.raises(TransactionRefused):
            transaction.get(timeout=10)
        blocker.rollback()
    assert state(lab) == before
    broker.transact(pushes, acks)
    assert lab.committed(queue) == 2
    assert [m.transaction_id for m in Log.read(lab.sql).messages if m.queue == out].count("x") == 1


def test_T1_without_a_database_nothing_happens(
    lab: Lab, queue: str, broker: LocalBroker, popped: list[Message]
) -> None:
    before = state(lab)
    broker.connections.away = True
    with pytest.raises(Unavailable):
        broker.transact([("out", "p", "x")], [(popped[0], "completed")])
    broker.connections.away = False
    assert state(lab) == before


def test_T2_a_replay_of_pushes_and_acks_has_no_effect(
    lab: Lab, queue: str, broker: LocalBroker, popped: list[Message]
) -> None:
    pushes = [(f"{queue}-out", "p", f"of-{m.transaction_id}") for m in popped]
    acks = [(m, "completed") for m in popped[:3]]
    broker.transact(pushes, acks)
    after = state(lab)
    assert refused(broker, pushes, acks).reason == "duplicate"
    assert refused(lab.broker(), pushes, acks, leases=[popped[0].lease]).reason == "duplicate"
    assert state(lab) == after


def test_T2_a_replay_of_acks_alone_succeeds_and_has_no_effect(
    lab: Lab, queue: str, broker: LocalBroker, popped: list[Message]
) -> None:
    for status in ("completed", "failed", "dlq"):
        broker.transact((), [(popped[0], "completed"), (popped[2], "completed")])
        after = state(lab)
        replayed = broker.transact((), [(popped[0], status), (popped[2], status)])
        assert replayed.acked == [ItemResult(True)] * 2
        assert state(lab) == after


def test_T2_a_relay_that_repeats_itself_relays_once(lab: Lab, queue: str) -> None:
    """Two workers relay the same messages, one after its lease is over; each id arrives once, in order."""
    brokers = [lab.broker(), lab.broker()]
    out = f"{queue}-out"
    brokers[0].accept(queue, *(f"m{k}" for k in range(30)))

    def relay(broker: LocalBroker) -> Callable[[], None]:
        def run() -> None:
            while lab.committed(queue) != 29:
                messages = broker.pop(queue, "Default", batch=4)
                if broker is brokers[1]:
                    lab.expire_leases(queue)
                for _ in range(2):
                    try:
                        if messages:
                            broker.transact(
                                [(out, "p", f"of-{m.transaction_id}") for m in messages],
                                [(m, "completed") for m in messages],
                            )
                    except TransactionRefused as refusal:
                        assert refusal.reason in ("duplicate", "ack_rejected")
                gevent.sleep(0)

        return run

    together(*(relay(broker) for broker in brokers))
    relayed = [m.transaction_id for m in Log.read(lab.sql).messages if m.queue == out]
    assert relayed == [f"of-m{k}" for k in range(30)]


def test_transactions_in_opposite_orders_do_not_deadlock(lab: Lab, queue: str) -> None:
    brokers = [lab.broker(), lab.broker()]
    lanes = [f"p{k}" for k in range(6)]
    for lane in lanes:
        brokers[0].accept(queue, *(f"m{k}" for k in range(40)), partition=lane)
    for lane in lanes:
        assert brokers[0].pop(queue, lane, batch=40, lease=100)

    def worker(number: int) -> Callable[[], None]:
        order = lanes if number % 2 else lanes[::-1]

        def run() -> None:
            for k in range(10):
                brokers[number % 2].transact(
                    [(queue, lane, f"{number}-{k}") for lane in order],
                    [(Address(f"m{number + 4 * k}", lab.partition_id(queue, lane)), "completed") for lane in order],
                )

        return run

    together(*(worker(number) for number in range(4)))
    assert lab.one("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()") == 0
    assert {lab.committed(queue, lane) for lane in lanes} == {39}


# Which lease an ack is judged by.


def test_an_ack_without_lease_goes_under_one_that_the_request_names(
    lab: Lab, queue: str, broker: LocalBroker, popped: list[Message]
) -> None:
    address = [Address(m.transaction_id, m.partition_id) for m in popped]
    assert "lease" in refused(broker, (), [(address[0], "completed")], leases=["another"]).error
    broker.transact((), [(address[0], "completed")], leases=["another", popped[0].lease])
    lab.expire_leases(queue)
    assert "lease" in refused(broker, (), [(address[1], "completed")], leases=[popped[0].lease]).error
    (again, *_) = broker.pop(queue, "Default")
    assert "lease" in refused(broker, (), [(address[1], "completed")], leases=[popped[0].lease]).error
    broker.transact((), [(address[1], "completed")], leases=[popped[0].lease, again.lease])
    assert lab.committed(queue) == 1


def test_a_request_without_any_lease_is_not_judged(
    lab: Lab, queue: str, broker: LocalBroker, popped: list[Message]
) -> None:
    broker.transact((), [(Address("c", popped[0].partition_id), "completed")])
    assert lab.committed(queue) == 2


# Nacks.


def test_nacks_of_a_transaction_follow_the_ack_procedure(
    lab: Lab, queue: str, broker: LocalBroker, popped: list[Message]
) -> None:
    broker.transact((), [(popped[0], "completed"), (popped[1], "failed")])
    cursor = lab.cursor(queue)
    assert (cursor.committed, cursor.worker_id, cursor.batch_retry_count) == (0, None, 1)
    again = broker.pop(queue, "Default")
    assert offsets(again) == [1, 2, 3, 4]
    broker.transact((), [(again[1], "retry")])
    assert (lab.committed(queue), lab.cursor(queue).batch_retry_count) == (0, 1)


def test_dead_letters_of_several_partitions_are_filed_with_the_rest(lab: Lab, queue: str, broker: LocalBroker) -> None:
    for lane in ("p", "q"):
        broker.accept(queue, *KEYS, partition=lane)
    messages = {lane: broker.pop(queue, lane) for lane in ("p", "q")}
    done = broker.transact(
        [(f"{queue}-out", "p", "x")],
        [(messages["p"][0], "completed"), (messages["p"][1], "dlq"), (messages["q"][2], "dlq")],
    )
    assert [a.dlq for a in done.acked] == [False, True, True]
    letters = lab.dead_letters(queue)
    assert [(d.offset, d.transaction_id, d.payload) for d in letters] == [(1, "b", "{}"), (2, "c", "{}")]
    assert all(d.pushed_at is not None for d in letters)
    assert (lab.committed(queue, "p"), lab.committed(queue, "q")) == (1, 2)
    assert len([m for m in Log.read(lab.sql).messages if m.queue == f"{queue}-out"]) == 1


def test_a_wanted_dead_letter_of_a_failing_transaction_is_not_filed(
    lab: Lab, queue: str, broker: LocalBroker, popped: list[Message]
) -> None:
    before = state(lab)
    refused(broker, [(queue, "Default", "a")], [(popped[0], "dlq")])
    assert state(lab) == before


def test_what_a_transaction_pushed_and_released_wakes_pops(
    lab: Lab, queue: str, broker: LocalBroker, popped: list[Message]
) -> None:
    out = f"{queue}-out"
    assert broker.pop(out) == []
    waiting = [gevent.spawn(broker.pop, name, timeout=20) for name in (out, queue)]
    gevent.sleep(0.05)
    broker.transact([(out, "p", "x")], [(popped[0], "retry")])
    assert [ids(pop.get(timeout=0.5)) for pop in waiting] == [["x"], list(KEYS)]
