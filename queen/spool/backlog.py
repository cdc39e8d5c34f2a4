"""What this worker knows to be spooled: how many events each file holds, and for which partitions.

A push to such a partition must not overtake what is on the disk. It goes behind it: it waits a moment for the
drain to come through, or joins the spool.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from gevent.event import Event

from queen.engine.dedup import Key


@dataclass(slots=True)
class _File:
    count: int = 0
    keys: set[Key] = field(default_factory=set)


@dataclass(slots=True)
class Lane:
    """A partition with events in some files; ``clear`` is set when the last of them is drained."""

    files: int = 0
    clear: Event = field(default_factory=Event)


class Backlog:
    """Events by file and partitions by number of files. Files of other workers aren't in it."""

    def __init__(self) -> None:
        self._files: dict[str, _File] = {}
        self._lanes: dict[Key, Lane] = {}

    @property
    def files(self) -> list[str]:
        """The stems of the files."""
        return list(self._files)

    @property
    def empty(self) -> bool:
        return not self._files

    def count(self, stem: str) -> int | None:
        """How many events a file holds, None for a file of another worker."""
        file = self._files.get(stem)
        return None if file is None else file.count

    def add(self, stem: str, count: int, keys: Iterable[Key]) -> None:
        """Takes note of events written to a file."""
        file = self._files.setdefault(stem, _File())
        file.count += count
        for key in set(keys) - file.keys:
            file.keys.add(key)
            self._lanes.setdefault(key, Lane()).files += 1

    def remove(self, stem: str) -> None:
        """Takes note that a file is no more."""
        file = self._files.pop(stem, None)
        for key in () if file is None else file.keys:
            lane = self._lanes[key]
            lane.files -= 1
            if not lane.files:
                del self._lanes[key]
                lane.clear.set()

    def lane(self, key: Key) -> Lane | None:
        """The partition's part of the backlog, None when there is none."""
        return self._lanes.get(key)
