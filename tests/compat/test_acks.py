"""Acknowledging with the client: successes, failures, the retry budget and dead letters."""

from __future__ import annotations

from tests.compat.conftest import Play

NO_LEASE = "invalid or expired lease"


def test_acks_one_by_one_move_the_group_and_the_last_ends_the_lease(play: Play) -> None:
    assert play("acks.singles") == {
        # success, leaseReleased, dlq, noop, what is left
        "results": [
            [True, False, False, False, 2],
            [True, False, False, False, 1],
            [True, True, False, False, 0],
        ],
        "again": [False, NO_LEASE],
        "without lease": [True, True],
        "left": [],
    }


def test_a_list_of_acks_spans_partitions_and_parts_of_batches(play: Play) -> None:
    result = play("acks.lists")
    first = sorted(result.pop("first"))
    # The partitions come in any order, so two sets of indexes are right.
    assert [index for index, *_ in first] == [0, 1, 2, 3]
    assert [id for _, id, _ in first] == ["t0", "t1", "t2", "t0"]
    assert all(success for *_, success in first)
    assert result == {
        "popped": {"a": [0, 1, 2], "b": [0, 1, 2]},
        "lag": 2,
        "rival": [],
        "rest": [True, True],
        "left": 0,
    }


def test_an_ack_completes_what_came_before_it(play: Play) -> None:
    assert play("acks.implied") == {"success": True, "released": True, "lag": 0}


def test_an_ack_counts_for_the_group_it_names_alone(play: Play) -> None:
    result = play("acks.other_group")
    (unnamed, nobody, unknown) = result["refused"]
    assert unnamed == [False, "consumer not found"]
    assert nobody == [False, "consumer not found"]
    assert unknown[0] is False
    assert unknown[1].startswith("unresolvable")
    assert result["lag"] == 1
    assert result["last"] is True


def test_a_message_dies_after_its_retries_and_says_why(play: Play) -> None:
    result = play("acks.failures", limit=2)
    # success, leaseReleased, dlq: one attempt and two retries
    assert result["attempts"] == [[True, True, False], [True, True, False], [True, True, True]]
    assert (result["next"], result["done"], result["lag"]) == (1, True, 0)
    assert result["dead"]["total"] == 1
    (letter,) = result["dead"]["messages"]
    assert letter["data"] == 0
    assert letter["transactionId"] == "t0"
    assert letter["partitionId"] == result["partitionId"]
    assert letter["partition"] == "Default"
    assert letter["errorMessage"] == "no 3"
    assert letter["retryCount"] == 2
    assert letter["consumerGroup"].endswith("-group")
    assert letter["consumerGroup"] == f"{letter['queue']}-group"
    assert result["of another group"] == result["of another queue"] == 0


def test_statuses_by_name_give_back_give_up_and_fail(play: Play) -> None:
    assert play("acks.statuses") == {
        "retries": [[0, True, False]] * 2,
        "given up": True,
        "spent": [1, True],
        "last": [2, True],
        "dead": [[1, "reason"], [0, "reason"]],
        "lag": 0,
    }


def test_without_dead_letters_a_failed_message_is_dropped(play: Play) -> None:
    assert play("acks.dropped") == {"result": [True, False], "then": 1, "dead": 0}


def test_a_failure_in_the_middle_keeps_what_was_done_before_it(play: Play) -> None:
    assert play("acks.middle") == {
        "done": [True, True],
        "failed": True,
        "late": [[False, NO_LEASE]] * 2,
        "again": [2, 3, 4],
    }


def test_dead_letters_come_in_pages_and_by_filter(play: Play) -> None:
    newest_first = ["b2", "b1", "b0", "a2", "a1", "a0"]
    assert play("acks.letters") == {
        "all": newest_first,
        "first page": newest_first[:4],
        "second page": newest_first[4:],
        "partition": ["a2", "a1", "a0"],
        "since": newest_first[:3],
        "until": newest_first[2:],
        "future": [],
    }
