"""Hears what the database announces, and has the directory forget it."""

from __future__ import annotations

import time
import uuid
from contextlib import suppress
from typing import Any

import gevent
import psycopg

from queen.log import Log
from queen.proxy.admission import Admission
from queen.proxy.directory import Directory
from queen.proxy.pxdb import Pxdb

log = Log("listener")

_CHANNEL = "queen_proxy_inval"
_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0
_SOUND_SECONDS = 10.0


class Listener:
    """A connection of its own that listens, and is made anew when it is lost."""

    def __init__(self, pxdb: Pxdb, directory: Directory, admission: Admission) -> None:
        self._pxdb = pxdb
        self._directory = directory
        self._admission = admission
        self._connection: psycopg.Connection[Any] | None = None
        self.connected = False

    def run(self) -> None:
        """Listens for ever; runs in a greenlet of its own."""
        pause = _PAUSE_SECONDS
        while True:
            started = time.monotonic()
            try:
                self._listen()
            except (psycopg.Error, OSError) as error:
                log.warning(f"{_CHANNEL} listener connection lost, retrying", error=str(error).strip())
            finally:
                self.connected = False
                self._close()
            if time.monotonic() - started >= _SOUND_SECONDS:
                pause = _PAUSE_SECONDS
            gevent.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)

    def _listen(self) -> None:
        connection = self._connection = self._pxdb.listener()
        connection.execute(f"LISTEN {_CHANNEL}".encode())
        # Something may have been announced while nobody listened.
        self._directory.forget_all()
        self.connected = True
        log.info(f"{_CHANNEL} listener connected")
        for notice in connection.notifies():
            self._hear(notice.payload)

    def _hear(self, payload: str) -> None:
        try:
            cluster = str(uuid.UUID(payload))
        except ValueError:
            log.warning(f"{_CHANNEL} announced no cluster id", payload=payload[:100])
            return
        self._directory.forget(cluster)
        self._admission.forget(cluster)

    def _close(self) -> None:
        if self._connection is not None:
            with suppress(Exception):
                self._connection.close()
            self._connection = None
