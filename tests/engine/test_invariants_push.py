"""What a push promises: nothing lost, nothing twice, order kept, all of a bundle or none of it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import gevent
import pytest

from queen.db.errors import StatementFailed
from queen.db.records import SegmentWrite
from queen.engine.identifiers import NO_MESSAGE
from tests.broker import wait_until
from tests.engine.conftest import Lab, LocalBroker, append, ids, offsets, together, write
from tests.faults.log_check import Log


def stored(lab: Lab, queue: str, partition: str = "Default") -> list[str]:
    """Return the transaction ids of a partition in the order of their offsets."""
    messages = [m for m in Log.read(lab.sql).messages if (m.queue, m.partition) == (queue, partition)]
    assert [m.offset for m in messages] == list(range(len(messages)))
    return [m.transaction_id for m in messages]


def everything(lab: Lab, queue: str) -> list[Any]:
    """Return all rows of a queue's partitions with the versions they are: a changed row has a new one."""
    return lab.rows(
        "SELECT p.ctid::text, p.*, (SELECT count(*) FROM queen.log_segments s WHERE s.partition_id = p.id) AS segments,"
        " (SELECT count(*) FROM queen.log_txns t WHERE t.partition_id = p.id) AS hash_rows"
        " FROM queen.log_partitions p JOIN queen.queues q ON q.id = p.queue_id WHERE q.name = %s ORDER BY p.id",
        queue,
    )


def test_P1_every_queued_message_reaches_every_group_subscribed_to_all(lab: Lab, queue: str) -> None:
    brokers = [lab.broker(), lab.broker()]
    assert brokers[0].pop(queue, group="early") == []
    queued: list[str] = []

    def pusher(number: int) -> Callable[[], None]:
        def run() -> None:
            for k in range(5):
                items = [(queue, f"p{n % 3}", f"{number}-{k}-{n}") for n in range(7)]
                for outcome in brokers[number % 2].push_items(items):
                    assert outcome.status == "queued"
                    queued.append(outcome.message_id)

        return run

    together(*(pusher(number) for number in range(10)))
    assert len(queued) == 350
    for group in ("early", "late"):
        assert Counter(m.message_id for m in brokers[1].drain(queue, group)) == Counter(queued)


def test_P1_a_lost_message_is_noticed(lab: Lab, queue: str, broker: LocalBroker) -> None:
    """The same comparison, with a claim that takes one message too many off each batch."""
    queued = broker.accept(queue, "a", "b", "c", "d")
    with lab.broken("log_claim_v1", ("s_end[v_served] := v_from + v_take - 1", "s_end[v_served] := v_from + v_take")):
        delivered = [m.message_id for m in broker.drain(queue, batch=2)]
    assert Counter(delivered) != Counter(queued)


def test_P2_a_transaction_id_gets_one_offset_however_many_brokers_push_it_at_once(lab: Lab, queue: str) -> None:
    brokers = [lab.broker(), lab.broker(QUEEN_DEDUP_CACHE="0"), lab.broker()]
    keys = [f"id-{k}" for k in range(30)]

    def pusher(number: int) -> Callable[[], list[str]]:
        mine = random.Random(number).sample(keys, len(keys))

        def run() -> list[str]:
            statuses = []
            for k in range(0, len(mine), 5):
                statuses += [o.status for o in brokers[number % 3].push(queue, *mine[k : k + 5])]
            return statuses

        return run

    statuses = Counter(status for got in together(*(pusher(number) for number in range(12))) for status in got)
    assert statuses == {"queued": 30, "duplicate": 330}
    assert sorted(stored(lab, queue)) == sorted(keys)


def test_P2_a_push_without_the_probe_is_reported(lab: Lab, queue: str, broker: LocalBroker) -> None:
    with lab.broken("log_push_multi_v1", ("IF v_window[k] > 0 THEN", "IF false THEN")):
        broker.push(queue, "a")
        broker.push(queue, "a")
    assert any("'a'" in finding for finding in Log.read(lab.sql).repeats())


def test_P3_a_duplicate_names_the_message_at_the_lowest_offset(lab: Lab, queue: str, broker: LocalBroker) -> None:
    lab.configure(queue, dedupWindowSeconds=0)
    first, second = broker.accept(queue, "a"), broker.accept(queue, "a")
    assert first != second
    lab.configure(queue, dedupWindowSeconds=3600)
    (outcome,) = broker.push(queue, "a")
    assert (outcome.status, outcome.message_id) == ("duplicate", first[0])


def test_P3_duplicates_of_one_request_name_one_message_each(lab: Lab, queue: str, broker: LocalBroker) -> None:
    originals = dict(zip("abcdef", broker.accept(queue, *"abcdef"), strict=True))
    outcomes = broker.push(queue, "x", "f", "a", "y", "c")
    assert [o.status for o in outcomes] == ["queued", "duplicate", "duplicate", "queued", "duplicate"]
    assert [outcomes[k].message_id for k in (1, 2, 4)] == [originals[key] for key in "fac"]


def test_P3_a_duplicate_of_a_removed_message_names_nobody(lab: Lab, queue: str, broker: LocalBroker) -> None:
    broker.accept(queue, "a")
    broker.accept(queue, "b")
    lab.drop_front(queue, 1)
    (outcome,) = broker.push(queue, "a")
    assert (outcome.status, outcome.message_id) == ("duplicate", NO_MESSAGE)
    lab.drop_front(queue, 1, hashes=True)
    assert broker.push(queue, "a")[0].status == "queued"


def test_P4_a_duplicate_changes_no_row(lab: Lab, queue: str, broker: LocalBroker) -> None:
    broker.accept(queue, "a", "b")
    lab.execute("UPDATE queen.log_partitions SET last_write_at = last_write_at - interval '1 minute'")
    before = everything(lab, queue)
    assert [o.status for o in broker.push(queue, "b", "a", "a")] == ["duplicate"] * 3
    assert everything(lab, queue) == before
    broker.accept(queue, "c")
    assert everything(lab, queue) != before


def test_P5_items_of_a_request_keep_their_order_in_each_partition(lab: Lab, queue: str, broker: LocalBroker) -> None:
    broker.accept(queue, "old", partition="p0")
    items = [(queue, f"p{k % 2}", "old" if k == 40 else f"m{k}") for k in range(100)]
    items[60] = items[20]
    broker.push_items(items)
    assert stored(lab, queue, "p1") == [f"m{k}" for k in range(1, 100, 2)]
    assert stored(lab, queue, "p0") == ["old", *(f"m{k}" for k in range(0, 100, 2) if k not in (40, 60))]


def test_P5_requests_sent_one_after_the_other_keep_their_order(lab: Lab, queue: str) -> None:
    brokers = [lab.broker(), lab.broker()]

    def producer(name: str) -> Callable[[], None]:
        def run() -> None:
            for k in range(15):
                brokers[k % 2].accept(queue, f"{name}{k:02}", f"{name}{k:02}+")

        return run

    together(*(producer(name) for name in "abcdefgh"))
    log = stored(lab, queue)
    for name in "abcdefgh":
        mine = [key for key in log if key.startswith(name)]
        assert mine == sorted(mine)
        assert len(mine) == 30


def test_P5_requests_that_wait_for_a_flush_keep_their_order(lab: Lab, queue: str, broker: LocalBroker) -> None:
    """While the partition is locked, requests pile up behind the first flush, with a repeat among them."""
    broker.accept(queue, "first")
    with lab.database.connect(autocommit=False) as blocker:
        blocker.execute("SELECT 1 FROM queen.log_partitions FOR UPDATE")
        pushes = []
        for key in ("a", "b", "c", "b", "d", "first", "e"):
            pushes.append(gevent.spawn(broker.push, queue, key))
            gevent.idle()
        blocker.rollback()
        statuses = [push.get(timeout=10)[0].status for push in pushes]
    assert statuses == ["queued"] * 3 + ["duplicate", "queued", "duplicate", "queued"]
    assert stored(lab, queue) == ["first", "a", "b", "c", "d", "e"]


def bad_hashes(good: SegmentWrite) -> SegmentWrite:
    good.hashes = good.hashes[:-1]
    return good


def bad_count(good: SegmentWrite) -> SegmentWrite:
    good.count, good.hashes = 0, b""
    return good


def bad_queue(good: SegmentWrite) -> SegmentWrite:
    good.queue = b""
    return good


def bad_name(good: SegmentWrite) -> SegmentWrite:
    good.queue = b"q" * 256
    return good


@pytest.mark.parametrize("spoil", [bad_hashes, bad_count, bad_queue, bad_name])
def test_P6_a_failed_bundle_leaves_nothing(lab: Lab, queue: str, spoil: Callable[[SegmentWrite], SegmentWrite]) -> None:
    append(lab.operations, queue, "a", partition="p1")
    before = everything(lab, queue)
    bundle = [write(queue, "b", partition="p1"), write(queue, "c", partition="new"), spoil(write(queue, "d"))]
    with pytest.raises(StatementFailed):
        lab.operations.push(bundle)
    assert everything(lab, queue) == before
    assert append(lab.operations, queue, "b", partition="p1").base == 1  # nor a hole


def test_P6_a_partition_given_twice_fails_the_bundle(lab: Lab, queue: str) -> None:
    append(lab.operations, queue, "a")
    before = everything(lab, queue)
    with pytest.raises(StatementFailed):
        lab.operations.push([write(queue, "b"), write(queue, "c")])
    assert everything(lab, queue) == before


def test_P6_one_bad_segment_costs_its_neighbours_nothing(lab: Lab, queue: str, broker: LocalBroker) -> None:
    """A name that only the database refuses: the rest of the flush is committed all the same."""
    append(lab.operations, queue, "warm")
    with lab.database.connect(autocommit=False) as blocker:
        blocker.execute("SELECT 1 FROM queen.log_partitions FOR UPDATE")
        first = gevent.spawn(broker.push, queue, "first")
        gevent.idle()
        waiting = [gevent.spawn(broker.push, queue, f"m{k}", partition=f"p{k}") for k in range(3)]
        bad = gevent.spawn(broker.push, "q" * 256, "bad")
        gevent.idle()
        blocker.rollback()
    assert [g.get(timeout=10)[0].status for g in (first, *waiting)] == ["queued"] * 4
    assert bad.get(timeout=10)[0].status == "failed"


def test_P6_a_duplicate_condemns_no_other_partition_of_its_bundle(lab: Lab, queue: str) -> None:
    append(lab.operations, queue, "a", "b", partition="p1")
    written = lab.operations.push(
        [write(queue, "x", "b", partition="p1"), write(queue, "a", partition="p2"), write(queue, "y", partition="p3")]
    )
    assert [w.base for w in written] == [None, 0, 0]
    assert written[0].duplicates == {1: 1}
    assert lab.partition(queue, "p1").last_offset == 1


def test_P7_an_answer_means_that_the_commit_is_there_for_everybody(lab: Lab, queue: str, broker: LocalBroker) -> None:
    def pusher(number: int) -> Callable[[], None]:
        def run() -> None:
            for k in range(10):
                (outcome,) = broker.push(queue, f"{number}-{k}")
                assert outcome.status == "queued"
                assert outcome.message_id in {m.message_id for m in Log.read(lab.sql).messages if m.queue == queue}

        return run

    together(*(pusher(number) for number in range(4)))
    with broker.connections.connection() as connection:
        assert connection.execute("SELECT current_setting('synchronous_commit')").fetchone() == ("on",)
        assert connection.execute("SELECT current_setting('fsync')").fetchone() == ("on",)


def test_P7_without_a_database_a_push_fails_and_stores_nothing(lab: Lab, queue: str, broker: LocalBroker) -> None:
    broker.accept(queue, "a")
    broker.connections.away = True
    assert [o.status for o in broker.push(queue, "b", "c")] == ["failed", "failed"]
    broker.connections.away = False
    assert stored(lab, queue) == ["a"]
    assert broker.push(queue, "b")[0].status == "queued"


def test_P7_a_connection_lost_while_pushing_fails_the_push_and_its_retry_is_exact(
    lab: Lab, queue: str, broker: LocalBroker
) -> None:
    broker.accept(queue, "a")
    with lab.database.connect(autocommit=False) as blocker:
        blocker.execute("SELECT 1 FROM queen.log_partitions FOR UPDATE")
        push = gevent.spawn(broker.push, queue, "b")
        gevent.idle()

        def waiting() -> Any:
            gevent.sleep(0.01)
            return lab.one(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
                " AND wait_event_type = 'Lock' AND query LIKE '%%log_push_multi%%'"
            )

        wait_until(waiting)
        assert push.get(timeout=10)[0].status == "failed"
        blocker.rollback()
    assert stored(lab, queue) == ["a"]
    assert [o.status for o in broker.push(queue, "b", "c")] == ["queued", "queued"]
    assert stored(lab, queue) == ["a", "b", "c"]


def test_layer_one_a_repeat_within_a_request_takes_its_leaders_id(lab: Lab, queue: str, broker: LocalBroker) -> None:
    first, again, other = broker.push_items([(queue, "p", "a"), (queue, "p", "a"), (queue, "q", "a")])
    assert [first.status, again.status, other.status] == ["queued", "duplicate", "queued"]
    assert again.message_id == first.message_id != other.message_id
    (stale, staler) = broker.push_items([(queue, "p", "a"), (queue, "p", "a")])
    assert (stale.status, staler.status) == ("duplicate", "duplicate")
    assert stale.message_id == staler.message_id == first.message_id


def test_an_id_that_none_was_given_for_is_the_message_id(lab: Lab, queue: str, broker: LocalBroker) -> None:
    outcomes = broker.push_items([(queue, "Default", None)] * 3)
    assert [o.transaction_id for o in outcomes] == [o.message_id for o in outcomes]
    messages = broker.pop(queue)
    assert ids(messages) == [o.message_id for o in outcomes]
    assert offsets(messages) == [0, 1, 2]
