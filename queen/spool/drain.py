"""The way back: complete files, oldest first, through the engine's pusher, so that whoever waits is woken.

A file is deleted when every event of it is known to be stored. Where it failed the next attempt goes on.
When PostgreSQL can't take it now, it waits; when PostgreSQL refuses it for what it is, it is tried a few times
and what is refused is then set aside in ``failed/``, so that it doesn't stand in the way of the rest.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NoReturn

from gevent.hub import get_hub

from queen.db.errors import StatementFailed, Unavailable
from queen.engine.dedup import Key
from queen.engine.frames import encode_frame
from queen.engine.identifiers import Minter, fingerprint
from queen.engine.push import FAILED, Group, Outcome, Pusher, PushRequest
from queen.log import Log
from queen.spool import records
from queen.spool.backlog import Backlog
from queen.spool.directory import SpoolDirectory
from queen.spool.records import Contents, Event

log = Log("spool")

_ATTEMPTS = 5
_PATIENCE = 10  # failures in a row, and then a pause
_PAUSE_SECONDS = 5.0

_UNKNOWN = StatementFailed("unexpected error, see the log")


class _Stopped(Exception):
    """The file can't be finished now."""


class Drain:
    """Drains the spool of a broker, in the one worker that does."""

    def __init__(self, directory: SpoolDirectory, backlog: Backlog, pusher: Pusher, batch: int) -> None:
        """``batch``: events that go in one request."""
        self._directory = directory
        self._backlog = backlog
        self._pusher = pusher
        self._minter = Minter()
        self._batch = batch
        self._begin("")
        self._failures = 0
        self._not_before = 0.0
        self._unmovable: set[str] = set()

    def _begin(self, name: str) -> None:
        self._head = name
        self._done = 0  # of its events
        self._attempt = 1
        self._refused: list[Event] = []

    def run(self, files: int) -> int:
        """Drains up to so many files; returns how many are done with. Raises nothing that a file can cause."""
        if time.monotonic() < self._not_before:
            return 0
        done = 0
        names = [name for name in self._directory.complete() if name not in self._unmovable]
        for name in names[:files]:
            if name != self._head:
                self._begin(name)
            try:
                self._replay(name)
            except _Stopped:
                break
            self._failures = 0
            self._backlog.remove(name.removesuffix(".buf"))
            done += 1
        return done

    def _replay(self, name: str) -> None:
        threads = get_hub().threadpool
        try:
            data: bytes = threads.apply((self._directory.path / name).read_bytes)
        except FileNotFoundError:
            return  # somebody took it away
        except OSError as error:
            self._is_refused(name, error)
            self._set_aside(name)
            return
        contents: Contents = threads.apply(records.parse, (data,))
        while self._done < len(contents.events):
            batch = contents.events[self._done : self._done + self._batch]
            failures = self._push(batch)
            for _, reason in failures:
                if isinstance(reason, Unavailable) or getattr(reason, "transient", False):
                    self._is_late(name, reason)
            if failures:
                self._is_refused(name, failures[0][1])
                self._refused += [event for event, _ in failures]
            self._done += len(batch)
        if contents.fault is not None:
            log.warning(
                "damaged spool file: all that can be read is stored, the file is kept in failed/",
                spool_file=name,
                error=contents.fault,
                events=len(contents.events),
            )
            self._set_aside(name)
        elif self._refused:
            self._keep_refused(name)
        else:
            threads.apply(self._directory.remove, (name,))

    def _push(self, batch: Sequence[Event]) -> list[tuple[Event, Exception]]:
        """Stores events as one request; those that failed, with the reason."""
        request = PushRequest()
        groups: dict[Key, Group] = {}
        places: list[tuple[Event, Group, Outcome]] = []
        for event in batch:
            group = groups.get(event.key)
            if group is None:
                group = groups[event.key] = Group(event.key, request, sealed=True, replayed=True)
            frame = event.frame
            group.sealed = group.sealed and frame.encrypted
            outcome = Outcome(len(places), "", "", "")
            group.outcomes.append(outcome)
            group.hashes.append(fingerprint(frame.transaction_id))
            group.frames.append(
                encode_frame(
                    frame.message_id or self._minter.mint(),
                    frame.transaction_id,
                    frame.payload,
                    frame.subject,
                    encrypted=frame.encrypted,
                )
            )
            places.append((event, group, outcome))
        self._pusher.submit(request, list(groups.values()))
        request.wait()
        return [(event, group.error or _UNKNOWN) for event, group, o in places if o.status == FAILED]

    def _is_late(self, name: str, error: Exception) -> NoReturn:
        """It can't be stored now."""
        log.sampled(10, "drain failed (transient)", spool_file=name, error=error)
        self._failures += 1
        if self._failures >= _PATIENCE:
            self._failures = 0
            self._not_before = time.monotonic() + _PAUSE_SECONDS
        raise _Stopped

    def _is_refused(self, name: str, error: Exception) -> None:
        """It can't be stored at all, as it seems. Raises `_Stopped` while it is to be tried again."""
        if self._refused:
            return  # the last attempt goes through the whole file
        log.error(
            "drain failed (permanent)", spool_file=name, attempt=self._attempt, max_attempts=_ATTEMPTS, error=error
        )
        if self._attempt < _ATTEMPTS:
            self._not_before = time.monotonic() + 2 ** (self._attempt - 1)
            self._attempt += 1
            raise _Stopped

    def _keep_refused(self, name: str) -> None:
        """Puts what was refused into ``failed/``; the rest of the file is stored."""
        threads = get_hub().threadpool
        try:
            dest = threads.apply(self._directory.keep, (name, records.encode(self._refused)))
            threads.apply(self._directory.remove, (name,))
        except OSError as error:
            log.warning("could not write to failed/", spool_file=name, error=error.strerror)
            self._set_aside(name)
            return
        log.warning("quarantined poison spool file", spool_file=name, dest=dest, events=len(self._refused))

    def _set_aside(self, name: str) -> None:
        dest = get_hub().threadpool.apply(self._directory.set_aside, (name,))
        if dest is None:
            self._unmovable.add(name)
        log.warning("quarantined poison spool file", spool_file=name, dest=dest or "nowhere: it is left out")
