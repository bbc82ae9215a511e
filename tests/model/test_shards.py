"""The shards of all ranks contain each element exactly once."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lohan.errors import ConfigError
from lohan.model.layout import (
    GROUP_ALIGN,
    TENSOR_ALIGN,
    Blocks,
    FlatGroup,
    RankInfo,
    TensorSpec,
    local_rank,
    parse_store_name,
    ranks_of,
)
from lohan.model.state import chunks


def group_of(sizes: list[int]) -> FlatGroup:
    tensors, at = [], 0
    for number, size in enumerate(sizes):
        tensors.append(TensorSpec(f"t{number}", (size,), at, size, True, True))
        at += -(-size // TENSOR_ALIGN) * TENSOR_ALIGN
    return FlatGroup("g", tuple(tensors), -(-at // GROUP_ALIGN) * GROUP_ALIGN)


sizes = st.lists(st.integers(1, 9000), min_size=1, max_size=6)
worlds = st.integers(1, 5)


@given(sizes, worlds, st.sampled_from([2048, 4096, 100_000]))
def test_pieces_are_a_partition(tensor_sizes, world, chunk_params):
    """The shards partition every tensor, also within the chunks of the ranks' stores."""
    group = group_of(tensor_sizes)
    seen: dict[str, list[tuple[int, int]]] = {spec.name: [] for spec in group.tensors}
    for ranks in RankInfo(world=world).all():
        shard = ranks.shard(group)
        assert shard.numel == ranks.shard_numel(group) and shard.numel % GROUP_ALIGN == 0
        assert [t.name for t in shard.tensors] == [t.name for t in group.tensors]
        for chunk in chunks(shard, chunk_params):
            for own_range in chunk.ranges:
                spec = shard.tensors[own_range.tensor]
                whole = group.tensors[own_range.tensor]
                start, stop = spec.begin + own_range.start, spec.begin + own_range.stop
                assert ranks.start(group) + chunk.start + own_range.at == whole.offset + start
                seen[spec.name].append((start, stop))
    for spec in group.tensors:
        ends = sorted(seen[spec.name])
        assert ends[0][0] == 0 and ends[-1][1] == spec.numel
        assert all(before[1] == after[0] for before, after in itertools.pairwise(ends))


@given(sizes, worlds)
def test_padding_is_less_than_a_page_for_each_rank(found, world):
    group, ranks = group_of(found), RankInfo(world=world)
    assert group.numel <= ranks.padded(group) < group.numel + world * GROUP_ALIGN


def test_single_rank_has_the_whole_group():
    group = group_of([5, 3000])
    blocks = Blocks((group,), (), ())
    assert RankInfo().shard(group) is group and RankInfo().shards(blocks) is blocks
    assert RankInfo().store_name("store") == "store"


@given(st.integers(0, 40), worlds)
def test_rows_are_a_partition(count, world):
    parts = [ranks.rows(count) for ranks in RankInfo(world=world).all()]
    assert [row for start, stop in parts for row in range(start, stop)] == list(range(count))
    lengths = [stop - start for start, stop in parts]
    assert max(lengths) - min(lengths) <= 1 and lengths == sorted(lengths, reverse=True)


def test_names_of_stores():
    name = RankInfo(1, 4).store_name("lohan-run-rank0of2")
    assert parse_store_name(name) == ("lohan-run-rank0of2", RankInfo(1, 4))
    assert parse_store_name("store") == ("store", RankInfo())


def test_rank_is_read_from_the_environment():
    assert ranks_of({}) == RankInfo() and ranks_of({"RANK": "2", "WORLD_SIZE": "3"}) == RankInfo(
        2, 3
    )
    assert local_rank({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}) == 1
    assert local_rank({"LOCAL_RANK": "1"}) == 0
    for wrong in ({"RANK": "3", "WORLD_SIZE": "3"}, {"WORLD_SIZE": "many"}):
        with pytest.raises(ConfigError, match="do not go together"):
            ranks_of(wrong)
