"""The ack's decision procedure row by row, leases, and the filing of dead letters.

Every case stands on five messages a to e at the offsets 0 to 4, and a lease that ends where the case says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gevent
import pytest

from queen.engine.ack import FLUSH_FAILED, NO_REASON, NOTHING_LEASED, STALE, UNRESOLVED, ItemResult
from tests.broker import wait_until
from tests.engine.conftest import GROUP, TENANT, Address, Lab, LocalBroker, Message, ack_items, ids, offsets

KEYS = "abcde"
STATUS = {"c": "completed", "f": "failed", "r": "retry", "d": "dlq"}

DONE = ItemResult(True)
ENDED = ItemResult(True, released=True)
DEAD = ItemResult(True, released=True, dlq=True)
NOOP = ItemResult(True, noop=True)
REFUSED_STALE = ItemResult(error=STALE)
REFUSED_UNRESOLVED = ItemResult(error=UNRESOLVED)
REFUSED_NOTHING = ItemResult(error=NOTHING_LEASED)


@dataclass(frozen=True)
class Case:
    """An ack in short ("c0 f3": message a completed and d failed, in one call) and what comes of it."""

    ack: str
    committed: int
    results: list[ItemResult]
    leased: bool = False
    retries: int = 0
    dead: int | None = None
    batch: int = 5
    first_acked: int = -1  # a partial ack that went before
    before: int = 0  # retries charged before
    options: tuple[tuple[str, Any], ...] = ()


NO_DLQ = (("deadLetterQueue", False), ("dlqAfterMaxRetries", False))

ROWS = {
    # The table of decisions.
    "dlq with budget left": Case("d2", 2, [DEAD], dead=2),
    "dlq keeps what was completed below": Case("c0 d2", 2, [ENDED, DEAD], dead=2),
    "dlq with dead letters off": Case("d2", 2, [DEAD], dead=2, options=NO_DLQ),
    "failed with budget left": Case("f2", -1, [ENDED], retries=1),
    "failed with the last of the budget": Case("f2", -1, [ENDED], before=2, retries=3),
    "failed without budget": Case("f2", 2, [DEAD], before=3, dead=2),
    "failed without budget, completed below": Case("c1 f2", 2, [ENDED, DEAD], before=3, dead=2),
    "failed without budget, only deadLetterQueue": Case(
        "f2", 2, [DEAD], before=3, dead=2, options=(("dlqAfterMaxRetries", False),)
    ),
    "failed without budget, only dlqAfterMaxRetries": Case(
        "f2", 2, [DEAD], before=3, dead=2, options=(("deadLetterQueue", False),)
    ),
    "failed without budget, dead letters off": Case("c0 f2", 2, [ENDED, ENDED], before=3, options=NO_DLQ),
    "failed at a limit of zero": Case("f0", 0, [DEAD], dead=0, options=(("retryLimit", 0),)),
    "failed at a limit of one": Case("f0", -1, [ENDED], retries=1, options=(("retryLimit", 1),)),
    "retry": Case("r2", -1, [ENDED], before=2, retries=2),
    "retry without budget": Case("c1 r2", 1, [ENDED, ENDED], before=3, retries=3),
    "completed to the end of the batch": Case("c0 c1 c2 c3 c4", 4, [ENDED] * 5, before=2),
    "only the last completed": Case("c4", 4, [ENDED], before=2),
    "completed in part": Case("c0 c1", 1, [DONE] * 2, leased=True, before=2, retries=2),
    "one in the middle completed": Case("c2", 2, [DONE], leased=True),
    "completed the rest": Case("c2 c3 c4", 4, [ENDED] * 3, first_acked=1, before=1),
    # The lowest signal decides, at one offset the strongest.
    "the lowest signal": Case("d3 r1", -1, [ENDED] * 2),
    "dlq before failed before retry": Case("r1 f1 d1", 1, [DEAD, ENDED, ENDED], dead=1),
    "failed before retry": Case("r1 f1", -1, [ENDED] * 2, retries=1),
    "two failures charge once": Case("f1 f3", -1, [ENDED] * 2, retries=1),
    "completed above the signal": Case("c4 f2", -1, [ENDED] * 2, retries=1),
    "completed and failed at one offset": Case("c2 f2", -1, [ENDED] * 2, retries=1),
    "completed 0, failed 3": Case("c0 f3", 0, [ENDED] * 2, retries=1),
    # Items that have no effect.
    "completed below the cursor": Case("c0 c3", 3, [NOOP, DONE], leased=True, first_acked=1),
    "failed below the cursor": Case("f0", 1, [REFUSED_STALE], leased=True, first_acked=1),
    "retry and dlq below the cursor": Case("r0 d1", 1, [REFUSED_STALE] * 2, leased=True, first_acked=1),
    "a signal below and one in the batch": Case("f0 f3", 1, [REFUSED_STALE, ENDED], first_acked=1, retries=1),
    "never pushed": Case("c9", -1, [REFUSED_UNRESOLVED], leased=True),
    "never pushed, failed": Case("f9", -1, [REFUSED_UNRESOLVED], leased=True, before=1, retries=1),
    "above the batch": Case("c3", -1, [REFUSED_UNRESOLVED], leased=True, batch=2),
    "above the batch, the batch completed": Case("c1 c3", 1, [ENDED, REFUSED_UNRESOLVED], batch=2),
    "one known, one not": Case("c1 c9", 1, [DONE, REFUSED_UNRESOLVED], leased=True),
    "the same item twice": Case("c1 c1", 1, [DONE] * 2, leased=True),
}


def parse(ack: str, message: Message) -> list[tuple[Address, str]]:
    """Return the items of an ack in short, under a message's lease."""
    return [
        (Address(KEYS[int(word[1])] if int(word[1]) < 5 else "x", message.partition_id, message.lease), STATUS[word[0]])
        for word in ack.split()
    ]


