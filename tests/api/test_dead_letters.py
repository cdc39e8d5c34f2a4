"""Dead letters over HTTP: listing, bulk removal, and removal of one message's."""

from __future__ import annotations

import threading
import uuid
from typing import Any

import pytest

from tests.api.conftest import OTHER_TENANT, Api, segment
from tests.broker import wait_until


def listed(api: Api, queue: str, query: str = "") -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = api.get(f"/api/v1/dlq?queue={segment(queue)}&{query}")["messages"]
    return messages


def ids(api: Api, queue: str, query: str = "") -> list[str]:
    """The transaction ids of a listing."""
    return [message["transactionId"] for message in listed(api, queue, query)]


# The listing.


def test_the_listing_shows_what_is_known_of_a_dead_letter(api: Api, name: str) -> None:
    partition = api.make_partition(api.make_queue(name), "eu-1")
    letter = api.make_dead_letter(
        partition,
        "order-7",
        consumer_group="billing",
        offset=41,
        error="card declined",
        retry_count=3,
        payload='{"amount":41}',
        producer_sub="svc-a",
        pushed_at="2026-08-01T10:41:02.0109Z",
        failed_at="2026-08-01T12:52:11.4+02:00",
    )
    answer = api.get(f"/api/v1/dlq?queue={name}")
    assert answer == {
        "messages": [
            {
                "id": str(letter),
                "transactionId": "order-7",
                "partitionId": str(partition),
                "queue": name,
                "partition": "eu-1",
                "consumerGroup": "billing",
                "errorMessage": "card declined",
                "retryCount": 3,
                "data": {"amount": 41},
                "producerSub": "svc-a",
                "createdAt": "2026-08-01T10:41:02.010Z",
                "failedAt": "2026-08-01T10:52:11.400Z",
            }
        ],
        "pagination": {"limit": 100, "offset": 0},
        "total": 1,
    }


def test_what_is_not_known_has_a_stand_in(api: Api, name: str) -> None:
    partition = api.make_partition(api.make_queue(name, retry_limit=7))
    api.make_dead_letter(partition, "t", error=None, retry_count=None, payload=None, failed_at="2026-08-01T10:52:11.4Z")
    (message,) = listed(api, name)
    assert (message["errorMessage"], message["data"], message["producerSub"]) == (None, None, None)
    assert message["retryCount"] == 7
    assert message["createdAt"] == message["failedAt"] == "2026-08-01T10:52:11.400Z"


@pytest.mark.parametrize(
    "payload",
    [
        '{"a": 1.0, "a":2 ,"big":123456789012345678901234567890.5e-7}',
        r'"nul \u0000 and half \ud800"',
        '"ü ñ \u2028"',
        "[" * 500 + "]" * 500,
        "null",
    ],
)
def test_the_payload_comes_back_as_it_was_sent(api: Api, name: str, payload: str) -> None:
    api.make_dead_letter(api.make_partition(api.make_queue(name)), "t", payload=payload)
    body = api.request("GET", f"/api/v1/dlq?queue={name}").body
    assert f',"data":{payload}}}]'.encode() in body


def test_the_last_filed_comes_first(api: Api, name: str) -> None:
    partition = api.make_partition(api.make_queue(name))
    for day in (2, 3, 1):
        api.make_dead_letter(partition, str(day), failed_at=f"2026-08-0{day}")
    assert ids(api, name) == ["3", "2", "1"]


def test_pages_follow_each_other(api: Api, name: str) -> None:
    partition = api.make_partition(api.make_queue(name))
    for _ in range(5):
        api.make_dead_letter(partition, str(uuid.uuid4()), failed_at="2026-08-01")
    whole = ids(api, name)
    pages = [api.get(f"/api/v1/dlq?queue={name}&limit=2&offset={offset}") for offset in (0, 2, 4, 6)]
    assert [message["transactionId"] for page in pages for message in page["messages"]] == whole
    assert [page["total"] for page in pages] == [2, 2, 1, 0]
    assert pages[1]["pagination"] == {"limit": 2, "offset": 2}


