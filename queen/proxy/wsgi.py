"""The proxy's WSGI application: ``gunicorn -k gevent queen.proxy.wsgi``.

Patches before anything else is imported. Nothing is opened here: the worker starts what it owns itself, so the
import is safe in a master that forks afterwards.
"""

# ruff: noqa: E402
from gevent import monkey

monkey.patch_all()

import atexit
import os
import sys

import gevent

from queen import log
from queen.proxy.app import Proxy
from queen.proxy.runtime import FATAL_STATUS, Runtime
from queen.proxy.settings import ProxySettings
from queen.settings import SettingsError

log.configure()
try:
    settings = ProxySettings.read()
    log.configure(settings.log_level, settings.log_json)
    runtime = Runtime(settings)
    application = Proxy(runtime)
except SettingsError as error:
    log.Log("boot").error(f"FATAL: {error}")
    sys.exit(FATAL_STATUS)


def _start_in_worker() -> None:
    """Runs in the hub of the worker that imported this module, or was forked from who did."""

    def start() -> None:
        runtime.stop_on_signals()
        runtime.start()

    gevent.spawn(start)


_start_in_worker()
os.register_at_fork(after_in_child=_start_in_worker)
# gunicorn waits for open requests and exits; what was counted until then is written after that.
atexit.register(runtime.finish)
