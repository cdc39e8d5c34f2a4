"""pg-boss, from npm."""

from bench.peers.base import NodePeer, PostgresPeer


class PgBoss(PostgresPeer, NodePeer):
    """A job queue in PostgreSQL for node."""

    name = "pgboss"
    title = "pg-boss"
    package = "pg-boss@10"  # later ones need node 22
    speeds = (1500, 4000, 8000)
