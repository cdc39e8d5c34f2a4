"""POST /api/v1/lease/:leaseId/extend: a lease grows, never shrinks, and is never brought back."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

import pytest

from tests.api.conftest import OTHER_TENANT, Api, segment
from tests.broker import Response, wait_until
from tests.conftest import Brokers, Database

KEYS = ["leaseId", "success", "renewed", "newExpiresAt", "expiresAt", "lease_expires_at"]
TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z").fullmatch


def extend(api: Api, lease: str, body: Any = None) -> Any:
    answer = api.post(f"/api/v1/lease/{segment(lease)}/extend", body)
    assert list(answer) == KEYS
    assert answer["leaseId"] == lease
    assert answer["newExpiresAt"] == answer["expiresAt"] == answer["lease_expires_at"]
    return answer


def nothing(lease: str) -> dict[str, Any]:
    return {"leaseId": lease, "success": False, "renewed": 0} | dict.fromkeys(KEYS[3:])


def leased(api: Api, name: str, seconds: int = 5) -> dict[str, Any]:
    api.broker.push([{"queue": name, "payload": 1}])
    (message,) = api.broker.pop(name, leaseSeconds=seconds)
    return message


def left(api: Api, lease: str) -> float:
    """How many seconds of a lease are left, the shortest first."""
    seconds = "SELECT extract(epoch FROM min(lease_expires_at) - now()) FROM queen.log_consumers WHERE worker_id = %s"
    return float(api.one(seconds, lease))


def test_an_extension_is_answered_three_times_over(api: Api, name: str) -> None:
    lease = leased(api, name)["leaseId"]
    answer = extend(api, lease, {"seconds": 120})
    assert (answer["success"], answer["renewed"]) == (True, 1)
    assert TIMESTAMP(answer["expiresAt"])
    stored = api.one("SELECT lease_expires_at FROM queen.log_consumers WHERE worker_id = %s", lease)
    assert datetime.fromisoformat(answer["expiresAt"]) == stored
    assert left(api, lease) == pytest.approx(120, abs=3)


@pytest.mark.parametrize(
    "body",
    [
        None,
        b"",
        b"{}",
        b"[]",
        b"5",
        b"null",
        b"nonsense",
        b"\xff",
        b'{"seconds":null}',
        b'{"seconds":"120"}',
        b'{"seconds":1.5}',
        b'{"seconds":1e400}',
        b'{"seconds":true}',
        b'{"seconds":[]}',
        b'{"seconds":NaN}',
        b'{"seconds":99999999999999999999}',
        b'{"seconds":' + b"9" * 400 + b"}",
        b'{"other":7}',
        b'{"seconds":' + b"[" * 10_000,
    ],
)
def test_what_names_no_seconds_means_sixty(api: Api, name: str, body: bytes | None) -> None:
    lease = leased(api, name)["leaseId"]
    assert extend(api, lease, body)["renewed"] == 1
    assert left(api, lease) == pytest.approx(60, abs=3)


@pytest.mark.parametrize("seconds", [0, -1, -(2**31) + 1, 1])
def test_less_than_a_second_is_one(api: Api, name: str, seconds: int) -> None:
    lease = leased(api, name, seconds=1)["leaseId"]
    assert extend(api, lease, {"seconds": seconds})["renewed"] == 1
    assert left(api, lease) <= 1


def test_an_extension_never_shortens(api: Api, name: str) -> None:
    lease = leased(api, name, seconds=600)["leaseId"]
    before = left(api, lease)
    assert extend(api, lease, {"seconds": 1})["success"] is True
    assert left(api, lease) == pytest.approx(before, abs=3)


def test_there_is_no_upper_limit_but_the_width(api: Api, name: str) -> None:
    lease = leased(api, name)["leaseId"]
    extend(api, lease, {"seconds": 2**31 - 1})
    assert left(api, lease) == pytest.approx(2**31 - 1, abs=5)


def test_one_call_extends_all_partitions_of_a_pop(api: Api, name: str) -> None:
    api.broker.push([{"queue": name, "partition": p, "payload": 1} for p in "abc"])
    messages = api.broker.pop(name, partitions=3, leaseSeconds=5)
    lease = messages[0]["leaseId"]
    api.broker.ack(messages[0])
    answer = extend(api, lease, {"seconds": 100})
    assert answer["renewed"] == 2
    assert left(api, lease) == pytest.approx(100, abs=3)


def test_the_earliest_expiry_is_told(api: Api, name: str) -> None:
    api.broker.push([{"queue": name, "partition": p, "payload": 1} for p in "ab"])
    messages = api.broker.pop(name, partitions=2, leaseSeconds=5)
    api.sql.execute(
        "UPDATE queen.log_consumers SET lease_expires_at = now() + interval '1 hour' WHERE partition_id = %s",
        (messages[0]["partitionId"],),
    )
    answer = extend(api, messages[0]["leaseId"], {"seconds": 60})
    stored = api.one(
        "SELECT min(lease_expires_at) FROM queen.log_consumers WHERE worker_id = %s", messages[0]["leaseId"]
    )
    assert (answer["renewed"], datetime.fromisoformat(answer["expiresAt"])) == (2, stored)


@pytest.mark.parametrize(
    "lease", ["nobody", "\x00", "\n", "a/b", "\U0001f600", "x" * 4000, "00000000-0000-0000-0000-000000000000"]
)
def test_an_unknown_lease_is_no_error(api: Api, lease: str) -> None:
    assert extend(api, lease) == nothing(lease)


def test_a_lease_that_was_acked_is_gone(api: Api, name: str) -> None:
    message = leased(api, name)
    api.broker.ack(message)
    assert extend(api, message["leaseId"]) == nothing(message["leaseId"])


def test_a_lease_that_expired_is_not_brought_back(api: Api, name: str) -> None:
    lease = leased(api, name, seconds=1)["leaseId"]
    wait_until(lambda: left(api, lease) < 0, what="the lease has expired")
    assert extend(api, lease) == nothing(lease)


def test_a_lease_of_another_tenant_is_unknown(api: Api, name: str) -> None:
    partition = api.make_partition(api.make_queue(name, OTHER_TENANT), sizes=(2,))
    api.make_lease(partition, "g", -1, 1)
    lease = str(api.one("SELECT worker_id FROM queen.log_consumers WHERE partition_id = %s", partition))
    assert extend(api, lease) == nothing(lease)


def test_a_lease_of_another_broker_is_extended(api: Api, name: str) -> None:
    partition = api.make_partition(api.make_queue(name), sizes=(2,))
    api.make_lease(partition, "g", -1, 1, seconds=5)
    lease = str(api.one("SELECT worker_id FROM queen.log_consumers WHERE partition_id = %s", partition))
    assert extend(api, lease, {"seconds": 90})["renewed"] == 1


def test_an_extended_lease_still_holds_and_can_be_acked(api: Api, name: str) -> None:
    message = leased(api, name, seconds=1)
    extend(api, message["leaseId"], {"seconds": 100})
    assert api.broker.pop(name, wait=True, timeout=1200) == []
    assert api.broker.ack(message)["success"] is True


def test_a_statement_that_fails_is_told(brokers: Brokers, database: Database) -> None:
    broker = brokers()
    broker.push([{"queue": "q", "payload": 1}])
    (message,) = broker.pop("q")

    def answer() -> Response:
        return broker.request("POST", f"/api/v1/lease/{message['leaseId']}/extend")

    with database.connect() as sql:
        sql.execute("ALTER TABLE queen.log_consumers RENAME TO hidden")
        assert answer().status == 500
        assert answer().json()["error"].startswith("renew failed: ")
        sql.execute("ALTER TABLE queen.hidden RENAME TO log_consumers")
    assert answer().json()["success"] is True
