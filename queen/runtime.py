"""What one worker owns: its engine, the order in which it starts and the order in which it stops.

gunicorn's master binds the port before any worker runs, and it kills a worker that is silent for long
while it boots. So nothing is opened at import; the engine starts in a greenlet of the running worker, and
a request that comes earlier waits a little and is then told to come back.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import socket
import time
from typing import Any

import gevent
import psycopg
from gevent.event import Event

from queen import __version__, configuration, worker
from queen.api.answers import Refusal
from queen.api.http import Environ, Request
from queen.api.receiving import Receiving
from queen.auth import access
from queen.auth.access import Access, Caller
from queen.auth.levels import Demand
from queen.auth.tenancy import Tenancy
from queen.db import schema, tls
from queen.db.database import Database, conninfo
from queen.db.errors import StatementFailed, Unavailable
from queen.engine.engine import Engine
from queen.engine.identifiers import DEFAULT_TENANT
from queen.engine.siblings import RunDirectoryError
from queen.jobs.schedule import Schedule
from queen.log import Log
from queen.mesh.node import Mesh
from queen.settings import Settings, SettingsError
from queen.spool.directory import SpoolInUse
from queen.spool.spool import Spool

log = Log("boot")
shutdown_log = Log("shutdown")

FATAL_STATUS = 3  # on which gunicorn stops as a whole, instead of starting the worker again for ever
_START_WAIT_SECONDS = 5.0
_RETRY_SECONDS = 1.0
_STOP_SECONDS = 15.0
_SHORT_KEEPALIVE_SECONDS = 30
_GC_THRESHOLDS = (20_000, 20, 50)

# How long a connection may wait for its next request when the worker stops: clients that send another
# soon get it answered, and are told that it was the last.
_IDLE_SECONDS = 1.0


class Runtime:
    """The running broker of one worker process."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.stopping = False
        self.idle: dict[int, socket.socket] = {}
        self._receiving = Receiving(
            settings.max_body_bytes, settings.body_room_mb << 20, settings.body_timeout_ms / 1000
        )
        self.guarded = settings.jwt_enabled
        self._access = Access(settings) if settings.jwt_enabled else None
        self._tenancy = Tenancy(settings) if settings.tenancy_header else None
        self._database = Database(settings)
        self._engine: Engine | None = None
        self._spool: Spool | None = None
        self._schedule: Schedule | None = None
        self._mesh: Mesh | None = None
        self._ready = Event()
        self._started_in = 0
        self._gunicorn: Any = None  # its configuration, in a worker

    def admit(self, environ: Environ, path: str, demand: Demand) -> Caller | None:
        """Lets a request pass and says whose it is, None when nobody asks; raises `queen.auth.denied.Denied`."""
        return None if self._access is None else self._access.check(environ, path, demand)

    def request(self, environ: Environ, query: str, caller: Caller | None = None) -> Request:
        """Binds a request to the engine, its tenant and its sender.

        Raises a 503 `Refusal` when the engine is not up within 5 seconds, and `queen.auth.denied.Denied` for
        a tenant that is malformed or not the caller's.
        """
        tenant = DEFAULT_TENANT if self._tenancy is None else self._tenancy.tenant(environ)
        subject = None
        if caller is not None and self._access is not None:
            self._access.check_tenant(caller, tenant)
            subject = caller.subject
        if self._engine is None:
            self.start()
            self._ready.wait(_START_WAIT_SECONDS)
        engine, spool = self._engine, self._spool
        if engine is None or spool is None:
            raise Refusal(503, "starting")
        return Request(environ, query, engine, spool, tenant, self._receiving, subject)

    def start(self) -> None:
        """Starts the engine in a greenlet of this process, once."""
        if self._started_in != os.getpid():
            self._started_in = os.getpid()
            gevent.spawn(self._start)
            gevent.spawn(self._receiving.watch, worker.end_of_requests)

    def _start(self) -> None:
        self._log_configuration()
        if self._access is not None:
            self._access.start()
        engine = Engine(self.settings, self._database)
        spool = Spool(self.settings, engine)
        try:
            engine.siblings.start()
            spool.open()
            mesh = Mesh(self.settings, engine)
            self._apply_schema()
            self._open_database()
            self._read_flags(engine)
            engine.start()
            mesh.start()
        except (RunDirectoryError, SettingsError, SpoolInUse) as error:
            log.error(f"FATAL: {error}")
            os._exit(FATAL_STATUS)
        spool.start()
        self._schedule = Schedule(self.settings, engine)
        self._schedule.start()
        self._mesh = mesh
        # What lives as long as the worker need not be looked at again; requests allocate by the hundred.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLDS)
        self._engine, self._spool = engine, spool
        self._ready.set()
        log.info(
            "listening",
            version=__version__,
            addr=f"{self.settings.bind_addr}:{self.settings.port}",
            pool=self._database.size,
        )

    def _apply_schema(self) -> None:
        """Applies the schema, waiting for PostgreSQL as long as it takes."""
        while self.settings.apply_schema:
            try:
                schema.apply(conninfo(self.settings))
                return
            except schema.SchemaError as error:
                log.error(f"FATAL: schema apply failed: {error}")
                os._exit(FATAL_STATUS)
            except psycopg.OperationalError as error:
                log.sampled(10, "PostgreSQL is away; trying again", error=str(error).strip())
                gevent.sleep(_RETRY_SECONDS)

    def _open_database(self) -> None:
        """Opens the pool. A broker that need not see to the schema doesn't wait for PostgreSQL: it has the spool."""
        while True:
            try:
                self._database.open()
                return
            except psycopg.OperationalError as error:
                log.sampled(10, "PostgreSQL is away", error=str(error).strip())
                if not self.settings.apply_schema:
                    self._database.open_unseen()
                    return
                gevent.sleep(_RETRY_SECONDS)

    def _read_flags(self, engine: Engine) -> None:
        """Nobody is served before the flags are known, unless they can't be read: then they are off."""
        try:
            engine.flags.read()
        except (Unavailable, StatementFailed) as error:
            log.warning("maintenance flags can't be read; taking them as off until they can", error=error)

    def _log_configuration(self) -> None:
        for warning in self.settings.warnings:
            log.warning(warning)
        if doubt := tls.warning(self.settings):
            log.warning(doubt)
        more = {"version": __version__, "pool": self._database.size}
        for name, values in configuration.blocks(self.settings, **more):
            log.info(f"config: {name}", **values)
        access.log_state(self.settings)
        if self._gunicorn is None:
            return
        log.info("config: gunicorn", **configuration.gunicorn(self._gunicorn))
        if self._gunicorn.keepalive < _SHORT_KEEPALIVE_SECONDS:
            log.warning(
                f"idle connections are closed after {self._gunicorn.keepalive} s, and clients that reuse them meet"
                " resets: start gunicorn with -c conf/gunicorn.conf.py, or --keep-alive 75"
            )

    def stop(self) -> None:
        """Ends idle connections in a while, answers parked pops and flushes what is in flight."""
        if self.stopping:
            return
        self.stopping = True
        if self._engine is not None:
            self._engine.stopping = True
        shutdown_log.info("signal received — draining in-flight requests")
        started = time.monotonic()
        gevent.spawn(self._end_idle)
        if self._engine is not None:
            self._engine.stop()
            if self._mesh is not None:
                self._mesh.stop()  # others have yet to hear of the last pushes
            if self._spool is not None:
                self._spool.rest()  # before another worker drains
            self._engine.siblings.stop()
            if self._spool is not None:
                self._spool.close()
        if self._schedule is not None:
            self._schedule.stop()
        shutdown_log.info("shutdown complete", elapsed_ms=int((time.monotonic() - started) * 1000))

    def _end_idle(self) -> None:
        """Ends connections on which no request comes, until gunicorn sees that there are none. Never returns."""
        while True:
            before = dict(self.idle)
            gevent.sleep(_IDLE_SECONDS)
            for number, connection in list(self.idle.items()):
                if before.get(number) is connection:
                    worker.end_of_requests(connection.fileno())

    def connected(self, connection: socket.socket) -> None:
        """A client has connected and not sent a request yet."""
        self.idle[connection.fileno()] = connection

    def enter_worker(self) -> None:
        """Takes note of gunicorn's settings, and has SIGTERM stop this gracefully.

        That begins before gunicorn's own handler starts to wait for open requests.
        """
        self._gunicorn = worker.configuration()
        if self._gunicorn is not None:
            self._database.share(self._gunicorn.workers)
        previous = signal.getsignal(signal.SIGTERM)

        def handle(number: int, frame: Any) -> None:
            stopping = gevent.spawn(self.stop)
            # gunicorn leaves when no request is open, which may be before all of this has come to its end.
            atexit.register(stopping.join, _STOP_SECONDS)
            if callable(previous):
                previous(number, frame)

        signal.signal(signal.SIGTERM, handle)
