"""Many hashes in little memory: about 14 bytes each, a ninth of what a set of bytes objects takes.

A table may say that it holds a hash which it does not (about once in 2**50), never the other way round. It
grows by linear hashing, one bucket at a time (W. Litwin, "Linear hashing: a new tool for file and table
addressing", 1980), so that no insertion has to wait for a rebuild. A bucket holds cells of eight bytes in the order
they came: the first seven of a hash, and the generation it came in, by which old ones are forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct

BYTES_PER_HASH = 14  # measured: a cell, its part of the bucket and of what buckets keep in reserve

_CELLS_PER_BUCKET = 32
_CELL = 8
_GENERATIONS = 256  # what fits into a cell's last byte
_HEAD = Struct("7s9x")  # of a hash: what is kept of it,
_PLACE = Struct("<Q8x")  # and the number whose low bits say in which bucket
_CELL_PLACE = Struct("<Q")


class HashTable:
    """Hashes of 16 bytes, each of a generation from 0 up; generations never fall."""

    __slots__ = ("_buckets", "_mask", "_split", "_used", "count", "newest")

    def __init__(self) -> None:
        # A bucket that is still to be split stands at two places, so that one mask finds every bucket.
        self._buckets = [bytearray()] * 2
        self._mask = 1
        self._split = 0
        self._used = 1
        self.count = 0
        self.newest = 0

    def misses(self, hashes: Sequence[bytes]) -> bool:
        """Whether certainly none of the hashes is held."""
        buckets, mask = self._buckets, self._mask
        joined = b"".join(hashes)
        for (place,), (head,) in zip(_PLACE.iter_unpack(joined), _HEAD.iter_unpack(joined), strict=True):
            if head in buckets[place & mask]:
                return False
        return True

    def add(self, hashes: Sequence[bytes], generation: int, oldest: int) -> None:
        """Adds hashes of a generation; on the way it forgets what it meets from before the generation ``oldest``."""
        self.newest = generation
        mark = bytes((generation % _GENERATIONS,))
        ages = generation - oldest
        buckets, mask = self._buckets, self._mask
        joined = b"".join(hashes)
        for (place,), (head,) in zip(_PLACE.iter_unpack(joined), _HEAD.iter_unpack(joined), strict=True):
            bucket = buckets[place & mask]
            bucket += head
            bucket += mark
            if (generation - bucket[7]) % _GENERATIONS > ages:
                self._forget(bucket, generation, ages)
        self.count += len(hashes)
        while self.count > _CELLS_PER_BUCKET * self._used:
            self._grow()

    def _forget(self, bucket: bytearray, generation: int, ages: int) -> None:
        marks = bucket[7::_CELL]
        gone = next(k for k, mark in enumerate(marks) if (generation - mark) % _GENERATIONS <= ages)
        del bucket[: gone * _CELL]
        self.count -= gone

    def _grow(self) -> None:
        """Splits the next bucket by one more bit of the hash."""
        bucket = self._buckets[self._split]
        distance = (self._mask + 1) // 2
        stay, move = bytearray(), bytearray()
        for at, (place,) in enumerate(_CELL_PLACE.iter_unpack(bucket)):
            (move if place & distance else stay).extend(bucket[at * _CELL : (at + 1) * _CELL])
        self._buckets[self._split] = stay
        self._buckets[self._split + distance] = move
        self._split += 1
        self._used += 1
        if self._split == distance:
            self._buckets *= 2
            self._mask = self._mask * 2 + 1
            self._split = 0
