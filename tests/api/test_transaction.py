"""POST /api/v1/transaction: pushes and acks in one, all or nothing."""

from __future__ import annotations

import re
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.api.conftest import OTHER_TENANT, Api
from tests.conftest import Brokers, Database

UUID7 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}").fullmatch
NO_OPERATIONS = "transaction requires an operations array (or a top-level kv/timers array)"
UNKNOWN_ID = "QTXN ack references unknown transactionId; transaction rolled back"


def commit(api: Api, operations: Any, leases: Any = None, **more: Any) -> list[Any]:
    """Run a transaction that succeeds and return its results."""
    answer = api.post("/api/v1/transaction", body(operations, leases, **more))
    assert list(answer) == ["transactionId", "success", "results"]
    assert answer["success"] is True, answer
    assert UUID7(answer["transactionId"])
    results: list[Any] = answer["results"]
    assert [result["index"] for result in results] == list(range(len(results)))
    return results


def roll_back(api: Api, operations: Any, leases: Any = None, status: int = 200) -> tuple[str, str]:
    """Run a transaction that fails and return its reason and error."""
    response = api.request("POST", "/api/v1/transaction", body(operations, leases))
    assert response.status == status
    answer = response.json()
    assert list(answer) == ["transactionId", "success", "error", "results", "reason"]
    assert (answer["success"], answer["results"]) == (False, [])
    assert UUID7(answer["transactionId"])
    return answer["reason"], answer["error"]


def body(operations: Any, leases: Any = None, **more: Any) -> dict[str, Any]:
    return {"operations": operations} | ({} if leases is None else {"requiredLeases": leases}) | more


def ack_of(message: dict[str, Any], status: str | None = None, lease: bool = False) -> dict[str, Any]:
    """The operation that acks a popped message, with its lease on demand."""
    names = ["transactionId", "partitionId", *(["leaseId"] if lease else [])]
    operation = {"type": "ack", **{name: message[name] for name in names}}
    return operation | ({} if status is None else {"status": status})


def leased(api: Api, name: str, count: int = 2) -> list[dict[str, Any]]:
    api.broker.push([{"queue": name, "payload": n, "transactionId": str(n)} for n in range(count)])
    return api.broker.pop(name)


def stored(api: Api, name: str) -> list[Any]:
    """All that a queue holds, for a group that reads it anew."""
    group = str(uuid.uuid4())
    messages = api.broker.pop(name, partitions=0, batch=1000, consumerGroup=group, subscriptionMode="all", autoAck=True)
    return [message["data"] for message in messages]


# Shapes


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b'{"operations":[1]}', b'{"operations":[[]]}'])
def test_a_body_that_is_no_transaction_is_refused(api: Api, raw: bytes) -> None:
    response = api.request("POST", "/api/v1/transaction", raw)
    assert response.status == 400
    assert list(response.json()) == ["error"]
    assert response.json()["error"].startswith("bad body: ")


@pytest.mark.parametrize("operations", [None, {}, "x", 1, True])
def test_operations_are_an_array(api: Api, operations: Any) -> None:
    assert roll_back(api, operations, status=400) == ("bad_request", NO_OPERATIONS)


def test_operations_are_needed(api: Api) -> None:
    response = api.request("POST", "/api/v1/transaction", {})
    assert (response.status, response.json()["error"]) == (400, NO_OPERATIONS)


@pytest.mark.parametrize("kind", ["nack", "Push", "", "x" * 10_000])
def test_an_operation_of_another_type_refuses_all(api: Api, name: str, kind: str) -> None:
    operations = [{"type": "push", "queue": name, "payload": 1}, {"type": kind}]
    reason, error = roll_back(api, operations, status=400)
    assert reason == "bad_request"
    assert error.startswith(f"segments transaction supports only push and ack operations, got {kind[:50]}")
    assert len(error) < 200
    assert stored(api, name) == []