def test_a_page_holds_a_hundred_unless_named(api: Api, name: str) -> None:
    partition = api.make_partition(api.make_queue(name))
    api.sql.execute(
        'INSERT INTO queen.log_dlq (partition_id, consumer_group, "offset", message_id, transaction_id)'
        " SELECT %s, 'g', n, gen_random_uuid(), n::text FROM generate_series(1, 101) n",
        (partition,),
    )
    assert len(ids(api, name)) == 100
    assert len(ids(api, name, "limit=many&offset=some")) == 100
    assert len(ids(api, name, "limit=1000")) == 101
    assert ids(api, name, "limit=0") == []


def test_every_filter_is_honoured(api: Api, name: str) -> None:
    queue = api.make_queue(name)
    for lane in ("a", "b"):
        partition = api.make_partition(queue, lane)
        for group in ("g", "h"):
            for day in (1, 2):
                api.make_dead_letter(
                    partition, f"{lane}{group}{day}", consumer_group=group, failed_at=f"2026-08-0{day}"
                )

    def found(query: str) -> set[str]:
        return set(ids(api, name, query))

    everything = found("")
    assert len(everything) == 8
    assert found("partition=a") == {"ag1", "ag2", "ah1", "ah2"}
    assert found("consumerGroup=g") == {"ag1", "ag2", "bg1", "bg2"}
    assert found("from=2026-08-02") == {"ag2", "ah2", "bg2", "bh2"}
    assert found("to=2026-08-01T23:59:59Z") == {"ag1", "ah1", "bg1", "bh1"}
    assert found("partition=b&consumerGroup=h&from=2026-08-01&to=2026-08-01") == {"bh1"}
    assert found("from=2026-08-03") == found("partition=c") == found("consumerGroup=i") == set()
    assert found("partition=&consumerGroup=&from=&to=&unknown=x") == everything
    assert ids(api, f"{name}-2") == []


def test_the_times_that_are_printed_find_their_letters(api: Api, name: str) -> None:
    partition = api.make_partition(api.make_queue(name))
    api.make_dead_letter(partition, "t", failed_at="2026-08-01T10:52:11.400999Z")
    printed = listed(api, name)[0]["failedAt"]
    assert ids(api, name, f"from={printed}&to={printed}") == ["t"]
    assert ids(api, name, "to=2026-08-01T10:52:11.399Z") == []


def test_without_queue_the_listing_shows_the_whole_tenant(api: Api, name: str) -> None:
    for number in (1, 2):
        api.make_dead_letter(api.make_partition(api.make_queue(f"{name}-{number}")), name)
    foreign = api.make_partition(api.make_queue(name, OTHER_TENANT))
    api.make_dead_letter(foreign, name)
    messages = api.get("/api/v1/dlq?limit=1000")["messages"]
    assert {m["queue"] for m in messages if m["transactionId"] == name} == {f"{name}-1", f"{name}-2"}
    assert ids(api, name) == []


def test_a_queue_with_any_name_can_be_asked_for(api: Api, name: str) -> None:
    queue = f"{name}/ü&? +%2F"
    api.make_dead_letter(api.make_partition(api.make_queue(queue)), "t")
    assert ids(api, queue) == ["t"]


@pytest.mark.parametrize("method", ["GET", "DELETE"])
@pytest.mark.parametrize("query", ["from=yesterweek", "to=2026-13-01", "queue=%00&from=now"])
def test_a_value_that_cannot_be_read_is_refused(api: Api, name: str, method: str, query: str) -> None:
    api.make_dead_letter(api.make_partition(api.make_queue(name)), "t")
    target = f"/api/v1/dlq?{query}" if "queue" in query else f"/api/v1/dlq?queue={name}&{query}"
    response = api.request(method, target)
    assert response.status == 400
    assert response.json()["error"].startswith("dlq failed: " if method == "GET" else "bulk dlq purge failed: ")
    assert ids(api, name) == ["t"]


