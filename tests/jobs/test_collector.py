"""What brokers measure of themselves, store, and show."""

from __future__ import annotations

import re
from typing import Any

from tests.broker import Broker, wait_until
from tests.conftest import Brokers, Database

OFTEN = {"METRICS_FLUSH_MS": "1000"}


def work(broker: Broker) -> None:
    """3 pushes of 5 messages, pops that get 4 and none, 3 acks and one nack."""
    for batch in (["a", "b", "c"], ["d"], ["e"]):
        broker.push([{"queue": "q", "payload": 1, "transactionId": key} for key in batch])
    popped = broker.pop("q", consumerGroup="g", subscriptionMode="all", batch=4)
    assert len(popped) == 4
    for message, status in zip(popped, ["completed", "completed", "completed", "failed"], strict=True):
        assert broker.ack(message, status, consumerGroup="g")["success"]
    assert broker.pop("empty") == []


def samples(broker: Broker) -> dict[str, float]:
    """What Prometheus would read."""
    response = broker.request("GET", "/metrics/prometheus")
    assert response.status == 200
    assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = {}
    for line in response.body.decode().splitlines():
        if not line.startswith("#"):
            match = re.fullmatch(r'(queen_\w+(?:\{(?:\w+="(?:[^"\\]|\\.)*",?)+\})?) (-?[\d.e+]+)', line)
            assert match, line
            found[match[1]] = float(match[2])
    return found


def test_a_broker_shows_what_all_its_workers_did(brokers: Brokers) -> None:
    broker = brokers(workers=2)
    work(broker)
    requests = [f"queen_process_{verb}_requests_total" for verb in ("push", "pop", "ack")]
    wait_until(lambda: sum(samples(broker)[name] for name in requests) == 9, 30, "the workers tell each other")
    found = samples(broker)
    assert found["queen_process_push_requests_total"] == 3
    assert found["queen_process_push_messages_total"] == 5
    assert found["queen_process_pop_requests_total"] == 2
    assert found["queen_process_pop_messages_total"] == found["queen_process_ack_messages_total"] == 4
    assert found["queen_process_resident_memory_bytes"] > 2 * 10_000_000
    assert found["queen_maintenance_mode_enabled"] == found["queen_file_buffer_pending"] == 0
    assert found["queen_file_buffer_db_healthy"] == 1
    assert found['queen_dlq_depth{scope="cluster"}'] == 0
    answer = broker.request("GET", "/metrics").json()
    assert set(answer) == {"uptime", "requests", "messages", "database", "memory", "cpu"}
    assert answer["requests"] == {"total": 3 + 2 + 4, "rate": 0}
    assert answer["messages"] == {"total": 5 + 4 + 4, "rate": 0}


def test_what_happened_is_stored_once(brokers: Brokers, database: Database) -> None:
    one, other = brokers(OFTEN), brokers(OFTEN)
    work(one)
    one.stop()  # which stores the rest
    with database.connect() as sql:

        def row(query: str) -> Any:
            return sql.execute(query.encode()).fetchone()

        totals = "push_request_count, push_message_count, pop_message_count, ack_success_count, ack_failed_count"
        expected = (3, 5, 4, 3, 1)
        assert row(f"SELECT {totals} FROM queen.worker_metrics_summary") == expected
        by_queue = (
            "SELECT {} FROM queen.queue_lag_metrics m JOIN queen.queues q ON q.id = m.queue_id WHERE q.name = 'q'"
        )
        sums = "sum(push_request_count)::int, sum(push_message_count)::int, sum(pop_count)::int,"
        sums += " sum(ack_success_count)::int, sum(ack_failed_count)::int"
        assert row(by_queue.format(sums)) == expected
        assert row(by_queue.format("sum(lag_count)::int, max(max_lag_ms) < 60000")) == (4, True)
        assert row("SELECT count(*) > 0 FROM queen.system_metrics WHERE hostname = 'broker-1'") == (True,)
        found = samples(other)
        assert found['queen_cluster_push_messages_total{scope="cluster"}'] == 5
        assert found['queen_cluster_ack_total{scope="cluster",result="failed"}'] == 1
        assert found['queen_queue_pop_messages_per_minute{queue="q"}'] > 0


def test_without_the_database_the_rest_is_shown(brokers: Brokers, database: Database) -> None:
    broker = brokers()
    with database.connect() as sql:
        sql.execute("DROP FUNCTION queen.metrics_summary_v1")
    found = samples(broker)
    assert "queen_uptime_seconds" in found
    assert not any(name.startswith("queen_cluster") for name in found)
