"""The walk-through of the reference stack, step by step."""

from __future__ import annotations

import hashlib

from tests.proxy.conftest import Stack

ITEM = {"queue": "orders", "partition": "customer-42", "payload": {"hello": "world"}}


def test_health_has_three_keys(stack: Stack) -> None:
    response = stack.proxy.request("GET", "/healthz")
    assert (response.status, response.body) == (200, b'{"enforce":false,"status":"ok","tenant_header":true}')


def test_key_is_only_kept_as_its_hash(stack: Stack) -> None:
    digest = hashlib.sha256(stack.acme.key.encode()).hexdigest()
    assert stack.control.one("SELECT count(*) FROM queen_proxy.api_keys WHERE key_hash = %s", digest) == 1
    assert len(stack.acme.key) == len("qk_live_") + 43


def test_push_and_pop_through_the_front_door(stack: Stack) -> None:
    pushed = stack.request("POST", "/api/v1/push", {"items": [ITEM]})
    assert pushed.status == 201, pushed
    assert [item["status"] for item in pushed.json()] == ["queued"]
    popped = stack.pop("orders", "batch=1&wait=true&consumerGroup=demo&subscriptionMode=all")
    assert popped.status == 200
    (message,) = popped.json()["messages"]
    assert (message["data"], message["partition"]) == ({"hello": "world"}, "customer-42")


def test_dropping_either_header_is_401(stack: Stack) -> None:
    anonymous = stack.request("POST", "/api/v1/push", {"items": [ITEM]}, Authorization="")
    assert (anonymous.status, anonymous.body) == (
        401,
        b'{"code":"unauthorized","error":"missing bearer credential"}',
    )
    wrong = stack.request("POST", "/api/v1/push", {"items": [ITEM]}, Authorization="Bearer qk_live_wrong")
    assert (wrong.status, wrong.json()["error"]) == (401, "unknown or revoked api key")
    nowhere = stack.request("POST", "/api/v1/push", {"items": [ITEM]}, Host="localhost:6711")
    assert (nowhere.status, nowhere.json()["code"]) == (401, "cluster_unknown")


def test_unclassified_routes_are_closed(stack: Stack) -> None:
    for path in (
        "/api/v1/pop",
        "/api/v1/status",
        "/api/v1/analytics/postgres-stats",
        "/metrics/prometheus",
        "/api/v1/nonesuch",
        "/internal/api/notify",
    ):
        response = stack.request("GET", path)
        assert (response.status, response.json()["code"]) == (404, "route_blocked"), path
