"""Ack: cursors move, leases end, budgets are spent and dead letters filed, all decided in SQL.

Acks of one call are grouped by (partition, lease); each group is one row of a shared flush. A group that
dead-letters a message is called a second time with that message, which only the broker can take out of its
segment, so that cursor and dead letter change together.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b

import msgspec
from gevent.event import Event

from queen.db.errors import StatementFailed, Unavailable
from queen.db.operations import Operations
from queen.db.records import Acked, AckWrite, DeadLetter
from queen.engine import frames
from queen.engine.admission import Admission
from queen.engine.fusion import Fusion
from queen.engine.hotlist import HotList
from queen.engine.identifiers import QUEUE_MODE, parse_uuid
from queen.log import Log

log = Log("ack-fusion")

_BUNDLE = 64
_INFLIGHT = 4
_MOST_OWNED = 65_536

COMPLETED = frozenset({"completed", "success", "acked", "ok"})
STALE = "already committed: the cursor moved past this message before this ack"
UNRESOLVED = (
    "unresolvable: transaction not in the ack window (hash purged or never pushed); if leased, the message redelivers"
)
NOTHING_LEASED = "no leased batch"
FLUSH_FAILED = "ack flush failed; lease will expire and redeliver"
NO_REASON = "Retries exhausted"


class AckItem(msgspec.Struct, gc=False, rename="camel"):
    """One message to ack, as the wire has it. ``status`` is the client's word, None for completed."""

    transaction_id: str = ""
    partition_id: str = ""
    group: str | None = msgspec.field(default=None, name="consumerGroup")
    lease_id: str | None = None
    status: str | None = None
    error: str | None = None

    @property
    def letter(self) -> str:
        """The status as SQL reads it: c, f, r or d. A word nobody knows is a failure."""
        if self.status is None or self.status in COMPLETED:
            return "c"
        return {"retry": "r", "dlq": "d"}.get(self.status, "f")


class ItemResult(msgspec.Struct, gc=False, frozen=True):
    """What became of one item."""

    success: bool = False
    error: str | None = None
    released: bool = False
    dlq: bool = False
    noop: bool = False


_FAILED = ItemResult()


@dataclass(slots=True)
class AckGroup:
    """The items of one call for one cursor under one lease, and how the flush went."""

    write: AckWrite
    items: list[AckItem]
    positions: list[int]
    call: AckCall | None = None
    acked: Acked | None = None
    error: str | None = None
    dead: int = -1  # the item that was dead-lettered


