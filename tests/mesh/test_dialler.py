"""The sending side, against a peer of the test's own: what it writes, drops, discards, and how it comes back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext

import gevent
import pytest
from gevent import socket

from queen.mesh.dialler import Dialler, backoff
from queen.mesh.frames import FrameReader, Tag, encode
from queen.mesh.hello import hello

LONG = 20.0
NEVER = 3600.0
WAKE = encode(Tag.MESSAGE_AVAILABLE, b'{"queue":"q"}')


class Here:
    """A peer that does as the test says."""

    def __init__(self) -> None:
        self.server = socket.socket()
        self.server.bind(("127.0.0.1", 0))
        self.server.listen(16)
        self.server.settimeout(LONG)
        self.port: int = self.server.getsockname()[1]
        self._diallers: list[Dialler] = []

    def dialler(self, heartbeat: float = NEVER, stall: float = LONG) -> Dialler:
        """Start a dialler for this peer."""
        dialler = Dialler(
            "here",
            lambda: socket.create_connection(("127.0.0.1", self.port), timeout=LONG),
            lambda: (hello("test", "i", b""), None),
            heartbeat,
            stall,
        )
        self._diallers.append(dialler)
        dialler.start()
        return dialler

    def accept(self) -> Accepted:
        connection, _ = self.server.accept()
        return Accepted(connection)

    def close(self) -> None:
        for dialler in self._diallers:
            dialler.stop()
        self.server.close()
        gevent.sleep(0)


class Accepted:
    """One connection of a dialler."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        connection.settimeout(LONG)
        self._reader = FrameReader(connection.recv, nullcontext)
        first = self.read()
        assert first == Tag.HELLO

    def read(self) -> int | None:
        """The tag of the next frame."""
        frame = self._reader.read()
        return None if frame is None else frame[0]


def until(condition: object) -> None:
    """Let the other greenlets run until something holds."""
    with gevent.Timeout(LONG):
        while not condition():  # type: ignore[operator]
            gevent.sleep(0.005)


@pytest.fixture
def here() -> Iterator[Here]:
    peer = Here()
    yield peer
    peer.close()


def test_hello_comes_first_and_then_what_is_offered(here: Here) -> None:
    dialler = here.dialler()
    accepted = here.accept()
    until(lambda: dialler.connected)
    assert dialler.resolved_ip == "127.0.0.1"
    for _ in range(3):
        dialler.offer(WAKE)
        assert accepted.read() == Tag.MESSAGE_AVAILABLE
    until(lambda: dialler.sent == 3)
    assert dialler.dropped == 0


def test_what_waited_for_an_absent_peer_is_discarded_and_counted(here: Here) -> None:
    port, here.port = here.port, 1
    dialler = here.dialler()
    for _ in range(1024 + 7):
        dialler.offer(WAKE)
    assert dialler.dropped == 7
    here.port = port
    accepted = here.accept()
    until(lambda: dialler.connected)
    assert dialler.dropped == 1024 + 7
    dialler.offer(encode(Tag.QUEUE_CONFIG_SET, b'{"queue":"q"}'))
    assert accepted.read() == Tag.QUEUE_CONFIG_SET


def test_an_idle_connection_carries_heartbeats_and_a_busy_one_too(here: Here) -> None:
    dialler = here.dialler(heartbeat=0.02)
    accepted = here.accept()
    assert [accepted.read() for _ in range(3)] == [Tag.HEARTBEAT] * 3
    tags = set()
    while tags != {Tag.HEARTBEAT, Tag.MESSAGE_AVAILABLE}:
        dialler.offer(WAKE)
        tags.add(accepted.read())


def test_a_stalled_peer_delays_nobody_and_costs_bounded_memory(here: Here) -> None:
    dialler = here.dialler(stall=NEVER)
    here.accept()
    until(lambda: dialler.connected)
    frame = encode(Tag.MESSAGE_AVAILABLE_BATCH, b" " * 20_000)
    slowest = 0.0
    for number in range(10_000):
        started = time.monotonic()
        dialler.offer(frame)
        slowest = max(slowest, time.monotonic() - started)
        if number % 100 == 0:
            gevent.sleep(0)
    assert dialler.dropped > 10_000 - 2 * 1024 - 1000
    assert len(dialler._frames) <= 1024
    assert dialler._bytes <= 32 * 1024 * 1024
    assert slowest < 1.0


def test_large_frames_do_not_fill_the_memory_by_their_number(here: Here) -> None:
    here.port = 1
    dialler = here.dialler()
    for _ in range(100):
        dialler.offer(bytes(1024 * 1024))
    assert dialler._bytes <= 32 * 1024 * 1024
    assert dialler.dropped >= 68


def test_a_peer_that_reads_nothing_is_given_up_after_a_while(here: Here) -> None:
    dialler = here.dialler(stall=0.05)
    stalled = here.accept()
    until(lambda: dialler.connected)
    while dialler.connected:
        dialler.offer(encode(Tag.MESSAGE_AVAILABLE_BATCH, b" " * 100_000))
        gevent.sleep(0)
    assert here.accept() is not stalled


def test_a_peer_that_hangs_up_is_noticed_without_anything_to_send(here: Here) -> None:
    dialler = here.dialler()
    accepted = here.accept()
    until(lambda: dialler.connected)
    accepted.socket.close()
    until(lambda: not dialler.connected)
    assert dialler.resolved_ip is None
    assert here.accept().read is not None
    until(lambda: dialler.connected)


def test_a_peer_that_answers_is_not_one(here: Here, caplog: pytest.LogCaptureFixture) -> None:
    dialler = here.dialler()
    for _ in range(4):
        accepted = here.accept()
        until(lambda: dialler.connected)
        accepted.socket.sendall(b"220 mail.example ESMTP\r\n")
        until(lambda: not dialler.connected)
    until(lambda: "answers, as no peer does" in caplog.text)
    assert "secrets differ" not in caplog.text


def test_a_peer_that_closes_at_once_is_warned_of_once_and_dialled_less_and_less(
    here: Here, caplog: pytest.LogCaptureFixture
) -> None:
    started = time.monotonic()
    here.dialler()
    for _ in range(4):
        assert "secrets differ" not in caplog.text
        here.accept().socket.close()
    # 250, 500 and 1000 ms, less a fifth at most.
    assert time.monotonic() - started > 0.25 + 0.4 + 0.8
    until(lambda: "closing the connection at once: do the secrets differ?" in caplog.text)
    here.accept().socket.close()
    here.accept()
    assert caplog.text.count("secrets differ") == 1


def test_a_peer_that_restarts_is_not_taken_for_one_with_another_secret(
    here: Here, caplog: pytest.LogCaptureFixture
) -> None:
    """It hangs up, can't be reached for a while, and may hang up once more as its workers come and go."""
    caplog.set_level("DEBUG", "queen")
    here.dialler()
    port = here.port
    for restart in range(1, 3):
        for _ in range(3):
            here.accept().socket.close()
        here.port = 1
        until(lambda restart=restart: caplog.text.count("dial failed") >= restart)  # type: ignore[misc]
        here.port = port
    assert "secrets differ" not in caplog.text


def test_the_backoff_grows_from_a_quarter_second_to_five() -> None:
    for attempts, (low, high) in enumerate([(0.25, 0.25), (0.4, 0.5), (0.8, 1), (1.6, 2), (3.2, 4), (4, 5), (4, 5)]):
        assert all(low <= backoff(attempts) <= high for _ in range(100))
    assert len({backoff(9) for _ in range(100)}) > 50
