"""What the data plane's stored operations take and return, as records.

Tenants, partition ids and message ids are the 16 bytes of a UUID, names are UTF-8 bytes, times are
microseconds since 2000-01-01 UTC.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SegmentWrite:
    """A segment to append to one partition, and what the broker vouches for about its hashes.

    ``sealed`` says that it may be stored in an encrypted queue.
    """

    tenant: bytes
    queue: bytes
    partition: bytes
    count: int
    hashes: bytes
    blob: bytes
    sealed: bool = False
    vouched: bytes | None = None
    verified: int = -1
    window: int = 0


@dataclass(slots=True)
class SegmentWritten:
    """Where a segment went (``base``), or which of its frames are duplicates and of which offsets.

    Neither, when its queue is encrypted and the segment was not sealed.
    """

    base: int | None
    created_at: int
    duplicates: dict[int, int]
    partition_id: bytes
    window: int
    encrypted: bool = False


@dataclass(slots=True)
class HashRow:
    """One row of the hash sidecar."""

    base: int
    created_at: int
    hashes: bytes


@dataclass(slots=True)
class Subscription:
    """How a pop subscribes its group on first contact."""

    group: bytes
    mode: bytes
    start: bytes


@dataclass(slots=True)
class Terms:
    """What a claim may take and on which terms. ``lease`` 0 is the queue's own, ``cap`` 0 is none."""

    worker: bytes
    budget: int
    cap: int
    lease: int
    auto_ack: bool


@dataclass(slots=True)
class ListPop:
    """A claim from candidates. Per candidate, the bases of the segments whose frames the broker holds."""

    tenant: bytes
    queue: bytes
    group: bytes
    candidates: list[bytes]
    known_from: list[int]
    known_to: list[int]
    terms: Terms
    debounced: bool


@dataclass(slots=True)
class Claimed:
    """One row of a claim: a chosen segment (verdict ``took``), or a candidate that gave nothing.

    ``blob`` is None when the broker said that it holds the segment's frames.
    """

    partition: bytes
    verdict: bytes
    partition_id: bytes
    base: int
    start: int
    take: int
    created_at: int
    batch_end: int
    last_offset: int
    until: int | None
    blob: bytes | None


@dataclass(slots=True)
class AckWrite:
    """An ack of one cursor. ``statuses`` is empty when all items are completed."""

    tenant: bytes | None
    partition_id: bytes
    group: bytes
    worker: bytes
    hashes: bytes
    statuses: bytes


@dataclass(slots=True)
class DeadLetter:
    """The message an ack gives up on."""

    offset: int
    message_id: bytes
    transaction_id: bytes
    payload: bytes | None
    subject: bytes | None
    encrypted: bool
    pushed_at: int | None
    reason: bytes


@dataclass(slots=True)
class Acked:
    """What became of an ack; ``items`` has one letter per item (see log_ack_v1), empty: all carried out."""

    error: str | None
    items: bytes
    released: bool
    retired: int
    dead_offset: int | None
    filed: bool


@dataclass(slots=True)
class Changed:
    """A partition that was written: the position of its queue in the question, name and last offset.

    ``born``: it is new, and its offsets begin anew, whatever was heard of one with its name.
    """

    queue: int
    name: bytes
    last_offset: int
    born: bool


@dataclass(slots=True)
class Pending:
    """A partition a ring should know, and where a walk of the pages goes on."""

    partition_id: bytes
    name: bytes
    last_offset: int
    last_write_at: int


@dataclass(slots=True)
class Flow:
    """What a queue's configuration says about when its messages may go out."""

    window_buffer: int = 0
    delayed_processing: int = 0
    min_pop_wait_ms: int = 0
