"""The engine of one worker: its services over one database, and what changes of queues and groups mean to
them."""

from __future__ import annotations

import time

import gevent

from queen.db.database import Database
from queen.db.operations import Operations
from queen.engine.ack import Acker
from queen.engine.admission import Admission
from queen.engine.counters import Counters
from queen.engine.dedup import DedupCache
from queen.engine.encryption import Encryption
from queen.engine.flags import Flag, Flags
from queen.engine.hints import Hints
from queen.engine.hotlist import HotList
from queen.engine.hotlist_scan import HotListScan
from queen.engine.identifiers import Minter
from queen.engine.leases import Leases
from queen.engine.pop import Popper
from queen.engine.push import Pusher
from queen.engine.segments import SegmentCache
from queen.engine.siblings import Siblings
from queen.engine.transaction import Transactor
from queen.settings import Settings

_FLUSH_SECONDS = 10.0


class Engine:
    """Push, pop, ack, leases and transactions, with the memory they share."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self.settings = settings
        self.database = database
        self.stopping = False  # the worker is leaving: load balancers should know
        self.operations = Operations(database)
        self.flags = Flags(self.operations)
        self.counters = Counters()
        self.encryption = Encryption(settings)
        self.hotlist = HotList()
        self.scan = HotListScan(settings, self.operations, self.hotlist)
        self.siblings = Siblings(settings.run_dir)
        self.hints = Hints(
            self.operations,
            self.flags,
            self.hotlist,
            self.scan,
            self.forget_queue,
            walks=settings.hotlist_reseed_full_ms > 0,
        )
        self.leases = Leases(self.operations)
        minter = Minter()
        dedup = DedupCache(settings.dedup_cache, settings.dedup_cache_mb)
        segments = SegmentCache(self.operations, settings.segment_cache_mb)
        admission = Admission(settings.push_queue_kb)
        self.pusher = Pusher(
            settings, self.operations, self.hotlist, self.hints, minter, dedup, segments, admission, self.encryption
        )
        self.popper = Popper(
            settings, self.operations, self.flags, self.hotlist, self.scan, minter, self.leases, segments, admission
        )
        self.acker = Acker(self.operations, self.hotlist, admission, settings.tenancy_header)
        self.transactor = Transactor(
            settings, self.operations, self.hotlist, self.hints, minter, self.acker, self.encryption
        )
        self._loops: list[gevent.Greenlet[[], None]] = []
        self.flags.watch(self._flag_changed)
        self._segments = segments
        database.watch_server(self._server_changed)

    def start(self) -> None:
        """Starts the loops that keep the hot-list turning."""
        self._loops = [gevent.spawn(self.hotlist.turn), gevent.spawn(self.scan.run)]

    def stop(self) -> None:
        """Answers parked pops, lets flushes end, and stops the loops. The database stays open."""
        self.popper.stop()
        deadline = time.monotonic() + _FLUSH_SECONDS
        self.pusher.fusion.drain(max(deadline - time.monotonic(), 0))
        self.acker.fusion.drain(max(deadline - time.monotonic(), 0))
        gevent.killall(self._loops)

    def _flag_changed(self, flag: Flag, enabled: bool) -> None:
        if flag is Flag.POP_MAINTENANCE and not enabled:
            self.popper.wake()

    def _server_changed(self) -> None:
        """Offsets may be given out a second time, for other messages: nothing remembered of them may be used."""
        self.pusher.dedup.clear()
        self._segments.clear()
        self.hotlist.forget_offsets()

    def queue_changed(self, tenant: bytes, queue: str, deleted: bool = False) -> None:
        """A queue was configured or deleted: drops what was remembered of it, here and elsewhere."""
        name = queue.encode()
        self.pusher.dedup.drop_queue(tenant, name)
        self.forget_queue(tenant, name)
        self.hints.tell_queue(tenant, name, deleted)

    def forget_queue(self, tenant: bytes, queue: bytes) -> None:
        """Drops what this worker remembers of a queue's options. What it knows of hashes stands: SQL checks
        that it is of the same queue and window, and a push elsewhere costs no more than that check."""
        self.encryption.forget((tenant, queue))
        self.hotlist.forget_queue(tenant, queue)

    def group_moved(self, tenant: bytes, queue: str | None, group: str, partition: str | None) -> None:
        """Cursors of a group were moved or deleted, in one queue or (None) in all of the tenant's."""
        where = None if queue is None else queue.encode()
        lane = None if partition is None else partition.encode()
        self.hotlist.group_moved(tenant, where, group.encode(), lane)
        self.hints.tell_group(tenant, where, group.encode(), lane)