@pytest.mark.parametrize("name", ROWS)
def test_each_row_of_the_decision_table(lab: Lab, queue: str, broker: LocalBroker, name: str) -> None:
    case = ROWS[name]
    lab.configure(queue, **dict(case.options))
    message_ids = broker.accept(queue, *KEYS)
    messages = broker.pop(queue, batch=case.batch)
    assert offsets(messages) == list(range(case.batch))
    if case.first_acked >= 0:
        broker.complete(messages[: case.first_acked + 1])
    lab.execute(
        "UPDATE queen.log_consumers SET batch_retry_count = %s WHERE partition_id = %s",
        case.before,
        messages[0].partition_id,
    )
    before = lab.cursor(queue)

    results = broker.ack(parse(case.ack, messages[0]))

    after = lab.cursor(queue)
    assert results == case.results
    assert after.committed == case.committed
    assert after.batch_retry_count == case.retries
    assert after.total_consumed == after.committed + 1
    assert after.lease_acquired_at == before.lease_acquired_at
    if case.leased:
        assert (after.worker_id, after.batch_end) == (before.worker_id, before.batch_end)
        assert after.lease_expires_at == before.lease_expires_at
        assert after.attempt_offset == after.committed + 1
        assert broker.pop(queue, "Default") == []
    else:
        assert (after.worker_id, after.batch_end, after.lease_expires_at) == (None, None, None)
        again = broker.pop(queue, "Default")
        assert offsets(again) == list(range(case.committed + 1, 5))
    letters = lab.dead_letters(queue)
    assert [letter.offset for letter in letters] == ([] if case.dead is None else [case.dead])
    if case.dead is not None:
        assert str(letters[0].message_id) == message_ids[case.dead]
        assert letters[0].retry_count == case.before


def test_a_clean_ack_of_a_conflating_lease_takes_all_of_it(lab: Lab, queue: str, broker: LocalBroker) -> None:
    broker.accept(queue, *KEYS)
    messages = broker.pop(queue)
    lab.execute("UPDATE queen.log_consumers SET lease_conflated = true WHERE worker_id = %s", messages[0].lease)
    assert broker.ack(parse("c1", messages[0])) == [ENDED]
    cursor = lab.cursor(queue)
    assert (cursor.committed, cursor.lease_conflated, cursor.total_consumed) == (4, False, 5)


def test_an_unset_limit_is_three(lab: Lab, queue: str, broker: LocalBroker) -> None:
    broker.accept(queue, "a")
    lab.execute("UPDATE queen.queues SET retry_limit = NULL WHERE name = %s", queue)
    for failures in (1, 2, 3):
        assert broker.ack([(broker.pop(queue)[0], "failed")]) == [ENDED]
        assert lab.cursor(queue).batch_retry_count == failures
    assert broker.ack([(broker.pop(queue)[0], "failed")]) == [DEAD]
    assert broker.pop(queue) == []


