"""Parking: wakes, time-outs, clients that leave, and the order at a gate."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import gevent
import pytest
from gevent import socket as green
from hypothesis import given, settings
from hypothesis import strategies as st

from queen.db.records import Claimed, Subscription
from queen.engine.admission import Admission
from queen.engine.flags import Flags
from queen.engine.hotlist import HotList
from queen.engine.identifiers import Minter
from queen.engine.pop import Popped, Popper, PopRequest
from queen.engine.waiting import Client, ClientGone, Gate, Parked
from queen.settings import Settings

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

Pair = tuple[socket.socket, socket.socket]
LONG = 20.0
SHORT = 0.05


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A broker's end of a connection, and its client's."""
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


def nobody() -> Client:
    return Client(None)


def asleep(parked: Parked, client: Client, seconds: float = LONG) -> gevent.Greenlet[..., bool]:
    """Start a sleep, and return once it is one."""
    sleeper = gevent.spawn(parked.sleep, seconds, client)
    gevent.sleep(0)
    return sleeper


def quickly(sleeper: gevent.Greenlet[..., bool]) -> bool:
    """Return what a sleep returns, long before its time is up."""
    return sleeper.get(timeout=LONG / 2)


def test_a_sleep_ends_when_its_time_is_up(pair: Pair) -> None:
    for client in (nobody(), Client(pair[0])):
        started = time.monotonic()
        assert Parked().sleep(SHORT, client) is False
        assert SHORT <= time.monotonic() - started < LONG / 2


@pytest.mark.parametrize("seconds", [0, -1, 1e-9])
def test_a_sleep_of_no_time_ends_at_once(seconds: float) -> None:
    assert Parked().sleep(seconds, nobody()) is False


def test_a_wake_ends_a_sleep(pair: Pair) -> None:
    for client in (nobody(), Client(pair[0])):
        parked = Parked()
        sleeper = asleep(parked, client)
        parked.wake()
        assert quickly(sleeper) is True


def test_a_wake_before_the_sleep_counts(pair: Pair) -> None:
    parked = Parked()
    parked.wake()
    assert parked.sleep(LONG, Client(pair[0])) is True


def test_a_second_wake_changes_nothing() -> None:
    parked = Parked()
    sleeper = asleep(parked, nobody())
    parked.wake()
    parked.wake()
    assert quickly(sleeper) is True


def test_a_client_that_closes_ends_the_sleep(pair: Pair) -> None:
    ours, theirs = pair
    sleeper = asleep(Parked(), Client(ours))
    theirs.close()
    with pytest.raises(ClientGone):
        quickly(sleeper)


def test_a_client_that_shuts_its_side_ends_the_sleep(pair: Pair) -> None:
    ours, theirs = pair
    sleeper = asleep(Parked(), Client(ours))
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(ClientGone):
        quickly(sleeper)


def test_a_client_that_closed_before_is_noticed(pair: Pair) -> None:
    ours, theirs = pair
    theirs.sendall(b"GET / HTTP/1.1\r\n\r\n")
    theirs.close()
    with pytest.raises(ClientGone):
        Client(ours).check()
    with pytest.raises(ClientGone):
        Parked().sleep(LONG, Client(ours))


def test_a_client_that_stays_passes_the_check(pair: Pair) -> None:
    ours, theirs = pair
    Client(ours).check()
    theirs.sendall(b"more")
    Client(ours).check()
    nobody().check()


def test_bytes_sent_early_end_no_sleep_and_cost_no_time(pair: Pair) -> None:
    ours, theirs = pair
    parked = Parked()
    theirs.sendall(b"GET / HTTP/1.1\r\n\r\n")
    sleeper = asleep(parked, Client(ours))
    used = time.process_time()
    gevent.sleep(SHORT)
    assert time.process_time() - used < SHORT / 2
    assert not sleeper.ready()
    parked.wake()
    assert quickly(sleeper) is True


def test_bytes_sent_early_leave_the_time_as_it_is(pair: Pair) -> None:
    ours, theirs = pair
    started = time.monotonic()
    sleeper = asleep(Parked(), Client(ours), 4 * SHORT)
    theirs.sendall(b"x")
    assert quickly(sleeper) is False
    assert time.monotonic() - started >= 4 * SHORT


def test_a_sleep_takes_nothing_from_the_socket(pair: Pair) -> None:
    ours, theirs = pair
    parked = Parked()
    sleeper = asleep(parked, Client(ours))
    theirs.sendall(b"next request")
    gevent.sleep(0)
    parked.wake()
    assert quickly(sleeper) is True
    assert ours.recv(100) == b"next request"


