"""What the tallies count, and by which queue."""

from __future__ import annotations

from queen.engine.ack import AckItem, ItemResult
from queen.engine.counters import Counters, Tally
from queen.engine.push import Outcome

TENANT = bytes(16)


def test_pushes_count_by_queue_what_was_stored() -> None:
    counters = Counters()
    words = [("a", "queued"), ("b", "queued"), ("a", "duplicate"), ("a", "queued"), ("b", "failed")]
    counters.pushed(TENANT, [Outcome(k, "", "", queue, status) for k, (queue, status) in enumerate(words)])
    assert (counters.total.push_requests, counters.total.push_messages) == (1, 3)
    queues = counters.take()
    assert {key[1]: (t.push_requests, t.push_messages) for key, t in queues.items()} == {b"a": (1, 2), b"b": (1, 1)}
    assert counters.take() == {}


def test_acks_of_unknown_partitions_count_in_all_only() -> None:
    counters = Counters()
    items = [AckItem("t", "p", status=status) for status in (None, "ok", "failed", "dlq", "completed")]
    results = [ItemResult(True)] * 3 + [ItemResult(True, dlq=True), ItemResult(False)]
    counters.acked(items, results)
    assert (counters.total.ack_messages, counters.total.ack_success, counters.total.ack_failed) == (5, 2, 3)
    assert counters.total.dead_letters == 1
    assert counters.queues == {}


def test_what_could_not_be_stored_is_kept() -> None:
    counters = Counters()
    counters.transacted(TENANT, {"q"})
    taken = counters.take()
    counters.transacted(TENANT, {"q"})
    counters.give_back(taken)
    assert counters.queues == {(TENANT, b"q"): Tally(transactions=2)}
    assert counters.total.since(Tally(transactions=1)) == Tally(transactions=1)
