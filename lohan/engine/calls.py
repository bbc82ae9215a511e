"""A call of one site: forward without a graph, backward by recomputation, evaluation.

Forward keeps the inputs and what the plan keeps besides. Backward runs the block once more, slice
by slice, from what was kept; weight gradients go to the collector, input gradients return.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lohan.capture.ambient import Ambient, hand_on
from lohan.capture.buffers import as_before
from lohan.capture.call import Gathered, Output, SavedCall
from lohan.capture.hollow import run_hollow
from lohan.capture.selective_checkpoint import run_again, run_and_keep
from lohan.capture.slicing import Cuts
from lohan.capture.tensors import views
from lohan.device.base import Device, forked_random_state
from lohan.engine.collector import Collector
from lohan.engine.compiling import Compiled
from lohan.engine.parts import Parts
from lohan.engine.recipes import Recipes
from lohan.engine.sites import SiteRunner, fills_cache
from lohan.model.layout import Group

Guard = Callable[[], AbstractContextManager[None]]
Weights = dict[str, list[torch.Tensor]]  # by key of group


class Calls:
    """`guarded`: what an error in a call does to the step."""

    def __init__(
        self, groups: Sequence[Group], parts: Parts, collector: Collector, *, device: Device,
        micro_batch: int | None, recipes: Recipes, compiled: Compiled, guarded: Guard,
    ) -> None:  # fmt: skip
        self._groups, self._pipeline, self._stash = groups, parts.pipeline, parts.stash
        self._collector, self._device, self._micro_batch = collector, device, micro_batch
        self._guarded = guarded
        self.recipes, self.compiled, self.cuts = recipes, compiled, Cuts()

    @contextmanager
    def weights(
        self, runner: SiteRunner, *, training: bool, graph: bool = True
    ) -> Iterator[Weights]:
        """The site's parameters for a forward."""
        with self._guarded():
            flats = self._pipeline.begin_forward(runner.number, training=training, graph=graph)
            yield self._views(flats)
            self._pipeline.end()

    def _views(self, flats: dict[int, torch.Tensor]) -> Weights:
        groups = self._groups
        return {groups[n].key: views(groups[n], flat) for n, flat in flats.items()}

    def forward(
        self, runner: SiteRunner, call: SavedCall, *, graph: bool = True
    ) -> tuple[list[Any], Any]:
        """Runs a site; returns its output as leaves and layout, without a graph. `graph`: backward
        will come to it."""
        versions, output = call.versions(), Output(call)
        weights = self.weights(runner, training=True, graph=graph)
        with weights as tensors, runner.installed(tensors), self._device.computing():
            self._cut(runner, call)
            if graph:
                self._stash.begin(runner.number, call, self._pipeline.act_places())
                runner.mark_trainable()
            buffers = runner.buffers.before()
            for part in call.slices(self._micro_batch):
                call.rng.append(self._device.random_state())
                out, kept = self._run_slice(runner, call, part, graph=graph)
                call.kept.append(kept)
                self._stash.keep(runner.number, call)
                output.put(part, out)
            call.check_untouched(versions)
            call.buffers = runner.buffers.after(buffers)
            self._stash.hold(runner.number, call)
        return output.leaves, output.spec

    def _run_slice(
        self, runner: SiteRunner, call: SavedCall, part: slice, *, graph: bool
    ) -> tuple[Any, Any]:
        """What a slice returns and what it keeps. Note [what is compiled] in compiling.py."""
        _, args, kwargs = call.restore(part, grad=graph)
        recipe = self.recipes.recipe(runner, call, part)
        fast = self.compiled.of(runner.number) if recipe is None else None
        if fast is not None:
            with torch.no_grad():
                return call.ambient.run(fast, *args, **kwargs), None
        run = partial(call.ambient.run, runner.original, *args, **kwargs)
        if graph:
            run = partial(run_hollow, run, call.name)
        if recipe is not None:
            return run_and_keep(run, recipe)
        out = run()
        if self.compiled.curious(runner.number):
            states = call.rng[-1], self._device.random_state()
            self.compiled.learn(runner.number, runner.original, *states)
        return out, None

    def _cut(self, runner: SiteRunner, call: SavedCall) -> None:
        """Finds out how a call falls into slices; its weights are in place."""
        call.ambient = Ambient.now(self._device.torch_device.type)
        if self._micro_batch and self._micro_batch < call.batch:
            run = partial(call.ambient.run, runner.original)
            with forked_random_state(self._device), runner.buffers.untouched():
                call.cut = self.cuts.of(runner.module, call, run)

    def evaluate(self, runner: SiteRunner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a site without gradients: nothing is kept. What fills a cache is not cut."""
        call = SavedCall(runner.site.name, args, kwargs)
        weights = self.weights(runner, training=False)
        with weights as tensors, runner.installed(tensors), self._device.computing():
            if fills_cache((*args, *kwargs.values())):
                return runner.original(*args, **kwargs)
            self._cut(runner, call)
            output = Output(call)
            for part in call.slices(self._micro_batch):
                _, args, kwargs = call.restore(part, grad=False)
                output.put(part, call.ambient.run(runner.original, *args, **kwargs))
        return hand_on(*pytree.tree_unflatten(output.leaves, output.spec))

    def backward(
        self, runner: SiteRunner, call: SavedCall, grads: tuple[torch.Tensor | None, ...]
    ) -> list[torch.Tensor | None]:
        """Recomputes a site slice by slice; input gradients return, weight gradients move on."""
        parts, site = call.slices(self._micro_batch), runner.number
        inputs = [Gathered(call.batch) for _ in call.tensors]
        flats = self._pipeline.begin_backward(site)
        self._stash.restore(site, call, self._pipeline.act_places())
        self._collector.take_back(runner.site.groups)
        leaves = self._collector.leaves(runner.site, self._views(flats), parts=len(parts))
        with (
            runner.installed(leaves), forked_random_state(self._device), self._device.computing(),
            as_before(call.buffers),
        ):  # fmt: skip
            for number, part in enumerate(parts):
                self._device.set_random_state(call.rng[number])
                self._stash.restore_slice(site, call, number)
                self._again(runner, call, grads, number, part, inputs)
                self._stash.drop_slice(site, call, number)
        self._stash.drop(site, call)
        self._collector.finish(site)
        return [slot.value for slot in inputs]

    def _again(
        self, runner: SiteRunner, call: SavedCall, grads: tuple[torch.Tensor | None, ...],
        number: int, part: slice, inputs: list[Gathered],
    ) -> None:  # fmt: skip
        """Forward and backward of one slice, of which nothing is left but gradients."""
        kept = call.kept[number]
        tensors, args, kwargs = call.restore(part, grad=True)
        fast = self.compiled.of(runner.number) if kept is None else None
        run = partial(call.ambient.run, fast or runner.original, *args, **kwargs)
        with torch.enable_grad():
            out = pytree.tree_leaves(run()) if kept is None else run_again(run, kept)
        _backward(out, _gradients(call, grads, number, part))
        _gather(call, part, inputs, tensors)


def _gather(
    call: SavedCall, part: slice, inputs: list[Gathered], tensors: list[torch.Tensor]
) -> None:
    """Adds a slice's input gradients to those of the call."""
    whole = part == slice(0, call.batch)
    for position, (slot, tensor) in enumerate(zip(inputs, tensors, strict=True)):
        if tensor.grad is None:
            continue
        if whole or call.cut.inputs[position]:
            slot.put(part, tensor.grad)
        else:
            slot.add(tensor.grad)


def _gradients(
    call: SavedCall, grads: tuple[torch.Tensor | None, ...], number: int, part: slice
) -> list[torch.Tensor | None]:
    """Of the outputs of one slice. What all slices have in common gets it in the first."""
    if part == slice(0, call.batch):
        return list(grads)
    found: list[torch.Tensor | None] = []
    for grad, rows in zip(grads, call.cut.outputs, strict=True):
        if grad is not None and rows:
            grad = grad[part.start * rows : part.stop * rows]
        found.append(grad if rows or number == 0 else None)
    return found


def _backward(outputs: list[Any], grads: list[torch.Tensor | None]) -> None:
    tensors = [out for out in outputs if isinstance(out, torch.Tensor)]
    pairs = [
        (out, grad)
        for out, grad in zip(tensors, grads, strict=True)
        if out.requires_grad and grad is not None
    ]
    if pairs:
        torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