@pytest.mark.parametrize("query", ["limit=-1", "offset=-1"])
def test_a_negative_page_is_refused(api: Api, query: str) -> None:
    response = api.request("GET", f"/api/v1/dlq?{query}")
    assert response.status == 400
    assert response.json()["error"].startswith("dlq failed: ")


def test_a_message_that_fails_too_often_is_listed(api: Api, name: str) -> None:
    api.post("/api/v1/configure", {"queue": name, "options": {"retryLimit": 0}})
    api.broker.push([{"queue": name, "partition": "p", "transactionId": "t/1", "payload": {"n": 1}}])
    (message,) = api.broker.pop(name, consumerGroup="g", subscriptionMode="all")
    assert api.broker.ack(message, "failed", consumerGroup="g", error="broken")["dlq"] is True
    (letter,) = listed(api, name)
    assert (letter["transactionId"], letter["partition"], letter["consumerGroup"]) == ("t/1", "p", "g")
    assert (letter["errorMessage"], letter["data"], letter["retryCount"]) == ("broken", {"n": 1}, 0)
    assert letter["createdAt"] == message["createdAt"][:23] + "Z"


# Bulk removal.


def test_a_purge_deletes_the_dead_letters_of_a_queue(api: Api, name: str) -> None:
    partition = api.make_partition(api.make_queue(name))
    other = api.make_partition(api.make_queue(f"{name}-2"))
    foreign = api.make_partition(api.make_queue(name, OTHER_TENANT))
    for lane in (partition, partition, other, foreign):
        api.make_dead_letter(lane, "t")
    response = api.request("DELETE", f"/api/v1/dlq?queue={name}")
    assert response.status == 200
    assert response.json() == {"success": True, "deleted": 2, "queue": name, "consumerGroup": None}
    assert [api.count("log_dlq", "partition_id = %s", lane) for lane in (partition, other, foreign)] == [0, 1, 1]


def test_a_purge_deletes_no_more_than_its_filters_ask_for(api: Api, name: str) -> None:
    queue = api.make_queue(name)
    for lane in ("a", "b"):
        partition = api.make_partition(queue, lane)
        for group in ("g", "h"):
            api.make_dead_letter(partition, f"{lane}{group}", consumer_group=group, failed_at="2026-08-01")

    def purge(query: str) -> int:
        answer = api.request("DELETE", f"/api/v1/dlq?queue={name}&{query}").json()
        assert answer["success"] is True
        return int(answer["deleted"])

    assert purge("consumerGroup=nobody") == 0
    assert purge("from=2026-08-02") == purge("to=2026-07-31") == 0
    assert purge("partition=a&consumerGroup=g") == 1
    assert set(ids(api, name)) == {"ah", "bg", "bh"}
    answer = api.request("DELETE", f"/api/v1/dlq?queue={name}&consumerGroup=h").json()
    assert answer == {"success": True, "deleted": 2, "queue": name, "consumerGroup": "h"}
    assert ids(api, name) == ["bg"]


@pytest.mark.parametrize("query", ["", "?queue=", "?consumerGroup=g", "?queue=&partition=a"])
def test_a_purge_without_queue_is_refused(api: Api, name: str, query: str) -> None:
    api.make_dead_letter(api.make_partition(api.make_queue(name)), "t")
    response = api.request("DELETE", f"/api/v1/dlq{query}")
    assert response.status == 400
    assert response.json() == {
        "success": False,
        "error": "queue is required",
        "message": "Bulk DLQ purge requires an exact queue name",
    }
    assert ids(api, name) == ["t"]


def test_a_purge_of_an_unknown_queue_deletes_nothing(api: Api, name: str) -> None:
    response = api.request("DELETE", f"/api/v1/dlq?queue={name}")
    assert (response.status, response.json()["deleted"]) == (200, 0)


