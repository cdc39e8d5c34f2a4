"""Start the stack, keep it running, stop it: what `scripts/stack up` does until it is told to end.

A server that ends by itself is started again, after a pause that grows with each time. One that is held
(see `Stack.held`) is stopped until somebody lets go of it.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _checkout import fail, say
from _service import STOP_SECONDS, Service, check_port
from _stack import HOST, PROXY, PXDB, Ports, Stack

if TYPE_CHECKING:
    from queen.db.embedded import EmbeddedServer

READY_SECONDS = 120.0
LONGEST_PAUSE = 30.0
# A server that ran this long before it ended starts again at once.
STEADY_SECONDS = 60.0


@dataclass
class Watched:
    """A service and what the supervisor knows of it; times are those of the monotonic clock."""

    service: Service
    was_healthy: bool = False
    restarts: int = 0
    failures: int = 0
    started_at: float = 0.0
    start_again_at: float = 0.0
    stop_asked_at: float = 0.0
    state: str = "starting"


class Supervisor:
    """Runs the stack in this process until a KeyboardInterrupt."""

    def __init__(self, stack: Stack, ports: Ports) -> None:
        """Takes the stack, whose lock this process holds, and where it shall listen."""
        self._stack = stack
        self._ports = ports
        self._watched: list[Watched] = []
        self._postgres: EmbeddedServer | None = None
        self._ready = False

    def run(self, cleanup: ExitStack) -> None:
        """Start everything and watch over it; `cleanup` ends it in the reverse order."""
        self._wait_for_the_last_run()
        for port in asdict(self._ports).values():
            check_port(HOST, port, "Move the stack's ports: scripts/stack up --port-offset 1000")
        self._stack.secrets()
        self._start_postgres(cleanup)
        assert self._postgres
        services = self._stack.services(self._ports, self._postgres.environment())
        self._watched = [Watched(service) for service in services]
        cleanup.callback(self._stop_services)
        for name in ("queen-a", "queen-b", PROXY):
            self._stack.held(name).unlink(missing_ok=True)
        say("Starting two brokers and the proxy ...")
        started = time.monotonic()
        while True:
            self._watch()
            if not self._ready and all(watched.was_healthy for watched in self._watched):
                self._ready = True
                self._note()
                say("The stack is ready.")
                return_to = self._stack.directory
                say(f"Its files are in {return_to}; scripts/stack demo shows what it does, Ctrl-C stops it.")
            if not self._ready and time.monotonic() - started > READY_SECONDS:
                slow = next(watched.service for watched in self._watched if not watched.was_healthy)
                fail(f"{slow.name} isn't healthy after {READY_SECONDS:.0f} s. Its log:\n{slow.tail()}")
            time.sleep(0.1)

    def _wait_for_the_last_run(self) -> None:
        """Wait for what a killed `up` left: its guards have told it to stop."""
        state = self._stack.state()
        pids = [service.get("pid") for service in state.get("services", {}).values()]
        deadline = time.monotonic() + STOP_SECONDS
        told = False
        while any(pid and _serves(pid) for pid in pids):
            if not told:
                say("Waiting for the servers of the last run to end ...")
                told = True
            if time.monotonic() > deadline:
                fail("The servers of the last run don't end. Their process ids: " + ", ".join(map(str, pids)))
            time.sleep(0.1)

    def _start_postgres(self, cleanup: ExitStack) -> None:
        from queen.db.embedded import EmbeddedError, EmbeddedServer

        say("Starting PostgreSQL ...")
        try:
            server = EmbeddedServer(self._stack.postgres_dir)
            cleanup.callback(server.stop)
            cleanup.callback(say, "Stopping PostgreSQL ...")
            server.start()
        except EmbeddedError as error:
            fail(f"The embedded PostgreSQL can't be started: {error}")
        self._postgres = server
        _make_database(server, PXDB)
        say(f"PostgreSQL runs on port {server.port}; its data is in {server.data_dir}.")

    def _watch(self) -> None:
        """Look at every server once, and do what its state asks for."""
        from queen.db.embedded import EmbeddedError

        assert self._postgres
        if not self._postgres.running:
            say("PostgreSQL ended by itself; starting it again.")
            try:
                self._postgres.start()
            except EmbeddedError as error:
                fail(f"PostgreSQL can't be started again: {error}")
        before = [self._describe(watched) for watched in self._watched]
        for watched in self._watched:
            self._look_at(watched)
        if before != [self._describe(watched) for watched in self._watched]:
            self._note()

    def _look_at(self, watched: Watched) -> None:
        service, now = watched.service, time.monotonic()
        held = self._stack.held(service.name).exists()
        if service.pid is None:
            self._look_at_dead(watched, held, now)
        elif held and not watched.stop_asked_at:
            say(f"Stopping {service.name}.")
            service.ask_to_stop()
            watched.stop_asked_at, watched.state = now, "stopping"
        elif watched.stop_asked_at:
            if now - watched.stop_asked_at > STOP_SECONDS:
                service.stop()
        elif watched.state == "starting" and service.healthy():
            watched.was_healthy, watched.state = True, "running"

    def _look_at_dead(self, watched: Watched, held: bool, now: float) -> None:
        service = watched.service
        if watched.stop_asked_at or held:
            if watched.state != "stopped":
                service.stop()
                watched.stop_asked_at, watched.failures, watched.state = 0.0, 0, "stopped"
                say(f"{service.name} is stopped.")
            if held:
                return
        elif watched.started_at and watched.state not in ("waiting", "stopped"):
            service.stop()  # workers that outlived it
            if not watched.was_healthy:
                fail(f"{service.name} stopped while starting. Its last log lines:\n{service.tail()}")
            watched.failures = 0 if now - watched.started_at > STEADY_SECONDS else watched.failures + 1
            watched.restarts += 1
            pause = min(LONGEST_PAUSE, 2.0 ** (watched.failures - 1)) if watched.failures else 0.0
            watched.start_again_at, watched.state = now + pause, "waiting"
            say(f"{service.name} ended by itself; it is started again in {pause:.0f} s. Its log: {service.log}")
        if now >= watched.start_again_at:
            if watched.state == "stopped":
                say(f"Starting {service.name}.")
            service.start()
            watched.started_at, watched.state = now, "starting"

    def _describe(self, watched: Watched) -> dict[str, Any]:
        service = watched.service
        return {"pid": service.pid, "state": watched.state, "restarts": watched.restarts, "url": service.url}

    def _note(self) -> None:
        """Leave word for the other commands, and for the next run if this one is killed."""
        assert self._postgres
        self._stack.write_state(
            {
                "ready": self._ready,
                "pid": os.getpid(),
                "ports": asdict(self._ports),
                "postgres": {"pid": self._postgres.pid, "port": self._postgres.port},
                "services": {watched.service.name: self._describe(watched) for watched in self._watched},
            }
        )

    def _stop_services(self) -> None:
        """Stop the proxy, then the brokers together: what is under way gets its answer."""
        running = [watched.service for watched in self._watched if watched.service.pid]
        if running:
            say("\nStopping the proxy and the brokers ...")
        for group in ([s for s in running if s.name == PROXY], [s for s in running if s.name != PROXY]):
            for service in group:
                service.ask_to_stop()
            for service in group:
                service.stop()
        for watched in self._watched:
            watched.service.stop()
            watched.state = "stopped"
        with suppress(OSError):
            self._ready = False
            self._note()


def _make_database(server: EmbeddedServer, name: str) -> None:
    import psycopg
    from psycopg import sql

    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        if not connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (name,)).fetchone():
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))


def _serves(pid: int) -> bool:
    """Whether a process id still belongs to a gunicorn."""
    try:
        return b"gunicorn" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        with suppress(OSError):
            os.kill(pid, 0)
            return not Path("/proc/self").exists()
        return False


def end(pid: int) -> None:
    """Ask a supervisor to stop everything."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
