"""Consumer groups over HTTP: listings, removal, subscription and seek."""

from __future__ import annotations

import threading
import uuid
from typing import Any

import pytest

from tests.api.conftest import DEFAULT_TENANT, OTHER_TENANT, Api, segment
from tests.broker import wait_until

GROUPS = "/api/v1/consumer-groups"


def cursors(api: Api, queue: uuid.UUID, group: str) -> dict[str, int]:
    """The cursors of a group on a queue, by partition."""
    rows = api.sql.execute(
        "SELECT p.name, c.committed FROM queen.log_consumers c JOIN queen.log_partitions p"
        " ON p.id = c.partition_id WHERE p.queue_id = %s AND c.consumer_group = %s",
        (queue, group),
    )
    return dict(rows.fetchall())


def repair(api: Api, queue: str, group: str) -> Any:
    """Partition and reason of a repair marker, or None."""
    return api.one(
        "SELECT partition_name, reason FROM queen.hotlist_repairs"
        " WHERE tenant_id = %s AND queue_name = %s AND consumer_group = %s",
        DEFAULT_TENANT,
        queue,
        group,
    )


def seek(api: Api, group: str, queue: str, body: Any, partition: str | None = None) -> Any:
    """Return the answer of a seek that succeeds."""
    return api.post(seek_target(group, queue, partition), body)


def seek_target(group: str, queue: str, partition: str | None = None) -> str:
    lane = "" if partition is None else f"/partitions/{segment(partition)}"
    return f"{GROUPS}/{segment(group)}/queues/{segment(queue)}{lane}/seek"


# The list.


def listed(api: Api, group: str) -> list[dict[str, Any]]:
    return [entry for entry in api.get(GROUPS) if entry["name"] == group]


def test_the_list_has_one_entry_for_each_group_and_queue(api: Api, name: str) -> None:
    queue = api.make_queue(name)
    first = api.make_partition(queue, "a", (10, 10), ages=(9000, 42.5))
    second = api.make_partition(queue, "b", (10,), ages=(9000,), start=90)
    third = api.make_partition(queue, "c", (10,), ages=(9000,))
    api.make_cursor(first, name, 9, total_consumed=10)
    api.make_cursor(second, name, 49)
    api.make_cursor(third, name, 9)
    api.register(
        queue, name, subscription_mode="new", subscription_timestamp="2026-08-01T08:00:00Z",
        created_at="2026-08-01T08:00:01.5Z", conflation=True,
    )  # fmt: skip
    assert listed(api, name) == [
        {
            "name": name,
            "topics": [name],
            "queueName": name,
            "members": 3,
            "partitionCursors": 3,
            "partitionsWithLag": 2,
            "totalLag": 20,
            "maxTimeLag": 9000,
            "state": "Lagging",
            "storage": "segments",
            "subscriptionMode": "new",
            "subscriptionTimestamp": "2026-08-01T08:00:00.000Z",
            "subscriptionCreatedAt": "2026-08-01T08:00:01.500Z",
            "conflation": True,
        }
    ]


@pytest.mark.parametrize(
    ("age", "consumed", "state"),
    [(299, 0, "Dead"), (299, 1, "Stable"), (302, 1, "Lagging"), (302, 0, "Lagging")],
)
def test_the_state_follows_from_lag_and_consumption(api: Api, name: str, age: int, consumed: int, state: str) -> None:
    partition = api.make_partition(api.make_queue(name), sizes=(1,), ages=(age,))
    api.make_cursor(partition, name, -1, total_consumed=consumed)
    (entry,) = listed(api, name)
    assert entry["state"] == state
    assert age <= entry["maxTimeLag"] <= age + 2
    assert (entry["subscriptionMode"], entry["subscriptionTimestamp"]) == (None, None)
    assert (entry["subscriptionCreatedAt"], entry["conflation"]) == (None, False)


def test_a_group_that_is_up_to_date_has_no_lag(api: Api, name: str) -> None:
    partition = api.make_partition(api.make_queue(name), sizes=(5,), ages=(9000,))
    api.make_cursor(partition, name, 4, total_consumed=5)
    (entry,) = listed(api, name)
    assert (entry["totalLag"], entry["partitionsWithLag"], entry["maxTimeLag"]) == (0, 0, 0)
    assert entry["state"] == "Stable"