@pytest.mark.parametrize("kind", [None, 5, [], {}])
def test_an_operation_without_a_type_refuses_all(api: Api, kind: Any) -> None:
    assert roll_back(api, [{"type": kind}], status=400)[0] == "bad_request"
    assert roll_back(api, [{}], status=400)[0] == "bad_request"


@pytest.mark.parametrize("leases", [None, [], 5, "x", [1, None, "", {}], ["nobody"]])
def test_no_operations_commit_nothing(api: Api, leases: Any) -> None:
    assert commit(api, [], leases) == []


def test_other_keys_are_ignored(api: Api, name: str) -> None:
    operation = {"type": "push", "queue": name, "payload": 1, "priority": {}, "items": None}
    assert len(commit(api, [operation], comment=1)) == 1


# Pushes


def test_results_are_in_the_order_of_the_request(api: Api, name: str) -> None:
    first, second = leased(api, name)
    item = {"queue": f"{name}x", "payload": 1}
    operations = [
        ack_of(first),
        {"type": "push", "items": [{**item, "transactionId": "a"}, {**item, "partition": "p"}]},
        ack_of(second),
        {"type": "push", **item, "transactionId": "b"},
    ]
    results = commit(api, operations, [first["leaseId"]])
    assert [result["type"] for result in results] == ["ack", "push", "push", "ack", "push"]
    for result in results:
        names = ["error", "dlq"] if result["type"] == "ack" else ["messageId", "queueName"]
        assert list(result) == ["index", "type", "success", "transactionId", *names]
        assert result["success"] is True
    acks, pushes = [results[0], results[3]], [results[1], results[2], results[4]]
    assert [(a["transactionId"], a["error"], a["dlq"]) for a in acks] == [("0", None, False), ("1", None, False)]
    assert [p["queueName"] for p in pushes] == [f"{name}x"] * 3
    assert all(UUID7(p["messageId"]) for p in pushes)
    assert [p["transactionId"] for p in pushes] == ["a", pushes[1]["messageId"], "b"]
    assert sorted(stored(api, f"{name}x")) == [1, 1, 1]
    assert api.broker.pop(name) == []


@pytest.mark.parametrize(
    "fields, data",
    [
        ({"payload": 1, "data": 2}, 1),
        ({"data": 2}, 2),
        ({}, {}),
        ({"payload": None}, None),
        ({"payload": None, "data": 2}, None),
    ],
)
def test_a_push_without_payload_takes_data(api: Api, name: str, fields: dict[str, Any], data: Any) -> None:
    commit(api, [{"type": "push", "queue": name, **fields}])
    assert stored(api, name) == [data]


@pytest.mark.parametrize("partition", [None, 5, [], {}])
def test_a_partition_that_is_no_string_is_default(api: Api, name: str, partition: Any) -> None:
    commit(api, [{"type": "push", "queue": name, "partition": partition, "payload": 1}])
    assert len(api.broker.pop(name, "Default")) == 1


@pytest.mark.parametrize("key", [None, "", 5, []])
def test_no_transaction_id_means_the_message_id(api: Api, name: str, key: Any) -> None:
    (result,) = commit(api, [{"type": "push", "queue": name, "transactionId": key, "payload": 1}])
    assert result["transactionId"] == result["messageId"]


@pytest.mark.parametrize(
    "sent, kept",
    [
        ("0123456789abcdef0123456789abcdef", "01234567-89ab-cdef-0123-456789abcdef"),
        ("01234567-89AB-CDEF-0123-456789ABCDEF", "01234567-89ab-cdef-0123-456789abcdef"),
        ("nonsense", None),
        ("", None),
        ("{01234567-89ab-cdef-0123-456789abcdef}", None),
        ("01234567 89ab cdef 0123 456789abcdef", None),
        (5, None),
        (10**31, None),
        ([], None),
        (None, None),
    ],
)
def test_a_trace_id_is_kept_or_ignored(api: Api, name: str, sent: Any, kept: str | None) -> None:
    commit(api, [{"type": "push", "queue": name, "traceId": sent, "payload": 1}])
    assert [message["traceId"] for message in api.broker.pop(name)] == [kept]


