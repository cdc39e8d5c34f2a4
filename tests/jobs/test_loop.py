"""How a job runs: again and again, whatever happens in it, until it is stopped."""

from __future__ import annotations

import logging
import time
from itertools import pairwise

import gevent
import pytest

from queen.db.errors import Unavailable
from queen.jobs.loop import Loop
from queen.log import Log
from tests.broker import wait_until


def test_cycles_are_counted_from_start_to_start() -> None:
    starts: list[float] = []

    def cycle() -> None:
        starts.append(time.monotonic())
        gevent.sleep(0.1)

    loop = Loop(Log("test"), 0.2, cycle, first=0.0)
    loop.start()
    wait_until(lambda: gevent.sleep(0.01) or len(starts) > 5, what="six cycles")
    loop.stop()
    gaps = sorted(later - sooner for sooner, later in pairwise(starts))
    assert 0.19 < gaps[len(gaps) // 2] < 0.5


def test_cycles_take_no_more_than_their_share_of_the_time() -> None:
    starts: list[float] = []

    def cycle() -> None:
        starts.append(time.monotonic())
        gevent.sleep(0.1)

    loop = Loop(Log("test"), 0.01, cycle, first=0.0, share=0.25)
    loop.start()
    wait_until(lambda: gevent.sleep(0.01) or len(starts) > 2, what="three cycles")
    loop.stop()
    assert all(later - sooner > 0.39 for sooner, later in pairwise(starts))


def test_what_a_cycle_raises_is_said_once_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    cycles = 0

    def cycle() -> None:
        nonlocal cycles
        cycles += 1
        raise Unavailable("away") if cycles % 2 else ValueError("broken")

    loop = Loop(Log("test"), 0.01, cycle)
    loop.start()
    wait_until(lambda: gevent.sleep(0.01) or cycles > 5, what="some cycles")
    loop.stop()
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_a_stopped_job_ends_its_cycle() -> None:
    ended = False

    def cycle() -> None:
        nonlocal ended
        while not loop.stopping:
            gevent.sleep(0.01)
        ended = True

    loop = Loop(Log("test"), 60, cycle, first=0.0)
    loop.start()
    gevent.sleep(0.05)
    loop.stop()
    assert ended


def test_a_cycle_that_does_not_end_is_ended() -> None:
    cleaned = False

    def cycle() -> None:
        nonlocal cleaned
        try:
            gevent.sleep(600)
        finally:
            cleaned = True

    loop = Loop(Log("test"), 60, cycle, first=0.0)
    loop.start()
    gevent.sleep(0.05)
    loop.stop()
    assert cleaned
