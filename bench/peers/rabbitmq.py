"""RabbitMQ: rabbitmq-server from Debian, its client from npm."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from bench.cpu import Tree, listener
from bench.peers.base import NodePeer, Postgres, Server
from bench.peers.install import Unavailable, debian_root, library_path, program
from bench.serve import free_port


class RabbitMQ(NodePeer):
    """Durable classic queues, persistent messages, confirms."""

    name = "rabbitmq"
    title = "RabbitMQ"
    package = "amqplib@2"
    lanes = "64 queues"
    durable = "persistent, confirmed; classic queues sync in groups"
    speeds = (40000, 90000, 100000)

    def install(self) -> None:
        """Find or unpack Erlang and the server, then the library."""
        wrapper = program("rabbitmq-server", "rabbitmq-server")
        root = debian_root() if wrapper.is_relative_to(debian_root()) else Path("/")
        homes = sorted((root / "usr/lib/rabbitmq/lib").glob("rabbitmq_server-*"))
        if not homes:
            raise Unavailable("rabbitmq-server is here, but not where Debian puts it")
        self._home = homes[-1]
        self._erlang = root / "usr/lib/erlang"
        if root != Path("/"):
            self._relocate()
        super().install()

    def _relocate(self) -> None:
        """Erlang's start scripts have its place written into them."""
        for script in self._erlang.glob("**/bin/*"):
            if script.is_file() and script.stat().st_size < 100_000:
                text = script.read_bytes()
                if text.startswith(b"#!"):
                    script.write_bytes(re.sub(rb"(?<!debian)/usr/lib/erlang", bytes(self._erlang), text))

    def version(self) -> str:
        """The server's and the library's."""
        return f"RabbitMQ {self._home.name.rpartition('-')[2]}, {super().version()}"

    def start(self, postgres: Postgres) -> None:
        """Start a node of its own, with its own port mapper, on the loopback address."""
        self._directory = Path(tempfile.mkdtemp(prefix="bench-rabbitmq-"))
        self._port = free_port()
        config = self._directory / "rabbitmq.conf"
        config.write_text(f"listeners.tcp.1 = 127.0.0.1:{self._port}\nlog.file = false\nlog.console = true\n")
        self._environment = library_path() | {
            "HOME": str(self._directory),
            "PATH": os.pathsep.join((str(self._erlang / "bin"), os.environ["PATH"])),
            "RABBITMQ_CONFIG_FILE": str(config),
            "RABBITMQ_CONF_ENV_FILE": str(self._directory / "none"),
            "RABBITMQ_MNESIA_BASE": str(self._directory / "mnesia"),
            "RABBITMQ_LOG_BASE": str(self._directory),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self._directory / "plugins"),
            "RABBITMQ_NODENAME": f"bench{self._port}@localhost",
            "RABBITMQ_DIST_PORT": str(free_port()),
            "ERL_EPMD_PORT": str(free_port()),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
        }
        command = [str(self._home / "sbin" / "rabbitmq-server")]
        self._server = Server(command, self._directory, self._environment)
        self._server.wait_for_port(self._port)

    def stop(self) -> None:
        """Stop the node, and the port mapper that it left behind."""
        self._server.stop()
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = [str(self._erlang / "bin" / "epmd"), "-kill"]
            subprocess.run(command, env=os.environ | self._environment, capture_output=True, timeout=10)
        shutil.rmtree(self._directory, ignore_errors=True)

    def task(self) -> dict[str, Any]:
        """Its address."""
        return super().task() | {"url": f"amqp://guest:guest@127.0.0.1:{self._port}"}

    def trees(self) -> list[Tree]:
        """The virtual machine, and what it starts."""
        root = listener(self._port) or self._server.process.pid
        return [Tree(root)]
