"""graphile-worker, from npm."""

from bench.peers.base import NodePeer, PostgresPeer


class GraphileWorker(PostgresPeer, NodePeer):
    """A job queue in PostgreSQL for node."""

    name = "graphile"
    title = "graphile-worker"
    package = "graphile-worker@0.17"  # later ones need node 22
    speeds = (2500, 12000, 40000)
