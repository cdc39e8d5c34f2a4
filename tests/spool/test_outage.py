"""Pushes while PostgreSQL is away: accepted, kept on the disk, and delivered once when it is back."""

from __future__ import annotations

import time

from queen.db.embedded import EmbeddedServer
from tests.broker import wait_until
from tests.conftest import Brokers
from tests.spool.conftest import buffers, consume, item, wait_drained


def test_pushes_in_an_outage_are_buffered_and_delivered_once(brokers: Brokers, embedded: EmbeddedServer) -> None:
    broker = brokers(postgres=embedded.environment())
    first = broker.push([item("before")])
    embedded.stop("immediate")
    answers = [broker.push([item(f"m{k}"), item(f"m{k}"), item(f"n{k}", "other")]) for k in range(20)]
    for answer in answers:
        assert [result["status"] for result in answer] == ["buffered"] * 3
        assert answer[0]["message_id"] == answer[1]["message_id"]
    assert buffers(broker) == {"pending": 40, "failed": 0, "dbHealthy": False, "worker": 0}
    times = []
    for k in range(3):
        started = time.monotonic()
        broker.push([item(f"quick{k}")])
        times.append(time.monotonic() - started)
    assert min(times) < 4, "a known outage is not waited for"
    wait_until(lambda: "DB down — entering buffered mode (degraded durability)" in broker.log(), 30, "a warning")
    embedded.start()
    wait_drained(broker)
    messages = consume(broker)
    expected = [*first, *(answer[0] for answer in answers)]
    assert [m["transactionId"] for m in messages] == [
        "before",
        *(f"m{k}" for k in range(20)),
        *(f"quick{k}" for k in range(3)),
    ]
    assert [m["id"] for m in messages][:-3] == [result["message_id"] for result in expected]
    assert [m["data"] for m in messages][1] == {"k": "m0"}
    assert len(consume(broker, "other")) == 20
    assert broker.push([item("m3")])[0]["status"] == "duplicate"
    assert "DB recovered — leaving buffered mode" in broker.log()
