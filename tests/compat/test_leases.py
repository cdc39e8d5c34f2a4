"""Leases as the client sees them: their end, and their renewal by hand and by itself."""

from __future__ import annotations

from tests.compat.conftest import Play


def test_an_expired_lease_redelivers_and_its_ack_is_refused(play: Play) -> None:
    result = play("leases.expired")
    # The lease lasts a second, and the broker that waits looks again within another.
    assert 0.5 < result.pop("late") < 3.5
    assert result == {
        "same": True,
        "old": [False, "invalid or expired lease"],
        "lag": 1,
        "new": True,
        "dead": 0,
    }


def test_a_renewed_lease_outlasts_its_first_end(play: Play) -> None:
    for result in play.together("leases.renewed", [{"by": by} for by in ("id", "message", "list")]):
        assert result["renewed"] == [[lease, True, True] for lease in result["leases"]]
        assert len(set(result["leases"])) == 2
        assert result["rival"] == []
        assert result["acked"] == [True, True]
        assert result["lag"] == 0


def test_a_lease_that_ended_stays_ended(play: Play) -> None:
    assert play("leases.too_late") == {"expiries": [None, None], "acked": True}


def test_a_consumer_keeps_its_messages_past_the_lease_if_it_renews(play: Play) -> None:
    one, three, none = play.together(
        "leases.automatic",
        [{"renew": True, "sweep": 1}, {"renew": True, "sweep": 3}, {"renew": False, "sweep": 1}],
    )
    assert one == {"handled": ["a"], "offered": []}
    assert three == {"handled": ["a", "b", "c"], "offered": []}
    # Without renewal the same handler loses its message to the next consumer.
    assert none == {"handled": ["a"], "offered": ["a"]}
