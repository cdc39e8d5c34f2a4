"""The receiving side against peers that mean no good: nothing they do costs much or harms an honest one."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator

import gevent
import psutil
import pytest
from gevent import socket

from queen.log import Log
from queen.mesh.frames import LIMIT, Tag, Unwelcome, encode, encode_object
from queen.mesh.hello import Doorkeeper, Hello, ReplayGuard, hello, signed_hello
from queen.mesh.listener import Listener
from queen.mesh.peers import AllowList
from queen.mesh.seals import Sealer

LONG = 20.0
SECRET = b"s3cr3t"
FLIP = encode_object(Tag.MAINTENANCE_MODE_SET, {"enabled": True})


class Receiver:
    """Notes what arrives."""

    def __init__(self) -> None:
        self.frames: list[tuple[str, int, bytes]] = []
        self.open = 0
        self.opened_ever = 0

    def opened(self, hello: Hello) -> Callable[[int, bytes], None]:
        self.open += 1
        self.opened_ever += 1
        return lambda tag, payload: self.frames.append((hello.server_id, tag, payload))

    def closed(self, hello: Hello) -> None:
        self.open -= 1


class Port:
    """A listener on a port of this machine."""

    def __init__(
        self, idle: float = LONG, most: int = 16, allow: AllowList | None = None, strict: bool = False
    ) -> None:
        self.receiver = Receiver()
        self.keeper = Doorkeeper([SECRET], ReplayGuard.REFUSE, strict=strict)
        self.listener = Listener(self.keeper, self.receiver, idle, most, allow)
        bound = socket.socket()
        bound.bind(("127.0.0.1", 0))
        bound.listen(1024)
        self.address: tuple[str, int] = bound.getsockname()
        self.listener.start(bound)

    def connect(self, data: bytes = b"") -> socket.socket:
        connection = socket.create_connection(self.address, timeout=LONG)
        if data:
            connection.sendall(data)
        return connection

    def honest(self, name: str = "honest") -> socket.socket:
        """A peer that is let in."""
        before = self.receiver.open
        connection = self.connect(hello(name, "", SECRET))
        until(lambda: self.receiver.open > before)
        return connection

    def hears(self, connection: socket.socket) -> bool:
        """Whether a frame on a connection arrives."""
        before = len(self.receiver.frames)
        connection.sendall(FLIP)
        until(lambda: len(self.receiver.frames) > before)
        return True


@pytest.fixture
def port() -> Iterator[Port]:
    port = Port()
    yield port
    port.listener.stop()
    gevent.sleep(0)


def until(condition: Callable[[], object]) -> None:
    """Let the other greenlets run until something holds."""
    with gevent.Timeout(LONG):
        while not condition():
            gevent.sleep(0.005)


def closed_in_silence(connection: socket.socket) -> bool:
    """Whether the listener hangs up without a word."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_an_honest_peer_is_heard(port: Port) -> None:
    connection = port.honest("queen-b")
    connection.sendall(FLIP + encode(Tag.HEARTBEAT) + FLIP)
    until(lambda: len(port.receiver.frames) == 3)
    assert [(peer, tag) for peer, tag, _ in port.receiver.frames] == [
        ("queen-b", Tag.MAINTENANCE_MODE_SET),
        ("queen-b", Tag.HEARTBEAT),
        ("queen-b", Tag.MAINTENANCE_MODE_SET),
    ]
    assert port.listener.received == 3
    connection.close()
    until(lambda: port.receiver.open == 0)
    assert port.listener.handshake_failures == 0
    assert len(port.listener) == 0


