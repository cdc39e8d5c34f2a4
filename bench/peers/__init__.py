"""Other queues that a user could choose, each started, loaded and stopped the same way.

One module a peer, and for each a load generator in ``workers`` that uses the peer's own client library and runs
in processes of its own. What a peer needs is kept in ``.queen/peers``, apart from the project's packages.
"""
