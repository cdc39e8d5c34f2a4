"""How many pushes are let in at a time, and who goes first when not all can be."""

from __future__ import annotations

import gevent
import pytest
from gevent.event import Event

from queen.engine.admission import Admission, Overloaded

SMALL = 1_000
LARGE = 100_000
ROOM = 1 << 20  # kilobytes: no bound that these tests meet


class Door:
    """Pushes that are under way until they are let go."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.inside: list[int] = []
        self._let_go = Event()

    def push(self, *sizes: int) -> None:
        """Let pushes come, one after the other."""
        for size in sizes:
            gevent.spawn(self._push, size)
            gevent.sleep(0)

    def empty(self) -> None:
        """Let those inside go, and all that wait follow them."""
        self._let_go.set()
        with gevent.Timeout(10):
            while self.admission.waiting:
                gevent.sleep(0)
        gevent.sleep(0)

    def _push(self, size: int) -> None:
        with self.admission.admit(size):
            self.inside.append(size)
            self._let_go.wait()


def test_without_consumers_large_pushes_come_in_as_they_like() -> None:
    door = Door(Admission(ROOM))
    door.push(*[LARGE] * 100)
    assert len(door.inside) == 100


def test_beside_consumers_no_more_large_pushes_are_under_way_than_half_of_their_requests() -> None:
    admission = Admission(ROOM)
    admission.consuming = 40
    door = Door(admission)
    door.push(*[LARGE] * 30)
    assert len(door.inside) == 20
    door.empty()
    assert len(door.inside) == 30


def test_a_few_consumers_leave_room_for_eight_large_pushes() -> None:
    admission = Admission(ROOM)
    admission.consuming = 1
    door = Door(admission)
    door.push(*[LARGE] * 30)
    assert len(door.inside) == 8


def test_small_pushes_pass_the_large_ones_that_wait_for_consumers() -> None:
    admission = Admission(ROOM)
    admission.consuming = 2
    door = Door(admission)
    door.push(*[LARGE] * 12, *[SMALL] * 50)
    assert door.inside.count(SMALL) == 50
    assert admission.waiting == 4


def test_small_ones_are_called_before_large_ones_when_all_must_wait() -> None:
    door = Door(Admission(125))  # one at a time, with room for two in line
    door.push(LARGE, LARGE, SMALL)
    assert door.inside == [LARGE]
    door.empty()
    assert door.inside == [LARGE, SMALL, LARGE]


def test_a_push_that_finds_the_line_full_is_refused() -> None:
    admission = Admission(200)
    door = Door(admission)
    door.push(*[LARGE] * 3)
    with pytest.raises(Overloaded, match="overloaded: 113 kB of pushes are under way"), admission.admit(LARGE):
        pass