def test_a_killed_sleeper_leaves_nothing_behind(pair: Pair) -> None:
    ours, theirs = pair
    parked = Parked()
    sleeper = asleep(parked, Client(ours))
    sleeper.kill()
    parked.wake()
    theirs.sendall(b"x")
    gevent.sleep(0)
    assert Parked().sleep(SHORT, Client(ours)) is False


def test_a_real_connection_is_watched_to_its_end() -> None:
    listener = green.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    client = green.create_connection(listener.getsockname())
    ours, _ = listener.accept()
    sleeper = asleep(Parked(), Client(ours))
    client.close()
    with pytest.raises(ClientGone):
        quickly(sleeper)
    ours.close()
    listener.close()


def test_many_sleep_and_all_wake() -> None:
    gate = Gate()
    crowd = [Parked() for _ in range(2000)]
    sleepers = [gevent.spawn(parked.sleep, LONG, nobody()) for parked in crowd]
    gevent.sleep(0)
    for parked in crowd:
        gate.add(parked)
    assert len(gate) == 2000
    gate.wake_all()
    assert [quickly(sleeper) for sleeper in sleepers] == [True] * 2000
    assert len(gate) == 0


def test_a_gate_wakes_the_first_that_came() -> None:
    gate = Gate()
    first, second, third = crowd = [Parked() for _ in range(3)]
    for parked in crowd:
        gate.add(parked)
    gate.wake()
    assert [parked.woken for parked in crowd] == [True, False, False]
    gate.add(first, first=True)
    gate.remove(second)
    gate.wake(2)
    assert [parked.woken for parked in crowd] == [True, False, True]
    assert third.woken


@given(st.lists(st.sampled_from(["add", "front", "wake", "wake 2", "leave"]), max_size=60))
def test_a_gate_is_a_queue(steps: list[str]) -> None:
    gate = Gate()
    waiting: list[Parked] = []
    woken: list[Parked] = []

    def wake(count: int) -> None:
        woken.extend(waiting[:count])
        del waiting[:count]
        gate.wake(count)

    actions: dict[str, Callable[[], None]] = {"wake": lambda: wake(1), "wake 2": lambda: wake(2)}
    everybody: list[Parked] = []
    for step in steps:
        if step in actions:
            actions[step]()
        elif step == "leave" and waiting:
            gate.remove(waiting.pop(len(waiting) // 2))
        elif step != "leave":
            parked = Parked()
            everybody.append(parked)
            gate.add(parked, first=step == "front")
            waiting.insert(0 if step == "front" else len(waiting), parked)
    assert [parked for parked in everybody if parked.woken] == [parked for parked in everybody if parked in woken]
    assert len(gate) == len(waiting)


# What the pops make of it


class Trials:
    """Stands in for the database: the first claim finds nothing, and something happens meanwhile."""

    def __init__(self) -> None:
        self.calls = 0
        self.meanwhile: Callable[[], object] = lambda: None

    def pop_specific(self, *_: object) -> list[Claimed]:
        self.calls += 1
        if self.calls == 1:
            self.meanwhile()
        if self.calls < 3:
            return []
        return [Claimed(b"p", b"took", bytes(16), 0, 0, 1, 0, 0, 0, None, b"")]


class Frames:
    """Stands in for the segment cache."""

    def segment(self, claim: Claimed) -> tuple[list[bytes], bool]:
        return [b"frame"], True


class Bench:
    """A popper whose claims are those of `trials`."""

    def __init__(self) -> None:
        self.trials = Trials()
        self.hotlist = HotList()
        flags = Flags(self.trials)  # type: ignore[arg-type]
        parts: list[Any] = [Settings(), self.trials, flags, self.hotlist, None, Minter(), None, Frames(), Admission(1)]
        self.popper = Popper(*parts)

    def pop(self, wait: bool = True) -> Popped | None:
        request = PopRequest(bytes(16), Subscription(b"g", b"new", b""), 1, 1, 0, True, wait, LONG, nobody())
        return self.popper.pinned(request, b"q", b"p")

    def push(self) -> None:
        self.hotlist.pushed((bytes(16), b"q", b"p"), 0, 1)


def test_a_push_that_comes_while_a_pop_tries_is_not_missed() -> None:
    bench = Bench()
    bench.trials.meanwhile = bench.push
    sleeper = gevent.spawn(bench.pop)
    gevent.sleep(SHORT)
    assert bench.trials.calls == 2
    bench.push()
    assert sleeper.get(timeout=LONG / 2) is not None


def test_a_pop_that_ends_leaves_the_others_their_gate() -> None:
    bench = Bench()
    bench.trials.meanwhile = lambda: bench.pop(wait=False)
    sleeper = gevent.spawn(bench.pop)
    gevent.sleep(0)
    bench.push()
    assert sleeper.get(timeout=LONG / 2) is not None
    assert bench.hotlist.lane(bytes(16), b"q").pinned == {}
