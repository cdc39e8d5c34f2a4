"""The door between the engine and others like it: what it tells them of, and what they tell it.

Everything that passes is a hint. PostgreSQL is the only truth, and whatever a lost hint would have said is
found by a pop's own back-off, the scans or the reconcile loop. So telling never fails and hardly costs
anything, and hearing only touches memory: neither waits for a database. Who carries the hints (the mesh,
to sibling workers and peer brokers) sets itself as `Hints.outlet`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import gevent

from queen.db.errors import StatementFailed, Unavailable
from queen.db.operations import Operations
from queen.engine.flags import Flag, Flags
from queen.engine.hotlist import HotList
from queen.engine.hotlist_scan import HotListScan
from queen.log import Log

log = Log("hotlist")

_NAME_BYTES = 4 * 255  # of 255 characters

PartitionKey = tuple[bytes, bytes, bytes]  # tenant, queue, partition; an empty partition: some partition


class Outlet(Protocol):
    """Who carries hints to other workers and brokers. None of this may raise, nor wait unless it says so."""

    @property
    def listening(self) -> bool:
        """Whether anybody would hear."""

    def pushed(self, key: PartitionKey) -> None:
        """A partition may have got messages. Called for every push."""

    def notified(self, key: PartitionKey) -> None:
        """Somebody asked to wake the pops of a queue."""

    def moved(self, key: PartitionKey, group: bytes) -> None:
        """The cursor of a group moved in a partition."""

    def queue_changed(self, tenant: bytes, queue: bytes, deleted: bool) -> None:
        """A queue was configured or deleted."""

    def flag_changed(self, flag: Flag, enabled: bool) -> None:
        """A flag was flipped here. Returns when the sibling workers know, or are too slow to wait for."""

    def ask(self, topic: str, value: Any) -> list[Any]:
        """What the sibling workers answer, of those that do within a second."""

    def statistics(self) -> dict[str, Any]:
        """The state of the mesh, summed over the workers of this broker."""


class Nobody:
    """The outlet of an engine that is alone."""

    listening = False

    def pushed(self, key: PartitionKey) -> None: ...

    def notified(self, key: PartitionKey) -> None: ...

    def moved(self, key: PartitionKey, group: bytes) -> None: ...

    def queue_changed(self, tenant: bytes, queue: bytes, deleted: bool) -> None: ...

    def flag_changed(self, flag: Flag, enabled: bool) -> None: ...

    def ask(self, topic: str, value: Any) -> list[Any]:
        return []

    def statistics(self) -> dict[str, Any]:
        return {"enabled": False, "reason": "no_peers"}


class Hints:
    """What one engine tells (`tell_...`, called by the engine) and hears (`hear_...`, called by the outlet).

    A tenant of None is one that the sender didn't know of: the hint is for every tenant with such a queue.
    ``forget_queue`` drops what the engine remembers of a queue. ``answers`` has, by topic, what this worker
    answers when a sibling asks; values and answers are what JSON can say, and answering must not wait.
    """

    def __init__(
        self,
        operations: Operations,
        flags: Flags,
        hotlist: HotList,
        scan: HotListScan,
        forget_queue: Callable[[bytes, bytes], None],
        walks: bool,
    ) -> None:
        self._operations = operations
        self._flags = flags
        self._hotlist = hotlist
        self._scan = scan
        self._forget_queue = forget_queue
        self._walks = walks
        self.outlet: Outlet = Nobody()
        self.answers: dict[str, Callable[[Any], Any]] = {}

    # What is told

    def tell_push(self, key: PartitionKey) -> None:
        """A push to a partition is through, committed or of unknown outcome."""
        self.outlet.pushed(key)

    def tell_queue(self, tenant: bytes, queue: bytes, deleted: bool) -> None:
        """A queue was configured or deleted."""
        self.outlet.queue_changed(tenant, queue, deleted)

    def tell_flag(self, flag: Flag, enabled: bool) -> None:
        """A flag was flipped. Returns when the sibling workers have it, after a second at the latest."""
        self.outlet.flag_changed(flag, enabled)

    def tell_group(self, tenant: bytes, queue: bytes | None, group: bytes, partition: bytes | None) -> None:
        """Cursors of a group moved in a partition, in a queue, or (None) in all of the tenant's queues.

        Others are told of every partition that has something for the group now, which a walk finds.
        """
        if not self.outlet.listening:
            return
        if queue is not None and partition is not None:
            self.outlet.moved((tenant, queue, partition), group)
        elif self._walks:
            gevent.spawn(self._tell_walked, tenant, queue, group)

    def _tell_walked(self, tenant: bytes, queue: bytes | None, group: bytes) -> None:
        try:
            for name in self._moved_queues(tenant, group) if queue is None else (queue,):
                for pending in self._scan.walk(tenant, name, group):
                    self.outlet.moved((tenant, name, pending.name), group)
        except (Unavailable, StatementFailed) as error:
            # The markers in the database tell them, a little later.
            log.sampled(30, "walk after a cursor move failed", error=error)

    def _moved_queues(self, tenant: bytes, group: bytes) -> Iterable[bytes]:
        markers = self._operations.hotlist_repairs()
        return [queue for (owner, queue, mover) in markers if (owner, mover) == (tenant, group)]

    def ask(self, topic: str, value: Any = None) -> list[Any]:
        """What each of the sibling workers answers; one that takes more than a second is left out."""
        return self.outlet.ask(topic, value)

    def notify(self, tenant: bytes, queue: bytes, partition: bytes) -> None:
        """Wakes the pops of a queue here and elsewhere, as a push would."""
        self.hear_push(tenant, queue, partition)
        self.outlet.notified((tenant, queue, partition))

    # What is heard

    def hear_push(self, tenant: bytes | None, queue: bytes, partition: bytes) -> None:
        """A partition got messages elsewhere; without its name, some partition of the queue did."""
        partition = _possible(partition)
        self._hotlist.told(tenant, queue, partition)
        if not partition:
            self._scan.look()

    def hear_move(self, tenant: bytes | None, queue: bytes, partition: bytes, group: bytes) -> None:
        """The cursor of a group was moved elsewhere; without a partition, somewhere in the queue."""
        partition = _possible(partition)
        for lane in self._hotlist.lanes_of(tenant, queue):
            if partition:
                self._hotlist.moved(lane, partition, group)
        if not partition:
            self._scan.look()

    def hear_queue(self, tenant: bytes | None, queue: bytes) -> None:
        """A queue was configured or deleted elsewhere: what is remembered of it no longer holds."""
        for owner in [lane.key[0] for lane in self._hotlist.lanes_of(tenant, queue)] if tenant is None else [tenant]:
            self._forget_queue(owner, queue)

    def hear_all_queues(self) -> None:
        """More queues changed elsewhere than can be told apart."""
        for tenant, queue in list(self._hotlist.lanes):
            self._forget_queue(tenant, queue)

    def hear_flag(self, flag: Flag, enabled: bool) -> bool:
        """A flag was flipped elsewhere; whether that was news."""
        return self._flags.adopt(flag, enabled)


def _possible(partition: bytes) -> bytes:
    """A name from elsewhere if a partition could have it, else none: one that SQL can't take would fail every
    pop that it is proposed to."""
    return partition if len(partition) <= _NAME_BYTES and b"\0" not in partition else b""
