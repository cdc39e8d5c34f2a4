"""The broker's WSGI application: ``gunicorn -k gevent queen.wsgi``.

Patches before anything else is imported, builds the application, and has the worker's engine started by
the worker itself. Nothing is opened here, so the import is safe in a master that forks afterwards.
"""

# ruff: noqa: E402
from gevent import monkey

monkey.patch_all()

import os
import sys

import gevent

from queen import log, worker
from queen.app import create_app
from queen.runtime import FATAL_STATUS, Runtime
from queen.settings import Settings, SettingsError

try:
    settings = Settings.read()
except SettingsError as error:
    log.configure()
    log.Log("boot").error(f"FATAL: {error}")
    sys.exit(FATAL_STATUS)

log.configure(settings.log_level, settings.log_json)
runtime = Runtime(settings)
application = create_app(runtime)
worker.install(runtime.connected)


def _start_in_worker() -> None:
    """Runs in the hub of the worker that imported this module, or was forked from who did."""

    def start() -> None:
        runtime.enter_worker()
        runtime.start()

    gevent.spawn(start)


_start_in_worker()
os.register_at_fork(after_in_child=_start_in_worker)
