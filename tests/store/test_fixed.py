"""Fixed regions are written during creation, shared by all generations, and verified."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lohan.errors import ChecksumError, StoreError
from lohan.store.admin import restore, snapshot, verify
from lohan.store.extents import Region, layout_from_json, plan_layout
from lohan.store.files import FIXED, SLOTS
from lohan.store.store import Store
from lohan.util.units import PAGE
from tests.support.stores import (
    FIXED_REGION,
    REGIONS,
    REGIONS_WITH_FIXED,
    chunk_content,
    commit_next,
    read_chunk,
    write_fixed_region,
    write_generation,
)


def assert_fixed(store: Store) -> None:
    for chunk, size in enumerate(FIXED_REGION.chunks):
        expected = chunk_content("base", chunk, size, 0)
        assert np.array_equal(read_chunk(store, "base", chunk, size), expected)


def create_store(path: Path, *, durability: str = "step") -> Store:
    store = Store.create(path, REGIONS_WITH_FIXED, durability=durability)
    write_fixed_region(store)
    write_generation(store, 0)
    store.commit({"step": 0})
    return store


@pytest.mark.parametrize("durability", ["step", "checkpoint"])
def test_stores_fixed_regions_once_for_all_generations(tmp_path: Path, durability: str):
    with create_store(tmp_path / "s", durability=durability) as store:
        before = (tmp_path / "s" / FIXED).stat()
        for _ in range(3):
            assert_fixed(store)
            commit_next(store)
        store.commit(clean=True) if durability == "checkpoint" else None
        assert_fixed(store)
    assert (tmp_path / "s" / FIXED).stat().st_mtime_ns == before.st_mtime_ns
    assert before.st_size == 5 * PAGE
    assert (tmp_path / "s" / SLOTS[0]).stat().st_size == 8 * PAGE
    with Store.open(tmp_path / "s") as store:
        assert_fixed(store)
        slots = 2 if durability == "step" else 1
        sizes = [file.stat().st_size for file in (tmp_path / "s").glob("*.bin")]
        assert sum(sizes) == (8 * slots + 5 + 3) * PAGE
        commit_next(store)
        store.commit(clean=True) if durability == "checkpoint" else None
    with Store.open(tmp_path / "s") as store:
        assert_fixed(store)
        assert verify(store) == []


def test_fixed_region_is_not_written_after_the_first_commit(tmp_path: Path):
    with (
        create_store(tmp_path / "s") as store,
        pytest.raises(StoreError, match="'base' chunk 0 is fixed"),
    ):
        write_fixed_region(store)


def test_store_without_its_fixed_region_is_refused(tmp_path: Path):
    with Store.create(tmp_path / "s", REGIONS_WITH_FIXED) as store:
        write_generation(store, 0)
        with pytest.raises(StoreError, match="'base' chunk 0 was not written"):
            store.commit({})
        with pytest.raises(StoreError, match="nothing is committed yet"):
            read_chunk(store, "base", 0, 4 * PAGE)
        write_fixed_region(store)
        assert_fixed_fresh(store)
        store.commit({})
        assert_fixed(store)


def assert_fixed_fresh(store: Store) -> None:
    actual = read_chunk(store, "base", 1, PAGE, uncommitted=True)
    assert np.array_equal(actual, chunk_content("base", 1, PAGE, 0))


def test_damage_is_found_by_the_first_read_also_after_steps(tmp_path: Path):
    create_store(tmp_path / "s").close()
    with open(tmp_path / "s" / FIXED, "r+b") as file:
        file.seek(PAGE + 5)
        byte = file.read(1)
        file.seek(PAGE + 5)
        file.write(bytes([byte[0] ^ 1]))
    with Store.open(tmp_path / "s") as store:
        assert [(f.key, f.chunk, f.path.name) for f in verify(store)] == [("base", 0, FIXED)]
        commit_next(store)
        with pytest.raises(ChecksumError, match="'base' chunk 0"):
            assert_fixed(store)


def test_discarded_step_keeps_the_fixed_region(tmp_path: Path):
    with create_store(tmp_path / "s") as store:
        write_generation(store, 1)
        store.discard()
        assert_fixed(store)
        commit_next(store)
        assert_fixed(store)


def test_snapshot_has_the_fixed_region(tmp_path: Path):
    with create_store(tmp_path / "s", durability="checkpoint") as store:
        commit_next(store)
        store.commit(clean=True)
        snapshot(store, tmp_path / "copy")
    with restore(tmp_path / "copy", tmp_path / "again", durability="step") as store:
        assert store.generation == 2
        assert_fixed(store)
        commit_next(store)
        assert_fixed(store)


def test_layout_to_json_and_back(tmp_path: Path):
    layout = plan_layout(REGIONS_WITH_FIXED, directories=2, weights=(2.0, 1.0))
    assert layout_from_json(layout.to_json(), directories=2) == layout
    assert layout.per_generation == 5
    assert [extent.index for extent in layout.durable] == list(range(7))
    assert sum(layout.fixed_bytes(d) for d in range(2)) == 5 * PAGE


def test_scratch_and_fixed_exclude_each_other():
    with pytest.raises(StoreError, match="scratch and fixed"):
        plan_layout((*REGIONS, Region("x", (PAGE,), scratch=True, fixed=True)), directories=1)
