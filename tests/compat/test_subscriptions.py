"""Where consumer groups begin, and how the client makes them begin again."""

from __future__ import annotations

from tests.compat.conftest import Deployment, Play
from tests.compat.test_pop import NEWS_SECONDS


def test_a_group_begins_where_its_subscription_says(play: Play) -> None:
    result = play("subscriptions.begins")
    assert result["before"] == {
        "all": [0, 1, 2],
        "new": [],
        "unsaid": [],
        "now": [],
        "second": [1, 2],
        "future": [],
        "long ago": [0, 1, 2],
    }
    assert result["after"] == {name: ["born", "later"] for name in ("new", "unsaid", "now")}


def test_a_group_replays_from_where_it_is_moved(play: Play, deployment: Deployment) -> None:
    result = play("subscriptions.sought")
    assert result["moved"] == [[True, 1, 2, [1, 2]], [True, 1, 3, [0, 1, 2]]]
    assert result["late"] < NEWS_SECONDS[len(deployment.brokers)]
    assert result["end"] == [True, True, 0]
    assert result["after"] == ["after"]


def test_a_waiting_pop_gets_what_its_group_is_moved_back_to(play: Play, deployment: Deployment) -> None:
    for result in play.together("subscriptions.sought_while_waiting", [{"how": "seek"}, {"how": "delete"}]):
        assert result["popped"] == [0, 1, 2]
        assert result["late"] < NEWS_SECONDS[len(deployment.brokers)]


def test_a_seek_without_queue_or_target_is_an_error(play: Play) -> None:
    unknown, aimless = play("subscriptions.sought_nothing")
    assert unknown == "Queue not found or has no partitions"
    assert aimless == "Must specify toEnd=true or a timestamp"


def test_a_deleted_group_begins_again(play: Play) -> None:
    assert play("subscriptions.deleted") == {
        "one": [True, 1],
        "left": True,
        "first": [0, 1, 2],
        "both": [True, 2, True],
        "gone": {},
        "second": [[0, 1, 2], [0, 1, 2]],
        "none": [True, 0],
    }


def test_a_deleted_group_may_begin_with_what_is_new(play: Play) -> None:
    assert play("subscriptions.from_now_on") == ["new"]


def test_a_registration_outlives_its_cursors_and_can_be_moved(play: Play) -> None:
    assert play("subscriptions.moved") == {
        "nothing": [],
        "updated": [True, 1],
        "deleted": [1, False],
        "popped": [1, 2],
    }
