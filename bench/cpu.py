"""CPU time and memory of whole process trees, read from /proc.

gunicorn and PostgreSQL are trees of processes whose members come and go, so a figure of one process
says nothing. The time of members that ended is in their parent's "waited for" counters.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_LISTEN = "0A"
_PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    """One line of /proc/PID/stat, as far as it is needed here."""

    pid: int
    parent: int
    name: str
    own_ns: int
    ended_children_ns: int


def read_process(pid: int) -> Process | None:
    """The process, or None when it has gone."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    name_end = text.rindex(")")
    fields = text[name_end + 2 :].split()
    ticks = [int(value) * _TICK_NS for value in fields[11:15]]
    # stat counts in ticks of 10 ms, too coarse for an idle process; the scheduler's own sum is exact
    # but forgets threads that ended. Whichever is larger is nearer the truth.
    own = max(ticks[0] + ticks[1], _scheduled_ns(pid))
    return Process(pid, int(fields[1]), text[text.index("(") + 1 : name_end], own, ticks[2] + ticks[3])


def _scheduled_ns(pid: int) -> int:
    total = 0
    try:
        for task in os.listdir(_PROC / str(pid) / "task"):
            total += int((_PROC / str(pid) / "task" / task / "schedstat").read_text().split()[0])
    except (OSError, IndexError, ValueError):
        return 0
    return total


def _all_parents() -> dict[int, int]:
    parents: dict[int, int] = {}
    for entry in os.listdir(_PROC):
        if entry.isdigit():
            try:
                text = (_PROC / entry / "stat").read_text(errors="replace")
            except OSError:
                continue
            parents[int(entry)] = int(text[text.rindex(")") + 2 :].split()[1])
    return parents


class Tree:
    """A process and everything below it, but for subtrees that are somebody else's."""

    def __init__(self, root: int, leave_out: frozenset[int] = frozenset()) -> None:
        self.root = root
        self._leave_out = leave_out

    def pids(self) -> list[int]:
        """The members alive now."""
        children: dict[int, list[int]] = {}
        for pid, parent in _all_parents().items():
            children.setdefault(parent, []).append(pid)
        found: list[int] = []
        waiting = [self.root]
        while waiting:
            pid = waiting.pop()
            if pid not in self._leave_out:
                found.append(pid)
                waiting.extend(children.get(pid, ()))
        return found

    def cpu_ns(self) -> int:
        """CPU time of all members, those that ended included."""
        members = [process for pid in self.pids() if (process := read_process(pid))]
        return sum(process.own_ns + process.ended_children_ns for process in members)

    def rss_bytes(self) -> int:
        """Resident memory of the members; pages they share count once for each."""
        total = 0
        for pid in self.pids():
            try:
                total += int((_PROC / str(pid) / "statm").read_text().split()[1]) * _PAGE
            except OSError:
                continue
        return total


def is_local(host: str) -> bool:
    """Whether `host` is an address of this machine: a socket can be bound to it."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _listening_inodes(port: int) -> set[str]:
    inodes: set[str] = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = (_PROC / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rsplit(":", 1)[1], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    return inodes


def _holds(pid: int, links: set[str]) -> bool:
    directory = _PROC / str(pid) / "fd"
    try:
        return any(_link(directory / name) in links for name in os.listdir(directory))
    except OSError:
        return False


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def listener(port: int) -> int | None:
    """The topmost process that listens on a TCP port: for gunicorn, its master."""
    links = _listening_inodes(port)
    if not links:
        return None
    parents = _all_parents()
    holders = {pid for pid in parents if _holds(pid, links)}
    tops = sorted(pid for pid in holders if parents[pid] not in holders)
    return tops[0] if tops else None


def postmaster_of(backend: int) -> int | None:
    """The parent of a PostgreSQL backend, or None when that backend is not on this machine."""
    process = read_process(backend)
    if process is None or "postgres" not in process.name:
        return None
    return process.parent
