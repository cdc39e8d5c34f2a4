"""What received frames do, and the limits to it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import gevent
import pytest

from queen.db.errors import Unavailable
from queen.engine.flags import Flag
from queen.engine.identifiers import DEFAULT_TENANT
from queen.mesh.frames import LIMIT, Tag, Unwelcome
from queen.mesh.inbound import Allowance, Inbound, Source

LONG = 20.0
TENANT = "6f9619ff-8b86-4011-b42d-00c04fc964ff"
TENANT_BYTES = bytes.fromhex(TENANT.replace("-", ""))
ORDERS = {"queue": "orders", "partition": "eu", "tenant": TENANT}


class Engine:
    """Notes what it hears, and has flags with a database of their own."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self.flags = dict.fromkeys(Flag, False)
        self.stored = dict.fromkeys(Flag, False)
        self.away = False
        self.reads = 0

    def hear_push(self, *what: Any) -> None:
        self.heard.append(("push", *what))

    def hear_move(self, *what: Any) -> None:
        self.heard.append(("move", *what))

    def hear_queue(self, *what: Any) -> None:
        self.heard.append(("queue", *what))

    def hear_all_queues(self) -> None:
        self.heard.append(("all queues",))

    def hear_flag(self, flag: Flag, enabled: bool) -> bool:
        news = self.flags[flag] != enabled
        self.flags[flag] = enabled
        self.heard.append(("flag", flag, enabled))
        return news

    def __getitem__(self, flag: Flag) -> bool:
        return self.flags[flag]

    def read(self) -> None:
        self.reads += 1
        if self.away:
            raise Unavailable("away")
        self.flags.update(self.stored)


class Peer:
    """One connection of a peer to one worker."""

    def __init__(
        self, tenancy: bool = False, verify: bool = False, siblings: bool = True, strict: bool = False
    ) -> None:
        self.engine = Engine()
        self.passed_on: list[bytes] = []
        pass_on = self.passed_on.append if siblings else None
        engine: Any = self.engine
        self.inbound = Inbound(engine, engine, tenancy, verify, pass_on, strict)
        self.source = Source("queen-b", "")
        self.inbound.start()

    def send(self, tag: int, value: Any) -> list[tuple[Any, ...]]:
        """Receive a frame and return what the engine heard of it at once."""
        before = len(self.engine.heard)
        self.inbound.apply(self.source, tag, value if isinstance(value, bytes) else json.dumps(value).encode())
        return self.engine.heard[before:]


def until(condition: Callable[[], object]) -> None:
    """Let the other greenlets run until something holds."""
    with gevent.Timeout(LONG):
        while not condition():
            gevent.sleep(0.005)


@pytest.fixture
def make() -> Iterator[Callable[..., Peer]]:
    made: list[Peer] = []

    def one(**options: bool) -> Peer:
        made.append(Peer(**options))
        return made[-1]

    yield one
    for peer in made:
        peer.inbound.stop()
    gevent.sleep(0)


@pytest.fixture
def peer(make: Callable[..., Peer]) -> Peer:
    return make()


EU = ("push", TENANT_BYTES, b"orders", b"eu")


def test_wakes_and_dirty_hints_mark_a_partition(peer: Peer) -> None:
    assert peer.send(1, ORDERS) == [EU]
    assert peer.send(2, {"items": [ORDERS, {**ORDERS, "partition": "us"}]}) == [EU, (*EU[:3], b"us")]
    peer.source.woken.clear()
    assert peer.send(5, {"items": [ORDERS]}) == [EU]
    assert peer.send(5, {"items": [{**ORDERS, "group": "g"}]}) == [("move", *EU[1:], b"g")]
    assert peer.send(5, {"items": [{**ORDERS, "group": ""}, {**ORDERS, "group": 7}]}) == [EU, EU]
    assert len(peer.passed_on) == 5


def test_a_dirty_hint_behind_its_wake_is_old_news(peer: Peer) -> None:
    assert peer.send(2, {"items": [ORDERS]}) == [EU]
    assert peer.send(5, {"items": [ORDERS]}) == []
    assert len(peer.passed_on) == 1
    assert peer.send(5, {"items": [ORDERS]}) == [EU]
    peer.send(2, {"items": [ORDERS]})
    assert peer.send(5, {"items": [{**ORDERS, "group": "g"}]}) == [("move", *EU[1:], b"g")]


def test_what_is_remembered_of_wakes_is_bounded(peer: Peer) -> None:
    peer.send(2, {"items": [{**ORDERS, "partition": str(number)} for number in range(35_000)]})
    assert len(peer.source.woken) <= 10_000


