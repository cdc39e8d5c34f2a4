"""The log's own rules, after a busy run of two brokers and in the ledger that was kept meanwhile.

Each rule has a twin that breaks the tables, or the stored function, and sees the rule reported.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from pytest_postgresql.executors import NoopExecutor

from tests.engine.conftest import Lab, append, new_lab, together, write
from tests.faults.log_check import Log

PUSHERS = 50


@dataclass
class Busy:
    """A database after a busy run: what was accepted, and what the ledger says."""

    lab: Lab
    log: Log
    accepted: dict[str, tuple[str, str]] = field(default_factory=dict)
    ledger: list[str] = field(default_factory=list)

    def broken(self, rule: str) -> list[str]:
        findings = self.log.violations() + self.ledger
        return [finding for finding in findings if finding.startswith(rule)]


@pytest.fixture(scope="module")
def busy(schema_template: NoopExecutor) -> Iterator[Busy]:
    """Two brokers and 50 pushers: requests over several partitions, repeats, transactions, a consumer, and
    the front of one partition removed."""
    with new_lab(schema_template) as lab, lab.ledger() as ledger:
        brokers = [lab.broker(), lab.broker()]
        accepted: dict[str, tuple[str, str]] = {}
        numbers = itertools.count()

        def pusher(seed: int) -> Callable[[], None]:
            dice = random.Random(seed)
            broker = brokers[seed % 2]

            def run() -> None:
                for _ in range(6):
                    items = []
                    for _ in range(dice.choice((1, 1, 3, 40))):
                        where = ("busy", dice.choice(("hot", "hot", "p1", "p2", "p3")))
                        # One in five is somebody's repeat.
                        key = f"id-{dice.randrange(40) if dice.random() < 0.2 else 1000 + next(numbers)}"
                        items.append((*where, key))
                    if dice.random() < 0.2:
                        pushed = broker.transact([(q, p, f"t-{next(numbers)}") for q, p, _ in items]).pushed
                        for item, result in zip(items, pushed, strict=True):
                            accepted[result.message_id] = item[:2]
                        continue
                    for item, outcome in zip(items, broker.push_items(items), strict=True):
                        assert outcome.status in ("queued", "duplicate")
                        if outcome.status == "queued":
                            accepted[outcome.message_id] = item[:2]

            return run

        def consumer() -> None:
            for broker in brokers * 10:
                broker.complete(broker.pop("busy", batch=30, partitions=2, timeout=0.02))

        together(consumer, *(pusher(seed) for seed in range(PUSHERS)))
        half = lab.partition("busy", "p1").last_offset // 2
        gone = {
            m.message_id
            for m in Log.read(lab.sql).messages
            if m.partition == "p1" and m.offset < lab_front(lab, "p1", half)
        }
        lab.drop_front("busy", half, "p1", hashes=True)
        append(lab.operations, "emptied", "x", "y")
        lab.drop_front("emptied", 2, hashes=True)
        kept = {key: where for key, where in accepted.items() if key not in gone}
        lab.stop_brokers()
        yield Busy(lab, Log.read(lab.sql), kept, ledger.violations())


def lab_front(lab: Lab, partition: str, below: int) -> int:
    """Return the first offset that stays when whole segments below an offset go."""
    return int(
        lab.one(
            "SELECT min(base_offset) FROM queen.log_segments WHERE partition_id = %s AND end_offset >= %s",
            lab.partition_id("busy", partition),
            below,
        )
    )


def test_the_busy_run_was_busy(busy: Busy) -> None:
    segments = [len(p.segments) for p in busy.log.partitions.values()]
    assert len(busy.accepted) > 1000
    assert sum(segments) > 100
    assert len(busy.log.messages) > sum(segments)  # fused
    assert busy.lab.partition("busy", "p1").log_start > 0
    assert busy.lab.committed("busy", "hot") is not None


def test_L1_segment_ranges_are_disjoint_ascending_and_not_empty(busy: Busy) -> None:
    assert busy.broken("L1") == []


def test_L2_there_are_no_holes_between_live_segments(busy: Busy) -> None:
    assert busy.broken("L2") == []


def test_L3_the_last_segment_ends_at_last_offset(busy: Busy) -> None:
    assert busy.broken("L3") == []


def test_L4_log_start_is_the_lowest_live_base_and_never_goes_back(busy: Busy) -> None:
    assert busy.broken("L4") == []
    emptied = busy.lab.partition("emptied")
    assert emptied.log_start == emptied.last_offset + 1


def test_L5_created_at_follows_the_order_of_offsets_under_50_pushers_on_two_brokers(busy: Busy) -> None:
    assert busy.broken("L5") == []


def test_L6_every_segment_has_its_hash_row_slot_by_slot(busy: Busy) -> None:
    assert busy.broken("L6") == []


def test_L7_the_oldest_marks_are_those_of_the_first_rows(busy: Busy) -> None:
    assert busy.broken("L7") == []


def test_L8_segments_and_hash_rows_are_never_updated(busy: Busy) -> None:
    assert busy.broken("L8") == []
    updated = busy.lab.one(
        "SELECT sum(n_tup_upd) FROM pg_stat_user_tables WHERE relname IN ('log_segments', 'log_txns')"
    )
    assert updated == 0


def test_L9_every_accepted_message_is_in_one_segment_at_one_offset(busy: Busy) -> None:
    assert busy.log.missing(busy.accepted) == []


def test_no_other_rule_is_broken_by_the_busy_run(busy: Busy) -> None:
    assert busy.log.violations() + busy.ledger + busy.log.repeats() == []


# What the checks are worth: each rule broken in the tables is reported.

CORRUPTIONS = {
    "L1": "UPDATE queen.log_segments SET end_offset = end_offset + 1 WHERE partition_id = %(p)s AND base_offset = 0",
    "L2": "DELETE FROM queen.log_segments WHERE partition_id = %(p)s AND base_offset = 2",
    "L3": "UPDATE queen.log_partitions SET last_offset = last_offset + 1 WHERE id = %(p)s",
    "L4": "UPDATE queen.log_partitions SET log_start = 1 WHERE id = %(p)s",
    "L5": "UPDATE queen.log_segments SET created_at = created_at + interval '1 h'"
    " WHERE partition_id = %(p)s AND base_offset = 0",
    "L6": "UPDATE queen.log_txns SET hashes = overlay(hashes PLACING '\\x00'::bytea FROM 17)"
    " WHERE partition_id = %(p)s AND base_offset = 0",
    "L7": "UPDATE queen.log_partitions SET oldest_live_at = NULL WHERE id = %(p)s",
    "L8": "UPDATE queen.log_segments SET blob = blob WHERE partition_id = %(p)s",
}


@pytest.mark.parametrize("rule", CORRUPTIONS)
def test_breaking_the_tables_is_reported(lab: Lab, queue: str, rule: str) -> None:
    with lab.ledger() as ledger:
        for pair in (("a", "b"), ("c", "d"), ("e", "f")):
            append(lab.operations, queue, *pair)
        partition = lab.partition_id(queue)
        assert _of(Log.read(lab.sql), partition) + ledger.violations() == []
        lab.sql.execute(CORRUPTIONS[rule].encode(), {"p": partition})
        assert any(f.startswith(rule) for f in _of(Log.read(lab.sql), partition) + ledger.violations())


def test_losing_and_doubling_a_message_is_reported(lab: Lab, queue: str) -> None:
    append(lab.operations, queue, "a", "b")
    (first, second) = [m for m in Log.read(lab.sql).messages if m.queue == queue]
    accepted = {first.message_id: (queue, "Default"), "0" * 32: (queue, "Default")}
    assert len(Log.read(lab.sql).missing(accepted)) == 1
    lab.execute(
        "INSERT INTO queen.log_segments SELECT partition_id, 2, 3, created_at, blob FROM queen.log_segments"
        " WHERE partition_id = %s",
        first.partition_id,
    )
    log = Log.read(lab.sql)
    assert len(log.missing({first.message_id: (queue, "Default"), second.message_id: (queue, "Default")})) == 2
    assert any(m.transaction_id in log.repeats()[0] for m in (first, second))


def test_L5_a_clock_read_before_the_lock_is_reported(lab: Lab, queue: str) -> None:
    """The rule under test broken at its root: the time of a segment read before its partition is locked."""
    append(lab.operations, queue, "first")

    def pushes(worker: int) -> Callable[[], None]:
        def run() -> None:
            for k in range(8):
                lab.operations.push([write(queue, f"{worker}-{k}")])

        return run

    early = ("v_now timestamptz;", "v_now timestamptz := clock_timestamp();")
    with lab.broken("log_push_multi_v1", early, ("v_now := clock_timestamp();", "")):
        together(*(pushes(worker) for worker in range(10)))
    partition = lab.partition_id(queue)
    assert any(f.startswith("L5") for f in _of(Log.read(lab.sql), partition))


def _of(log: Log, partition: str) -> list[str]:
    return [finding for finding in log.violations() if partition in finding]
