"""The stored operations of the data plane, one typed method each: all of the broker's hot SQL is here.

Parameters and results are binary (see `queen.db.binary`); the records are those of `queen.db.records`.
Every method raises what `queen.db.database.Database.call` raises.
"""

from __future__ import annotations

from collections.abc import Sequence

from psycopg.pq.abc import PGresult

from queen.db import binary
from queen.db.connection import Statement
from queen.db.database import Database
from queen.db.records import (
    Acked,
    AckWrite,
    Changed,
    Claimed,
    DeadLetter,
    Flow,
    HashRow,
    ListPop,
    Pending,
    SegmentWrite,
    SegmentWritten,
    Subscription,
    Terms,
)

_PUSH = Statement(
    "push_multi",
    "SELECT i, base_offset, created_at, dup_idx, dup_off, partition_id, window_seconds, encrypted"
    " FROM queen.log_push_multi_v1($1::uuid[], $2::text[], $3::text[], $4::int[], $5::bytea[], $6::bytea[],"
    " $7::int[], $8::uuid[], $9::bigint[], $10::int[])",
)
_ENCRYPTED = Statement(
    "encrypted_queues",
    "SELECT q.name::text FROM queen.queues q"
    " WHERE q.tenant_id = $1::uuid AND q.name = ANY ($2::text[]) AND q.encryption_enabled",
)
_HASHES = Statement("hashes_since", "SELECT * FROM queen.log_hashes_since_v1($1::uuid, $2::bigint, $3::int)")
_SEGMENT_AT = Statement("segment_at", "SELECT * FROM queen.log_segment_at_v1($1::uuid, $2::bigint)")
_POP_LIST = Statement(
    "pop_list",
    "SELECT 1, p.* FROM queen.log_pop_list_v1($1::uuid, $2::text, $3::text[], $4::bigint[], $5::bigint[], $6::text,"
    " $7::text, $8::int, $9::int, $10::int, $11::bool, $12::bool, $13::text, $14::text) p",
)
_POP_MULTI = Statement(
    "pop_multi",
    "SELECT * FROM queen.log_pop_multi_v1($1::uuid[], $2::text[], $3::int[], $4::text[], $5::bigint[], $6::bigint[],"
    " $7::text[], $8::text[], $9::int[], $10::int[], $11::int[], $12::int[], $13::int[])",
)
_POP_SPECIFIC = Statement(
    "pop_specific",
    "SELECT 1, p.* FROM queen.log_pop_specific_v1($1::uuid, $2::text, $3::text, $4::text, $5::text, $6::int, $7::int,"
    " $8::bool, $9::text, $10::text) p",
)
_POP_WILDCARD = Statement(
    "pop_wildcard",
    "SELECT 1, p.* FROM queen.log_pop_wildcard_v1($1::uuid, $2::text, $3::text, $4::text, $5::int, $6::int, $7::int,"
    " $8::bool, $9::text, $10::text) p",
)
_POP_DISCOVER = Statement(
    "pop_discover",
    "SELECT 1, p.* FROM queen.log_pop_discover_v1($1::uuid, $2::text, $3::text, $4::text, $5::text, $6::int, $7::int,"
    " $8::int, $9::bool, $10::text, $11::text) p",
)
_HAS_PENDING = Statement("has_pending", "SELECT queen.log_has_pending_v1($1::uuid, $2::text, $3::text)")
_DISCOVER_HAS_PENDING = Statement(
    "discover_has_pending",
    "SELECT queen.log_discover_has_pending_v1($1::uuid, $2::text, $3::text, $4::text)",
)
_RENEW = Statement("renew_lease", "SELECT * FROM queen.log_renew_lease_v1($1::uuid, $2::text, $3::int, $4::uuid[])")
_RELEASE = Statement("release_lease", "SELECT queen.log_release_lease_v1($1::text, $2::text, $3::uuid[])")
_ACK_MULTI = Statement(
    "ack_multi",
    "SELECT * FROM queen.log_ack_multi_v1($1::uuid[], $2::uuid[], $3::text[], $4::text[], $5::bytea[], $6::text[])",
)
_ACK = Statement(
    "ack",
    "SELECT error, items, released, retired, dead_offset, filed"
    " FROM queen.log_ack_v1($1::uuid, $2::uuid, $3::text, $4::text, NULL, $5::bytea, $6::text, $7::bigint,"
    " $8::uuid, $9::text, $10::text, $11::text, $12::bool, $13::timestamptz, $14::text)",
)
_TRANSACTION = Statement(
    "transaction",
    "SELECT kind, i, items, released, filed, base_offset"
    " FROM queen.log_transaction_v1($1::uuid, $2::text[], $3::text[], $4::int[], $5::bytea[], $6::bytea[],"
    " $7::int[], $8::uuid[], $9::text[], $10::text[], $11::text[], $12::bytea[], $13::text[], $14::bigint[],"
    " $15::uuid[], $16::text[], $17::text[], $18::text[], $19::int[], $20::timestamptz[], $21::text[])",
)
_RESEED = Statement(
    "hotlist_reseed",
    "SELECT * FROM queen.log_hotlist_reseed_v1($1::uuid, $2::text, $3::text, $4::text, $5::int)",
)
_RESEED_WINDOW = Statement(
    "hotlist_reseed_window",
    "SELECT * FROM queen.log_hotlist_reseed_window_v1($1::uuid, $2::text, $3::text, $4::timestamptz,"
    " $5::timestamptz, $6::uuid, $7::int)",
)
_CHANGED = Statement(
    "hotlist_changed", "SELECT * FROM queen.log_hotlist_changed_v2($1::uuid[], $2::text[], $3::timestamptz)"
)
_REPAIRS = Statement("hotlist_repairs", "SELECT * FROM queen.log_hotlist_repairs_v1()")
_FLOW = Statement("queue_flow", "SELECT * FROM queen.log_queue_flow_v1($1::uuid, $2::text)")
_FLAGS = Statement("system_flags", "SELECT f.key FROM queen.system_flags_v1() f WHERE f.enabled")
_SET_FLAG = Statement("set_system_flag", "SELECT queen.set_system_flag_v1($1::text, $2::bool)")
_PING = Statement("ping", "SELECT 1")

