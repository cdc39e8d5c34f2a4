"""What the proxy's process owns: the order in which it starts and the order in which it stops."""

from __future__ import annotations

import gc
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import gevent
import psycopg
from gevent.event import Event

from queen import __version__, codec
from queen.log import Log
from queen.proxy import migrations
from queen.proxy.client import end_of_requests
from queen.proxy.clusters import FEATURES, Cluster
from queen.proxy.directory import Directory
from queen.proxy.gateway import Gateway
from queen.proxy.identity import Identity
from queen.proxy.limits import Limits
from queen.proxy.listener import Listener
from queen.proxy.metering import Meter
from queen.proxy.pxdb import Pxdb, Unavailable
from queen.proxy.quotas import PushBlocks
from queen.proxy.reconcile import Reconciler
from queen.proxy.refusals import Refusal
from queen.proxy.rollup import Rollup
from queen.proxy.settings import ProxySettings

log = Log("boot")
shutdown_log = Log("shutdown")

FATAL_STATUS = 3  # on which gunicorn stops as a whole, instead of starting the worker again for ever
_BOOT_SECONDS = 60.0
_START_WAIT_SECONDS = 5.0
_GRACE_SECONDS = 10.0
_KEYS_MS = 30_000
_GC_THRESHOLDS = (20_000, 20, 50)