def test_purges_at_once_do_not_deadlock(api: Api, name: str) -> None:
    partition = api.make_partition(api.make_queue(name))
    letters = sorted(api.make_dead_letter(partition, str(number)) for number in range(20))
    deleted: list[int] = []

    def purge() -> None:
        deleted.append(api.request("DELETE", f"/api/v1/dlq?queue={name}").json()["deleted"])

    threads = [threading.Thread(target=purge) for _ in range(3)]
    with api.database.connect(autocommit=False) as holder:
        holder.execute("SELECT 1 FROM queen.log_dlq WHERE id = %s FOR UPDATE", (letters[10],))
        for thread in threads:
            thread.start()
        waits = "datname = current_database() AND cardinality(pg_blocking_pids(pid)) > 0"
        wait_until(lambda: api.one(f"SELECT count(*) FROM pg_stat_activity WHERE {waits}") == len(threads))
    for thread in threads:
        thread.join()
    assert sorted(deleted) == [0, 0, 20]


# One message.


def test_deleting_a_message_removes_the_dead_letters_of_every_group(api: Api, name: str) -> None:
    queue = api.make_queue(name)
    partition, other = api.make_partition(queue, "a"), api.make_partition(queue, "b")
    for lane, transaction, group in (
        (partition, "t", "g"),
        (partition, "t", "h"),
        (partition, "u", "g"),
        (other, "t", "g"),
    ):
        api.make_dead_letter(lane, transaction, consumer_group=group)
    response = api.request("DELETE", f"/api/v1/messages/{partition}/t")
    assert response.status == 200
    assert response.json() == {
        "success": True,
        "partitionId": str(partition),
        "transactionId": "t",
        "message": "Message deleted successfully",
    }
    left = {(message["partition"], message["transactionId"]) for message in listed(api, name)}
    assert left == {("a", "u"), ("b", "t")}


@pytest.mark.parametrize("transaction", ["order/7", "a%2Fb", "ü &?", "..", "retry"])
def test_a_message_is_addressed_by_one_encoded_segment(api: Api, name: str, transaction: str) -> None:
    partition = api.make_partition(api.make_queue(name))
    api.make_dead_letter(partition, transaction)
    response = api.request("DELETE", f"/api/v1/messages/{partition}/{segment(transaction)}")
    assert (response.status, response.json()["transactionId"]) == (200, transaction)
    assert ids(api, name) == []


def not_found(api: Api, partition: str, transaction: str) -> None:
    response = api.request("DELETE", f"/api/v1/messages/{partition}/{transaction}")
    assert response.status == 404
    assert response.json() == {
        "success": False,
        "partitionId": partition,
        "transactionId": transaction,
        "error": "Message not found",
        "message": "No dead-letter row for this address. "
        "Live messages live in immutable segments and cannot be deleted",
    }


def test_a_message_without_dead_letter_is_not_found(api: Api, name: str) -> None:
    api.broker.push([{"queue": name, "transactionId": "live", "payload": 1}])
    live = api.one(
        "SELECT p.id FROM queen.log_partitions p JOIN queen.queues q ON q.id = p.queue_id WHERE q.name = %s", name
    )
    not_found(api, str(live), "live")
    not_found(api, str(uuid.uuid4()), "t")
    not_found(api, "no-uuid", "t")
    assert len(api.broker.pop(name, consumerGroup="g", subscriptionMode="all")) == 1


def test_another_tenants_dead_letter_is_not_found(api: Api, name: str) -> None:
    partition = api.make_partition(api.make_queue(name, OTHER_TENANT))
    api.make_dead_letter(partition, "t")
    not_found(api, str(partition), "t")
    assert api.count("log_dlq", "partition_id = %s", partition) == 1
    assert api.one("SELECT queen.delete_dead_letter_v1(%s, %s, 't')", OTHER_TENANT, partition) == 1