_CONTACT_SECONDS = 600.0


class Operations:
    """The data plane's calls over one pool."""

    def __init__(self, database: Database) -> None:
        self._call = database.call

    def ping(self) -> None:
        """One round trip."""
        self._call(_PING, ())

    def push(self, segments: Sequence[SegmentWrite]) -> list[SegmentWritten]:
        """Appends segments to disjoint partitions in one transaction; results in the same order."""
        result = self._call(
            _PUSH,
            (
                binary.uuids([s.tenant for s in segments]),
                binary.texts([s.queue for s in segments]),
                binary.texts([s.partition for s in segments]),
                binary.int4s([s.count for s in segments]),
                binary.byteas([s.hashes for s in segments]),
                binary.byteas([s.blob for s in segments]),
                binary.int4s([int(s.sealed) for s in segments]),
                binary.uuids([s.vouched for s in segments]),
                binary.int8s([s.verified for s in segments]),
                binary.int4s([s.window for s in segments]),
            ),
        )
        written: list[SegmentWritten | None] = [None] * len(segments)
        get = result.get_value
        for row in range(result.ntuples):
            base, at, dup_idx, dup_off = (get(row, column) for column in (1, 2, 3, 4))
            written[binary.read_int4(get(row, 0) or b"") - 1] = SegmentWritten(
                base=None if base is None else binary.read_int8(base),
                created_at=0 if at is None else binary.read_int8(at),
                duplicates=dict(zip(binary.read_int4s(dup_idx), binary.read_int8s(dup_off or b""), strict=True))
                if dup_idx is not None
                else {},
                partition_id=get(row, 5) or b"",
                window=binary.read_int4(get(row, 6) or b""),
                encrypted=get(row, 7) == binary.TRUE,
            )
        return [w for w in written if w is not None]

    def encrypted_queues(self, tenant: bytes, queues: Sequence[bytes]) -> set[bytes]:
        """Which of these queues of a tenant are encrypted."""
        result = self._call(_ENCRYPTED, (tenant, binary.texts(queues)))
        return {result.get_value(row, 0) or b"" for row in range(result.ntuples)}

    def hashes_since(self, partition_id: bytes, offset: int, window: int) -> list[HashRow]:
        """The hash rows that hold offsets from ``offset`` on and are not older than ``window`` seconds."""
        result = self._call(_HASHES, (partition_id, binary.int8(offset), binary.int4(window)))
        get = result.get_value
        return [
            HashRow(binary.read_int8(get(r, 0) or b""), binary.read_int8(get(r, 1) or b""), get(r, 2) or b"")
            for r in range(result.ntuples)
        ]

    def segment_at(self, partition_id: bytes, offset: int) -> tuple[int, int, bytes] | None:
        """Base, creation time and blob of the segment that covers an offset, or None."""
        result = self._call(_SEGMENT_AT, (partition_id, binary.int8(offset)))
        if not result.ntuples:
            return None
        base, at, blob = (result.get_value(0, column) or b"" for column in range(3))
        return binary.read_int8(base), binary.read_int8(at), blob

    def pop_list(self, pop: ListPop, subscription: Subscription) -> list[Claimed]:
        """Claims from named candidates of a queue, in their order; first contacts included."""
        terms = pop.terms
        return _claims(
            self._call(
                _POP_LIST,
                (
                    pop.tenant,
                    pop.queue,
                    binary.texts(pop.candidates),
                    binary.int8s(pop.known_from),
                    binary.int8s(pop.known_to),
                    pop.group,
                    terms.worker,
                    binary.int4(terms.budget),
                    binary.int4(terms.cap),
                    binary.int4(terms.lease),
                    binary.boolean(terms.auto_ack),
                    binary.boolean(pop.debounced),
                    subscription.mode,
                    subscription.start,
                ),
            ),
            1,
        )[0]

    def pop_multi(self, pops: Sequence[ListPop]) -> list[list[Claimed]]:
        """Several such claims in one transaction; a first contact only gets the verdict ``contact``."""
        return _claims(
            self._call(
                _POP_MULTI,
                (
                    binary.uuids([p.tenant for p in pops]),
                    binary.texts([p.queue for p in pops]),
                    binary.int4s([len(p.candidates) for p in pops]),
                    binary.texts([name for p in pops for name in p.candidates]),
                    binary.int8s([base for p in pops for base in p.known_from]),
                    binary.int8s([base for p in pops for base in p.known_to]),
                    binary.texts([p.group for p in pops]),
                    binary.texts([p.terms.worker for p in pops]),
                    binary.int4s([p.terms.budget for p in pops]),
                    binary.int4s([p.terms.cap for p in pops]),
                    binary.int4s([p.terms.lease for p in pops]),
                    binary.int4s([int(p.terms.auto_ack) for p in pops]),
                    binary.int4s([int(p.debounced) for p in pops]),
                ),
            ),
            len(pops),
        )

    def pop_specific(
        self, tenant: bytes, queue: bytes, partition: bytes, subscription: Subscription, terms: Terms
    ) -> list[Claimed]:
        """Claims one partition."""
        return _claims(
            self._call(
                _POP_SPECIFIC,
                (
                    tenant,
                    queue,
                    partition,
                    subscription.group,
                    terms.worker,
                    binary.int4(terms.budget),
                    binary.int4(terms.lease),
                    binary.boolean(terms.auto_ack),
                    subscription.mode,
                    subscription.start,
                ),
            ),
            1,
        )[0]

    def pop_wildcard(self, tenant: bytes, queue: bytes, subscription: Subscription, terms: Terms) -> list[Claimed]:
        """Registers the group on the queue if need be, and claims from a scan of its partitions.

        The registration makes a cursor for every partition, in one transaction that must not be
        cancelled half way for ever: a queue of a million takes twenty seconds on a small machine.
        """
        parameters = (tenant, queue, *_scan(subscription, terms))
        return _claims(self._call(_POP_WILDCARD, parameters, _CONTACT_SECONDS), 1)[0]

    def pop_discover(
        self, tenant: bytes, namespace: bytes, task: bytes, subscription: Subscription, terms: Terms
    ) -> list[Claimed]:
        """The same over every queue with this namespace and task."""
        parameters = (tenant, namespace, task, *_scan(subscription, terms))
        return _claims(self._call(_POP_DISCOVER, parameters, _CONTACT_SECONDS), 1)[0]

    def has_pending(self, tenant: bytes, queue: bytes, group: bytes) -> bool:
        return self._call(_HAS_PENDING, (tenant, queue, group)).get_value(0, 0) == binary.TRUE

    def discover_has_pending(self, tenant: bytes, namespace: bytes, task: bytes, group: bytes) -> bool:
        result = self._call(_DISCOVER_HAS_PENDING, (tenant, namespace, task, group))
        return result.get_value(0, 0) == binary.TRUE

    def renew_lease(
        self, tenant: bytes, worker: bytes, seconds: int, partitions: Sequence[bytes] | None
    ) -> tuple[int, int | None]:
        """Number of leases renewed and the earliest new expiry."""
        where = None if partitions is None else binary.uuids(partitions)
        result = self._call(_RENEW, (tenant, worker, binary.int4(seconds), where))
        at = result.get_value(0, 1)
        return binary.read_int4(result.get_value(0, 0) or b""), None if at is None else binary.read_int8(at)

    def release_lease(self, worker: bytes, group: bytes, partitions: Sequence[bytes]) -> None:
        """Gives back leases whose batch nobody saw."""
        self._call(_RELEASE, (worker, group, binary.uuids(partitions)))

    def ack_multi(self, acks: Sequence[AckWrite]) -> list[Acked]:
        """Several acks in one transaction; an ack that wants a dead letter filed has changed nothing."""
        result = self._call(
            _ACK_MULTI,
            (
                binary.uuids([a.tenant for a in acks]),
                binary.uuids([a.partition_id for a in acks]),
                binary.texts([a.group for a in acks]),
                binary.texts([a.worker for a in acks]),
                binary.byteas([a.hashes for a in acks]),
                binary.texts([a.statuses for a in acks]),
            ),
        )
        acked: list[Acked | None] = [None] * len(acks)
        for row in range(result.ntuples):
            acked[binary.read_int4(result.get_value(row, 0) or b"") - 1] = _acked(result, row, 1)
        return [a for a in acked if a is not None]

    def ack_dead(self, ack: AckWrite, letter: DeadLetter) -> Acked:
        """One ack that brings the message it may dead-letter."""
        result = self._call(
            _ACK,
            (
                ack.tenant,
                ack.partition_id,
                ack.group,
                ack.worker,
                ack.hashes,
                ack.statuses,
                binary.int8(letter.offset),
                letter.message_id,
                letter.transaction_id,
                letter.payload,
                letter.subject,
                binary.boolean(letter.encrypted),
                None if letter.pushed_at is None else binary.int8(letter.pushed_at),
                letter.reason,
            ),
        )
        return _acked(result, 0, 0)

    def transaction(
        self,
        tenant: bytes,
        pushes: Sequence[SegmentWrite],
        acks: Sequence[AckWrite],
        leases: Sequence[bytes],
        letters: Sequence[DeadLetter | None],
    ) -> tuple[list[int], list[Acked]]:
        """Commits pushes and acks together; the pushes' bases and the acks' outcomes. A refusal raises."""
        result = self._call(
            _TRANSACTION,
            (
                tenant,
                binary.texts([s.queue for s in pushes]),
                binary.texts([s.partition for s in pushes]),
                binary.int4s([s.count for s in pushes]),
                binary.byteas([s.hashes for s in pushes]),
                binary.byteas([s.blob for s in pushes]),
                binary.int4s([int(s.sealed) for s in pushes]),
                binary.uuids([a.partition_id for a in acks]),
                binary.texts([a.group for a in acks]),
                binary.texts([a.worker for a in acks]),
                binary.texts(leases),
                binary.byteas([a.hashes for a in acks]),
                binary.texts([a.statuses for a in acks]),
                binary.array(binary.OID_INT8, [binary.int8(d.offset) if d else None for d in letters]),
                binary.uuids([d.message_id if d else None for d in letters]),
                binary.texts([d.transaction_id if d else None for d in letters]),
                binary.texts([d.payload if d else None for d in letters]),
                binary.texts([d.subject if d else None for d in letters]),
                binary.int4s([int(d.encrypted) if d else 0 for d in letters]),
                binary.times([d.pushed_at if d else None for d in letters]),
                binary.texts([d.reason if d else None for d in letters]),
            ),
        )
        bases = [0] * len(pushes)
        acked: list[Acked | None] = [None] * len(acks)
        for row in range(result.ntuples):
            kind, i, items, released, filed, base = (result.get_value(row, c) for c in range(6))
            position = binary.read_int4(i or b"") - 1
            if kind == b"push":
                bases[position] = binary.read_int8(base or b"")
            else:
                acked[position] = Acked(None, items or b"", released == binary.TRUE, 0, None, filed == binary.TRUE)
        return bases, [a for a in acked if a is not None]

    def hotlist_reseed(
        self, tenant: bytes, queue: bytes, group: bytes, after: bytes | None, limit: int
    ) -> list[Pending]:
        """A page of the queue's partitions with work for a group, in the order of their names."""
        result = self._call(_RESEED, (tenant, queue, group, after, binary.int4(limit)))
        get = result.get_value
        return [
            Pending(get(r, 0) or b"", get(r, 1) or b"", binary.read_int8(get(r, 2) or b""), 0)
            for r in range(result.ntuples)
        ]

    def hotlist_reseed_window(
        self, tenant: bytes, queue: bytes, group: bytes, since: int, after: Pending | None, limit: int
    ) -> list[Pending]:
        """The same for partitions written since a time, in the order of (last write, id)."""
        result = self._call(
            _RESEED_WINDOW,
            (
                tenant,
                queue,
                group,
                binary.int8(since),
                None if after is None else binary.int8(after.last_write_at),
                None if after is None else after.partition_id,
                binary.int4(limit),
            ),
        )
        get = result.get_value
        return [
            Pending(
                get(r, 0) or b"",
                get(r, 1) or b"",
                binary.read_int8(get(r, 2) or b""),
                binary.read_int8(get(r, 3) or b""),
            )
            for r in range(result.ntuples)
        ]

    def hotlist_changed(self, queues: Sequence[tuple[bytes, bytes]], since: int | None) -> tuple[int, list[Changed]]:
        """The time to ask from next, and the partitions of the (tenant, queue) pairs written since."""
        result = self._call(
            _CHANGED,
            (
                binary.uuids([tenant for tenant, _ in queues]),
                binary.texts([queue for _, queue in queues]),
                None if since is None else binary.int8(since),
            ),
        )
        get = result.get_value
        now = binary.read_int8(get(0, 3) or b"")
        return now, [
            Changed(
                binary.read_int4(get(r, 0) or b"") - 1,
                get(r, 1) or b"",
                binary.read_int8(get(r, 2) or b""),
                get(r, 4) == binary.TRUE,
            )
            for r in range(1, result.ntuples)
        ]

    def hotlist_repairs(self) -> dict[tuple[bytes, bytes, bytes], tuple[int, bytes | None]]:
        """When a (tenant, queue, group) was last moved on purpose, and in which partition (None: several)."""
        result = self._call(_REPAIRS, ())
        get = result.get_value
        return {
            (get(r, 0) or b"", get(r, 1) or b"", get(r, 2) or b""): (binary.read_int8(get(r, 4) or b""), get(r, 3))
            for r in range(result.ntuples)
        }

    def queue_flow(self, tenant: bytes, queue: bytes) -> Flow | None:
        result = self._call(_FLOW, (tenant, queue))
        if not result.ntuples:
            return None
        return Flow(*(binary.read_int4(result.get_value(0, c) or binary.int4(0)) for c in range(3)))

    def flags(self) -> set[str]:
        """The flags that are on."""
        result = self._call(_FLAGS, ())
        return {(result.get_value(r, 0) or b"").decode() for r in range(result.ntuples)}

    def set_flag(self, flag: str, enabled: bool) -> None:
        self._call(_SET_FLAG, (flag.encode(), binary.boolean(enabled)))