@pytest.mark.parametrize(
    "first",
    [
        FLIP,
        encode(Tag.HEARTBEAT),
        encode(Tag.HELLO),
        encode(Tag.HELLO, b"{}"),
        encode(Tag.HELLO, b"not json"),
        pytest.param(hello("queen-b", "", b"wrong secret"), id="another secret"),
        pytest.param(hello("queen-b", "", b""), id="no secret"),
        b"\x00\x00\x00\x00",
        b"\xff\xff\xff\xff" + b"\x04" + b"x" * 100,
        (LIMIT + 1).to_bytes(4, "big") + b"\x04",
        (4097).to_bytes(4, "big") + b"\x04" + b" " * 4096,
        b"GET / HTTP/1.1\r\nHost: queen\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_who_does_not_show_the_secret_is_shown_the_door(port: Port, first: bytes) -> None:
    connection = port.connect(first + FLIP)
    assert closed_in_silence(connection)
    until(lambda: port.listener.handshake_failures == 1)
    assert port.receiver.frames == []
    assert port.hears(port.honest())


def test_one_who_says_nothing_whole_counts_as_refused(port: Port) -> None:
    for part in (b"", b"\x00\x00", hello("queen-b", "", SECRET)[:-1]):
        port.connect(part).close()
    until(lambda: port.listener.handshake_failures == 3)


def test_a_captured_hello_is_of_no_use(port: Port) -> None:
    captured = hello("queen-b", "", SECRET)
    assert port.hears(port.connect(captured))
    for _ in range(3):
        assert closed_in_silence(port.connect(captured + FLIP))
    until(lambda: port.listener.handshake_failures == 3)
    assert port.keeper.replays == 3
    assert len(port.receiver.frames) == 1


@pytest.mark.parametrize("after", [b"\x00\x00\x00\x00", b"\xff\xff\xff\xff", (LIMIT + 1).to_bytes(4, "big"), FLIP[:-1]])
def test_a_broken_frame_later_ends_the_connection_and_is_no_refusal(port: Port, after: bytes) -> None:
    connection = port.honest()
    connection.sendall(FLIP + after)
    connection.shutdown(socket.SHUT_WR)
    assert closed_in_silence(connection)
    until(lambda: port.receiver.open == 0)
    assert (port.listener.handshake_failures, port.listener.frames_rejected) == (0, 1)
    assert len(port.receiver.frames) == 1


def test_a_slow_hello_is_not_waited_for(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("queen.mesh.listener._HELLO_SECONDS", 0.2)
    slow = port.connect()
    frame = hello("queen-b", "", SECRET)
    started = time.monotonic()
    try:
        for byte in frame:
            slow.sendall(bytes([byte]))
            gevent.sleep(0.05)
    except OSError:
        pass
    assert time.monotonic() - started < 0.05 * len(frame)
    until(lambda: port.listener.handshake_failures == 1)


def test_a_thousand_idle_connections_harm_nobody(port: Port) -> None:
    process = psutil.Process()
    honest = port.honest()
    before = process.memory_info().rss
    crowd = []
    for _ in range(1000):
        crowd.append(port.connect())
        gevent.sleep(0)
    until(lambda: port.listener.handshake_failures >= 0 and len(port.listener) <= 16)
    assert port.hears(honest)
    assert port.hears(port.honest("late"))
    assert len(port.listener) <= 16
    assert process.memory_info().rss - before < 40_000_000
    for connection in crowd:
        connection.close()


def test_those_who_showed_the_secret_are_not_pushed_out(port: Port) -> None:
    honest = [port.honest(f"peer-{number}") for number in range(16)]
    assert closed_in_silence(port.connect())
    assert port.listener.peers_refused == 1
    assert all(port.hears(connection) for connection in honest)


def test_a_silent_connection_is_closed(port: Port) -> None:
    short = Port(idle=1.0)
    connection = short.honest()
    for _ in range(8):
        gevent.sleep(0.2)
        connection.sendall(encode(Tag.HEARTBEAT))
    assert closed_in_silence(connection)
    short.listener.stop()


def test_large_frames_that_never_end_cost_little_and_keep_nobody_waiting_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("queen.mesh.listener._LARGE_SECONDS", 0.2)
    port = Port(idle=3600)
    process = psutil.Process()
    honest = port.honest()
    before = process.memory_info().rss
    slow = [port.honest(f"slow-{number}") for number in range(8)]
    for connection in slow:
        connection.sendall(LIMIT.to_bytes(4, "big") + b"\x05")
    part = b" " * 100_000
    for _ in range(50):
        for connection in slow:
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                connection.send(part)
        gevent.sleep(0)
    assert port.hears(honest)
    assert process.memory_info().rss - before < 60_000_000
    honest.sendall(encode(Tag.HOTLIST_DIRTY_BATCH, b" " * 400_000))
    assert port.hears(honest)
    assert len(port.receiver.frames) == 3
    port.listener.stop()


def test_only_allowed_addresses_are_listened_to() -> None:
    closed = Port(allow=AllowList("192.0.2.0/24", []))
    assert closed_in_silence(closed.connect(hello("queen-b", "", SECRET)))
    assert (closed.listener.peers_refused, closed.listener.handshake_failures) == (1, 0)
    closed.listener.stop()


def test_garbage_of_every_kind_is_survived(port: Port) -> None:
    """A small budget of random streams, some of them behind an honest HELLO."""
    dice = random.Random(20261130)
    process = psutil.Process()
    honest = port.honest()
    before = process.memory_info().rss
    for _ in range(300):
        data = hello("fuzz", "", SECRET) if dice.random() < 0.5 else b""
        for _ in range(dice.randrange(4)):
            body = os.urandom(dice.randrange(40))
            size = dice.choice([len(body), dice.randrange(2**32), 0, 1])
            data += size.to_bytes(4, "big") + body
        connection = port.connect(data)
        if dice.random() < 0.8:
            connection.close()
    gevent.sleep(0)
    assert port.hears(honest)
    assert process.memory_info().rss - before < 60_000_000


def test_it_stops_with_all_its_connections(port: Port) -> None:
    connection = port.honest()
    port.listener.stop()
    assert closed_in_silence(connection)
    with pytest.raises(OSError):
        port.connect()


# Strict


class Sealed:
    """A dialler that signs, and seals what it is told to."""

    def __init__(self, port: Port, instance: str = "i", server_id: str = "queen-b") -> None:
        before = port.receiver.opened_ever
        said, self._sealer = signed_hello(server_id, instance, SECRET, "queen-a:6633")
        self.socket = port.connect(said)
        until(lambda: port.receiver.opened_ever > before)

    def seal(self, frame: bytes = FLIP) -> bytes:
        return self._sealer.seal(frame)


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[Port]:
    monkeypatch.setattr("queen.mesh.listener.log", Log("mesh"))  # whose sampled lines have not been logged yet
    port = Port(strict=True)
    yield port
    port.listener.stop()
    gevent.sleep(0)


def test_a_strict_listener_hears_the_sealed_and_nobody_else(strict: Port, caplog: pytest.LogCaptureFixture) -> None:
    assert closed_in_silence(strict.connect(hello("queen-b", "", SECRET) + FLIP))
    until(lambda: strict.listener.handshake_failures == 1)
    assert "QUEEN_MESH_STRICT" in str(caplog.records[-1].__dict__["fields"]["reason"])
    dialler = Sealed(strict)
    dialler.socket.sendall(dialler.seal() + dialler.seal(encode(Tag.HEARTBEAT)) + dialler.seal())
    until(lambda: len(strict.receiver.frames) == 3)
    assert [tag for _, tag, _ in strict.receiver.frames] == [40, 3, 40]
    assert (strict.listener.handshake_failures, strict.listener.frames_rejected) == (1, 0)


@pytest.mark.parametrize(
    ("harm", "heard", "reason"),
    [
        (lambda first, second: FLIP, 0, "frame without a seal"),
        (lambda first, second: encode(Tag.HEARTBEAT), 0, "frame without a seal"),
        (lambda first, second: first.replace(b"true", b"fals"), 0, "frame with a broken seal"),
        (lambda first, second: first[:4] + b"\x29" + first[5:], 0, "frame with a broken seal"),
        (lambda first, second: Sealer(b"another key").seal(FLIP), 0, "frame with a broken seal"),
        (lambda first, second: first + first, 1, "frame 1 came after frame 1"),
        (lambda first, second: second + first, 1, "frame 1 came after frame 2"),
        (lambda first, second: second, 1, None),
        (lambda first, second: first + second, 2, None),
    ],
    ids=["unsealed", "unsealed heartbeat", "altered", "other tag", "other key", "twice", "late", "one lost", "as sent"],
)
def test_what_an_intruder_does_to_a_connection_ends_it_unheard(
    strict: Port,
    caplog: pytest.LogCaptureFixture,
    harm: Callable[[bytes, bytes], bytes],
    heard: int,
    reason: str | None,
) -> None:
    dialler = Sealed(strict)
    dialler.socket.sendall(harm(dialler.seal(), dialler.seal()) + (FLIP if reason else b""))
    if reason:
        assert closed_in_silence(dialler.socket)
        until(lambda: strict.listener.frames_rejected == 1)
        # What came behind the one that was late was not even looked at.
        assert reason in str(caplog.records[-1].__dict__["fields"]["reason"])
    until(lambda: len(strict.receiver.frames) == heard)
    assert strict.listener.frames_rejected == bool(reason)
    assert strict.listener.handshake_failures == 0
    again = Sealed(strict)
    again.socket.sendall(again.seal())
    until(lambda: len(strict.receiver.frames) == heard + 1)


def test_a_compatible_listener_hears_the_sealed_and_the_unsealed_alike(port: Port) -> None:
    dialler = Sealed(port)
    dialler.socket.sendall(dialler.seal() + FLIP + dialler.seal().replace(b"true", b"null"))
    until(lambda: len(port.receiver.frames) == 3)
    assert port.listener.frames_rejected == 0


def test_of_two_connections_of_one_worker_the_newer_is_heard(strict: Port) -> None:
    older, sibling, other = Sealed(strict, "i"), Sealed(strict, "j"), Sealed(strict, "i", "queen-c")
    newer = Sealed(strict, "i")
    assert closed_in_silence(older.socket)
    until(lambda: strict.receiver.open == 3)
    for number, dialler in enumerate((sibling, other, newer), 1):
        dialler.socket.sendall(dialler.seal())
        until(lambda number=number: len(strict.receiver.frames) == number)  # type: ignore[misc]
    newest = Sealed(strict, "i")
    assert closed_in_silence(newer.socket)
    newest.socket.close()
    until(lambda: strict.receiver.open == 2)
    assert strict.listener._dialled_by.keys() == {("queen-b", "j"), ("queen-c", "i")}


def test_a_compatible_listener_takes_several_connections_of_one_worker(port: Port) -> None:
    diallers = [Sealed(port), Sealed(port)]
    for dialler in diallers:
        assert port.hears(dialler.socket)


def test_a_receiver_that_has_enough_of_a_connection_ends_it(strict: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(hello: Hello) -> Callable[[int, bytes], None]:
        def take(tag: int, payload: bytes) -> None:
            raise Unwelcome("enough")

        strict.receiver.open += 1
        strict.receiver.opened_ever += 1
        return take

    monkeypatch.setattr(strict.receiver, "opened", opened)
    dialler = Sealed(strict)
    dialler.socket.sendall(dialler.seal())
    assert closed_in_silence(dialler.socket)
    until(lambda: strict.receiver.open == 0)
    assert strict.listener.frames_rejected == 1