def test_the_list_is_ordered_by_group_and_queue_and_shows_groupless_consumers(api: Api, name: str) -> None:
    for queue in (f"{name}-2", f"{name}-1"):
        partition = api.make_partition(api.make_queue(queue), sizes=(1,))
        for group in (f"{name}-b", f"{name}-a", "__QUEUE_MODE__"):
            api.make_cursor(partition, group, -1)
    pairs = [(entry["name"], entry["queueName"]) for entry in api.get(GROUPS) if entry["queueName"].startswith(name)]
    groups = sorted({group for group, _ in pairs})
    assert set(groups) == {"__QUEUE_MODE__", f"{name}-a", f"{name}-b"}
    for group in groups:
        assert [queue for other, queue in pairs if other == group] == [f"{name}-1", f"{name}-2"]
    assert pairs.index((f"{name}-a", f"{name}-2")) < pairs.index((f"{name}-b", f"{name}-1"))


def test_the_list_shows_only_the_tenants_own_groups(api: Api, name: str) -> None:
    partition = api.make_partition(api.make_queue(name, OTHER_TENANT), sizes=(1,), ages=(9000,))
    api.make_cursor(partition, name, -1)
    assert listed(api, name) == []
    assert api.get(f"{GROUPS}/{name}") == {}
    assert not [row for row in api.get(f"{GROUPS}/lagging") if row["queue_name"] == name]


# Lagging partitions.


def lagging(api: Api, queue: str, query: str = "") -> list[dict[str, Any]]:
    return [row for row in api.get(f"{GROUPS}/lagging{query}") if row["queue_name"] == queue]


def test_lagging_partitions_come_with_the_longest_wait_first(api: Api, name: str) -> None:
    queue = api.make_queue(name)
    slow = api.make_partition(queue, "slow", (10, 10), ages=(99999, 7421.5))
    slower = api.make_partition(queue, "slower", (10,), ages=(36000,))
    api.make_cursor(api.make_partition(queue, "fine", (10,), ages=(99999,)), name, 9)
    api.make_lease(slow, name, 9, 12)
    api.make_cursor(slower, name, 4)
    worker = api.one("SELECT worker_id FROM queen.log_consumers WHERE partition_id = %s", slow)
    oldest = api.one(
        "SELECT queen.iso_time(created_at) FROM queen.log_segments WHERE partition_id = %s AND base_offset = 10",
        slow,
    )
    rows = lagging(api, name)
    assert [row["partition_name"] for row in rows] == ["slower", "slow"]
    seconds = rows[1].pop("time_lag_seconds")
    assert 7421 <= seconds <= 7425
    assert rows[1] == {
        "consumer_group": name,
        "queue_name": name,
        "partition_name": "slow",
        "partition_id": str(slow),
        "worker_id": worker,
        "offset_lag": 10,
        "lag_hours": 2.06,
        "oldest_unconsumed_at": oldest,
        "last_consumed_at": None,
    }
    assert (rows[0]["offset_lag"], rows[0]["lag_hours"], rows[0]["worker_id"]) == (5, 10.0, None)


def test_the_threshold_of_lagging_partitions_is_an_hour_unless_named(api: Api, name: str) -> None:
    queue = api.make_queue(name)
    for age in (3700, 3500, 100):
        api.make_cursor(api.make_partition(queue, str(age), (1,), ages=(age,)), name, -1)

    def partitions(query: str) -> list[str]:
        return [row["partition_name"] for row in lagging(api, name, query)]

    assert partitions("") == ["3700"]
    assert partitions("?minLagSeconds=60") == ["3700", "3500", "100"]
    assert partitions("?minLagSeconds=3600") == ["3700"]
    assert partitions("?minLagSeconds=-1") == ["3700", "3500", "100"]
    assert partitions("?minLagSeconds=soon") == ["3700"]
    assert partitions("?minLagSeconds=") == ["3700"]
    assert partitions("?minLagSeconds=99999999999") == ["3700"]


