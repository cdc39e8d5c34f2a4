"""Encrypted queues through real brokers: nothing of them is stored in plain text, by whatever way it comes."""

from __future__ import annotations

from typing import Any

import pytest

from queen.engine import frames
from tests.broker import Broker
from tests.conftest import Brokers, Database

KEY = "00" * 31 + "0f"
OTHER = "11" * 32
SECRET = "attack at dawn"


def configure(broker: Broker, queue: str = "safe", **options: Any) -> None:
    body = {"queue": queue, "options": {"encryptionEnabled": True, **options}}
    answer = broker.request("POST", "/api/v1/configure", body)
    assert answer.status == 200, answer.body
    assert answer.json()["options"]["encryptionEnabled"] is True


def push(broker: Broker, *queues: str, payload: Any = SECRET) -> Any:
    return broker.request("POST", "/api/v1/push", {"items": [{"queue": q, "payload": payload} for q in queues]})


def stored(database: Database, queue: str = "safe") -> list[frames.Frame]:
    with database.connect() as connection:
        rows = connection.execute(
            "SELECT s.blob FROM queen.log_segments s JOIN queen.log_partitions p ON p.id = s.partition_id"
            " JOIN queen.queues q ON q.id = p.queue_id WHERE q.name = %s ORDER BY s.partition_id, s.base_offset",
            (queue,),
        ).fetchall()
    return [frame for (blob,) in rows for frame in frames.unpack(blob)]


def is_sealed(frame: frames.Frame) -> bool:
    return frame.encrypted and frame.payload.startswith(b'{"encrypted":"') and SECRET.encode() not in frame.payload


def popped(broker: Broker, queue: str = "safe", **parameters: Any) -> list[Any]:
    return [m["data"] for m in broker.pop(queue, subscriptionMode="all", **{"batch": 100, **parameters})]


@pytest.fixture
def keyed(brokers: Brokers) -> Broker:
    return brokers({"QUEEN_ENCRYPTION_KEY": KEY})


def test_pushes_are_stored_sealed_and_popped_as_sent(keyed: Broker, database: Database) -> None:
    configure(keyed)
    for payload in (SECRET, {"deep": [SECRET, 1.50]}, None, SECRET * 40_000):
        assert push(keyed, "safe", payload=payload).json()[0]["status"] == "queued"
    assert all(map(is_sealed, stored(database)))
    assert popped(keyed) == [SECRET, {"deep": [SECRET, 1.5]}, None, SECRET * 40_000]
    assert "encryption service initialized (AES-256-GCM)" in keyed.log()


def test_duplicates_are_found_in_an_encrypted_queue(keyed: Broker) -> None:
    configure(keyed)
    items = [{"queue": "safe", "payload": SECRET, "transactionId": "one"}]
    assert [keyed.push(items)[0]["status"] for _ in range(2)] == ["queued", "duplicate"]


def test_a_queue_that_another_broker_made_encrypted_gets_no_plain_text(
    keyed: Broker, brokers: Brokers, database: Database
) -> None:
    other = brokers({"QUEEN_ENCRYPTION_KEY": KEY})
    push(other, "safe", "open")
    assert [is_sealed(frame) for frame in stored(database)] == [False]
    configure(keyed)
    # It remembers a flag that is out of date: SQL must not take the segment as it is.
    assert [o["status"] for o in push(other, "safe", "open").json()] == ["queued", "queued"]
    assert [is_sealed(frame) for frame in stored(database)] == [False, True]
    assert [is_sealed(frame) for frame in stored(database, "open")] == [False, False]
    assert popped(keyed) == [SECRET, SECRET]


def test_transactions_store_sealed(keyed: Broker, brokers: Brokers, database: Database) -> None:
    other = brokers({"QUEEN_ENCRYPTION_KEY": KEY})
    body = {"operations": [{"type": "push", "items": [{"queue": q, "payload": SECRET} for q in ("safe", "open")]}]}
    assert other.request("POST", "/api/v1/transaction", body).json()["success"]
    configure(keyed)
    for broker in (other, keyed, other):
        assert broker.request("POST", "/api/v1/transaction", body).json()["success"]
    assert [is_sealed(frame) for frame in stored(database)] == [False, True, True, True]
    assert not any(map(is_sealed, stored(database, "open")))
    assert popped(other) == [SECRET] * 4


def test_dead_letters_are_filed_sealed_and_listed_as_sent(keyed: Broker, database: Database) -> None:
    configure(keyed)
    push(keyed, "safe")
    (message,) = keyed.pop("safe", subscriptionMode="all")
    assert keyed.ack(message, "dlq", error="no")["dlq"]
    with database.connect() as connection:
        payload, encrypted = connection.execute("SELECT payload, encrypted FROM queen.log_dlq").fetchall()[0]
    assert encrypted and SECRET not in payload
    (letter,) = keyed.request("GET", "/api/v1/dlq?queue=safe").json()["messages"]
    assert letter["data"] == SECRET


