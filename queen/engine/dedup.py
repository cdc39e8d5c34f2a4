"""What a broker remembers of the hash sidecar, so that a push need not be probed for duplicates.

Deduplication is decided in SQL under the partition's lock. This cache only says up to which offset the
broker vouches that none of a segment's hashes occurs (`verified`); -1 vouches for nothing and is always
right. An entry may vouch only if it knows every hash from the start of the window to `verified`, so it is
born from a new partition or from a read of the whole window, and grows only contiguously. A hash that is
found here is no verdict either: the segment is then probed in full.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from queen.db.records import HashRow, SegmentWritten
from queen.engine.hash_table import BYTES_PER_HASH, HashTable
from queen.log import Log

log = Log("dedup")

Key = tuple[bytes, bytes, bytes]  # tenant, queue, partition

# What an entry costs, measured; the rest of its costs are per hash.
_BYTES_PER_ENTRY = 900
_BYTES_PER_RECENT_HASH = 112  # a bytes object of 16, its slot in a set and its place in a block
_RECENT_SHARE = 0.25  # of the memory: when the recent hashes take more, older ones move into tables
_SLACK = 5_000_000  # microseconds by which an entry outlives the window
_BUSY_SECONDS = 5.0
_COOLDOWN_SECONDS = 30.0
_BLOCK_MICROSECONDS = 1_000_000
_BLOCK_HASHES = 4096
_GENERATIONS = 8  # in a window: a table holds up to an eighth of it too much
# A gap this long (another broker pushes too) is worth reading; a shorter one is cheaper to probe.
_GAP = 2048

Block = tuple[int, list[bytes]]


@dataclass(slots=True)
class Vouch:
    """What a push may tell SQL: in this partition nothing of the segment occurs at or below verified."""

    partition_id: bytes | None = None
    verified: int = -1
    window: int = 0


NOTHING = Vouch()


@dataclass(slots=True)
class Entry:
    """The hashes of one partition's window, as far as the broker knows them without a gap.

    The recent ones are in a set, which answers for a segment at once; where that takes too much memory the
    older ones are in a table.
    """

    partition_id: bytes
    window: int  # seconds the entry covers
    verified: int = -1
    behind: int = -1  # highest offset heard of
    recent: set[bytes] = field(default_factory=set)
    blocks: list[Block] = field(default_factory=list)  # the recent ones in their order
    older: HashTable | None = None
    used: float = 0.0

    @property
    def size(self) -> int:
        """Bytes of memory."""
        older = 0 if self.older is None else BYTES_PER_HASH * self.older.count
        return _BYTES_PER_ENTRY + _BYTES_PER_RECENT_HASH * len(self.recent) + older

    def misses(self, hashes: Sequence[bytes]) -> bool:
        """Whether certainly none of the hashes is known."""
        return self.recent.isdisjoint(hashes) and (self.older is None or self.older.misses(hashes))

    def append(self, base: int, created_at: int, hashes: Sequence[bytes]) -> bool:
        """Adds the hashes at ``base``, which must follow `verified`. False: the entry must be dropped."""
        self.expire(created_at)
        before = len(self.recent)
        self.recent.update(hashes)
        if len(self.recent) - before != len(hashes):
            return False  # a hash twice: its block's expiry would forget the later one
        self.verified = base + len(hashes) - 1
        if self.blocks:
            at, block = self.blocks[-1]
            if created_at - at < _BLOCK_MICROSECONDS and len(block) + len(hashes) <= _BLOCK_HASHES:
                block.extend(hashes)
                return True
        self.blocks.append((created_at, list(hashes)))
        return True

    def settle(self) -> None:
        """Moves the oldest of the recent hashes into the table, if they are not the newest too."""
        if len(self.blocks) < 2:
            return
        if self.older is None:
            self.older = HashTable()
        at, hashes = self.blocks.pop(0)
        self.recent.difference_update(hashes)
        self.older.add(hashes, at // self._generation, self._horizon(self.blocks[-1][0]) // self._generation)

    def forget(self) -> None:
        """Forgets every hash; the next one known may have any offset."""
        self.recent.clear()
        self.blocks.clear()
        self.older = None

    def expire(self, now: int) -> None:
        """Forgets what left the window; what is left of it in the table may stay."""
        horizon = self._horizon(now)
        while self.blocks and self.blocks[0][0] < horizon:
            self.recent.difference_update(self.blocks.pop(0)[1])
        if self.older is not None and (self.older.newest + 1) * self._generation < horizon:
            self.older = None

    @property
    def _generation(self) -> int:
        """Microseconds of a generation of the table."""
        return max(_BLOCK_MICROSECONDS, self.window * 1_000_000 // _GENERATIONS)

    def _horizon(self, now: int) -> int:
        """Blocks from before left the window. A block is as old as its first hash plus its second."""
        return now - self.window * 1_000_000 - _SLACK - _BLOCK_MICROSECONDS


class DedupCache:
    """The entries of one worker under one memory cap."""

    def __init__(self, enabled: bool, megabytes: int) -> None:
        self.enabled = enabled
        self._cap = megabytes * 1_000_000
        self._entries: OrderedDict[Key, Entry] = OrderedDict()
        self._recent = 0  # hashes in sets
        self.size = 0  # bytes
        self._suppressed: dict[Key, float] = {}

    @property
    def suppressed(self) -> int:
        """Partitions that got no entry for want of memory."""
        return len(self._suppressed)

    def vouch(self, key: Key, hashes: Sequence[bytes]) -> Vouch:
        """How far the broker vouches for a segment's hashes."""
        entry = self._entries.get(key)
        if entry is None or not entry.misses(hashes):
            return NOTHING
        entry.used = time.monotonic()
        self._entries.move_to_end(key)
        return Vouch(entry.partition_id, entry.verified, entry.window)

    def pushed(self, key: Key, written: SegmentWritten, hashes: Sequence[bytes]) -> Vouch | None:
        """Takes note of a committed segment.

        Returns what has to be read to bring the entry up to date (from ``verified`` + 1, for ``window``
        seconds) and given to `read`, or None.
        """
        if not self.enabled or written.base is None or written.window <= 0:
            self.drop(key)
            return None
        entry = self._entries.get(key)
        if entry is not None and (entry.partition_id != written.partition_id or entry.window < written.window):
            self.drop(key)
            entry = None
        if entry is None:
            if not self._room(key):
                return None
            entry = Entry(written.partition_id, written.window, used=time.monotonic())
            self._entries[key] = entry
            self.size += entry.size
        entry.behind = max(entry.behind, written.base + len(hashes) - 1)
        if written.base == entry.verified + 1:
            self._append(key, entry, written.base, written.created_at, hashes)
            return None
        if written.base > entry.verified + 1 and (entry.verified < 0 or entry.behind - entry.verified > _GAP):
            return Vouch(entry.partition_id, entry.verified, entry.window)
        return None

    def read(self, key: Key, vouch: Vouch, rows: Sequence[HashRow]) -> None:
        """Takes the rows that `pushed` asked for: all of the window that is beyond what it vouched for.

        They fill only what they were read for. An entry made meanwhile may cover a longer window, or know
        less than the one that asked, and would then vouch for what nobody looked at.
        """
        entry = self._entries.get(key)
        if entry is None or entry.partition_id != vouch.partition_id:
            return
        if entry.window > vouch.window or entry.verified < vouch.verified:
            return
        if self.size + sum(len(row.hashes) for row in rows) // 16 * BYTES_PER_HASH > self._cap:
            self._suppress(key)
            return
        for row in rows:
            count = len(row.hashes) // 16
            if row.base + count - 1 <= entry.verified:
                continue
            if row.base != entry.verified + 1:
                # What lies between has left the window, or it would have been read; so has what is older.
                self._release(entry)
                entry.forget()
                self.size += entry.size
            hashes = [row.hashes[k : k + 16] for k in range(0, len(row.hashes), 16)]
            if not self._append(key, entry, row.base, row.created_at, hashes):
                return

    def drop(self, key: Key) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._release(entry)

    def clear(self) -> None:
        """Forgets everything."""
        self._entries.clear()
        self._recent = 0
        self.size = 0

    def drop_queue(self, tenant: bytes, queue: bytes) -> None:
        for key in [k for k in self._entries if k[0] == tenant and k[1] == queue]:
            self.drop(key)

    def _append(self, key: Key, entry: Entry, base: int, at: int, hashes: Sequence[bytes]) -> bool:
        self._release(entry)
        sound = entry.append(base, at, hashes)
        if (self._recent + len(entry.recent)) * _BYTES_PER_RECENT_HASH > self._cap * _RECENT_SHARE:
            entry.settle()
        self.size += entry.size
        self._recent += len(entry.recent)
        if not sound:
            self.drop(key)
            return False
        if self.size > self._cap:
            self._evict(key)
        return key in self._entries

    def _release(self, entry: Entry) -> None:
        """An entry goes, or is to be counted anew."""
        self.size -= entry.size
        self._recent -= len(entry.recent)

    def _evict(self, current: Key) -> None:
        """Makes room: entries unused for a while go first; when all are busy, this one goes."""
        now = time.monotonic()
        while self.size > self._cap * 0.9 and self._entries:
            key, entry = next(iter(self._entries.items()))
            if key == current or now - entry.used < _BUSY_SECONDS:
                self._suppress(current)
                return
            self.drop(key)

    def _suppress(self, key: Key) -> None:
        self.drop(key)
        self._suppressed[key] = time.monotonic() + _COOLDOWN_SECONDS
        log.sampled(
            60,
            "cache full: pushes to some partitions are probed in full; raise QUEEN_DEDUP_CACHE_MB",
            suppressed_partitions=len(self._suppressed),
            megabytes=self.size // 1_000_000,
        )

    def _room(self, key: Key) -> bool:
        until = self._suppressed.get(key)
        if until is not None:
            if time.monotonic() < until or self.size > self._cap * 0.9:
                return False
            del self._suppressed[key]
        return self.size <= self._cap
