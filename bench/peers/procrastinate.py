"""procrastinate, from PyPI."""

from bench.peers.base import PostgresPeer, PythonPeer


class Procrastinate(PostgresPeer, PythonPeer):
    """A task queue in PostgreSQL."""

    name = "procrastinate"
    title = "procrastinate"
    packages = ("procrastinate>=3.10", "psycopg[binary,pool]", "uvloop")
    speeds = (1500, 1500, 1500)
