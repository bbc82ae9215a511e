"""Groups, sites and the layout of every tensor of a model that was cut into blocks.

A *group* is a set of parameters that are stored, read and updated together; every parameter belongs
to exactly one group. A *site* is a module whose call needs the weights of one or more groups (in
FSDP, a wrapped module); schedules refer to a site by its number. Most groups have one site. Tied
weights are one group with two sites. The frozen parameters of a site form a separate group
(`KEY/frozen`), so a block with both trained and frozen parameters is one site with two groups.
`blocks.cut` creates them.
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
# In elements: each tensor starts on a 64-byte boundary for any dtype.
TENSOR_ALIGN = 32
GROUP_ALIGN = 2048  # In elements: a 16-bit chunk of this size is one 4 KiB disk page.


@dataclass(frozen=True)
class TensorSpec:
    """One parameter inside its group's flat buffer; offset and numel are in elements.

    A frozen parameter may be packed (model/state.py). Then `numel` is the number of elements it
    occupies in the buffer, and `shape` is the shape of the unpacked tensor.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int
    decay: bool
    trainable: bool
    begin: int = 0  # In a rank's shard: elements of the tensor that precede the shard.
    packing: str = ""

    @property
    def parameters(self) -> int:
        return prod(self.shape) if self.packing else self.numel


@dataclass(frozen=True)
class FlatGroup:
    """Parameters in one flat buffer that are stored, read and updated together.

    This corresponds to FlatParameter in FSDP and FSDPParamGroup in FSDP2. The param_groups of an
    optimizer are in lohan/param_groups.py.
    """

    key: str
    tensors: tuple[TensorSpec, ...]
    numel: int

    @property
    def parameters(self) -> int:
        return sum(tensor.parameters for tensor in self.tensors)

    @property
    def dequantised(self) -> int:
        """The number of elements of all packed tensors once dequantised, including alignment."""
        sizes = (-(-tensor.parameters // TENSOR_ALIGN) for tensor in self.tensors if tensor.packing)
        return TENSOR_ALIGN * sum(sizes)

    @property
    def frozen(self) -> bool:
        """True if the weights are only read: no gradient, no optimizer state, no update."""
        return self.key.endswith(FROZEN)

    @property
    def resident(self) -> bool:
        return self.key in RESIDENTS


@dataclass(frozen=True)
class ParameterRef:
    """An attribute in the module tree that holds a parameter while its site runs."""

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
    """A model cut into groups and sites; the groups are in the order of the model's definition."""

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
        """Return the layout for the manifest; with it, the store can be read without the model."""
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
    """A group in JSON.

    Each tensor is a list of name, shape, offset, numel, decay and trainable, followed by the
    packing if it is packed.
    """

    key: str
    numel: int
    tensors: tuple[_Plain | _Packed, ...]


def groups_from_json(layout: object) -> tuple[FlatGroup, ...]:
    """Return the groups that `Blocks.to_json` described; raise WrongType if they are invalid."""
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


# -- Sharding: which part of a run's state belongs to which rank -----------------------------------
#
# A *rank* is one process of a run, and `world` is the number of ranks. The flat buffer of every
# group, padded at its end, is cut into `world` shards of equal length. Rank r owns shard r, in a
# store of its own. The layout in manifests describes whole groups, so it does not depend on the
# number of ranks.


_STORE = re.compile(r"(.+)-rank(\d+)of(\d+)")


@dataclass(frozen=True)
class RankInfo:
    """The rank of this process and the number of ranks in its run."""

    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """True for the rank that prints, plans and writes the run folder on behalf of all ranks."""
        return self.rank == 0

    @property
    def several(self) -> bool:
        return self.world > 1

    def all(self) -> tuple[RankInfo, ...]:
        return tuple(RankInfo(rank, self.world) for rank in range(self.world))

    def shard_numel(self, group: FlatGroup) -> int:
        """Return the number of elements in every rank's shard of a group.

        With a single rank, this is the size of the group.
        """
        if self.world == 1:
            return group.numel
        unit = self.world * GROUP_ALIGN
        return -(-group.numel // unit) * GROUP_ALIGN

    def padded(self, group: FlatGroup) -> int:
        """Return the number of elements of a group, padded so that all shards are equal."""
        return self.shard_numel(group) * self.world

    def start(self, group: FlatGroup) -> int:
        """Return the offset of this rank's shard in the group's flat buffer."""
        return self.rank * self.shard_numel(group)

    def shard(self, group: FlatGroup) -> FlatGroup:
        """Return this rank's shard as a group.

        It has the tensors of the whole group in the same order, each reduced to a flat tensor of
        the elements in this shard. `begin` is the number of elements of the tensor that precede the
        shard. A tensor outside the shard has no elements.
        """
        if self.world == 1:
            return group
        start, count = self.start(group), self.shard_numel(group)
        tensors = tuple(_clipped(tensor, start, start + count) for tensor in group.tensors)
        return FlatGroup(group.key, tensors, count)

    def shards(self, blocks: Blocks) -> Blocks:
        """Return the blocks with this rank's shard in place of every group."""
        if self.world == 1:
            return blocks
        return replace(blocks, groups=tuple(map(self.shard, blocks.groups)))

    def store_name(self, name: str) -> str:
        """Return the folder name of this rank's store; with a single rank, it is `name` itself."""
        return name if self.world == 1 else f"{name}-rank{self.rank}of{self.world}"

    def rows(self, count: int) -> tuple[int, int]:
        """Return the rows [start, stop) that this rank computes of a batch with `count` rows.

        If the rows cannot be divided evenly, the first ranks get one more row.
        """
        each, more = divmod(count, self.world)
        start = self.rank * each + min(self.rank, more)
        return start, start + each + (self.rank < more)


def ranks_of(env: Mapping[str, str]) -> RankInfo:
    """Return the rank that torchrun set in the environment, or a single rank if it is not set."""
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
    """Return the rank of this process among those on the same machine."""
    return int(env.get("LOCAL_RANK", "0")) if ranks_of(env).several else 0


def parse_store_name(folder: str) -> tuple[str, RankInfo]:
    """Return the run's store name and the rank encoded in a store folder's name."""
    match = _STORE.fullmatch(folder)
    if match is None:
        return folder, RankInfo()
    return match[1], RankInfo(int(match[2]), int(match[3]))


def _clipped(tensor: TensorSpec, start: int, stop: int) -> TensorSpec:
    low = min(max(tensor.offset, start), stop)
    high = max(min(tensor.offset + tensor.numel, stop), low)
    begin = low - tensor.offset if high > low else 0
    # Keep the shape of a packed tensor: a part of its codes cannot be dequantised alone.
    shape = tensor.shape if tensor.packing else (high - low,)
    return replace(tensor, shape=shape, offset=low - start, numel=high - low, begin=begin)