def test_a_backlog_that_retention_deleted_lags_no_more(api: Api, name: str) -> None:
    partition = api.make_partition(api.make_queue(name), start=100)
    api.make_cursor(partition, name, 5)
    assert lagging(api, name, "?minLagSeconds=0") == []
    (entry,) = listed(api, name)
    assert (entry["totalLag"], entry["maxTimeLag"]) == (0, 0)


def test_lagging_is_a_route_and_no_group(api: Api, name: str) -> None:
    api.make_cursor(api.make_partition(api.make_queue(name), sizes=(1,)), "lagging", -1)
    assert isinstance(api.get(f"{GROUPS}/lagging"), list)
    answer = api.request("DELETE", f"{GROUPS}/lagging").json()
    assert (answer["consumerGroup"], answer["deletedPartitions"]) == ("lagging", 1)


# One group.


def test_the_detail_shows_a_groups_cursors_by_queue(api: Api, name: str) -> None:
    queue = api.make_queue(f"{name}/1")
    behind = api.make_partition(queue, "b", (10, 10), ages=(9000, 100.5))
    api.make_lease(behind, name, 9, 12)
    api.make_cursor(api.make_partition(queue, "a", (10,)), name, 9, total_consumed=91204)
    api.register(queue, name, conflation=True)
    expired = api.make_partition(api.make_queue(f"{name}/2"), "p", (1,))
    api.make_lease(expired, name, -1, 0, seconds=-1)
    workers = [
        api.one("SELECT worker_id FROM queen.log_consumers WHERE partition_id = %s", partition)
        for partition in (behind, expired)
    ]

    answer = api.get(f"{GROUPS}/{name}")
    assert 100 <= answer[f"{name}/1"]["partitions"][1].pop("timeLagSeconds") <= 103
    answer[f"{name}/2"]["partitions"][0].pop("timeLagSeconds")
    idle = {"lastConsumedAt": None, "totalConsumed": 0, "offsetLag": 0, "leaseActive": False, "workerId": None}
    assert answer == {
        f"{name}/1": {
            "conflation": True,
            "partitions": [
                {**idle, "partition": "a", "totalConsumed": 91204, "timeLagSeconds": 0},
                {**idle, "partition": "b", "workerId": workers[0], "offsetLag": 10, "leaseActive": True},
            ],
        },
        f"{name}/2": {
            "conflation": False,
            "partitions": [{**idle, "partition": "p", "workerId": workers[1], "offsetLag": 1}],
        },
    }


def test_an_unknown_group_has_no_queues(api: Api, name: str) -> None:
    assert api.get(f"{GROUPS}/{name}") == {}


def test_a_group_is_addressed_by_one_encoded_segment(api: Api, name: str) -> None:
    group, queue, lane = f"{name}/g ü", f"{name}/q%2F", f"{name}/p?"
    api.make_partition(api.make_queue(queue), lane, (1,))
    assert seek(api, group, queue, {"toEnd": True})["consumerGroup"] == group
    assert seek(api, group, queue, {"toEnd": True}, lane)["partitionName"] == lane
    assert list(api.get(f"{GROUPS}/{segment(group)}")) == [queue]
    answer = api.request("DELETE", f"{GROUPS}/{segment(group)}/queues/{segment(queue)}").json()
    assert (answer["queueName"], answer["deletedPartitions"]) == (queue, 1)


# Delete.


def make_group(api: Api, queue_name: str, group: str, tenant: uuid.UUID = DEFAULT_TENANT) -> uuid.UUID:
    """A registered group with two cursors and a watermark on a new queue; returns the queue's id."""
    queue = api.make_queue(queue_name, tenant)
    for lane in ("a", "b"):
        api.make_lease(api.make_partition(queue, lane, (3,)), group, -1, 1)
    api.register(queue, group, tenant)
    api.sql.execute("INSERT INTO queen.consumer_watermarks (queue_id, consumer_group) VALUES (%s, %s)", (queue, group))
    return queue


