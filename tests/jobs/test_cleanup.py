"""Which empty partitions are removed, and what becomes of their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gevent
import pytest

from tests.broker import wait_until
from tests.engine.conftest import Lab, LocalBroker, append, ids
from tests.faults.log_check import Log
from tests.jobs.conftest import Sweeper, Sweepers, fill, put_cursor

pytestmark = pytest.mark.usefixtures("nothing_stored")

MONTH = 31 * 86_400


def left_empty(lab: Lab, queue: str, partition: str = "Default", since: float = MONTH) -> str:
    """Make a partition that was written and emptied so many seconds ago; return its id."""
    lab.configure(queue, maxWaitTimeSeconds=1)
    fill(lab, queue, since, partition=partition)
    pid = lab.partition_id(queue, partition)
    lab.execute("DELETE FROM queen.log_segments WHERE partition_id = %s", pid)
    lab.execute(
        "UPDATE queen.log_partitions SET log_start = last_offset + 1, oldest_live_at = NULL,"
        " created_at = now() - make_interval(secs => %s), last_write_at = now() - make_interval(secs => %s)"
        " WHERE id = %s",
        since,
        since,
        pid,
    )
    return pid


def exists(lab: Lab, pid: str) -> bool:
    return bool(lab.one("SELECT count(*) FROM queen.log_partitions WHERE id = %s", pid))


def test_a_partition_that_was_long_empty_is_removed_with_all_that_belongs_to_it(
    lab: Lab, sweeper: Sweeper, queue: str
) -> None:
    gone, kept = left_empty(lab, queue, "gone"), left_empty(lab, queue, "kept", since=MONTH - 2 * 86_400)
    put_cursor(lab, queue, "g", 1, "gone")
    lab.execute("UPDATE queen.log_consumers SET created_at = now() - interval '40 days'")
    assert sweeper.cycle().partitions_deleted == 1
    assert (exists(lab, gone), exists(lab, kept)) == (False, True)
    assert lab.one("SELECT count(*) FROM queen.log_txns WHERE partition_id = %s", gone) == 0
    assert lab.one("SELECT count(*) FROM queen.log_consumers WHERE partition_id = %s", gone) == 0
    told = lab.rows("SELECT partition_id::text, retention_type, messages_deleted FROM queen.retention_history")
    assert told == [(gone, "__partition_deleted__", 0)]
    assert Log.read(lab.sql).violations() == []


PROTECTED: dict[str, str] = {
    "dead letter": 'INSERT INTO queen.log_dlq (partition_id, consumer_group, "offset", message_id, transaction_id)'
    " VALUES (%(pid)s, 'g', 0, gen_random_uuid(), 'a')",
    "young": "UPDATE queen.log_partitions SET created_at = now() WHERE id = %(pid)s",
    "new cursor": "INSERT INTO queen.log_consumers (partition_id, consumer_group) VALUES (%(pid)s, 'g')",
    "recent lease": "INSERT INTO queen.log_consumers (partition_id, consumer_group, created_at, lease_acquired_at)"
    " VALUES (%(pid)s, 'g', 'epoch', now() - interval '1 day')",
    "live lease": "INSERT INTO queen.log_consumers (partition_id, consumer_group, created_at, batch_end, worker_id)"
    " VALUES (%(pid)s, 'g', 'epoch', 1, 'w')",
    "dedup window": "UPDATE queen.queues SET dedup_window_seconds = 90 * 86400",
}


@pytest.mark.parametrize("reason", PROTECTED, ids=lambda name: name.replace(" ", "-"))
def test_what_protects_a_partition(lab: Lab, sweeper: Sweeper, queue: str, reason: str) -> None:
    pid = left_empty(lab, queue)
    lab.sql.execute(PROTECTED[reason].encode(), {"pid": pid})
    try:
        assert sweeper.cycle().partitions_deleted == 0
        assert exists(lab, pid)
    finally:
        lab.execute("DELETE FROM queen.log_dlq")


def test_an_old_expired_lease_protects_nothing(lab: Lab, sweeper: Sweeper, queue: str) -> None:
    pid = left_empty(lab, queue)
    put_cursor(lab, queue, "g", -1)
    lab.execute(
        "UPDATE queen.log_consumers SET created_at = 'epoch', worker_id = 'w', batch_end = 1,"
        " lease_acquired_at = now() - interval '40 days', lease_expires_at = now() - interval '39 days'"
    )
    assert sweeper.cycle().partitions_deleted == 1
    assert not exists(lab, pid)


def test_the_cleanup_can_be_switched_off_and_shortened(lab: Lab, sweepers: Sweepers, queue: str) -> None:
    left_empty(lab, queue, since=2 * 86_400)
    assert sweepers(QUEEN_PARTITION_CLEANUP_ENABLED="false", PARTITION_CLEANUP_DAYS="1").cycle().partitions_deleted == 0
    assert sweepers(PARTITION_CLEANUP_DAYS="1").cycle().partitions_deleted == 1


def test_more_than_one_batch_and_protected_ones_in_front(lab: Lab, sweepers: Sweepers, queue: str) -> None:
    pids = [left_empty(lab, queue, f"p{k}", since=MONTH - k) for k in range(8)]
    for k in range(3):
        put_cursor(lab, queue, "g", 1, f"p{k}")
    assert sweepers(RETENTION_BATCH_SIZE="2").cycle().partitions_deleted == 5
    assert [exists(lab, pid) for pid in pids] == [True] * 3 + [False] * 5


def test_one_that_somebody_works_with_is_left(lab: Lab, sweeper: Sweeper, queue: str) -> None:
    pid = left_empty(lab, queue)
    with lab.database.connect(autocommit=False) as other:
        other.execute("SELECT 1 FROM queen.log_partitions WHERE id = %s FOR NO KEY UPDATE", (pid,))
        assert sweeper.cycle().partitions_deleted == 0
    assert exists(lab, pid)


def test_a_push_that_meets_the_removal_makes_the_partition_anew(
    lab: Lab, broker: LocalBroker, sweeper: Sweeper, queue: str
) -> None:
    old = left_empty(lab, queue)
    with lab.database.connect(autocommit=False) as remover:
        removed = remover.execute(
            "SELECT removed FROM queen.log_partition_cleanup_step_v1(now() - interval '30 days', NULL, NULL, 10)"
        ).fetchone()
        assert removed == (1,)
        pushing = gevent.spawn(broker.push, queue, "new")
        gevent.sleep(0.3)
        assert not pushing.ready()
        remover.commit()
    assert [outcome.status for outcome in pushing.get(timeout=30)] == ["queued"]
    assert lab.partition_id(queue) != old
    assert ids(broker.pop(queue)) == ["new"]


@pytest.mark.parametrize("pop", [{}, {"partition": "p"}], ids=["wildcard", "pinned"])
def test_a_name_that_is_used_again_is_news_to_other_brokers(
    lab: Lab, sweeper: Sweeper, queue: str, pop: dict[str, Any]
) -> None:
    """They remember how far the old partition's offsets went; the new one's begin at 0."""
    old = left_empty(lab, queue, "p")
    listener = lab.broker(QUEEN_HOTLIST_RESEED_MS="600000")
    lane = listener.engine.hotlist.lane(bytes.fromhex("00" * 15 + "01"), queue.encode())
    lane.offsets[b"p"] = 1
    assert listener.pop(queue) == []
    lab.execute("DELETE FROM queen.log_consumers")
    sweeper.cycle()
    assert not exists(lab, old)
    waiting = gevent.spawn(lambda: listener.pop(queue, timeout=60.0, **pop))
    wait_until(parks(listener), what="the pop parks")
    gevent.sleep(0.3)  # its scans go on
    append(lab.operations, queue, "a", partition="p")
    assert ids(waiting.get(timeout=30)) == ["a"]


def parks(broker: LocalBroker) -> Callable[[], bool]:
    def parked() -> bool:
        gevent.sleep(0.01)
        return broker.engine.popper.parked == 1

    return parked
