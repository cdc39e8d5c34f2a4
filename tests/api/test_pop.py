"""The three pop routes: parameters, what a claim takes, the shape of the answer, and the long poll."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.api.conftest import Api, segment
from tests.broker import Broker, Response, wait_until
from tests.conftest import Brokers, Database

TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z").fullmatch
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}").fullmatch
# A parked pop that is not woken comes back after this, long after a test has given up.
PATIENT = {"POP_WAIT_INITIAL_INTERVAL_MS": "60000", "POP_WAIT_MAX_INTERVAL_MS": "60000"}

Submit = Callable[..., "Future[Any]"]


@pytest.fixture(scope="module")
def patient(api: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A second broker, whose parked pops wait to be woken."""
    broker = Broker(tmp_path_factory.mktemp("patient"), api.database.environment(), "patient")
    try:
        yield broker.start(PATIENT)
    finally:
        broker.kill()


@pytest.fixture
def submit() -> Iterator[Submit]:
    """Run a call in a thread of its own."""
    with ThreadPoolExecutor(16) as pool:
        yield pool.submit


def routes(queue: str, partition: str = "Default") -> list[str]:
    """The three ways to pop from a queue without a dot in its name, each ready for more parameters."""
    wildcard = f"/api/v1/pop/queue/{segment(queue)}"
    return [f"{wildcard}?", f"{wildcard}/partition/{segment(partition)}?", f"/api/v1/pop?namespace={segment(queue)}&"]


def pop(broker: Broker, target: str) -> Response:
    return broker.request("GET", target)


# Parameters


@pytest.mark.parametrize(
    "query",
    [
        "batch=x",
        "batch=",
        "batch=1.5",
        "batch=1e3",
        "batch=0x10",
        "batch=1_0",
        "batch=%D9%A1",
        "batch=+5",
        "batch=2147483648",
        "batch=-2147483649",
        f"batch={'9' * 400}",
        "leaseSeconds=x",
        "leaseSeconds=2147483648",
        "timeout=-1",
        "timeout=1.0",
        "timeout=18446744073709551616",
        *(f"{name}={word}" for name in ("wait", "autoAck", "conflation") for word in ("", "1", "0", "True", "yes")),
        "batch=1&batch=1",
        "wait=true&wait=true",
        "consumerGroup=a&consumerGroup=b",
        "batch=1&b%61tch=1",
        f"consumerGroup={'x' * 256}",
        "consumerGroup=a%00",
        "consumerGroup=%0A",
    ],
)
def test_a_parameter_that_is_none_of_its_kind_is_refused(api: Api, query: str) -> None:
    for route in routes("q"):
        response = pop(api.broker, route + query)
        assert (route, response.status) == (route, 400)
        assert list(response.json()) == ["error"]


@pytest.mark.parametrize("query", ["partitions=x", "partitions=", "partitions=2147483648", "autopilot=yes"])
def test_the_width_is_read_where_it_matters(api: Api, query: str) -> None:
    assert pop(api.broker, routes("q")[0] + query).status == 400


@pytest.mark.parametrize(
    "query",
    [
        "batch=0",
        "batch=-5",
        "batch=2147483647",
        "batch=-2147483648",
        "batch=007",
        "batch=%31",
        "partitions=0",
        "partitions=-1",
        "partitions=2147483647",
        "leaseSeconds=0",
        "leaseSeconds=-1",
        "leaseSeconds=2147483647",
        "timeout=0",
        "timeout=18446744073709551615",
        "wait=false&timeout=60000",
        "wait=true&timeout=0",
        "autoAck=false",
        "conflation=false",
        "autopilot=true",
        "autopilot=false",
        "subscriptionMode=&subscriptionFrom=",
        "consumerGroup=",
        f"consumerGroup={'%F0%9F%98%80' * 255}",
        "namespace=x&task=y",
        "limit=x&&=&a",
    ],
)
def test_a_parameter_of_its_kind_is_taken(api: Api, name: str, query: str) -> None:
    for route in routes(name):
        if "namespace" not in route or "namespace" not in query:
            assert pop(api.broker, route + query).status == 204