def left(api: Api, queue: uuid.UUID, group: str) -> tuple[int, int, int]:
    """How many cursors, watermarks and registrations a group has on a queue."""
    return (
        len(cursors(api, queue, group)),
        api.count("consumer_watermarks", "queue_id = %s AND consumer_group = %s", queue, group),
        api.count("consumer_groups_metadata", "queue_id = %s AND consumer_group = %s", queue, group),
    )


def test_deleting_a_group_removes_it_from_every_queue(api: Api, name: str) -> None:
    queues = [make_group(api, f"{name}-{number}", name) for number in (1, 2)]
    make_group(api, f"{name}-3", f"{name}-other")
    foreign = make_group(api, name, name, OTHER_TENANT)
    api.register(None, name, namespace="discovered")  # type: ignore[arg-type]

    response = api.request("DELETE", f"{GROUPS}/{name}")
    assert response.status == 200
    assert response.json() == {
        "success": True,
        "consumerGroup": name,
        "deletedPartitions": 4,
        "metadataDeleted": True,
    }
    assert [left(api, queue, name) for queue in queues] == [(0, 0, 0)] * 2
    assert api.count("consumer_groups_metadata", "namespace = 'discovered'") == 0
    assert left(api, foreign, name) == (2, 1, 1)
    assert api.count("consumer_groups_metadata", "consumer_group = %s", f"{name}-other") == 1
    assert [repair(api, f"{name}-{number}", name) for number in (1, 2, 3)] == [(None, "delete")] * 2 + [None]


def test_deleting_a_group_from_one_queue_leaves_the_others(api: Api, name: str) -> None:
    first, second = (make_group(api, f"{name}-{number}", name) for number in (1, 2))
    api.register(None, name, namespace="kept")  # type: ignore[arg-type]
    response = api.request("DELETE", f"{GROUPS}/{name}/queues/{name}-1")
    assert response.status == 200
    assert response.json() == {
        "success": True,
        "consumerGroup": name,
        "queueName": f"{name}-1",
        "deletedPartitions": 2,
        "metadataDeleted": True,
    }
    assert left(api, first, name) == (0, 0, 0)
    assert left(api, second, name) == (2, 1, 1)
    assert api.count("consumer_groups_metadata", "namespace = 'kept'") == 1
    assert (repair(api, f"{name}-1", name), repair(api, f"{name}-2", name)) == ((None, "delete"), None)


@pytest.mark.parametrize("path", ["", "/queues/{queue}"])
@pytest.mark.parametrize(
    ("query", "deleted"),
    [
        ("?deleteMetadata=false", False),
        ("?deleteMetadata=0", False),
        ("?deleteMetadata=true", True),
        ("?deleteMetadata=perhaps", True),
        ("?deleteMetadata=", True),
    ],
)
def test_the_registration_may_be_kept(api: Api, name: str, path: str, query: str, deleted: bool) -> None:
    queue = make_group(api, name, name)
    answer = api.request("DELETE", f"{GROUPS}/{name}{path.format(queue=name)}{query}").json()
    assert (answer["deletedPartitions"], answer["metadataDeleted"]) == (2, deleted)
    assert left(api, queue, name) == (0, 0, 0 if deleted else 1)


def test_deleting_an_unknown_group_deletes_nothing(api: Api, name: str) -> None:
    for target in (f"{GROUPS}/{name}", f"{GROUPS}/{name}/queues/{name}"):
        response = api.request("DELETE", target)
        assert (response.status, response.json()["deletedPartitions"]) == (200, 0)


def test_a_registration_without_cursors_is_deleted_and_announced(api: Api, name: str) -> None:
    api.register(api.make_queue(name), name)
    assert api.request("DELETE", f"{GROUPS}/{name}").json()["deletedPartitions"] == 0
    assert api.count("consumer_groups_metadata", "consumer_group = %s", name) == 0
    assert repair(api, name, name) == (None, "delete")


def test_a_deleted_group_starts_over(api: Api, name: str) -> None:
    api.broker.push([{"queue": name, "payload": number} for number in range(3)])
    for message in api.broker.pop(name, consumerGroup=name, subscriptionMode="all", batch=3):
        api.broker.ack(message, consumerGroup=name)
    assert api.broker.pop(name, consumerGroup=name) == []
    api.request("DELETE", f"{GROUPS}/{name}/queues/{name}")
    messages = api.broker.pop(name, consumerGroup=name, subscriptionMode="all", batch=3)
    assert [message["data"] for message in messages] == [0, 1, 2]


