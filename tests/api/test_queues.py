"""Queues over HTTP: configuration, removal, listing, detail and depth."""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from queen.db.embedded import EmbeddedServer
from tests.api.conftest import DEFAULT_TENANT, OTHER_TENANT, Api, segment
from tests.broker import Broker, Response, wait_until
from tests.conftest import Brokers, Database

DEFAULTS: dict[str, Any] = {
    "priority": 0,
    "leaseTime": 300,
    "retryLimit": 3,
    "retryDelay": 1000,
    "maxSize": 0,
    "ttl": 3600,
    "deadLetterQueue": True,
    "dlqAfterMaxRetries": True,
    "delayedProcessing": 0,
    "windowBuffer": 0,
    "retentionSeconds": 0,
    "completedRetentionSeconds": 0,
    "retentionEnabled": False,
    "encryptionEnabled": False,
    "maxWaitTimeSeconds": 0,
    "minPopWaitTime": 0,
    "dedupWindowSeconds": 3600,
}
OTHER_VALUES: dict[str, Any] = {
    "priority": 5,
    "leaseTime": 90,
    "retryLimit": 4,
    "retryDelay": 1,
    "maxSize": 2,
    "ttl": 3,
    "deadLetterQueue": False,
    "dlqAfterMaxRetries": False,
    "delayedProcessing": 4,
    "windowBuffer": 5,
    "retentionSeconds": 6,
    "completedRetentionSeconds": 7,
    "retentionEnabled": True,
    "encryptionEnabled": False,
    "maxWaitTimeSeconds": 8,
    "minPopWaitTime": 9,
    "dedupWindowSeconds": 10,
}


def configure(api: Api, queue: str, options: Any = None, **fields: Any) -> Any:
    body = {"queue": queue, **fields}
    if options is not None:
        body["options"] = options
    return api.post("/api/v1/configure", body)


def error(response: Response, status: int) -> str:
    """Return the text of an error answer, which has this status and no other key."""
    assert response.status == status, response
    body = response.json()
    assert list(body) == ["error"]
    return str(body["error"])


# Configure.


def test_configuring_a_new_queue_answers_with_every_option_in_force(api: Api, name: str) -> None:
    answer = configure(api, name, {})
    assert answer == {
        "configured": True,
        "queueId": str(api.one("SELECT id FROM queen.queues WHERE name = %s", name)),
        "partitionId": None,
        "queue": name,
        "namespace": "",
        "task": "",
        "storage": "segments",
        "options": DEFAULTS,
    }


def test_every_option_is_stored_and_echoed(api: Api, name: str) -> None:
    answer = configure(api, name, OTHER_VALUES, namespace="shop", task="bill")
    assert answer["options"] == OTHER_VALUES
    assert (answer["namespace"], answer["task"]) == ("shop", "bill")
    stored = api.get(f"/api/v1/resources/queues/{name}")
    assert stored["options"] == OTHER_VALUES
    assert (stored["namespace"], stored["task"]) == ("shop", "bill")
    assert stored["id"] == answer["queueId"]


@pytest.mark.parametrize(
    ("option", "sent", "stored"),
    [
        ("leaseTime", "90", 90),
        ("leaseTime", " 90 ", 90),
        ("leaseTime", None, 300),
        ("retryLimit", -1, -1),
        ("delayedProcessing", -5, -5),
        ("minPopWaitTime", -1, 0),
        ("minPopWaitTime", 60001, 60000),
        ("dedupWindowSeconds", -1, 0),
        ("dedupWindowSeconds", 0, 0),
        ("retentionEnabled", "yes", True),
        ("retentionEnabled", 1, True),
        ("deadLetterQueue", "off", False),
        ("deadLetterQueue", None, True),
    ],
)
def test_option_values_are_cast_and_clamped(api: Api, name: str, option: str, sent: Any, stored: Any) -> None:
    assert configure(api, name, {option: sent})["options"] == {**DEFAULTS, option: stored}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("leaseTime", "soon"),
        ("leaseTime", 1.5),
        ("leaseTime", True),
        ("leaseTime", []),
        ("leaseTime", 2**31),
        ("leaseTime", 10**400),
        ("retentionEnabled", "perhaps"),
        ("retentionEnabled", 2),
        ("namespace", "n" * 256),
        ("task", "nul\0"),
        ("task", "\ud800"),
    ],
)
def test_a_value_that_cannot_be_cast_changes_nothing(api: Api, name: str, option: str, value: Any) -> None:
    configure(api, name, {"retryLimit": 7})
    response = api.request("POST", "/api/v1/configure", {"queue": name, "options": {"retryLimit": 8, option: value}})
    text = error(response, 400)
    assert text.startswith("configure failed: ")
    assert "INSERT" not in text
    assert api.one("SELECT retry_limit FROM queen.queues WHERE name = %s", name) == 7