def test_a_trace_id_beyond_all_numbers_is_ignored_too(api: Api, name: str) -> None:
    body = b'{"operations":[{"type":"push","queue":"%b","traceId":1e400,"payload":1}]}' % name.encode()
    assert api.broker.request("POST", "/api/v1/transaction", body).json()["success"] is True
    assert [message["traceId"] for message in api.broker.pop(name)] == [None]


@pytest.mark.parametrize(
    "bad",
    [
        {"queue": ""},
        {"queue": None},
        {"queue": 5},
        {"queue": "x" * 256},
        {"queue": "a\x00"},
        {"queue": "\ud800"},
        {"partition": "x" * 256},
        {"partition": "\n"},
        {"partition": "\udc00"},
        {"transactionId": "x" * 65_536},
        {"transactionId": "\x1f"},
        {"transactionId": "\udfff"},
    ],
)
def test_one_bad_push_refuses_all(api: Api, name: str, bad: dict[str, Any]) -> None:
    good = {"type": "push", "queue": name, "payload": 1}
    response = api.request("POST", "/api/v1/transaction", body([good, {**good, **bad}]))
    assert response.status == 400
    assert response.json()["error"].startswith("bad body: ")
    assert stored(api, name) == []


def test_the_payload_comes_back_byte_for_byte(api: Api, name: str) -> None:
    payload = rb'{"a":1e400,"a":[ 1.0,"\ud800\u0000\/" ]}'
    raw = b'{"operations":[{"type":"pu\\u0073h","items":[{"queue":"%b","payload":%b}]}]}' % (name.encode(), payload)
    assert api.request("POST", "/api/v1/transaction", raw).json()["success"] is True
    assert b'"data":' + payload + b"," in api.request("GET", f"/api/v1/pop/queue/{name}").body


def test_a_repeat_within_the_bundle_is_the_first(api: Api, name: str) -> None:
    item = {"queue": name, "payload": 1, "transactionId": "t"}
    results = commit(api, [{"type": "push", "items": [item, item]}, {"type": "push", **item, "partition": "p"}])
    assert [result.get("duplicate") for result in results] == [None, True, None]
    assert results[0]["messageId"] == results[1]["messageId"] != results[2]["messageId"]
    assert stored(api, name) == [1, 1]


def test_a_repeat_of_what_is_stored_rolls_back(api: Api, name: str) -> None:
    api.broker.push([{"queue": name, "payload": 0, "transactionId": "t"}])
    items = [{"queue": name, "partition": "p", "payload": 1}, {"queue": name, "payload": 2, "transactionId": "t"}]
    reason, error = roll_back(api, [{"type": "push", "items": items}])
    assert reason == "duplicate"
    assert error == f'QDUP duplicate messages in queue "{name}" partition "Default"; transaction rolled back'
    assert stored(api, name) == [0]


def test_of_concurrent_transactions_with_one_id_one_commits(api: Api, name: str) -> None:
    operations = [{"type": "push", "queue": name, "payload": 1, "transactionId": "t"}]
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(api.post, "/api/v1/transaction", body(operations)) for _ in range(8)]
        answers = [call.result() for call in calls]
    assert sorted(answer["success"] for answer in answers) == [False] * 7 + [True]
    assert {answer["reason"] for answer in answers if not answer["success"]} == {"duplicate"}
    assert stored(api, name) == [1]


# Acks


def test_an_ack_moves_the_cursor_with_the_push(api: Api, name: str) -> None:
    first, second = leased(api, name)
    commit(api, [ack_of(second, "completed"), {"type": "push", "queue": f"{name}x", "payload": 1}], [first["leaseId"]])
    assert api.broker.pop(name) == []
    assert stored(api, f"{name}x") == [1]


