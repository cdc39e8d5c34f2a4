"""Everything at once: no deadlock in a mixed run, and the schema goes in under load."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import gevent
import psycopg
import pytest
from pytest_postgresql.executors import NoopExecutor

from queen.db import schema
from queen.engine.transaction import TransactionRefused
from tests.broker import wait_until
from tests.engine.conftest import TENANT, Lab, LocalBroker, new_lab, together
from tests.faults.log_check import Log

SECONDS = 6.0
QUEUES = ("alpha", "beta", "gamma")
LANES = tuple(f"p{k}" for k in range(4))


def deadlocks(lab: Lab) -> int:
    """Return how many deadlocks this database has had, told by every session that has ended."""
    return int(lab.one("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"))


@pytest.mark.slow
def test_K1_a_mixed_run_never_deadlocks(schema_template: NoopExecutor) -> None:
    """Pushes over several partitions, pops of every kind, acks and extensions of several leases,
    transactions, seeks, group and queue deletion and configuration, in random order on two brokers."""
    with new_lab(schema_template) as lab:
        lab.execute(f"ALTER DATABASE {lab.database.name} SET deadlock_timeout = '20ms'")
        brokers = [lab.broker(), lab.broker(QUEEN_HOTLIST="0")]
        ends = time.monotonic() + SECONDS
        done: dict[str, int] = {}
        refused: list[str] = []

        def worker(seed: int) -> Callable[[], None]:
            dice = random.Random(seed)
            broker = brokers[seed % 2]

            def run() -> None:
                while time.monotonic() < ends:
                    name, step = dice.choice(STEPS)
                    try:
                        step(lab, broker, dice)
                        done[name] = done.get(name, 0) + 1
                    except TransactionRefused as refusal:
                        if refusal.reason not in ("duplicate", "ack_rejected"):
                            refused.append(refusal.error)
                    gevent.sleep(0)

            return run

        together(*(worker(seed) for seed in range(16)), timeout=SECONDS + 30)
        lab.stop_brokers()
        lab.connections.close()
        others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        wait_until(lambda: lab.one(others) == 0)
        assert {name for name, _ in STEPS} == set(done)
        assert deadlocks(lab) == 0
        assert refused == []
        assert Log.read(lab.sql).violations() == []


def lanes(dice: random.Random) -> list[tuple[str, str]]:
    return [(dice.choice(QUEUES), dice.choice(LANES)) for _ in range(dice.randint(1, 6))]


def push(lab: Lab, broker: LocalBroker, dice: random.Random) -> None:
    outcomes = broker.push_items([(*lane, f"id-{dice.randrange(2000)}") for lane in lanes(dice)])
    assert {o.status for o in outcomes} <= {"queued", "duplicate"}


def work(lab: Lab, broker: LocalBroker, dice: random.Random) -> None:
    group, queue = dice.choice("gh"), dice.choice(QUEUES)
    partition = dice.choice((None, None, dice.choice(LANES)))
    messages = broker.pop(queue, partition, group, batch=dice.randint(1, 20), partitions=dice.randint(1, 4), lease=5)
    if not messages:
        return
    if dice.random() < 0.5:
        broker.engine.leases.extend(TENANT, messages[0].lease.encode(), 5)
    dice.shuffle(messages)
    if dice.random() < 0.3:
        broker.transact(
            [(*lane, f"t-{dice.randrange(10**9)}") for lane in lanes(dice)],
            [(m, "completed") for m in messages],
            group,
        )
    elif dice.random() < 0.9:
        statuses = ("completed", "completed", "retry", "failed", "dlq")
        results = broker.ack([(m, dice.choice(statuses)) for m in messages], group)
        assert {r.error for r in results} <= {None, "consumer not found", "invalid or expired lease"}


def extend(lab: Lab, broker: LocalBroker, dice: random.Random) -> None:
    """Extend somebody's lease without knowing where it is."""
    row = lab.rows("SELECT worker_id FROM queen.log_consumers WHERE worker_id IS NOT NULL ORDER BY random() LIMIT 1")
    for worker in row:
        lab.operations.renew_lease(TENANT, worker.worker_id.encode(), 3, None)


def discover(lab: Lab, broker: LocalBroker, dice: random.Random) -> None:
    group = dice.choice(("g", "h", f"new-{dice.randrange(30)}"))
    messages = (
        broker.pop(None, group=group, namespace=dice.choice(("", *QUEUES)), task="", batch=5, partitions=3)
        if dice.random() < 0.5
        else broker.pop(None, group=group, namespace="common", batch=5, partitions=3)
    )
    if messages:
        broker.ack([(m, "completed") for m in messages], group)


def first_contact(lab: Lab, broker: LocalBroker, dice: random.Random) -> None:
    queue, group = dice.choice(QUEUES), f"new-{dice.randrange(30)}"
    broker.pop(queue, dice.choice((None, dice.choice(LANES))), group, batch=2, auto_ack=True)


