"""What retention deletes by each option of a queue, and what it leaves."""

from __future__ import annotations

from typing import Any

import pytest

from queen.engine.identifiers import NO_MESSAGE
from tests.engine.conftest import Lab, LocalBroker, append, ids
from tests.faults.log_check import Log
from tests.jobs.conftest import Sweeper, Sweepers, fill, history, live_offsets, put_cursor

pytestmark = pytest.mark.usefixtures("nothing_stored")

AGES = (300.0, 200.0, 50.0)  # three segments of two messages: offsets 0, 2 and 4
ALL = [0, 2, 4]
COMPLETED = {"retentionEnabled": True, "completedRetentionSeconds": 100}

# Options, cursors by group, the segments left, and what the history says.
RULES: dict[str, tuple[dict[str, Any], dict[str, int], list[int], list[tuple[str, int]]]] = {
    "nothing is set": ({}, {"g": 5}, ALL, []),
    "retention is off": ({"retentionSeconds": 100, "completedRetentionSeconds": 100}, {"g": 5}, ALL, []),
    "retention has no age": ({"retentionEnabled": True}, {"g": 5}, ALL, []),
    "ages are negative": (
        {"retentionEnabled": True, "retentionSeconds": -1, "completedRetentionSeconds": -1, "maxWaitTimeSeconds": -1},
        {"g": 5},
        ALL,
        [],
    ),
    "ttl and maxSize are no limits": ({"retentionEnabled": True, "ttl": 1, "maxSize": 1}, {"g": 5}, ALL, []),
    "all old, whoever needs it": (
        {"retentionEnabled": True, "retentionSeconds": 100},
        {"g": -1},
        [4],
        [("retention", 4)],
    ),
    "all of it old": ({"retentionEnabled": True, "retentionSeconds": 10}, {}, [], [("retention", 6)]),
    "nothing old enough": ({"retentionEnabled": True, "retentionSeconds": 1000}, {}, ALL, []),
    "completed by everybody": (COMPLETED, {"g": 5, "h": 5}, [4], [("completed_retention", 4)]),
    "completed by one of two": (COMPLETED, {"g": 5, "h": -1}, ALL, []),
    "completed but for a whole segment": (COMPLETED, {"g": 5, "h": 2}, [2, 4], [("completed_retention", 2)]),
    "half a segment completed": (COMPLETED, {"g": 0}, ALL, []),
    "not completed without a group": (COMPLETED, {"g": 5, "__QUEUE_MODE__": -1}, ALL, []),
    "nobody ever consumed": (COMPLETED, {}, ALL, []),
    "both rules, the second goes further": (
        {**COMPLETED, "retentionSeconds": 250},
        {"g": 5},
        [4],
        [("completed_retention", 4)],
    ),
    "both rules, the second is held": ({**COMPLETED, "retentionSeconds": 250}, {"g": -1}, [2, 4], [("retention", 2)]),
    "eviction, without retention": ({"maxWaitTimeSeconds": 100}, {"g": -1}, [4], [("max_wait_time_eviction", 4)]),
    "eviction of what is completed": ({"maxWaitTimeSeconds": 100}, {"g": 5}, [4], [("max_wait_time_eviction", 4)]),
    "nothing waited long enough": ({"maxWaitTimeSeconds": 1000}, {}, ALL, []),
    "retention comes before eviction": (
        {"retentionEnabled": True, "retentionSeconds": 250, "maxWaitTimeSeconds": 100},
        {},
        [4],
        [("retention", 2), ("max_wait_time_eviction", 2)],
    ),
}


@pytest.mark.parametrize("case", RULES, ids=lambda name: name.replace(" ", "-"))
def test_rules(lab: Lab, sweeper: Sweeper, queue: str, case: str) -> None:
    options, cursors, left, told = RULES[case]
    lab.configure(queue, **options)
    fill(lab, queue, *AGES)
    for group, committed in cursors.items():
        put_cursor(lab, queue, group, committed)

    swept = sweeper.cycle()

    assert live_offsets(lab, queue) == left
    assert history(lab, queue) == told
    assert lab.partition(queue).log_start == (left[0] if left else 6)
    assert swept.segments_deleted + swept.max_wait_evicted == len(ALL) - len(left)
    assert swept.queues == bool(told)
    assert Log.read(lab.sql).violations() == []
    for group, committed in cursors.items():
        assert lab.committed(queue, group=group) == committed, "retention moves no cursor"
    assert sweeper.cycle().due == 0


