"""The hot-list: which partitions of a queue may have work for a group, from memory.

A *ring* per (queue, group) holds the candidate partitions. Pushes mark them, pops check them out, what the
claim said checks them in again. The ring may be stale in excess, which costs one empty claim, and is never
the authority; what it misses is brought back by the scans of `queen.engine.hotlist_scan`.

States of an entry: ready (claimable now), wheel (to be looked at again at a time), in flight (checked out
by a pop whose claim runs). An entry that is in no state is not kept.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from gevent.event import Event
from gevent.lock import Semaphore

from queen.db.records import Claimed, Flow
from queen.engine.waiting import Gate

Key = tuple[bytes, bytes]  # tenant, queue

_REVISIT_SECONDS = 1.0  # a lease taken or acked elsewhere is noticed within this
_LEASED_GRACE = 0.3
_DELAY_GRACE = 0.3
_WINDOW_BATCH = 100
_MOST_TOLD = 200_000  # entries of a ring, beyond which it is left to the scans to find more


class State(Enum):
    READY = 1
    WHEEL = 2
    INFLIGHT = 3


@dataclass(slots=True, eq=False)
class Entry:
    """A candidate partition of one ring. ``epoch`` grows with every mark, ``marks`` counts messages."""

    ring: Ring
    name: bytes
    state: State
    epoch: int = 0
    marks: int = 0
    due: float = 0.0
    drained: bool = False


@dataclass(slots=True, eq=False)
class Ring:
    """The candidates of one group on one queue, and the pops of the group that sleep for one."""

    lane: Lane
    group: bytes
    entries: dict[bytes, Entry] = field(default_factory=dict)
    ready: deque[Entry] = field(default_factory=deque)
    gate: Gate = field(default_factory=Gate)
    contact: Semaphore = field(default_factory=Semaphore)  # held by the pop that makes first contact
    registered: bool = False  # the group's subscription is known to be stored
    used: float = 0.0  # when a pop last came
    reseeded: float = 0.0  # when the ring was last filled from SQL, in part or in full
    reseeded_full: float = 0.0


@dataclass(slots=True, eq=False)
class Lane:
    """What is known of one queue: its rings, the pops pinned to a partition, and its flow settings."""

    key: Key
    rings: dict[bytes, Ring] = field(default_factory=dict)
    pinned: dict[bytes, Gate] = field(default_factory=dict)
    scanners: Gate = field(default_factory=Gate)  # pops that do without a ring
    offsets: dict[bytes, int] = field(default_factory=dict)  # last offset heard of, per partition
    runs: dict[bytes, tuple[int, int]] = field(default_factory=dict)  # offsets of the segments at hand
    flow: Flow = field(default_factory=Flow)
    flow_read: float = float("-inf")
    used: float = 0.0

    @property
    def sleepers(self) -> int:
        """How many pops of this queue are parked here."""
        pinned = sum(map(len, self.pinned.values()))
        return len(self.scanners) + pinned + sum(len(ring.gate) for ring in self.rings.values())

    def ring(self, group: bytes) -> Ring:
        ring = self.rings.get(group)
        if ring is None:
            ring = self.rings[group] = Ring(self, group)
        return ring


@dataclass(slots=True)
class Held:
    """A lease this worker handed out: where to look when its ack comes."""

    lane: Lane
    partition: bytes
    entry: Entry | None
    forget_at: float


class HotList:
    """The lanes of one worker."""

    def __init__(self) -> None:
        self.lanes: dict[Key, Lane] = {}
        self.discovery: dict[bytes, Gate] = {}  # per tenant: pops over namespaces and tasks
        self._held: dict[tuple[bytes, bytes], Held] = {}
        self._wheel: list[tuple[float, int, Entry]] = []
        self._turns = 0
        self._wheel_changed = Event()

    def lane(self, tenant: bytes, queue: bytes) -> Lane:
        """The lane of a queue, made on first use by a pop."""
        lane = self.lanes.get((tenant, queue))
        if lane is None:
            lane = self.lanes[tenant, queue] = Lane((tenant, queue))
        return lane

    def lanes_of(self, tenant: bytes | None, queue: bytes) -> list[Lane]:
        """The lane of a queue, if it is popped here; without a tenant, those of all that have such a queue."""
        if tenant is None:
            return [lane for (_, name), lane in self.lanes.items() if name == queue]
        lane = self.lanes.get((tenant, queue))
        return [] if lane is None else [lane]

    # Marks

    def pushed(self, key: tuple[bytes, bytes, bytes], last_offset: int, messages: int) -> None:
        """A push committed: marks its partition for every group that pops the queue here."""
        tenant, queue, partition = key
        lane = self.lanes.get((tenant, queue))
        if lane is not None:
            if last_offset > lane.offsets.get(partition, -1):
                lane.offsets[partition] = last_offset
            self.mark(lane, partition, messages)
        gate = self.discovery.get(tenant)
        if gate is not None:
            gate.wake_all()

    def at_hand(self, lane: Lane, partition: bytes, base: int, end: int) -> None:
        """The frames of a segment are in the cache. It prolongs the partition's run if it follows it.

        The cache may have dropped older segments of the run: that costs fetching one after all.
        """
        run = lane.runs.get(partition)
        if run is None or run[1] + 1 != base:
            lane.runs[partition] = (base, end)
        else:
            lane.runs[partition] = (run[0], end)

    def heard(self, lane: Lane, partition: bytes, last_offset: int, born: bool = False) -> None:
        """The database or a peer tells of a partition's last offset: a mark, if it is news.

        One that was ``born`` lately may have had a namesake, which was removed, with higher offsets.
        """
        known = lane.offsets.get(partition, -1)
        if born and last_offset < known:
            known = -1
        if last_offset > known:
            lane.offsets[partition] = last_offset
            self.mark(lane, partition, last_offset - max(known, 0))

    def told(self, tenant: bytes | None, queue: bytes, partition: bytes) -> None:
        """Another worker or broker tells of a push: a mark, and a wake for pops over namespaces and tasks.

        An empty partition marks nothing: which one it was must be looked up.
        """
        if partition:
            for lane in self.lanes_of(tenant, queue):
                # What is told may be wrong, and then it is only memory until a pop has looked.
                if all(len(ring.entries) < _MOST_TOLD for ring in lane.rings.values()):
                    self.mark(lane, partition, 1)
        for owner in list(self.discovery) if tenant is None else (tenant,):
            gate = self.discovery.get(owner)
            if gate is not None:
                gate.wake_all()

    def forget_offsets(self) -> None:
        """Forgets which offsets partitions have reached: another server may not have come so far."""
        for lane in self.lanes.values():
            lane.offsets.clear()
            lane.runs.clear()

    def mark(self, lane: Lane, partition: bytes, messages: int, group: bytes | None = None) -> None:
        """Marks a partition for all groups, or for one whose cursor was moved back."""
        for ring in lane.rings.values() if group is None else filter(None, (lane.rings.get(group),)):
            self._mark_ring(ring, partition, messages)
        lane.scanners.wake()
        gate = lane.pinned.get(partition)
        if gate is not None:
            gate.wake_all()

    def _mark_ring(self, ring: Ring, partition: bytes, messages: int) -> None:
        flow = ring.lane.flow
        entry = ring.entries.get(partition)
        if entry is None:
            entry = ring.entries[partition] = Entry(ring, partition, State.WHEEL, 1, messages)
            if flow.delayed_processing > 0:
                self._revisit(entry, time.monotonic() + flow.delayed_processing + _DELAY_GRACE)
            elif flow.window_buffer > 0 and messages < _WINDOW_BATCH:
                self._revisit(entry, time.monotonic() + flow.window_buffer)
            else:
                self._make_ready(entry)
            return
        entry.epoch += 1
        entry.marks += messages
        if (
            entry.state is State.WHEEL
            and flow.window_buffer > 0
            and flow.delayed_processing <= 0
            and entry.marks >= _WINDOW_BATCH
        ):
            self._make_ready(entry)

    def _make_ready(self, entry: Entry, first: bool = False) -> None:
        if entry.state is not State.READY:
            entry.state = State.READY
            if first:
                entry.ring.ready.appendleft(entry)
            else:
                entry.ring.ready.append(entry)
        entry.ring.gate.wake()

    def _revisit(self, entry: Entry, due: float) -> None:
        entry.state = State.WHEEL
        entry.due = due
        self._turns += 1
        heapq.heappush(self._wheel, (due, self._turns, entry))
        if self._wheel[0][2] is entry:
            self._wheel_changed.set()

    # Serving

    def check_out(self, ring: Ring, width: int, batch: int) -> list[tuple[Entry, int]]:
        """Takes up to ``width`` ready entries, fewer when their marks cover the batch; with their epochs."""
        taken: list[tuple[Entry, int]] = []
        marks = 0
        while ring.ready and len(taken) < width and marks < batch:
            entry = ring.ready.popleft()
            if entry.state is not State.READY or ring.entries.get(entry.name) is not entry:
                continue
            entry.state = State.INFLIGHT
            marks += entry.marks
            taken.append((entry, entry.epoch))
        return taken

    def check_in(self, ring: Ring, taken: list[tuple[Entry, int]], claims: list[Claimed], auto_ack: bool) -> None:
        """Puts checked-out entries where the claim's verdicts say."""
        verdicts = {claim.partition: claim for claim in claims}
        for entry, epoch in taken:
            claim = verdicts.get(entry.name)
            if claim is None:
                self._make_ready(entry, first=True)
            elif claim.verdict == b"took":
                self._took(entry, epoch, claim, auto_ack)
            elif claim.verdict == b"leased":
                wait = _REVISIT_SECONDS
                if claim.until is not None:
                    wait = min(max(_until(claim.until), 0.0) + _LEASED_GRACE, wait)
                self._revisit(entry, time.monotonic() + wait)
            elif entry.epoch == epoch:
                self._drop(entry)
            else:
                self._make_ready(entry)

    def scanned(self, ring: Ring, claims: list[Claimed], auto_ack: bool) -> None:
        """Takes note of what a pop got from a scan, which checked nothing out."""
        for claim in {claim.partition: claim for claim in claims}.values():
            entry = ring.entries.get(claim.partition)
            if entry is None:
                entry = ring.entries[claim.partition] = Entry(ring, claim.partition, State.INFLIGHT)
            elif entry.state is State.INFLIGHT:
                continue  # another pop has it checked out and will check it in
            self._took(entry, entry.epoch, claim, auto_ack)

    def _took(self, entry: Entry, epoch: int, claim: Claimed, auto_ack: bool) -> None:
        lane = entry.ring.lane
        lane.offsets[entry.name] = max(claim.last_offset, lane.offsets.get(entry.name, -1))
        entry.drained = claim.batch_end >= claim.last_offset and entry.epoch == epoch
        entry.marks = max(claim.last_offset - claim.batch_end, 0)
        now = time.monotonic()
        if auto_ack:
            if entry.drained:
                self._drop(entry)
            elif lane.flow.window_buffer > 0:
                self._revisit(entry, now + lane.flow.window_buffer)
            else:
                self._make_ready(entry)
            return
        left = _until(claim.until) if claim.until is not None else _REVISIT_SECONDS
        self._held[claim.partition_id, entry.ring.group] = Held(lane, entry.name, entry, now + left + 10)
        self._revisit(entry, now + min(max(left, 0.0) + _LEASED_GRACE, _REVISIT_SECONDS))

    def held(self, lane: Lane, group: bytes, claim: Claimed) -> None:
        """Remembers a lease that a pinned or discovery pop took."""
        left = _until(claim.until) if claim.until is not None else 0.0
        self._held[claim.partition_id, group] = Held(lane, claim.partition, None, time.monotonic() + left + 10)

    def acked(self, partition_id: bytes, group: bytes, released: bool) -> None:
        """An ack was carried out here. If it ended the lease, what is left can be claimed at once."""
        if not released:
            return
        held = self._held.pop((partition_id, group), None)
        if held is None:
            return
        entry = held.entry or held.lane.ring(group).entries.get(held.partition)
        if entry is not None and entry.ring.entries.get(entry.name) is entry:
            if entry.state is State.INFLIGHT:
                entry.epoch += 1
            elif entry.state is State.WHEEL:
                if entry.drained and entry.marks == 0:
                    self._drop(entry)
                else:
                    self._make_ready(entry)
        elif held.entry is None and group in held.lane.rings:
            self._mark_ring(held.lane.rings[group], held.partition, 1)
        held.lane.scanners.wake()
        gate = held.lane.pinned.get(held.partition)
        if gate is not None:
            gate.wake_all()
        if (discovery := self.discovery.get(held.lane.key[0])) is not None:
            discovery.wake_all()

    def nacked(self, partition_id: bytes, group: bytes) -> None:
        """A nack released a lease: the batch is there again, whatever was drained."""
        held = self._held.get((partition_id, group))
        if held is not None:
            if held.entry is not None:
                held.entry.drained = False
            self.acked(partition_id, group, True)

    def _drop(self, entry: Entry) -> None:
        if entry.ring.entries.get(entry.name) is entry:
            del entry.ring.entries[entry.name]

    # Administration

    def forget_queue(self, tenant: bytes, queue: bytes) -> None:
        """The queue's configuration changed or it is gone: nothing remembered of it holds."""
        lane = self.lanes.get((tenant, queue))
        if lane is None:
            return
        lane.flow_read = float("-inf")
        lane.offsets.clear()
        lane.runs.clear()
        for ring in lane.rings.values():
            self.forget_ring(ring)
        lane.scanners.wake_all()
        for gate in lane.pinned.values():
            gate.wake_all()

    def moved(self, lane: Lane, partition: bytes, group: bytes) -> None:
        """A cursor of the group was moved and its lease ended: the partition can be claimed at once."""
        self.mark(lane, partition, 1, group)
        ring = lane.rings.get(group)
        entry = ring.entries.get(partition) if ring is not None else None
        if entry is not None and entry.state is State.WHEEL:
            self._make_ready(entry)

    def group_moved(self, tenant: bytes, queue: bytes | None, group: bytes, partition: bytes | None) -> None:
        """Cursors of a group were moved or deleted, in one queue or (None) in all of the tenant's.

        Its rings start over; with a partition named, that one is marked. Parked pops wake.
        """
        for (owner, name), lane in list(self.lanes.items()):
            if owner != tenant or (queue is not None and name != queue):
                continue
            ring = lane.rings.get(group)
            if partition is not None:
                self.moved(lane, partition, group)
            elif ring is not None:
                self.forget_ring(ring)
            lane.scanners.wake_all()
            for gate in lane.pinned.values():
                gate.wake_all()
        gate_of_tenant = self.discovery.get(tenant)
        if gate_of_tenant is not None:
            gate_of_tenant.wake_all()

    def forget_ring(self, ring: Ring) -> None:
        """Empties a ring: its next pop is a first contact and fills it from SQL."""
        ring.entries.clear()
        ring.ready.clear()
        ring.registered = False
        ring.reseeded = ring.reseeded_full = 0.0
        ring.gate.wake_all()

    # The wheel

    def turn(self) -> None:
        """Promotes entries when their time has come; runs for the life of the worker."""
        while True:
            now = time.monotonic()
            while self._wheel and self._wheel[0][0] <= now:
                due, _, entry = heapq.heappop(self._wheel)
                # An entry that was marked, acked or dropped meanwhile left its turn behind.
                if entry.state is State.WHEEL and entry.due == due and entry.ring.entries.get(entry.name) is entry:
                    self._make_ready(entry)
            self._wheel_changed.clear()
            self._wheel_changed.wait(self._wheel[0][0] - now if self._wheel else None)

    def sweep(self, idle_seconds: float) -> None:
        """Frees lanes that no pop has used for a while, and leases nobody acked here."""
        now = time.monotonic()
        for key in [k for k, held in self._held.items() if held.forget_at < now]:
            del self._held[key]
        for key, lane in list(self.lanes.items()):
            if now - lane.used > idle_seconds and not lane.sleepers:
                del self.lanes[key]


def _until(microseconds: int) -> float:
    """Seconds from now until a time of the database's clock."""
    return microseconds / 1e6 - (time.time() - 946_684_800)
