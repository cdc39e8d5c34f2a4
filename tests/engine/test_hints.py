"""What an engine makes of hints from elsewhere: its pops wake, and nothing that is told can do more than that."""

from __future__ import annotations

from typing import Any

import pytest

from queen.engine.hints import Hints
from queen.engine.hotlist import HotList, Lane
from queen.engine.identifiers import DEFAULT_TENANT

OTHER = bytes(15) + b"\x02"
TENANTS = (DEFAULT_TENANT, OTHER)


class Scan:
    """Counts how often somebody wanted the database looked at."""

    def __init__(self) -> None:
        self.looks = 0

    def look(self) -> None:
        self.looks += 1


class Here:
    """An engine's memory behind the door, with a queue of two tenants that is popped by two groups."""

    def __init__(self) -> None:
        self.hotlist = HotList()
        self.scan = Scan()
        self.forgotten: list[tuple[bytes, bytes]] = []
        nothing: Any = None
        scan: Any = self.scan
        self.hints = Hints(
            nothing, nothing, self.hotlist, scan, lambda *queue: self.forgotten.append(queue), walks=True
        )
        for tenant in TENANTS:
            for group in (b"g", b"h"):
                self.hotlist.lane(tenant, b"orders").ring(group)

    def lane(self, tenant: bytes = DEFAULT_TENANT) -> Lane:
        return self.hotlist.lanes[tenant, b"orders"]

    def ready(self, tenant: bytes = DEFAULT_TENANT) -> dict[bytes, list[bytes]]:
        """The names that each group's pops would look at."""
        return {group: [entry.name for entry in ring.ready] for group, ring in self.lane(tenant).rings.items()}


@pytest.fixture
def here() -> Here:
    return Here()


def test_a_push_elsewhere_marks_its_partition_for_every_group(here: Here) -> None:
    here.hints.hear_push(DEFAULT_TENANT, b"orders", b"eu")
    here.hints.hear_push(DEFAULT_TENANT, b"orders", b"eu")
    assert here.ready() == {b"g": [b"eu"], b"h": [b"eu"]}
    assert here.ready(OTHER) == {b"g": [], b"h": []}
    assert here.scan.looks == 0


def test_a_tenant_that_is_not_told_is_everyone_with_such_a_queue(here: Here) -> None:
    here.hints.hear_push(None, b"orders", b"eu")
    assert [here.ready(tenant)[b"g"] for tenant in TENANTS] == [[b"eu"], [b"eu"]]
    here.hints.hear_queue(None, b"orders")
    assert sorted(here.forgotten) == [(tenant, b"orders") for tenant in TENANTS]


def test_a_queue_that_nobody_pops_here_takes_no_memory(here: Here) -> None:
    for number in range(1000):
        here.hints.hear_push(DEFAULT_TENANT, b"q%d" % number, b"p")
        here.hints.hear_move(DEFAULT_TENANT, b"q%d" % number, b"p", b"g")
    assert len(here.hotlist.lanes) == 2


def test_a_moved_cursor_marks_its_group_only(here: Here) -> None:
    here.hints.hear_move(DEFAULT_TENANT, b"orders", b"eu", b"g")
    assert here.ready() == {b"g": [b"eu"], b"h": []}
    here.hints.hear_move(DEFAULT_TENANT, b"orders", b"eu", b"never popped here")
    assert len(here.lane().rings) == 2


@pytest.mark.parametrize("name", [b"", b"\0", b"a\0b", b"x" * 1021])
def test_a_name_that_no_partition_can_have_is_a_reason_to_look(here: Here, name: bytes) -> None:
    here.hints.hear_push(DEFAULT_TENANT, b"orders", name)
    here.hints.hear_move(DEFAULT_TENANT, b"orders", name, b"g")
    assert here.ready() == {b"g": [], b"h": []}
    assert here.scan.looks == 2


def test_what_is_told_does_not_fill_the_memory(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("queen.engine.hotlist._MOST_TOLD", 100)
    for number in range(1000):
        here.hints.hear_push(DEFAULT_TENANT, b"orders", b"p%d" % number)
    assert len(here.ready()[b"g"]) == 100


def test_when_everything_may_have_changed_everything_is_forgotten(here: Here) -> None:
    here.hints.hear_all_queues()
    assert sorted(here.forgotten) == [(tenant, b"orders") for tenant in TENANTS]
