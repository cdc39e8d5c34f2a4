"""Liveness: one line when a peer falls silent, one when it is back, and no more memory than that takes."""

from __future__ import annotations

import pytest

from queen.mesh.liveness import Liveness


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("queen.mesh.liveness.time.monotonic", clock)
    return clock


def messages(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str, str]]:
    lines = [
        (record.levelname, record.message, record.__dict__["fields"]["peer"])
        for record in caplog.records
        if record.name == "queen.mesh"
    ]
    caplog.clear()
    return lines


def test_each_change_is_one_line(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "queen")
    liveness = Liveness(5.0)
    liveness.seen("queen-b")
    clock.now += 5.0  # exactly the threshold: not dead yet
    liveness.check()
    assert messages(caplog) == []
    clock.now += 0.001
    for _ in range(3):
        liveness.check()
    assert messages(caplog) == [("WARNING", "peer down", "queen-b")]
    liveness.seen("queen-b")
    for _ in range(3):
        liveness.check()
    assert messages(caplog) == [("INFO", "peer recovered", "queen-b")]


def test_a_peer_that_was_silent_for_an_hour_is_forgotten(clock: Clock) -> None:
    liveness = Liveness(5.0)
    liveness.seen("queen-b")
    clock.now += 3600
    liveness.check()
    assert "queen-b" in liveness.ages()
    clock.now += 1
    liveness.check()
    assert liveness.ages() == {}


def test_many_names_take_bounded_memory_and_the_longest_silent_goes(clock: Clock) -> None:
    liveness = Liveness(5.0)
    for number in range(1000):
        clock.now += 0.001
        liveness.seen(f"peer-{number}")
    assert len(liveness.ages()) == 256
    assert "peer-999" in liveness.ages()
    assert "peer-743" not in liveness.ages()
