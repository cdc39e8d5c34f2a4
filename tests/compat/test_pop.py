"""Popping with the client: partitions, budgets, exclusiveness, discovery and long polls."""

from __future__ import annotations

from tests.compat.conftest import Deployment, Play

# A broker hears of what another one did by looking, once a second; what it did itself it knows at once.
NEWS_SECONDS = {1: 0.5, 2: 2.5}


def test_a_pinned_pop_takes_its_partition_alone(play: Play) -> None:
    result = play("pop.pinned")
    assert result["first"] == {"b": [0, 1, 2]}
    assert result["again"] == [[], []]


def test_a_pop_keeps_within_its_batch_and_its_partitions(play: Play) -> None:
    batches = play("pop.budget")
    assert sum(len(numbers) for batch in batches for numbers in batch["messages"].values()) == 9
    popped: dict[str, list[int]] = {}
    for batch in batches:
        assert len(batch["messages"]) <= 2
        assert sum(map(len, batch["messages"].values())) <= 5
        assert batch["leases"] == 1
        assert batch["ids"] == len(batch["messages"])
        for partition, numbers in batch["messages"].items():
            popped.setdefault(partition, []).extend(numbers)
    assert popped == {"a": [0, 1, 2], "b": [0, 1, 2], "c": [0, 1, 2]}
    assert len(batches[0]["messages"]) == 2
    assert sum(map(len, batches[0]["messages"].values())) == 5


def test_a_partition_comes_in_order_whichever_broker_is_asked(play: Play) -> None:
    assert play("pop.sequence", count=12) == list(range(24))


def test_a_leased_batch_is_nobody_elses_but_another_groups(play: Play) -> None:
    assert play("pop.exclusive") == {
        "first": [0, 1],
        "rivals": [],
        "other": [0, 1],
        "leases": True,
        "groups": [True, True],
    }


def test_where_there_is_nothing_a_pop_returns_nothing(play: Play) -> None:
    results = play("pop.nothing", millis=300)
    assert [result["messages"] for result in results] == [[]] * 10
    for result in results[1::2]:
        assert 0.3 <= result["waited"] < 1.3


def test_a_push_through_any_broker_ends_a_long_poll(play: Play, deployment: Deployment) -> None:
    shapes = [{"shape": shape, "count": 3} for shape in ("wildcard", "pinned", "discovery")]
    for results in play.together("pop.wakes", shapes):
        assert [result["data"] for result in results] == [[0], [1], [2]]
        assert max(result["late"] for result in results) < NEWS_SECONDS[len(deployment.brokers)]


def test_the_end_of_a_lease_ends_a_long_poll(play: Play, deployment: Deployment) -> None:
    acked, nacked = play.together("pop.released", [{"how": "ack"}, {"how": "nack"}])
    assert acked["acked"] is nacked["acked"] is True
    assert acked["then"][0] == acked["first"][-1] + 1
    assert nacked["then"][0] == 0
    for result in (acked, nacked):
        assert result["late"] < NEWS_SECONDS[len(deployment.brokers)]


def test_discovery_finds_queues_by_namespace_and_task(play: Play) -> None:
    def found(*data: str) -> dict[str, object]:
        return {"data": list(data), "acked": [True] * len(data), "again": []}

    assert play("pop.labels") == {
        "namespace": found("1", "2", "4"),
        "task": found("1", "3", "4"),
        "both": found("1", "4"),
        "neither": [],
    }