def test_a_broker_without_key_stores_nothing_in_an_encrypted_queue(
    keyed: Broker, brokers: Brokers, database: Database
) -> None:
    bare = brokers()
    configure(keyed)
    reason = {"error": "queue safe is encrypted and this broker has no QUEEN_ENCRYPTION_KEY"}
    transaction = {"operations": [{"type": "push", "items": [{"queue": "safe", "payload": SECRET}]}]}
    answers = [
        push(bare, "safe"),
        push(bare, "open", "safe"),  # nothing at all of the request is stored
        bare.request("POST", "/api/v1/transaction", transaction),
    ]
    assert [(a.status, a.json()) for a in answers] == [(400, reason)] * 3
    assert stored(database) == stored(database, "open") == []
    assert push(bare, "open").status == 201
    # With the queue's option off again it serves it at once: nothing old is held against it.
    keyed.request("POST", "/api/v1/configure", {"queue": "safe"})
    assert push(bare, "safe", "open").status == 201
    assert not any(map(is_sealed, stored(database)))


def test_a_broker_without_key_refuses_to_make_a_queue_encrypted(broker: Broker) -> None:
    answer = broker.request("POST", "/api/v1/configure", {"queue": "secret", "options": {"encryptionEnabled": True}})
    assert answer.status == 400
    assert "QUEEN_ENCRYPTION_KEY" in answer.json()["error"]
    assert broker.request("GET", "/api/v1/resources/queues/secret").status == 404


def test_the_wrong_key_hands_out_envelopes_and_former_keys_open_them(keyed: Broker, brokers: Brokers) -> None:
    configure(keyed)
    push(keyed, "safe")
    wrong = brokers({"QUEEN_ENCRYPTION_KEY": OTHER})
    assert list(popped(wrong, consumerGroup="a")[0]) == ["encrypted", "iv", "authTag"]
    rotated = brokers({"QUEEN_ENCRYPTION_KEY": OTHER, "QUEEN_ENCRYPTION_KEYS_OLD": KEY})
    push(rotated, "safe")
    assert popped(rotated, consumerGroup="b") == [SECRET, SECRET]


def test_an_unusable_key_refuses_to_boot_and_is_not_shown(brokers: Brokers) -> None:
    broken = brokers({"QUEEN_ENCRYPTION_KEY": "hunter2"}, wait=False)
    assert broken.wait_exit() != 0
    assert "FATAL: QUEEN_ENCRYPTION_KEY=<set:7 chars> is not 64 hexadecimal digits" in broken.log()
    assert "hunter2" not in broken.log()


def test_without_the_requirement_plain_text_is_stored_with_a_warning(
    keyed: Broker, brokers: Brokers, database: Database
) -> None:
    lax = brokers({"QUEEN_ENCRYPTION_KEY": "short", "QUEEN_ENCRYPTION_REQUIRED": "false"})
    configure(lax)
    assert push(lax, "safe").status == 201
    transaction = {"operations": [{"type": "push", "items": [{"queue": "safe", "payload": SECRET}]}]}
    assert lax.request("POST", "/api/v1/transaction", transaction).json()["success"]
    assert [is_sealed(frame) for frame in stored(database)] == [False, False]
    assert "encryption failed; stored plaintext queue=safe" in lax.log()
    assert "QUEEN_ENCRYPTION_KEY must be 64 hex chars; encryption DISABLED len=5" in lax.log()
    assert popped(keyed) == [SECRET, SECRET]


def test_a_broker_of_the_version_before_stores_nothing_in_an_encrypted_queue(keyed: Broker, database: Database) -> None:
    configure(keyed)
    push(keyed, "open")
    write = (
        "SELECT base_offset FROM queen.log_push_multi_v1(ARRAY['00000000-0000-0000-0000-000000000001'::uuid],"
        " ARRAY[%s], ARRAY['Default'], ARRAY[1], ARRAY[%s::bytea], ARRAY['x'::bytea], ARRAY[NULL::uuid],"
        " ARRAY[-1::bigint], ARRAY[0])"
    )
    with database.connect() as connection:
        assert connection.execute(write, ("open", bytes(16))).fetchone() == (1,)
        with pytest.raises(Exception, match='QENC queue "safe" is encrypted'):
            connection.execute(write, ("safe", bytes(16)))
        with pytest.raises(Exception, match="QUEEN_ENCRYPTION_KEY"):
            connection.execute(
                "SELECT queen.configure_queue_v1('x', '{\"encryptionEnabled\":true}'::jsonb,"
                " '00000000-0000-0000-0000-000000000001'::uuid, false)"
            )
