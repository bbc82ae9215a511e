"""The nouns of a model that was cut: groups, sites and where every tensor lies.

A *group* is a set of parameters stored, read and updated together; every parameter belongs to
exactly one group. A *site* is a module whose call needs the weights of one or more groups (FSDP: a
wrapped module), in schedules its number. Usually one group has one site; tied weights are one group
with two sites. Parameters that are not trained have groups of their own (`KEY/frozen`), so a block
with some of both is one site with two groups. `blocks.cut` makes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from lohan.errors import ConfigError
from lohan.util.files import WrongType, checked

RESIDENT = "resident"
FROZEN = "/frozen"
RESIDENTS = (RESIDENT, RESIDENT + FROZEN)
TENSOR_ALIGN = 32  # elements: each tensor starts on a 64-byte border in every dtype
GROUP_ALIGN = 2048  # elements: a 16-bit chunk of this size is one 4 KiB disk page


@dataclass(frozen=True)
class TensorSpec:
    """One parameter inside its group's flat buffer (offset and numel in elements). A frozen one may
    be packed (model/state.py): then numel is what it takes there, and its shape what it is."""

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int
    decay: bool
    trainable: bool
    begin: int = 0  # of a rank's shard: elements of the tensor that lie before it
    packing: str = ""

    @property
    def parameters(self) -> int:
        return prod(self.shape) if self.packing else self.numel


@dataclass(frozen=True)
class FlatGroup:
    """Parameters in one flat buffer, stored, read and updated together: FSDP's FlatParameter,
    FSDP2's FSDPParamGroup. (Not an optimizer's param_groups: there are none here.)"""

    key: str
    tensors: tuple[TensorSpec, ...]
    numel: int

    @property
    def parameters(self) -> int:
        return sum(tensor.parameters for tensor in self.tensors)

    @property
    def dequantised(self) -> int:
        """Elements of its packed tensors while a call computes with them."""
        sizes = (-(-tensor.parameters // TENSOR_ALIGN) for tensor in self.tensors if tensor.packing)
        return TENSOR_ALIGN * sum(sizes)

    @property
    def frozen(self) -> bool:
        """Weights that are only read: no gradient, no optimizer state, no update."""
        return self.key.endswith(FROZEN)

    @property
    def resident(self) -> bool:
        return self.key in RESIDENTS


@dataclass(frozen=True)
class ParameterRef:
    """A place in the module tree that holds a parameter while its site runs."""

    module: str
    attribute: str
    group: str
    tensor: int


@dataclass(frozen=True)
class Site:
    name: str
    parameters: tuple[ParameterRef, ...]
    groups: tuple[str, ...]


@dataclass(frozen=True)
class Blocks:
    """The cut of a model: groups in the order of the model's own definition."""

    groups: tuple[FlatGroup, ...]
    sites: tuple[Site, ...]
    resident: tuple[ParameterRef, ...]
    by_key: dict[str, FlatGroup] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_key", {group.key: group for group in self.groups})

    @property
    def parameters(self) -> int:
        return sum(group.parameters for group in self.groups)

    @cached_property
    def trained(self) -> tuple[FlatGroup, ...]:
        return tuple(group for group in self.groups if not group.frozen)

    def tensors(self) -> Iterable[tuple[FlatGroup, TensorSpec]]:
        for group in self.groups:
            for tensor in group.tensors:
                yield group, tensor

    def to_json(self) -> list[dict[str, object]]:
        """The layout as stored in the manifest, enough to read the store without the model."""
        return [
            {
                "key": g.key,
                "numel": g.numel,
                "tensors": [
                    [t.name, list(t.shape), t.offset, t.numel, t.decay, t.trainable]
                    + ([t.packing] if t.packing else [])
                    for t in g.tensors
                ],
            }
            for g in self.groups
        ]


_Plain = tuple[str, tuple[int, ...], int, int, bool, bool]
_Packed = tuple[str, tuple[int, ...], int, int, bool, bool, str]


@dataclass(frozen=True)
class _GroupEntry:
    """A group in JSON; its tensors are name, shape, offset, numel, decay, trainable and, if it is
    packed, how."""

    key: str
    numel: int
    tensors: tuple[_Plain | _Packed, ...]


