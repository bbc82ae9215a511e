"""Cuts a model into an ordered list of blocks, each with one flat region of parameters.

What becomes what: every child of a ModuleList (and of a Sequential of equal children) is a site
with a group of its own, outermost list first. Outside the lists, every leaf module that owns a
matrix (embedding, head, projection) likewise. What is left, norms and loose vectors, is one small
group that stays in memory for the whole run (`RESIDENT`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from lohan.errors import ModelError
from lohan.layout import GROUP_ALIGN, RESIDENT, TENSOR_ALIGN, Blocks, Group, Site, Slot, TensorSpec
from lohan.units import align_up


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
