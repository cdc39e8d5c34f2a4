"""Load generator for a running broker, started by ``scripts/bench``.

It is not part of the installed package. The broker, PostgreSQL and this generator usually share a
few cores, so everything here that runs once per request is written to cost as little as it can.
"""
