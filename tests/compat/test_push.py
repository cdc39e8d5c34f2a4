"""Pushing with the client: shapes, transaction ids, duplicates and its buffer."""

from __future__ import annotations

import uuid

import pytest

from tests.compat.conftest import Play

PAYLOADS = [
    {"n": 1, "nested": {"list": [1, 2.5, None, True]}},
    None,
    [],
    'text \u2603 with "quotes" and \\ and \u0000',
    0,
    -1.5e-7,
    2**53 + 1,
    10**40,
    False,
    "",
]


def test_payloads_of_every_shape_come_back_equal(play: Play) -> None:
    result = play("push.shapes", items=[{"data": payload} for payload in PAYLOADS])
    assert result["popped"] == {"single": PAYLOADS, "array": PAYLOADS}
    for answer in (*result["singles"], result["array"]):
        assert [item["status"] for item in answer] == ["queued"] * len(answer)
        assert [item["index"] for item in answer] == list(range(len(answer)))


def test_an_object_without_data_is_itself_the_payload(play: Play) -> None:
    items = [{"a": 1}, {"a": 2, "b": [3]}]
    assert play("push.shapes", items=items)["popped"] == {"single": items, "array": items}


def test_answers_and_messages_name_the_same_ids(play: Play) -> None:
    result = play("push.ids")
    pushed, popped = result["pushed"], result["popped"]
    assert [message["data"] for message in popped] == [0, 1, 2]
    assert [message["id"] for message in popped] == [item["message_id"] for item in pushed]
    assert [message["transactionId"] for message in popped] == [item["transaction_id"] for item in pushed]
    assert popped[1]["transactionId"] == "mine"
    assert len({item["transaction_id"] for item in pushed}) == 3
    assert [uuid.UUID(item["message_id"]).version for item in pushed] == [7, 7, 7]
    assert {message["partition"] for message in popped} == {"Default"}
    assert len({message["partitionId"] for message in popped}) == 1
    assert len({message["leaseId"] for message in popped}) == 1
    assert {message["consumerGroup"] for message in popped} == {"__QUEUE_MODE__"}


def test_a_transaction_id_is_stored_once_per_partition(play: Play) -> None:
    result = play("push.duplicates")
    statuses = [[item["status"] for item in answer] for answer in result["pushed"]]
    assert statuses == [
        ["queued"],
        ["duplicate"],
        ["duplicate", "queued", "duplicate", "queued"],
        ["queued"],
        ["queued"],
    ]
    first, second, mixed, *_ = result["pushed"]
    assert first[0]["message_id"] == second[0]["message_id"] == mixed[0]["message_id"]
    assert mixed[1]["message_id"] == mixed[2]["message_id"] != mixed[3]["message_id"]
    assert result["popped"] == {"Default": [1, 4, 6], "other": [7]}
    assert result["other"] == [8]
    assert result["total"] == 4


def test_callbacks_tell_new_from_known(play: Play) -> None:
    assert play("push.callbacks") == {
        "success": [["new", "queued"]],
        "duplicate": [["old", "duplicate"]],
        "error": [],
    }


def test_rival_pushes_of_one_id_store_it_once(play: Play) -> None:
    result = play("push.rivals", count=20)
    assert result["statuses"] == [["duplicate", "duplicate", "duplicate", "queued"]] * 20
    assert result["ids"] == [1] * 20
    assert sorted(result["popped"]) == list(range(20))
    assert result["total"] == 20


def test_a_thousand_messages_in_one_push_keep_their_order(play: Play) -> None:
    result = play("push.bulk", count=1000)
    assert result["queued"] == 1000
    assert result["numbers"] == list(range(1000))


@pytest.mark.parametrize(
    ("options", "flush"),
    [
        ({"message_count": 10, "time_millis": 60_000}, "queue"),
        ({"message_count": 10, "time_millis": 60_000}, "all"),
        ({"message_count": 1000, "time_millis": 100}, "none"),
    ],
    ids=["flushed by queue", "flushed all", "flushed by time"],
)
def test_buffered_messages_arrive_once(play: Play, options: dict[str, int], flush: str) -> None:
    result = play("push.buffered", count=25, options=options, flush=flush)
    assert result["buffered"] is True
    assert result["before"] > 0
    assert sorted(result["arrived"]) == list(range(25))
    # Client 1.0.0 sends what it buffered in several requests at once, which may overtake each other.
    if play.version != "1.0.0":
        assert result["arrived"] == list(range(25))
    assert result["total"] == 25
    assert result["left"] == 0


def test_closing_the_client_flushes_its_buffer(play: Play) -> None:
    assert play("push.buffered_at_close") == [0, 1, 2, 3, 4]