def test_the_refusal_names_the_option(api: Api, name: str) -> None:
    response = api.request("POST", "/api/v1/configure", {"queue": name, "options": {"leaseTime": "soon"}})
    assert "leaseTime" in error(response, 400)
    assert api.count("queues", "name = %s", name) == 0


@pytest.mark.parametrize("body", [{}, {"queue": None}, {"queue": 7}, {"options": {}}, [], None, "text", 7])
def test_a_body_without_queue_name_is_refused(api: Api, body: Any) -> None:
    data = b"null" if body is None else body
    assert error(api.request("POST", "/api/v1/configure", data), 400) == "queue is required"


@pytest.mark.parametrize("body", [b"", b"{", b'{"queue":"x",}', b"\xff", b'{"queue":"q","options":{"ttl":NaN}}'])
def test_a_body_that_is_not_json_is_refused(api: Api, body: bytes) -> None:
    assert error(api.request("POST", "/api/v1/configure", body), 400).startswith("bad body: ")


@pytest.mark.parametrize("queue", ["", "a/b", "ü ñ", "q" * 255, '"quoted"'])
def test_a_queue_name_may_be_any_text(api: Api, queue: str) -> None:
    assert configure(api, queue, {})["queue"] == queue


@pytest.mark.parametrize("queue", ["q" * 256, "nul\0", "\udc80"])
def test_a_queue_name_that_cannot_be_stored_is_refused(api: Api, queue: str) -> None:
    response = api.request("POST", "/api/v1/configure", {"queue": queue})
    assert error(response, 400).startswith("configure failed: ")


def test_without_an_object_of_options_the_other_keys_are_the_options(api: Api, name: str) -> None:
    answer = configure(api, name, "no object", leaseTime=90, namespace="shop", task=None)
    assert answer["options"] == {**DEFAULTS, "leaseTime": 90}
    assert (answer["namespace"], answer["task"]) == ("shop", "")


def test_an_object_of_options_hides_the_other_keys(api: Api, name: str) -> None:
    assert configure(api, name, {"retryLimit": 4}, leaseTime=90)["options"] == {**DEFAULTS, "retryLimit": 4}


@pytest.mark.parametrize(
    ("options", "fields", "namespace"),
    [
        ({}, {"namespace": "outer"}, "outer"),
        ({"namespace": "inner"}, {"namespace": "outer"}, "inner"),
        ({"namespace": None}, {"namespace": "outer"}, ""),
        ({}, {"namespace": None}, ""),
        ({}, {"namespace": ""}, ""),
        ({}, {"namespace": 7}, ""),
        ({"namespace": 7}, {}, "7"),
    ],
)
def test_labels_may_stand_beside_the_options(
    api: Api, name: str, options: dict[str, Any], fields: dict[str, Any], namespace: str
) -> None:
    assert configure(api, name, options, **fields)["namespace"] == namespace