@pytest.mark.parametrize(
    "fields",
    [
        {"transactionId": 1},
        {"partitionId": 1},
        {"status": 1},
        {"consumerGroup": 1},
        {"leaseId": 1},
        {"error": 1},
        {"transactionId": "\ud800"},
        {"leaseId": "\ud800"},
        {"consumerGroup": "x" * 256},
        {"consumerGroup": "\x00"},
    ],
)
def test_a_field_of_an_ack_is_a_string(api: Api, name: str, fields: dict[str, Any]) -> None:
    (message,) = leased(api, name, 1)
    response = api.request("POST", "/api/v1/transaction", body([ack_of(message) | fields]))
    assert response.status == 400
    assert list(response.json()) == ["error"]


def test_an_empty_group_is_queue_mode(api: Api, name: str) -> None:
    (message,) = leased(api, name, 1)
    commit(api, [ack_of(message) | {"consumerGroup": ""}])
    assert api.broker.pop(name) == []


def test_each_ack_has_a_group_of_its_own(api: Api, name: str) -> None:
    (message,) = leased(api, name, 1)
    (other,) = api.broker.pop(name, consumerGroup="g", subscriptionMode="all")
    operations = [ack_of(message), ack_of(other) | {"consumerGroup": "g"}]
    assert len(commit(api, operations, [message["leaseId"], other["leaseId"]])) == 2


@pytest.mark.parametrize("partition", ["", "nonsense", "00 " * 10 + "00"])
def test_an_ack_of_no_partition_rolls_back(api: Api, name: str, partition: str) -> None:
    (message,) = leased(api, name, 1)
    operations = [{"type": "push", "queue": f"{name}x", "payload": 1}, ack_of(message) | {"partitionId": partition}]
    assert roll_back(api, operations) == (
        "ack_rejected",
        f"QTXN ack references partition {partition} not owned by this tenant",
    )
    assert stored(api, f"{name}x") == []


def test_an_ack_of_a_foreign_or_unknown_partition_rolls_back(api: Api, name: str) -> None:
    foreign = api.make_partition(api.make_queue(name, OTHER_TENANT), sizes=(1,))
    for partition in (foreign, uuid.uuid4()):
        operations = [
            {"type": "push", "queue": name, "payload": 1},
            {"type": "ack", "transactionId": "t", "partitionId": str(partition)},
        ]
        reason, error = roll_back(api, operations)
        assert (reason, error) == (
            "ack_rejected",
            f"QTXN ack references partition {partition} not owned by this tenant",
        )
    assert stored(api, name) == []


def test_an_ack_of_an_unknown_id_rolls_back(api: Api, name: str) -> None:
    first, second = leased(api, name)
    unknown = ack_of(second) | {"transactionId": "nobody"}
    push = {"type": "push", "queue": f"{name}x", "payload": 1}
    assert roll_back(api, [push, ack_of(first), unknown], [first["leaseId"]]) == ("ack_rejected", UNKNOWN_ID)
    assert stored(api, f"{name}x") == []
    assert api.broker.ack(first)["noop"] is False


def test_an_ack_of_a_group_without_cursor_rolls_back(api: Api, name: str) -> None:
    (message,) = leased(api, name, 1)
    reason, error = roll_back(api, [ack_of(message) | {"consumerGroup": "g"}])
    assert reason == "ack_rejected"
    assert error.startswith("QTXN ")


@pytest.mark.parametrize("status", ["completed", "failed", "dlq"])
def test_an_id_below_the_cursor_is_no_obstacle(api: Api, name: str, status: str) -> None:
    first, second = leased(api, name)
    api.broker.ack(first)
    (result,) = commit(api, [ack_of(first, status)], [second["leaseId"]])
    assert (result["success"], result["error"], result["dlq"]) == (True, None, False)
    assert api.get(f"/api/v1/dlq?queue={name}")["messages"] == []


# Leases