def _scan(subscription: Subscription, terms: Terms) -> tuple[bytes, ...]:
    return (
        subscription.group,
        terms.worker,
        binary.int4(terms.budget),
        binary.int4(terms.cap),
        binary.int4(terms.lease),
        binary.boolean(terms.auto_ack),
        subscription.mode,
        subscription.start,
    )


def _claims(result: PGresult, pops: int) -> list[list[Claimed]]:
    """The rows of a claim per pop: position, then the columns of log_claim_v1."""
    get = result.get_value
    read_int4, read_int8 = binary.read_int4, binary.read_int8
    claims: list[list[Claimed]] = [[] for _ in range(pops)]
    for r in range(result.ntuples):
        verdict = get(r, 2) or b""
        until, last = get(r, 10), get(r, 9)
        if verdict == b"took":
            claim = Claimed(
                get(r, 1) or b"",
                verdict,
                get(r, 3) or b"",
                read_int8(get(r, 4) or b""),
                read_int4(get(r, 5) or b""),
                read_int4(get(r, 6) or b""),
                read_int8(get(r, 7) or b""),
                read_int8(get(r, 8) or b""),
                read_int8(last or b""),
                None if until is None else read_int8(until),
                get(r, 11),
            )
        else:
            claim = Claimed(
                get(r, 1) or b"",
                verdict,
                get(r, 3) or b"",
                base=-1,
                start=0,
                take=0,
                created_at=0,
                batch_end=-1,
                last_offset=-1 if last is None else read_int8(last),
                until=None if until is None else read_int8(until),
                blob=None,
            )
        claims[read_int4(get(r, 0) or b"") - 1].append(claim)
    return claims


def _acked(result: PGresult, row: int, first: int) -> Acked:
    """An outcome from the columns error, items, released, retired, dead_offset and, if there, filed."""
    error, items, released, retired, dead = (result.get_value(row, first + c) for c in range(5))
    filed = result.nfields > first + 5 and result.get_value(row, first + 5) == binary.TRUE
    return Acked(
        error=None if error is None else error.decode(),
        items=items or b"",
        released=released == binary.TRUE,
        retired=binary.read_int8(retired) if retired else 0,
        dead_offset=None if dead is None else binary.read_int8(dead),
        filed=filed,
    )