# Subscription.


def test_a_subscription_moves_on_every_queue_of_the_tenant(api: Api, name: str) -> None:
    queues = [make_group(api, f"{name}-{number}", name) for number in (1, 2)]
    foreign = make_group(api, name, name, OTHER_TENANT)
    answer = api.post(f"{GROUPS}/{name}/subscription", {"subscriptionTimestamp": "2026-08-01T08:00:00Z"})
    assert answer == {
        "success": True,
        "consumerGroup": name,
        "newTimestamp": "2026-08-01T08:00:00Z",
        "rowsUpdated": 2,
    }
    assert [left(api, queue, name) for queue in queues] == [(2, 0, 1)] * 2
    assert cursors(api, queues[0], name) == {"a": -1, "b": -1}
    assert left(api, foreign, name) == (2, 1, 1)
    stored = "queue_id = %s AND subscription_timestamp = '2026-08-01T08:00:00Z'"
    assert [api.count("consumer_groups_metadata", stored, queue) for queue in (*queues, foreign)] == [1, 1, 0]


def test_a_group_that_is_not_registered_has_no_subscription_to_move(api: Api, name: str) -> None:
    answer = api.post(f"{GROUPS}/{name}/subscription", {"subscriptionTimestamp": "2026-08-01"})
    assert (answer["rowsUpdated"], answer["newTimestamp"]) == (0, "2026-08-01")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({}, "subscriptionTimestamp is required"),
        ({"subscriptionTimestamp": ""}, "subscriptionTimestamp is required"),
        ({"subscriptionTimestamp": None}, "subscriptionTimestamp is required"),
        ({"subscriptionTimestamp": 7}, "subscriptionTimestamp is required"),
        ([], "subscriptionTimestamp is required"),
        (b"", "bad body: "),
        (b"{", "bad body: "),
        ({"subscriptionTimestamp": "yesterweek"}, "subscription failed: invalid input syntax"),
        ({"subscriptionTimestamp": "2026-13-01"}, "subscription failed: "),
        ({"subscriptionTimestamp": "\ud800"}, "subscription failed: "),
        ({"subscriptionTimestamp": "\0"}, "subscription failed: "),
    ],
)
def test_a_subscription_needs_a_time(api: Api, name: str, body: Any, text: str) -> None:
    make_group(api, name, name)
    response = api.request("POST", f"{GROUPS}/{name}/subscription", body)
    assert response.status == 400
    assert response.json()["error"].startswith(text)


# Seek: where cursors go.


def test_a_seek_to_the_end_skips_all_there_is(api: Api, name: str) -> None:
    queue = api.make_queue(name)
    api.make_cursor(api.make_partition(queue, "a", (10, 5)), name, 3)
    api.make_partition(queue, "b", (10,), start=90)
    api.make_partition(queue, "empty")
    assert seek(api, name, name, {"toEnd": True}) == {
        "success": True,
        "consumerGroup": name,
        "queueName": name,
        "seekToEnd": True,
        "targetTimestamp": None,
        "partitionsUpdated": 3,
    }
    assert cursors(api, queue, name) == {"a": 14, "b": 99, "empty": -1}


@pytest.mark.parametrize(
    ("age", "committed"),
    [
        (999999, 99),  # older than everything: the oldest segment
        (301, 99),
        (250, 109),  # between two: the next segment
        (150, 114),
        (0.5, 121),  # nothing that recent: the end
        (-3600, 121),
    ],
)
def test_a_seek_to_a_time_goes_before_the_first_segment_written_since(
    api: Api, name: str, age: float, committed: int
) -> None:
    queue = api.make_queue(name)
    partition = api.make_partition(queue, "p", (10, 5, 7), ages=(300, 200, 100), start=100)
    api.make_cursor(partition, name, 112)
    at = api.one("SELECT queen.iso_time(now() - make_interval(secs => %s))", age)
    answer = seek(api, name, name, {"timestamp": at})
    assert (answer["seekToEnd"], answer["targetTimestamp"], answer["partitionsUpdated"]) == (False, at, 1)
    assert cursors(api, queue, name) == {"p": committed}


