"""A table of hashes: it never misses one it holds, and forgets only what is old."""

from __future__ import annotations

import tracemalloc
from hashlib import blake2b

from hypothesis import given
from hypothesis import strategies as st

from queen.engine.hash_table import BYTES_PER_HASH, HashTable


def hashes(first: int, count: int) -> list[bytes]:
    return [blake2b(f"{k}".encode(), digest_size=16).digest() for k in range(first, first + count)]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 400)), max_size=30), st.integers(1, 300))
def test_what_is_young_enough_is_held_and_what_was_never_added_is_not(
    batches: list[tuple[int, int]], ages: int
) -> None:
    table = HashTable()
    generation, at = 0, 0
    added: list[tuple[int, list[bytes]]] = []
    for step, count in batches:
        generation += step
        batch = hashes(at, count)
        at += count
        assert table.misses(batch)
        table.add(batch, generation, max(0, generation - ages))
        added.append((generation, batch))
    for born, batch in added:
        if born >= generation - ages:
            assert not any(table.misses([h]) for h in batch)
            assert not table.misses([*hashes(at, 5), batch[-1]])
    assert table.misses(hashes(at, 500))
    assert sum(len(batch) for born, batch in added if born >= generation - ages) <= table.count <= at


def test_what_is_older_than_asked_for_is_forgotten_on_the_way() -> None:
    table = HashTable()
    for generation in range(1000):
        table.add(hashes(generation * 1000, 1000), generation, max(0, generation - 8))
        assert table.count <= 20_000
    assert not table.misses(hashes(999_000, 1))
    assert table.misses(hashes(0, 100_000))


def test_a_hash_twice_outlives_its_first_generation() -> None:
    table = HashTable()
    (same,) = hashes(0, 1)
    table.add([same], 0, 0)
    table.add([same], 5, 0)
    for generation in range(6, 12):
        table.add(hashes(generation * 100, 50), generation, 5)
    assert not table.misses([same])


def test_a_hash_costs_about_what_the_cap_counts() -> None:
    batches = [hashes(k * 1000, 1000) for k in range(200)]
    tracemalloc.start()
    try:
        table = HashTable()
        for batch in batches:
            table.add(batch, 0, 0)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used / table.count < BYTES_PER_HASH + 1
