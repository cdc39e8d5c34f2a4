"""gunicorn's settings for the proxy: ``gunicorn -k gevent -c conf/gunicorn-proxy.conf.py queen.proxy.wsgi``.

Everything here can be overridden on the command line or through GUNICORN_CMD_ARGS.
"""

import os

_host = os.environ.get("QUEEN_PROXY_BIND_ADDR") or "0.0.0.0"
if ":" in _host and not _host.startswith("["):
    _host = f"[{_host}]"
bind = f"{_host}:{os.environ.get('QUEEN_PROXY_PORT') or '6711'}"
worker_class = "gevent"

# Limits, quotas and usage are counted in one process. Two would admit twice what a plan allows.
workers = 1

# Each parked long poll is a connection here and one to a broker. Raise the open-files limit (ulimit -n) too.
worker_connections = 20_000
backlog = 4096

# Well above the interval at which clients reuse a connection, or they meet resets.
keepalive = 75

# A worker reports itself alive once a second whatever its requests do: this never cuts a long poll.
timeout = 60

# Parked polls are answered at the signal; this bounds what is left.
graceful_timeout = 10

control_socket_disable = True

# Queue names travel in the path, percent-encoded; a session travels in a cookie.
limit_request_line = 8190
limit_request_field_size = 16_380

# Nothing is taken from forwarding headers here; they go on to the broker as they are.
forwarded_allow_ips = "*"
forwarder_headers = ""
secure_scheme_headers: dict[str, str] = {}

if os.environ.get("QUEEN_PROXY_TLS_CERT") and os.environ.get("QUEEN_PROXY_TLS_KEY"):
    certfile = os.environ["QUEEN_PROXY_TLS_CERT"]
    keyfile = os.environ["QUEEN_PROXY_TLS_KEY"]
