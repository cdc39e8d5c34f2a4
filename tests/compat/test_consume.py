"""Consuming with the client: groups, concurrency, order, failures and endings."""

from __future__ import annotations

from tests.compat.conftest import Deployment, Play
from tests.compat.test_pop import NEWS_SECONDS

ALL = {f"p{p}": list(range(4)) for p in range(8)}


def test_every_message_is_handled_once_and_in_order(play: Play) -> None:
    variants = [
        {"batch": 1, "each": False, "concurrency": 4, "sweep": 1},
        {"batch": 3, "each": False, "concurrency": 4, "sweep": 1},
        {"batch": 3, "each": True, "concurrency": 4, "sweep": 1},
        {"batch": 20, "each": False, "concurrency": 2, "sweep": 4},
        {"batch": 20, "each": True, "concurrency": 1, "sweep": 8},
    ]
    for variant, result in zip(variants, play.together("consume.handled", variants), strict=True):
        assert result["handled"] == ALL
        assert result["overlaps"] == 0
        # A batch of one is a message, a larger one a list.
        single = variant["batch"] == 1 or variant["each"]
        assert result["given"] == ["dict" if single else "list"]
        assert result["calls"] == 32 or not single


def test_a_group_shares_messages_and_another_gets_them_all(play: Play) -> None:
    result = play("consume.shared")
    assert result["shared"] == ALL
    assert result["overlaps"] == 0
    assert result["other"] == ALL


def test_a_waiting_consumer_gets_what_any_broker_accepts(play: Play, deployment: Deployment) -> None:
    result = play("consume.live", count=4)
    assert result["handled"] == {"Default": [0, 1, 2, 3]}
    assert max(result["latencies"]) < NEWS_SECONDS[len(deployment.brokers)]


def test_a_failure_redelivers_from_the_failed_message_on(play: Play) -> None:
    assert play("consume.retried") == {"seen": [0, 1, 2, 2, 3, 4], "dead": 0}


def test_a_message_that_always_fails_is_dead_lettered_and_the_rest_goes_on(play: Play) -> None:
    result = play("consume.poison", limit=2)
    assert result["seen"] == [0, 1, 1, 1, 2]
    (letter,) = result["dead"]["messages"]
    assert result["dead"]["total"] == 1
    assert letter["data"] == 1
    assert letter["errorMessage"] == "never"


def test_a_batch_that_always_fails_dies_message_by_message(play: Play) -> None:
    result = play("consume.batch_failure", limit=1)
    assert result["calls"] == [[0, 1], [0, 1], [1], [1]]
    # The last one filed comes first.
    assert result["dead"] == [[1, "call 4"], [0, "call 2"]]


def test_a_handler_may_acknowledge_by_itself(play: Play) -> None:
    # An ack completes what came before it in the partition.
    assert play("consume.by_hand") == {"seen": [0, 1, 2, 3], "lags": [2, 0]}


def test_consumers_end_at_their_limit_signal_or_idleness(play: Play) -> None:
    assert play("consume.endings") == {
        "limit": [[0, 1, 2], 3],
        "signal": [[0, 1, 2, 3, 4], 1],
        "idle": [[0, 1, 2, 3, 4, 5], 0],
    }


def test_a_consumer_of_a_namespace_gets_the_messages_of_its_queues(play: Play) -> None:
    assert play("consume.labels") == ["0/0", "0/1", "1/0", "1/1", "2/0", "2/1"]


def test_consumers_that_left_take_no_messages_with_them(play: Play, deployment: Deployment) -> None:
    result = play("consume.deserters", count=4)
    assert result["deserters"] == {"Default": ["first"]}
    assert result["popped"] == [0, 1, 2]
    assert result["late"] < NEWS_SECONDS[len(deployment.brokers)]
