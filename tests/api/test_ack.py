"""POST /api/v1/ack and /api/v1/ack/batch: where cursors go, and what each item is answered."""

from __future__ import annotations

import os
import uuid
from typing import Any

import pytest

from tests.api.conftest import Api
from tests.broker import wait_until
from tests.conftest import Brokers, Database

KEYS = ["index", "transactionId", "success", "error", "leaseReleased", "dlq", "noop"]
STALE = "already committed: the cursor moved past this message before this ack"
UNRESOLVED = (
    "unresolvable: transaction not in the ack window (hash purged or never pushed); if leased, the message redelivers"
)
NO_LEASE = "invalid or expired lease"


def ack(api: Api, body: Any) -> dict[str, Any]:
    answer = api.post("/api/v1/ack", body)
    assert [list(element) for element in answer] == [KEYS]
    element: dict[str, Any] = answer[0]
    return element


def ack_batch(api: Api, messages: list[dict[str, Any]], statuses: Any = "completed", **fields: Any) -> list[Any]:
    """Acknowledge messages in one call, with one status or one for each, and return the answer."""
    words = [statuses] * len(messages) if isinstance(statuses, str) else statuses
    items = [
        {name: message[name] for name in ("transactionId", "partitionId", "leaseId") if name in message}
        | {"status": word, "error": f"because of {message.get('transactionId')}"}
        for message, word in zip(messages, words, strict=True)
    ]
    answer: list[Any] = api.post("/api/v1/ack/batch", {"acknowledgments": items, **fields})
    assert [list(element) for element in answer] == [KEYS] * len(messages)
    assert [element["index"] for element in answer] == list(range(len(messages)))
    return answer


def result(success: bool = True, error: str | None = None, released: bool = False, **flags: bool) -> dict[str, Any]:
    """What an element should say beside its index and transaction id."""
    flags = {"dlq": False, "noop": False, **flags}
    return {"success": success, "error": error, "leaseReleased": released, **flags}


def said(element: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in element.items() if name not in ("index", "transactionId")}


def leased(api: Api, name: str, count: int = 4, **options: Any) -> list[dict[str, Any]]:
    """Push messages with transaction ids "0", "1" and so on, and pop them all."""
    if options:
        api.post("/api/v1/configure", {"queue": name, "options": options})
    api.broker.push([{"queue": name, "payload": n, "transactionId": str(n)} for n in range(count)])
    messages = api.broker.pop(name)
    assert len(messages) == count
    return messages


def pending(api: Api, name: str, **params: Any) -> list[Any]:
    """What the next pop delivers."""
    return [message["data"] for message in api.broker.pop(name, **params)]


def dead(api: Api, name: str) -> list[Any]:
    return [(m["data"], m["errorMessage"]) for m in api.get(f"/api/v1/dlq?queue={name}")["messages"]]


# Bodies


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"transactionId":1}',
        b'{"transactionId":null}',
        b'{"partitionId":1}',
        b'{"partitionId":null}',
        b'{"status":1}',
        b'{"consumerGroup":1}',
        b'{"leaseId":1}',
        b'{"error":{}}',
        b'{"transactionId":"\\ud800"}',
        b'{"partitionId":"\\ud800"}',
        b'{"leaseId":"\\ud800"}',
        b'{"status":"\\ud800"}',
        b'{"consumerGroup":"\\ud800"}',
        b'{"consumerGroup":"\\u0000"}',
        b'{"consumerGroup":"' + b"x" * 256 + b'"}',
    ],
)
def test_a_body_that_is_no_ack_is_refused(api: Api, body: bytes) -> None:
    response = api.request("POST", "/api/v1/ack", body)
    assert response.status == 400
    assert list(response.json()) == ["error"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"acknowledgments":null}',
        b'{"acknowledgments":{}}',
        b'{"acknowledgments":[null]}',
        b'{"acknowledgments":[[]]}',
        b'{"acknowledgments":[{"transactionId":1}]}',
        b'{"acknowledgments":[{},{"transactionId":"\\udc00"}]}',
        b'{"acknowledgments":[],"consumerGroup":1}',
    ],
)
def test_a_body_that_is_no_batch_is_refused(api: Api, body: bytes) -> None:
    response = api.request("POST", "/api/v1/ack/batch", body)
    assert response.status == 400
    assert list(response.json()) == ["error"]