def test_a_step_takes_a_bounded_bite(lab: Lab, sweepers: Sweepers, queue: str) -> None:
    lab.configure(queue, retentionEnabled=True, retentionSeconds=100)
    fill(lab, queue, 900, 800, 700, 600, 500, 50)
    swept = sweepers(RETENTION_BATCH_SIZE="2").cycle()
    assert swept.segments_deleted == 5
    assert [count for _, count in history(lab, queue)] == [4, 4, 2]
    assert live_offsets(lab, queue) == [10]


def test_groups_jump_what_was_deleted_under_them(lab: Lab, broker: LocalBroker, sweeper: Sweeper, queue: str) -> None:
    lab.configure(queue, maxWaitTimeSeconds=100)
    broker.accept(queue, "a", "b")
    broker.accept(queue, "c")
    (leased,) = broker.pop(queue, batch=1)
    lab.age(queue, 300)
    broker.accept(queue, "d")
    sweeper.cycle()
    assert ids(broker.pop(queue, group="other")) == ["d"]
    broker.complete([leased])  # its hash is still there
    assert ids(broker.pop(queue)) == ["d"]
    assert lab.dead_letters(queue) == []


def test_a_group_is_not_pending_on_what_is_gone(lab: Lab, broker: LocalBroker, sweeper: Sweeper, queue: str) -> None:
    lab.configure(queue, retentionEnabled=True, retentionSeconds=100)
    broker.accept(queue, "a")
    assert ids(broker.pop(queue, auto_ack=True)) == ["a"]
    broker.accept(queue, "b", "c")
    lab.age(queue, 300)
    sweeper.cycle()
    assert broker.pop(queue) == []
    assert lab.committed(queue) == 2
    broker.accept(queue, "d")
    assert ids(broker.pop(queue)) == ["d"]