@pytest.mark.parametrize("fields", [{}, {"mode": "replace"}, {"mode": None}])
def test_an_option_not_sent_goes_back_to_its_default(api: Api, name: str, fields: dict[str, Any]) -> None:
    first = configure(api, name, OTHER_VALUES, namespace="shop")
    answer = configure(api, name, {"leaseTime": 45}, **fields)
    assert answer["queueId"] == first["queueId"]
    assert answer["options"] == {**DEFAULTS, "leaseTime": 45}
    assert answer["namespace"] == ""


def test_a_merge_keeps_what_is_not_sent_and_resets_what_is_null(api: Api, name: str) -> None:
    configure(api, name, OTHER_VALUES, namespace="shop", task="bill")
    answer = configure(api, name, {"retryLimit": None, "deadLetterQueue": True, "task": None, "ttl": 60}, mode="merge")
    changed = {"retryLimit": 3, "deadLetterQueue": True, "ttl": 60}
    assert answer["options"] == {**OTHER_VALUES, **changed}
    assert (answer["namespace"], answer["task"]) == ("shop", "")


def test_a_merge_builds_a_new_queue_from_the_defaults(api: Api, name: str) -> None:
    assert configure(api, name, {"ttl": 60}, mode="merge")["options"] == {**DEFAULTS, "ttl": 60}


def test_the_mode_is_no_option(api: Api, name: str) -> None:
    assert configure(api, name, mode="merge", ttl=60)["options"] == {**DEFAULTS, "ttl": 60}


@pytest.mark.parametrize("mode", ["", "MERGE", "patch", 1, True, {}])
def test_an_unknown_mode_is_refused(api: Api, name: str, mode: Any) -> None:
    response = api.request("POST", "/api/v1/configure", {"queue": name, "mode": mode})
    assert error(response, 400).startswith('mode must be "merge" or "replace", got ')
    assert api.count("queues", "name = %s", name) == 0


def test_merges_of_one_queue_take_turns(api: Api, name: str) -> None:
    configure(api, name, {})
    options = ({"ttl": 1}, {"priority": 2}, {"retryLimit": 3}, {"leaseTime": 4})
    threads = [threading.Thread(target=configure, args=(api, name, o), kwargs={"mode": "merge"}) for o in options]
    with api.database.connect(autocommit=False) as holder:
        holder.execute("SELECT 1 FROM queen.queues WHERE name = %s FOR UPDATE", (name,))
        for thread in threads:
            thread.start()
        wait_until(lambda: waiting(api) == len(threads), what="all merges wait for the row")
    for thread in threads:
        thread.join()
    assert configure(api, name, {}, mode="merge")["options"] == {
        **DEFAULTS, "ttl": 1, "priority": 2, "retryLimit": 3, "leaseTime": 4
    }  # fmt: skip


def waiting(api: Api) -> int:
    """How many statements of the database wait for a lock."""
    return int(
        api.one(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND cardinality(pg_blocking_pids(pid)) > 0"
        )
    )


def test_configuring_leaves_another_tenants_queue_alone(api: Api, name: str) -> None:
    api.make_queue(name, OTHER_TENANT, retry_limit=9)
    configure(api, name, {"retryLimit": 1})
    rows = api.sql.execute("SELECT tenant_id, retry_limit FROM queen.queues WHERE name = %s", (name,)).fetchall()
    assert dict(rows) == {DEFAULT_TENANT: 1, OTHER_TENANT: 9}


def test_a_new_configuration_counts_at_once(api: Api, name: str) -> None:
    api.broker.push([{"queue": name, "payload": 1}])
    configure(api, name, {"delayedProcessing": 3600})
    assert api.broker.pop(name, consumerGroup="g", subscriptionMode="all") == []
    configure(api, name, {"delayedProcessing": 0})
    assert len(api.broker.pop(name, consumerGroup="g")) == 1


# Delete.