@pytest.mark.parametrize("body", [{}, {"acknowledgments": []}, {"acknowledgments": [], "consumerGroup": None}])
def test_a_batch_of_nothing_is_answered_with_nothing(api: Api, body: Any) -> None:
    response = api.request("POST", "/api/v1/ack/batch", body)
    assert (response.status, response.body) == (200, b"[]")


@pytest.mark.parametrize(
    "text", ["", "nonsense", "0" * 31, "0" * 33, "00 " * 10 + "00", "\u0660" * 32, "x" * 10_000, "g" * 32]
)
def test_a_partition_id_that_is_none_fails_its_item_alone(api: Api, name: str, text: str) -> None:
    messages = leased(api, name, 2)
    messages[0]["partitionId"] = text
    broken, whole = ack_batch(api, messages)
    assert (broken["success"], type(broken["error"])) == (False, str)
    assert whole["success"] is True


def test_a_batch_reads_the_group_at_its_top_alone(api: Api, name: str) -> None:
    api.broker.push([{"queue": name, "payload": 1}])
    (message,) = api.broker.pop(name, consumerGroup="g", subscriptionMode="all")
    item = {key: message[key] for key in ("transactionId", "partitionId", "leaseId")}
    inside = api.post("/api/v1/ack/batch", {"acknowledgments": [{**item, "consumerGroup": "g"}]})
    assert inside[0]["error"] == "consumer not found"
    assert api.post("/api/v1/ack/batch", {"acknowledgments": [item], "consumerGroup": "g"})[0]["success"] is True


def test_absent_and_null_fields_take_their_defaults(api: Api, name: str) -> None:
    for fields in ({}, {"leaseId": None, "status": None, "consumerGroup": None, "error": None}, {"leaseId": ""}):
        api.broker.push([{"queue": name, "payload": 1}])
        (message,) = api.broker.pop(name)
        item = {key: message[key] for key in ("transactionId", "partitionId")}
        assert said(ack(api, {**item, **fields})) == result(released=True)


# Completed


@pytest.mark.parametrize("status", [None, "completed", "success", "acked", "ok"])
def test_a_word_for_completed_completes(api: Api, name: str, status: str | None) -> None:
    (message,) = leased(api, name, 1)
    assert said(ack(api, {**message, "status": status})) == result(released=True)
    assert (
        api.count("log_consumers", "partition_id = %s AND committed = 0 AND worker_id IS NULL", message["partitionId"])
        == 1
    )
    assert pending(api, name) == []


@pytest.mark.parametrize("status", ["failed", "", "Completed", "nack", "OK", " ok", "error"])
def test_any_other_word_fails_the_message(api: Api, name: str, status: str) -> None:
    (message,) = leased(api, name, 1)
    assert said(ack(api, {**message, "status": status})) == result(released=True)
    assert (
        api.one("SELECT batch_retry_count FROM queen.log_consumers WHERE partition_id = %s", message["partitionId"])
        == 1
    )
    assert pending(api, name) == [0]


def test_acking_the_whole_batch_ends_the_lease(api: Api, name: str) -> None:
    messages = leased(api, name)
    assert [said(element) for element in ack_batch(api, messages)] == [result(released=True)] * 4


def test_acking_a_part_keeps_the_lease(api: Api, name: str) -> None:
    messages = leased(api, name)
    assert [said(e) for e in ack_batch(api, messages[:2])] == [result()] * 2
    assert pending(api, name) == []
    assert [said(e) for e in ack_batch(api, messages[2:])] == [result(released=True)] * 2


def test_an_ack_completes_all_before_it(api: Api, name: str) -> None:
    messages = leased(api, name)
    assert said(ack(api, messages[2])) == result()
    assert said(ack(api, messages[0])) == result(noop=True)
    assert said(ack(api, {**messages[1], "status": "failed"})) == result(False, STALE)
    assert said(ack(api, messages[3])) == result(released=True)