def test_a_pop_that_loses_its_messages_to_retention_goes_on(
    lab: Lab, broker: LocalBroker, sweeper: Sweeper, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention comes between the claim and the delivery, for all or for part of the batch."""
    lab.configure(queue, maxWaitTimeSeconds=100)
    assert broker.pop(queue) == []
    popper = broker.engine.popper
    hand_over = popper._given

    def delayed(request: Any, terms: Any, claims: Any, lane: Any) -> Any:
        monkeypatch.setattr(popper, "_given", hand_over)
        lab.age(queue, 300)
        append(lab.operations, queue, "young")
        sweeper.cycle()
        for claim in claims:
            claim.blob = None  # as if the claim had come too late for it
        return hand_over(request, terms, claims, lane)

    append(lab.operations, queue, "old")
    monkeypatch.setattr(popper, "_given", delayed)
    assert ids(broker.pop(queue, timeout=10.0)) == ["young"]
    assert lab.cursor(queue).batch_end == 1


# Hash rows


def purged_below(lab: Lab, queue: str) -> int:
    below: int = lab.partition(queue).txns_start
    return below


def test_hash_rows_go_after_their_messages_and_their_window(lab: Lab, sweeper: Sweeper, queue: str) -> None:
    lab.configure(queue, retentionEnabled=True, retentionSeconds=100, dedupWindowSeconds=1000)
    fill(lab, queue, 1500, 1200, 900, 50)
    swept = sweeper.cycle()
    assert (swept.segments_deleted, swept.txns_purged) == (3, 2)
    assert (lab.partition(queue).log_start, purged_below(lab, queue)) == (6, 4)
    assert Log.read(lab.sql).violations() == []


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"dedupWindowSeconds": 0}, 2),  # never less than a quarter of an hour
        ({"dedupWindowSeconds": 1000}, 2),
        ({"dedupWindowSeconds": 5000}, 0),
        ({"dedupWindowSeconds": 0, "completedRetentionSeconds": 5000}, 0),
    ],
)
def test_the_window_of_hash_rows(lab: Lab, sweeper: Sweeper, queue: str, options: dict[str, int], left: int) -> None:
    lab.configure(queue, retentionEnabled=True, retentionSeconds=10, **options)
    fill(lab, queue, 2000, 800)
    sweeper.cycle()
    assert live_offsets(lab, queue) == []
    assert purged_below(lab, queue) == left


def test_hash_rows_of_messages_that_are_left_stay(lab: Lab, broker: LocalBroker, sweeper: Sweeper, queue: str) -> None:
    """Who consumes late, or once more, can acknowledge."""
    broker.accept(queue, "a", "b")
    lab.age(queue, 100_000)
    sweeper.cycle()
    assert purged_below(lab, queue) == 0
    for group in ("g", "late"):
        broker.complete(broker.pop(queue, group=group), group=group)
        assert lab.committed(queue, group=group) == 1


def test_a_transaction_id_is_known_for_its_window_and_no_longer(
    lab: Lab, broker: LocalBroker, sweeper: Sweeper, queue: str
) -> None:
    lab.configure(queue, retentionEnabled=True, retentionSeconds=100, dedupWindowSeconds=1000)
    broker.accept(queue, "a")
    lab.age(queue, 500)
    sweeper.cycle()
    (again,) = broker.push(queue, "a")
    assert (again.status, again.message_id) == ("duplicate", NO_MESSAGE)
    lab.age(queue, 600)
    sweeper.cycle()
    assert purged_below(lab, queue) == 1
    for other in (broker, lab.broker()):
        (outcome,) = other.push(queue, f"b{id(other)}")
        assert outcome.status == "queued"
    (again,) = lab.broker().push(queue, "a")
    assert again.status == "queued"


# What it costs


def test_partitions_with_nothing_due_cost_nothing(lab: Lab, sweepers: Sweepers, queue: str) -> None:
    """Neither old ones whose queue keeps everything, nor young ones, nor empty ones."""
    sweeper = sweepers(QUEEN_PARTITION_CLEANUP_ENABLED="false")
    sweeper.cycle()
    sweeper.connections.statements.clear()
    sweeper.cycle()
    idle = list(sweeper.connections.statements)
    lab.configure(queue, retentionEnabled=True, retentionSeconds=100)
    for partition in range(200):
        append(lab.operations, queue, "a", partition=f"young-{partition}")
        append(lab.operations, queue + "-kept", "a", partition=f"old-{partition}")
        lab.age(queue + "-kept", 100_000, f"old-{partition}")
    sweeper.connections.statements.clear()
    assert sweeper.cycle().due == 0
    assert sweeper.connections.statements == idle
    fill(lab, queue, 300, partition="old")
    sweeper.connections.statements.clear()
    assert sweeper.cycle().due == 1
    assert len(sweeper.connections.statements) == len(idle) + 1


def test_partitions_that_are_held_are_not_tried_and_hide_no_other(lab: Lab, sweepers: Sweepers, queue: str) -> None:
    """The oldest ones wait for a group that sleeps; a younger one is free, beyond a cycle's share."""
    lab.configure(queue, **COMPLETED)
    for number in range(7):
        fill(lab, queue, 1000 - number, partition=f"p{number}")
        put_cursor(lab, queue, "g", 1 if number == 6 else -1, partition=f"p{number}")
    sweeper = sweepers(QUEEN_RETENTION_DUE_CAP="2")
    seen = [sweeper.cycle() for _ in range(4)]
    assert [swept.segments_deleted for swept in seen] == [0, 0, 0, 1]
    assert sweeper.connections.statements.count("retention_step") == 1
    assert live_offsets(lab, queue, "p6") == []


def test_every_queue_gets_its_turn(lab: Lab, sweepers: Sweepers, queue: str) -> None:
    names = [f"{queue}-{k}" for k in range(3)]
    for name in names:
        lab.configure(name, retentionEnabled=True, retentionSeconds=100)
        for partition in range(3):
            fill(lab, name, 300, partition=f"p{partition}")
    sweeper = sweepers(QUEEN_RETENTION_DUE_CAP="4", RETENTION_PARALLELISM="3")
    assert [sweeper.cycle().segments_deleted for _ in range(4)] == [4, 4, 1, 0]


def test_ages_that_are_wrong_are_mended(lab: Lab, sweepers: Sweepers, queue: str) -> None:
    lab.configure(queue, retentionEnabled=True, retentionSeconds=100)
    fill(lab, queue, 300)
    lab.execute("UPDATE queen.log_partitions SET oldest_live_at = NULL, oldest_txn_at = now()")
    sweeper = sweepers(QUEEN_RETENTION_SAFETY_WALK_MS="1")
    sweeper.cycle()
    assert live_offsets(lab, queue) == [0]
    sweeper.cycle()
    assert live_offsets(lab, queue) == []
    assert Log.read(lab.sql).violations() == []