def test_deleting_a_queue_leaves_nothing_of_it(api: Api, name: str) -> None:
    queue = api.make_queue(name)
    for lane in ("a", "b"):
        partition = api.make_partition(queue, lane, (2, 3))
        api.make_lease(partition, "g", -1, 2)
        api.make_dead_letter(partition, "t")
    api.register(queue, "g")
    api.sql.execute("INSERT INTO queen.consumer_watermarks (queue_id, consumer_group) VALUES (%s, 'g')", (queue,))
    partitions = [
        row[0] for row in api.sql.execute("SELECT id FROM queen.log_partitions WHERE queue_id = %s", (queue,))
    ]

    response = api.request("DELETE", f"/api/v1/resources/queues/{name}")
    assert response.status == 200
    assert response.json() == {"deleted": True, "queue": name, "existed": True}
    for table in ("log_segments", "log_txns", "log_consumers", "log_dlq"):
        assert api.count(table, "partition_id = ANY (%s)", partitions) == 0, table
    for table in ("log_partitions", "consumer_groups_metadata", "consumer_watermarks"):
        assert api.count(table, "queue_id = %s", queue) == 0, table
    assert api.count("queues", "id = %s", queue) == 0


def test_deleting_a_queue_that_does_not_exist_is_no_error(api: Api, name: str) -> None:
    response = api.request("DELETE", f"/api/v1/resources/queues/{name}")
    assert response.status == 200
    assert response.json() == {
        "deleted": False,
        "queue": name,
        "existed": False,
        "message": "Queue not found, nothing was deleted",
    }


def test_deleting_leaves_other_queues_and_tenants_alone(api: Api, name: str) -> None:
    kept = []
    for other, tenant in ((name, OTHER_TENANT), (f"{name}-2", DEFAULT_TENANT)):
        kept.append(api.make_partition(api.make_queue(other, tenant), "p", (1,)))
        api.make_dead_letter(kept[-1], "t")
    api.make_queue(name)
    assert api.request("DELETE", f"/api/v1/resources/queues/{name}").json()["deleted"]
    for table in ("log_segments", "log_txns", "log_dlq"):
        assert api.count(table, "partition_id = ANY (%s)", kept) == 2, table


def test_a_deleted_queue_starts_over(api: Api, name: str) -> None:
    api.broker.push([{"queue": name, "payload": 1, "transactionId": "same"}])
    assert len(api.broker.pop(name, consumerGroup="g", subscriptionMode="all")) == 1
    api.request("DELETE", f"/api/v1/resources/queues/{name}")

    answer = api.broker.push([{"queue": name, "payload": 2, "transactionId": "same"}])
    assert answer[0]["status"] == "queued"
    messages = api.broker.pop(name, consumerGroup="g", subscriptionMode="all")
    assert [message["data"] for message in messages] == [2]


def test_deleting_a_queue_waits_for_whoever_holds_its_rows(api: Api, name: str) -> None:
    """A lock of the push kind and of the ack kind; both orders would deadlock if they were not one."""
    partition = api.make_partition(api.make_queue(name), "p", (1,))
    api.make_cursor(partition, "g", -1)
    answers: list[Response] = []
    target = f"/api/v1/resources/queues/{name}"
    thread = threading.Thread(target=lambda: answers.append(api.request("DELETE", target)))
    with api.database.connect(autocommit=False) as transaction:
        transaction.execute("SELECT 1 FROM queen.log_consumers WHERE partition_id = %s FOR UPDATE", (partition,))
        thread.start()
        wait_until(lambda: waiting(api) == 1, what="the delete waits")
        with (
            api.database.connect() as other,
            pytest.raises(psycopg.errors.LockNotAvailable),
        ):
            other.execute("SELECT 1 FROM queen.log_partitions WHERE id = %s FOR UPDATE NOWAIT", (partition,))
    thread.join()
    assert answers[0].json()["deleted"] is True