@pytest.mark.parametrize("word", [None, "completed", "success", "acked", "ok"])
def test_words_for_completed(lab: Lab, queue: str, broker: LocalBroker, word: str | None) -> None:
    broker.accept(queue, *KEYS)
    assert broker.ack([(broker.pop(queue)[1], word)]) == [DONE]
    assert lab.committed(queue) == 1


@pytest.mark.parametrize("word", ["failed", "", "Completed", "nack", "RETRY", "\N{SNOWMAN}"])
def test_every_word_nobody_knows_is_a_failure(lab: Lab, queue: str, broker: LocalBroker, word: str) -> None:
    broker.accept(queue, *KEYS)
    assert broker.ack([(broker.pop(queue)[1], word)]) == [ENDED]
    assert lab.cursor(queue).batch_retry_count == 1


# Without a lease on the cursor, and without one in the ack.


def test_signals_where_nothing_is_leased_are_refused(lab: Lab, queue: str, broker: LocalBroker) -> None:
    broker.accept(queue, *KEYS)
    broker.complete(broker.pop(queue, batch=1))
    address = [Address(key, lab.partition_id(queue)) for key in KEYS]
    assert broker.ack([(address[1], "failed"), (address[2], "retry"), (address[3], "dlq")]) == [REFUSED_NOTHING] * 3
    assert lab.committed(queue) == 0
    mixed = [(address[1], "completed"), (address[2], "failed"), (address[4], "completed")]
    assert broker.ack(mixed) == [DONE, REFUSED_NOTHING, DONE]
    assert (lab.committed(queue), lab.cursor(queue).batch_retry_count) == (1, 0)
    assert lab.dead_letters(queue) == []


def test_a_lease_less_ack_moves_an_unleased_cursor_anywhere(lab: Lab, queue: str, broker: LocalBroker) -> None:
    broker.accept(queue, *KEYS)
    broker.complete(broker.pop(queue, batch=1))
    address = [Address(key, lab.partition_id(queue)) for key in KEYS]
    assert broker.ack([(address[3], "completed")]) == [DONE]
    assert lab.committed(queue) == 3
    assert broker.ack([(address[1], "completed"), (address[2], "failed")]) == [NOOP, REFUSED_STALE]


def test_a_lease_less_ack_works_against_a_live_lease(lab: Lab, queue: str, broker: LocalBroker) -> None:
    broker.accept(queue, *KEYS)
    messages = broker.pop(queue, batch=3)
    address = [Address(key, messages[0].partition_id) for key in KEYS]
    assert broker.ack([(address[1], "completed")]) == [DONE]
    assert broker.ack([(address[4], "completed")]) == [REFUSED_UNRESOLVED]
    assert broker.ack([(address[2], "completed")]) == [ENDED]
    assert lab.committed(queue) == 2


def test_a_late_ack_with_its_lease_is_refused_and_without_it_works(lab: Lab, queue: str, broker: LocalBroker) -> None:
    broker.accept(queue, *KEYS)
    messages = broker.pop(queue)
    lab.expire_leases(queue)
    refused = ItemResult(error="invalid or expired lease")
    assert broker.ack([(messages[0], "completed"), (messages[1], "failed")]) == [refused] * 2
    assert lab.committed(queue) == -1
    assert broker.ack([(messages[2], "completed")], lease="") == [DONE]
    assert broker.ack([(Address("d", messages[0].partition_id), "failed")]) == [ENDED]
    assert (lab.committed(queue), lab.cursor(queue).batch_retry_count) == (2, 1)


def test_acks_in_any_order_one_call_each(lab: Lab, queue: str, broker: LocalBroker) -> None:
    broker.accept(queue, *KEYS)
    messages = broker.pop(queue)
    seen = []
    for k in (2, 0, 1, 3):
        seen.append((broker.ack([(messages[k], "completed")]), lab.committed(queue)))
    assert seen == [([DONE], 2), ([NOOP], 2), ([NOOP], 2), ([DONE], 3)]


def test_an_id_at_several_offsets_means_the_lowest_in_the_batch(lab: Lab, queue: str, broker: LocalBroker) -> None:
    lab.configure(queue, dedupWindowSeconds=0)
    for key in "aabaa":
        broker.accept(queue, key)
    messages = broker.pop(queue)
    assert broker.ack([(messages[2], "completed")]) == [DONE]
    assert lab.committed(queue) == 2
    assert broker.ack([(messages[4], "completed")]) == [DONE]
    assert lab.committed(queue) == 3
    assert broker.ack([(messages[4], "failed")]) == [ENDED]
    assert lab.committed(queue) == 3


