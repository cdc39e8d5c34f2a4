"""What the scripts share about this checkout: its virtual environment and its state directory.

Runs with the standard library alone, since it is what installs everything else. The scripts and this
module keep to the syntax of older Pythons, so that one of those can read as far as the refusal below.
"""

import sys

if sys.version_info < (3, 11):
    sys.exit(
        "Queen needs Python 3.11 or later, and %s is %d.%d.\n"
        "If this machine has a later one, name it: python3.11 %s"
        % (sys.executable, sys.version_info[0], sys.version_info[1], sys.argv[0])
    )

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STATE = ROOT / ".queen"

_PYTHON = VENV / "bin" / "python"
_STAMP = VENV / "queen-installed.json"


def say(text: str) -> None:
    """Print one line of progress at once. A reader that has gone away must not keep anything from stopping."""
    with suppress(OSError):
        print(text, flush=True)


def fail(text: str) -> NoReturn:
    """End the script with a message and status 1."""
    sys.exit(f"\n{text}")


def take_lock(path: Path, note: str = "") -> IO[str] | None:
    """Take a lock that ends with this process at the latest, and leave a note in its file.

    Returns the open file, to be kept, or None when another process has the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    file.truncate(0)
    file.write(note)
    file.flush()
    return file


def run_in_venv(extras: set[str]) -> None:
    """Return with the project and these extras installed, in an interpreter that sees them.

    The first call installs what is missing, then starts the script again with the interpreter of the
    virtual environment; the second finds nothing to do.
    """
    with _install_lock():
        if not _works(_PYTHON):
            _make_venv()
        _install(extras)
    if Path(sys.prefix).resolve() != VENV.resolve():
        os.execv(_PYTHON, [str(_PYTHON), *sys.argv])


@contextmanager
def _install_lock() -> Iterator[None]:
    """Let one script at a time install: a second one waits, then finds the work done."""
    STATE.mkdir(exist_ok=True)
    with (STATE / "install.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _works(python: Path) -> bool:
    """Whether an interpreter starts: it doesn't when the Python it was made from has gone."""
    try:
        return subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0
    except OSError:
        return False


def _make_venv() -> None:
    version = "%d.%d" % sys.version_info[:2]
    remedy = (
        f"Python {version} can't make a virtual environment here: its module ensurepip is missing.\n"
        f"On Debian or Ubuntu: apt-get install python{version}-venv. Elsewhere, install a complete Python."
    )
    if importlib.util.find_spec("ensurepip") is None:
        fail(remedy)
    say(f"Making a virtual environment in {VENV} ...")
    shutil.rmtree(VENV, ignore_errors=True)
    made = _run_slowly([sys.executable, "-m", "venv", str(VENV)])
    if made.returncode:
        fail(f"{made.stdout}\n{remedy}")


def _install(extras: set[str]) -> None:
    """Install the project, unless it was done for these declarations, this Python and these extras."""
    wanted = _fingerprint()
    stamp = _read_stamp()
    if stamp.get("fingerprint") == wanted and extras <= set(stamp.get("extras", [])):
        return
    # What another script asked for stays up to date with what this one asks for.
    extras = extras | set(stamp.get("extras", []))
    target = f".[{','.join(sorted(extras))}]" if extras else "."
    say("Installing the broker and its dependencies into it (once; this needs the network) ...")
    install = ["install", "--disable-pip-version-check", "--quiet", "--editable", target]
    done = _run_slowly([str(_PYTHON), "-m", "pip", *install])
    if done.returncode:
        fail(f"{done.stdout}\nThe installation failed: pip's own message is above.")
    _STAMP.write_text(json.dumps({"fingerprint": wanted, "extras": sorted(extras)}))


def _fingerprint() -> str:
    """Return what decides whether an installation is still the one the checkout asks for."""
    declared = b"".join((ROOT / name).read_bytes() for name in ("setup.cfg", "setup.py"))
    python = subprocess.run([_PYTHON, "-VV"], capture_output=True).stdout
    return hashlib.sha256(declared + python + str(ROOT).encode()).hexdigest()


def _read_stamp() -> dict[str, Any]:
    try:
        return dict(json.loads(_STAMP.read_text()))
    except (FileNotFoundError, ValueError):
        return {}


def _run_slowly(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command that may take a minute, and show that time passes."""
    started = time.monotonic()
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        while True:
            try:
                text, _ = process.communicate(timeout=10)
                break
            except subprocess.TimeoutExpired:
                say(f"  ... {time.monotonic() - started:.0f} s")
    return subprocess.CompletedProcess(command, process.returncode, text, None)