@pytest.mark.parametrize(
    ("tag", "value"),
    [
        (1, {}),
        (1, {**ORDERS, "queue": ""}),
        (1, {**ORDERS, "queue": 7}),
        (1, {**ORDERS, "queue": "\ud800"}),
        (2, {}),
        (2, {"items": {}}),
        (2, {"items": [7, None, "x", [], {}, {"queue": None}]}),
        (5, {"items": None}),
        (10, {}),
        (10, {"queue": 7}),
        (11, {"queue": None}),
        (1, b""),
        (2, b"[]"),
        (5, b"{"),
        (40, b"null"),
        (3, b""),
        (3, {"server_id": "x"}),
        (4, {"server_id": "x"}),
        (0, ORDERS),
        (20, {"op": "reset"}),
        (99, ORDERS),
        (200, {"number": 1, "topic": "mesh"}),
        (201, {"number": 1}),
    ],
)
def test_what_says_nothing_usable_is_ignored(peer: Peer, tag: int, value: Any) -> None:
    assert peer.send(tag, value) == []
    gevent.sleep(0.05)
    assert peer.engine.heard == []
    assert peer.passed_on == []


def test_bad_items_do_not_spoil_good_ones_and_unknown_keys_are_nothing(peer: Peer) -> None:
    assert peer.send(2, {"x": 1, "items": [{}, {**ORDERS, "y": 2}, None], "_n": 3}) == [EU]
    assert peer.send(1, {**ORDERS, "partition": 7}) == [(*EU[:3], b"")]
    assert peer.send(1, {"queue": "orders", "tenant": TENANT}) == [(*EU[:3], b"")]


def test_items_beyond_two_hundred_thousand_are_ignored(peer: Peer) -> None:
    heard = peer.send(5, b'{"items":[' + b",".join([b'{"queue":"q","partition":"p"}'] * 200_001) + b"]}")
    assert len(heard) <= 200_000


@pytest.mark.parametrize("tenant", [None, 7, "", "x", TENANT[:-1], TENANT.replace("-", ""), "{" + TENANT + "}", ...])
def test_a_tenant_that_is_not_told_is_every_tenant_or_the_only_one(make: Callable[..., Peer], tenant: Any) -> None:
    item = {name: value for name, value in {**ORDERS, "tenant": tenant}.items() if value is not ...}
    assert make(tenancy=False).send(1, item) == [("push", DEFAULT_TENANT, b"orders", b"eu")]
    assert make(tenancy=True).send(1, item) == [("push", None, b"orders", b"eu")]


def test_a_tenant_is_told_in_any_case(make: Callable[..., Peer]) -> None:
    for tenancy in (True, False):
        assert make(tenancy=tenancy).send(1, {**ORDERS, "tenant": TENANT.upper()}) == [EU]


def test_a_changed_queue_is_forgotten(peer: Peer) -> None:
    for tag in (10, 11):
        peer.engine.heard.clear()
        peer.send(tag, {"queue": "orders", "tenant": TENANT})
        until(lambda: peer.engine.heard)
        assert peer.engine.heard == [("queue", TENANT_BYTES, b"orders")]
    assert len(peer.passed_on) == 2


def test_a_flood_of_changed_queues_is_one_forgetting_of_all(peer: Peer) -> None:
    for number in range(3000):
        peer.send(10, {"queue": f"q{number}", "tenant": TENANT})
    until(lambda: ("all queues",) in peer.engine.heard)
    assert len(peer.engine.heard) < 600


def test_a_flip_is_applied_at_once_and_passed_on_once(peer: Peer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "queen")
    peer.send(40, {"enabled": True})
    until(lambda: peer.engine.flags[Flag.PUSH_MAINTENANCE])
    peer.send(41, {"enabled": True})
    until(lambda: peer.engine.flags[Flag.POP_MAINTENANCE])
    peer.send(40, {"enabled": True})
    until(lambda: len(peer.engine.heard) == 3)
    assert [frame[4] for frame in peer.passed_on] == [40, 41]
    assert caplog.text.count("maintenance flag changed by peer") == 2


@pytest.mark.parametrize("value", [{}, {"enabled": None}, {"enabled": 0}, {"enabled": "false"}, {"enabled": []}])
def test_a_flip_that_does_not_say_where_to_changes_nothing(peer: Peer, value: Any) -> None:
    peer.engine.flags[Flag.PUSH_MAINTENANCE] = True
    peer.send(40, value)
    gevent.sleep(0.05)
    assert peer.engine.flags[Flag.PUSH_MAINTENANCE]
    assert peer.inbound.rejected == 1