class AckCall:
    """One ack call, waiting for its groups."""

    __slots__ = ("_done", "_left")

    def __init__(self, groups: int) -> None:
        self._left = groups
        self._done = Event()

    def settled(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._done.set()

    def wait(self) -> None:
        if self._left:
            self._done.wait()


Key = tuple[bytes, bytes]  # partition id, group


class Acker:
    """The ack path of one worker."""

    def __init__(self, operations: Operations, hotlist: HotList, admission: Admission, tenancy: bool = False) -> None:
        self._operations = operations
        self._admission = admission
        self._hotlist = hotlist
        self._tenancy = tenancy
        self._owned: OrderedDict[tuple[bytes, bytes], None] = OrderedDict()  # tenant and partition, seen in SQL
        self.fusion: Fusion[Key, AckGroup] = Fusion(self._flush, _BUNDLE, _INFLIGHT)

    def ack(self, tenant: bytes, items: Sequence[AckItem]) -> list[ItemResult]:
        """Carries out acks; one result per item, in order. Raises nothing."""
        results = [_FAILED] * len(items)
        groups = self.grouped(tenant, items, results)
        call = AckCall(len(groups))
        self._admission.consuming += 1
        try:
            for group in groups:
                group.call = call
                self.fusion.submit((group.write.partition_id, group.write.group), group)
            call.wait()
        finally:
            self._admission.consuming -= 1
        for group in groups:
            for position, result in zip(group.positions, self.results(group), strict=True):
                results[position] = result
        return results

    def grouped(self, tenant: bytes, items: Sequence[AckItem], results: list[ItemResult]) -> list[AckGroup]:
        """One group per (partition, group, lease). An item whose partition is no UUID gets its result here."""
        groups: dict[tuple[str, str | None, str | None], AckGroup] = {}
        for position, item in enumerate(items):
            key = (item.partition_id, item.group, item.lease_id)
            group = groups.get(key)
            if group is None:
                partition_id = parse_uuid(item.partition_id)
                if partition_id is None:
                    error = f'invalid input syntax for type uuid: "{item.partition_id}"'
                    results[position] = ItemResult(error=error)
                    continue
                write = AckWrite(
                    tenant if self._tenancy and (tenant, partition_id) not in self._owned else None,
                    partition_id,
                    (QUEUE_MODE if item.group is None else item.group).encode(),
                    _storable(item.lease_id or ""),
                    b"",
                    b"",
                )
                group = groups[key] = AckGroup(write, [], [])
            group.items.append(item)
            group.positions.append(position)
        for group in groups.values():
            # `fingerprint`, inlined: this runs for every message that is acked.
            group.write.hashes = b"".join(
                [blake2b(i.transaction_id.encode(), digest_size=16).digest() for i in group.items]
            )
            if any(i.status is not None and i.status not in COMPLETED for i in group.items):
                group.write.statuses = "".join([i.letter for i in group.items]).encode()
        return list(groups.values())

    def _flush(self, bundle: list[tuple[Key, list[AckGroup]]]) -> None:
        groups = [group for _, waiting in bundle for group in waiting]
        try:
            self._write(groups)
        finally:
            for group in groups:
                if group.acked is None and group.error is None:
                    group.error = FLUSH_FAILED
                if group.call is not None:
                    group.call.settled()

    def _write(self, groups: list[AckGroup]) -> None:
        """One transaction for all groups, or, if a statement refuses it, one for each."""
        try:
            for group, acked in zip(groups, self._operations.ack_multi([g.write for g in groups]), strict=True):
                group.acked = acked
        except Unavailable as error:
            log.sampled(10, "log_ack_multi error", error=error, acks=len(groups))
            for group in groups:
                group.error = "pool"
            return
        except StatementFailed as error:
            log.sampled(10, "log_ack_multi error", error=error, acks=len(groups))
            for group in groups:
                if len(groups) > 1 and not error.lost:
                    self._write([group])
                else:
                    group.error = FLUSH_FAILED if error.lost or len(groups) > 1 else error.message
            return
        for group in groups:
            if group.write.tenant is not None and group.acked is not None and group.acked.error is None:
                self._remember_owner(group.write.tenant, group.write.partition_id)
            if group.acked is not None and group.acked.dead_offset is not None:
                self._dead_letter(group)
            self.announce(group)

    def _remember_owner(self, tenant: bytes, partition_id: bytes) -> None:
        """Later acks needn't ask whose a partition is: it never changes. That it is not theirs is asked each time."""
        self._owned[tenant, partition_id] = None
        if len(self._owned) > _MOST_OWNED:
            self._owned.popitem(last=False)

    def _dead_letter(self, group: AckGroup) -> None:
        """Calls again with the message that is given up. The offset may move while nobody holds the lock."""
        try:
            while group.acked is not None and group.acked.dead_offset is not None and not group.acked.filed:
                letter = self.letter(group, group.acked.dead_offset)
                group.acked = self._operations.ack_dead(group.write, letter)
        except (Unavailable, StatementFailed) as error:
            log.warning("dead letter not filed; the lease will expire and redeliver", error=error)
            group.acked = None
            group.error = "dlq rejected"

    def letter(self, group: AckGroup, offset: int) -> DeadLetter:
        """The message at an offset with the reason this ack gives: its own nack's, else the first one's.

        What can't be read, or was removed by retention meanwhile, is filed without payload, under the
        ids that are known.
        """
        segment = self._operations.segment_at(group.write.partition_id, offset)
        frame = None
        at = None
        if segment is not None:
            base, at, blob = segment
            with suppress(frames.BadSegment):
                frame = frames.unpack(blob, offset - base, 1)[0]
        reason = None
        nacks = [(k, item) for k, item in enumerate(group.items) if item.letter != "c"]
        group.dead = nacks[0][0]
        for k, item in nacks:
            if frame is not None and item.transaction_id.encode() == frame.transaction_id:
                group.dead = k
                reason = item.error
                break
        text = _storable(reason or next((item.error for _, item in nacks if item.error), None) or NO_REASON)
        if frame is None:
            transaction_id = group.items[group.dead].transaction_id.encode()
            return DeadLetter(offset, bytes(16), transaction_id, None, None, False, None, text)
        return DeadLetter(
            offset,
            frame.message_id,
            frame.transaction_id,
            frame.payload,
            frame.subject,
            frame.encrypted,
            at,
            text,
        )

    def announce(self, group: AckGroup) -> None:
        """After the commit: a lease that ended makes what is left claimable at once."""
        acked = group.acked
        if acked is None or not acked.released:
            return
        if group.write.statuses:
            self._hotlist.nacked(group.write.partition_id, group.write.group)
        else:
            self._hotlist.acked(group.write.partition_id, group.write.group, True)

    @staticmethod
    def results(group: AckGroup) -> list[ItemResult]:
        """The items' results, from the letters SQL returned."""
        acked = group.acked
        if acked is None or acked.error is not None:
            error = group.error if acked is None else acked.error
            return [ItemResult(error=error)] * len(group.items)
        if not acked.items:
            return [ItemResult(True, None, acked.released)] * len(group.items)
        results = []
        for position, letter in enumerate(acked.items.decode()):
            if letter == "k":
                result = ItemResult(True, None, acked.released, acked.filed and position == group.dead)
            elif letter == "n":
                result = ItemResult(True, noop=True)
            else:
                result = ItemResult(error={"s": STALE, "x": NOTHING_LEASED}.get(letter, UNRESOLVED))
            results.append(result)
        return results


def _storable(text: str) -> bytes:
    """A text for a column of PostgreSQL, which can't hold a NUL."""
    return text.replace("\x00", "\ufffd").encode()
