"""Transaction: pushes and acks in one PostgreSQL transaction, all or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from queen.db.errors import StatementFailed, Unavailable
from queen.db.operations import Operations
from queen.db.records import Acked, DeadLetter, SegmentWrite
from queen.engine import frames
from queen.engine.ack import Acker, AckGroup, AckItem, ItemResult
from queen.engine.encryption import Encryption, QueueEncrypted
from queen.engine.hints import Hints
from queen.engine.hotlist import HotList
from queen.engine.identifiers import Minter, fingerprint
from queen.log import Log
from queen.settings import Settings

_DEAD_LETTER_WANTED = "QT002"
_ENCRYPTED = "QE001"
_REASONS = {
    "23505": "duplicate",
    "QT001": "ack_rejected",
    "22023": "bad_request",
    "22001": "payload_too_large",
}


log = Log("push")


class TransactionRefused(Exception):
    """Everything was rolled back. ``reason`` is the code clients branch on."""

    def __init__(self, error: str, reason: str) -> None:
        super().__init__(error)
        self.error = error
        self.reason = reason


@dataclass(slots=True)
class Push:
    """One message to push, names and ids in UTF-8; only a transaction can give it a trace id."""

    queue: bytes
    partition: bytes
    payload: bytes
    transaction_id: bytes | None = None
    trace_id: bytes | None = None


@dataclass(slots=True)
class PushedItem:
    """A push of a transaction: the ids in force, and whether an earlier item of the bundle had its key."""

    message_id: str
    transaction_id: bytes
    duplicate: bool = False


@dataclass(slots=True)
class Committed:
    """The results of a transaction, pushes and acks each in request order."""

    pushed: list[PushedItem]
    acked: list[ItemResult]


@dataclass(slots=True)
class _Lane:
    """The frames of a bundle for one partition."""

    queue: bytes
    partition: bytes
    sealed: bool = False
    frames: list[bytes] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    first: dict[bytes, PushedItem] = field(default_factory=dict)


class Transactor:
    """The transaction path of one worker."""

    def __init__(
        self,
        settings: Settings,
        operations: Operations,
        hotlist: HotList,
        hints: Hints,
        minter: Minter,
        acker: Acker,
        encryption: Encryption,
    ) -> None:
        self._operations = operations
        self._hotlist = hotlist
        self._hints = hints
        self._minter = minter
        self._acker = acker
        self._encryption = encryption
        self._level = settings.zstd_level

    def commit(
        self,
        tenant: bytes,
        pushes: Sequence[Push],
        acks: Sequence[AckItem],
        leases: Sequence[str],
        subject: bytes | None,
    ) -> Committed:
        """Commits, or raises `TransactionRefused`; raises `Unavailable` without a connection, and
        `QueueEncrypted` when a queue is encrypted and there is no key.

        ``leases`` are those the request names anywhere: an ack without one of its own is taken under
        the lease on its cursor, if that is one of them.
        """
        pushed, lanes = self._pack(pushes, subject)
        results = [ItemResult() for _ in acks]
        groups = self._acker.grouped(tenant, acks, results)
        for ack, result in zip(acks, results, strict=True):
            if result.error is not None:
                raise TransactionRefused(
                    f"QTXN ack references partition {ack.partition_id} not owned by this tenant",
                    "ack_rejected",
                )
        for lane in lanes:
            if self._encryption.enabled and self._encryption.flag((tenant, lane.queue)):
                self._seal(lane)
        bases, outcomes = self._run(tenant, lanes, groups, [lease.encode() for lease in leases])
        for lane, base in zip(lanes, bases, strict=True):
            key = (tenant, lane.queue, lane.partition)
            self._hotlist.pushed(key, base + len(lane.frames) - 1, len(lane.frames))
            self._hints.tell_push(key)
        for group, acked in zip(groups, outcomes, strict=True):
            group.acked = acked
            self._acker.announce(group)
            for position, result in zip(group.positions, self._acker.results(group), strict=True):
                # A transaction tolerates what lies below the cursor: its replay must not fail on it.
                results[position] = ItemResult(True, None, dlq=result.dlq)
        return Committed(pushed, results)

    def _pack(self, pushes: Sequence[Push], subject: bytes | None) -> tuple[list[PushedItem], list[_Lane]]:
        lanes: dict[tuple[bytes, bytes], _Lane] = {}
        pushed: list[PushedItem] = []
        for item in pushes:
            lane = lanes.setdefault((item.queue, item.partition), _Lane(item.queue, item.partition))
            (message_id,), (text,) = self._minter.mint_many(1)
            key = item.transaction_id or text.encode()
            first = lane.first.get(key)
            if first is not None:
                pushed.append(PushedItem(first.message_id, key, duplicate=True))
                continue
            pushed.append(PushedItem(text, key))
            lane.first[key] = pushed[-1]
            lane.hashes.append(fingerprint(key))
            lane.frames.append(frames.encode_frame(message_id, key, item.payload, subject, item.trace_id))
        return pushed, list(lanes.values())

    def _write(self, tenant: bytes, lane: _Lane) -> SegmentWrite:
        return SegmentWrite(
            tenant,
            lane.queue,
            lane.partition,
            len(lane.frames),
            b"".join(lane.hashes),
            frames.pack(lane.frames, self._level),
            lane.sealed,
        )

    def _seal(self, lane: _Lane) -> None:
        """Puts the payloads for an encrypted queue into envelopes; raises `QueueEncrypted` without a key."""
        lane.sealed = True
        if self._encryption.enabled:
            lane.frames = [self._encryption.seal_frame(frame) for frame in lane.frames]
        elif self._encryption.required:
            raise QueueEncrypted(lane.queue.decode())
        else:
            log.sampled(10, "encryption failed; stored plaintext", queue=lane.queue.decode())

    def _run(
        self, tenant: bytes, lanes: list[_Lane], groups: list[AckGroup], leases: list[bytes]
    ) -> tuple[list[int], list[Acked]]:
        """Calls until no dead letter is missing and every payload is sealed that must be: SQL says which."""
        letters: list[DeadLetter | None] = [None] * len(groups)
        raced = False
        writes = [self._write(tenant, lane) for lane in lanes]
        while True:
            try:
                acks = [group.write for group in groups]
                return self._operations.transaction(tenant, writes, acks, leases, letters)
            except Unavailable:
                raise
            except StatementFailed as error:
                if error.raced_with_delete and not raced:
                    raced = True
                    continue
                if error.sqlstate == _ENCRYPTED:
                    queue = error.detail.encode()
                    self._encryption.learn((tenant, queue), True)
                    for lane in lanes:
                        if lane.queue == queue and not lane.sealed:
                            self._seal(lane)
                    writes = [self._write(tenant, lane) for lane in lanes]
                    continue
                if error.sqlstate != _DEAD_LETTER_WANTED:
                    raise TransactionRefused(error.message, _REASONS.get(error.sqlstate, "db_error")) from None
                position, _, offset = error.detail.partition(":")
                group = groups[int(position) - 1]
                letters[int(position) - 1] = self._acker.letter(group, int(offset))
