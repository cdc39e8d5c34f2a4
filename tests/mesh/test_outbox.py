"""How soon hints leave: at once, and together when there are many."""

from __future__ import annotations

import time
from collections.abc import Iterator

import gevent
import pytest

from queen.engine.identifiers import DEFAULT_TENANT
from queen.mesh.outbox import Outbox

WINDOW = 0.005
AT_ONCE = 20


@pytest.fixture
def sent() -> list[bytes]:
    return []


@pytest.fixture
def outbox(sent: list[bytes]) -> Iterator[Outbox]:
    box = Outbox(sent.append, sent.append, dirty=False)
    box.start()
    gevent.sleep(0)
    yield box
    box.stop()


def push(outbox: Outbox, number: int) -> None:
    outbox.pushed((DEFAULT_TENANT, b"orders", b"%d" % number), peers=False)


def test_each_of_a_few_hints_leaves_at_once(outbox: Outbox, sent: list[bytes]) -> None:
    for number in range(AT_ONCE):
        push(outbox, number)
        assert len(sent) == number, "telling sends nothing itself"
        gevent.sleep(0)
        assert len(sent) == number + 1


def test_many_hints_leave_together(outbox: Outbox, sent: list[bytes]) -> None:
    started = time.monotonic()
    for number in range(3000):
        push(outbox, number)
        gevent.sleep(0)
    flushed = len(sent)
    assert flushed <= AT_ONCE + 1 + (time.monotonic() - started) / WINDOW
    with gevent.Timeout(30):
        while sum(frame.count(b'"queue"') for frame in sent) < 3000:
            gevent.sleep(WINDOW)


def test_a_partition_that_waits_is_told_of_once(outbox: Outbox, sent: list[bytes]) -> None:
    for _ in range(10):
        push(outbox, 7)
    gevent.sleep(0)
    assert b"".join(sent).count(b'"queue"') == 1