def test_a_purged_hash_resolves_nowhere(lab: Lab, queue: str, broker: LocalBroker) -> None:
    for key in KEYS:
        broker.accept(queue, key)
    messages = broker.pop(queue)
    lab.drop_front(queue, 2, hashes=True)
    assert broker.ack([(messages[1], "completed"), (messages[0], "failed")]) == [REFUSED_UNRESOLVED] * 2
    assert lab.committed(queue) == -1
    assert broker.ack([(m, "completed") for m in messages[2:]]) == [ENDED] * 3
    assert broker.ack([(messages[1], "completed")], lease="") == [REFUSED_UNRESOLVED]


# A whole group refused.


def test_groups_of_one_call_don_t_touch_each_other(lab: Lab, queue: str, broker: LocalBroker) -> None:
    for partition in ("p", "q"):
        broker.accept(queue, *KEYS, partition=partition)
    one, two = (broker.pop(queue, partition)[0] for partition in ("p", "q"))
    results = broker.ack(
        [
            (Address("a", one.partition_id, "somebody else"), "completed"),
            (one, "completed"),
            (Address("a", "no uuid", ""), "completed"),
            (two, "failed"),
            (Address("a", "00000000-0000-0000-0000-000000000000"), "completed"),
        ]
    )
    assert results == [
        ItemResult(error="invalid or expired lease"),
        DONE,
        ItemResult(error='invalid input syntax for type uuid: "no uuid"'),
        ENDED,
        ItemResult(error="consumer not found"),
    ]
    assert (lab.committed(queue, "p"), lab.committed(queue, "q")) == (0, -1)


def test_an_ack_of_a_group_that_never_popped(lab: Lab, queue: str, broker: LocalBroker) -> None:
    broker.accept(queue, "a")
    address = Address("a", lab.partition_id(queue))
    assert broker.ack([(address, "completed")], "nobody") == [ItemResult(error="consumer not found")]
    assert lab.cursor(queue, group="nobody") is None


def test_acks_without_a_database(lab: Lab, queue: str, broker: LocalBroker) -> None:
    broker.accept(queue, "a")
    messages = broker.pop(queue)
    broker.connections.away = True
    assert broker.ack([(messages[0], "completed")]) == [ItemResult(error="pool")]
    broker.connections.away = False
    assert broker.ack([(messages[0], "completed")]) == [ENDED]


def test_acks_that_lose_their_connection(lab: Lab, queue: str, broker: LocalBroker) -> None:
    broker.accept(queue, *KEYS)
    messages = broker.pop(queue)
    with lab.database.connect(autocommit=False) as blocker:
        blocker.execute("SELECT 1 FROM queen.log_consumers FOR UPDATE")
        ack = gevent.spawn(broker.ack, [(messages[0], "completed")])

        def ended() -> Any:
            gevent.sleep(0.01)
            return lab.one(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
                " AND wait_event_type = 'Lock' AND query LIKE '%%log_ack%%'"
            )

        wait_until(ended)
        assert ack.get(timeout=10) == [ItemResult(error=FLUSH_FAILED)]
        blocker.rollback()
    assert lab.committed(queue) == -1
    assert broker.ack([(messages[0], "completed")]) == [DONE]


# Leases.


def test_an_expired_batch_is_delivered_again_from_its_start_in_another_size(
    lab: Lab, queue: str, broker: LocalBroker
) -> None:
    broker.accept(queue, *KEYS)
    first = broker.pop(queue, batch=3)
    assert broker.pop(queue, "Default") == []
    lab.expire_leases(queue)
    second = broker.pop(queue, "Default", batch=5)
    assert offsets(second) == [0, 1, 2, 3, 4]
    assert second[0].lease != first[0].lease
    assert (lab.cursor(queue).attempt_offset, lab.cursor(queue).attempt_count) == (0, 2)
    assert broker.ack([(m, "completed") for m in first]) == [ItemResult(error="invalid or expired lease")] * 3
    broker.complete(second[:2])
    lab.expire_leases(queue)
    assert offsets(broker.pop(queue, "Default", batch=1)) == [2]
    # With the prefix acked, the rest is still what was delivered twice before, not fresh work.
    assert lab.cursor(queue).attempt_count == 3


