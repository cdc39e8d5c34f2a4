"""The effects of received frames: memory is touched, limits are kept, and the siblings are told once.

What runs here runs on the connection's reader, so nothing waits for the database; flips and invalidations,
which may cost others work, go through greenlets that take a bounded number of them a second.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gevent
from gevent.event import Event

from queen.db.errors import StatementFailed, Unavailable
from queen.engine.flags import Flag, Flags
from queen.engine.hints import Hints
from queen.engine.identifiers import DEFAULT_TENANT
from queen.log import Log
from queen.mesh.frames import ITEMS_LIMIT, Tag, Unwelcome, decode_object, encode, encode_object

log = Log("mesh")

_FRAMES_PER_SECOND = 50_000
_BYTES_PER_SECOND = 64 * 1024 * 1024
_BURST_SECONDS = 2.0
_TURN = 500  # items after which others get a turn
_REMEMBERED = 10_000
_INVALIDATIONS_PER_SECOND = 500
_INVALIDATION_PAUSE = 0.02
_FLIP_PAUSE = 0.1
_VERIFY_PAUSE = 1.0
_LONG_SECONDS = 0.02
_PAUSE_FACTOR = 3
_EXCESS_SECONDS = 10.0
_EXCESS_PAUSE = 1.0

_UUID = re.compile("[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")

_FLAGS = {
    Tag.MAINTENANCE_MODE_SET: Flag.PUSH_MAINTENANCE,
    Tag.POP_MAINTENANCE_MODE_SET: Flag.POP_MAINTENANCE,
}
TAGS = {flag: tag for tag, flag in _FLAGS.items()}


class Allowance:
    """A token bucket: so much a second, and twice that at once."""

    __slots__ = ("_left", "_rate", "_then")

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._left = rate * _BURST_SECONDS
        self._then = time.monotonic()

    def take(self, amount: float) -> bool:
        now = time.monotonic()
        self._left = min(self._left + (now - self._then) * self._rate, self._rate * _BURST_SECONDS)
        self._then = now
        if amount > self._left:
            return False
        self._left -= amount
        return True


class Excess:
    """For how long somebody has been doing too much of something, with pauses of no more than a second."""

    __slots__ = ("_last", "_since")

    def __init__(self) -> None:
        self._since = self._last = float("-inf")

    def seconds(self) -> float:
        """It is done again now: how long that makes."""
        now = time.monotonic()
        if now - self._last > _EXCESS_PAUSE:
            self._since = now
        self._last = now
        return now - self._since


@dataclass(slots=True)
class Source:
    """One accepted connection: who sends, and what is remembered of what it sent."""

    server_id: str
    instance: str
    woken: set[tuple[bytes | None, bytes, bytes]] = field(default_factory=set)
    frames: Allowance = field(default_factory=lambda: Allowance(_FRAMES_PER_SECOND))
    bytes: Allowance = field(default_factory=lambda: Allowance(_BYTES_PER_SECOND))
    excess: Excess = field(default_factory=Excess)


@dataclass(slots=True, frozen=True)
class Item:
    """One element of a batch, read. A tenant of None was not told."""

    tenant: bytes | None
    queue: bytes
    partition: bytes
    group: bytes


class Inbound:
    """Applies frames. Of those of peers, ``pass_on`` gives the siblings what had an effect; what came from a
    sibling is passed on to nobody. ``verify_flips`` and ``strict`` are as for `Flips`."""

    def __init__(
        self,
        hints: Hints,
        flags: Flags,
        tenancy: bool,
        verify_flips: bool = False,
        pass_on: Callable[[bytes], None] | None = None,
        strict: bool = False,
    ) -> None:
        self._hints = hints
        self._tenancy = tenancy
        self._pass_on = pass_on
        self._strict = strict
        self._invalidations = Invalidations(hints)
        self.flips = Flips(hints, flags, verify_flips, pass_on, strict)
        self.rejected = 0
        self._loops: list[gevent.Greenlet[[], None]] = []

    def start(self) -> None:
        self._loops = [
            gevent.spawn(self._invalidations.run),
            gevent.spawn(self.flips.run),
            gevent.spawn(self.flips.run_rereads),
        ]

    def stop(self) -> None:
        gevent.killall(self._loops, block=False)

    def apply(self, source: Source, tag: int, payload: bytes) -> None:
        """Carries out one frame; one that says nothing usable is ignored, as are tags unknown here.

        A frame that took long is followed by a pause several times as long, so that no peer gets more
        than a part of this worker's time. Raises `Unwelcome` when strict and a peer keeps sending too much.
        """
        if tag == Tag.HEARTBEAT or tag not in _EFFECTS:
            return
        if not source.frames.take(1) or not source.bytes.take(len(payload)):
            log.sampled(10, "peer sends too much; its hints are dropped", peer=source.server_id)
            if source.excess.seconds() >= _EXCESS_SECONDS and self._strict:
                raise Unwelcome(f"it sent too much for {_EXCESS_SECONDS:.0f} s")
            self.rejected += 1
            return
        started = time.monotonic()
        value = decode_object(payload)
        if value is None:
            self.rejected += 1
        else:
            _EFFECTS[Tag(tag)](self, source, Tag(tag), value, payload)
        took = time.monotonic() - started
        if took > _LONG_SECONDS:
            gevent.sleep(took * _PAUSE_FACTOR)

    def _wake(self, source: Source, tag: Tag, value: dict[str, Any], payload: bytes) -> None:
        elements = value.get("items") if tag is Tag.MESSAGE_AVAILABLE_BATCH else [value]
        heard = False
        for item in self._items(elements):
            if len(source.woken) >= _REMEMBERED:
                source.woken.clear()
            source.woken.add((item.tenant, item.queue, item.partition))
            self._hints.hear_push(item.tenant, item.queue, item.partition)
            heard = True
        if heard and self._pass_on is not None:
            self._pass_on(encode(tag, payload))

    def _dirty(self, source: Source, tag: Tag, value: dict[str, Any], payload: bytes) -> None:
        heard = False
        for item in self._items(value.get("items")):
            key = (item.tenant, item.queue, item.partition)
            if item.group:
                self._hints.hear_move(item.tenant, item.queue, item.partition, item.group)
            elif key in source.woken:
                # The wake came first, and it marked what this would mark again in vain.
                source.woken.discard(key)
                continue
            else:
                self._hints.hear_push(item.tenant, item.queue, item.partition)
            heard = True
        if heard and self._pass_on is not None:
            self._pass_on(encode(tag, payload))

    def _config(self, source: Source, tag: Tag, value: dict[str, Any], payload: bytes) -> None:
        queue = _name(value.get("queue"))
        if queue is not None:
            self._invalidations.add(self._tenant(value.get("tenant")), queue)
            if self._pass_on is not None:
                self._pass_on(encode(tag, payload))

    def _flag(self, source: Source, tag: Tag, value: dict[str, Any], payload: bytes) -> None:
        enabled = value.get("enabled")
        if isinstance(enabled, bool):
            self.flips.add(_FLAGS[tag], enabled, source.server_id)
        else:
            self.rejected += 1

    def _items(self, elements: object) -> Any:
        """The usable ones among the elements of a batch, with a turn for others now and then."""
        if not isinstance(elements, list):
            return
        for position, element in enumerate(elements[:ITEMS_LIMIT]):
            if position % _TURN == _TURN - 1:
                gevent.sleep(0)
            queue = _name(element.get("queue")) if isinstance(element, dict) else None
            if queue:
                partition = _name(element.get("partition")) or b""
                yield Item(self._tenant(element.get("tenant")), queue, partition, _name(element.get("group")) or b"")

    def _tenant(self, value: object) -> bytes | None:
        """The tenant a frame names. One that names none is of a broker that doesn't know of tenants: that
        is every tenant here, unless there is only the default one."""
        if isinstance(value, str) and _UUID.fullmatch(lower := value.lower()):
            return bytes.fromhex(lower.replace("-", ""))
        return None if self._tenancy else DEFAULT_TENANT


Effect = Callable[[Inbound, Source, Tag, dict[str, Any], bytes], None]

_EFFECTS: dict[int, Effect] = {
    Tag.MESSAGE_AVAILABLE: Inbound._wake,
    Tag.MESSAGE_AVAILABLE_BATCH: Inbound._wake,
    Tag.HOTLIST_DIRTY_BATCH: Inbound._dirty,
    Tag.QUEUE_CONFIG_SET: Inbound._config,
    Tag.QUEUE_CONFIG_DELETE: Inbound._config,
    Tag.MAINTENANCE_MODE_SET: Inbound._flag,
    Tag.POP_MAINTENANCE_MODE_SET: Inbound._flag,
}


class Invalidations:
    """Queues whose configuration changed elsewhere. A flood of them becomes one forgetting of everything."""

    def __init__(self, hints: Hints) -> None:
        self._hints = hints
        self._waiting: dict[tuple[bytes | None, bytes], None] = {}
        self._all = False
        self._news = Event()
        self._allowance = Allowance(_INVALIDATIONS_PER_SECOND / _BURST_SECONDS)

    def add(self, tenant: bytes | None, queue: bytes) -> None:
        if not self._all:
            if len(self._waiting) >= _INVALIDATIONS_PER_SECOND:
                self._all = True
                self._waiting.clear()
            else:
                self._waiting[tenant, queue] = None
        self._news.set()

    def run(self) -> None:
        while True:
            self._news.wait()
            self._news.clear()
            waiting, self._waiting = self._waiting, {}
            if self._all or not self._allowance.take(len(waiting)):
                # What is heard meanwhile is part of it.
                gevent.sleep(1)
                self._waiting.clear()
                self._all = False
                self._hints.hear_all_queues()
            else:
                for tenant, queue in waiting:
                    self._hints.hear_queue(tenant, queue)
            gevent.sleep(_INVALIDATION_PAUSE)


class Flips:
    """Flags that peers say they flipped: the latest of each, ten a second at most.

    With ``verify`` it is not the frame that is believed but the database, where the flag was written before
    the frame was sent. When it can't be asked the frame is all there is; but ``strict``, which verifies in any
    case, then keeps the flag as it is until the database can be asked (mesh spec, section 4.8 D).
    """

    def __init__(
        self,
        hints: Hints,
        flags: Flags,
        verify: bool,
        pass_on: Callable[[bytes], None] | None,
        strict: bool = False,
    ) -> None:
        self._hints = hints
        self._flags = flags
        self._verify = verify or strict
        self._strict = strict
        self._pass_on = pass_on
        self._waiting: dict[Flag, tuple[bool, str]] = {}
        self._news = Event()
        self._missed = Event()
        self.contradicted = 0

    def add(self, flag: Flag, enabled: bool, peer: str) -> None:
        self._waiting[flag] = (enabled, peer)
        self._news.set()

    def reread(self) -> None:
        """A flip may have been missed: has the flags read from the database."""
        self._missed.set()

    def run(self) -> None:
        """Takes flips for as long as the worker lives."""
        while True:
            self._news.wait()
            self._news.clear()
            waiting, self._waiting = self._waiting, {}
            before = {flag: self._flags[flag] for flag in waiting}
            if self._verify and self._ask_database():
                self._judge(waiting)
            elif self._strict:
                self._waiting = waiting | self._waiting  # the newest of each is asked about later
                self._news.set()
            else:
                for flag, (enabled, _) in waiting.items():
                    self._hints.hear_flag(flag, enabled)
            for flag, (_, peer) in waiting.items():
                if self._flags[flag] != before[flag]:
                    self._tell(flag, peer)
            gevent.sleep(_VERIFY_PAUSE if self._verify else _FLIP_PAUSE)

    def run_rereads(self) -> None:
        """Reads the flags when they may have been missed, once a second at most."""
        while True:
            self._missed.wait()
            self._missed.clear()
            self._ask_database()
            gevent.sleep(_VERIFY_PAUSE)

    def _ask_database(self) -> bool:
        try:
            self._flags.read()
        except (Unavailable, StatementFailed) as error:
            log.sampled(10, "flags can't be read", error=error)
            return False
        return True

    def _judge(self, waiting: dict[Flag, tuple[bool, str]]) -> None:
        for flag, (enabled, peer) in waiting.items():
            if self._flags[flag] != enabled:
                self.contradicted += 1
                log.warning("maintenance frame contradicted by the database", peer=peer, flag=flag, frame=enabled)

    def _tell(self, flag: Flag, peer: str) -> None:
        if self._pass_on is not None:
            enabled = self._flags[flag]
            log.info("maintenance flag changed by peer", peer=peer, flag=flag, to=enabled)
            self._pass_on(encode_object(TAGS[flag], {"enabled": enabled}))


def _name(value: object) -> bytes | None:
    """A name in UTF-8, or None for what can't be one."""
    if not isinstance(value, str):
        return None
    try:
        return value.encode()
    except UnicodeEncodeError:
        return None
