"""Gets what a peer needs, into the checkout's cache, without touching the machine's own packages."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from bench.measure import say

CACHE = Path(__file__).resolve().parent.parent.parent / ".queen" / "peers"
_DEBIAN = CACHE / "debian"
_SBIN = ("/usr/sbin", "/usr/local/sbin", "/usr/lib/rabbitmq/bin")
_SECONDS = 300


class Unavailable(RuntimeError):
    """A peer can't be measured here; the message says why."""


def run(command: list[str], directory: Path | None = None) -> str:
    """Run an installer; its output, or Unavailable with the end of it."""
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_SECONDS,
        )
    except FileNotFoundError:
        raise Unavailable(f"{command[0]} is not on this machine") from None
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{command[0]} did not end within {_SECONDS} s") from None
    if done.returncode:
        lines = [line for line in done.stdout.strip().splitlines() if line.strip()]
        raise Unavailable(f"{command[0]} failed: {' / '.join(lines[-2:])[-300:]}")
    return done.stdout


def virtualenv(name: str, packages: tuple[str, ...]) -> None:
    """A virtual environment with packages of PyPI."""
    python = CACHE / name / "bin" / "python"
    if _is_stamped(name, packages) and python.exists():
        return
    say(f"installing {name} ...")
    CACHE.mkdir(parents=True, exist_ok=True)
    run([sys.executable, "-m", "venv", "--clear", str(CACHE / name)])
    run([str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet", *packages])
    _stamp(name, packages)


def pip_version(name: str, package: str) -> str:
    """The version that is installed."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return run([str(CACHE / name / "bin" / "python"), "-c", code]).strip()


def node_modules(name: str, package: str) -> None:
    """A directory with a package of npm."""
    if shutil.which("node") is None:
        raise Unavailable("node is not on this machine")
    directory = CACHE / name
    if _is_stamped(name, (package,)):
        return
    say(f"installing {package} ...")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "package.json").write_text('{"private": true}\n')
    run(["npm", "install", "--no-audit", "--no-fund", "--no-progress", package], directory)
    _stamp(name, (package,))


def npm_version(name: str, package: str) -> str:
    """The version that is installed."""
    text = (CACHE / name / "node_modules" / package / "package.json").read_text()
    return str(json.loads(text)["version"])


def _is_stamped(name: str, wanted: tuple[str, ...]) -> bool:
    stamp = CACHE / name / "installed.json"
    return stamp.exists() and json.loads(stamp.read_text()) == list(wanted)


def _stamp(name: str, wanted: tuple[str, ...]) -> None:
    (CACHE / name / "installed.json").write_text(json.dumps(wanted))


def program(name: str, package: str) -> Path:
    """A server's program: the machine's own, or that of a Debian package unpacked into the cache.

    Unpacked and not installed: an installed one would start by itself and stay after the benchmark.
    """
    path = os.pathsep.join((os.environ.get("PATH", ""), *_SBIN))
    found = shutil.which(name, path=path) or _unpacked(name)
    if found is None:
        _unpack(package)
        found = _unpacked(name)
    if found is None:
        raise Unavailable(f"the package {package} has no {name}")
    return Path(found)


def _unpacked(name: str) -> str | None:
    places = [str(_DEBIAN / part) for part in ("usr/bin", "usr/sbin", "usr/lib/rabbitmq/bin")]
    return shutil.which(name, path=os.pathsep.join(places))


def _unpack(package: str) -> None:
    if shutil.which("apt-get") is None:
        raise Unavailable(f"{package} is not installed, and this is no Debian to get it from")
    say(f"unpacking {package} ...")
    downloads = CACHE / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    plan = run(["apt-get", "--simulate", "--no-install-recommends", "install", package])
    names = re.findall(r"^Inst (\S+)", plan, re.MULTILINE)
    # The account that apt would download as can't enter a checkout below /root.
    run(["apt-get", "-o", f"APT::Sandbox::User={_user()}", "download", *names], downloads)
    for archive in downloads.glob("*.deb"):
        run(["dpkg-deb", "--extract", str(archive), str(_DEBIAN)])
        archive.unlink()


def _user() -> str:
    return "root" if os.geteuid() == 0 else "_apt"


def library_path() -> dict[str, str]:
    """Lets unpacked programs find the libraries that were unpacked with them."""
    places = [str(path) for path in (_DEBIAN / "usr" / "lib").glob("*-linux-gnu*")]
    places += [part for part in (os.environ.get("LD_LIBRARY_PATH"),) if part]
    return {"LD_LIBRARY_PATH": os.pathsep.join(places)}


def debian_root() -> Path:
    """Where Debian packages are unpacked."""
    return _DEBIAN