def test_a_seek_to_exactly_a_segments_time_includes_it(api: Api, name: str) -> None:
    queue = api.make_queue(name)
    api.make_partition(queue, "p", (2, 2))
    api.sql.execute(
        "UPDATE queen.log_segments SET created_at = timestamptz '2026-08-01T08:00:00Z'"
        " + make_interval(secs => base_offset) WHERE partition_id IN"
        " (SELECT id FROM queen.log_partitions WHERE queue_id = %s)",
        (queue,),
    )
    for at, committed in (("2026-08-01T08:00:02Z", 1), ("2026-08-01 08:00:02.001", 3), ("2026-08-01", -1)):
        seek(api, name, name, {"timestamp": at})
        assert cursors(api, queue, name) == {"p": committed}, at


@pytest.mark.parametrize("at", ["epoch", "1970-01-01T00:00:00Z", "-infinity"])
def test_a_seek_to_the_beginning_goes_to_the_oldest_message(api: Api, name: str, at: str) -> None:
    queue = api.make_queue(name)
    api.make_partition(queue, "kept", (5,), start=10)
    api.make_partition(queue, "deleted", start=10)
    api.make_partition(queue, "empty")
    seek(api, name, name, {"timestamp": at})
    assert cursors(api, queue, name) == {"kept": 9, "deleted": 9, "empty": -1}


def test_a_seek_to_the_end_wins_over_a_time(api: Api, name: str) -> None:
    queue = api.make_queue(name)
    api.make_partition(queue, "p", (5,))
    answer = seek(api, name, name, {"toEnd": True, "timestamp": "epoch"})
    assert (answer["seekToEnd"], answer["targetTimestamp"]) == (True, None)
    assert cursors(api, queue, name) == {"p": 4}


def test_a_seek_moves_no_other_group_queue_or_tenant(api: Api, name: str) -> None:
    queue = make_group(api, name, name)
    others = [(queue, f"{name}-other"), (make_group(api, f"{name}-2", name), name)]
    others.append((make_group(api, name, name, OTHER_TENANT), name))
    api.make_cursor(api.make_partition(queue, "c", (3,)), f"{name}-other", -1)
    before = [cursors(api, *other) for other in others]
    assert seek(api, name, name, {"toEnd": True})["partitionsUpdated"] == 3
    assert [cursors(api, *other) for other in others] == before


def test_a_seek_of_one_partition_leaves_the_others(api: Api, name: str) -> None:
    queue = make_group(api, name, name)
    assert seek(api, name, name, {"timestamp": "2038-01-01"}, "a") == {
        "success": True,
        "consumerGroup": name,
        "queueName": name,
        "partitionName": "a",
        "seekToEnd": False,
        "targetTimestamp": "2038-01-01",
        "updated": True,
    }
    assert cursors(api, queue, name) == {"a": 2, "b": -1}
    assert left(api, queue, name) == (2, 0, 1)


def test_a_seek_gives_a_group_cursors_it_never_had(api: Api, name: str) -> None:
    queue = api.make_queue(name)
    lanes = {f"{number:04}": 1 for number in range(1203)}
    api.sql.execute(
        "INSERT INTO queen.log_partitions (queue_id, name, last_offset)"
        " SELECT %s, lane, 1 FROM unnest(%s::text[]) lane",
        (queue, list(lanes)),
    )
    assert seek(api, name, name, {"toEnd": True})["partitionsUpdated"] == len(lanes)
    assert cursors(api, queue, name) == lanes


# Seek: what goes with it.


def test_a_seek_ends_leases_and_forgets_retries(api: Api, name: str) -> None:
    partition = api.make_partition(api.make_queue(name), "p", (10,))
    api.make_cursor(
        partition, name, 3, batch_end=5, worker_id="w", lease_expires_at="2038-01-01", lease_conflated=True,
        batch_retry_count=2, attempt_offset=4, attempt_count=7, total_consumed=4,
    )  # fmt: skip
    seek(api, name, name, {"timestamp": "epoch"})
    row = api.one(
        "SELECT committed, batch_end, worker_id, lease_expires_at, lease_conflated, batch_retry_count,"
        " attempt_offset, attempt_count, total_consumed FROM queen.log_consumers WHERE partition_id = %s",
        partition,
    )
    assert row == (-1, None, None, None, False, 0, None, 0, 4)