@pytest.mark.parametrize(
    "next_step",
    [
        "SELECT queen.log_seed_cursor_v1((SELECT id FROM queen.log_partitions WHERE name = 'b-' || %(name)s),"
        " 'g', 'all', '')",
        "SELECT 1 FROM queen.log_pop_scan_v1(ARRAY(SELECT id FROM queen.queues WHERE name = %(name)s),"
        " 'g', 'w', 10, 10, 60, false, 'all', '')",
    ],
    ids=["first cursor in a partition", "empty scan"],
)
def test_deleting_a_queue_never_deadlocks_with_a_pop(api: Api, name: str, next_step: str) -> None:
    """A pop holds cursors when it makes a new one or remembers an empty scan: neither may wait for the delete."""
    queue = api.make_queue(name)
    api.make_partition(queue, f"b-{name}")
    api.make_cursor(api.make_partition(queue, "a"), "g", -1)
    if "scan" in next_step:
        api.make_cursor(api.one("SELECT id FROM queen.log_partitions WHERE name = %s", f"b-{name}"), "g", -1)
    answers: list[Response] = []
    target = f"/api/v1/resources/queues/{name}"
    delete = threading.Thread(target=lambda: answers.append(api.request("DELETE", target)))
    with api.database.connect(autocommit=False) as pop:
        pop.execute(
            "SELECT 1 FROM queen.log_consumers WHERE partition_id IN"
            " (SELECT id FROM queen.log_partitions WHERE queue_id = %s) FOR UPDATE",
            (queue,),
        )
        delete.start()
        wait_until(lambda: waiting(api) == 1, what="the delete waits")
        pop.execute(next_step.encode(), {"name": name})
    delete.join()
    assert answers[0].json() == {"deleted": True, "queue": name, "existed": True}


# The list.


def listed(api: Api, query: str = "") -> list[dict[str, Any]]:
    queues: list[dict[str, Any]] = api.get(f"/api/v1/resources/queues{query}")["queues"]
    return queues


def test_the_list_shows_what_queues_hold_and_owe(api: Api, name: str) -> None:
    queue = api.make_queue(name, namespace="shop", task="bill", created_at="2026-08-01T09:00:00Z")
    first = api.make_partition(queue, "a", (10,))
    second = api.make_partition(queue, "b", (5, 5), start=90)
    api.make_lease(first, "g", 3, 5)
    api.make_cursor(second, "g", 97)
    (entry,) = [entry for entry in listed(api) if entry["name"] == name]
    assert entry == {
        "id": str(queue),
        "name": name,
        "namespace": "shop",
        "task": "bill",
        "createdAt": "2026-08-01T09:00:00.000Z",
        "partitions": 2,
        "partitionCount": 2,
        "priority": 0,
        "leaseTime": 60,
        "retryLimit": 3,
        "maxSize": 0,
        "encryptionEnabled": False,
        "retainedBytes": 0,
        "segments": {"segments": 0, "messages": 20},
        "messages": {"total": 20, "pending": 6, "processing": 2},
    }


def test_an_empty_queue_is_listed_with_zeros(api: Api, name: str) -> None:
    configure(api, name, {})
    (entry,) = listed(api, f"?search={name}")
    assert entry["partitions"] == 0
    assert entry["messages"] == {"total": 0, "pending": 0, "processing": 0}


def test_the_newest_queue_comes_first(api: Api, name: str) -> None:
    for age in (2, 3, 1):
        api.make_queue(f"{name}-{age}", created_at=f"200{9 - age}-01-01T00:00:00Z")
    assert [entry["name"] for entry in listed(api, f"?search={name}")] == [f"{name}-{age}" for age in (1, 2, 3)]


def test_the_list_can_be_filtered_and_paged(api: Api, name: str) -> None:
    for number, (namespace, task) in enumerate([("n1", "t1"), ("n1", "t2"), ("n2", "t1")]):
        api.make_queue(
            f"{name}-{number}", namespace=namespace + name, task=task, created_at=f"200{number}-01-01T00:00:00Z"
        )

    def numbers(query: str) -> str:
        return "".join(entry["name"][-1] for entry in listed(api, f"?search={name}&{query}"))

    assert numbers("") == "210"
    assert numbers(f"namespace=n1{name}") == "10"
    assert numbers(f"namespace=n1{name}&task=t1") == "0"
    assert numbers("task=t1") == "20"
    assert numbers("limit=2") == "21"
    assert numbers("limit=2&offset=2") == "0"
    assert numbers("limit=0") == ""
    assert numbers("namespace=&task=&limit=many&offset=&unknown=1") == "210"
    assert len(listed(api, f"?search={name.upper()}")) == 3
    assert listed(api, "?search=%25") == []


