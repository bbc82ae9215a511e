"""The memory that a model's blocks need for a batch, measured on fake tensors.

The model runs once on fake tensors (shapes without memory), each site forward and backward. Every
storage is counted from its creation to its release, so the peak is the one that the real allocator
will have, including attention kernels and temporaries.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lohan.capture.fake import (
    CPU,
    UNKNOWN,
    DispatchMode,
    KnownValues,
    Result,
    buffers_at,
    fake_like,
    faking,
    with_least_values,
)
from lohan.capture.kernels import plain_forwards, runs_liger
from lohan.capture.recompute import discard_saved_tensors
from lohan.capture.saved_call import SavedCall, collecting, is_prefix, refuse_cache, swapped
from lohan.capture.selective_checkpoint import storage_key
from lohan.capture.slicing import Cut, find_cut, pattern
from lohan.capture.tiling import Tiling
from lohan.capture.tracing import Inventories, Inventory, kind_of_call
from lohan.capture.workspaces import (
    RECURRENT,
    RECURRENT_BACKWARD,
    attention_workspace,
    recurrent_workspace,
)
from lohan.errors import ModelError
from lohan.model.layout import Blocks, Site
from lohan.model.workload import OFFLOAD_ALIGN, Footprint, SiteFootprint
from lohan.util.units import align_up


class _LiveBytes(DispatchMode):
    """A count of the bytes of storages that are created while this mode is active, and their peak.

    The tensors `existing` are not counted.
    """

    def __init__(self, existing: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.counts = True
        self._live_tensors = {tensor.untyped_storage()._cdata for tensor in existing}
        self._counted: dict[int, weakref.finalize] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.counts:
            return out
        if func is RECURRENT_BACKWARD and storage_key(out[4]) != storage_key(out[3]):
            # The kernel returns one gradient for both biases, but torch's cache of fake results
            # returns two.
            self._live_tensors.add(out[4].untyped_storage()._cdata)
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf)
        if func in RECURRENT:
            self._count(out[3], recurrent_workspace(func, args, out))
        self.peak = max(self.peak, self.live + attention_workspace(func, args))
        return out

    def without(self, storages: Iterable[torch.UntypedStorage]) -> int:
        """Return the bytes of all counted storages that exist, without those in `storages`."""
        return self.live - sum(s.nbytes() for s in storages if s._cdata in self._counted)

    def _count(self, tensor: torch.Tensor, workspace: int = 0) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live_tensors or (key in self._counted and not workspace):
            return  # a view of a weight is not a new tensor
        size = storage.nbytes() + workspace
        self.live += size
        self.peak = max(self.peak, self.live)

        def dead() -> None:
            self.live -= size
            self._counted.pop(key, None)

        self._counted[key] = weakref.finalize(storage, dead)


def measure(
    model: nn.Module,
    blocks: Blocks,
    batch: Mapping[str, Any],
    *,
    micro_batch: int | None,
    torch_device: torch.device = CPU,
    training: bool = True,
    tiles: int = 0,
) -> Footprint:
    """Run `model(**batch)` on fake tensors and return the memory that each site needs.

    `batch` contains meta or real tensors. `torch_device` is the device of the later run, which
    determines for example the attention kernels. Without `training`, nothing is kept and there is
    no backward. `tiles` is the number of tokens per tile, or 0.
    """
    kind = _Probe if training else _ForwardProbe

    def run(values: KnownValues) -> Footprint:
        return _run(model, batch, kind(model, blocks, micro_batch, torch_device, tiles), values)

    return _with_known_values(model, run, long=bool(tiles))


def inventories(
    model: nn.Module,
    blocks: Blocks,
    batch: Mapping[str, Any],
    *,
    micro_batch: int,
    torch_device: torch.device = CPU,
    tiles: int = 0,
) -> tuple[dict[str, Inventory], Footprint]:
    """Return what each repeated site could keep, by name, and the footprint of a micro-batch.

    Inventories refer to the whole batch. Sites that are called more
    than once are omitted, because activations are stored per site. Sites with kernels that planning
    has replaced are omitted too, since they do not run the operations that were traced.
    """

    def run(values: KnownValues) -> tuple[dict[str, Inventory], Footprint]:
        probe = _InventoryProbe(model, blocks, micro_batch, torch_device, tiles)
        footprint = _run(model, batch, probe, values)
        once_called = {
            name: inventory
            for name, inventory in probe.inventories.items()
            if probe.calls[name] == 1 and not runs_liger(model.get_submodule(name))
        }
        return once_called, footprint

    return _with_known_values(model, run, long=bool(tiles))


def _with_known_values(
    model: nn.Module, run: Callable[[KnownValues], Result], *, long: bool
) -> Result:
    """Return the result of a measurement with as few known values as the model accepts.

    For `long` sequences integer values are known from the start. They let a model see that it needs
    no attention mask, whose size is the square of the length.
    """
    try:
        return with_least_values(
            model, run, least=KnownValues.NUMBERS if long else KnownValues.SHAPES
        )
    except UNKNOWN as unknown:
        raise ModelError(
            f"{type(model).__name__} runs operations that depend on computed values ({unknown}), "
            "so its memory cannot be planned; leave `batch` out, or choose an implementation with "
            "fixed shapes"
        ) from None


def _run(
    model: nn.Module, batch: Mapping[str, Any], probe: _Probe, values: KnownValues
) -> Footprint:
    random = torch.random.fork_rng(devices=[])
    plain, buffers = plain_forwards(model), buffers_at(model, probe.torch_device)
    with faking(values), random, plain, buffers, probe:
        fake = partial(fake_like, values=values, torch_device=probe.torch_device)
        inputs = pytree.tree_map_only(torch.Tensor, fake, dict(batch))
        # Gradients are enabled so that the inputs of a site show which of them require grad.
        with torch.enable_grad(), probe.between:
            model(**inputs)
    return probe.footprint


class _Probe:
    """A replacement of all parameters and of the forwards of sites, for one run on fake tensors."""

    _trains = True

    def __init__(
        self,
        model: nn.Module,
        blocks: Blocks,
        micro_batch: int | None,
        torch_device: torch.device,
        tiles: int,
    ) -> None:
        self._model, self._blocks, self._micro_batch = model, blocks, micro_batch
        self.torch_device = torch_device
        self._tiling = Tiling(tiles, brief=True) if tiles else None  # only bytes are counted
        self._kept: list[torch.UntypedStorage] = []  # storages that are already counted as inputs
        self._cuts: dict[Any, Cut] = {}
        # Keys are kinds of call, values are the peaks of backward and of forward.
        self._peaks: dict[Any, tuple[int, int]] = {}
        self._inside = False
        self.footprint = Footprint()

    def __enter__(self) -> None:
        blocks, replacements = self._blocks, {}
        self._weights: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        for ref in (*(r for site in blocks.sites for r in site.parameters), *blocks.resident):
            parameters = self._model.get_submodule(ref.module)._parameters
            spec, key = blocks.by_key[ref.group].tensors[ref.tensor], (ref.group, ref.tensor)
            if key not in replacements:
                old = parameters[ref.attribute]
                assert old is not None
                empty = torch.empty(spec.shape, dtype=old.dtype, device=self.torch_device)
                replacements[key] = nn.Parameter(empty, requires_grad=spec.trainable)
            self._weights.append((parameters, ref.attribute, replacements[key]))
        self._swap = swapped(self._weights)
        self._swap.__enter__()
        self.between = _LiveBytes([*replacements.values(), *self._model.buffers()])
        self._modules = [self._model.get_submodule(site.name) for site in blocks.sites]
        for site, module in zip(blocks.sites, self._modules, strict=True):
            module.forward = self._stand_in(site, module, module.forward)

    def __exit__(self, *_: object) -> None:
        for module in self._modules:
            del module.forward
        self._swap.__exit__(None, None, None)

    def _stand_in(self, site: Site, module: nn.Module, original: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._inside:  # the call of a site inside another site
                return original(*args, **kwargs)
            if self._trains:
                refuse_cache(site.name, args, kwargs)
            self.footprint.outside = self.between.without(self._kept)
            call = SavedCall(site.name, args, kwargs)
            learns = any(parameter.requires_grad for parameter in module.parameters())
            without_backward = not any(call.wants_grad) and not learns
            if without_backward:
                self.footprint.no_backward.add(site.name)
            self._inside, self.between.counts = True, False  # tensors of trials are not counted
            try:
                with collecting():
                    call.cut = self._cut(module, original, call)
                    self._measure(site, module, _tiled(self._tiling, module, original, call), call)
                    self._trace(site, module, original, call)
                self.between.counts = True
                with torch.no_grad():
                    if any(map(is_prefix, pytree.tree_leaves((args, kwargs)))):
                        args, kwargs = call.arguments(call.tensors)  # a separate cache for this run
                    result = original(*args, **kwargs)
            finally:
                self._inside = False
            return (
                result if without_backward else pytree.tree_map_only(torch.Tensor, _tracked, result)
            )

        return forward

    def _cut(self, module: nn.Module, original: Any, call: SavedCall) -> Cut:
        """Return how a call is divided into slices, as far as shapes show it."""
        if not self._micro_batch or self._micro_batch >= call.batch:
            return call.cut
        key = (type(module), *pattern(call), *(t.shape for t in call.tensors))
        if key not in self._cuts:
            self._cuts[key] = find_cut(module, call, original, values=False)
        return self._cuts[key]

    def _measure(self, site: Site, module: nn.Module, original: Any, call: SavedCall) -> None:
        """Run one slice forward and backward, and add its memory to the footprint of the site.

        Equal modules whose inputs have equal shapes share one measurement.
        """
        without_backward = site.name in self.footprint.no_backward
        kind = without_backward, kind_of_call(module, call.arguments(call.tensors))
        if kind not in self._peaks:
            forward_peak = self._forward_peak(original, call, autograd=not without_backward)
            self._peaks[kind] = self._backward_peak(original, call), forward_peak
        backward_peak, forward_peak = self._peaks[kind]
        inputs, shared = (0, 0) if without_backward else self._new_input_bytes(call)
        sizes = (tensor.numel() * tensor.itemsize for tensor in call.grad_inputs)
        offload_bytes = sum(align_up(size, OFFLOAD_ALIGN) for size in sizes)
        before = self.footprint.sites.get(site.name, SiteFootprint(0, 0))
        self.footprint.sites[site.name] = SiteFootprint(
            before.input_bytes + inputs,
            max(before.peak_bytes, backward_peak),
            max(before.forward_bytes, forward_peak),
            max(before.offload_bytes, offload_bytes),
            before.shared_bytes + shared,
        )

    def _trace(self, site: Site, module: nn.Module, original: Any, call: SavedCall) -> None:
        """Do nothing. A subclass records the results that the call could keep."""

    def _backward_peak(self, original: Any, call: SavedCall) -> int:
        """Return the peak of the backward of one slice, including its recomputation."""
        _, args, kwargs = call.restore(call.slices(self._micro_batch)[0], grad=True)
        with _LiveBytes(self._live_tensors(call)) as counter, torch.enable_grad():
            leaves = pytree.tree_leaves(original(*args, **kwargs))
            out = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
            if out:
                torch.autograd.backward(out, [torch.empty_like(t) for t in out])
        for _, _, leaf in self._weights:
            leaf.grad = None
        return counter.peak

    def _live_tensors(self, call: SavedCall) -> list[torch.Tensor]:
        return [*call.tensors, *(weight for _, _, weight in self._weights)]

    def _forward_peak(self, original: Any, call: SavedCall, *, autograd: bool) -> int:
        """Return the peak of the forward of one slice.

        With `autograd`, a graph without saved tensors is recorded, as in training.
        """
        _, args, kwargs = call.restore(call.slices(self._micro_batch)[0], grad=autograd)
        around = discard_saved_tensors(call.name) if autograd else torch.no_grad()
        with _LiveBytes(self._live_tensors(call)) as counter, around:
            original(*args, **kwargs)
        return counter.peak

    def _new_input_bytes(self, call: SavedCall) -> tuple[int, int]:
        """Return the bytes of inputs that no earlier site keeps, and how many need no gradient.

        The second number is part of the first. An input that several sites share, such as a mask,
        is counted once.
        """
        every = shared = 0
        for tensor, wants_grad in zip(call.tensors, call.wants_grad, strict=True):
            storage = tensor.untyped_storage()
            if all(storage._cdata != kept._cdata for kept in self._kept):
                self._kept.append(storage)
                every += storage.nbytes()
                shared += 0 if wants_grad else storage.nbytes()
        return every, shared


class _ForwardProbe(_Probe):
    """A probe that measures only forward."""

    _trains = False

    def _measure(self, site: Site, module: nn.Module, original: Any, call: SavedCall) -> None:
        self.footprint.sites[site.name] = SiteFootprint(
            0, self._forward_peak(original, call, autograd=False)
        )


class _InventoryProbe(_Probe):
    """A probe that also records what every site could keep."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Blocks,
        micro_batch: int | None,
        torch_device: torch.device,
        tiles: int,
    ) -> None:
        super().__init__(model, blocks, micro_batch, torch_device, tiles)
        self.inventories: dict[str, Inventory] = {}
        self.calls: Counter[str] = Counter()
        self._inventories = Inventories()
        self._all_tiles = Tiling(tiles) if tiles else None

    def _trace(self, site: Site, module: nn.Module, original: Any, call: SavedCall) -> None:
        self.calls[site.name] += 1
        if not any(module.children()) or not any(t.is_floating_point() for t in call.tensors):
            return
        if call.batch <= (self._micro_batch or 0) or not call.cut.obstacle:
            self.footprint.rows = max(self.footprint.rows, call.batch)
        wanted = call.wants_grad
        # A site without backward is traced as if it had one, because its FLOPs are the same.
        if site.name in self.footprint.no_backward:
            call.wants_grad = [tensor.is_floating_point() for tensor in call.tensors]
        _, args, kwargs = call.restore(slice(0, call.batch), grad=True)
        run = _tiled(self._all_tiles, module, original, call)
        self.inventories[site.name] = self._inventories.of(module, args, kwargs, forward=run)
        call.wants_grad = wanted


def _tiled(tiling: Tiling | None, module: nn.Module, original: Any, call: SavedCall) -> Any:
    if tiling is None:
        return original
    run = tiling.forward(module, original)
    args, kwargs = call.arguments(call.tensors)
    run.prepare(args, kwargs)
    return run


def _tracked(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that requires grad and may be changed in place; integers are not copied.

    The copy is not a leaf, because a leaf could not be changed in place. Its graph holds no memory.
    """
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach() + tensor.new_zeros(()).requires_grad_()