def administer(lab: Lab, broker: LocalBroker, dice: random.Random) -> None:
    queue, group = dice.choice(QUEUES), dice.choice(("g", "h", f"new-{dice.randrange(30)}"))
    dice.choice(
        (
            lambda: lab.seek(queue, group, dice.choice((None, "epoch"))),
            lambda: lab.delete_group(queue, group),
            lambda: lab.configure(queue, retryLimit=dice.randint(0, 3), namespace="common"),
        )
    )()
    broker.engine.group_moved(TENANT, queue, group, None)


def delete(lab: Lab, broker: LocalBroker, dice: random.Random) -> None:
    if dice.random() < 0.05:
        queue = dice.choice(QUEUES)
        lab.delete_queue(queue)
        broker.engine.queue_changed(TENANT, queue)


STEPS: list[tuple[str, Callable[[Lab, LocalBroker, random.Random], None]]] = [
    ("push", push),
    ("push", push),
    ("work", work),
    ("work", work),
    ("work", work),
    ("extend", extend),
    ("discover", discover),
    ("first contact", first_contact),
    ("administer", administer),
    ("delete", delete),
]


def test_K1_a_deadlock_would_be_counted(lab: Lab) -> None:
    """Two sessions that lock two partitions in opposite orders: what the run must never do."""
    before = deadlocks(lab)
    for partition in ("p", "q"):
        lab.broker().accept("count", "a", partition=partition)
    first, second = (str(row.id) for row in lab.rows("SELECT id FROM queen.log_partitions LIMIT 2"))
    lock = b"SELECT 1 FROM queen.log_partitions WHERE id = %s FOR UPDATE"

    def locker(order: tuple[str, str]) -> str | None:
        with lab.database.connect(autocommit=False) as session:
            session.execute("SET deadlock_timeout = '20ms'")
            try:
                session.execute(lock, (order[0],))
                time.sleep(0.2)
                session.execute(lock, (order[1],))
            except psycopg.errors.DeadlockDetected as error:
                return error.sqlstate
            finally:
                session.rollback()
        return None

    with ThreadPoolExecutor() as threads:
        states = list(threads.map(locker, ((first, second), (second, first))))
    assert sorted(state or "" for state in states) == ["", "40P01"]
    with gevent.Timeout(10):
        while deadlocks(lab) == before:
            gevent.sleep(0.05)


def test_K3_the_schema_is_applied_under_load_and_stalls_no_push(lab: Lab, queue: str) -> None:
    brokers = [lab.broker(), lab.broker()]
    slowest = 0.0
    pushed = 0
    applied: list[float] = []

    def pusher(number: int) -> Callable[[], None]:
        def run() -> None:
            nonlocal slowest, pushed
            while len(applied) < 4:
                started = time.monotonic()
                brokers[number % 2].accept(queue, f"{number}-{pushed}-{started}", partition=f"p{number % 4}")
                slowest = max(slowest, time.monotonic() - started)
                pushed += 1

        return run

    def consumer() -> None:
        while len(applied) < 4:
            brokers[0].complete(brokers[0].pop(queue, batch=50, partitions=4, timeout=0.05))

    def apply() -> None:
        for _ in range(2):
            started = time.monotonic()
            # Two brokers boot at once.
            threads = gevent.get_hub().threadpool
            for boot in [threads.spawn(schema.apply, lab.database.conninfo) for _ in range(2)]:
                boot.get(timeout=40)
                applied.append(time.monotonic() - started)

    together(apply, consumer, *(pusher(number) for number in range(8)))
    assert pushed > 100
    assert slowest < 2.5
    assert max(applied) < 20
    assert Log.read(lab.sql).violations() == []


def test_K3_an_apply_waits_its_turn_behind_a_long_transaction_in_slices(lab: Lab, queue: str) -> None:
    """Somebody reads for long; pushes that come behind a waiting schema change wait a slice at most."""
    broker = lab.broker()
    broker.accept(queue, "a")
    slowest = 0.0
    with lab.database.connect(autocommit=False) as reader:
        reader.execute("SELECT count(*) FROM queen.log_segments, queen.log_partitions, queen.queues, queen.log_txns")
        reader.execute("LOCK TABLE queen.log_consumers IN ROW EXCLUSIVE MODE")
        boot = gevent.get_hub().threadpool.spawn(schema.apply, lab.database.conninfo)
        ends = time.monotonic() + 4
        k = 0
        while time.monotonic() < ends and not boot.ready():
            started = time.monotonic()
            broker.accept(queue, f"m{k}")
            slowest = max(slowest, time.monotonic() - started)
            k += 1
        reader.rollback()
    boot.get(timeout=40)
    assert slowest < 2.5
