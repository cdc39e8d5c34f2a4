"""POST /api/v1/push: what is taken, what is refused as a whole, and what each item is answered."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from tests.api.conftest import DEFAULT_TENANT, Api
from tests.broker import Broker, Response, wait_until
from tests.conftest import Database

NOBODY = "00000000-0000-0000-0000-000000000000"
UUID7 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}").fullmatch
WAITING = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"


def push(api: Api, body: Any) -> Response:
    return api.request("POST", "/api/v1/push", body)


def refused(api: Api, body: Any) -> str:
    """Return the error of a push that is refused as a whole."""
    response = push(api, body)
    assert response.status == 400
    assert list(response.json()) == ["error"]
    error = response.json()["error"]
    assert error.startswith("bad body: ")
    return str(error)


def data(api: Api, queue: str, **params: Any) -> list[Any]:
    return [message["data"] for message in api.broker.pop(queue, autoAck=True, batch=10_000, partitions=0, **params)]


# What is answered


def test_every_item_is_answered_in_its_place(api: Api, name: str) -> None:
    items = [
        {"queue": name, "partition": "a", "payload": 1, "transactionId": "one"},
        {"queue": f"{name}.other", "payload": 2},
        {"queue": name, "partition": "b", "payload": 3, "transactionId": "one"},
    ]
    response = push(api, {"items": items})
    assert response.status == 201
    results = response.json()
    assert [list(result) for result in results] == [
        ["index", "message_id", "transaction_id", "queueName", "status"],
    ] * 3
    assert [result["index"] for result in results] == [0, 1, 2]
    assert [result["queueName"] for result in results] == [name, f"{name}.other", name]
    assert [result["status"] for result in results] == ["queued"] * 3
    ids = [result["message_id"] for result in results]
    assert all(map(UUID7, ids))
    assert ids == sorted(set(ids))
    assert [result["transaction_id"] for result in results] == ["one", ids[1], "one"]


def test_no_items_are_no_work(api: Api) -> None:
    response = push(api, {"items": []})
    assert (response.status, response.body) == (201, b"[]")


def test_what_is_pushed_is_popped_in_order(api: Api, name: str) -> None:
    for start in range(0, 30, 10):
        api.broker.push([{"queue": name, "payload": n} for n in range(start, start + 10)])
    assert data(api, name) == list(range(30))


def test_the_ids_of_an_answer_are_those_of_the_messages(api: Api, name: str) -> None:
    results = api.broker.push([{"queue": name, "payload": n} for n in range(3)])
    messages = api.broker.pop(name)
    assert [message["id"] for message in messages] == [result["message_id"] for result in results]
    assert [message["transactionId"] for message in messages] == [result["transaction_id"] for result in results]


# Fields


@pytest.mark.parametrize("partition", [None, "missing"])
def test_no_partition_means_default(api: Api, name: str, partition: str | None) -> None:
    item = {"queue": name, "payload": 1} | ({"partition": None} if partition is None else {})
    api.broker.push([item])
    assert len(api.broker.pop(name, "Default")) == 1


def test_an_empty_partition_is_a_partition(api: Api, name: str) -> None:
    api.broker.push([{"queue": name, "partition": "", "payload": 1}])
    (message,) = api.broker.pop(name)
    assert message["partition"] == ""


@pytest.mark.parametrize("field", [{}, {"transactionId": None}])
def test_no_transaction_id_means_the_message_id(api: Api, name: str, field: dict[str, None]) -> None:
    (result,) = api.broker.push([{"queue": name, "payload": 1, **field}])
    assert result["transaction_id"] == result["message_id"]


def test_an_empty_transaction_id_is_a_key(api: Api, name: str) -> None:
    item = {"queue": name, "payload": 1, "transactionId": ""}
    first, second = api.broker.push([item, item])
    assert (first["transaction_id"], first["status"]) == ("", "queued")
    assert (second["transaction_id"], second["status"]) == ("", "duplicate")


def test_null_is_a_payload_and_nothing_is_none(api: Api, name: str) -> None:
    api.broker.push([{"queue": name, "payload": None}])
    assert data(api, name) == [None]
    assert "payload" in refused(api, {"items": [{"queue": name}]})
    assert "payload" in refused(api, {"items": [{"queue": name, "data": 1}]})


@pytest.mark.parametrize("trace", ["x", 5, None, [], "0b4d1f5e-2f6c-4f8e-9d63-5f0a2e6b1c77"])
def test_a_trace_id_is_ignored(api: Api, name: str, trace: Any) -> None:
    api.broker.push([{"queue": name, "payload": 1, "traceId": trace, "producerSub": trace}])
    (message,) = api.broker.pop(name)
    assert (message["traceId"], message["producerSub"]) == (None, None)


@pytest.mark.parametrize(
    "written, name_read",
    [
        (r"\u0061\u0026b", "a&b"),
        (r"a\/b", "a/b"),
        (r"a\"b\\c", 'a"b\\c'),
        (r"\u00fc\ud83d\ude00", "ü\U0001f600"),
        ("ü\U0001f600", "ü\U0001f600"),
        (r"\u007f\u0080", "\x7f\x80"),
    ],
)
def test_names_and_ids_may_be_written_with_escapes(api: Api, name: str, written: str, name_read: str) -> None:
    body = (
        f'{{"items":[{{"queue":"{name}{written}","partition":"{written}","transactionId":"{written}","payload":1}}]}}'
    )
    (result,) = push(api, body.encode()).json()
    assert (result["queueName"], result["transaction_id"]) == (name + name_read, name_read)
    (message,) = api.broker.pop(name + name_read, name_read)
    assert message["transactionId"] == name_read
    assert api.broker.ack(message)["success"] is True


# What is refused, and then as a whole


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"[]",
        b"null",
        b'"items"',
        b"{}",
        b'{"items":null}',
        b'{"items":{}}',
        b'{"items":"x"}',
        b'{"items":[null]}',
        b'{"items":[[]]}',
        b'{"items":[]} {}',
        b'{"items":[{"payload":1}]}',
        b'{"items":[{"queue":null,"payload":1}]}',
        b'{"items":[{"queue":1,"payload":1}]}',
        b'{"items":[{"queue":"q","payload":1,"partition":1}]}',
        b'{"items":[{"queue":"q","payload":1,"transactionId":1}]}',
    ],
)
def test_a_body_that_is_no_push_is_refused(api: Api, body: bytes) -> None:
    refused(api, body)


@pytest.mark.parametrize(
    "bad",
    [
        {"payload": None},
        {"queue": ""},
        {"queue": "x" * 256},
        {"partition": "x" * 256},
        {"transactionId": "x" * 65_536},
        {"queue": "a\x00"},
        {"partition": "\x1f"},
        {"transactionId": "a\nb"},
        {"queue": "\ud800"},
        {"partition": "\udfff"},
        {"transactionId": "\ud800"},
        {"queue": 7},
    ],
)
def test_one_bad_item_refuses_them_all(api: Api, name: str, bad: dict[str, Any]) -> None:
    items: list[dict[str, Any]] = [{"queue": name, "payload": n} for n in range(3)]
    items[1].update(bad)
    if bad == {"payload": None}:
        del items[1]["payload"]
    refused(api, {"items": items})
    assert data(api, name) == []


def test_a_refusal_names_the_item_and_its_fault(api: Api, name: str) -> None:
    good = {"queue": name, "payload": 1}

    def error(**fields: Any) -> str:
        return refused(api, {"items": [good, {**good, **fields}]})

    assert error(queue="").startswith("bad body: queue of item 1 ")
    assert error(queue="x" * 256).startswith("bad body: queue of item 1 ")
    assert error(partition="x" * 256).startswith("bad body: partition of item 1 ")
    assert error(transactionId="ü" * 32_768) == "bad body: transactionId of item 1 exceeds the 65535-byte limit"
    for field in ("queue", "partition", "transactionId"):
        assert error(**{field: "a\tb"}).startswith(
            "bad body: control characters are not allowed in queue, partition or transactionId"
        )


def test_the_longest_names_and_ids_are_taken(api: Api, name: str) -> None:
    queue = name + "\U0001f600" * (255 - len(name))
    partition = "\U0001f601" * 255
    for key in ("x" * 65_535, "ü" * 32_767, "\U0001f600" * 16_383):
        (result,) = api.broker.push([{"queue": queue, "partition": partition, "payload": 1, "transactionId": key}])
        assert (result["status"], result["transaction_id"]) == ("queued", key)
        (message,) = api.broker.pop(queue, partition)
        assert message["transactionId"] == key
        assert api.broker.ack(message)["success"] is True


# Duplicates


def test_a_repeat_within_a_request_is_a_duplicate_of_the_first(api: Api, name: str) -> None:
    items = [{"queue": name, "payload": n, "transactionId": key} for n, key in enumerate("abaab")]
    results = api.broker.push(items)
    assert [result["status"] for result in results] == ["queued", "queued", "duplicate", "duplicate", "duplicate"]
    ids = [result["message_id"] for result in results]
    assert ids == [ids[0], ids[1], ids[0], ids[0], ids[1]]
    assert data(api, name) == [0, 1]


def test_a_repeat_names_the_original_and_costs_its_neighbours_nothing(api: Api, name: str) -> None:
    originals = api.broker.push([{"queue": name, "payload": n, "transactionId": str(n)} for n in range(3)])
    results = api.broker.push([{"queue": name, "payload": n, "transactionId": str(n)} for n in range(6)])
    assert [result["status"] for result in results] == ["duplicate"] * 3 + ["queued"] * 3
    assert [r["message_id"] for r in results[:3]] == [r["message_id"] for r in originals]
    assert data(api, name) == [0, 1, 2, 3, 4, 5]


def test_an_id_is_known_after_its_message_was_acked(api: Api, name: str) -> None:
    item = {"queue": name, "payload": 1, "transactionId": "t"}
    (original,) = api.broker.push([item])
    assert data(api, name) == [1]
    (repeat,) = api.broker.push([item])
    assert (repeat["status"], repeat["message_id"]) == ("duplicate", original["message_id"])


def test_the_original_of_a_repeat_may_be_gone(api: Api, name: str) -> None:
    item = {"queue": name, "payload": 1, "transactionId": "t"}
    api.broker.push([item])
    api.sql.execute(
        "DELETE FROM queen.log_segments s USING queen.log_partitions p, queen.queues q"
        " WHERE s.partition_id = p.id AND p.queue_id = q.id AND q.name = %s",
        (name,),
    )
    (repeat,) = api.broker.push([item])
    assert (repeat["status"], repeat["message_id"]) == ("duplicate", NOBODY)


def test_an_id_is_known_in_its_partition_alone(api: Api, name: str) -> None:
    places = [(name, "a"), (name, "b"), (f"{name}.other", "a")]
    items = [{"queue": q, "partition": p, "payload": 1, "transactionId": "t"} for q, p in places]
    assert [result["status"] for result in api.broker.push(items)] == ["queued"] * 3


def test_ids_differ_in_case_and_in_every_byte(api: Api, name: str) -> None:
    keys = ["a", "A", "a ", " a", "", "ä", "a\u0308"]
    results = api.broker.push([{"queue": name, "payload": 1, "transactionId": key} for key in keys])
    assert [result["status"] for result in results] == ["queued"] * len(keys)


def test_with_no_window_only_a_request_knows_its_own_ids(api: Api, name: str) -> None:
    api.post("/api/v1/configure", {"queue": name, "options": {"dedupWindowSeconds": 0}})
    item = {"queue": name, "payload": 1, "transactionId": "t"}
    for _ in range(2):
        assert [result["status"] for result in api.broker.push([item, item])] == ["queued", "duplicate"]
    assert data(api, name) == [1, 1]


def test_after_the_window_an_id_is_new(api: Api, name: str) -> None:
    api.post("/api/v1/configure", {"queue": name, "options": {"dedupWindowSeconds": 1}})
    item = {"queue": name, "payload": 1, "transactionId": "t"}
    api.broker.push([item])
    assert api.broker.push([item])[0]["status"] == "duplicate"
    wait_until(lambda: api.broker.push([item])[0]["status"] == "queued", 5, "the id is accepted again")


def test_of_concurrent_pushes_of_one_id_one_is_queued(api: Api, name: str) -> None:
    item = {"queue": name, "payload": 1, "transactionId": "t"}
    with ThreadPoolExecutor(16) as pool:
        results = [future.result()[0] for future in [pool.submit(api.broker.push, [item]) for _ in range(16)]]
    assert sorted(result["status"] for result in results) == ["duplicate"] * 15 + ["queued"]
    assert len({result["message_id"] for result in results}) == 1
    assert data(api, name) == [1]


# Provisioning


@pytest.mark.parametrize(
    "suffix, namespace, task",
    [("", "{}", ""), (".b", "{}", "b"), (".b.c", "{}", "b"), (".", "{}", ""), ("..x", "{}", "")],
)
def test_a_push_makes_queue_and_partition(api: Api, name: str, suffix: str, namespace: str, task: str) -> None:
    api.broker.push([{"queue": name + suffix, "partition": "p", "payload": 1}])
    row = api.one(
        "SELECT namespace, task, lease_time, retry_limit, dead_letter_queue, dedup_window_seconds, retention_enabled,"
        " encryption_enabled FROM queen.queues WHERE tenant_id = %s AND name = %s",
        DEFAULT_TENANT,
        name + suffix,
    )
    assert row == (namespace.format(name), task, 60, 3, True, 3600, False, False)


def test_a_push_leaves_a_configured_queue_as_it_is(api: Api, name: str) -> None:
    api.post("/api/v1/configure", {"queue": name, "namespace": "n", "options": {"leaseTime": 7}})
    api.broker.push([{"queue": name, "payload": 1}])
    assert api.one("SELECT namespace, lease_time FROM queen.queues WHERE name = %s", name) == ("n", 7)


# Failures of the database


def refuse_segments_of(sql: psycopg.Connection[Any], partition: str) -> None:
    sql.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " IF EXISTS (SELECT FROM queen.log_partitions WHERE id = NEW.partition_id AND name = TG_ARGV[0])"
        " THEN RAISE 'refused'; END IF; RETURN NEW; END $$"
    )
    trigger = "CREATE TRIGGER refuse BEFORE INSERT ON queen.log_segments FOR EACH ROW EXECUTE FUNCTION refuse('{}')"
    sql.execute(trigger.format(partition).encode())


def test_a_segment_that_fails_costs_its_neighbours_nothing(broker: Broker, database: Database) -> None:
    with database.connect() as sql:
        refuse_segments_of(sql, "bad")
    items = [{"queue": "q", "partition": p, "payload": p, "transactionId": p} for p in ("a", "bad", "b")]
    results = broker.push([*items, items[1]])
    assert [result["status"] for result in results] == ["queued", "buffered", "queued", "buffered"]
    assert sorted(message["data"] for message in broker.pop("q", partitions=10)) == ["a", "b"]


def test_a_client_that_leaves_does_not_stop_its_push(broker: Broker, database: Database) -> None:
    broker.push([{"queue": "q", "payload": 1}])
    body = json.dumps({"items": [{"queue": "q", "payload": 2}]}).encode()
    with database.connect() as sql, database.connect() as watch:
        with sql.transaction():
            sql.execute("SELECT FROM queen.log_partitions FOR UPDATE")
            with broker.connect() as client:
                head = f"POST /api/v1/push HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
                client.sendall(head.encode() + body)
                wait_until(lambda: watch.execute(WAITING).fetchone(), what="the push waits for the row")
        wait_until(
            lambda: watch.execute("SELECT 1 FROM queen.log_partitions WHERE last_offset = 1").fetchone(),
            what="the message is stored",
        )


def test_without_a_database_every_call_says_so_in_its_own_way(broker: Broker, database: Database) -> None:
    broker.push([{"queue": "q", "payload": 1}])
    (message,) = broker.pop("q")
    push_body = {"items": [{"queue": "q", "payload": n, "transactionId": t} for n, t in enumerate("aab")]}
    calls: list[tuple[str, str, Any]] = [
        ("POST", "/api/v1/push", push_body),
        ("GET", "/api/v1/pop/queue/new", None),
        ("GET", "/api/v1/pop/queue/q/partition/p", None),
        ("GET", "/api/v1/pop?namespace=q", None),
        ("GET", "/api/v1/pop/queue/newer?wait=true&timeout=500", None),
        ("POST", "/api/v1/ack", message),
        ("POST", f"/api/v1/lease/{message['leaseId']}/extend", None),
        ("POST", "/api/v1/transaction", {"operations": [{"type": "push", "queue": "q", "payload": 1}]}),
        ("POST", "/api/v1/push", {"items": []}),
    ]
    with psycopg.connect(psycopg.conninfo.make_conninfo(database.conninfo, dbname="postgres"), autocommit=True) as sql:
        sql.execute(f"ALTER DATABASE {database.name} ALLOW_CONNECTIONS false".encode())
        sql.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (database.name,))
        left = b"SELECT count(*) FROM pg_stat_activity WHERE datname = %s"
        wait_until(lambda: sql.execute(left, (database.name,)).fetchone() == (0,), what="its connections have ended")
        with ThreadPoolExecutor(len(calls)) as pool:
            answers = [f.result() for f in [pool.submit(broker.request, *call) for call in calls]]
        sql.execute(f"ALTER DATABASE {database.name} ALLOW_CONNECTIONS true".encode())
    assert [answer.status for answer in answers] == [201, 500, 500, 500, 500, 200, 500, 500, 201]
    assert [result["status"] for result in answers[0].json()] == ["buffered"] * 3
    for answer in (*answers[1:5], *answers[6:8]):
        assert answer.json() == {"error": "pool"}
    assert answers[5].json()[0]["success"] is False
    assert answers[5].json()[0]["error"] in ("pool", "ack flush failed; lease will expire and redeliver")
    wait_until(lambda: broker.push([{"queue": "q", "payload": 1}])[0]["status"] == "queued", 20, "a push is queued")
