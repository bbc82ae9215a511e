"""Division of a model into groups of parameters, and sites: the modules that use the groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from lohan.capture.fake import (
    CPU,
    UNKNOWN,
    KnownValues,
    buffers_at,
    fake_like,
    faking,
    with_least_values,
)
from lohan.capture.kernels import plain_forwards
from lohan.capture.saved_call import swapped
from lohan.errors import ConfigError, ModelError
from lohan.model.layout import (
    FROZEN,
    GROUP_ALIGN,
    RESIDENT,
    RESIDENTS,
    TENSOR_ALIGN,
    Blocks,
    FlatGroup,
    ParameterRef,
    Site,
    TensorSpec,
)
from lohan.model.state import STATE_FORMATS, StateFormat
from lohan.util.units import align_up

# -- Dividing a model into an ordered list of blocks, each with one flat region of parameters ------
#
# Every child of a ModuleList (and of a Sequential of equal children) is a site with a group of its
# own. For a list inside a list, the children of the inner list are sites. Outside the lists, every
# leaf module that has a matrix (embedding, head, projection) is a site too. The remaining
# parameters, norms and single vectors, form one small group that stays in memory for the whole run
# (`RESIDENT`). Parameters that require no gradient form a second group of the same site, which is
# never updated. A layer that is wrapped by an adapter is one site, wherever it is.


def default_decay(name: str, parameter: nn.Parameter) -> bool:
    """Return whether weight decay applies: to matrices, not to norms, biases and other vectors."""
    return parameter.ndim >= 2


def site_names(
    model: nn.Module, resident: Sequence[str] = (), blocks: Sequence[str] = ()
) -> list[str]:
    """Return the names of the modules that become sites, in definition order.

    `blocks` names modules that are blocks, or lists of blocks. If it is empty, lists of repeated
    modules are detected. Modules in `resident` are omitted.
    """
    modules = dict(model.named_modules())
    for name in blocks:
        if name not in modules or not _owns(modules[name]):
            lists = [n for n, module in modules.items() if _is_repeated(module)]
            raise ConfigError(
                f"blocks names {name!r}, and {type(model).__name__} has no module with parameters "
                f"of that name; its lists are {', '.join(lists) or 'none'}"
            )
    names: list[str] = []

    def walk(module: nn.Module, name: str) -> None:
        if name in resident:
            return
        if name in blocks if blocks else _is_repeated(module):
            names.extend(inner for inner in _members(module, name) if inner not in resident)
            return
        children = list(module.named_children())
        alone = not children or hasattr(module, "base_layer") or hasattr(module, "original_module")
        if alone and name and any(p.ndim >= 2 for p in module.parameters()):
            names.append(name)
            return
        for key, child in children:
            walk(child, f"{name}.{key}" if name else key)

    walk(model, "")
    return names


def _is_repeated(module: nn.Module) -> bool:
    """Return whether a module is a ModuleList, or a Sequential of several equal children."""
    kinds = [type(child) for child in module.children()]
    return isinstance(module, nn.ModuleList) or (
        isinstance(module, nn.Sequential)
        and len(kinds) > 1
        and len(set(kinds)) == 1
        and all(_owns(child) for child in module.children())
    )


def _members(module: nn.Module, name: str) -> list[str]:
    """Return the names of the blocks in a list of modules.

    If a member is a list itself, it is never called. The members of the inner list are the blocks.
    """
    listed = isinstance(module, nn.ModuleList | nn.ModuleDict)
    if not listed and not _is_repeated(module):
        return [name]
    names = []
    for key, child in module.named_children():
        inner = f"{name}.{key}" if name else key
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            names += _members(child, inner)
        elif _owns(child):
            names.append(inner)
    return names


def _owns(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def cut(
    model: nn.Module,
    *,
    resident: Sequence[str] = (),
    blocks: Sequence[str] = (),
    called: Sequence[str] = (),
    decay: Callable[[str, nn.Parameter], bool] = default_decay,
) -> Blocks:
    """Divide `model` into groups and sites, and return these.

    `resident` names modules and parameters that stay in memory, and `blocks` names the modules that
    are blocks. `called` names parts of blocks that are also called on their own: they become sites
    over the weights of their block. `decay` selects the parameters that decay.
    """
    names = site_names(model, resident, blocks)
    names += [name for name in called if name not in names]
    if not any(True for _ in model.parameters()):
        raise ModelError(f"{type(model).__name__} has no parameters; nothing to train")
    owner: dict[int, tuple[str, int]] = {}  # id(parameter) -> (group, index)
    members: dict[str, list[tuple[str, nn.Parameter]]] = {}
    # Resident parameters are claimed first: a weight that the model also reads outside any site
    # call must stay in memory even if a site shares it.
    covered = _refs_by_site(model, names)
    inside = {
        (module_name, attribute)
        for entries in covered.values()
        for module_name, attribute, _ in entries
        if f"{module_name}.{attribute}" not in resident
    }
    loose = [
        (module_name, attribute, parameter)
        for module_name, module in model.named_modules(remove_duplicate=False)
        for attribute, parameter in module._parameters.items()
        if parameter is not None and (module_name, attribute) not in inside
    ]
    for key, entries in ((RESIDENT, loose), *covered.items()):
        for module_name, attribute, parameter in entries:
            if id(parameter) not in owner:
                group = key if parameter.requires_grad else key + FROZEN
                bucket = members.setdefault(group, [])
                owner[id(parameter)] = (group, len(bucket))
                full = f"{module_name}.{attribute}" if module_name else attribute
                bucket.append((full, parameter))

    def refs(entries: list[tuple[str, str, nn.Parameter]]) -> tuple[ParameterRef, ...]:
        return tuple(ParameterRef(m, a, *owner[id(p)]) for m, a, p in entries)

    sites, modules = [], set()  # a module may have several names
    for name in names:
        site_refs = tuple(s for s in refs(covered[name]) if s.group not in RESIDENTS)
        used = tuple(dict.fromkeys(ref.group for ref in site_refs))
        if used and (module_id := id(model.get_submodule(name))) not in modules:
            modules.add(module_id)
            sites.append(Site(name, site_refs, used))
    shared = tuple(
        ref
        for entries in (loose, *covered.values())
        for ref in refs(entries)
        if ref.group in RESIDENTS
    )
    order = [k for name in (*names, RESIDENT) for k in (name, name + FROZEN) if k in members]
    groups = tuple(_lay_out(key, members[key], decay) for key in order)
    return Blocks(groups, tuple(sites), shared)


def _refs_by_site(
    model: nn.Module, names: Sequence[str]
) -> dict[str, list[tuple[str, str, nn.Parameter]]]:
    covered: dict[str, list[tuple[str, str, nn.Parameter]]] = {}
    for name in names:
        owner = model.get_submodule(name)
        covered[name] = [
            (f"{name}.{inner}" if inner else name, attribute, parameter)
            for inner, module in owner.named_modules(remove_duplicate=False)
            for attribute, parameter in module._parameters.items()
            if parameter is not None
        ]
    return covered


def _lay_out(
    key: str,
    members: list[tuple[str, nn.Parameter]],
    decay: Callable[[str, nn.Parameter], bool],
) -> FlatGroup:
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
    return FlatGroup(key, tuple(specs), align_up(max(offset, 1), GROUP_ALIGN))


def check_trainable(model: nn.Module) -> None:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(
            f"{type(model).__name__}: every parameter is frozen, there is nothing to train; set "
            "requires_grad where it should learn"
        )
    check_float(model)


def check_float(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.dtype.is_floating_point:
            raise ModelError(
                f"parameter {name} has dtype {parameter.dtype}; LoHan trains floating-point "
                "weights: load the model unquantized"
            )


# -- Parts of blocks that are used outside the blocks' calls, found by one run on fake tensors -----
#
# A model may call a part of a block separately (an embedding that the first block owns), or read a
# parameter without calling its module (a head that shares the embedding's weight). The part becomes
# a separate site over the block's weights; the parameter stays in memory.


@dataclass(frozen=True)
class Outside:
    modules: tuple[str, ...] = ()  # modules that are called separately, in the order of their calls
    parameters: tuple[str, ...] = ()  # parameters that are read without a call


def cut_for(
    model: nn.Module,
    batch: Mapping[str, Any] | None,
    *,
    blocks: Sequence[str] = (),
    resident: Sequence[str] = (),
    decay: Callable[[str, nn.Parameter], bool] = default_decay,
) -> Blocks:
    """Return the groups and sites of a model, according to how a call with `batch` uses parameters.

    Without a batch, the module tree alone decides. `resident`, `blocks` and `decay` are those of
    `cut`.
    """
    names = {name for name, _ in model.named_modules(remove_duplicate=False)}
    names |= {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if unknown := [name for name in resident if name not in names]:
        raise ConfigError(
            f"resident names {unknown[0]!r}, and {type(model).__name__} has no module or parameter "
            "of that name; see model.named_modules()"
        )
    outside = Outside()
    if batch is not None:
        outside = used_outside(model, site_names(model, resident, blocks), batch)
    return cut(
        model,
        resident=(*resident, *outside.parameters),
        blocks=blocks,
        called=outside.modules,
        decay=decay,
    )


def used_outside(model: nn.Module, site_names: Sequence[str], batch: Mapping[str, Any]) -> Outside:
    """Return the parts of sites that the model uses while the site does not run.

    The model is run on fake tensors with `batch`. If that fails, the result is empty, and the parts
    are found in the first real run.
    """

    def run(values: KnownValues) -> Outside:
        watch = _Watch(model, site_names)
        random, on_cpu = torch.random.fork_rng(devices=[]), buffers_at(model, CPU)
        with faking(values), random, plain_forwards(model), on_cpu, watch.running():
            fake = partial(fake_like, values=values)
            inputs = pytree.tree_map_only(torch.Tensor, fake, dict(batch))
            model(**inputs)
        return Outside(tuple(watch.modules), tuple(watch.parameters))

    try:
        return with_least_values(model, run)
    except UNKNOWN:
        return Outside()


class _Watch(TorchFunctionMode):
    """A record of the parameters that operations read while none of their sites runs."""

    def __init__(self, model: nn.Module, site_names: Sequence[str]) -> None:
        super().__init__()
        self._model, self._site_names = model, site_names
        self._stack: list[str] = []
        self._owner: dict[int, tuple[str, list[str]]] = {}  # parameter -> its name, its sites
        self.modules: dict[str, None] = {}
        self.parameters: dict[str, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        makes = name.startswith("new_") or name.endswith("_like")
        if not makes and any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(out)):
            for leaf in pytree.tree_leaves((args, kwargs)):
                if id(leaf) in self._owner:
                    self._read(*self._owner[id(leaf)])
        return out

    def _read(self, parameter: str, site_names: list[str]) -> None:
        if not site_names or any(name in self._stack for name in site_names):
            return
        parts = (m for m in self._stack if any(m.startswith(f"{name}.") for name in site_names))
        part = next(parts, None)
        if part is None:
            self.parameters[parameter] = None
        else:
            self.modules[part] = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Temporarily install fake parameters, and hooks that record calls."""
        handles: list[Any] = []
        fakes: list[tuple[Any, str, torch.Tensor]] = []
        replacements: dict[int, nn.Parameter] = {}
        for name, module in self._model.named_modules(remove_duplicate=False):
            for key, old in module._parameters.items():
                if old is not None:
                    if id(old) not in replacements:
                        empty = torch.empty(old.shape, dtype=old.dtype)
                        replacements[id(old)] = nn.Parameter(empty, requires_grad=old.requires_grad)
                    fakes.append((module._parameters, key, replacements[id(old)]))
                    full = f"{name}.{key}" if name else key
                    owner = self._owner.setdefault(id(replacements[id(old)]), (full, []))
                    owner[1].extend(s for s in self._site_names if f"{full}.".startswith(f"{s}."))
        for name, module in self._model.named_modules():
            handles.append(module.register_forward_pre_hook(self._enter(name)))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            with swapped(fakes), self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str) -> Any:
        return lambda *_: self._stack.append(name)

    def _leave(self, *_: Any) -> None:
        self._stack.pop()


# -- Flat bytes of weights and state as torch tensors ----------------------------------------------


def dtype_of(state_format: StateFormat) -> torch.dtype:
    """Return the dtype in which a state format computes."""
    return getattr(torch, state_format.dtype)


# names of the dtypes of stored weights
DTYPE_NAMES = {dtype_of(fmt): name for name, fmt in STATE_FORMATS.items()}


def split(
    state_format: StateFormat, flat: torch.Tensor, parameters: int
) -> dict[str, torch.Tensor]:
    """Return views of the arrays in a state chunk of `parameters` parameters, by name.

    `flat` holds the bytes of the chunk.
    """
    offset, parts = 0, {}
    for array in state_format.arrays:
        size = array.size(parameters)
        parts[array.name] = flat[offset : offset + size].view(getattr(torch, array.dtype))
        offset += size
    return parts


def views(group: FlatGroup, flat: torch.Tensor) -> list[torch.Tensor]:
    """Return the parameters of a group as views of its flat buffer."""
    return [flat[t.offset : t.offset + t.numel].view(t.shape) for t in group.tensors]
