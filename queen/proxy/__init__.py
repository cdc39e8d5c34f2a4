"""The proxy: the front door that tenants come through, a program of its own beside the brokers.

    gunicorn -k gevent -c conf/gunicorn-proxy.conf.py queen.proxy.wsgi

It names who sends a request, whether they may, and what they may use, and forwards what it can name to a
broker of the cell. It keeps all of that in a database of its own (PXDB_*), and imports nothing of the broker
but the leaf modules queen.codec, queen.log and the records of queen.settings.

Rooms:

    wsgi.py, app.py     what gunicorn loads; which path goes where
    runtime.py          what the process owns, its start order and its stop order
    settings.py         every variable
    pxdb.py, migrations.py, sql/    the database: pool, schema, the functions operators call
    clusters.py, directory.py       a cluster with its limits; who is found by host, id or key, kept in memory
    principals.py       who sends a request and what they may do; the door to sessions (`People`)
    refusals.py         every answer that the proxy gives by itself
    gateway.py          the order of checks between a request and a broker
      routes.py         path and method to a class, closed by default
      client.py         the client's side of an exchange: its body, its socket, its answer
      upstream.py       the broker's side: connections, failover, time
      forwarding.py     headers taken off and put on
      counting.py       what a push carries
      limits.py, admission.py    buckets, parked slots; queues and partitions
      metering.py, usage_spool.py    what was used, and where that waits while the database is away
      reconcile.py, rollup.py    storage and queues against the broker; days, months, quotas
    console/            people: sign-in, sessions, the console's API and pages, the dashboard's gate
"""