@pytest.mark.parametrize("query", ["limit=-1", "offset=-1"])
def test_a_negative_page_is_refused(api: Api, query: str) -> None:
    assert error(api.request("GET", f"/api/v1/resources/queues?{query}"), 400).startswith("list failed: ")


def test_the_list_shows_only_the_tenants_own_queues(api: Api, name: str) -> None:
    api.make_queue(name, OTHER_TENANT)
    assert listed(api, f"?search={name}") == []
    answer = api.one("SELECT queen.get_queues_v1(%s, NULL, NULL, %s, 10, 0)", OTHER_TENANT, name)
    assert [entry["name"] for entry in answer["queues"]] == [name]


# One queue.


def test_the_detail_counts_each_partition_and_adds_them_up(api: Api, name: str) -> None:
    queue = api.make_queue(name, namespace="shop", created_at="2026-08-01T09:00:00Z")
    second = api.make_partition(queue, "b", (4, 6), ages=(500, 100))
    first = api.make_partition(queue, "a", (10, 20, 30), ages=(300, 200, 100))
    api.make_lease(first, "g", 9, 19)
    api.make_cursor(second, "g", 9)
    api.make_dead_letter(second, "t")
    api.make_dead_letter(second, "t", consumer_group="h")
    written = dict(
        api.sql.execute(
            "SELECT partition_id::text || base_offset, queen.iso_time(created_at) FROM queen.log_segments"
        ).fetchall()
    )

    answer = api.get(f"/api/v1/resources/queues/{name}")
    created = [partition.pop("createdAt") for partition in answer["partitions"]]
    assert all(text.endswith("Z") and len(text) == 24 for text in created)
    assert answer == {
        "id": str(queue),
        "name": name,
        "namespace": "shop",
        "task": "",
        "createdAt": "2026-08-01T09:00:00.000Z",
        "partitions": [
            {
                "id": str(first),
                "name": "a",
                "stats": counts(total=60, pending=50, processing=10, completed=10),
                "oldestMessage": written[f"{first}10"],
                "newestMessage": written[f"{first}30"],
            },
            {
                "id": str(second),
                "name": "b",
                "stats": counts(total=10, completed=8, deadLetter=2),
                "oldestMessage": None,
                "newestMessage": written[f"{second}4"],
            },
        ],
        "totals": counts(total=70, pending=50, processing=10, completed=18, deadLetter=2),
        "retainedBytes": 70,
        "segments": {"segments": 5, "messages": 70},
        "options": {**DEFAULTS, "leaseTime": 60},
    }


def counts(**given: int) -> dict[str, int | None]:
    zeros = {"total": 0, "pending": 0, "processing": 0, "completed": 0, "failed": None, "deadLetter": 0}
    return {**zeros, **given}


def test_the_detail_of_an_empty_queue_has_zeros(api: Api, name: str) -> None:
    configure(api, name, {})
    answer = api.get(f"/api/v1/resources/queues/{name}")
    assert (answer["partitions"], answer["totals"], answer["retainedBytes"]) == ([], counts(), 0)
    assert answer["segments"] == {"segments": 0, "messages": 0}


@pytest.mark.parametrize(
    ("cursors", "pending"),
    [
        ({}, 10),
        ({"__QUEUE_MODE__": 3}, 6),
        ({"g": 5}, 4),
        ({"g": 5, "h": 2}, 7),
        # A stray group-less pop doesn't pin the backlog of named groups.
        ({"g": 9, "__QUEUE_MODE__": -1}, 0),
        ({"g": 2, "__QUEUE_MODE__": 9}, 7),
    ],
)
def test_the_slowest_named_group_decides_what_is_pending(
    api: Api, name: str, cursors: dict[str, int], pending: int
) -> None:
    partition = api.make_partition(api.make_queue(name), sizes=(10,))
    for group, committed in cursors.items():
        api.make_cursor(partition, group, committed)
    totals = api.get(f"/api/v1/resources/queues/{name}")["totals"]
    assert totals == counts(total=10, pending=pending, completed=10 - pending)
    assert api.get(f"/api/v1/resources/queues/{name}/depth")["pending"] == pending