def groups_from_json(layout: object) -> tuple[FlatGroup, ...]:
    """What `Blocks.to_json` described; WrongType if it cannot have been."""
    entries: tuple[_GroupEntry, ...] = checked(layout, tuple[_GroupEntry, ...], "layout")
    groups = tuple(
        FlatGroup(
            entry.key,
            tuple(TensorSpec(*tensor[:6], packing="".join(tensor[6:])) for tensor in entry.tensors),
            entry.numel,
        )
        for entry in entries
    )
    for group in groups:
        if group.numel < 1:
            raise WrongType(f"group {group.key[:80]!r} has {group.numel} elements")
        for tensor in group.tensors:
            inside = 0 <= tensor.offset <= tensor.offset + tensor.numel <= group.numel
            whole = all(size >= 0 for size in tensor.shape) and (
                prod(tensor.shape) == tensor.numel or bool(tensor.packing)
            )
            if not inside or not whole:
                raise WrongType(
                    f"tensor {tensor.name[:80]!r} of shape {list(tensor.shape)} does not lie at "
                    f"{tensor.offset}, {tensor.numel} long, in {group.numel} elements"
                )
    if not groups:
        raise WrongType("layout names no group")
    return groups


# -- Which part of a run's state belongs to which process: pure arithmetic, no torch ---------------
#
# A *rank* is one process of a run, `world` is how many there are. Every group's flat buffer,
# padded at its end, is cut into `world` shards of equal length; rank r owns shard r in a store of
# its own. The layout in manifests is that of whole groups, so it does not depend on how many ranks
# there are.


_STORE = re.compile(r"(.+)-rank(\d+)of(\d+)")


@dataclass(frozen=True)
class RankInfo:
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

    def all(self) -> tuple[RankInfo, ...]:
        return tuple(RankInfo(rank, self.world) for rank in range(self.world))

    def shard_numel(self, group: FlatGroup) -> int:
        """Elements of every rank's shard of a group; alone it is the whole group."""
        if self.world == 1:
            return group.numel
        unit = self.world * GROUP_ALIGN
        return -(-group.numel // unit) * GROUP_ALIGN

    def padded(self, group: FlatGroup) -> int:
        """Elements of a group with the padding that makes all shards equal."""
        return self.shard_numel(group) * self.world

    def start(self, group: FlatGroup) -> int:
        """Where this rank's shard begins in the group's flat buffer."""
        return self.rank * self.shard_numel(group)

    def shard(self, group: FlatGroup) -> FlatGroup:
        """This rank's shard as a group of its own. It has the tensors of the whole group in the
        same order, each cut to what lies here: flat, with the elements that lie before it in
        `begin`; a tensor that lies elsewhere has no elements."""
        if self.world == 1:
            return group
        start, count = self.start(group), self.shard_numel(group)
        tensors = tuple(_clipped(tensor, start, start + count) for tensor in group.tensors)
        return FlatGroup(group.key, tensors, count)

    def shards(self, blocks: Blocks) -> Blocks:
        """The model's cut with this rank's shard of every group."""
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


def ranks_of(env: Mapping[str, str]) -> RankInfo:
    """What torchrun tells a process; alone if it was started in another way."""
    try:
        ranks = RankInfo(int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1")))
    except ValueError:
        ranks = RankInfo(-1, 0)
    if not 0 <= ranks.rank < ranks.world:
        raise ConfigError(
            f"RANK={env.get('RANK')} and WORLD_SIZE={env.get('WORLD_SIZE')} do not go together; "
            "start the ranks with `torchrun` or `lohan train --gpus`, or unset both"
        )
    return ranks


def local_rank(env: Mapping[str, str]) -> int:
    """The number of this process among those of its machine."""
    return int(env.get("LOCAL_RANK", "0")) if ranks_of(env).several else 0


def parse_store_name(folder: str) -> tuple[str, RankInfo]:
    """The run's own store name and whose store it is, from the name of a folder."""
    match = _STORE.fullmatch(folder)
    if match is None:
        return folder, RankInfo()
    return match[1], RankInfo(int(match[2]), int(match[3]))


def _clipped(tensor: TensorSpec, start: int, stop: int) -> TensorSpec:
    low = min(max(tensor.offset, start), stop)
    high = max(min(tensor.offset + tensor.numel, stop), low)
    begin = low - tensor.offset if high > low else 0
    shape = tensor.shape if tensor.packing else (high - low,)  # a part of codes is no tensor
    return replace(tensor, shape=shape, offset=low - start, numel=high - low, begin=begin)
