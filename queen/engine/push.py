"""Push: from checked items to committed segments.

Items of a request are grouped by (queue, partition) in their order; each group becomes part of one
segment. A group's frames wait for the partition's flush (see `queen.engine.fusion`) and its outcome comes
with the commit: queued, duplicate with the original's id, or failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b

import gevent
import msgspec
from gevent.event import Event

from queen.db.errors import StatementFailed, Unavailable
from queen.db.operations import Operations
from queen.db.records import SegmentWrite, SegmentWritten
from queen.engine import frames
from queen.engine.admission import Admission
from queen.engine.dedup import NOTHING, DedupCache, Key
from queen.engine.encryption import Encryption, QueueEncrypted
from queen.engine.frames import encode_frame
from queen.engine.fusion import Fusion
from queen.engine.hints import Hints
from queen.engine.hotlist import HotList
from queen.engine.identifiers import NO_MESSAGE, Minter, uuid_text
from queen.engine.segments import SegmentCache
from queen.log import Log
from queen.settings import Settings

log = Log("fusion")

DEFAULT_PARTITION = "Default"
QUEUED = "queued"
DUPLICATE = "duplicate"
FAILED = "failed"
BUFFERED = "buffered"  # on the broker's disk


class Item(msgspec.Struct, gc=False):
    """One message to push, as the wire has it; the payload is the JSON as it was sent.

    Items and outcomes come by the hundred in a request: as structs outside the collector's reach they
    cost a tenth of what they would as ordinary objects.
    """

    queue: str
    payload: msgspec.Raw
    partition: str | None = None
    transaction_id: str | None = msgspec.field(default=None, name="transactionId")


class Outcome(msgspec.Struct, gc=False):
    """What became of one item, as the wire has it; the mixed spelling is the contract."""

    index: int
    message_id: str
    transaction_id: str
    queue: str = msgspec.field(name="queueName")
    status: str = FAILED


@dataclass(slots=True)
class Group:
    """The frames of one request for one partition, and where their outcomes go.

    ``sealed`` tells that the payloads are in envelopes. ``replayed`` ones were accepted earlier: it is looked in
    the whole window whether they are stored already. ``error`` is why what failed of them did.
    """

    key: Key
    request: PushRequest
    sealed: bool = False
    outcomes: list[Outcome] = field(default_factory=list)
    frames: list[bytes] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    replayed: bool = False
    error: Exception | None = None


class PushRequest:
    """One push call: its groups, its outcomes by position, and the event that all submitted groups are settled."""

    __slots__ = ("_done", "_followers", "_left", "groups", "outcomes")

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.outcomes: list[Outcome] = []
        self._followers: dict[int, int] = {}  # item that repeats one -> the item it repeats
        self._left = 0
        self._done = Event()

    def follow(self, follower: int, leader: int) -> None:
        """An item repeats an earlier one, and shares its fate."""
        self._followers[follower] = leader

    def expect(self, groups: int) -> None:
        """So many more groups are on their way to the database."""
        self._left += groups
        self._done.clear()

    def settled(self) -> None:
        """One more group has its outcome."""
        self._left -= 1
        if self._left == 0:
            self._done.set()

    def wait(self) -> None:
        """Waits until all that was submitted is settled."""
        if self._left:
            self._done.wait()

    def close(self) -> list[Outcome]:
        """The outcomes, final now, in the order of the items."""
        for follower, leader in self._followers.items():
            outcome, first = self.outcomes[follower], self.outcomes[leader]
            outcome.message_id = first.message_id
            outcome.status = first.status if first.status in (FAILED, BUFFERED) else DUPLICATE
        return self.outcomes


class Pusher:
    """The push path of one worker."""

    def __init__(
        self,
        settings: Settings,
        operations: Operations,
        hotlist: HotList,
        hints: Hints,
        minter: Minter,
        dedup: DedupCache,
        segments: SegmentCache,
        admission: Admission,
        encryption: Encryption,
    ) -> None:
        self._operations = operations
        self._segments = segments
        self._hotlist = hotlist
        self._hints = hints
        self._minter = minter
        self._encryption = encryption
        self._level = settings.zstd_level
        self.admission = admission
        self.dedup = dedup
        self.fusion: Fusion[Key, Group] = Fusion(self._flush, settings.bundle_max, settings.fusion_max_inflight)

    def submit(self, request: PushRequest, groups: Sequence[Group]) -> None:
        """Sends groups of a request on their way; its `wait` waits for them."""
        request.expect(len(groups))
        for group in groups:
            self.fusion.submit(group.key, group)

    def check_flags(self, tenant: bytes, items: Sequence[Item]) -> None:
        """Refuses a request for several queues while nothing of it is stored; SQL refuses one for a single queue.

        Asks the database only about queues that are not known to be unencrypted. Raises `QueueEncrypted`.
        """
        if self._encryption.enabled or not self._encryption.required:
            return
        queues = {item.queue for item in items}
        if len(queues) == 1:
            return
        unsure = [name for name in (q.encode() for q in queues) if self._encryption.flag((tenant, name)) is not False]
        if unsure:
            with suppress(Unavailable, StatementFailed):  # then the push will fail by itself
                for name in self._operations.encrypted_queues(tenant, unsure):
                    raise QueueEncrypted(name.decode())

    def prepare(self, tenant: bytes, items: Sequence[Item], subject: bytes | None, fold: bool = True) -> PushRequest:
        """A request with the items in groups, not submitted yet: each item is ``failed`` until it is stored.

        Mints ids, folds repeats within the request if asked, and encodes a frame for every other item.
        """
        request = PushRequest()
        groups: dict[tuple[str, str], tuple[Group, dict[str, int]]] = {}
        outcomes = request.outcomes
        ids, texts = self._minter.mint_many(len(items))
        encryption = self._encryption if self._encryption.enabled else None
        where: tuple[str, str] | None = None
        for index, item in enumerate(items):
            here = (item.queue, DEFAULT_PARTITION if item.partition is None else item.partition)
            if here != where:
                where = here
                if here not in groups:
                    name = here[0].encode()
                    sealed = encryption is not None and bool(encryption.flag((tenant, name)))
                    groups[here] = (Group((tenant, name, here[1].encode()), request, sealed), {})
                group, seen = groups[here]
            key = texts[index] if item.transaction_id is None else item.transaction_id
            outcome = Outcome(index, texts[index], key, here[0])
            outcomes.append(outcome)
            leader = seen.setdefault(key, index)
            if leader != index and fold:
                request.follow(index, leader)
                continue
            transaction_id = key.encode()
            group.outcomes.append(outcome)
            group.hashes.append(blake2b(transaction_id, digest_size=16).digest())  # `fingerprint`, inlined
            frame = encode_frame(ids[index], transaction_id, bytes(item.payload), subject)
            if group.sealed:
                frame = self._encryption.seal_frame(frame)
            group.frames.append(frame)
        request.groups = [group for group, _ in groups.values()]
        return request

    def _flush(self, bundle: list[tuple[Key, list[Group]]]) -> None:
        """Commits the waiting groups of several partitions, and settles every one of them."""
        segments = [Segment(key, groups) for key, groups in bundle]
        try:
            while segments:
                self._commit(segments)
                segments = [segment for segment in segments if segment.advance()]
        finally:
            for key, groups in bundle:
                # Whatever came of it: a push may have been committed although its answer was lost.
                self._hints.tell_push(key)
                for group in groups:
                    group.request.settled()

    def _commit(self, segments: list[Segment], retry: bool = True) -> None:
        """One transaction for all segments, or, if a statement refuses it, one for each.

        A refused bundle may be one segment's fault, and that must not cost its neighbours.
        """
        try:
            self._write(segments)
        except (Unavailable, StatementFailed) as error:
            alone = isinstance(error, Unavailable) or error.lost or len(segments) == 1
            name = "bundle pool.get error" if isinstance(error, Unavailable) else "bundle log_push_multi error"
            log.sampled(10, name, error=error, partitions=len(segments))
            for segment in segments:
                if alone and not (retry and getattr(error, "raced_with_delete", False)):
                    segment.failed(error)
                else:
                    self._commit([segment], retry=not alone)

    def _write(self, segments: list[Segment]) -> None:
        writes = []
        for segment in segments:
            vouch = NOTHING if segment.replayed else self.dedup.vouch(segment.key, segment.hashes)
            tenant, queue, partition = segment.key
            write = SegmentWrite(
                tenant,
                queue,
                partition,
                len(segment.hashes),
                b"".join(segment.hashes),
                frames.pack(segment.frames, self._level),
                segment.sealed,
                vouch.partition_id,
                vouch.verified,
                vouch.window,
            )
            writes.append(write)
        judged = list(zip(segments, self._operations.push(writes), strict=True))
        for segment, written in judged:
            if written.base is not None:
                end = written.base + len(segment.hashes) - 1
                lane = self._hotlist.lanes.get(segment.key[:2])
                if lane is not None and self._segments.put(written.partition_id, written.base, segment.frames):
                    self._hotlist.at_hand(lane, segment.key[2], written.base, end)
                segment.queued()
                self._remember(segment, written)
                self._hotlist.pushed(segment.key, end, len(segment.hashes))
        for segment, written in judged:
            self._encryption.learn(segment.key[:2], written.encrypted)
            if written.base is None and not written.duplicates:
                self._seal(segment)
            elif written.base is None:
                segment.duplicates(self._originals(written))

    def _seal(self, segment: Segment) -> None:
        """The queue is encrypted, which its pushers did not know: what stands in plain text is sealed now."""
        if self._encryption.enabled:
            segment.seal(self._encryption)
        elif self._encryption.required:
            segment.failed(QueueEncrypted(segment.key[1].decode()))
        else:
            log.sampled(10, "encryption failed; stored plaintext", queue=segment.key[1].decode())
            segment.sealed = True

    def _remember(self, segment: Segment, written: SegmentWritten) -> None:
        wanted = self.dedup.pushed(segment.key, written, segment.hashes)
        if wanted is not None and wanted.partition_id is not None:
            partition_id = wanted.partition_id
            key = segment.key

            def catch_up() -> None:
                try:
                    rows = self._operations.hashes_since(partition_id, wanted.verified + 1, wanted.window)
                except (Unavailable, StatementFailed):
                    return
                self.dedup.read(key, wanted, rows)

            gevent.spawn(catch_up)

    def _originals(self, written: SegmentWritten) -> dict[int, str]:
        """The message ids stored at the offsets that the duplicates of a segment repeat."""
        found: dict[int, str] = {}
        for index, offset in written.duplicates.items():
            found[index] = NO_MESSAGE
            try:
                segment = self._operations.segment_at(written.partition_id, offset)
                if segment is not None:
                    base, _, blob = segment
                    found[index] = uuid_text(frames.unpack(blob, offset - base, 1)[0].message_id)
            except (Unavailable, StatementFailed, frames.BadSegment) as error:
                # The verdict stands without it: the original only can't be named.
                log.sampled(10, "original of a duplicate can't be read", error=error, offset=offset)
        return found


class Segment:
    """The frames that go to one partition in one write: the waiting groups', up to the first repeat.

    An id that two requests push at once is not decided here, since that depends on the queue's window:
    the segment is cut in front of the second one, and SQL judges it with the next write.
    """

    __slots__ = ("_groups", "_rest", "frames", "hashes", "key", "outcomes", "replayed", "sealed")

    def __init__(self, key: Key, groups: list[Group]) -> None:
        self.key = key
        self.sealed = all(group.sealed for group in groups)
        self.replayed = any(group.replayed for group in groups)
        self._groups = groups
        self.frames = [frame for group in groups for frame in group.frames]
        self.hashes = [h for group in groups for h in group.hashes]
        self.outcomes = [outcome for group in groups for outcome in group.outcomes]
        self._rest: tuple[list[bytes], list[bytes], list[Outcome]] | None = None
        self._cut()

    def _cut(self) -> None:
        self._rest = None
        if len(set(self.hashes)) == len(self.hashes):
            return
        seen: set[bytes] = set()
        for at, h in enumerate(self.hashes):
            if h in seen:
                self._rest = (self.frames[at:], self.hashes[at:], self.outcomes[at:])
                self.frames, self.hashes, self.outcomes = (
                    self.frames[:at],
                    self.hashes[:at],
                    self.outcomes[:at],
                )
                return
            seen.add(h)

    def queued(self) -> None:
        for outcome in self.outcomes:
            outcome.status = QUEUED
        self.outcomes = []

    def seal(self, encryption: Encryption) -> None:
        """Puts every payload that is not in an envelope into one, also of what stands behind."""
        self.sealed = True
        self.frames = [encryption.seal_frame(frame) for frame in self.frames]
        if self._rest is not None:
            frames, hashes, outcomes = self._rest
            self._rest = ([encryption.seal_frame(frame) for frame in frames], hashes, outcomes)

    def failed(self, error: Exception) -> None:
        """Nothing of this segment is stored, nor of what stands behind it."""
        for group in self._groups:
            group.error = error
        self.outcomes = []
        self._rest = None

    def duplicates(self, originals: dict[int, str]) -> None:
        """Gives the duplicates their verdict; the other frames are to be written again without them."""
        for index, message_id in originals.items():
            self.outcomes[index].status = DUPLICATE
            self.outcomes[index].message_id = message_id
        keep = [k for k in range(len(self.outcomes)) if k not in originals]
        self.frames = [self.frames[k] for k in keep]
        self.hashes = [self.hashes[k] for k in keep]
        self.outcomes = [self.outcomes[k] for k in keep]

    def advance(self) -> bool:
        """Moves on to what is still to be written; False when nothing is."""
        if self.outcomes:
            return True
        if self._rest is None:
            return False
        self.frames, self.hashes, self.outcomes = self._rest
        self._cut()
        return True