@pytest.mark.parametrize("batch, count", [("0", 1), ("-7", 1), ("1", 1), ("3", 3), ("2147483647", 5)])
def test_a_batch_is_at_least_one_and_at_most_what_there_is(api: Api, name: str, batch: str, count: int) -> None:
    api.broker.push([{"queue": name, "payload": n} for n in range(5)])
    for number, route in enumerate(routes(name)):
        query = f"batch={batch}&consumerGroup=g{number}&subscriptionMode=all"
        assert len(pop(api.broker, route + query).json()["messages"]) == count


def test_a_batch_is_200_by_default(api: Api, name: str) -> None:
    api.broker.push([{"queue": name, "payload": n} for n in range(201)])
    assert len(api.broker.pop(name)) == 200


@pytest.mark.parametrize("query", ["", "?namespace=", "?namespace=&task=", "?task=", "?batch=1", "?queue=q"])
def test_a_discovery_needs_a_scope(api: Api, query: str) -> None:
    response = pop(api.broker, f"/api/v1/pop{query}")
    assert response.status == 400
    assert response.body == b'{"success":false,"error":"namespace or task is required","messages":[]}'


@pytest.mark.parametrize("text", ["a%00", "%1F", "x" * 256])
def test_a_name_that_no_row_can_hold_is_refused(api: Api, text: str) -> None:
    targets = [f"queue/{text}", f"queue/{text}/partition/p", f"queue/q/partition/{text}", f"?namespace={text}"]
    for target in targets:
        assert pop(api.broker, f"/api/v1/pop{'' if target[0] == '?' else '/'}{target}").status == 400


@pytest.mark.parametrize(
    "text", ["garbage", "infinity", "-infinity", "epoch", "294277-01-01", "2020-13-45", "yesterday", "1e400", "'", "J0"]
)
def test_a_start_that_is_no_time_is_no_error(api: Api, name: str, text: str) -> None:
    for number, route in enumerate(routes(name)):
        assert pop(api.broker, f"{route}consumerGroup=g{number}&subscriptionFrom={segment(text)}").status == 204
    assert pop(api.broker, f"{routes(name)[0]}subscriptionFrom=%00").status == 400


# What pops make and leave


def test_a_wildcard_pop_makes_its_queue_and_registers_its_group(api: Api, name: str) -> None:
    assert api.broker.pop(name, consumerGroup="g") == []
    assert api.count("queues", "name = %s", name) == 1
    assert (
        api.count(
            "consumer_groups_metadata",
            "consumer_group = %s AND queue_id IN (SELECT id FROM queen.queues WHERE name = %s)",
            "g",
            name,
        )
        == 1
    )


def test_pinned_and_discovery_pops_make_no_queue(api: Api, name: str) -> None:
    for route in routes(name)[1:]:
        assert pop(api.broker, route).status == 204
    assert api.count("queues", "name = %s", name) == 0


def test_an_unknown_partition_is_nothing(api: Api, name: str) -> None:
    api.broker.push([{"queue": name, "payload": 1}])
    assert api.broker.pop(name, "other") == []
    assert api.count("log_partitions", "name = 'other'") == 0


# The answer


def test_an_answer_has_these_keys_in_this_order(api: Api, name: str) -> None:
    (result,) = api.broker.push([{"queue": name, "partition": "p", "payload": {"to": "x"}, "transactionId": "t"}])
    for number, route in enumerate(routes(name, "p")):
        group = f"g{number}"
        response = pop(api.broker, f"{route}consumerGroup={group}&subscriptionMode=all")
        assert response.status == 200
        assert response.headers["Content-Type"] == "application/json"
        answer = response.json()
        (message,) = answer["messages"]
        assert list(answer) == [
            "success",
            "queue",
            "partition",
            "partitionId",
            "leaseId",
            "consumerGroup",
            "messages",
            "partitionsClaimed",
        ]
        assert list(message) == [
            "id",
            "transactionId",
            "traceId",
            "data",
            "producerSub",
            "createdAt",
            "partitionId",
            "partition",
            "leaseId",
            "consumerGroup",
        ]
        assert answer | {"messages": []} == {
            "success": True,
            "queue": "" if "namespace" in route else name,
            "partition": "p",
            "partitionId": message["partitionId"],
            "leaseId": message["leaseId"],
            "consumerGroup": group,
            "messages": [],
            "partitionsClaimed": 1,
        }
        assert (message["id"], message["transactionId"]) == (result["message_id"], "t")
        assert (message["traceId"], message["producerSub"], message["data"]) == (None, None, {"to": "x"})
        assert (message["partition"], message["consumerGroup"]) == ("p", group)
        assert TIMESTAMP(message["createdAt"])
        assert UUID(message["partitionId"])
        assert UUID(message["leaseId"])


