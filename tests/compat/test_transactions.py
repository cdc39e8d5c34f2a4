"""Transactions with the client: acks and pushes that happen together or not at all."""

from __future__ import annotations

from tests.compat.conftest import Deployment, Play
from tests.compat.test_pop import NEWS_SECONDS


def test_an_ack_and_its_results_commit_together(play: Play) -> None:
    assert play("transactions.forward") == {
        "success": True,
        "results": [[0, "ack", True], [1, "push", True], [2, "push", True]],
        "ids": True,
        "messageIds": True,
        "out": {"p": ["x", "y"]},
        "lag": 0,
    }


def test_a_transaction_spans_partitions_and_queues(play: Play) -> None:
    result = play("transactions.several")
    assert result["leases"] >= 1
    assert result["results"] == [["ack", True]] * 6 + [["push", True]] * 6
    assert result["indexes"] == list(range(12))
    assert result["lag"] == 0
    assert result["out"] == [[0, 1, 2], [0, 1, 2]]


def test_a_duplicate_rolls_everything_back(play: Play) -> None:
    assert play("transactions.duplicate") == {
        "error": True,
        "between": [1, 1],
        "success": True,
        "after": [0, 2],
        "out": ["first", "new"],
    }


def test_a_refused_ack_rolls_everything_back(play: Play) -> None:
    assert play("transactions.refused") == {"errors": ["QTXN"] * 3, "lag": 1, "total": 0, "acked": True}


def test_pushes_alone_commit_and_a_repeated_key_counts_once(play: Play) -> None:
    assert play("transactions.pushes") == {
        "duplicates": [False, True, False],
        "same": True,
        "popped": {"Default": [1], "b": [1]},
        "total": 2,
    }


def test_a_failure_inside_a_transaction_is_dead_lettered_with_it(play: Play) -> None:
    assert play("transactions.failed") == {
        "success": True,
        "dlq": True,
        "told": ["told"],
        "rest": [1],
        "dead": [0],
    }


def test_a_commit_wakes_waiting_pops(play: Play, deployment: Deployment) -> None:
    result = play("transactions.woken")
    assert result["popped"] == [[1], [1]]
    assert result["late"] < NEWS_SECONDS[len(deployment.brokers)]
