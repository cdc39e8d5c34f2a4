"""Two tenants on one broker: neither sees, changes or infers anything of the other."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import quote

import pytest

from queen.auth.levels import demand_of_route
from tests.auth.routes import NOBODY, every_route
from tests.broker import Broker, Response
from tests.conftest import Brokers

ANN, BOB = "aaaaaaaa-0000-4000-8000-000000000001", "bbbbbbbb-0000-4000-8000-000000000002"
TENANCY = {"QUEEN_TENANCY_HEADER": "1", "QUEEN_KV_TRUSTED_PROXY": "1"}
POP = "?batch=10&consumerGroup=g&subscriptionMode=all&leaseSeconds=300"


# What moves with the clock.
_MOVING = re.compile(r'("\w*(?:[Ll]ag|Age|[Ss]econds|timestamp)\w*" ?: ?)[^,}\]]+')

_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class Tenant:
    """What one tenant sends."""

    def __init__(self, broker: Broker, tenant: str | None) -> None:
        self.broker = broker
        self.headers = {} if tenant is None else {"x-queen-tenant": tenant}

    def send(self, method: str, path: str, body: Any = None) -> Response:
        return self.broker.request(method, path, body, self.headers)

    def push(self, queue: str, *ids: str) -> None:
        items = [{"queue": queue, "partition": "p", "transactionId": i, "payload": f"secret {i}"} for i in ids]
        assert self.send("POST", "/api/v1/push", {"items": items}).status == 201

    def pop(self, queue: str, parameters: str = POP) -> list[dict[str, Any]]:
        response = self.send("GET", f"/api/v1/pop/queue/{queue}{parameters}")
        messages: list[dict[str, Any]] = response.json()["messages"] if response.status == 200 else []
        return messages

    def ack(self, message: dict[str, Any], status: str = "completed") -> Any:
        body = {key: message[key] for key in ("transactionId", "partitionId", "leaseId")}
        answer = self.send("POST", "/api/v1/ack", {**body, "consumerGroup": "g", "status": status})
        return answer.json()[0]


def snapshot(tenant: Tenant) -> dict[str, Any]:
    """Return all that a tenant can read of itself, without what moves with the clock."""
    found = {}
    for route in every_route():
        if route.method == "GET" and demand_of_route("GET", route.rule).scoped and "/pop" not in route.rule:
            for queue in ("orders", "extra"):
                path = route.path(queue=queue, group="g")
                response = tenant.send("GET", path)
                text = _MOVING.sub(r"\1_", response.body.decode())
                found[path] = (response.status, text)
    return found


def test_no_route_lets_a_tenant_reach_anothers(brokers: Brokers) -> None:
    broker = brokers(TENANCY)
    ann, bob, empty = Tenant(broker, ANN), Tenant(broker, BOB), Tenant(broker, "cccccccc-0000-4000-8000-000000000003")
    ann.push("orders", "t1", "t2", "t3", "t4")
    ann.push("hidden", "h1")
    first = ann.pop("orders")[0]
    assert ann.ack(first, "dlq")["success"]
    last = ann.pop("orders")[-1]  # giving a message up ended the lease on the rest
    assert [m["transactionId"] for m in (first, last)] == ["t1", "t4"]
    bob.push("orders", "b1")
    bobs = bob.pop("orders")
    before = snapshot(ann)
    letters = json.loads(before["/api/v1/dlq"][1])["messages"]
    assert len(letters) == 1

    addresses = {
        "partition_id": last["partitionId"],
        "transaction_id": "t1",
        "lease_id": last["leaseId"],
        "queue": "hidden",
        "partition": "p",
        "group": "g",
        "id": str(letters[0].get("id", NOBODY)),
    }
    item = {"transactionId": "t4", "partitionId": last["partitionId"], "leaseId": last["leaseId"], "consumerGroup": "g"}
    bodies: list[Any] = [
        {},
        {"queue": "hidden", "partition": "p", "enabled": False, "timestamp": "2020-01-01T00:00:00Z", "seconds": 900},
        {**item, "status": "completed"},
        {"acknowledgments": [{**item, "status": status} for status in ("completed", "failed", "dlq")]},
        {"operations": [{"type": "ack", **item}], "requiredLeases": [last["leaseId"]]},
        {"toEnd": True},
    ]
    seen = []
    for route in every_route():
        demand = demand_of_route(route.method, route.rule)
        if not demand.scoped:
            continue
        path = route.path(**{name: quote(value, safe="") for name, value in addresses.items()})
        for body in bodies if route.method != "GET" else [None]:
            response = empty.send(route.method, path, body)
            text = response.body.decode()
            # Nobody learns a payload, an id or a name beyond what they sent themselves.
            for secret in ("secret t", "secret h", '"b1"', '"t2"', '"t3"', ANN, BOB):
                assert secret not in text, (route, body, text)
            assert response.status < 500, (route, body, text)
            if re.search("<(partition_id|lease_id|id)>", route.rule):
                ghost = {name: quote(value, safe="") for name, value in addresses.items()}
                for name, value in (("partition_id", NOBODY), ("lease_id", NOBODY), ("id", NOBODY)):
                    ghost[name] = value
                absent = empty.send(route.method, route.path(**ghost), body)
                assert absent.status == response.status, (route, body)
                assert _UUID.sub("", absent.body.decode()) == _UUID.sub("", text), (route, body)
        seen.append(route)
    assert len(seen) > 20
    assert snapshot(ann) == before
    # Leases still stand: theirs, and nobody else's.
    assert ann.pop("orders") == [] and bob.pop("orders") == []
    assert ann.ack(last)["success"] and bob.ack(bobs[0])["success"]
    # Nor does the default tenant, whom a request without header acts for, see any of it.
    default = Tenant(broker, None)
    assert "orders" not in default.send("GET", "/api/v1/resources/queues").body.decode()
    assert default.pop("orders") == []


def test_an_ack_of_anothers_partition_is_like_one_of_none_every_time(brokers: Brokers) -> None:
    broker = brokers(TENANCY)
    ann, bob = Tenant(broker, ANN), Tenant(broker, BOB)
    ann.push("q", "t1", "t2")
    one, two = ann.pop("q")
    foreign = bob.ack(one)
    assert not foreign["success"]
    assert ann.ack(one)["success"]  # whose it is is remembered from here on, for its owner only
    again = bob.ack(two)
    nothing = bob.ack({**two, "partitionId": NOBODY})
    assert {**again, "partitionId": ""} == {**nothing, "partitionId": ""} and not again["success"]
    assert ann.ack(two)["success"]
    assert bob.send("POST", f"/api/v1/lease/{two['leaseId']}/extend", {"seconds": 900}).json()["renewed"] == 0


def test_a_push_wakes_no_pop_of_another_tenant(brokers: Brokers) -> None:
    broker = brokers(TENANCY)
    ann, bob = Tenant(broker, ANN), Tenant(broker, BOB)
    ann.push("q", "a1")
    assert [m["transactionId"] for m in bob.pop("q", POP + "&wait=true&timeout=300")] == []
    bob.push("q", "b1")
    assert [m["transactionId"] for m in bob.pop("q", POP + "&wait=true&timeout=20000")] == ["b1"]


def test_a_malformed_tenant_is_refused(tenancy_broker: Broker) -> None:
    bare = ANN.replace("-", "")
    for value in (
        "x",
        bare,
        f"{{{ANN}}}",
        f"urn:uuid:{ANN}",
        f"{ANN}0",
        f"{ANN[:-1]}g",
        f"{ANN},{ANN}",
        ",",
        "\xe9",
        f"\xa0{ANN}",
    ):
        response = tenancy_broker.request("GET", "/api/v1/dlq", headers={"x-queen-tenant": value})
        assert response.status == 400, value
        assert response.json() == {"error": "invalid x-queen-tenant header (must be a UUID)"}


def test_a_tenant_may_be_blank_padded_or_in_capitals_but_not_twice(tenancy_broker: Broker) -> None:
    ann = Tenant(tenancy_broker, ANN)
    ann.push("caps", "c1")
    for value in (ANN.upper(), f"  {ANN}\t"):
        response = tenancy_broker.request("GET", "/api/v1/resources/queues/caps", headers={"x-queen-tenant": value})
        assert response.status == 200
    for value in ("", "  "):
        response = tenancy_broker.request("GET", "/api/v1/resources/queues/caps", headers={"x-queen-tenant": value})
        assert response.status == 404
    with tenancy_broker.connect() as connection:
        header = f"x-queen-tenant: {ANN}\r\n"
        connection.sendall(f"GET /api/v1/dlq HTTP/1.1\r\nHost: x\r\n{header}{header}\r\n".encode())
        assert connection.recv(65536).startswith(b"HTTP/1.1 400 ")


def test_the_header_counts_for_nothing_when_tenancy_is_off(broker: Broker) -> None:
    Tenant(broker, ANN).push("q", "t1")
    assert len(Tenant(broker, None).pop("q")) == 1
    assert broker.request("GET", "/api/v1/dlq", headers={"x-queen-tenant": "nonsense"}).status == 200


def test_the_header_is_taken_from_the_proxys_network_only(brokers: Brokers) -> None:
    far = brokers({**TENANCY, "QUEEN_TRUSTED_PROXY_CIDRS": "10.0.0.0/8, 2001:db8::/32"})
    refused = far.request("GET", "/api/v1/dlq", headers={"x-queen-tenant": ANN})
    assert (refused.status, refused.json()) == (403, {"error": "tenant header not accepted from this peer"})
    assert (
        far.request("GET", "/api/v1/dlq", headers={"x-queen-tenant": ANN, "X-Forwarded-For": "10.1.1.1"}).status == 403
    )
    near = brokers({**TENANCY, "QUEEN_TRUSTED_PROXY_CIDRS": "127.0.0.0/8"})
    assert near.request("GET", "/api/v1/dlq", headers={"x-queen-tenant": ANN}).status == 200


@pytest.fixture
def tenancy_broker(brokers: Brokers) -> Broker:
    return brokers(TENANCY)
