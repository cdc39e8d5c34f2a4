"""What the workers of one broker tell each other of themselves, for answers that speak of the broker.

Each worker writes its figures to a file of the run directory once a second. Whoever is asked adds up those
that are fresh; the file of a worker that died is no longer written, and soon no longer counted.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from queen import codec

_FRESH_SECONDS = 5.0
_DEAD_SECONDS = 60.0
_PREFIX = "figures-"


def publish(directory: Path, instance: str, figures: dict[str, Any]) -> None:
    """Replaces what this worker says. Raises nothing: whoever reads finds the old file, or none."""
    path = directory / f"{_PREFIX}{instance}"
    with suppress(OSError):
        draft = path.with_suffix(".new")
        draft.write_bytes(codec.dumps(figures))
        os.replace(draft, path)


def withdraw(directory: Path, instance: str) -> None:
    """The worker is leaving."""
    with suppress(OSError):
        (directory / f"{_PREFIX}{instance}").unlink()


def gather(directory: Path) -> list[dict[str, Any]]:
    """What the living workers say."""
    found = []
    with suppress(OSError):
        for path in directory.glob(f"{_PREFIX}*"):
            with suppress(OSError, codec.JsonError):
                age = time.time() - path.stat().st_mtime
                if age > _DEAD_SECONDS:
                    path.unlink()
                elif age < _FRESH_SECONDS and path.suffix != ".new":
                    found.append(codec.loads(path.read_bytes()))
    return found
