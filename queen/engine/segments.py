"""Frames at hand: what was pushed or read lately, so that a pop need not fetch and open a segment again.

Segments never change, so a cached one is right for as long as it is kept. A partition's cached segments
are one contiguous run, which a claim names in two numbers; SQL then leaves their blobs out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from queen.db.operations import Operations
from queen.db.records import Claimed
from queen.engine import frames

_FRAME_OVERHEAD = 60


class SegmentGone(Exception):
    """Retention deleted a segment between its claim and its delivery."""


class SegmentCache:
    """The most recently used segments of one worker, up to a number of bytes."""

    def __init__(self, operations: Operations, megabytes: int) -> None:
        self._operations = operations
        self._cap = megabytes * 1_000_000
        self._size = 0
        self._segments: OrderedDict[tuple[bytes, int], tuple[Sequence[bytes], int]] = OrderedDict()

    @property
    def size(self) -> int:
        """Bytes held, overhead included."""
        return self._size

    def put(self, partition_id: bytes, base: int, encoded: Sequence[bytes]) -> bool:
        """Keeps the encoded frames of a segment; whether it did."""
        size = sum(map(len, encoded)) + _FRAME_OVERHEAD * len(encoded)
        if size > self._cap // 4 or (partition_id, base) in self._segments:
            return False
        self._segments[partition_id, base] = (encoded, size)
        self._size += size
        while self._size > self._cap:
            _, (_, freed) = self._segments.popitem(last=False)
            self._size -= freed
        return True

    def clear(self) -> None:
        """Forgets everything."""
        self._segments.clear()
        self._size = 0

    def segment(self, claim: Claimed) -> tuple[Sequence[bytes], bool]:
        """All encoded frames of a claimed segment, and whether they were at hand.

        Raises `BadSegment`, `SegmentGone`, and what `Operations` raises when a segment that was at hand has
        been dropped meanwhile and has to be fetched after all.
        """
        key = (claim.partition_id, claim.base)
        found = self._segments.get(key)
        if found is not None:
            self._segments.move_to_end(key)
            return found[0], True
        blob = claim.blob
        if blob is None:
            segment = self._operations.segment_at(claim.partition_id, claim.base)
            if segment is None:
                raise SegmentGone
            blob = segment[2]
        encoded = frames.split(blob)
        if claim.start + claim.take > len(encoded):
            raise frames.BadSegment("the segment holds fewer frames than its row says")
        return encoded, False