class Runtime:
    """The running proxy. The room of the people sets ``identity.people`` before the first request."""

    def __init__(self, settings: ProxySettings) -> None:
        self.settings = settings
        self.stopping = False
        self.idle: dict[int, socket.socket] = {}
        self.pxdb = Pxdb(settings) if settings.pxdb_host else None
        self.directory = Directory(self.pxdb, settings.stale_grace_ms) if self.pxdb else None
        self.limits = Limits(settings.enforce, settings.cell_max_parked)
        self.identity = Identity(settings, self.directory, self.dev_cluster)
        self.blocks = PushBlocks()
        self.meter = Meter(Path(settings.spool_dir), self.pxdb)
        self.gateway = Gateway(settings, self.identity, self.limits, self.blocks, self.meter, self.pxdb)
        self._ready = Event()
        self._started_in = 0
        self._finished = False

    @property
    def dev_cluster(self) -> Cluster | None:
        """The one cluster of a proxy without a database."""
        s = self.settings
        if s.pxdb_host:
            return None
        nil = "00000000-0000-0000-0000-000000000000"
        token = s.dev_cell_token or None
        return Cluster(nil, "dev", nil, "dev", "active", s.dev_tenant, "dev", s.dev_cell_url, token, "", FEATURES)

    def wait_ready(self) -> None:
        """Returns when the start is through; raises a 503 `Refusal` when that isn't within 5 seconds."""
        if not self._ready.is_set():
            self.start()
            if not self._ready.wait(_START_WAIT_SECONDS):
                raise Refusal(503, "starting", "the proxy is starting", 1)

    def health(self) -> tuple[str, bytes]:
        """Status and body of /healthz, which asks the database nothing."""
        self.wait_ready()
        body: dict[str, Any] = {"enforce": self.settings.enforce}
        if shared := self.settings.shared:
            body["shared_hosts"] = len(shared)
        return "200 OK", codec.dumps(body | {"status": "ok", "tenant_header": self.settings.tenant_header})

    def start(self) -> None:
        """Starts in a greenlet of this process, once."""
        if self._started_in != os.getpid():
            self._started_in = os.getpid()
            gevent.spawn(self._start)

    def every(self, milliseconds: int, work: Callable[[], None], name: str, at_once: bool = False) -> None:
        """Runs ``work`` again and again for as long as the process lives; what it raises is logged."""

        def loop() -> None:
            if not at_once:
                gevent.sleep(milliseconds / 1000)
            while not self.stopping:
                try:
                    work()
                except Unavailable as error:
                    log.sampled(10, f"{name}: pxdb is away", error=error)
                except Exception:
                    log.exception(f"{name} failed")
                gevent.sleep(milliseconds / 1000)

        gevent.spawn(loop)

    def _start(self) -> None:
        s = self.settings
        log.info("queen-proxy starting", version=__version__)
        if self.pxdb is None or self.directory is None:
            log.warning("running in dev-static mode (no pxdb)", cell=s.dev_cell_url)
            log.info("no background tasks without pxdb")
        else:
            self._open_pxdb(self.pxdb)
            self._start_tasks(self.pxdb, self.directory)
        if s.dev_insecure:
            log.warning("QUEEN_PROXY_DEV_INSECURE: every request is let in")
        if s.tls_cert:
            log.info("TLS listener enabled", cert=s.tls_cert)
        # What lives as long as the process need not be looked at again.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLDS)
        self._ready.set()
        log.info(
            "queen-proxy up",
            addr=f"{s.bind_addr}:{s.port}",
            enforce=s.enforce,
            dev_static=self.pxdb is None,
            shared_hosts=len(s.shared),
        )

    def _start_tasks(self, pxdb: Pxdb, directory: Directory) -> None:
        s = self.settings
        admission = self.gateway.admission
        rollup = Rollup(pxdb, directory, self.blocks, s.usage_keep_days, s.quota_warn_percent)
        reconciler = Reconciler(pxdb, directory, self.gateway, admission, self.blocks)
        gevent.spawn(Listener(pxdb, directory, admission).run)
        self.every(_KEYS_MS, directory.note_used_keys, "key use")
        self.every(s.registry_persist_ms, admission.persist, "queue rows")
        self.every(s.meter_flush_ms, self.meter.flush, "usage", at_once=True)
        self.every(s.reconcile_ms, reconciler.run, "reconcile")
        self.every(s.rollup_ms, rollup.run, "roll-up", at_once=True)
        if s.revocation_sweep_ms:

            def sweep() -> None:
                pxdb.execute("SELECT queen_proxy.sweep_revoked_tokens()")

            self.every(s.revocation_sweep_ms, sweep, "deny-list", at_once=True)

    def _open_pxdb(self, pxdb: Pxdb) -> None:
        s = self.settings
        log.info(
            "config: pxdb",
            host=s.pxdb_host,
            port=s.pxdb_port,
            database=s.pxdb_db,
            use_ssl=s.pxdb_use_ssl,
            ssl_trust="given" if s.pxdb_ssl_root_cert else "system",
            ssl_verified=s.pxdb_use_ssl and (s.pxdb_ssl_reject_unauthorized or bool(s.pxdb_ssl_root_cert)),
        )
        try:
            pxdb.wait(_BOOT_SECONDS)
        except psycopg.Error as error:
            log.error(f"FATAL: pxdb unavailable: {str(error).strip()}")
            os._exit(FATAL_STATUS)
        try:
            migrations.apply(pxdb.conninfo)
        except psycopg.Error as error:
            log.error(f"FATAL: migrations failed: {str(error).strip()}")
            os._exit(FATAL_STATUS)
        pxdb.open()

    def stop(self) -> None:
        """Ends idle connections and answers parked polls, so that gunicorn finds nothing to wait for."""
        if self.stopping:
            return
        self.stopping = True
        shutdown_log.info("shutdown signal received")
        for connection in list(self.idle.values()):
            end_of_requests(connection)
        self.gateway.stop()

    def finish(self) -> None:
        """Writes what was counted; at the very end of the process, after the last request."""
        if self._started_in != os.getpid() or self._finished:
            return
        self._finished = True
        started = time.monotonic()
        with suppress(gevent.Timeout), gevent.Timeout(self.settings.shutdown_drain_ms / 1000 or 0.001):
            if self.pxdb is not None:
                with suppress(Unavailable):
                    self.meter.flush(everything=True)
                    self.gateway.admission.persist()
                self.pxdb.close()
        elapsed = int((time.monotonic() - started) * 1000)
        shutdown_log.info("usage and queue rows drained at shutdown", elapsed_ms=elapsed)

    def stop_on_signals(self) -> None:
        """Stops gracefully on SIGTERM and SIGINT before gunicorn begins to wait for open requests."""
        for number in (signal.SIGTERM, signal.SIGINT):
            previous = signal.getsignal(number)

            def handle(number: int, frame: Any, previous: Any = previous) -> None:
                gevent.spawn(self.stop)
                if callable(previous):
                    previous(number, frame)

            signal.signal(number, handle)
