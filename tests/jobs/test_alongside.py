"""Retention beside pushes, pops, acks, seeks and deletes: nothing deadlocks and no rule is broken."""

from __future__ import annotations

import random
from collections.abc import Callable

import gevent
import pytest

from tests.engine.conftest import Lab, together
from tests.faults.log_check import Log
from tests.jobs.conftest import Sweepers

ENOUGH = 60  # steps of retention that deleted something


def test_nothing_deadlocks_and_no_rule_is_broken(
    lab: Lab, sweepers: Sweepers, caplog: pytest.LogCaptureFixture
) -> None:
    brokers = [lab.broker(), lab.broker()]
    lab.configure("old", retentionEnabled=True, retentionSeconds=100)
    lab.configure("done", retentionEnabled=True, completedRetentionSeconds=100)
    lab.configure("late", maxWaitTimeSeconds=100)
    names = ("old", "done", "late")
    ended = False

    def deadlocks() -> int:
        lab.execute("SELECT pg_stat_clear_snapshot()")
        count: int = lab.one("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
        return count

    before = deadlocks()

    def producer() -> None:
        nonlocal ended
        for k in range(100_000):
            brokers[k % 2].push_items([(name, f"p{k % 5}", f"m{k}-{n}") for name in names for n in range(3)])
            if k % 20 == 19 and lab.one("SELECT count(*) FROM queen.retention_history") > ENOUGH:
                break
        ended = True

    def consumer(number: int) -> Callable[[], None]:
        dice = random.Random(number)

        def consume() -> None:
            while not ended:
                name, group = dice.choice(names), dice.choice("gh")
                popped = brokers[number % 2].pop(name, group=group, batch=20, partitions=3, lease=2)
                if popped and dice.random() < 0.8:
                    brokers[number % 2].ack([(message, "completed") for message in popped], group)
                gevent.sleep(0)

        return consume

    def ager() -> None:
        """Makes half of what there is old, without touching what somebody else holds."""
        while not ended:
            with lab.sql.transaction():
                mine = [
                    pid
                    for (pid,) in lab.rows(
                        "SELECT p.id FROM queen.log_partitions p WHERE random() < 0.5 AND p.last_offset >= 0"
                        " ORDER BY p.id FOR NO KEY UPDATE SKIP LOCKED"
                    )
                ]
                for table in ("log_segments", "log_txns"):
                    lab.execute(
                        f"UPDATE queen.{table} SET created_at = created_at - interval '150 s'"
                        " WHERE partition_id = ANY (%s)",
                        mine,
                    )
                lab.execute(
                    "UPDATE queen.log_partitions SET oldest_live_at = oldest_live_at - interval '150 s',"
                    " oldest_txn_at = oldest_txn_at - interval '150 s' WHERE id = ANY (%s)",
                    mine,
                )
            gevent.sleep(0.05)

    def administrator() -> None:
        while not ended:
            for name in names:
                lab.seek(name, "g")
                gevent.sleep(0.05)
                lab.delete_group(name, "h")
            lab.delete_queue("late")
            lab.configure("late", maxWaitTimeSeconds=100)
            gevent.sleep(0.3)

    def sweep(**variables: str) -> Callable[[], None]:
        sweeper = sweepers(**variables)

        def run() -> None:
            while not ended:
                sweeper.job.cycle()
                gevent.sleep(0.01)

        return run

    together(
        producer,
        ager,
        administrator,
        sweep(RETENTION_BATCH_SIZE="3", RETENTION_PARALLELISM="4", PARTITION_CLEANUP_DAYS="1"),
        sweep(RETENTION_BATCH_SIZE="3"),
        *(consumer(number) for number in range(6)),
    )
    lab.stop_brokers()
    assert deadlocks() == before and "deadlock" not in caplog.text
    assert [finding for finding in Log.read(lab.sql).violations() if not finding.startswith("L8")] == []
