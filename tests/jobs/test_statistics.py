"""What the statistics say of queues, and who computes them."""

from __future__ import annotations

import json
from typing import Any

import gevent
import pytest

from queen.db import statistics
from tests.engine.conftest import Lab, LocalBroker, append
from tests.jobs.conftest import fill, put_cursor

pytestmark = pytest.mark.usefixtures("nothing_stored")


def refresh(lab: Lab) -> dict[str, Any]:
    done = statistics.refresh(lab.connections)  # type: ignore[arg-type]
    assert done is not None
    return done


def row(lab: Lab, queue: str) -> Any:
    (found,) = lab.rows(
        "SELECT s.* FROM queen.stats s JOIN queen.queues q ON s.stat_key = q.id::text WHERE q.name = %s", queue
    )
    return found


def test_the_numbers_of_a_queue(lab: Lab, broker: LocalBroker, queue: str) -> None:
    lab.configure(queue, namespace="shop", task="bill")
    fill(lab, queue, 300, 200, 50)  # 6 messages
    fill(lab, queue, 100, partition="other")  # 2
    put_cursor(lab, queue, "slow", 1)
    put_cursor(lab, queue, "fast", 5)
    put_cursor(lab, queue, "__QUEUE_MODE__", -1)  # counts only where no group has a name
    put_cursor(lab, queue, "__QUEUE_MODE__", 0, "other")
    broker.pop(queue, partition="Default", group="slow", batch=1)
    lab.execute(
        'INSERT INTO queen.log_dlq (partition_id, consumer_group, "offset", message_id, transaction_id)'
        " VALUES (%s, 'g', 0, gen_random_uuid(), 'a')",
        lab.partition_id(queue),
    )
    assert refresh(lab)["queuesUpdated"] == 1
    found = row(lab, queue)
    assert (found.child_count, found.total_messages) == (2, 8)
    assert (found.pending_messages, found.processing_messages) == (4 + 1, 1)
    assert (found.completed_messages, found.dead_letter_messages) == (1 + 1, 1)
    live = lab.rows(
        "SELECT sum(b.total) AS t, sum(b.pending) AS p, sum(b.processing) AS r FROM queen.log_backlog_v1(%s, NULL) b",
        found.queue_id,
    )
    assert live == [(found.total_messages, found.pending_messages, found.processing_messages)], "as other routes say"
    assert 195 < found.avg_lag_seconds == found.max_lag_seconds < 260
    assert (found.avg_offset_lag, found.max_offset_lag) == (3, 4)
    lab.execute("DELETE FROM queen.log_dlq")


def test_rows_add_up_to_namespaces_tasks_and_the_system(lab: Lab, queue: str) -> None:
    for name, namespace, task in (("a", "shop", "bill"), ("b", "shop", ""), ("c", "", "")):
        lab.configure(queue + name, namespace=namespace, task=task)
        fill(lab, queue + name, 10)
    answer = refresh(lab)
    assert answer.pop("refreshedAt").endswith("Z")
    assert answer == {
        "engine": "segments",
        "queuesUpdated": 3,
        "segPartitions": 3,
        "namespaces": {"namespacesUpdated": 1},
        "tasks": {"tasksUpdated": 1},
        "system": {"systemUpdated": 1},
    }
    found = lab.rows(
        "SELECT stat_type, stat_key, child_count::int, total_messages::int FROM queen.stats"
        " WHERE stat_type <> 'queue' ORDER BY 1, 2"
    )
    assert found == [("namespace", "shop", 2, 4), ("system", "global", 3, 6), ("task", "bill", 1, 2)]
    lab.delete_queue(queue + "a")
    refresh(lab)
    assert lab.one("SELECT count(*) FROM queen.stats WHERE stat_type = 'task'") == 0


def test_an_empty_database_has_a_row_too(lab: Lab) -> None:
    assert refresh(lab)["segPartitions"] == 0
    assert lab.one("SELECT total_messages FROM queen.stats WHERE stat_type = 'system'") == 0


def test_rates_are_those_since_the_last_computation(lab: Lab, queue: str) -> None:
    def earlier(seconds: int) -> None:
        lab.execute("UPDATE queen.stats SET prev_snapshot_at = prev_snapshot_at - make_interval(secs => %s)", seconds)

    fill(lab, queue, 10)
    refresh(lab)
    assert row(lab, queue).ingested_per_second == 0, "there is nothing to compare with"
    append(lab.operations, queue, "c", "d", "e", "f")
    put_cursor(lab, queue, "g", 1)
    refresh(lab)
    assert row(lab, queue).ingested_per_second == 0, "too soon"
    earlier(10)
    refresh(lab)
    assert 0.3 < row(lab, queue).ingested_per_second <= 0.4
    assert 0.15 < row(lab, queue).processed_per_second <= 0.2
    earlier(10)
    lab.drop_front(queue, 4)
    refresh(lab)
    assert row(lab, queue).ingested_per_second == 0, "never below"


def test_what_did_not_change_is_not_written(lab: Lab, queue: str) -> None:
    fill(lab, queue, 10)
    put_cursor(lab, queue, "g", 1)
    refresh(lab)
    lab.execute("UPDATE queen.stats SET prev_snapshot_at = prev_snapshot_at - interval '10 s'")
    refresh(lab)
    assert refresh(lab)["queuesUpdated"] == 0


def test_one_broker_at_a_time(lab: Lab, queue: str) -> None:
    database: Any = lab.connections
    for lock, compute in ((737002, statistics.refresh), (737003, statistics.refresh_retained_bytes)):
        with lab.database.connect(autocommit=False) as other:
            other.execute("SELECT pg_advisory_xact_lock(%s)", (lock,))
            assert compute(database) is None
        assert compute(database) is not None
    with lab.database.connect(autocommit=False) as other:
        other.execute("SELECT pg_advisory_xact_lock(737002)")
        asked = gevent.spawn(statistics.refresh_now, database)
        gevent.sleep(0.2)
        assert not asked.ready(), "who asks waits for the one that is at it"
    assert json.loads(asked.get(timeout=30))["engine"] == "segments"


def test_what_is_stored(lab: Lab, broker: LocalBroker, queue: str) -> None:
    database: Any = lab.connections
    lab.configure(queue + "-empty")
    broker.accept(queue, "a")
    broker.accept(queue, "b", partition="p")
    statistics.refresh_retained_bytes(database)
    bytes_stored = lab.one("SELECT sum(octet_length(blob)) FROM queen.log_segments")
    assert (row(lab, queue).retained_bytes, row(lab, queue).segment_count) == (bytes_stored, 2)
    assert (row(lab, queue + "-empty").retained_bytes, row(lab, queue + "-empty").segment_count) == (0, 0)
    refresh(lab)
    assert row(lab, queue).retained_bytes == bytes_stored, "the other computation leaves it alone"
    assert statistics.refresh_retained_bytes(database) == 0