def test_without_a_group_it_is_queue_mode(api: Api, name: str) -> None:
    api.broker.push([{"queue": name, "payload": 1}])
    answer = pop(api.broker, routes(name)[0]).json()
    assert answer["consumerGroup"] == answer["messages"][0]["consumerGroup"] == "__QUEUE_MODE__"


def test_an_empty_group_is_a_group(api: Api, name: str) -> None:
    api.broker.push([{"queue": name, "payload": 1}])
    (message,) = api.broker.pop(name, consumerGroup="", subscriptionMode="all")
    assert message["consumerGroup"] == ""
    assert len(api.broker.pop(name)) == 1
    assert api.broker.ack(message, consumerGroup="")["success"] is True


@pytest.mark.parametrize(
    "payload",
    [
        b"null",
        b'""',
        b"1e400",
        b"-0",
        b"1.0",
        b"1E5",
        b"100000000000000000000000000000001",
        b"9" * 400,
        b'{"b":1,"a":2,"b":3}',
        b'[ 1 ,\t{ "a" :\n"b" } ]',
        b'"\\u0041\\/\\u00fc\\n\\u0000"',
        b'"\\ud800 \\udc00\\ud83d\\ude00\\uDEAD"',
        '"ü\U0001f600\u2028"'.encode(),
    ],
)
def test_a_payload_comes_back_byte_for_byte(api: Api, name: str, payload: bytes) -> None:
    body = b'{"items":[{"queue":"%b","payload": %b ,"transactionId":"t"}]}' % (name.encode(), payload)
    assert api.request("POST", "/api/v1/push", body).status == 201
    for number, route in enumerate(routes(name)):
        response = pop(api.broker, f"{route}consumerGroup=g{number}&subscriptionMode=all")
        assert b'"data":' + payload + b',"producerSub":null' in response.body


def test_messages_of_several_partitions_come_partition_by_partition(api: Api, name: str) -> None:
    for n in range(3):
        api.broker.push([{"queue": name, "partition": p, "payload": f"{p}{n}"} for p in "abc"])
    answer = pop(api.broker, f"{routes(name)[0]}partitions=2").json()
    assert answer["partitionsClaimed"] == 2
    assert [m["data"][1] for m in answer["messages"]] == list("012012")
    assert [m["partition"] for m in answer["messages"]] == [m["data"][0] for m in answer["messages"]]
    assert answer["partition"] == answer["messages"][0]["partition"]
    assert answer["partitionId"] == answer["messages"][0]["partitionId"]
    assert {m["leaseId"] for m in answer["messages"]} == {answer["leaseId"]}
    rest = pop(api.broker, f"{routes(name)[0]}partitions=2").json()
    assert rest["partitionsClaimed"] == 1
    assert rest["leaseId"] != answer["leaseId"]


def test_the_batch_is_one_budget_for_all_partitions(api: Api, name: str) -> None:
    api.broker.push([{"queue": name, "partition": p, "payload": n} for p in "abc" for n in range(10)])
    assert len(api.broker.pop(name, partitions=3, batch=15)) == 15


def test_one_partition_is_claimed_by_default_and_all_with_none(api: Api, name: str) -> None:
    api.broker.push([{"queue": name, "partition": p, "payload": 1} for p in "abcd"])
    assert len(api.broker.pop(name)) == 1
    api.broker.push([{"queue": f"{name}x", "partition": p, "payload": 1} for p in "abcd"])
    discovered = pop(api.broker, f"{routes(f'{name}x')[2]}partitions=0").json()
    assert discovered["partitionsClaimed"] == 4


