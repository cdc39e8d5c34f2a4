"""Pop: an attempt to claim, and the long poll around it.

Three shapes share one loop: any partition of a queue (wildcard), one partition (pinned), every queue of a
namespace or task (discovery). An attempt that finds nothing parks the pop, which then holds no connection,
until a mark, an ack or its time wakes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import gevent
from gevent.event import Event

from queen.db.errors import StatementFailed, Unavailable
from queen.db.operations import Operations
from queen.db.records import Claimed, ListPop, Subscription, Terms
from queen.engine import frames
from queen.engine.admission import Admission
from queen.engine.flags import Flags
from queen.engine.fusion import Fusion
from queen.engine.hotlist import HotList, Lane, Ring
from queen.engine.hotlist_scan import HotListScan
from queen.engine.identifiers import Minter, uuid_text
from queen.engine.leases import Leases
from queen.engine.segments import SegmentCache, SegmentGone
from queen.engine.waiting import Client, Gate, Parked
from queen.log import Log
from queen.settings import Settings

log = Log("pop")

_MOST_CANDIDATES = 64
_BUNDLE = 16  # claims in one transaction
_INFLIGHT = 3  # such transactions at a time
_NO_RUN = (0, -1)
_RETRY_SECONDS = 3.0  # a waiting pop outlives a short absence of the database
_RETRY_PAUSE = 0.25
_FILL_STEP = 0.01


@dataclass(slots=True)
class PopRequest:
    """What a pop asks for, checked. ``timeout`` is in seconds; without ``wait`` there is one attempt."""

    tenant: bytes
    subscription: Subscription
    batch: int
    partitions: int
    lease: int
    auto_ack: bool
    wait: bool
    timeout: float
    client: Client


@dataclass(slots=True)
class Delivery:
    """A claimed segment with the encoded frames the pop was given of it."""

    claim: Claimed
    frames: Sequence[bytes]


@dataclass(slots=True)
class Popped:
    """What a pop was given, partition by partition in the order of the claims."""

    lease_id: bytes
    deliveries: list[Delivery]


@dataclass(slots=True, eq=False)
class ClaimJob:
    """A claim that waits for its place in a shared transaction."""

    pop: ListPop
    done: Event = field(default_factory=Event)
    rows: list[Claimed] = field(default_factory=list)
    error: Unavailable | StatementFailed | None = None


class PopFailed(Exception):
    """The claim could not be made: ``pool`` without a connection, ``pop failed`` otherwise."""


# What an attempt claimed, and in how many seconds to try again without being woken (None: only a wake or
# a scan can bring news). An attempt may probe first when it is a re-poll.
Found = tuple[list[Claimed], float | None]
Attempt = Callable[[Terms, bool], Found]


class Popper:
    """The pop path of one worker."""

    def __init__(
        self,
        settings: Settings,
        operations: Operations,
        flags: Flags,
        hotlist: HotList,
        scan: HotListScan,
        minter: Minter,
        leases: Leases,
        segments: SegmentCache,
        admission: Admission,
    ) -> None:
        self._settings = settings
        self._operations = operations
        self._flags = flags
        self._hotlist = hotlist
        self._scan = scan
        self._minter = minter
        self._leases = leases
        self._segments = segments
        self._admission = admission
        bundle = _BUNDLE if settings.pop_fusion else 1
        inflight = _INFLIGHT if settings.pop_fusion else 1 << 30
        self.fusion: Fusion[int, ClaimJob] = Fusion(self._flush, bundle, inflight)
        self._parked: set[Parked] = set()
        self.stopping = False

    @property
    def parked(self) -> int:
        """Pops asleep in this worker."""
        return len(self._parked)

    def stop(self) -> None:
        """Wakes every parked pop; each answers that there is nothing, and no pop parks any more."""
        self.stopping = True
        self.wake()

    def wake(self) -> None:
        """Wakes every parked pop, to try again."""
        for parked in list(self._parked):
            parked.wake()

    def wildcard(self, request: PopRequest, queue: bytes) -> Popped | None:
        """Messages of any partition of a queue, or None. Raises `PopFailed` and `ClientGone`."""
        lane = self._hotlist.lane(request.tenant, queue)
        if not self._settings.hotlist:
            return self._poll(request, partial(self._by_scan, request, lane), lane.scanners, lane)
        ring = lane.ring(request.subscription.group)
        return self._poll(request, partial(self._by_ring, request, ring), ring.gate, lane, ring)

    def pinned(self, request: PopRequest, queue: bytes, partition: bytes) -> Popped | None:
        """Messages of one partition, or None. Raises as `wildcard`."""
        lane = self._hotlist.lane(request.tenant, queue)
        gate = lane.pinned.setdefault(partition, Gate())
        gate.users += 1
        try:
            return self._poll(request, partial(self._by_name, request, lane, partition), gate, lane)
        finally:
            gate.users -= 1
            if not gate.users:
                del lane.pinned[partition]

    def discovery(self, request: PopRequest, namespace: bytes, task: bytes) -> Popped | None:
        """Messages of any queue with a namespace and task, or None. Raises as `wildcard`."""
        gate = self._hotlist.discovery.setdefault(request.tenant, Gate())
        return self._poll(request, partial(self._by_discovery, request, namespace, task), gate, None)

    # The long poll

    def _poll(
        self, request: PopRequest, attempt: Attempt, gate: Gate, lane: Lane | None, ring: Ring | None = None
    ) -> Popped | None:
        started = time.monotonic()
        deadline = started + request.timeout
        empty = 0
        vain = False
        while True:
            if empty:
                request.client.check()
            if self._flags.pop_maintenance and not self._sit_out(request, deadline, gate):
                return None
            terms = Terms(
                self._minter.mint_text().encode(),
                request.batch,
                request.partitions,
                request.lease,
                request.auto_ack,
            )
            probe = empty > 0 and not vain and self._settings.pop_pending_gate
            wakes = gate.wakes
            self._admission.consuming += 1
            try:
                claims, again = self._attempt(partial(attempt, terms, probe), request, deadline)
            finally:
                self._admission.consuming -= 1
            if claims:
                given = self._given(request, terms, claims, lane)
                if given is not None:
                    return given
                continue
            left = deadline - time.monotonic()
            if not request.wait or left <= 0 or self.stopping:
                return None
            empty += 1
            parked = Parked()
            gate.add(parked, first=vain)
            self._parked.add(parked)
            try:
                if ring.ready if ring is not None else gate.wakes != wakes:
                    parked.wake()  # marked while the attempt ran
                vain = parked.sleep(min(left, self._pause(again, empty)), request.client)
            except BaseException:
                if parked.woken:
                    gate.wake()  # the wake was for somebody who stays
                raise
            finally:
                self._parked.discard(parked)
                gate.remove(parked)
            if vain:
                empty = 0

    def _sit_out(self, request: PopRequest, deadline: float, gate: Gate) -> bool:
        """Waits for the end of a pop maintenance, claiming nothing; whether there is time left to try.

        A waiting pop that were answered at once would come back at once.
        """
        while self._flags.pop_maintenance:
            left = deadline - time.monotonic()
            if not request.wait or left <= 0 or self.stopping:
                return False
            parked = Parked()
            gate.add(parked)  # or its queue would look idle, and be forgotten
            self._parked.add(parked)
            try:
                parked.sleep(left, request.client)
            finally:
                self._parked.discard(parked)
                gate.remove(parked)
        return True

    def _pause(self, again: float | None, empty: int) -> float:
        if again is None:
            return float(1 << 20)
        s = self._settings
        interval: float = s.pop_wait_initial_ms
        if empty > s.pop_wait_threshold:
            interval = min(s.pop_wait_max_ms, interval * empty * s.pop_wait_multiplier)
        return max(again, interval / 1000)

    def _attempt(self, attempt: Callable[[], Found], request: PopRequest, deadline: float) -> Found:
        """One attempt; a waiting pop retries for a few seconds while the database is away."""
        give_up = min(deadline, time.monotonic() + _RETRY_SECONDS)
        raced = False
        while True:
            if self._flags.pop_maintenance:
                return [], 0.0  # it began while the database was away
            try:
                return attempt()
            except Unavailable as error:
                failure = PopFailed("pool")
                log.sampled(10, "pop pool.get error", error=error)
            except StatementFailed as error:
                failure = PopFailed("pop failed")
                log.sampled(10, "pop failed", error=error, sqlstate=error.sqlstate)
                if error.raced_with_delete and not raced:
                    raced = True
                    continue
                if not error.lost:
                    raise failure from None
            if not request.wait or self.stopping or time.monotonic() + _RETRY_PAUSE >= give_up:
                raise failure
            gevent.sleep(_RETRY_PAUSE)
            request.client.check()

    def _given(self, request: PopRequest, terms: Terms, claims: list[Claimed], lane: Lane | None) -> Popped | None:
        """Hands a claim over, or back when its client left while it was made.

        What retention deleted meanwhile is left out; None if that was all of it.
        """
        deliveries = []
        for claim in claims:
            with suppress(SegmentGone):
                deliveries.append(Delivery(claim, self._frames(claim, lane)))
        if request.auto_ack:
            return Popped(b"", deliveries) if deliveries else None
        partitions = list(dict.fromkeys(delivery.claim.partition_id for delivery in deliveries))
        empty = {claim.partition_id for claim in claims}.difference(partitions)
        if empty:
            self._give_back(request, terms, list(empty))
            if not partitions:
                return None
        try:
            request.client.check()
        except BaseException:
            self._give_back(request, terms, partitions)
            raise
        self._leases.granted(terms.worker, partitions)
        return Popped(terms.worker, deliveries)

    def _frames(self, claim: Claimed, lane: Lane | None) -> Sequence[bytes]:
        """The frames a claim was given; what is left of the segment, or wanted by other groups, is kept."""
        end = claim.start + claim.take
        try:
            encoded, at_hand = self._segments.segment(claim)
        except (frames.BadSegment, Unavailable, StatementFailed) as error:
            log.error(
                "segment can't be delivered",
                partition_id=uuid_text(claim.partition_id),
                base=claim.base,
                error=error,
            )
            raise PopFailed("pop failed") from None
        if (
            not at_hand
            and lane is not None
            and (end < len(encoded) or len(lane.rings) > 1)
            and self._segments.put(claim.partition_id, claim.base, encoded)
        ):
            self._hotlist.at_hand(lane, claim.partition, claim.base, claim.base + len(encoded) - 1)
        return encoded[claim.start : end]

    def _give_back(self, request: PopRequest, terms: Terms, partitions: list[bytes]) -> None:
        group = request.subscription.group
        try:
            self._operations.release_lease(terms.worker, group, partitions)
        except (Unavailable, StatementFailed):
            return  # the leases expire
        for partition in partitions:
            self._hotlist.nacked(partition, group)

    # The shapes

    def _by_ring(self, request: PopRequest, ring: Ring, terms: Terms, probe: bool) -> Found:
        lane = ring.lane
        lane.used = ring.used = time.monotonic()
        if not ring.registered:
            with ring.contact:
                if not ring.registered:
                    return self._first_contact(request, ring, terms), None
        self._scan.refresh_flow(lane)
        if not ring.ready:
            self._scan.catch_up(ring)
        if not ring.ready:
            return [], None
        self._fill(request, ring)
        if self._flags.pop_maintenance:
            return [], None
        width = min(max(2 * request.partitions, 2), _MOST_CANDIDATES)
        taken = self._hotlist.check_out(ring, width, request.batch)
        if not taken:
            return [], None
        rows: list[Claimed] = []
        try:
            rows = self._claim(ring, [entry.name for entry, _ in taken], request, terms)
        finally:
            self._hotlist.check_in(ring, taken, rows, request.auto_ack)
        return [row for row in rows if row.verdict == b"took"], None

    def _claim(self, ring: Ring, names: list[bytes], request: PopRequest, terms: Terms) -> list[Claimed]:
        """Claims from candidates, together with the other pops that wait for a turn."""
        lane = ring.lane
        runs = [lane.runs.get(name, _NO_RUN) for name in names]
        pop = ListPop(
            *lane.key,
            ring.group,
            names,
            [run[0] for run in runs],
            [run[1] for run in runs],
            terms,
            lane.flow.window_buffer > 0,
        )
        job = ClaimJob(pop)
        self.fusion.submit(id(job), job)
        job.done.wait()
        if job.error is not None:
            raise job.error
        if any(row.verdict == b"contact" for row in job.rows):
            # Partitions the group has never seen get their cursors in a transaction of their own.
            served = [row for row in job.rows if row.verdict == b"took"]
            return served or self._operations.pop_list(pop, request.subscription)
        return job.rows

    def _flush(self, bundle: list[tuple[int, list[ClaimJob]]]) -> None:
        jobs = [job for _, waiting in bundle for job in waiting]
        try:
            self._run(jobs)
        finally:
            for job in jobs:
                job.done.set()

    def _run(self, jobs: list[ClaimJob]) -> None:
        """One transaction for all claims, or, if a statement refuses it, one for each."""
        try:
            for job, rows in zip(jobs, self._operations.pop_multi([job.pop for job in jobs]), strict=True):
                job.rows = rows
        except (Unavailable, StatementFailed) as error:
            alone = isinstance(error, Unavailable) or error.lost or len(jobs) == 1
            for job in jobs:
                if alone:
                    job.error = error
                else:
                    self._run([job])

    def _first_contact(self, request: PopRequest, ring: Ring, terms: Terms) -> list[Claimed]:
        """The first pop of a group here goes through the scan, which carries the registration."""
        claims = self._operations.pop_wildcard(*ring.lane.key, request.subscription, terms)
        self._scan.refresh_flow(ring.lane)
        self._hotlist.scanned(ring, claims, request.auto_ack)
        ring.registered = True
        self._scan.reseed(ring)
        return claims

    def _fill(self, request: PopRequest, ring: Ring) -> None:
        """Holds an under-full batch for the queue's minPopWaitTime: nothing is held meanwhile."""
        wait = ring.lane.flow.min_pop_wait_ms / 1000
        if wait <= 0 or not request.wait or request.batch <= 1:
            return
        until = time.monotonic() + min(wait, request.timeout)
        while ring.ready and time.monotonic() < until and not self.stopping:
            if sum(entry.marks for entry in ring.ready) >= request.batch:
                return
            gevent.sleep(_FILL_STEP)

    def _by_name(self, request: PopRequest, lane: Lane, partition: bytes, terms: Terms, probe: bool) -> Found:
        lane.used = time.monotonic()
        rows = self._operations.pop_specific(*lane.key, partition, request.subscription, terms)
        claims = [row for row in rows if row.verdict == b"took"]
        if claims:
            if not request.auto_ack:
                self._hotlist.held(lane, request.subscription.group, claims[-1])
            return claims, None
        again = self._settings.hotlist_reseed_ms / 1000
        for row in rows:
            lane.offsets[partition] = max(row.last_offset, lane.offsets.get(partition, -1))
            if row.verdict == b"leased":
                again = 0.0
        return [], again

    def _by_scan(self, request: PopRequest, lane: Lane, terms: Terms, probe: bool) -> Found:
        """Without the hot-list every pop scans, a re-poll behind the cheap probe."""
        lane.used = time.monotonic()
        if probe and not self._operations.has_pending(*lane.key, request.subscription.group):
            return [], 0.0
        claims = self._operations.pop_wildcard(*lane.key, request.subscription, terms)
        if claims and not request.auto_ack:
            for claim in {claim.partition: claim for claim in claims}.values():
                self._hotlist.held(lane, request.subscription.group, claim)
        return claims, 0.0

    def _by_discovery(self, request: PopRequest, namespace: bytes, task: bytes, terms: Terms, probe: bool) -> Found:
        group = request.subscription.group
        if probe and not self._operations.discover_has_pending(request.tenant, namespace, task, group):
            return [], 0.0
        claims = self._operations.pop_discover(request.tenant, namespace, task, request.subscription, terms)
        return claims, 0.0
