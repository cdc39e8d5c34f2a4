"""Redis Streams: redis-server from Debian, its client from npm."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from bench.cpu import Tree
from bench.peers.base import NodePeer, Postgres, Server
from bench.peers.install import library_path, program, run
from bench.serve import free_port


class RedisStreams(NodePeer):
    """Streams with one consumer group, in an append-only file."""

    name = "redis"
    title = "Redis Streams"
    package = "ioredis@5"
    lanes = "64 streams"
    durable = "written to the file, synced every second (everysec)"
    speeds = (60000, 120000, 150000)

    def install(self) -> None:
        """Find or unpack the server, then the library."""
        self._program = program("redis-server", "redis-server")
        super().install()

    def version(self) -> str:
        """The server's and the library's."""
        words = run(["env", *_assignments(), str(self._program), "--version"]).split()
        return f"Redis {words[2].removeprefix('v=')}, {super().version()}"

    def start(self, postgres: Postgres) -> None:
        """Start it with an empty directory."""
        self._directory = Path(tempfile.mkdtemp(prefix="bench-redis-"))
        self._port = free_port()
        options = f"--port {self._port} --bind 127.0.0.1 --appendonly yes --appendfsync everysec"
        command = [str(self._program), *options.split(), "--save", "", "--dir", str(self._directory)]
        self._server = Server(command, self._directory, library_path())
        self._server.wait_for_port(self._port)

    def stop(self) -> None:
        """Stop it."""
        self._server.stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    def task(self) -> dict[str, Any]:
        """Its port."""
        return super().task() | {"port": self._port}

    def trees(self) -> list[Tree]:
        """One process, and the one that rewrites the file."""
        return [Tree(self._server.process.pid)]


def _assignments() -> list[str]:
    return [f"{name}={value}" for name, value in library_path().items()]