def test_the_order_of_a_batch_does_not_matter(api: Api, name: str) -> None:
    messages = leased(api, name)
    assert [said(e) for e in ack_batch(api, messages[::-1])] == [result(released=True)] * 4
    assert pending(api, name) == []


def test_an_item_may_be_acked_twice_in_a_call(api: Api, name: str) -> None:
    messages = leased(api, name, 2)
    assert [said(e) for e in ack_batch(api, [*messages, messages[0]])] == [result(released=True)] * 3


def test_an_id_nobody_pushed_is_unresolvable(api: Api, name: str) -> None:
    messages = leased(api, name, 2)
    for key in ("nobody", "", "\x00", "\ue000", "x" * 100_000):
        assert said(ack(api, {**messages[0], "transactionId": key})) == result(False, UNRESOLVED)
    mixed = ack_batch(api, [{**messages[0], "transactionId": "nobody"}, *messages])
    assert [said(e) for e in mixed] == [result(False, UNRESOLVED)] + [result(released=True)] * 2


def test_a_message_behind_the_batch_is_unresolvable(api: Api, name: str) -> None:
    (message, *_) = leased(api, name, 2)
    api.broker.push([{"queue": name, "payload": 2, "transactionId": "later"}])
    assert said(ack(api, {**message, "transactionId": "later"})) == result(False, UNRESOLVED)


def test_partitions_of_a_batch_are_settled_each_for_itself(api: Api, name: str) -> None:
    api.broker.push([{"queue": name, "partition": p, "payload": p} for p in "ab"])
    messages = api.broker.pop(name, partitions=2)
    messages[0]["leaseId"] = str(uuid.uuid4())
    assert [said(e) for e in ack_batch(api, messages)] == [result(False, NO_LEASE), result(released=True)]


# Leases


def test_a_lease_ends_with_its_last_ack(api: Api, name: str) -> None:
    messages = leased(api, name, 2)
    ack_batch(api, messages)
    assert said(ack(api, messages[0])) == result(False, NO_LEASE)
    assert said(ack(api, {**messages[0], "leaseId": None})) == result(noop=True)
    assert said(ack(api, {**messages[0], "leaseId": "", "status": "failed"})) == result(False, STALE)


def test_a_lease_that_expired_moves_nothing(api: Api, name: str) -> None:
    api.broker.push([{"queue": name, "payload": 0}])
    (message,) = api.broker.pop(name, leaseSeconds=1)
    wait_until(
        lambda: api.one(
            "SELECT lease_expires_at < clock_timestamp() FROM queen.log_consumers WHERE worker_id = %s",
            message["leaseId"],
        ),
        what="the lease has expired",
    )
    for status in ("completed", "failed", "dlq"):
        assert said(ack(api, {**message, "status": status})) == result(False, NO_LEASE)
    assert dead(api, name) == []
    assert pending(api, name, wait=True, timeout=10_000) == [0]


@pytest.mark.parametrize("lease", ["x", "\x00", "0b4d1f5e-2f6c-4f8e-9d63-5f0a2e6b1c77", "\ufffd", "x" * 100_000])
def test_a_lease_of_nobody_is_invalid(api: Api, name: str, lease: str) -> None:
    (message,) = leased(api, name, 1)
    assert said(ack(api, {**message, "leaseId": lease})) == result(False, NO_LEASE)
    assert said(ack(api, message)) == result(released=True)


def test_a_group_that_never_popped_has_no_consumer(api: Api, name: str) -> None:
    (message,) = leased(api, name, 1)
    assert said(ack(api, {**message, "consumerGroup": "g"})) == result(False, "consumer not found")
    unknown = {**message, "partitionId": str(uuid.uuid4())}
    assert said(ack(api, unknown)) == result(False, "consumer not found")


def test_without_a_lease_the_ack_goes_unchecked(api: Api, name: str) -> None:
    messages = leased(api, name)
    assert said(ack(api, {**messages[3], "leaseId": None})) == result(released=True)
    assert pending(api, name) == []


