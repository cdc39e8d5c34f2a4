"""Reconcile: brings a worker's memory in line with the database, whatever hints it missed."""

from __future__ import annotations

from queen.engine.engine import Engine
from queen.log import Log

log = Log("reconcile")


class Reconcile:
    """Flags, and the marks of cursors that were moved on purpose.

    Other caches mend themselves: the pop path reads a queue's options again every half minute, and what a
    push needs to know is decided in the database.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def cycle(self) -> None:
        """One pass. Raises what the database raises, and has then changed nothing."""
        flags = self._engine.flags
        for flag in flags.read():
            log.info("flag changed", flag=flag, **{"from": not flags[flag], "to": flags[flag]})
        self._engine.scan.repair()
