"""The routes of the maintenance flags, and what clients see under pop maintenance."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from queen.db.embedded import EmbeddedServer
from tests.api.conftest import Api
from tests.broker import Broker, Response, wait_until
from tests.conftest import Brokers

PUSH = "/api/v1/system/maintenance"
POP = "/api/v1/system/maintenance/pop"
SPOOL = {
    "bufferedMessages": 0,
    "bufferHealthy": True,
    "bufferStats": {
        "pendingCount": 0,
        "failedCount": 0,
        "dbHealthy": True,
        "failedFiles": {"count": 0, "totalBytes": 0, "totalMB": 0.0, "failoverCount": 0, "qos0Count": 0},
        "oldestAgeSeconds": 0.0,
        "quarantinedFiles": 0,
        "quarantinedEvents": 0,
        "writable": True,
    },
}


def test_push_maintenance_is_set_and_ended(api: Api) -> None:
    assert api.get(PUSH) == {"maintenanceMode": False, "popMaintenanceMode": False, **SPOOL}
    assert api.post(PUSH, {"enabled": True}) == {
        "maintenanceMode": True,
        "bufferedMessages": 0,
        "bufferHealthy": True,
        "message": "Maintenance mode ENABLED. All PUSHes routing to file buffer.",
    }
    assert api.get(PUSH) == {"maintenanceMode": True, "popMaintenanceMode": False, **SPOOL}
    assert api.get("/api/v1/system/shared-state") == {
        "enabled": False,
        "reason": "single_node_segments_broker",
        "maintenance_mode": True,
        "pop_maintenance_mode": False,
    }
    assert api.post(PUSH, {"enabled": False}) == {
        "maintenanceMode": False,
        "bufferedMessages": 0,
        "bufferHealthy": True,
        "message": "Maintenance mode DISABLED. Background processor will drain buffer to DB.",
    }


def test_pop_maintenance_is_set_and_ended(api: Api) -> None:
    off = "Pop maintenance mode is OFF. Normal operation."
    on = "Pop maintenance mode is ON. All POP operations return empty arrays."
    assert api.get(POP) == {"popMaintenanceMode": False, "message": off}
    assert api.post(POP, {"enabled": True}) == {
        "popMaintenanceMode": True,
        "message": "Pop maintenance mode ENABLED. All POP operations will return empty arrays.",
    }
    assert api.get(POP) == {"popMaintenanceMode": True, "message": on}
    assert api.get(PUSH)["popMaintenanceMode"] is True
    assert api.post(POP, {"enabled": False}) == {
        "popMaintenanceMode": False,
        "message": "Pop maintenance mode DISABLED. Normal operation resumed.",
    }


@pytest.mark.parametrize("path", [PUSH, POP])
@pytest.mark.parametrize("body", [{}, {"enabled": None}])
def test_a_body_must_say_what_to_do(api: Api, path: str, body: Any) -> None:
    response = api.request("POST", path, body)
    assert (response.status, response.json()) == (400, {"error": "enabled (boolean) is required"})


@pytest.mark.parametrize("path", [PUSH, POP])
@pytest.mark.parametrize("body", [b"", b"{", b"[true]", b"true", b'{"enabled":1}', b'{"enabled":"true"}', b"\xff"])
def test_a_body_of_another_kind_changes_nothing(api: Api, path: str, body: bytes) -> None:
    response = api.request("POST", path, body)
    assert response.status == 400
    assert response.json()["error"].startswith("bad body: ")
    assert api.get(PUSH)["maintenanceMode"] is False and api.get(PUSH)["popMaintenanceMode"] is False


def test_under_pop_maintenance_every_pop_is_empty_and_acks_go_on(api: Api, name: str) -> None:
    api.broker.push([{"queue": name, "payload": 1, "transactionId": "a"}])
    (message,) = api.broker.pop(name, consumerGroup="g", subscriptionMode="all", batch=1)
    api.broker.push([{"queue": name, "payload": 2, "transactionId": "b"}])
    api.post(POP, {"enabled": True})
    try:
        for target in (
            f"/api/v1/pop/queue/{name}?consumerGroup=other&subscriptionMode=all",
            f"/api/v1/pop/queue/{name}/partition/Default?consumerGroup=other",
            f"/api/v1/pop?namespace={name}&consumerGroup=other",
            f"/api/v1/pop/queue/{name}?consumerGroup=other&wait=true&timeout=50",
        ):
            response = api.request("GET", target)
            assert (response.status, response.body) == (204, b"")
            assert response.headers["Content-Length"] is None
        assert api.broker.ack(message, consumerGroup="g")["success"] is True
        bad = api.request("GET", f"/api/v1/pop/queue/{name}?batch=x")
        assert bad.status == 400
    finally:
        api.post(POP, {"enabled": False})
    assert [m["transactionId"] for m in api.broker.pop(name, consumerGroup="g")] == ["b"]


def test_a_waiting_pop_is_served_when_the_maintenance_ends(api: Api, name: str) -> None:
    api.broker.push([{"queue": name, "payload": 1, "transactionId": "a"}])
    api.post(POP, {"enabled": True})
    answers: list[Response] = []
    target = f"/api/v1/pop/queue/{name}?wait=true&timeout=60000&consumerGroup=g&subscriptionMode=all"
    waiting = threading.Thread(target=lambda: answers.append(api.request("GET", target)), daemon=True)
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive()
    api.post(POP, {"enabled": False})
    waiting.join(30)
    assert [answer.status for answer in answers] == [200]


def test_flags_outlive_a_broker(brokers: Brokers) -> None:
    broker = brokers()
    for path in (PUSH, POP):
        assert broker.request("POST", path, {"enabled": True}).status == 200
    broker.kill()
    broker.start(wait=False)
    assert _starts_with(broker) == (True, True)
    other = brokers()
    assert _memory(other) == (True, True)


def test_a_flip_without_the_database_is_a_clear_error(brokers: Brokers, embedded: EmbeddedServer) -> None:
    broker = brokers(postgres=embedded.environment())
    assert broker.request("POST", POP, {"enabled": True}).status == 200
    embedded.stop("immediate")
    response = broker.request("POST", PUSH, {"enabled": True})
    assert response.status == 503
    assert response.headers["Retry-After"]
    assert response.json()["error"].startswith("maintenance_mode was not set: ")
    answer = broker.request("GET", PUSH)
    assert answer.status == 200
    assert (answer.json()["maintenanceMode"], answer.json()["popMaintenanceMode"]) == (False, True)
    embedded.start()
    wait_until(lambda: broker.request("POST", PUSH, {"enabled": True}).status == 200, 30, "the flip is taken")


def _memory(broker: Broker) -> tuple[bool, bool]:
    """What a broker believes, without having it look."""
    state = broker.request("GET", "/api/v1/system/shared-state").json()
    return state["maintenance_mode"], state["pop_maintenance_mode"]


def _starts_with(broker: Broker) -> tuple[bool, bool]:
    """What a broker believes with its very first answer."""

    def first() -> Response | None:
        try:
            return broker.request("GET", "/api/v1/system/shared-state")
        except OSError:
            return None

    response = wait_until(lambda: (r := first()) is not None and r.status == 200 and r, 60, "a first answer")
    state = response.json()
    return state["maintenance_mode"], state["pop_maintenance_mode"]