def test_a_seek_leaves_a_repair_marker_and_forgets_the_empty_scan(api: Api, name: str) -> None:
    queue = make_group(api, name, name)
    seek(api, name, name, {"toEnd": True})
    assert repair(api, name, name) == (None, "seek")
    assert left(api, queue, name) == (2, 0, 1)


def test_repair_markers_of_different_partitions_widen_to_the_queue(api: Api, name: str) -> None:
    make_group(api, name, name)
    where = [None]
    for lane in ("a", "a", "b", "a"):
        seek(api, name, name, {"toEnd": True}, lane)
        where.append(repair(api, name, name)[0])
    assert where == [None, "a", "a", None, None]


def test_a_repair_marker_always_changes(api: Api, name: str) -> None:
    make_group(api, name, name)
    times = set()
    for _ in range(3):
        seek(api, name, name, {"toEnd": True}, "a")
        times.add(api.one("SELECT repair_at FROM queen.hotlist_repairs WHERE queue_name = %s", name))
    assert len(times) == 3


def test_old_repair_markers_are_removed_and_do_not_widen(api: Api, name: str) -> None:
    make_group(api, name, name)
    for lane, group, age in (("a", name, 61), (None, "old", 61), (None, "young", 59)):
        api.sql.execute(
            "INSERT INTO queen.hotlist_repairs VALUES (%s, %s, %s, %s, now() - make_interval(mins => %s), 'seek')",
            (DEFAULT_TENANT, name, group, lane, age),
        )
    seek(api, name, name, {"toEnd": True}, "b")
    rows = api.sql.execute(
        "SELECT consumer_group, partition_name FROM queen.hotlist_repairs WHERE queue_name = %s", (name,)
    )
    assert dict(rows.fetchall()) == {name: "b", "young": None}


def test_a_parked_pop_wakes_when_a_seek_goes_back(api: Api, name: str) -> None:
    api.broker.push([{"queue": name, "payload": 1}])
    for message in api.broker.pop(name, consumerGroup=name, subscriptionMode="all"):
        api.broker.ack(message, consumerGroup=name)
    got: list[dict[str, Any]] = []
    options = {"consumerGroup": name, "wait": True, "timeout": 50000}
    parked = threading.Thread(target=lambda: got.extend(api.broker.pop(name, **options)))
    parked.start()
    seek(api, name, name, {"timestamp": "epoch"})
    parked.join(20)
    assert [message["data"] for message in got] == [1]


def test_a_holder_of_a_lease_cannot_ack_after_a_seek(api: Api, name: str) -> None:
    api.broker.push([{"queue": name, "payload": 1}])
    (message,) = api.broker.pop(name, consumerGroup=name, subscriptionMode="all")
    seek(api, name, name, {"timestamp": "epoch"}, "Default")
    assert api.broker.ack(message, consumerGroup=name)["success"] is False
    (again,) = api.broker.pop(name, consumerGroup=name)
    assert again["transactionId"] == message["transactionId"]
    assert api.broker.ack(again, consumerGroup=name)["success"] is True


# Seek: what is refused.