def test_of_many_flips_the_latest_wins_and_few_are_applied(peer: Peer) -> None:
    for number in range(1000):
        peer.send(40, {"enabled": number % 2 == 0})
        if number % 100 == 0:
            gevent.sleep(0)
    peer.send(40, {"enabled": True})
    until(lambda: peer.engine.flags[Flag.PUSH_MAINTENANCE])
    assert len(peer.engine.heard) < 20


def test_a_flip_can_be_checked_against_the_database(make: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("queen.mesh.inbound._VERIFY_PAUSE", 0.01)
    peer = make(verify=True)
    peer.send(40, {"enabled": True})
    until(lambda: peer.inbound.flips.contradicted == 1)
    assert not peer.engine.flags[Flag.PUSH_MAINTENANCE]
    assert peer.passed_on == []

    peer.engine.stored[Flag.PUSH_MAINTENANCE] = True
    peer.send(40, {"enabled": True})
    until(lambda: peer.engine.flags[Flag.PUSH_MAINTENANCE])
    until(lambda: len(peer.passed_on) == 1)

    # Without a database the frame is all there is.
    peer.engine.away = True
    peer.send(41, {"enabled": True})
    until(lambda: peer.engine.flags[Flag.POP_MAINTENANCE])
    assert peer.inbound.flips.contradicted == 1


def test_a_strict_broker_believes_the_database_and_waits_for_it(
    make: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("queen.mesh.inbound._VERIFY_PAUSE", 0.01)
    peer = make(strict=True)
    peer.send(40, {"enabled": True})
    until(lambda: peer.engine.reads >= 1 and peer.inbound.flips.contradicted == 1)
    assert "maintenance frame contradicted by the database" in caplog.text

    # Without a database everything stays as it is, until it is back and tells.
    peer.engine.away = True
    peer.send(40, {"enabled": False})
    peer.send(41, {"enabled": True})
    reads = peer.engine.reads
    until(lambda: peer.engine.reads > reads + 2)
    peer.send(40, {"enabled": True})
    until(lambda: peer.engine.reads > reads + 5)
    assert not any(peer.engine.flags.values())
    assert peer.passed_on == []
    peer.engine.stored.update(dict.fromkeys(Flag, True))
    peer.engine.away = False
    until(lambda: all(peer.engine.flags.values()))
    until(lambda: len(peer.passed_on) == 2)
    assert peer.inbound.flips.contradicted == 1
    assert peer.engine.heard == []


def test_flags_that_may_have_been_missed_are_read_once_a_second(peer: Peer) -> None:
    for _ in range(100):
        peer.inbound.flips.reread()
        gevent.sleep(0)
    assert peer.engine.reads == 1


def test_what_comes_from_a_sibling_is_passed_on_to_nobody(make: Callable[..., Peer]) -> None:
    peer = make(siblings=False)
    peer.send(1, ORDERS)
    peer.send(10, {"queue": "orders"})
    peer.send(40, {"enabled": True})
    until(lambda: peer.engine.flags[Flag.PUSH_MAINTENANCE])
    assert peer.passed_on == []


def test_more_than_a_peer_may_send_is_dropped_and_counted(peer: Peer) -> None:
    peer.source.frames = Allowance(10)
    heard = [peer.send(1, ORDERS) for _ in range(100)]
    assert 20 <= sum(map(len, heard)) < 40
    assert peer.inbound.rejected == 100 - sum(map(len, heard))


@pytest.mark.parametrize("strict", [True, False])
def test_only_a_strict_broker_hangs_up_on_one_that_sends_too_much_for_ten_seconds(
    make: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    now = time.monotonic()
    monkeypatch.setattr("queen.mesh.inbound.time", SimpleNamespace(monotonic=lambda: now))
    peer = make(strict=strict)
    peer.source.frames = Allowance(10)

    def flood(seconds: float) -> None:
        nonlocal now
        for _ in range(round(seconds * 10)):
            now += 0.1
            for _ in range(2):
                peer.send(1, ORDERS)

    flood(9)
    now += 3  # it pauses, and may begin anew
    flood(11)
    assert peer.inbound.rejected > 0
    if strict:
        with pytest.raises(Unwelcome, match="too much for 10 s"):
            flood(3)
    else:
        flood(30)


def test_more_bytes_than_a_peer_may_send_are_dropped(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    instant = time.monotonic()
    monkeypatch.setattr("queen.mesh.inbound.time", SimpleNamespace(monotonic=lambda: instant))
    frame = b'{"items":[]' + b" " * (LIMIT // 2) + b"}"
    for _ in range(30):
        peer.inbound.apply(peer.source, Tag.HOTLIST_DIRTY_BATCH, frame)
    assert peer.inbound.rejected > 0
