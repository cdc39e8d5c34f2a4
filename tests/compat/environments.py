"""The official client's virtual environments: one per version, made once and kept beside this file.

The client's import name is the broker's own, so the two can never share an environment.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

PROJECT = "queen-mq"
DIRECTORY = Path(__file__).resolve().parent / ".venvs"


class InstallationError(Exception):
    """The client can't be installed; the message holds what pip said."""


def python_of(version: str) -> Path:
    """Return the interpreter of an environment with this version of the client, made now if it is missing.

    Raises InstallationError when pip can't install it. Test runs side by side wait for each other here.
    """
    DIRECTORY.mkdir(exist_ok=True)
    home = DIRECTORY / version
    python = home / "bin" / "python"
    with (DIRECTORY / f"{version}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _installed(python) != version:
            shutil.rmtree(home, ignore_errors=True)
            _run(f"make an environment for {PROJECT} {version}", "-m", "venv", "--without-pip", str(home))
            install = f"-m pip --disable-pip-version-check --python {python} install --quiet".split()
            _run(f"install {PROJECT} {version}", *install, f"{PROJECT}=={version}")
    return python


def _installed(python: Path) -> str | None:
    """Return the version an environment holds, or None where there is no working one."""
    query = f"import httpx; from importlib.metadata import version; print(version({PROJECT!r}))"
    try:
        done = subprocess.run([python, "-I", "-c", query], capture_output=True, text=True)
    except OSError:  # none yet, or the Python it was made from has gone
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _run(purpose: str, *arguments: str) -> None:
    done = subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise InstallationError(f"can't {purpose}:\n{done.stdout[-4000:]}")
