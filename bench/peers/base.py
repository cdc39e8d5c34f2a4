"""What a peer is: how it is got, started, loaded and stopped."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from bench.cpu import Tree, postmaster_of
from bench.peers.install import CACHE, Unavailable, node_modules, npm_version, pip_version, virtualenv

WORKERS = Path(__file__).resolve().parent / "workers"
_STOP_SECONDS = 15.0


class Postgres:
    """The PostgreSQL server that Queen and the peers on PostgreSQL share; a database for each."""

    def __init__(self, conninfo: str) -> None:
        self.conninfo = conninfo
        self._connection = psycopg.connect(conninfo, autocommit=True)
        self.version = self._connection.info.parameter_status("server_version") or "?"
        root = postmaster_of(self._connection.info.backend_pid)
        self.tree = Tree(root) if root else None

    def fresh(self, name: str) -> str:
        """An empty database, and nothing of its forerunner left to be written."""
        self.drop(name)
        self._connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        self._connection.execute("checkpoint")
        return make_conninfo(self.conninfo, dbname=name)

    def drop(self, name: str) -> None:
        """Remove a database, whoever uses it."""
        statement = "drop database if exists {} with (force)"
        self._connection.execute(sql.SQL(statement).format(sql.Identifier(name)))

    def close(self) -> None:
        """Close our own connection."""
        self._connection.close()


class Peer(ABC):
    """One queue. A row is: `prepare`, generators, and then the next one."""

    name: str
    title: str
    lanes: str  # what a lane is there
    durable: str  # what an answered push has survived
    # Messages a second that it may consume at best, by batch: how deep the backlog has to be.
    speeds: tuple[int, int, int]
    on_postgres = False

    @abstractmethod
    def install(self) -> None:
        """Get everything it needs, or raise Unavailable."""

    @abstractmethod
    def version(self) -> str:
        """Its version, and its client's."""

    @abstractmethod
    def start(self, postgres: Postgres) -> None:
        """Start its servers, if it has any of its own."""

    @abstractmethod
    def stop(self) -> None:
        """Stop them, and remove its data."""

    @abstractmethod
    def command(self) -> list[str]:
        """The program of a load generator; its task is added."""

    def task(self) -> dict[str, Any]:
        """Where a generator finds the server, and its libraries."""
        return {}

    @abstractmethod
    def trees(self) -> list[Tree]:
        """The processes of its servers."""

    def prepare(self) -> None:
        """Make an empty queue."""
        task = self.task() | {"role": "setup", "payloads": os.devnull, "lanes": 64, "timed": False, "batch": 1}
        done = subprocess.run(
            [*self.command(), json.dumps(task | {"connections": 1})],
            capture_output=True,
            text=True,
            timeout=60,
        )
        if done.returncode:
            raise Unavailable(f"it can't be set up: {done.stderr.strip()[-500:]}")

    def settle(self) -> None:  # noqa: B027  # most have nothing to do
        """Do what time would do to a backlog that was just written."""


class NodePeer(Peer):
    """A peer whose client library comes from npm."""

    package: str

    def install(self) -> None:
        """Install the library."""
        node_modules(self.name, self.package)

    def version(self) -> str:
        """The library's."""
        library = self.package.split("@")[0]
        return f"{library} {npm_version(self.name, library)}"

    def command(self) -> list[str]:
        """Its generator."""
        return ["node", str(WORKERS / f"{self.name}.mjs")]

    def task(self) -> dict[str, Any]:
        """Where its library is."""
        return super().task() | {"modules": str(CACHE / self.name)}


class PythonPeer(Peer):
    """A peer whose client library comes from PyPI."""

    packages: tuple[str, ...]

    def install(self) -> None:
        """Install the library in a virtual environment of its own."""
        virtualenv(self.name, self.packages)

    def version(self) -> str:
        """The library's."""
        return f"{self.name} {pip_version(self.name, self.name)}"

    def command(self) -> list[str]:
        """Its generator."""
        return [str(CACHE / self.name / "bin" / "python"), str(WORKERS / f"with_{self.name}.py")]


class PostgresPeer(Peer):
    """Mixed into a peer that is a library on PostgreSQL."""

    on_postgres = True
    durable = "committed by PostgreSQL (fsync)"
    lanes = "none"

    def start(self, postgres: Postgres) -> None:
        """Remember where."""
        self._postgres = postgres

    def stop(self) -> None:
        """Remove its database."""
        self._postgres.drop(self._database)

    @property
    def _database(self) -> str:
        return f"bench_{self.name}"

    def prepare(self) -> None:
        """Start with an empty database, so that no row pays for the rubbish of another."""
        self._postgres.fresh(self._database)
        super().prepare()

    def settle(self) -> None:
        """Give the planner statistics: without them some peers read the whole backlog for each job."""
        conninfo = make_conninfo(self._postgres.conninfo, dbname=self._database)
        with psycopg.connect(conninfo, autocommit=True) as connection:
            connection.execute("vacuum analyze")

    def task(self) -> dict[str, Any]:
        """How to connect."""
        conninfo = make_conninfo(self._postgres.conninfo, dbname=self._database)
        parts = conninfo_to_dict(conninfo)
        postgres = {
            "host": parts["host"],
            "port": int(str(parts["port"])),
            "user": parts["user"],
            "password": parts["password"],
            "database": self._database,
        }
        return super().task() | {"postgres": postgres, "conninfo": conninfo}

    def trees(self) -> list[Tree]:
        """PostgreSQL's processes."""
        return [self._postgres.tree] if self._postgres.tree else []


class Server:
    """A server process of a peer, and its log."""

    def __init__(self, command: list[str], directory: Path, environment: dict[str, str] | None = None) -> None:
        self._log = (directory / "server.log").open("w+")
        self.process = subprocess.Popen(
            command,
            cwd=directory,
            env=os.environ | (environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def wait_for_port(self, port: int, seconds: float = 60.0) -> None:
        """Return when it listens; raise Unavailable with its last words when it doesn't."""
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return
            if self.process.poll() is not None or time.monotonic() > deadline:
                self._log.seek(0)
                raise Unavailable(f"it does not start: {self._log.read().strip()[-500:]}")
            time.sleep(0.05)

    def stop(self) -> None:
        """Stop it; what it stored is of no use to anybody."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait()
        self._log.close()