@pytest.mark.parametrize("where", ["operation", "required"])
def test_a_lease_of_nobody_rolls_back(api: Api, name: str, where: str) -> None:
    (message,) = leased(api, name, 1)
    stranger = str(uuid.uuid4())
    operation = ack_of(message) | ({"leaseId": stranger} if where == "operation" else {})
    reason, error = roll_back(api, [operation], [stranger] if where == "required" else [])
    assert reason == "ack_rejected"
    assert error.startswith("QTXN ")
    assert "lease" in error


def test_a_zombie_does_not_pass_for_the_new_holder(api: Api, name: str) -> None:
    (message,) = leased(api, name, 1)
    api.broker.ack(message, "retry")
    assert len(api.broker.pop(name)) == 1
    assert roll_back(api, [ack_of(message)], [message["leaseId"]])[0] == "ack_rejected"


def test_leases_of_several_pops_go_together(api: Api, name: str) -> None:
    api.broker.push([{"queue": name, "partition": p, "payload": p} for p in "ab"])
    messages = [api.broker.pop(name, p)[0] for p in "ab"]
    leases = [message["leaseId"] for message in messages]
    assert len(commit(api, [ack_of(message) for message in messages], leases)) == 2
    assert api.broker.pop(name, partitions=2) == []


def test_the_lease_of_an_operation_counts_before_all(api: Api, name: str) -> None:
    (message,) = leased(api, name, 1)
    commit(api, [ack_of(message, lease=True)], ["somebody else's"])
    assert api.broker.pop(name) == []


def test_with_no_lease_at_all_the_ack_goes_unchecked(api: Api, name: str) -> None:
    (message,) = leased(api, name, 1)
    commit(api, [ack_of(message)])
    commit(api, [ack_of(message)], [])
    assert api.broker.pop(name) == []


# Nacks


def test_a_nack_redelivers(api: Api, name: str) -> None:
    first, second = leased(api, name)
    results = commit(api, [ack_of(first), ack_of(second, "failed")], [first["leaseId"]])
    assert [result["dlq"] for result in results] == [False, False]
    assert [message["data"] for message in api.broker.pop(name)] == [1]


def test_a_message_can_be_given_up_while_another_is_pushed(api: Api, name: str) -> None:
    first, second = leased(api, name)
    operations = [
        ack_of(first),
        ack_of(second, "dlq") | {"error": "no\x00 good \ud83d"},
        {"type": "push", "queue": f"{name}x", "payload": 1},
    ]
    results = commit(api, operations, [first["leaseId"]])
    assert results[1]["dlq"] is True
    (letter,) = api.get(f"/api/v1/dlq?queue={name}")["messages"]
    assert (letter["data"], letter["errorMessage"]) == (1, "no\ufffd good \ufffd")
    assert stored(api, f"{name}x") == [1]


def test_what_rolls_back_files_no_dead_letter(api: Api, name: str) -> None:
    (message,) = leased(api, name, 1)
    api.broker.push([{"queue": f"{name}x", "payload": 1, "transactionId": "t"}])
    operations = [ack_of(message, "dlq"), {"type": "push", "queue": f"{name}x", "payload": 2, "transactionId": "t"}]
    assert roll_back(api, operations, [message["leaseId"]])[0] == "duplicate"
    assert api.get(f"/api/v1/dlq?queue={name}")["messages"] == []
    assert api.broker.ack(message)["success"] is True


# Failures of the database


def test_a_statement_that_fails_rolls_back(brokers: Brokers, database: Database) -> None:
    broker = brokers()
    broker.push([{"queue": "q", "payload": 1}])
    operations = [{"type": "push", "queue": "q", "payload": 2}]
    with database.connect() as sql:
        sql.execute("ALTER TABLE queen.log_segments RENAME TO hidden")
        response = broker.request("POST", "/api/v1/transaction", body(operations))
        assert (response.status, response.json()["success"], response.json()["reason"]) == (200, False, "db_error")
        sql.execute("ALTER TABLE queen.hidden RENAME TO log_segments")
    assert broker.request("POST", "/api/v1/transaction", body(operations)).json()["success"] is True
    assert [message["data"] for message in broker.pop("q")] == [1, 2]