def test_what_retention_deleted_is_not_pending(api: Api, name: str) -> None:
    partition = api.make_partition(api.make_queue(name), sizes=(10,), start=100)
    api.make_cursor(partition, "g", 49)
    assert api.get(f"/api/v1/resources/queues/{name}")["totals"] == counts(total=10, pending=10)


def test_only_live_leases_are_processing_and_never_more_than_pending(api: Api, name: str) -> None:
    queue = api.make_queue(name)
    expired = api.make_partition(queue, "expired", (10,))
    api.make_lease(expired, "g", -1, 4, seconds=-1)
    shared = api.make_partition(queue, "shared", (10,))
    api.make_lease(shared, "g", 5, 9)
    api.make_lease(shared, "h", 6, 9)
    partitions = api.get(f"/api/v1/resources/queues/{name}")["partitions"]
    assert [partition["stats"]["processing"] for partition in partitions] == [0, 4]


@pytest.mark.parametrize("path", ["", "/depth"])
def test_an_unknown_queue_is_not_found(api: Api, name: str, path: str) -> None:
    api.make_queue(name, OTHER_TENANT)
    assert error(api.request("GET", f"/api/v1/resources/queues/{name}{path}"), 404) == "Queue not found"


@pytest.mark.parametrize("queue", ["slash/in it", "percent%2Fname", "ü?&#", "depth"])
def test_a_queue_is_addressed_by_one_encoded_segment(api: Api, queue: str) -> None:
    configure(api, queue, {})
    target = f"/api/v1/resources/queues/{segment(queue)}"
    assert api.get(target)["name"] == queue
    assert api.get(f"{target}/depth")["queue"] == queue
    assert api.request("DELETE", target).json() == {"deleted": True, "queue": queue, "existed": True}


def test_a_path_that_is_no_name_is_refused(api: Api) -> None:
    assert api.request("GET", "/api/v1/resources/queues/%ff").status == 400
    assert error(api.request("GET", "/api/v1/resources/queues/%00"), 400).startswith("get failed: ")


# Depth.


def test_the_depth_of_a_queue_over_all_groups(api: Api, name: str) -> None:
    queue = api.make_queue(name)
    api.make_lease(api.make_partition(queue, "a", (10,)), "g", 3, 5)
    api.make_cursor(api.make_partition(queue, "b", (10,)), "g", 9)
    api.make_lease(api.make_partition(queue, "c", (10,)), "g", 7, 9)
    assert api.get(f"/api/v1/resources/queues/{name}/depth?group=") == {
        "queue": name,
        "group": None,
        "pending": 8,
        "partitionsPending": 2,
        "conflation": False,
        "effectivePending": 8,
        "processing": 4,
        "ready": 4,
        "partitionsReady": 1,
        "effectiveReady": 4,
        "partitions": [
            {"partition": "a", "pending": 6, "processing": 2, "ready": 4},
            {"partition": "b", "pending": 0, "processing": 0, "ready": 0},
            {"partition": "c", "pending": 2, "processing": 2, "ready": 0},
        ],
    }


def test_the_depth_for_one_group_is_that_groups_own(api: Api, name: str) -> None:
    partition = api.make_partition(api.make_queue(name), sizes=(10,), start=100)
    api.make_lease(partition, "g", 103, 105)
    api.make_cursor(partition, "__QUEUE_MODE__", 108)

    def depth(group: str) -> tuple[int, int]:
        answer = api.get(f"/api/v1/resources/queues/{name}/depth?group={group}")
        assert answer["group"] == group
        return answer["pending"], answer["processing"]

    assert depth("g") == (6, 2)
    assert depth("__QUEUE_MODE__") == (1, 0)
    assert depth("stranger") == (10, 0)