@pytest.mark.parametrize("status", ["failed", "retry", "dlq"])
def test_a_nack_of_nothing_leased_says_so(api: Api, name: str, status: str) -> None:
    messages = leased(api, name, 2)
    ack(api, {**messages[0], "status": "retry"})
    assert said(ack(api, {**messages[0], "leaseId": None, "status": status})) == result(False, "no leased batch")
    assert pending(api, name) == [0, 1]
    assert dead(api, name) == []


# Nacks


def test_a_nack_redelivers_from_its_message_on(api: Api, name: str) -> None:
    messages = leased(api, name)
    answer = ack_batch(api, messages, ["completed", "completed", "failed", "completed"])
    assert [said(e) for e in answer] == [result(released=True)] * 4
    assert pending(api, name) == [2, 3]


def test_the_lowest_nack_counts(api: Api, name: str) -> None:
    messages = leased(api, name)
    ack_batch(api, messages, ["completed", "failed", "completed", "failed"])
    assert pending(api, name) == [1, 2, 3]


def test_a_retry_is_free(api: Api, name: str) -> None:
    (message,) = leased(api, name, 1, retryLimit=1)
    for _ in range(5):
        assert said(ack(api, {**message, "status": "retry"})) == result(released=True)
        (message,) = api.broker.pop(name)
    assert dead(api, name) == []


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_a_message_is_dead_after_its_retries(api: Api, name: str, limit: int) -> None:
    messages = leased(api, name, 2, retryLimit=limit)
    for attempt in range(limit + 1):
        assert [m["data"] for m in messages] == [0, 1]
        last = attempt == limit
        answer = ack(api, {**messages[0], "status": "failed", "error": f"attempt {attempt}"})
        assert said(answer) == result(released=True, dlq=last)
        messages = api.broker.pop(name)
    assert [m["data"] for m in messages] == [1]
    assert dead(api, name) == [(0, f"attempt {limit}")]


def test_a_completed_batch_gives_the_retries_back(api: Api, name: str) -> None:
    api.post("/api/v1/configure", {"queue": name, "options": {"retryLimit": 1}})
    for n in range(3):
        api.broker.push([{"queue": name, "payload": n}])
        (message,) = api.broker.pop(name)
        assert said(ack(api, {**message, "status": "failed"})) == result(released=True)
        (message,) = api.broker.pop(name)
        assert said(ack(api, message)) == result(released=True)
    assert dead(api, name) == []


@pytest.mark.parametrize(
    "options", [{"deadLetterQueue": False, "dlqAfterMaxRetries": False}, {"deadLetterQueue": False}]
)
def test_without_a_dead_letter_queue_the_message_is_dropped(api: Api, name: str, options: dict[str, bool]) -> None:
    messages = leased(api, name, 2, retryLimit=0, **options)
    filed = len(options) == 1
    assert said(ack(api, {**messages[0], "status": "failed"})) == result(released=True, dlq=filed)
    assert pending(api, name) == [1]
    assert len(dead(api, name)) == filed


def test_dlq_gives_up_at_once(api: Api, name: str) -> None:
    messages = leased(api, name, 3, deadLetterQueue=False, dlqAfterMaxRetries=False)
    answer = ack_batch(api, messages, ["completed", "dlq", "completed"])
    assert [said(e) for e in answer] == [result(released=True, dlq=dlq) for dlq in (False, True, False)]
    assert dead(api, name) == [(1, "because of 1")]
    assert pending(api, name) == [2]


def test_of_several_nacks_of_one_message_the_gravest_counts(api: Api, name: str) -> None:
    (message,) = leased(api, name, 1)
    ack_batch(api, [message] * 3, ["retry", "failed", "dlq"])
    assert len(dead(api, name)) == 1


def test_a_dead_letter_has_a_reason(api: Api, name: str) -> None:
    (message,) = leased(api, name, 1)
    ack(api, {**message, "status": "dlq", "error": ""})
    assert dead(api, name) == [(0, "Retries exhausted")]