def test_extending_never_shortens_and_never_revives(lab: Lab, queue: str, broker: LocalBroker) -> None:
    broker.accept(queue, "a", partition="p")
    broker.accept(queue, "a", partition="q")
    messages = broker.pop(queue, partitions=2, lease=100)
    assert len(messages) == 2
    extend = broker.engine.leases.extend
    lease = messages[0].lease.encode()

    def expiries() -> list[float]:
        return [
            row.left
            for row in lab.rows(
                "SELECT extract(epoch FROM lease_expires_at - clock_timestamp())::float AS left"
                " FROM queen.log_consumers WHERE worker_id = %s",
                messages[0].lease,
            )
        ]

    assert extend(TENANT, lease, 10)[0] == 2
    assert all(90 < left <= 100 for left in expiries())
    assert extend(TENANT, lease, 1000)[0] == 2
    assert all(990 < left <= 1000 for left in expiries())
    assert extend(b"\2" * 16, lease, 5000) == (0, None)
    assert all(left <= 1000 for left in expiries())
    lab.execute(
        "UPDATE queen.log_consumers SET lease_expires_at = clock_timestamp() + interval '20 s' WHERE partition_id = %s",
        lab.partition_id(queue, "q"),
    )
    renewed, earliest = extend(TENANT, lease, 60)
    assert renewed == 2
    left = sorted(expiries())
    assert 50 < left[0] <= 60 < 900 < left[1]
    stored = lab.one(
        "SELECT (extract(epoch FROM min(lease_expires_at) - '2000-01-01') * 1000000)::bigint"
        " FROM queen.log_consumers WHERE worker_id = %s",
        messages[0].lease,
    )
    assert earliest == stored
    lab.expire_leases(queue)
    assert extend(TENANT, lease, 60) == (0, None)
    assert extend(TENANT, b"nobody's", 60) == (0, None)
    assert all(left < 0 for left in expiries())


@pytest.mark.parametrize("seconds", [0, -5, 1])
def test_an_extension_is_of_a_second_at_least(lab: Lab, queue: str, broker: LocalBroker, seconds: int) -> None:
    broker.accept(queue, "a")
    (message,) = broker.pop(queue)
    where = "WHERE worker_id = %s"
    lab.execute(
        f"UPDATE queen.log_consumers SET lease_expires_at = clock_timestamp() + interval '0.3 s' {where}", message.lease
    )
    assert broker.engine.leases.extend(TENANT, message.lease.encode(), seconds)[0] == 1
    left = lab.one(f"SELECT lease_expires_at - clock_timestamp() FROM queen.log_consumers {where}", message.lease)
    assert 0.3 < left.total_seconds() <= 1


def test_a_lease_is_extended_and_acked_through_another_broker(lab: Lab, queue: str) -> None:
    one, other = lab.broker(), lab.broker()
    one.accept(queue, *KEYS)
    messages = one.pop(queue, lease=5)
    assert other.engine.leases.extend(TENANT, messages[0].lease.encode(), 500)[0] == 1
    other.complete(messages[:2])
    one.complete(messages[2:])
    assert lab.cursor(queue).worker_id is None


@pytest.mark.parametrize("how", ["seek", "delete"])
def test_a_seek_and_a_deletion_end_leases_and_the_holder_is_refused(
    lab: Lab, queue: str, broker: LocalBroker, how: str
) -> None:
    broker.accept(queue, *KEYS)
    messages = broker.pop(queue)
    lab.seek(queue, at="epoch") if how == "seek" else lab.delete_group(queue)
    error = "invalid or expired lease" if how == "seek" else "consumer not found"
    assert broker.ack([(messages[0], "completed"), (messages[4], "dlq")]) == [ItemResult(error=error)] * 2
    assert lab.dead_letters(queue) == []
    assert offsets(broker.pop(queue, "Default")) == [0, 1, 2, 3, 4]


# Dead letters.


def test_a_dead_letter_is_the_message_as_it_was_sent(lab: Lab, queue: str, broker: LocalBroker) -> None:
    payload = b'{"a": 1.0e+2, "a":"\\u0000", "\xf0\x9f\x90\x9d":[ ]}'
    broker.push(queue, *KEYS, payload=payload)
    messages = broker.pop(queue)
    broker.ack([(messages[2], "dlq")], errors={"c": "smtp 451"})
    (letter,) = lab.dead_letters(queue)
    assert (letter.payload, letter.error, letter.transaction_id) == (payload.decode(), "smtp 451", "c")
    assert (str(letter.message_id), letter.consumer_group, letter.encrypted) == (messages[2].message_id, GROUP, False)
    written = lab.one("SELECT created_at FROM queen.log_segments WHERE partition_id = %s", messages[0].partition_id)
    assert letter.pushed_at == written


