"""What a broker does when more pushes come than it can commit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.broker import Broker
from tests.conftest import Brokers


def test_pushes_beyond_the_bound_are_refused_and_the_accepted_ones_commit(brokers: Brokers) -> None:
    broker: Broker = brokers(env={"QUEEN_PUSH_QUEUE_KB": "64"})
    body = {"items": [{"queue": "busy", "partition": f"p{n}", "payload": "x" * 1000} for n in range(30)]}
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda _: broker.request("POST", "/api/v1/push", body), range(96)))
    accepted = [answer for answer in answers if answer.status == 201]
    refused = [answer for answer in answers if answer.status == 503]
    assert len(accepted) + len(refused) == 96
    assert accepted and refused
    for answer in refused:
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"].startswith("overloaded: ")
    assert all(item["status"] == "queued" for answer in accepted for item in answer.json())
    stored = broker.request("GET", "/api/v1/resources/queues/busy").json()["totals"]["total"]
    assert stored == 30 * len(accepted)
    assert broker.push([{"queue": "calm", "payload": 1}])[0]["status"] == "queued"