def test_a_pinned_pop_takes_its_partition_alone(api: Api, name: str) -> None:
    api.broker.push([{"queue": name, "partition": p, "payload": p} for p in "ab"])
    answer = pop(api.broker, f"{routes(name, 'b')[1]}partitions=5").json()
    assert [m["data"] for m in answer["messages"]] == ["b"]


# Discovery


def test_a_discovery_finds_by_namespace_and_task(api: Api, name: str) -> None:
    queues = [f"{name}.a.x", f"{name}.a.y", f"{name}.b", f"{name}"]
    api.broker.push([{"queue": queue, "payload": queue} for queue in queues])

    def found(query: str, group: str) -> list[str]:
        target = f"/api/v1/pop?{query}&partitions=0&consumerGroup={group}&subscriptionMode=all"
        response = pop(api.broker, target)
        return sorted(m["data"] for m in response.json()["messages"]) if response.status == 200 else []

    assert found(f"namespace={name}", "1") == sorted(queues)
    assert found(f"namespace={name}&task=a", "2") == queues[:2]
    assert found(f"namespace={name}&task=", "3") == sorted(queues)
    assert found(f"namespace={name.upper()}", "4") == []
    assert found(f"namespace={name}&task=c", "5") == []
    api.broker.push([{"queue": f"other.{name}", "payload": 1}])
    assert len(found(f"task={name}", "6")) == 1


# Leases and groups


def test_a_leased_partition_is_skipped_by_its_group_and_by_no_other(api: Api, name: str) -> None:
    api.broker.push([{"queue": name, "payload": n} for n in range(4)])
    assert len(api.broker.pop(name, batch=2)) == 2
    for route in routes(name):
        assert pop(api.broker, route).status == 204
    assert len(api.broker.pop(name, consumerGroup="g", subscriptionMode="all")) == 4


def test_auto_ack_leases_nothing_and_delivers_once(api: Api, name: str) -> None:
    api.broker.push([{"queue": name, "payload": n} for n in range(6)])
    seen = []
    for route in routes(name):
        answer = pop(api.broker, f"{route}autoAck=true&batch=2").json()
        assert (answer["leaseId"], {m["leaseId"] for m in answer["messages"]}) == ("", {""})
        seen += [m["data"] for m in answer["messages"]]
    assert seen == list(range(6))
    late = api.broker.ack(answer["messages"][0])
    assert (late["success"], late["noop"]) == (True, True)


def test_auto_ack_respects_a_lease(api: Api, name: str) -> None:
    api.broker.push([{"queue": name, "payload": 1}])
    api.broker.pop(name)
    assert api.broker.pop(name, autoAck=True) == []


@pytest.mark.parametrize(
    "options, query, seconds", [(None, "", 60), ({}, "", 300), ({"leaseTime": 7}, "", 7), ({}, "leaseSeconds=9", 9)]
)
def test_a_lease_lasts_as_long_as_its_queue_or_its_pop_says(
    api: Api, name: str, options: dict[str, int] | None, query: str, seconds: int
) -> None:
    if options is not None:
        api.post("/api/v1/configure", {"queue": name, "namespace": name, "options": options})
    api.broker.push([{"queue": name, "payload": 1}])
    for number, route in enumerate(routes(name)):
        group = f"g{number}"
        answer = pop(api.broker, f"{route}consumerGroup={group}&subscriptionMode=all&{query}").json()
        lease = api.one(
            "SELECT round(extract(epoch FROM lease_expires_at - lease_acquired_at)) FROM queen.log_consumers"
            " WHERE worker_id = %s",
            answer["leaseId"],
        )
        assert (route, lease) == (route, seconds)


# Where a new group starts


