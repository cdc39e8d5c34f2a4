"""What must hold of a log at any moment of rest, checked in its tables from the outside.

Each finding begins with the number of the rule it breaks. Nothing here uses the broker's SQL: the tables
are read whole and judged in Python, so a fault of the stored functions can't hide itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg.rows import namedtuple_row

from queen.engine import frames
from queen.engine.identifiers import fingerprint, uuid_text


@dataclass(slots=True)
class Stored:
    """A message as it lies in the log."""

    partition_id: str
    queue: str
    partition: str
    offset: int
    message_id: str
    transaction_id: str
    created_at: Any


@dataclass(slots=True)
class Partition:
    """A partition with all of its rows."""

    row: Any
    segments: list[Any] = field(default_factory=list)
    hash_rows: dict[int, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Log:
    """The whole log of a database."""

    partitions: dict[str, Partition]
    messages: list[Stored]
    cursors: list[Any]
    broken: list[str]

    @classmethod
    def read(cls, connection: psycopg.Connection[Any]) -> Log:
        """Read all tables in one snapshot."""
        with connection.transaction(), connection.cursor(row_factory=namedtuple_row) as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            cursor.execute(
                "SELECT p.*, q.name AS queue FROM queen.log_partitions p JOIN queen.queues q ON q.id = p.queue_id"
            )
            partitions = {str(row.id): Partition(row) for row in cursor.fetchall()}
            cursor.execute("SELECT * FROM queen.log_segments ORDER BY partition_id, base_offset", binary=True)
            for row in cursor.fetchall():
                partitions[str(row.partition_id)].segments.append(row)
            cursor.execute("SELECT * FROM queen.log_txns ORDER BY partition_id, base_offset", binary=True)
            broken = []
            for row in cursor.fetchall():
                home = partitions.get(str(row.partition_id))
                if home is None:
                    broken.append(f"L6: hash row {row.base_offset} of partition {row.partition_id}, which is gone")
                else:
                    home.hash_rows[row.base_offset] = row
            cursor.execute("SELECT * FROM queen.log_consumers")
            log = cls(partitions, [], cursor.fetchall(), broken)
        for partition in partitions.values():
            log.messages.extend(_messages(partition, broken))
        return log

    def violations(self) -> list[str]:
        """Return what breaks a rule."""
        found = list(self.broken)
        for name, partition in self.partitions.items():
            found += [f"{rule}: {partition.row.queue}/{name}: {text}" for rule, text in _judge(partition)]
        for cursor in self.cursors:
            last = self.partitions[str(cursor.partition_id)].row.last_offset
            if not -1 <= cursor.committed <= last:
                found.append(
                    f"A2: {cursor.partition_id}/{cursor.consumer_group}: committed {cursor.committed} of {last}"
                )
            if cursor.batch_end is not None and not cursor.committed < cursor.batch_end <= last:
                found.append(
                    f"C3: {cursor.partition_id}/{cursor.consumer_group}: batch ends at {cursor.batch_end},"
                    f" committed {cursor.committed} of {last}"
                )
        return found

    def repeats(self, queue: str | None = None) -> list[str]:
        """Return every transaction id that lies twice in one partition, of one queue or of all (P2)."""
        found = []
        seen: dict[tuple[str, str], Stored] = {}
        for message in self.messages:  # in the order of offsets
            key = (message.partition_id, message.transaction_id)
            first = seen.get(key)
            if first is not None and queue in (None, message.queue):
                found.append(f"P2: {message.transaction_id!r} is at {first.offset} and at {message.offset}")
            seen[key] = message
        return found

    def missing(self, accepted: Mapping[str, tuple[str, str]]) -> list[str]:
        """Return accepted messages (id: queue and partition) that aren't in exactly one place (L9)."""
        places: dict[str, list[Stored]] = defaultdict(list)
        for message in self.messages:
            places[message.message_id].append(message)
        found = []
        for message_id, where in accepted.items():
            at = [(m.queue, m.partition) for m in places.get(message_id, [])]
            if at != [where]:
                found.append(f"L9: {message_id} was accepted for {where} and lies in {at}")
        return found


def _messages(partition: Partition, broken: list[str]) -> Iterator[Stored]:
    row = partition.row
    for segment in partition.segments:
        try:
            decoded = frames.unpack(segment.blob)
        except frames.BadSegment as error:
            broken.append(f"L6: {row.queue}/{row.id}: segment {segment.base_offset}: {error}")
            continue
        for k, frame in enumerate(decoded):
            yield Stored(
                str(row.id),
                row.queue,
                row.name,
                segment.base_offset + k,
                uuid_text(frame.message_id),
                frame.transaction_id.decode(),
                segment.created_at,
            )


def _judge(partition: Partition) -> Iterable[tuple[str, str]]:
    """Yield the rules that one partition breaks."""
    row, segments = partition.row, partition.segments
    previous = None
    for segment in segments:
        base, end = segment.base_offset, segment.end_offset
        if end < base:
            yield "L1", f"segment {base} ends at {end}"
        if previous is not None:
            if base <= previous.end_offset:
                yield "L1", f"segment {base} overlaps the one that ends at {previous.end_offset}"
            elif base != previous.end_offset + 1:
                yield "L2", f"nothing lies between {previous.end_offset} and {base}"
            if segment.created_at < previous.created_at:
                yield "L5", f"segment {base} is older than the one before it"
        if base >= row.txns_start:
            yield from _judge_hashes(segment, partition.hash_rows.get(base))
        previous = segment
    top = segments[-1].end_offset if segments else row.log_start - 1
    if top != row.last_offset:
        yield "L3", f"the last segment ends at {top}, last_offset is {row.last_offset}"
    start = segments[0].base_offset if segments else row.last_offset + 1
    if row.log_start != start:
        yield "L4", f"log_start is {row.log_start}, the first segment begins at {start}"
    first_live = segments[0].created_at if segments else None
    if row.oldest_live_at != first_live:
        yield "L7", f"oldest_live_at is {row.oldest_live_at}, the first segment is of {first_live}"
    hashes = [partition.hash_rows[base] for base in sorted(partition.hash_rows)]
    first_txn = hashes[0].created_at if hashes else None
    if row.oldest_txn_at != first_txn:
        yield "L7", f"oldest_txn_at is {row.oldest_txn_at}, the first hash row is of {first_txn}"
    if hashes and hashes[0].base_offset < row.txns_start:
        yield "L6", f"hash row {hashes[0].base_offset} lies below txns_start {row.txns_start}"


def _judge_hashes(segment: Any, hash_row: Any) -> Iterable[tuple[str, str]]:
    base = segment.base_offset
    if hash_row is None:
        yield "L6", f"segment {base} has no hash row"
        return
    if (hash_row.end_offset, hash_row.created_at) != (segment.end_offset, segment.created_at):
        yield "L6", f"segment {base} and its hash row differ in range or time"
    count = segment.end_offset - base + 1
    if len(hash_row.hashes) != 16 * count:
        yield "L6", f"segment {base} has {len(hash_row.hashes)} bytes of hashes for {count} messages"
    try:
        decoded = frames.unpack(segment.blob)
    except frames.BadSegment:
        return
    if len(decoded) != count:
        yield "L6", f"segment {base} holds {len(decoded)} frames for {count} offsets"
    for k, frame in enumerate(decoded):
        if hash_row.hashes[16 * k : 16 * k + 16] != fingerprint(frame.transaction_id):
            yield "L6", f"slot {k} of segment {base} isn't the hash of its frame"
