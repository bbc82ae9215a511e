"""The nouns of a model that was cut: groups, sites and where every tensor lies.

A *group* is a set of parameters stored, read and updated together; every parameter belongs to
exactly one group. A *site* is a module whose call needs the weights of one or more groups. Usually
one group has one site; tied weights are one group with two sites. Parameters that are not trained
have groups of their own (`KEY/frozen`), so a block with some of both is one site with two groups.
`blocks.cut` makes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

from lohan.util.typed import WrongType, checked

RESIDENT = "resident"
FROZEN = "/frozen"
RESIDENTS = (RESIDENT, RESIDENT + FROZEN)
TENSOR_ALIGN = 32  # elements: each tensor starts on a 64-byte border in every dtype
GROUP_ALIGN = 2048  # elements: a 16-bit chunk of this size is one 4 KiB disk page


@dataclass(frozen=True)
class TensorSpec:
    """One parameter inside its group's flat buffer (offset and numel in elements)."""

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int
    decay: bool
    trainable: bool
    begin: int = 0  # of a rank's piece: elements of the tensor that lie before it


@dataclass(frozen=True)
class Group:
    key: str
    tensors: tuple[TensorSpec, ...]
    numel: int

    @property
    def parameters(self) -> int:
        return sum(tensor.numel for tensor in self.tensors)

    @property
    def frozen(self) -> bool:
        """Weights that are only read: no gradient, no optimizer state, no update."""
        return self.key.endswith(FROZEN)

    @property
    def resident(self) -> bool:
        return self.key in RESIDENTS


@dataclass(frozen=True)
class Slot:
    """A place in the module tree that holds a parameter while its site runs."""

    module: str
    attribute: str
    group: str
    tensor: int


@dataclass(frozen=True)
class Site:
    name: str
    slots: tuple[Slot, ...]
    groups: tuple[str, ...]


@dataclass(frozen=True)
class Blocks:
    """The cut of a model: groups in the order of the model's own definition."""

    groups: tuple[Group, ...]
    sites: tuple[Site, ...]
    resident: tuple[Slot, ...]
    by_key: dict[str, Group] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_key", {group.key: group for group in self.groups})

    @property
    def parameters(self) -> int:
        return sum(group.parameters for group in self.groups)

    @property
    def trained(self) -> tuple[Group, ...]:
        return tuple(group for group in self.groups if not group.frozen)

    def tensors(self) -> Iterable[tuple[Group, TensorSpec]]:
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
                    for t in g.tensors
                ],
            }
            for g in self.groups
        ]


@dataclass(frozen=True)
class _GroupEntry:
    """A group in JSON; its tensors are name, shape, offset, numel, decay and trainable."""

    key: str
    numel: int
    tensors: tuple[tuple[str, tuple[int, ...], int, int, bool, bool], ...]


def groups_from_json(layout: object) -> tuple[Group, ...]:
    """What `Blocks.to_json` described; WrongType if it cannot have been."""
    entries: tuple[_GroupEntry, ...] = checked(layout, tuple[_GroupEntry, ...], "layout")
    groups = tuple(
        Group(entry.key, tuple(TensorSpec(*tensor) for tensor in entry.tensors), entry.numel)
        for entry in entries
    )
    for group in groups:
        if group.numel < 1:
            raise WrongType(f"group {group.key[:80]!r} has {group.numel} elements")
        for tensor in group.tensors:
            inside = 0 <= tensor.offset <= tensor.offset + tensor.numel <= group.numel
            whole = all(size >= 0 for size in tensor.shape) and prod(tensor.shape) == tensor.numel
            if not inside or not whole:
                raise WrongType(
                    f"tensor {tensor.name[:80]!r} of shape {list(tensor.shape)} does not lie at "
                    f"{tensor.offset}, {tensor.numel} long, in {group.numel} elements"
                )
    if not groups:
        raise WrongType("layout names no group")
    return groups
