"""pgqueuer, from PyPI."""

from bench.peers.base import PostgresPeer, PythonPeer


class PgQueuer(PostgresPeer, PythonPeer):
    """A job queue in PostgreSQL for asyncio."""

    name = "pgqueuer"
    title = "pgqueuer"
    packages = ("pgqueuer[asyncpg]>=1.6", "uvloop")
    speeds = (2500, 15000, 30000)
