"""What an ack promises of a cursor: forwards only, never past the batch, nobody's but the holder's.

The rules are read from the ledger of a rough run, tried one by one, and played against a model.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from queen.engine.ack import NOTHING_LEASED, STALE, UNRESOLVED, ItemResult
from tests.engine.conftest import ROUGH, Address, Lab, LocalBroker, Rough, append, offsets

KEYS = "abcde"
_queues = itertools.count(1)


def version(lab: Lab, queue: str) -> Any:
    """Return the cursor row of a queue with the version it is."""
    return lab.one(
        "SELECT c.ctid::text, c.* FROM queen.log_consumers c JOIN queen.log_partitions p ON p.id = c.partition_id"
        " JOIN queen.queues q ON q.id = p.queue_id WHERE q.name = %s",
        queue,
    )


def test_the_rough_run_was_rough(rough: Rough) -> None:
    assert [n > least for n, least in zip(rough.happened(), ROUGH, strict=True)] == [True] * 4


def test_A1_committed_never_goes_back(rough: Rough) -> None:
    assert rough.broken("A1") == []


def test_A2_committed_stays_within_the_batch_and_the_log(rough: Rough) -> None:
    assert rough.broken("A2") == []


def test_A6_only_a_failure_charges_the_budget_by_one(rough: Rough) -> None:
    assert rough.broken("A6") == []


def test_the_rough_run_broke_no_other_rule(rough: Rough) -> None:
    assert rough.findings == []


def test_A9_the_positions_retired_add_up(rough: Rough) -> None:
    rows = rough.lab.rows("SELECT committed, total_consumed FROM queen.log_consumers")
    assert len(rows) == 6
    assert [row.total_consumed for row in rows] == [row.committed + 1 for row in rows]
    steps = rough.lab.one(
        "SELECT sum((new).committed - (old).committed) = sum((new).total_consumed - (old).total_consumed)"
        " FROM ledger.cursors WHERE old IS DISTINCT FROM NULL"
    )
    assert steps is True


CORRUPTIONS = {
    "A1": "committed = 0",
    "A2": "committed = 4",
    "A2 beyond the log": "committed = 50",
    "A6": "batch_retry_count = batch_retry_count + 2, worker_id = NULL",
    "A6 without a release": "batch_retry_count = batch_retry_count + 1",
    "C1": "worker_id = 'thief', lease_acquired_at = clock_timestamp()",
    "C1 shortened": "lease_expires_at = lease_expires_at - interval '1 s'",
    "C3": "batch_end = 4",
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_broken_cursor_is_reported(lab: Lab, queue: str, broker: LocalBroker, name: str) -> None:
    broker.accept(queue, *KEYS)
    with lab.ledger() as ledger:
        messages = broker.pop(queue, batch=4)
        broker.complete(messages[:2])
        assert ledger.violations() == []
        lab.execute(
            f"UPDATE queen.log_consumers SET {CORRUPTIONS[name]} WHERE partition_id = %s", messages[0].partition_id
        )
        assert any(finding.startswith(name[:2]) for finding in ledger.violations())


def test_A3_no_call_commits_what_it_gives_back(lab: Lab, queue: str, broker: LocalBroker) -> None:
    """Every pair of statuses on two of three messages, with and without budget."""
    lab.configure(queue, retryLimit=1)
    for number, (first, second, retries) in enumerate(
        itertools.product(("completed", "failed", "retry", "dlq"), ("failed", "retry", "dlq"), (0, 1))
    ):
        partition = f"p{number}"
        broker.accept(queue, *KEYS, partition=partition)
        messages = broker.pop(queue, partition, batch=3)
        lab.execute(
            "UPDATE queen.log_consumers SET batch_retry_count = %s WHERE partition_id = %s",
            retries,
            messages[0].partition_id,
        )
        broker.ack([(messages[1], first), (messages[2], second)])
        committed = lab.committed(queue, partition)
        signal, kind = (2, second) if first == "completed" else (1, first)
        disposed = kind == "dlq" or (kind == "failed" and retries == 1)
        expected = signal if disposed else (1 if first == "completed" else -1)
        assert committed == expected, (first, second, retries)


@pytest.mark.parametrize("status", ["completed", "failed", "retry", "dlq"])
@pytest.mark.parametrize("how", ["expired", "taken over", "acked", "invented"])
def test_A4_a_stale_or_expired_lease_changes_nothing(
    lab: Lab, queue: str, broker: LocalBroker, how: str, status: str
) -> None:
    broker.accept(queue, *KEYS)
    messages = broker.pop(queue, batch=3)
    lease = messages[0].lease
    if how == "invented":
        lease = "no lease of ours"
    elif how == "acked":
        broker.complete(messages)
    else:
        lab.expire_leases(queue)
    if how == "taken over":
        assert broker.pop(queue, "Default", batch=2)
    before = version(lab, queue)
    for acks in (
        [(m, status) for m in messages],
        [(messages[0], status)],
        [(Address("e", messages[0].partition_id), status)],
    ):
        results = broker.ack(acks, lease=lease)
        assert results == [ItemResult(error="invalid or expired lease")] * len(acks)
    assert broker.engine.leases.extend(b"\0" * 15 + b"\1", lease.encode(), 60) == (0, None)
    assert version(lab, queue) == before
    assert lab.dead_letters(queue) == []


def test_A4_an_ack_that_forgot_to_check_is_noticed(lab: Lab, queue: str, broker: LocalBroker) -> None:
    broker.accept(queue, *KEYS)
    messages = broker.pop(queue, batch=3)
    lab.expire_leases(queue)
    with lab.broken("log_ack_v1", ("p_worker <> '' AND (", "p_worker = 'x' AND (")):
        assert broker.ack([(messages[0], "completed")])[0].error is None
    assert lab.committed(queue) == 0


def test_A5_every_item_gets_one_answer(lab: Lab, queue: str, broker: LocalBroker) -> None:
    """Every status on every kind of message, in one call each: done, noop or an error, never silence."""
    for number, (status, lease) in enumerate(itertools.product(("completed", "failed", "retry", "dlq"), (True, False))):
        partition = f"p{number}"
        broker.accept(queue, *KEYS, partition=partition)
        messages = broker.pop(queue, partition, batch=4)
        broker.complete(messages[:2])
        partition_id, holder = messages[0].partition_id, messages[0].lease if lease else ""
        below, above, never = (broker.ack([(Address(key, partition_id, holder), status)])[0] for key in ("a", "e", "x"))
        inside = broker.ack([(Address("d", partition_id, holder), status)])[0]
        assert below == (ItemResult(True, noop=True) if status == "completed" else ItemResult(error=STALE))
        assert above == never == ItemResult(error=UNRESOLVED)
        assert inside.success and inside.error is None
        again = broker.ack([(Address("d", partition_id, ""), status)])[0]
        if status == "completed":
            assert again.noop
        elif status == "dlq":
            assert again.error == STALE
        else:
            assert again.error == NOTHING_LEASED


def test_A6_an_expired_lease_charges_nothing(lab: Lab, queue: str, broker: LocalBroker) -> None:
    broker.accept(queue, *KEYS)
    broker.ack([(broker.pop(queue)[0], "failed")])
    for _ in range(6):
        assert offsets(broker.pop(queue, "Default")) == [0, 1, 2, 3, 4]
        lab.expire_leases(queue)
    assert lab.cursor(queue).batch_retry_count == 1
    assert lab.dead_letters(queue) == []


@pytest.mark.parametrize("how", ["in order", "backwards", "the last alone", "with a repeat", "one by one", "auto"])
def test_A6_a_completed_batch_gives_the_budget_back(lab: Lab, queue: str, broker: LocalBroker, how: str) -> None:
    broker.accept(queue, *KEYS)
    broker.ack([(broker.pop(queue)[0], "failed")])
    assert lab.cursor(queue).batch_retry_count == 1
    messages = broker.pop(queue, "Default", batch=3, auto_ack=how == "auto")
    chosen = {
        "in order": messages,
        "backwards": messages[::-1],
        "the last alone": messages[-1:],
        "with a repeat": [*messages, messages[0]],
        "one by one": messages,
        "auto": [],
    }[how]
    if how == "one by one":
        for message in messages:
            broker.complete([message])
    elif chosen:
        broker.complete(chosen)
    assert (lab.cursor(queue).batch_retry_count, lab.committed(queue)) == (0, 2)


@pytest.mark.parametrize("dead_letters", [True, False])
def test_A7_after_exhaustion_the_message_is_filed_once_or_dropped(
    lab: Lab, queue: str, broker: LocalBroker, dead_letters: bool
) -> None:
    lab.configure(queue, retryLimit=2, deadLetterQueue=dead_letters, dlqAfterMaxRetries=dead_letters)
    broker.accept(queue, *KEYS)
    for attempt in range(3):
        messages = broker.pop(queue, "Default", batch=2)
        assert offsets(messages) == [0, 1]
        (result,) = broker.ack([(messages[0], "failed")])
        assert result.dlq == (dead_letters and attempt == 2)
    assert (lab.committed(queue), lab.cursor(queue).batch_retry_count) == (0, 0)
    assert [d.offset for d in lab.dead_letters(queue)] == ([0] if dead_letters else [])
    assert offsets(broker.pop(queue, "Default", batch=2)) == [1, 2]


# Against a model.


@dataclass
class Cursor:
    """One group's cursor as the rules have it."""

    committed: int = -1
    end: int | None = None
    worker: str | None = None
    live: bool = False
    retries: int = 0
    consumed: int = 0
    known: bool = False
    dead: list[int] = field(default_factory=list)

    def release(self) -> None:
        self.end, self.worker, self.live = None, None, False

    def pop(self, last: int, batch: int, auto: bool) -> range:
        """Return the offsets that a pop must be given."""
        self.known = True
        taken = range(self.committed + 1, min(last, self.committed + batch) + 1)
        if self.live or not taken:
            return range(0)
        if auto:
            self.consumed += len(taken)
            self.committed, self.retries = taken[-1], 0
            self.release()
        else:
            self.end, self.live = taken[-1], True
        return taken

    def ack(self, worker: str, items: list[tuple[int, str]], last: int, limit: int, dlq: bool) -> list[str]:
        """Return a letter for each (offset, status) as SQL does, or the error of all of them."""
        if not self.known:
            return ["consumer not found"] * len(items)
        if worker and (worker != self.worker or not self.live):
            return ["invalid or expired lease"] * len(items)
        top = last if self.end is None else self.end
        inside = [(off, status) for off, status in items if self.committed < off <= top]
        signals = [(off, "dfr".index(status[0])) for off, status in inside if status != "completed"]
        signal, kind = min(signals, default=(None, 0))
        done = [off for off, status in inside if status == "completed" and (signal is None or off < signal)]
        new = max(done, default=self.committed)
        letters = []
        for off, status in items:
            if self.committed < off <= top:
                letters.append("k" if status == "completed" or self.end is not None else "x")
            elif off <= self.committed:
                letters.append("n" if status == "completed" else "s")
            else:
                letters.append("u")
        if signal is not None and self.end is not None:
            exhausted = kind == 1 and self.retries >= limit
            if kind == 0 or (exhausted and dlq):
                self.dead.append(signal)
                new, self.retries = signal, 0
            elif exhausted:
                new, self.retries = signal, 0
            elif kind == 1:
                self.retries += 1
            self.release()
        elif self.end is not None and new >= self.end:
            self.retries = 0
            self.release()
        self.consumed += new - self.committed
        self.committed = new
        return letters