@pytest.mark.parametrize(
    "sent, kept",
    [
        (rb"smtp 451\n\ttry later", "smtp 451\n\ttry later"),
        (rb"a\u0000b", "a\ufffdb"),
        (rb"cut \ud83d", "cut \ufffd"),
        ("ü\U0001f600\ue000".encode(), "ü\U0001f600\ue000"),
        (b"x" * 1_000_000, "x" * 1_000_000),
    ],
)
def test_any_reason_can_be_filed(api: Api, name: str, sent: bytes, kept: str) -> None:
    (message,) = leased(api, name, 1)
    body = b'{"transactionId":"0","partitionId":"%b","leaseId":"%b","status":"dlq","error":"%b"}'
    body %= (message["partitionId"].encode(), message["leaseId"].encode(), sent)
    (answer,) = api.post("/api/v1/ack", body)
    assert (answer["success"], answer["dlq"]) == (True, True)
    assert dead(api, name) == [(0, kept)]


@pytest.mark.parametrize(
    "payload", [b"1e400", b"9" * 400, b'{"a":1,"a":2}', rb'"\ud800\u0000"', b'[ 1 , "\\u0041" ]', b"null"]
)
def test_a_dead_payload_is_the_one_that_was_pushed(api: Api, name: str, payload: bytes) -> None:
    body = b'{"items":[{"queue":"%b","payload":%b,"transactionId":"t"}]}' % (name.encode(), payload)
    assert api.request("POST", "/api/v1/push", body).status == 201
    raw = api.request("GET", f"/api/v1/pop/queue/{name}").json()["messages"][0]
    assert ack(api, {**raw, "data": None, "status": "dlq"})["dlq"] is True
    assert b'"data":' + payload + b"}" in api.request("GET", f"/api/v1/dlq?queue={name}").body


def test_the_longest_names_and_ids_can_be_dead(api: Api, name: str) -> None:
    """None of them may break an index: they are random, so that nothing can be compressed."""

    def text(characters: int) -> str:
        return "".join(chr(0x10000 + int.from_bytes(os.urandom(2), "big")) for _ in range(characters))

    queue, partition, group, key = f"{name}{text(200)}", text(255), text(255), text(16_383)
    api.broker.push([{"queue": queue, "partition": partition, "payload": 1, "transactionId": key}])
    (message,) = api.broker.pop(queue, consumerGroup=group, subscriptionMode="all")
    answer = ack(api, {**message, "consumerGroup": group, "status": "dlq", "error": text(1000)})
    assert said(answer) == result(released=True, dlq=True)
    assert api.one("SELECT transaction_id FROM queen.log_dlq WHERE consumer_group = %s", group) == key


# Failures of the database


def test_a_statement_that_fails_fails_its_items_and_nothing_else(brokers: Brokers, database: Database) -> None:
    broker = brokers()
    broker.push([{"queue": "q", "partition": p, "payload": 1} for p in "ab"])
    messages = broker.pop("q", partitions=2)
    with database.connect() as sql:
        sql.execute(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'refused'; END $$;"
            "CREATE TRIGGER refuse BEFORE UPDATE ON queen.log_consumers FOR EACH ROW"
            f" WHEN (OLD.partition_id = '{messages[0]['partitionId']}') EXECUTE FUNCTION refuse()".encode()
        )
        body = {"acknowledgments": [{k: m[k] for k in ("transactionId", "partitionId", "leaseId")} for m in messages]}
        answer = broker.request("POST", "/api/v1/ack/batch", body).json()
        assert [(e["success"], e["error"]) for e in answer] == [(False, "refused"), (True, None)]


def test_a_dead_letter_that_cannot_be_filed_keeps_its_lease(brokers: Brokers, database: Database) -> None:
    broker = brokers()
    broker.push([{"queue": "q", "payload": 1}])
    (message,) = broker.pop("q")
    with database.connect() as sql:
        sql.execute("ALTER TABLE queen.log_dlq RENAME TO hidden")
        refused = broker.ack(message, "dlq")
        assert (refused["success"], refused["error"], refused["leaseReleased"]) == (False, "dlq rejected", False)
        sql.execute("ALTER TABLE queen.hidden RENAME TO log_dlq")
    assert broker.ack(message, "dlq")["dlq"] is True
