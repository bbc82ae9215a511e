"""A model as an ordered list of blocks, each with one flat region of parameters.

Two nouns. A *group* is a set of parameters stored, read and updated together; every parameter
belongs to exactly one group. A *site* is a module whose call needs the weights of one or more
groups. Usually one group has one site; tied weights are one group with two sites.

What becomes what: every child of a ModuleList (and of a Sequential of equal children) is a site
with a group of its own, outermost list first. Outside the lists, every leaf module that owns a
matrix (embedding, head, projection) likewise. What is left, norms and loose vectors, is one small
group that stays in memory for the whole run (`RESIDENT`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lohan.errors import ModelError
from lohan.units import align_up

RESIDENT = "resident"
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


@dataclass(frozen=True)
class Group:
    key: str
    tensors: tuple[TensorSpec, ...]
    numel: int

    @property
    def parameters(self) -> int:
        return sum(tensor.numel for tensor in self.tensors)


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


def groups_from_json(layout: Sequence[dict[str, Any]]) -> tuple[Group, ...]:
    return tuple(
        Group(
            item["key"],
            tuple(
                TensorSpec(name, tuple(shape), offset, numel, decay, trainable)
                for name, shape, offset, numel, decay, trainable in item["tensors"]
            ),
            item["numel"],
        )
        for item in layout
    )


def default_decay(name: str, parameter: nn.Parameter) -> bool:
    """Matrices decay; norms, biases and other vectors do not."""
    return parameter.ndim >= 2


def site_names(model: nn.Module, resident: Sequence[str] = ()) -> list[str]:
    """Names of the modules that become sites, in definition order."""
    found: list[str] = []

    def owns(module: nn.Module) -> bool:
        return next(module.parameters(), None) is not None

    def walk(module: nn.Module, name: str) -> None:
        if name in resident:
            return
        children = list(module.named_children())
        repeated = isinstance(module, nn.ModuleList) or (
            isinstance(module, nn.Sequential)
            and len(children) > 1
            and len({type(child) for _, child in children}) == 1
        )
        if repeated and all(owns(child) for _, child in children):
            found.extend(f"{name}.{key}" if name else key for key, _ in children)
            return
        if (
            not children
            and name
            and any(p is not None and p.ndim >= 2 for p in module._parameters.values())
        ):
            found.append(name)
            return
        for key, child in children:
            walk(child, f"{name}.{key}" if name else key)

    walk(model, "")
    return found


def cut(
    model: nn.Module,
    *,
    resident: Sequence[str] = (),
    decay: Callable[[str, nn.Parameter], bool] = default_decay,
) -> Blocks:
    """Cuts `model` into groups and sites. `resident` names modules to keep in memory instead."""
    names = site_names(model, resident)
    if not any(True for _ in model.parameters()):
        raise ModelError(f"{type(model).__name__} has no parameters; nothing to train")
    owner: dict[int, tuple[str, int]] = {}  # id(parameter) -> (group, index)
    members: dict[str, list[tuple[str, nn.Parameter]]] = {}
    # Resident parameters are claimed first: a weight that the model also reads outside any site
    # call must stay in memory even if a site shares it.
    covered = _slots_by_site(model, names)
    inside = {(slot[0], slot[1]) for slots in covered.values() for slot in slots}
    loose = [
        (module_name, attribute, parameter)
        for module_name, module in model.named_modules(remove_duplicate=False)
        for attribute, parameter in module._parameters.items()
        if parameter is not None and (module_name, attribute) not in inside
    ]
    for key, entries in ((RESIDENT, loose), *covered.items()):
        for module_name, attribute, parameter in entries:
            if id(parameter) not in owner:
                bucket = members.setdefault(key, [])
                owner[id(parameter)] = (key, len(bucket))
                full = f"{module_name}.{attribute}" if module_name else attribute
                bucket.append((full, parameter))

    def slots(entries: list[tuple[str, str, nn.Parameter]]) -> tuple[Slot, ...]:
        return tuple(Slot(m, a, *owner[id(p)]) for m, a, p in entries)

    sites = []
    for name in names:
        site_slots = tuple(s for s in slots(covered[name]) if s.group != RESIDENT)
        used = tuple(dict.fromkeys(slot.group for slot in site_slots))
        if used:
            sites.append(Site(name, site_slots, used))
    shared = tuple(
        slot
        for entries in (loose, *covered.values())
        for slot in slots(entries)
        if slot.group == RESIDENT
    )
    order = [key for key in (*names, RESIDENT) if key in members]
    groups = tuple(_lay_out(key, members[key], decay) for key in order)
    return Blocks(groups, tuple(sites), shared)


def _slots_by_site(
    model: nn.Module, names: Sequence[str]
) -> dict[str, list[tuple[str, str, nn.Parameter]]]:
    covered: dict[str, list[tuple[str, str, nn.Parameter]]] = {}
    for name in names:
        site = model.get_submodule(name)
        covered[name] = [
            (f"{name}.{inner}" if inner else name, attribute, parameter)
            for inner, module in site.named_modules(remove_duplicate=False)
            for attribute, parameter in module._parameters.items()
            if parameter is not None
        ]
    return covered


def _lay_out(
    key: str,
    members: list[tuple[str, nn.Parameter]],
    decay: Callable[[str, nn.Parameter], bool],
) -> Group:
    offset, specs = 0, []
    for name, parameter in members:
        specs.append(
            TensorSpec(
                name=name,
                shape=tuple(parameter.shape),
                offset=offset,
                numel=parameter.numel(),
                decay=decay(name, parameter),
                trainable=parameter.requires_grad,
            )
        )
        offset = align_up(offset + parameter.numel(), TENSOR_ALIGN)
    return Group(key, tuple(specs), align_up(max(offset, 1), GROUP_ALIGN))


def check_float(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.dtype.is_floating_point:
            raise ModelError(
                f"parameter {name} has dtype {parameter.dtype}; LoHan trains floating-point "
                "weights: load the model unquantized"
            )


def views(group: Group, flat: torch.Tensor) -> list[torch.Tensor]:
    """The group's parameters as views of its flat buffer."""
    return [flat[t.offset : t.offset + t.numel].view(t.shape) for t in group.tensors]