@pytest.mark.parametrize(
    "query, first",
    [
        ("subscriptionMode=all", "old"),
        ("subscriptionMode=anything", "old"),
        ("subscriptionMode=NEW", "old"),
        ("subscriptionMode=new", "new"),
        ("subscriptionMode=new-only", "new"),
        ("", "new"),
        ("subscriptionMode=all&subscriptionFrom=now", "new"),
        ("subscriptionMode=new&subscriptionFrom=2001-01-01T00:00:00Z", "old"),
        ("subscriptionMode=all&subscriptionFrom=2999-01-01", "new"),
    ],
)
def test_a_new_group_starts_where_it_asked_to(api: Api, name: str, query: str, first: str) -> None:
    api.broker.push([{"queue": name, "payload": "old"}])
    targets = [f"{route}consumerGroup=g{number}&{query}" for number, route in enumerate(routes(name))]
    seen = []
    for target in targets:
        response = pop(api.broker, f"{target}&autoAck=true")
        seen.append([m["data"] for m in response.json()["messages"]] if response.status == 200 else [])
    api.broker.push([{"queue": name, "payload": "new"}])
    for before, target in zip(seen, targets, strict=True):
        messages = pop(api.broker, f"{target}&autoAck=true").json()["messages"]
        assert (target, (before + [m["data"] for m in messages])[0]) == (target, first)


def test_a_start_that_is_no_time_means_new_or_all(api: Api, name: str) -> None:
    """Where the subscription is stored it is the cautious one."""
    api.broker.push([{"queue": name, "payload": 1}])
    statuses = [
        pop(api.broker, f"{route}consumerGroup=g{number}&subscriptionMode=all&subscriptionFrom=garbage").status
        for number, route in enumerate(routes(name))
    ]
    assert statuses == [204, 200, 204]


def test_queue_mode_starts_at_the_oldest_whatever_is_asked(api: Api, name: str) -> None:
    api.broker.push([{"queue": name, "payload": 1}])
    assert len(api.broker.pop(name, subscriptionMode="new", subscriptionFrom="now")) == 1


# Visibility


def test_a_delayed_message_is_not_delivered_yet(api: Api, name: str) -> None:
    api.post("/api/v1/configure", {"queue": name, "namespace": name, "options": {"delayedProcessing": 3600}})
    api.broker.push([{"queue": name, "payload": 1}])
    for number, route in enumerate(routes(name)):
        target = f"{route}consumerGroup=g{number}&subscriptionMode=all"
        assert (target, pop(api.broker, target).status) == (target, 204)


def test_a_window_buffer_holds_back_a_partition_that_is_still_written(api: Api, name: str) -> None:
    api.post("/api/v1/configure", {"queue": name, "namespace": name, "options": {"windowBuffer": 3600}})
    api.broker.push([{"queue": name, "payload": 1}])
    for number, route in enumerate(routes(name)):
        assert pop(api.broker, f"{route}consumerGroup=g{number}&subscriptionMode=all").status == 204


@pytest.mark.parametrize("option", ["delayedProcessing", "windowBuffer"])
def test_what_is_held_back_comes_when_its_time_has(api: Api, name: str, submit: Submit, option: str) -> None:
    api.post("/api/v1/configure", {"queue": name, "namespace": name, "options": {option: 1}})
    pushed = time.monotonic()
    api.broker.push([{"queue": name, "payload": 1}])
    targets = [
        f"{route}consumerGroup=g{number}&subscriptionMode=all&wait=true&timeout=20000"
        for number, route in enumerate(routes(name))
    ]
    assert [poll.result().status for poll in [submit(pop, api.broker, target) for target in targets]] == [200] * 3
    assert time.monotonic() - pushed >= 1


def test_a_small_batch_is_held_for_more(api: Api, name: str, submit: Submit) -> None:
    api.post("/api/v1/configure", {"queue": name, "options": {"minPopWaitTime": 60_000}})
    api.broker.pop(name)
    poll = submit(pop, api.broker, f"{routes(name)[0]}wait=true&timeout=50000&batch=3")
    for n in range(3):
        assert not poll.done()
        api.broker.push([{"queue": name, "payload": n}])
    assert len(poll.result(10).json()["messages"]) == 3


