"""Two tenants under the same names: each has its own, whatever it says about itself."""

from __future__ import annotations

import threading

from tests.broker import wait_until
from tests.proxy.conftest import Stack

FORGED = {"X-Queen-Tenant": "00000000-0000-0000-0000-000000000001"}


def test_messages_carry_the_proxy_as_their_producer(stack: Stack) -> None:
    assert stack.push("signed", 1).status == 201
    (message,) = stack.pop("signed").json()["messages"]
    assert message["producerSub"] == "queen-proxy"


def test_brokers_refuse_who_goes_around_the_proxy(stack: Stack) -> None:
    body = {"items": [{"queue": "q", "payload": 1}]}
    assert stack.brokers[0].request("POST", "/api/v1/push", body).status == 401
    assert stack.brokers[0].request("GET", "/api/v1/resources/queues").status == 401


def test_same_names_are_different_queues(stack: Stack) -> None:
    other = stack.control.bootstrap("beside")
    for tenant, payload in ((stack.acme, "acme's"), (other, "beside's")):
        (answer,) = stack.push("shared", payload, tenant=tenant, transactionId="same").json()
        assert answer["status"] == "queued"
    (theirs,) = stack.pop("shared", tenant=other).json()["messages"]
    assert theirs["data"] == "beside's"
    (ours,) = stack.pop("shared").json()["messages"]
    assert ours["data"] == "acme's"
    names = [queue["name"] for queue in stack.request("GET", "/api/v1/resources/queues", None, other).json()["queues"]]
    assert names == ["shared"]

    ack = {name: ours[name] for name in ("partitionId", "transactionId", "leaseId")}
    forged = stack.request("POST", "/api/v1/ack", ack, other)
    assert forged.status >= 400 or not forged.json()[0]["success"]
    assert stack.request("POST", "/api/v1/ack", ack).json()[0]["success"] is True


def test_a_forged_tenant_header_changes_nothing(stack: Stack) -> None:
    body = {"items": [{"queue": "forged", "payload": "mine"}]}
    assert stack.request("POST", "/api/v1/push", body, None, **FORGED).status == 201
    (message,) = stack.pop("forged").json()["messages"]
    assert message["data"] == "mine"


def test_a_hundred_parked_polls_wake(stack: Stack) -> None:
    answers: list[int] = []

    def poll() -> None:
        answers.append(stack.pop("hundred", "batch=1&wait=true&timeout=60000&autoAck=true").status)

    threads = [threading.Thread(target=poll) for _ in range(100)]
    for thread in threads:
        thread.start()
    for number in range(100):
        assert stack.push("hundred", number, partition=str(number)).status == 201
    for thread in threads:
        thread.join(90)
    wait_until(lambda: len(answers) == 100, 10, "all polls are answered")
    assert set(answers) == {200}
