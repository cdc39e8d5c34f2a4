"""NATS JetStream: nats-server from Debian, its client from npm."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from bench.cpu import Tree
from bench.peers.base import NodePeer, Postgres, Server
from bench.peers.install import program, run
from bench.serve import free_port


class NatsJetStream(NodePeer):
    """A stream in a file, read through one durable pull consumer."""

    name = "nats"
    title = "NATS JetStream"
    package = "nats@2"
    lanes = "64 subjects of one stream"
    durable = "written to the file, synced every 2 minutes (default)"
    speeds = (12000, 40000, 90000)

    def install(self) -> None:
        """Find or unpack the server, then the library."""
        self._program = program("nats-server", "nats-server")
        super().install()

    def version(self) -> str:
        """The server's and the library's."""
        words = run([str(self._program), "--version"]).split()
        return f"nats-server {words[-1].removeprefix('v')}, {super().version()}"

    def start(self, postgres: Postgres) -> None:
        """Start it with an empty directory."""
        self._directory = Path(tempfile.mkdtemp(prefix="bench-nats-"))
        self._port = free_port()
        options = ["-a", "127.0.0.1", "-p", str(self._port), "-js", "-sd", str(self._directory)]
        self._server = Server([str(self._program), *options], self._directory)
        self._server.wait_for_port(self._port)

    def stop(self) -> None:
        """Stop it."""
        self._server.stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    def task(self) -> dict[str, Any]:
        """Its address."""
        return super().task() | {"url": f"nats://127.0.0.1:{self._port}"}

    def trees(self) -> list[Tree]:
        """One process."""
        return [Tree(self._server.process.pid)]
