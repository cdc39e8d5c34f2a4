"""The flags an operator sets for all brokers: push maintenance and pop maintenance.

Their truth is in the database, so they outlive every broker and reach one that was down during a flip. The
hot path reads them from memory, which follows the database: at the start, after a flip here, on a hint of
another broker, and once in a reconcile interval whatever happened.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from gevent.lock import Semaphore

from queen.db.operations import Operations


class Flag(StrEnum):
    """A flag, named as its row in the database."""

    PUSH_MAINTENANCE = "maintenance_mode"
    POP_MAINTENANCE = "pop_maintenance_mode"


class Flags:
    """The flags as one worker knows them."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._flip = Semaphore()
        self._changes = 0
        self._watchers: list[Callable[[Flag, bool], None]] = []
        self.push_maintenance = False
        self.pop_maintenance = False

    def watch(self, watcher: Callable[[Flag, bool], None]) -> None:
        """Has ``watcher`` called after every change of a flag here, whoever made it."""
        self._watchers.append(watcher)

    def __getitem__(self, flag: Flag) -> bool:
        return self.push_maintenance if flag is Flag.PUSH_MAINTENANCE else self.pop_maintenance

    def set(self, flag: Flag, enabled: bool) -> None:
        """Flips a flag for all brokers: in the database, then here. The others have yet to be told.

        Raises what `Operations` raises when the database did not take it; the flag is then as it was.
        """
        with self._flip:  # memory in the order of the rows
            self._operations.set_flag(flag, enabled)
            self.adopt(flag, enabled)

    def adopt(self, flag: Flag, enabled: bool) -> bool:
        """Takes what another broker says that it has set; whether that was news."""
        self._changes += 1
        if self[flag] == enabled:
            return False
        if flag is Flag.PUSH_MAINTENANCE:
            self.push_maintenance = enabled
        else:
            self.pop_maintenance = enabled
        for watcher in self._watchers:
            watcher(flag, enabled)
        return True

    def read(self) -> list[Flag]:
        """Brings the memory up to date with the database; the flags that differed.

        Raises what `Operations` raises; the flags are then as they were.
        """
        while True:
            before = self._changes
            enabled = self._operations.flags()
            if before == self._changes:  # or a flip overtook the answer
                return [flag for flag in Flag if self.adopt(flag, flag in enabled)]
