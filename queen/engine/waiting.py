"""Parking: how a long poll sleeps, holding nothing but its greenlet and its client's socket.

A parked pop ends its sleep when something wakes it, when its time is up, or when its client goes away: a
client that left must never be given a lease.
"""

from __future__ import annotations

import socket
import time
from collections import OrderedDict
from typing import Any

from gevent.hub import Waiter, get_hub
from gevent.monkey import get_original

_poll = get_original("select", "poll")
_POLLRDHUP = 0x2000
_READ = 1


class ClientGone(Exception):
    """The client closed its connection: nobody is there to take an answer."""


class Client:
    """The connection a request came on. Without a socket (a test, another server) it never goes."""

    __slots__ = ("_fileno",)

    def __init__(self, connection: socket.socket | None) -> None:
        self._fileno = -1 if connection is None else connection.fileno()

    def check(self) -> None:
        """Raises `ClientGone` when the peer has closed its side."""
        if self._fileno >= 0:
            poll = _poll()
            poll.register(self._fileno, _POLLRDHUP)
            if poll.poll(0):
                raise ClientGone

    def watcher(self) -> Any:
        """A watcher of the socket for a parked greenlet, or None."""
        return get_hub().loop.io(self._fileno, _READ) if self._fileno >= 0 else None


class Parked:
    """One sleep of one pop. `sleep` in its greenlet, `wake` from any other."""

    __slots__ = ("_waiter", "woken")

    def __init__(self) -> None:
        self.woken = False
        self._waiter: Any = None

    def wake(self) -> None:
        self.woken = True
        if self._waiter is not None:
            waiter, self._waiter = self._waiter, None
            get_hub().loop.run_callback(waiter.switch, None)

    def _was_woken(self) -> bool:
        return self.woken

    def sleep(self, seconds: float, client: Client) -> bool:
        """Sleeps until woken (True) or until the time is up (False); raises `ClientGone`."""
        hub = get_hub()
        deadline = time.monotonic() + seconds
        watcher = client.watcher()
        timer = hub.loop.timer(max(seconds, 0))
        try:
            while not self.woken:
                waiter: Any = Waiter(hub)
                self._waiter = waiter
                timer.start(waiter.switch, None)
                if watcher is not None:
                    watcher.start(waiter.switch, None)
                waiter.get()
                timer.stop()
                if self._was_woken():
                    break
                client.check()
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                # Readable and not closed: the client sent its next request early. That can wait, and
                # the socket must not wake us again for it.
                if watcher is not None:
                    watcher.close()
                    watcher = None
                timer.close()
                timer = hub.loop.timer(left)
            return True
        finally:
            self._waiter = None
            timer.close()
            if watcher is not None:
                watcher.close()


class Gate:
    """The pops that sleep for one reason, first come first woken.

    ``wakes`` counts the wakes, so that a pop knows of one that came while it was awake; ``users`` counts
    the pops that hold the gate, asleep or not, where it is thrown away after the last of them.
    """

    __slots__ = ("_parked", "users", "wakes")

    def __init__(self) -> None:
        self._parked: OrderedDict[Parked, None] = OrderedDict()
        self.users = 0
        self.wakes = 0

    def __len__(self) -> int:
        return len(self._parked)

    def add(self, parked: Parked, first: bool = False) -> None:
        """Queues a sleeper, at the front if it was woken in vain before."""
        self._parked[parked] = None
        if first:
            self._parked.move_to_end(parked, last=False)

    def remove(self, parked: Parked) -> None:
        self._parked.pop(parked, None)

    def wake(self, count: int = 1) -> None:
        self.wakes += 1
        while count > 0 and self._parked:
            self._parked.popitem(last=False)[0].wake()
            count -= 1

    def wake_all(self) -> None:
        self.wake(len(self._parked))