def test_a_small_batch_is_held_no_longer_than_its_queue_says(api: Api, name: str) -> None:
    api.post("/api/v1/configure", {"queue": name, "options": {"minPopWaitTime": 300}})
    api.broker.pop(name)
    for query, least in ({"batch": 3, "wait": True}, 0.3), ({"batch": 1, "wait": True}, 0), ({"batch": 3}, 0):
        api.broker.push([{"queue": name, "payload": 1}])
        started = time.monotonic()
        (message,) = api.broker.pop(name, timeout=20_000, **query)
        assert time.monotonic() - started >= least
        api.broker.ack(message)


# The long poll


def test_a_long_poll_ends_when_its_time_is_up(api: Api, name: str, submit: Submit) -> None:
    started = time.monotonic()
    polls = [submit(pop, api.broker, f"{route}wait=true&timeout=300") for route in routes(name)]
    assert [poll.result().status for poll in polls] == [204] * 3
    assert 0.3 <= time.monotonic() - started < 5


def test_a_pop_that_does_not_wait_does_not_wait(api: Api, name: str) -> None:
    started = time.monotonic()
    for route in routes(name):
        assert pop(api.broker, f"{route}wait=false&timeout=60000").status == 204
        assert pop(api.broker, f"{route}wait=true&timeout=0").status == 204
    assert time.monotonic() - started < 5


def tried(api: Api, queue: str, group: str) -> bool:
    """Whether a pop of the group has looked at the queue and found nothing: from then on it is parked."""
    return (
        api.count(
            "log_consumers",
            "consumer_group = %s AND partition_id IN (SELECT p.id FROM queen.log_partitions p"
            " JOIN queen.queues q ON q.id = p.queue_id WHERE q.name = %s)",
            group,
            queue,
        )
        > 0
    )


@pytest.mark.parametrize("route", [0, 1, 2], ids=["wildcard", "pinned", "discovery"])
def test_a_push_wakes_a_parked_pop(api: Api, patient: Broker, name: str, submit: Submit, route: int) -> None:
    patient.push([{"queue": name, "payload": "old"}])
    target = f"{routes(name)[route]}wait=true&timeout=50000&consumerGroup=g&subscriptionMode=new"
    poll = submit(pop, patient, target)
    wait_until(lambda: tried(api, name, "g"), what="the pop has been tried")
    patient.push([{"queue": name, "payload": "new"}])
    assert [m["data"] for m in poll.result(10).json()["messages"]] == ["new"]


@pytest.mark.parametrize("route", [0, 1], ids=["wildcard", "pinned"])
def test_a_push_wakes_a_pop_of_what_did_not_exist(patient: Broker, name: str, submit: Submit, route: int) -> None:
    poll = submit(pop, patient, f"{routes(name)[route]}wait=true&timeout=50000")
    patient.request("GET", "/health")
    patient.push([{"queue": name, "payload": 1}])
    assert poll.result(10).status == 200


@pytest.mark.parametrize("route", [0, 1, 2], ids=["wildcard", "pinned", "discovery"])
@pytest.mark.parametrize("status", ["completed", "failed", "retry"])
def test_an_ack_and_a_nack_wake_a_parked_pop(
    api: Api, patient: Broker, name: str, submit: Submit, route: int, status: str
) -> None:
    patient.push([{"queue": name, "payload": n} for n in range(2)])
    (first,) = patient.pop(name, batch=1)
    poll = submit(pop, patient, f"{routes(name)[route]}wait=true&timeout=50000&batch=1")
    patient.request("GET", "/health")
    assert patient.ack(first, status)["leaseReleased"] is True
    (message,) = poll.result(10).json()["messages"]
    assert message["data"] == (1 if status == "completed" else 0)


def test_a_transaction_wakes_a_parked_pop(api: Api, patient: Broker, name: str, submit: Submit) -> None:
    patient.push([{"queue": name, "payload": "old"}])
    poll = submit(pop, patient, f"{routes(name)[0]}wait=true&timeout=50000&consumerGroup=g")
    wait_until(lambda: tried(api, name, "g"), what="the pop has been tried")
    operations = [{"type": "push", "queue": name, "payload": "new"}]
    assert patient.request("POST", "/api/v1/transaction", {"operations": operations}).json()["success"] is True
    assert [m["data"] for m in poll.result(10).json()["messages"]] == ["new"]