def test_a_conflating_group_owes_partitions_not_messages(api: Api, name: str) -> None:
    queue = api.make_queue(name)
    api.register(queue, "g", conflation=True)
    api.make_partition(queue, "a", (10,))
    api.make_lease(api.make_partition(queue, "b", (5,)), "g", -1, 4)
    answer = api.get(f"/api/v1/resources/queues/{name}/depth?group=g")
    assert answer["conflation"] is True
    assert (answer["pending"], answer["effectivePending"]) == (15, 2)
    assert (answer["ready"], answer["effectiveReady"]) == (10, 1)
    other = api.get(f"/api/v1/resources/queues/{name}/depth?group=h")
    assert (other["conflation"], other["effectivePending"]) == (False, 15)


# Failures.


def test_a_database_error_is_told_without_its_statement(broker: Broker, database: Database, name: str) -> None:
    with database.connect() as sql:
        sql.execute("ALTER FUNCTION queen.get_queue_v2(uuid, text) RENAME TO gone")
    text = error(broker.request("GET", f"/api/v1/resources/queues/{name}"), 500)
    assert text.startswith("get failed: function queen.get_queue_v2(")
    assert "SELECT" not in text and "LINE" not in text


def test_without_a_connection_every_route_says_pool(brokers: Brokers, embedded: EmbeddedServer) -> None:
    broker = brokers(postgres=embedded.environment())
    embedded.stop("immediate")
    requests: list[tuple[str, str, Any]] = [
        ("POST", "/api/v1/configure", {"queue": "q"}),
        ("DELETE", "/api/v1/resources/queues/q", None),
        ("GET", "/api/v1/consumer-groups", None),
        ("POST", "/api/v1/consumer-groups/g/queues/q/seek", {"toEnd": True}),
        ("GET", "/api/v1/dlq", None),
    ]
    with ThreadPoolExecutor(len(requests)) as threads:
        answers = [threads.submit(broker.request, *request) for request in requests]
    assert [error(answer.result(), 500) for answer in answers] == ["pool"] * len(requests)


def test_a_queue_of_another_tenant_is_out_of_reach_in_sql(api: Api, name: str) -> None:
    queue = api.make_queue(name, OTHER_TENANT)
    stranger = uuid.uuid4()
    assert api.one("SELECT queen.get_queue_v2(%s, %s)", stranger, name) is None
    assert api.one("SELECT queen.log_queue_depth_v1(%s, %s, NULL)", stranger, name) is None
    assert api.one("SELECT queen.delete_queue_v1(%s, %s)", name, stranger) is False
    assert api.count("queues", "id = %s", queue) == 1


def test_the_list_shows_what_is_stored_once_it_was_added_up(api: Api, name: str) -> None:
    api.broker.push([{"queue": name, "payload": 1}])
    api.sql.execute("SELECT queen.log_refresh_retained_bytes_v1()")
    (queue,) = (q for q in api.get("/api/v1/resources/queues")["queues"] if q["name"] == name)
    assert queue["segments"] == {"segments": 1, "messages": 1}
    assert queue["retainedBytes"] == api.get(f"/api/v1/resources/queues/{name}")["retainedBytes"] > 0


def test_statistics_are_computed_on_demand(api: Api, name: str) -> None:
    api.make_queue(name, namespace=name)
    response = api.request("POST", "/api/v1/stats/refresh", b"")
    assert response.status == 200
    answer = response.json()
    assert set(answer) == {"engine", "queuesUpdated", "segPartitions", "namespaces", "tasks", "system", "refreshedAt"}
    assert (answer["engine"], answer["system"]) == ("segments", {"systemUpdated": 1})
    assert api.one("SELECT count(*) FROM queen.stats WHERE stat_type = 'namespace' AND stat_key = %s", name) == 1