@pytest.mark.parametrize("partition", [None, "Default"])
@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"{", "bad body"),
        (b"toEnd", "bad body"),
        (b"\xff", "bad body"),
        ([], "Must specify toEnd=true or a timestamp"),
        ({"toEnd": False}, "Must specify toEnd=true or a timestamp"),
        ({"toEnd": "true"}, "Must specify toEnd=true or a timestamp"),
        ({"timestamp": ""}, "Must specify toEnd=true or a timestamp"),
        ({"timestamp": None}, "Must specify toEnd=true or a timestamp"),
        ({"timestamp": 1754035200}, "Must specify toEnd=true or a timestamp"),
        ({"timestamp": "yesterweek"}, "seek failed: "),
        ({"timestamp": "2026-13-01"}, "seek failed: "),
        ({"timestamp": "\0"}, "seek failed: "),
    ],
)
def test_a_seek_without_target_is_refused(api: Api, name: str, body: Any, text: str, partition: str | None) -> None:
    queue = api.make_queue(name)
    api.make_cursor(api.make_partition(queue, sizes=(5,)), name, 1)
    response = api.request("POST", seek_target(name, name, partition), body)
    assert response.status == 400
    assert list(response.json()) == ["error"]
    assert response.json()["error"].startswith(text)
    assert cursors(api, queue, name) == {"Default": 1}


@pytest.mark.parametrize("body", [None, b"", b"  \n", b"null", b"{}"])
def test_a_seek_of_one_partition_without_data_goes_to_the_end(api: Api, name: str, body: bytes | None) -> None:
    queue = api.make_queue(name)
    api.make_partition(queue, sizes=(5,))
    assert seek(api, name, name, body, "Default")["seekToEnd"] is True
    assert cursors(api, queue, name) == {"Default": 4}


@pytest.mark.parametrize("body", [None, b"", b"null", b"{}"])
def test_a_seek_of_a_queue_needs_data(api: Api, name: str, body: bytes | None) -> None:
    api.make_partition(api.make_queue(name), sizes=(5,))
    assert api.request("POST", seek_target(name, name), body).status == 400


def test_a_seek_of_a_queue_that_has_no_partitions_is_not_found(api: Api, name: str) -> None:
    api.make_partition(api.make_queue(name, OTHER_TENANT), sizes=(1,))
    for _ in ("no queue", "no partitions"):
        response = api.request("POST", seek_target(name, name), {"toEnd": True})
        assert response.status == 404
        assert response.json() == {
            "success": False,
            "error": "Queue not found or has no partitions",
            "consumerGroup": name,
            "queueName": name,
            "partitionsUpdated": 0,
        }
        assert repair(api, name, name) is None
        api.sql.execute("INSERT INTO queen.queues (name) VALUES (%s) ON CONFLICT DO NOTHING", (name,))


def test_a_seek_of_an_unknown_partition_is_not_found(api: Api, name: str) -> None:
    api.make_partition(api.make_queue(name), "a", (1,))
    response = api.request("POST", seek_target(name, name, "b"), {"toEnd": True})
    assert (response.status, response.json()) == (404, {"success": False, "error": "Partition not found"})


def test_a_group_name_that_no_pop_could_use_is_refused(api: Api, name: str) -> None:
    queue = api.make_queue(name)
    api.make_partition(queue, "p", (1,))
    assert api.request("POST", seek_target("g" * 256, name), {"toEnd": True}).status == 400
    assert api.request("POST", seek_target("g" * 256, name, "p"), {"toEnd": True}).status == 400
    assert seek(api, "ü" * 255, name, {"toEnd": True})["partitionsUpdated"] == 1


# Concurrency.


def test_a_seek_never_makes_a_pop_wait(api: Api, name: str) -> None:
    """The seek waits for a cursor another consumer holds; meanwhile pops skip what the seek has locked."""
    queue = api.make_queue(name)
    api.register(queue, name)
    partitions = sorted(api.make_partition(queue, lane, (1,)) for lane in ("a", "b"))
    for partition in partitions:
        api.make_cursor(partition, name, -1)
    moved: list[Any] = []
    seeker = threading.Thread(target=lambda: moved.append(seek(api, name, name, {"toEnd": True})))
    with api.database.connect(autocommit=False) as holder:
        holder.execute("SELECT 1 FROM queen.log_consumers WHERE partition_id = %s FOR UPDATE", (partitions[1],))
        seeker.start()
        waits = "datname = current_database() AND cardinality(pg_blocking_pids(pid)) > 0"
        wait_until(lambda: api.one(f"SELECT count(*) FROM pg_stat_activity WHERE {waits}") == 1)
        assert api.broker.pop(name, consumerGroup=name) == []
    seeker.join()
    assert moved[0]["partitionsUpdated"] == 2