def test_a_push_through_another_broker_is_found(api: Api, patient: Broker, name: str, submit: Submit) -> None:
    poll = submit(pop, api.broker, f"{routes(name)[0]}wait=true&timeout=20000")
    wait_until(lambda: api.count("queues", "name = %s", name), what="the pop has been tried")
    patient.push([{"queue": name, "payload": 1}])
    assert poll.result(25).status == 200


def test_each_of_many_parked_pops_gets_one_message(patient: Broker, name: str, submit: Submit) -> None:
    polls = [submit(pop, patient, f"{routes(name)[0]}wait=true&timeout=50000&batch=1") for _ in range(10)]
    patient.request("GET", "/health")
    patient.push([{"queue": name, "partition": str(n), "payload": n} for n in range(10)])
    seen = [poll.result(20).json()["messages"] for poll in polls]
    assert sorted(m["data"] for messages in seen for m in messages) == list(range(10))


# Clients that leave


@pytest.mark.parametrize("route", [0, 1, 2], ids=["wildcard", "pinned", "discovery"])
def test_a_client_that_left_gets_no_lease(api: Api, patient: Broker, name: str, route: int) -> None:
    patient.push([{"queue": name, "payload": "old"}])
    target = f"{routes(name)[route]}consumerGroup=g&"
    with patient.connect() as client:
        client.sendall(f"GET {target}wait=true&timeout=50000 HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        wait_until(lambda: tried(api, name, "g"), what="the pop has been tried")
    for n in range(3):
        patient.push([{"queue": name, "payload": n}])
    assert (
        api.count(
            "log_consumers",
            "consumer_group = 'g' AND worker_id IS NOT NULL AND partition_id IN"
            " (SELECT p.id FROM queen.log_partitions p JOIN queen.queues q ON q.id = p.queue_id"
            " WHERE q.name = %s)",
            name,
        )
        == 0
    )
    assert [m["data"] for m in pop(patient, target).json()["messages"]] == [0, 1, 2]


def test_a_wake_goes_to_a_client_that_stays(api: Api, patient: Broker, name: str, submit: Submit) -> None:
    patient.push([{"queue": name, "payload": "old"}])
    target = f"{routes(name)[0]}wait=true&timeout=50000&consumerGroup=g"
    with patient.connect() as leaver:
        leaver.sendall(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        wait_until(lambda: tried(api, name, "g"), what="the pop has been tried")
        stayer = submit(pop, patient, target)
        patient.request("GET", "/health")
    patient.push([{"queue": name, "payload": "new"}])
    assert [m["data"] for m in stayer.result(10).json()["messages"]] == ["new"]


def test_a_request_sent_early_does_not_disturb_a_long_poll(patient: Broker, name: str) -> None:
    with patient.connect(20) as client:
        client.sendall(
            f"GET {routes(name)[0]}wait=true&timeout=50000 HTTP/1.1\r\nHost: x\r\n\r\n".encode()
            + b"GET /status HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        )
        patient.request("GET", "/health")
        patient.push([{"queue": name, "payload": 1}])
        answers = b""
        while part := client.recv(65536):
            answers += part
    assert answers.count(b"HTTP/1.1 200 OK") == 2
    assert answers.index(b'"messages"') < answers.index(b'"status":"ok"')


# Failures of the database


def test_a_claim_that_fails_is_an_error_and_no_empty_queue(brokers: Brokers, database: Database) -> None:
    broker = brokers()
    broker.push([{"queue": "q", "payload": 1}])
    with database.connect() as sql:
        sql.execute("ALTER TABLE queen.log_segments RENAME TO hidden")
        for number, route in enumerate(routes("q")):
            for wait in ("", "&wait=true&timeout=60000"):
                target = f"{route}consumerGroup=g{number}&subscriptionMode=all{wait}"
                response = pop(broker, target)
                assert (target, response.status, response.json()) == (target, 500, {"error": "pop failed"})
        sql.execute("ALTER TABLE queen.hidden RENAME TO log_segments")
    assert len(broker.pop("q")) == 1
    assert "Traceback" not in broker.log()
