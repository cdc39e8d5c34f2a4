"""gunicorn's settings for a broker: ``gunicorn -k gevent -c conf/gunicorn.conf.py queen.wsgi``.

Everything here can be overridden on the command line or through GUNICORN_CMD_ARGS.
"""

import os

bind = f"{os.environ.get('QUEEN_BIND_ADDR') or '0.0.0.0'}:{os.environ.get('PORT') or '6632'}"
worker_class = "gevent"

# Each parked long poll is a connection. Raise the open-files limit (ulimit -n) above this too.
worker_connections = 20_000
backlog = 4096

# Well above the interval at which clients reuse a connection, or they meet resets.
keepalive = 75

# A worker reports itself alive once a second whatever its requests do: this never cuts a long poll.
timeout = 60

# Parked pops are answered at the signal; this bounds what is left.
graceful_timeout = 20

# One less socket to guard; systemd and signals do what it offers.
control_socket_disable = True

# Queue names travel in the path, percent-encoded: 255 characters of up to 12 bytes, twice.
limit_request_line = 8190

# The broker takes nothing from forwarding headers. Trusting everybody with no header at all spares
# gunicorn the parsing of the peer's address on every request.
forwarded_allow_ips = "*"
forwarder_headers = ""
secure_scheme_headers: dict[str, str] = {}


def on_starting(server):  # type: ignore[no-untyped-def]
    """Refuses in the master what a worker could not start with, before the port is bound."""
    from queen import log
    from queen.settings import Settings, SettingsError

    try:
        Settings.read()
    except SettingsError as error:
        log.configure()
        log.Log("boot").error(f"FATAL: {error}")
        raise SystemExit(1) from None
