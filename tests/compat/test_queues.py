"""Creating, configuring, inspecting and deleting queues with the client."""

from __future__ import annotations

from tests.compat.conftest import Play

# What the client sends when it is told nothing, and what the broker adds.
DEFAULTS = {
    "leaseTime": 300,
    "retryLimit": 3,
    "priority": 0,
    "delayedProcessing": 0,
    "windowBuffer": 0,
    "maxSize": 0,
    "retentionSeconds": 0,
    "completedRetentionSeconds": 0,
    "encryptionEnabled": False,
    "retryDelay": 1000,
    "ttl": 3600,
    "deadLetterQueue": True,
    "dlqAfterMaxRetries": True,
    "retentionEnabled": False,
    "maxWaitTimeSeconds": 0,
    "minPopWaitTime": 0,
    "dedupWindowSeconds": 3600,
}


def test_settings_come_back_as_they_were_sent(play: Play) -> None:
    first = {"leaseTime": 90, "retryLimit": 4, "priority": 5, "dlqAfterMaxRetries": False, "retentionSeconds": 60}
    second = {"windowBuffer": 2}
    result = play("queues.configure", first=first, second=second)
    created, seen, again = result["created"], result["seen"], result["again"]
    assert created["configured"] is True
    assert created["namespace"] == seen["namespace"] == "shop"
    assert created["task"] == seen["task"] == "bill"
    assert created["options"] == {**DEFAULTS, **first}
    assert created["queueId"] == seen["id"] == again["queueId"]
    # Another configuration replaces the first: it is no patch.
    assert again["options"] == {**DEFAULTS, **second}


def test_operations_report_through_callbacks(play: Play) -> None:
    events = play("queues.callbacks")
    assert len(events) == 2
    assert events[0] == events[1]


def test_a_deleted_queue_leaves_nothing_behind(play: Play) -> None:
    result = play("queues.delete")
    assert result["dead before"] == 1
    assert result["deleted"]["deleted"] is True
    assert result["missing"] == "Queue not found"
    assert result["again"]["deleted"] is False
    assert result["status"] == "queued"  # the transaction id was used in the deleted queue
    assert result["popped"] == ["new"]
    assert result["dead"] == 0


def test_listing_and_detail_count_what_is_there(play: Play) -> None:
    result = play("queues.overview")
    (listed,) = result["listed"]
    assert listed["namespace"] == "shop"
    assert listed["partitions"] == 2
    assert listed["messages"]["total"] == 6
    detail = result["detail"]
    assert [entry["name"] for entry in detail["partitions"]] == ["a", "b"]
    a, b = (entry["stats"] for entry in detail["partitions"])
    assert (a["total"], a["pending"], a["processing"], a["completed"]) == (4, 2, 1, 2)
    assert (b["total"], b["pending"], b["processing"], b["completed"]) == (2, 2, 0, 0)
    assert (detail["totals"]["total"], detail["totals"]["pending"]) == (6, 4)


def test_unusual_names_survive_the_way_through_paths_and_bodies(play: Play) -> None:
    for suffix, partition, group in (
        (" with space", "caf\u00e9 \u2615", "a+b & c=d"),
        (".dotted:and;more@x", "user/7", "gr\u00fcn"),
        ("~'(!*)$,", "a.b", '"quoted" \\ group'),
    ):
        # The client sends a slash as it is, which splits a path: only in a body it may stand.
        pinned = partition if "/" not in partition else partition.replace("/", ":")
        result = play("queues.names", suffix=suffix, partition=pinned, group=group + suffix)
        assert result == {
            "popped": {pinned: [1]},
            "transactionId": group + suffix,
            "acked": [True],
            "partitions": [pinned],
            "lag": 0,
            "deleted": True,
        }
