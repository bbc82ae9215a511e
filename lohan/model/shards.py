"""Which part of a run's state belongs to which process: pure arithmetic, no torch.

A *rank* is one process of a run, `world` is how many there are. Every group's flat buffer, padded
at its end, is cut into `world` pieces of equal length; rank r owns piece r in a store of its own.
The layout in manifests is that of whole groups, so it does not depend on how many ranks there are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lohan.errors import ConfigError
from lohan.model.layout import GROUP_ALIGN, Blocks, Group, TensorSpec

_STORE = re.compile(r"(.+)-rank(\d+)of(\d+)")


@dataclass(frozen=True)
class Ranks:
    """This process among those of its run."""

    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """The rank that speaks for all: it prints, plans and writes the run folder."""
        return self.rank == 0

    @property
    def several(self) -> bool:
        return self.world > 1

    def all(self) -> tuple[Ranks, ...]:
        return tuple(Ranks(rank, self.world) for rank in range(self.world))

    def shard_numel(self, group: Group) -> int:
        """Elements of every rank's piece of a group; alone it is the whole group."""
        if self.world == 1:
            return group.numel
        unit = self.world * GROUP_ALIGN
        return -(-group.numel // unit) * GROUP_ALIGN

    def padded(self, group: Group) -> int:
        """Elements of a group with the padding that makes all pieces equal."""
        return self.shard_numel(group) * self.world

    def start(self, group: Group) -> int:
        """Where this rank's piece begins in the group's flat buffer."""
        return self.rank * self.shard_numel(group)

    def shard(self, group: Group) -> Group:
        """This rank's piece as a group of its own. It has the tensors of the whole group in the
        same order, each cut to what lies here: flat, with the elements that lie before it in
        `begin`; a tensor that lies elsewhere has no elements."""
        if self.world == 1:
            return group
        start, count = self.start(group), self.shard_numel(group)
        tensors = tuple(_clipped(tensor, start, start + count) for tensor in group.tensors)
        return Group(group.key, tensors, count)

    def shards(self, blocks: Blocks) -> Blocks:
        """The model's cut with this rank's piece of every group."""
        if self.world == 1:
            return blocks
        return replace(blocks, groups=tuple(map(self.shard, blocks.groups)))

    def store_name(self, name: str) -> str:
        """The folder of this rank's store; alone it is that of the run."""
        return name if self.world == 1 else f"{name}-rank{self.rank}of{self.world}"

    def rows(self, count: int) -> tuple[int, int]:
        """Rows [start, stop) of a batch that this rank computes; the first ranks have the odd
        ones."""
        each, more = divmod(count, self.world)
        start = self.rank * each + min(self.rank, more)
        return start, start + each + (self.rank < more)


def ranks_of(env: Mapping[str, str]) -> Ranks:
    """What torchrun tells a process; alone if it was started in another way."""
    try:
        ranks = Ranks(int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1")))
    except ValueError:
        ranks = Ranks(-1, 0)
    if not 0 <= ranks.rank < ranks.world:
        raise ConfigError(
            f"RANK={env.get('RANK')} and WORLD_SIZE={env.get('WORLD_SIZE')} do not go together; "
            "start the ranks with `torchrun` or `lohan train --gpus`, or unset both"
        )
    return ranks


def local_rank(env: Mapping[str, str]) -> int:
    """The number of this process among those of its machine."""
    return int(env.get("LOCAL_RANK", "0")) if ranks_of(env).several else 0


def parse_store_name(folder: str) -> tuple[str, Ranks]:
    """The run's own store name and whose store it is, from the name of a folder."""
    match = _STORE.fullmatch(folder)
    if match is None:
        return folder, Ranks()
    return match[1], Ranks(int(match[2]), int(match[3]))


def _clipped(tensor: TensorSpec, start: int, stop: int) -> TensorSpec:
    low = min(max(tensor.offset, start), stop)
    high = max(min(tensor.offset + tensor.numel, stop), low)
    begin = low - tensor.offset if high > low else 0
    return replace(tensor, shape=(high - low,), offset=low - start, numel=high - low, begin=begin)
