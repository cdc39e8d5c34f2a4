"""Where a push goes: to PostgreSQL, or to the disk.

Everything goes to the disk while push maintenance is on or PostgreSQL is known to be away; so does what
PostgreSQL failed to take, and what would overtake events of its partition that are there already.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from queen.engine.dedup import Key
from queen.engine.encryption import QueueEncrypted
from queen.engine.engine import Engine
from queen.engine.frames import decode
from queen.engine.push import BUFFERED, FAILED, Group, Item, Outcome
from queen.log import Log
from queen.spool import records
from queen.spool.backlog import Backlog
from queen.spool.journal import Entry, Journal
from queen.spool.records import Event

log = Log("spool")

# How long a push waits for the drain rather than going behind it: long enough that one that pushes all
# the time lets the drain catch up, short enough for a client.
_BEHIND_SECONDS = 1.0


class Intake:
    """Accepts pushes. ``buffered`` and ``failed`` count the events that went to the disk, and should have."""

    def __init__(self, engine: Engine, journal: Journal, backlog: Backlog, sticky: bool) -> None:
        """``sticky``: whether a push goes behind what is spooled of its partition."""
        self._engine = engine
        self._journal = journal
        self._backlog = backlog
        self._sticky = sticky
        self.buffered = 0
        self.failed = 0

    @property
    def diverts(self) -> bool:
        """Whether an operator wants every push on the disk."""
        return self._engine.flags.push_maintenance

    def push(self, tenant: bytes, items: Sequence[Item], subject: bytes | None) -> list[Outcome]:
        """Stores or spools items; one outcome per item, in their order.

        What could be neither stored nor written to the disk is ``failed``. Raises only `QueueEncrypted`, and
        then nothing was accepted.
        """
        pusher = self._engine.pusher
        diverts = self.diverts
        if not diverts and self._engine.database.healthy:
            pusher.check_flags(tenant, items)
            request = pusher.prepare(tenant, items, subject)
            behind = self._behind(request.groups)
            pusher.submit(request, [group for group in request.groups if group.key not in behind])
            if behind:
                cleared = self._cleared(behind)
                pusher.submit(request, [group for group in request.groups if group.key in cleared])
            request.wait()
        else:
            request = pusher.prepare(tenant, items, subject, fold=not diverts)
        self._spool(request.groups)
        outcomes = request.close()
        refused = next((group.error for group in request.groups if isinstance(group.error, QueueEncrypted)), None)
        if refused is not None and all(outcome.status == FAILED for outcome in outcomes):
            raise refused
        return outcomes

    def _behind(self, groups: Sequence[Group]) -> set[Key]:
        """The partitions of a request that have events on the disk."""
        if not self._sticky or self._backlog.empty:
            return set()
        return {group.key for group in groups if self._backlog.lane(group.key) is not None}

    def _cleared(self, keys: Collection[Key]) -> set[Key]:
        """Waits a moment for the drain, and returns the partitions that have nothing on the disk any more."""
        deadline = time.monotonic() + _BEHIND_SECONDS
        for key in keys:
            while (lane := self._backlog.lane(key)) is not None and (left := deadline - time.monotonic()) > 0:
                lane.clear.wait(left)
        return {key for key in keys if self._backlog.lane(key) is None}

    def _spool(self, groups: Sequence[Group]) -> None:
        """Writes to the disk what is not stored, and says so in its outcomes."""
        rest: list[tuple[Outcome, Event]] = []
        for group in groups:
            if any(outcome.status == FAILED for outcome in group.outcomes) and self._may_lie_on_disk(group):
                for outcome, frame in zip(group.outcomes, group.frames, strict=True):
                    if outcome.status == FAILED:
                        rest.append((outcome, Event(group.key, decode(frame))))
        if not rest:
            return
        events = [event for _, event in rest]
        try:
            self._journal.write(Entry(records.encode(events), len(events), {event.key for event in events}))
        except OSError as error:
            self.failed += len(events)
            log.sampled(10, "open spool file failed", error=error, events=len(events))
            return
        self.buffered += len(events)
        for outcome, _ in rest:
            outcome.status = BUFFERED

    def _may_lie_on_disk(self, group: Group) -> bool:
        """Sees to it that what is on the disk is as secret as it will be in the database.

        A queue of which nobody said that it is not encrypted may well be: its payloads are sealed too, and
        whoever reads them sees what they are. Without a key nothing is written for an encrypted queue.
        """
        encryption = self._engine.encryption
        flag = encryption.flag(group.key[:2])
        if encryption.enabled and flag is not False:
            group.frames = [encryption.seal_frame(frame) for frame in group.frames]
        elif flag and encryption.required:
            group.error = QueueEncrypted(group.key[1].decode())
        return not isinstance(group.error, QueueEncrypted)
