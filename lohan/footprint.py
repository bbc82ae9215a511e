"""How much memory a model's blocks need for a batch, found without running them for real.

The model runs once on fake tensors (shapes without memory), its sites in turn forward and
backward. Every storage that comes to life is counted until it dies, so the peak is the one the
real allocator will see, attention kernels and temporaries included.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lohan.inventory import Inventories, Inventory
from lohan.layout import Blocks, Site
from lohan.planning.demand import Footprint, SiteFootprint
from lohan.runtime.activations import SavedCall

Found = TypeVar("Found")


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages made while it is active; `there` were made before."""

    def __init__(self, there: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._there = {tensor.untyped_storage()._cdata for tensor in there}
        self._seen: dict[int, weakref.finalize] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf)
        return out

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen or key in self._there:  # a view of a weight is not a new tensor
            return
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)

        def dead() -> None:
            self.live -= size
            self._seen.pop(key, None)

        self._seen[key] = weakref.finalize(storage, dead)


def measure(
    model: nn.Module, blocks: Blocks, batch: Mapping[str, torch.Tensor], *, micro_batch: int | None
) -> Footprint:
    """Runs `model(**batch)` on fake tensors; `batch` holds shapes (meta or real tensors)."""
    return _with_all_layers(model, lambda: _run(model, batch, _Probe(model, blocks, micro_batch)))


def inventories(
    model: nn.Module, blocks: Blocks, batch: Mapping[str, torch.Tensor], *, micro_batch: int | None
) -> dict[str, Inventory]:
    """What each repeated site could keep, by name, of a slice of so many samples. Sites that are
    called more than once are left out: their activations have no place of their own."""

    def run() -> dict[str, Inventory]:
        probe = _Taker(model, blocks, micro_batch)
        _run(model, batch, probe)
        return {name: probe.found[name] for name in probe.found if probe.calls[name] == 1}

    return _with_all_layers(model, run)


def _with_all_layers(model: nn.Module, run: Callable[[], Found]) -> Found:
    try:
        return run()
    except DataDependentOutputException:  # layers dropped at random: measure with all of them
        if not model.training:
            raise
        model.eval()
        try:
            return run()
        finally:
            model.train()


def _run(model: nn.Module, batch: Mapping[str, torch.Tensor], probe: _Probe) -> Footprint:
    with FakeTensorMode(allow_non_fake_inputs=True), torch.random.fork_rng(devices=[]), probe:
        inputs = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in batch.items()
        }
        with torch.enable_grad():  # so that a site's inputs say which of them take a gradient
            model(**inputs)
    return probe.footprint


class _Probe:
    """Takes the place of all parameters and site forwards for the duration of one fake run."""

    def __init__(self, model: nn.Module, blocks: Blocks, micro_batch: int | None) -> None:
        self._model, self._blocks, self._micro_batch = model, blocks, micro_batch
        self._kept: list[torch.UntypedStorage] = []  # storages that are counted as inputs already
        self.footprint = Footprint()

    def __enter__(self) -> None:
        blocks, made = self._blocks, {}
        self._parameters = []
        for slot in (*(s for site in blocks.sites for s in site.slots), *blocks.resident):
            module = self._model.get_submodule(slot.module)
            old = module._parameters[slot.attribute]
            self._parameters.append((module, slot.attribute, old))
            spec, key = blocks.by_key[slot.group].tensors[slot.tensor], (slot.group, slot.tensor)
            if key not in made:
                assert old is not None
                made[key] = torch.empty(spec.shape, dtype=old.dtype)
                made[key].requires_grad_(spec.trainable)
            module._parameters[slot.attribute] = made[key]  # type: ignore[assignment]
        self._modules = [self._model.get_submodule(site.name) for site in blocks.sites]
        for site, module in zip(blocks.sites, self._modules, strict=True):
            module.forward = self._stand_in(site, module, module.forward)

    def __exit__(self, *_: object) -> None:
        for module in self._modules:
            del module.forward
        for module, attribute, parameter in self._parameters:
            module._parameters[attribute] = parameter

    def _stand_in(self, site: Site, module: nn.Module, original: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            self._look(site, module, original, SavedCall(site.name, args, kwargs))
            with torch.no_grad():
                result = original(*args, **kwargs)
            return pytree.tree_map_only(torch.Tensor, _tracked, result)

        return forward

    def _look(self, site: Site, module: nn.Module, original: Any, call: SavedCall) -> None:
        """One slice forward and backward, with every byte counted."""
        part = call.slices(self._micro_batch)[0]
        weights = [m._parameters[a] for m, a, _ in self._parameters]
        there = [*call.tensors, *(w for w in weights if w is not None)]
        with _LiveBytes(there) as counter, torch.enable_grad():
            _, a, k = call.restore(part, grad=True)
            out = [t for t in pytree.tree_leaves(original(*a, **k)) if _differentiable(t)]
            torch.autograd.backward(out, [torch.empty_like(t) for t in out])
        self.footprint.sites[site.name] = SiteFootprint(self._own(call), counter.peak)
        for owner, attribute, _ in self._parameters:
            leaf = owner._parameters[attribute]
            if leaf is not None:
                leaf.grad = None

    def _own(self, call: SavedCall) -> int:
        """Bytes of the inputs that no earlier site has kept already (masks are shared)."""
        fresh: list[torch.UntypedStorage] = []
        for tensor in call.tensors:
            storage = tensor.untyped_storage()
            if all(storage._cdata != kept._cdata for kept in (*self._kept, *fresh)):
                fresh.append(storage)
        self._kept.extend(fresh)
        return sum(storage.nbytes() for storage in fresh)


class _Taker(_Probe):
    """Takes the inventory of sites."""

    def __init__(self, model: nn.Module, blocks: Blocks, micro_batch: int | None) -> None:
        super().__init__(model, blocks, micro_batch)
        self.found: dict[str, Inventory] = {}
        self.calls: Counter[str] = Counter()
        self._known = Inventories()

    def _look(self, site: Site, module: nn.Module, original: Any, call: SavedCall) -> None:
        self.calls[site.name] += 1
        if not any(call.wants_grad) or not any(module.children()):
            return
        _, args, kwargs = call.restore(call.slices(self._micro_batch)[0], grad=True)
        self.found[site.name] = self._known.of(module, args, kwargs, forward=original)


def _tracked(tensor: torch.Tensor) -> torch.Tensor:
    """Takes a gradient and, unlike a leaf, may be changed in place."""
    return tensor.detach().requires_grad_().clone() if tensor.is_floating_point() else tensor


def _differentiable(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad
