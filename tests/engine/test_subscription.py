"""Where a group begins: what the first pop stores, and the cursor each partition gets from it."""

from __future__ import annotations

from typing import Any

import gevent
import pytest

from queen.engine.identifiers import QUEUE_MODE
from tests.engine.conftest import TENANT, Lab, LocalBroker, append, ids, offsets, together

BEFORE = ("a", "b", "c")
AFTER = ("d", "e")
UNPARSABLE = "yesterday-ish"


def registration(lab: Lab, queue: str, group: str = "g") -> Any:
    """Return the stored subscription of a group on a queue, or None."""
    return lab.one(
        "SELECT m.*, m.subscription_timestamp - clock_timestamp() AS ago FROM queen.consumer_groups_metadata m"
        " JOIN queen.queues q ON q.id = m.queue_id WHERE q.name = %s AND m.consumer_group = %s",
        queue,
        group,
    )


def hours_ago(lab: Lab, hours: float) -> str:
    return str(lab.one("SELECT (clock_timestamp() - make_interval(secs => %s))::text", 3600 * hours))


def three_segments(lab: Lab, queue: str, partition: str = "Default") -> None:
    """Segments of 30, 20 and 10 hours ago with two messages each."""
    for k in range(3):
        append(lab.operations, queue, f"m{2 * k}", f"m{2 * k + 1}", partition=partition)
        lab.age(queue, 36_000, partition)


# What a request asks for: mode, from (hours ago, or a word), what is stored, and the first of six offsets.
REQUESTS: dict[str, tuple[str, str, Any, str, int]] = {
    "all": ("g", "all", "", "all", 0),
    "new": ("g", "new", "", "new", 6),
    "from now": ("g", "all", "now", "new", 6),
    "from before everything": ("g", "new", 99, "timestamp", 0),
    "from in between": ("g", "new", 25, "timestamp", 2),
    "from in between, all": ("g", "all", 15, "timestamp", 4),
    "from after everything": ("g", "all", 1, "timestamp", 6),
    "from the future": ("g", "all", -5, "timestamp", 6),
    "from gibberish": ("g", "all", UNPARSABLE, "new", 6),
    "no group": (QUEUE_MODE, "new", "", "all", 0),
    "no group, from now": (QUEUE_MODE, "new", "now", "all", 0),
    "no group, from a time": (QUEUE_MODE, "all", 15, "all", 0),
}


@pytest.mark.parametrize("route", ["wildcard", "scan", "discovery"])
@pytest.mark.parametrize("name", REQUESTS)
def test_what_the_first_pop_stores_and_where_it_begins(lab: Lab, queue: str, name: str, route: str) -> None:
    group, mode, start, stored, first = REQUESTS[name]
    start = hours_ago(lab, start) if isinstance(start, int) else start
    broker = lab.broker(QUEEN_HOTLIST="0" if route == "scan" else "1")
    lab.configure(queue, namespace=queue)
    for partition in ("Default", "other"):
        three_segments(lab, queue, partition)
    arguments: dict[str, Any] = {"namespace": queue} if route == "discovery" else {"queue": queue}

    messages = broker.pop(group=group, mode=mode, start=start, **arguments)

    assert offsets(messages) == list(range(first, 6))
    row = registration(lab, queue, group)
    assert row.subscription_mode == stored
    if stored == "all":
        assert row.subscription_timestamp.year == 1970
    elif stored == "new":
        assert -5 < row.ago.total_seconds() < 0
    else:
        assert str(lab.one("SELECT %s::timestamptz", start)) == str(row.subscription_timestamp)
    for partition in ("Default", "other"):  # every partition that there was, at once
        assert lab.committed(queue, partition, group) == first - 1


@pytest.mark.parametrize("name", REQUESTS)
def test_a_pinned_pop_begins_alike_and_stores_nothing(lab: Lab, queue: str, broker: LocalBroker, name: str) -> None:
    group, mode, start, _, first = REQUESTS[name]
    if start == UNPARSABLE:
        first = 0  # here a word that is no time means everything
    start = hours_ago(lab, start) if isinstance(start, int) else start
    three_segments(lab, queue)
    three_segments(lab, queue, "other")
    messages = broker.pop(queue, "Default", group=group, mode=mode, start=start)
    assert offsets(messages) == list(range(first, 6))
    assert registration(lab, queue, group) is None
    assert lab.cursor(queue, "Default", group).committed == first - 1
    assert lab.cursor(queue, "other", group) is None


def test_a_time_inside_a_segment_begins_at_the_next_one(lab: Lab, queue: str, broker: LocalBroker) -> None:
    three_segments(lab, queue)
    at = lab.one(
        "SELECT created_at::text FROM queen.log_segments WHERE partition_id = %s AND base_offset = 2",
        lab.partition_id(queue),
    )
    after = lab.one("SELECT (%s::timestamptz + interval '1 us')::text", at)
    assert offsets(broker.pop(queue, group="at", start=at, batch=1)) == [2]
    assert offsets(broker.pop(queue, group="after", start=after, batch=1)) == [4]


def test_a_group_begins_at_what_retention_has_left(lab: Lab, queue: str, broker: LocalBroker) -> None:
    three_segments(lab, queue)
    lab.drop_front(queue, 2)
    for group, start in (("all", ""), ("time", hours_ago(lab, 99))):
        assert offsets(broker.pop(queue, group=group, start=start)) == [2, 3, 4, 5]
        assert lab.committed(queue, group=group) == 1
    assert offsets(broker.pop(queue, "Default", group="pinned")) == [2, 3, 4, 5]


def test_the_first_subscription_stays(lab: Lab, queue: str, broker: LocalBroker) -> None:
    append(lab.operations, queue, *BEFORE)
    assert broker.pop(queue, mode="new") == []
    stored = registration(lab, queue)
    other = lab.broker(QUEEN_HOTLIST="0")
    for request in ({"mode": "all"}, {"start": hours_ago(lab, 50)}, {"start": "now"}):
        assert other.pop(queue, **request) == []
    again = registration(lab, queue)
    assert (again.id, again.subscription_mode, again.subscription_timestamp) == (
        stored.id,
        "new",
        stored.subscription_timestamp,
    )
    append(lab.operations, queue, *AFTER)
    assert ids(other.pop(queue, mode="all")) == list(AFTER)


@pytest.mark.parametrize(("mode", "start", "whole"), [("new", "", True), ("all", "", True), ("all", -1, False)])
@pytest.mark.parametrize("route", ["wildcard", "pinned", "discovery"])
def test_a_partition_born_later_goes_by_the_stored_time(
    lab: Lab, queue: str, broker: LocalBroker, mode: str, start: Any, whole: bool, route: str
) -> None:
    """Delivered whole to a subscription that was there before; a time in the future still holds."""
    start = hours_ago(lab, start) if start else ""
    lab.configure(queue, namespace=queue)
    assert broker.pop(queue, mode=mode, start=start) == []
    append(lab.operations, queue, *BEFORE, partition="born")
    append(lab.operations, queue, *AFTER, partition="born")
    arguments: dict[str, Any] = {
        "wildcard": {"queue": queue},
        "pinned": {"queue": queue, "partition": "born"},
        "discovery": {"queue": None, "namespace": queue},
    }[route]
    # This request's own wish is nothing to a group that is registered.
    messages = broker.pop(mode="new", start="now", timeout=3 if whole else 0.3, **arguments)
    assert ids(messages) == ([*BEFORE, *AFTER] if whole else [])


def test_a_group_that_only_pops_pinned_begins_anew_in_each_partition(lab: Lab, queue: str, broker: LocalBroker) -> None:
    for partition in ("p", "q"):
        append(lab.operations, queue, *BEFORE, partition=partition)
    assert broker.pop(queue, "p", mode="new") == []
    append(lab.operations, queue, *AFTER, partition="p")
    append(lab.operations, queue, *AFTER, partition="q")
    assert ids(broker.pop(queue, "p", mode="new")) == list(AFTER)
    assert broker.pop(queue, "q", mode="new") == []
    assert ids(broker.pop(queue, "q", group="other", mode="all")) == [*BEFORE, *AFTER]


def test_a_registration_after_a_pinned_pop_leaves_its_cursor(lab: Lab, queue: str, broker: LocalBroker) -> None:
    for partition in ("p", "q"):
        append(lab.operations, queue, *BEFORE, partition=partition)
    broker.complete(broker.pop(queue, "p", batch=1, mode="all"))
    assert broker.pop(queue, mode="new", batch=100, partitions=9) != []
    assert (lab.committed(queue, "p"), lab.committed(queue, "q")) == (0, 2)


def test_a_wildcard_pop_creates_its_queue_and_no_other_pop_does(lab: Lab, queue: str, broker: LocalBroker) -> None:
    def exists(name: str) -> bool:
        return lab.one("SELECT count(*) FROM queen.queues WHERE name = %s", name) == 1

    assert broker.pop(queue, "Default") == []
    assert broker.pop(None, namespace=queue) == []
    assert not exists(queue)
    name = f"{queue}.task.more"
    assert broker.pop(name) == []
    assert exists(name)
    row = lab.one("SELECT * FROM queen.queues WHERE name = %s", name)
    assert (row.namespace, row.task, row.lease_time) == (queue, "task", 60)
    assert registration(lab, name) is not None
    assert broker.pop(queue) == []
    row = lab.one("SELECT * FROM queen.queues WHERE name = %s", queue)
    assert (row.namespace, row.task) == (queue, "")


def test_an_empty_pop_registers_at_once(lab: Lab, queue: str, broker: LocalBroker) -> None:
    """Put off behind the next push, the registration would lose that push for a group that wants the new."""
    append(lab.operations, queue, *BEFORE)
    assert broker.pop(queue, mode="new") == []
    assert broker.pop(queue, "Default", group="pinned", mode="new") == []
    append(lab.operations, queue, *AFTER)
    other = lab.broker()
    assert ids(other.pop(queue, mode="new")) == list(AFTER)
    assert ids(other.pop(queue, "Default", group="pinned", mode="new")) == list(AFTER)


def test_many_first_contacts_at_once_store_one_subscription(lab: Lab, queue: str) -> None:
    brokers = [lab.broker(), lab.broker(), lab.broker(QUEEN_HOTLIST="0")]
    for k in range(20):
        append(lab.operations, queue, *BEFORE, partition=f"p{k}")
    popped = together(
        *(lambda k=k: brokers[k % 3].pop(queue, mode=("all", "new")[k % 2], batch=9, partitions=3) for k in range(18))
    )
    row = registration(lab, queue)
    leased = [(m.partition, m.offset) for messages in popped for m in messages]
    assert len(leased) == len(set(leased))
    seeds = {lab.committed(queue, f"p{k}") for k in range(20)}
    assert seeds == ({-1} if row.subscription_mode == "all" else {2})


def test_discovery_registers_on_every_queue_it_finds(lab: Lab, queue: str, broker: LocalBroker) -> None:
    names = [f"{queue}.{task}.{k}" for task in ("x", "y") for k in range(2)]
    for name in names:
        append(lab.operations, name, *BEFORE)
    messages = broker.pop(None, namespace=queue, task="x", batch=99, partitions=9)
    assert len(messages) == 6
    assert [registration(lab, name) is not None for name in names] == [True, True, False, False]
    assert len(broker.pop(None, namespace=queue, batch=99, partitions=9)) == 6
    assert all(registration(lab, name) is not None for name in names)
    assert broker.pop(None, namespace=queue, task="z", batch=99) == []


def test_a_waiting_discovery_pop_finds_a_queue_that_is_born(lab: Lab, queue: str, broker: LocalBroker) -> None:
    pop = gevent.spawn(broker.pop, None, namespace=queue, mode="all", timeout=20)
    gevent.sleep(0.05)
    broker.accept(f"{queue}.born", "a")
    assert ids(pop.get(timeout=10)) == ["a"]


@pytest.mark.parametrize("route", ["wildcard", "pinned"])
def test_a_deleted_group_begins_anew(lab: Lab, queue: str, broker: LocalBroker, route: str) -> None:
    partition = "Default" if route == "pinned" else None
    append(lab.operations, queue, *BEFORE)
    broker.complete(broker.pop(queue, partition, mode="all"))
    lab.delete_group(queue)
    broker.engine.group_moved(TENANT, queue, "g", None)
    assert registration(lab, queue) is None
    assert broker.pop(queue, partition, mode="new") == []
    append(lab.operations, queue, *AFTER)
    assert ids(broker.pop(queue, partition, mode="new", timeout=3)) == list(AFTER)


def test_a_group_deleted_elsewhere_registers_again_before_it_gets_cursors(lab: Lab, queue: str) -> None:
    """The broker wasn't told: its ring still takes the group for registered."""
    broker = lab.broker()
    append(lab.operations, queue, *BEFORE)
    broker.complete(broker.pop(queue, mode="all"))
    lab.delete_group(queue)
    broker.accept(queue, *AFTER)
    assert ids(broker.pop(queue, mode="all", timeout=3)) == [*BEFORE, *AFTER]
    assert registration(lab, queue).subscription_mode == "all"


def test_without_its_cursors_a_registered_group_goes_by_its_stored_time(
    lab: Lab, queue: str, broker: LocalBroker
) -> None:
    three_segments(lab, queue)
    broker.complete(broker.pop(queue, start=hours_ago(lab, 25)))
    lab.delete_group(queue, metadata=False)
    broker.engine.group_moved(TENANT, queue, "g", None)
    assert offsets(broker.pop(queue, mode="all", timeout=3)) == [2, 3, 4, 5]


def test_a_moved_subscription_is_for_partitions_to_come(lab: Lab, queue: str, broker: LocalBroker) -> None:
    append(lab.operations, queue, *BEFORE)
    assert broker.pop(queue, mode="new") == []
    tomorrow = hours_ago(lab, -24)
    lab.one("SELECT queen.update_consumer_group_subscription_v1(%s, %s, %s)", _tenant(), "g", tomorrow)
    append(lab.operations, queue, *AFTER)
    append(lab.operations, queue, *AFTER, partition="born")
    assert ids(broker.pop(queue, timeout=3, batch=99, partitions=9)) == list(AFTER)
    assert lab.committed(queue, "born") in (None, 1)


def _tenant() -> str:
    return TENANT.hex()
