"""The history checker itself: it accepts what can have happened, and reports each thing that can't."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from tests.faults.history import Ack, Delivery, History, Push
from tests.faults.log_check import Stored

LANE = ("q", "p")
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def message(offset: int) -> Stored:
    return Stored("pid", *LANE, offset, f"id{offset}", f"m{offset}", NOW)


def push(offset: int, status: str = "queued") -> Push:
    return Push("producer", offset, LANE, f"m{offset}", status, f"id{offset}")


def delivery(asked: float, first: int, last: int, lease: str, ack: Ack | None = None) -> Delivery:
    span = range(first, last + 1)
    got = Delivery(asked, asked + 1, "g", LANE, lease, 10, [f"id{k}" for k in span], [f"m{k}" for k in span])
    if ack is not None:
        got.acks.append(ack)
    return got


def done(sent: float, *offsets: int, releases: bool = True, answered: float | None = None) -> Ack:
    return Ack(sent, [f"id{k}" for k in offsets], releases, sent + 1 if answered is None else answered)


def good() -> tuple[History, list[Stored]]:
    """Six messages in three batches: the first acked in part and given back, the second lost by expiry."""
    history = History()
    history.pushes = [push(k) for k in range(6)] + [push(2, "duplicate"), push(7, "failed")]
    first = delivery(0, 0, 3, "A", done(2, 0, 1, releases=False))
    first.acks.append(Ack(4, [], True, 5))
    history.deliveries = [
        first,
        delivery(6, 2, 4, "B"),
        delivery(16, 2, 3, "C", done(18, 3)),
        delivery(20, 4, 5, "D", done(22, 4, 5)),
    ]
    return history, [message(k) for k in range(6)]


def test_a_possible_history_is_accepted() -> None:
    history, log = good()
    assert history.violations(log, {"g": "q"}) == []
    assert set(history.accepted()) == {f"id{k}" for k in range(6)}


Spoiler = Callable[[History, list[Stored]], object]

SPOILED: dict[str, tuple[str, Spoiler]] = {
    "an accepted message isn't there": ("P1", lambda h, log: log.pop()),
    "a message has two places": ("P2", lambda h, log: log.append(Stored("pid", *LANE, 6, "other", "m1", NOW))),
    "a duplicate names a stranger": ("P3", lambda h, log: setattr(h.pushes[6], "message_id", "id3")),
    "a later push lies lower": ("P5", lambda h, log: setattr(h.pushes[5], "message_id", "id0")),
    "a group missed a message": ("P1", lambda h, log: h.deliveries.pop()),
    "a delivery of what isn't stored": ("P1", lambda h, log: h.deliveries[0].message_ids.append("stranger")),
    "another's content": ("P1", lambda h, log: setattr(h.deliveries[1], "transaction_ids", ["m2", "m3", "x"])),
    "a batch with a hole": ("C3", lambda h, log: _drop(h.deliveries[0], 1)),
    "a batch out of order": ("C3", lambda h, log: _swap(h.deliveries[0])),
    "a message skipped": ("C2", lambda h, log: h.deliveries[2].acks.clear()),
    "acked messages again": ("C2", lambda h, log: h.deliveries.append(delivery(30, 4, 5, "E"))),
    "a lease taken while it is live": ("C1", lambda h, log: h.deliveries.insert(1, delivery(2, 2, 3, "X"))),
    "two leases at once": ("C1", lambda h, log: h.deliveries.append(delivery(6, 2, 4, "X"))),
    "a lease taken before it ran out": ("C1", lambda h, log: setattr(h.deliveries[2], "answered", 15.5)),
}


@pytest.mark.parametrize("name", SPOILED)
def test_an_impossible_history_is_reported(name: str) -> None:
    rule, spoil = SPOILED[name]
    history, log = good()
    spoil(history, log)
    assert any(finding.startswith(rule) for finding in history.violations(log, {"g": "q"}))


def _drop(batch: Delivery, k: int) -> None:
    del batch.message_ids[k], batch.transaction_ids[k]


def _swap(batch: Delivery) -> None:
    batch.message_ids.reverse()
    batch.transaction_ids.reverse()


@pytest.mark.parametrize("late", [16.1, 30])
def test_a_lease_that_may_have_run_out_may_be_taken(late: float) -> None:
    history, log = good()
    history.deliveries[2].asked = late - 2
    history.deliveries[2].answered = late
    history.deliveries[3].acks[0].sent = history.deliveries[3].acks[0].answered = late + 5
    findings = history.violations(log, {"g": "q"})
    assert [finding for finding in findings if finding.startswith("C1")] == []


def test_an_ack_without_an_answer_leaves_both_possible() -> None:
    for start in (2, 4):
        history, log = good()
        history.deliveries[2].acks[0].answered = float("inf")
        history.deliveries[3] = delivery(30, start, 5, "D")
        assert history.violations(log, {"g": "q"}) == []