LETTERS = {STALE: "s", UNRESOLVED: "u", NOTHING_LEASED: "x"}


def letter(result: ItemResult) -> str:
    if result.error is not None:
        return LETTERS.get(result.error, result.error)
    assert result.success
    return "n" if result.noop else "k"


def machine(lab: Lab, brokers: list[LocalBroker]) -> type[RuleBasedStateMachine]:
    groups = st.sampled_from("gh")
    broker_numbers = st.integers(0, len(brokers) - 1)
    statuses = st.sampled_from(("completed", "completed", "completed", "failed", "retry", "dlq"))

    class OnePartition(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.queue = f"model-{next(_queues)}"
            self.last = -1
            self.groups = {"g": Cursor(), "h": Cursor()}
            self.leases: dict[str, list[str]] = {"g": [""], "h": [""]}

        @initialize(limit=st.integers(0, 2), dlq=st.booleans())
        def configure(self, limit: int, dlq: bool) -> None:
            self.limit, self.dlq = limit, dlq
            lab.configure(self.queue, retryLimit=limit, deadLetterQueue=dlq, dlqAfterMaxRetries=False)
            self.push(3)

        @rule(count=st.integers(1, 4))
        def push(self, count: int) -> None:
            written = append(lab.operations, self.queue, *(f"m{self.last + 1 + k}" for k in range(count)))
            assert written.base == self.last + 1
            self.last += count

        @rule(who=broker_numbers, group=groups, batch=st.integers(1, 6), auto=st.integers(0, 5), pinned=st.booleans())
        def pop(self, who: int, group: str, batch: int, auto: int, pinned: bool) -> None:
            cursor = self.groups[group]
            expected = cursor.pop(self.last, batch, auto == 0)
            partition = "Default" if pinned or who == 0 else None  # only a scan must find it at once
            popped = brokers[who].pop(self.queue, partition, group, batch, auto_ack=auto == 0)
            assert offsets(popped) == list(expected)
            assert [m.transaction_id for m in popped] == [f"m{off}" for off in expected]
            if popped and auto:
                cursor.worker = popped[0].lease
                self.leases[group].append(popped[0].lease)

        @rule(
            who=broker_numbers,
            group=groups,
            age=st.sampled_from((1, 1, 1, 1, 1, 1, 2, 3, None)),
            items=st.lists(st.tuples(st.integers(-3, 7), statuses), min_size=1, max_size=6),
        )
        def ack(self, who: int, group: str, age: int | None, items: list[tuple[int, str]]) -> None:
            """Ack messages around the cursor, under the last lease, an older one or none."""
            self._ack(who, group, age, [(self.groups[group].committed + 1 + k, status) for k, status in items])

        @precondition(lambda self: any(c.live for c in self.groups.values()))
        @rule(who=broker_numbers, group=groups)
        def complete(self, who: int, group: str) -> None:
            cursor = self.groups[group]
            if cursor.end is not None:
                self._ack(who, group, 1, [(k, "completed") for k in range(cursor.committed + 1, cursor.end + 1)])

        def _ack(self, who: int, group: str, age: int | None, items: list[tuple[int, str]]) -> None:
            partition_id = lab.partition_id(self.queue)
            leases = self.leases[group]
            lease = "" if age is None else leases[-min(age, len(leases))]
            items = [(off, status) for off, status in items if off >= 0]
            expected = self.groups[group].ack(lease, items, self.last, self.limit, self.dlq)
            acks = [(Address(f"m{off}", partition_id, lease), status) for off, status in items]
            results = brokers[who].ack(acks, group)
            assert [letter(result) for result in results] == expected

        @rule(group=groups)
        def expire(self, group: str) -> None:
            lab.expire_leases(self.queue, group)
            self.groups[group].live = False

        @rule(group=groups, to_end=st.booleans())
        def seek(self, group: str, to_end: bool) -> None:
            lab.seek(self.queue, group, None if to_end else "epoch")
            cursor = self.groups[group]
            cursor.known, cursor.committed, cursor.retries = True, self.last if to_end else -1, 0
            cursor.release()

        def teardown(self) -> None:
            lab.delete_queue(self.queue)

        def check_invariants(self, *arguments: Any, **more: Any) -> None:
            """Compare both cursors after every step: what one group does is nothing to the other."""
            super().check_invariants(*arguments, **more)
            if self.last < 0:
                return
            for group, cursor in self.groups.items():
                row = lab.cursor(self.queue, group=group)
                if row is None:
                    assert cursor == Cursor()
                    continue
                assert (row.committed, row.batch_end, row.batch_retry_count) == (
                    cursor.committed,
                    cursor.end,
                    cursor.retries,
                )
                assert (row.worker_id, row.total_consumed) == (cursor.worker, cursor.consumed)
                assert sorted(d.offset for d in lab.dead_letters(self.queue, group)) == sorted(cursor.dead)

    return OnePartition


def test_one_partition_with_two_groups_does_what_the_model_does(lab: Lab) -> None:
    brokers = [lab.broker(), lab.broker(QUEEN_HOTLIST="0")]
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine(lab, brokers),
        settings=settings(
            max_examples=120,
            stateful_step_count=30,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
