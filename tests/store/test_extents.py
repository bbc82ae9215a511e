"""Extents are aligned, disjoint, in proportion to the weights, and deterministic."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lohan.errors import StoreError
from lohan.store.extents import Extent, Region, allot, check_extents, layout_from_json, plan_layout
from lohan.util.units import PAGE

sizes = st.lists(st.integers(1, 64).map(lambda n: n * PAGE), max_size=12).map(tuple)


@st.composite
def regions(draw: st.DrawFn) -> list[Region]:
    drawn = draw(st.lists(st.tuples(sizes, st.booleans()), min_size=1, max_size=8))
    first = Region("first", (PAGE,))
    return [first, *(Region(f"r{i}", chunks, scratch) for i, (chunks, scratch) in enumerate(drawn))]


weights = st.lists(st.floats(0.1, 50.0), min_size=1, max_size=5)


@given(regions(), weights)
@settings(max_examples=60, deadline=None)
def test_every_chunk_has_one_aligned_place_of_its_own(regions: list[Region], weights: list[float]):
    layout = plan_layout(regions, directories=len(weights), weights=weights)
    check_extents(layout.durable, directories=len(weights))
    check_extents(layout.scratch, directories=len(weights))
    placed = {(e.key, e.chunk): e.nbytes for e in (*layout.durable, *layout.scratch)}
    assert placed == {(r.key, i): size for r in regions for i, size in enumerate(r.chunks)}
    for directory in range(len(weights)):
        held = sum(e.nbytes for e in layout.durable if e.directory == directory)
        assert layout.disk_slot_bytes(directory) == held  # no gaps either


@given(regions(), weights)
@settings(max_examples=60, deadline=None)
def test_extents_of_a_region_and_directory_lie_one_after_the_other(
    regions: list[Region], weights: list[float]
):
    layout = plan_layout(regions, directories=len(weights), weights=weights)
    for region in regions:
        for directory in range(len(weights)):
            run = [
                e
                for e in (*layout.durable, *layout.scratch)
                if e.key == region.key and e.directory == directory
            ]
            assert all(a.offset + a.nbytes == b.offset for a, b in pairwise(run))


@given(st.lists(st.integers(1, 100), max_size=200), st.lists(st.integers(1, 20), min_size=1))
@settings(max_examples=100, deadline=None)
def test_no_directory_gets_more_than_its_share_and_one_chunk(sizes: list[int], shares: list[int]):
    chosen = allot(sizes, shares)
    for directory, share in enumerate(shares):
        got = sum(size for size, d in zip(sizes, chosen, strict=True) if d == directory)
        assert got <= sum(sizes) * share / sum(shares) + max(sizes, default=0)


@given(regions(), weights)
@settings(max_examples=40, deadline=None)
def test_the_layout_is_deterministic_and_round_trips(regions: list[Region], weights: list[float]):
    layout = plan_layout(regions, directories=len(weights), weights=weights)
    assert layout == plan_layout(regions, directories=len(weights), weights=weights)
    read = layout_from_json(json.loads(json.dumps(layout.to_json())), directories=len(weights))
    assert read.digest() == layout.digest()
    assert read.durable == layout.durable
    assert read.scratch == layout.scratch


def test_equal_chunks_follow_the_weights():
    layout = plan_layout(
        [Region("r", (PAGE,) * 600)], directories=3, weights=[1000.0, 2000.0, 3000.0]
    )
    held = [layout.disk_slot_bytes(directory) // PAGE for directory in range(3)]
    assert held == [100, 200, 300]


def test_every_region_is_striped_by_itself():
    regions = [Region(f"r{i}", (PAGE,) * 4) for i in range(5)]
    layout = plan_layout(regions, directories=2)
    for region in regions:
        directories = [e.directory for e in layout.durable if e.key == region.key]
        assert sorted(directories) == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("regions", "weights", "message"),
    [
        ([Region("a", (100,))], None, "chunk 0 has 100 bytes"),
        ([Region("a", (0,))], None, "chunk 0 has 0 bytes"),
        ([Region("a", (PAGE,)), Region("a", (PAGE,))], None, "'a' is empty or used twice"),
        ([Region("a", (PAGE,), scratch=True)], None, "at least one state chunk"),
        ([Region("a", (PAGE,))], [1.0], "1 weights for 2 directories"),
        ([Region("a", (PAGE,))], [1.0, 0.0], "must all be positive"),
        ([Region("a", (PAGE,))], [1.0, float("nan")], "must all be positive"),
    ],
)
def test_rejects_regions_that_cannot_be_placed(
    regions: list[Region], weights: list[float] | None, message: str
):
    with pytest.raises(StoreError, match=message):
        plan_layout(regions, directories=2, weights=weights)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (Extent("r", 1, False, 1, 0, PAGE, PAGE), "overlaps"),
        (Extent("r", 1, False, 1, 2, 0, PAGE), "directory 2 of 2"),
        (Extent("r", 1, False, 1, 1, 7, PAGE), "multiples of 4096"),
    ],
)
def test_a_reader_refuses_extents_that_no_writer_makes(second: Extent, message: str):
    with pytest.raises(StoreError, match=message):
        check_extents([Extent("r", 0, False, 0, 0, 0, 2 * PAGE), second], directories=2)


def test_unknown_names_are_named():
    layout = plan_layout([Region("a", (PAGE, PAGE))], directories=1)
    with pytest.raises(StoreError, match="no region 'b'"):
        layout.find("b", 0)
    with pytest.raises(StoreError, match=r"'a' has chunks 0\.\.1, not 2"):
        layout.find("a", 2)