@pytest.mark.parametrize(
    ("errors", "reason"),
    [
        ({"c": "its own", "e": "another's"}, "its own"),
        ({"e": "another's"}, "another's"),
        ({"a": "of a completed one"}, NO_REASON),
        ({}, NO_REASON),
    ],
)
def test_the_reason_of_a_dead_letter(
    lab: Lab, queue: str, broker: LocalBroker, errors: dict[str, str], reason: str
) -> None:
    broker.accept(queue, *KEYS)
    messages = broker.pop(queue)
    results = broker.ack([(messages[0], None), (messages[4], "failed"), (messages[2], "dlq")], errors=errors)
    assert results == [ENDED, ENDED, DEAD]
    assert [letter.error for letter in lab.dead_letters(queue)] == [reason]


def test_each_group_files_its_own(lab: Lab, queue: str, broker: LocalBroker) -> None:
    broker.accept(queue, *KEYS)
    for group in ("one", "two"):
        broker.ack([(broker.pop(queue, group=group)[1], "dlq")], group)
    assert [d.offset for group in ("one", "two") for d in lab.dead_letters(queue, group)] == [1, 1]
    assert ids(broker.pop(queue, "Default", group="one")) == list("cde")


def test_a_message_that_retention_removed_is_filed_without_payload(lab: Lab, queue: str, broker: LocalBroker) -> None:
    for key in KEYS:
        broker.accept(queue, key)
    messages = broker.pop(queue)
    lab.drop_front(queue, 3)
    assert broker.ack([(messages[1], "dlq")]) == [DEAD]
    (letter,) = lab.dead_letters(queue)
    assert (letter.offset, letter.transaction_id, letter.payload) == (1, "b", None)
    assert offsets(broker.pop(queue, "Default")) == [3, 4]


def test_cursor_and_dead_letter_change_together(lab: Lab, queue: str, broker: LocalBroker) -> None:
    broker.accept(queue, *KEYS)
    messages = broker.pop(queue)
    before = lab.cursor(queue)
    lab.execute("ALTER TABLE queen.log_dlq ADD CONSTRAINT full_up CHECK (transaction_id <> 'b') NOT VALID")
    try:
        results = broker.ack([(messages[0], "completed"), (messages[1], "dlq")])
        assert results == [ItemResult(error="dlq rejected")] * 2
        assert (lab.cursor(queue), lab.dead_letters(queue)) == (before, [])
    finally:
        lab.execute("ALTER TABLE queen.log_dlq DROP CONSTRAINT full_up")
    assert broker.ack([(messages[0], "completed"), (messages[1], "dlq")]) == [ENDED, DEAD]
    assert lab.committed(queue) == 1


def test_a_broker_that_dies_before_it_files_has_changed_nothing(lab: Lab, queue: str, broker: LocalBroker) -> None:
    """The first call only says which message is wanted; the batch redelivers when the lease is over."""
    broker.accept(queue, *KEYS)
    messages = broker.pop(queue)
    before = lab.cursor(queue)
    (group,) = broker.engine.acker.grouped(TENANT, _items(messages), [ItemResult()])
    (asked,) = lab.operations.ack_multi([group.write])
    assert (asked.dead_offset, asked.filed, asked.released) == (1, False, False)
    assert (lab.cursor(queue), lab.dead_letters(queue)) == (before, [])
    lab.expire_leases(queue)
    assert offsets(broker.pop(queue, "Default")) == [0, 1, 2, 3, 4]


def test_A8_filing_twice_files_one_row(lab: Lab, queue: str, broker: LocalBroker) -> None:
    broker.accept(queue, *KEYS)
    messages = broker.pop(queue)
    acker = broker.engine.acker
    (group,) = acker.grouped(TENANT, _items(messages), [ItemResult()])
    letter = acker.letter(group, 1)
    assert lab.operations.ack_dead(group.write, letter).filed
    again = lab.operations.ack_dead(group.write, letter)
    assert (again.error, again.filed) == ("invalid or expired lease", False)
    assert [d.offset for d in lab.dead_letters(queue)] == [1]
    assert lab.committed(queue) == 1


def _items(messages: list[Message]) -> list[Any]:
    return ack_items([(messages[1], "dlq")], GROUP, None, None)
