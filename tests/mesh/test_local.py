"""The workers' own channel, where no process is needed to see it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gevent
import pytest

from queen.engine.siblings import RunDirectoryError, Siblings
from queen.mesh.inbound import Inbound
from queen.mesh.local import LocalChannel

LONG = 20.0


class Worker:
    """One worker's end of the channel, which answers with its name."""

    def __init__(self, directory: Path) -> None:
        nothing: Any = None
        self.siblings = Siblings(str(directory))
        self.siblings.start()
        answers = {"name": lambda value: [self.siblings.instance, value]}
        self.channel = LocalChannel(self.siblings, "queen-a", Inbound(nothing, nothing, False), answers, lambda: None)

    def stop(self) -> None:
        self.channel.stop()
        self.siblings.stop()


def test_each_worker_answers_a_question_of_another(tmp_path: Path) -> None:
    # Longer than a Unix socket's path may be.
    workers = [Worker(tmp_path / ("x" * 100) / "run") for _ in range(3)]
    for worker in workers:
        worker.channel.start()
    names = {worker.siblings.instance for worker in workers}
    for worker in workers:
        others = names - {worker.siblings.instance}
        with gevent.Timeout(LONG):
            while {name for name, _ in worker.channel.ask("name", 7, LONG)} != others:
                gevent.sleep(0.01)
        assert sorted(worker.channel.ask("name", 7, LONG)) == sorted([name, 7] for name in others)
        assert worker.channel.ask("nothing that anybody answers", None, 0.01) == []
        assert all(worker.channel.knows(name) for name in names)
        assert not worker.channel.knows("0" * 16)
        assert not worker.channel.knows("../../etc/passwd")
    for worker in workers:
        worker.stop()
    gevent.sleep(0)


def test_a_directory_that_holds_no_socket_is_named(tmp_path: Path) -> None:
    worker = Worker(tmp_path / "run")
    (tmp_path / "run" / "holder").unlink()
    (tmp_path / "run").rmdir()
    with pytest.raises(RunDirectoryError, match=r"QUEEN_RUN_DIR .*/run can't hold a socket"):
        worker.channel.start()
    worker.stop()
