"""One training step, block by block: the plain form, which is the specification.

The model's own forward code drives it. Each site's call goes through an autograd function: forward
runs without a graph and keeps the inputs; backward recomputes, hands the weight gradients to the
optimizer and returns the input gradients. When autograd has finished, what is left is updated and
the step is committed. So user code is `loss = model(**batch).loss; loss.backward()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lohan.blocks import RESIDENT, Blocks, Group, Site, views
from lohan.errors import ConfigError, StoreError
from lohan.optim import AdamW
from lohan.plan import Plan
from lohan.runtime.activations import Gathered, SavedCall
from lohan.runtime.gradients import GradientSink
from lohan.runtime.optimizer import StepScalars, Updater
from lohan.runtime.pool import HostPool
from lohan.runtime.progress import Progress
from lohan.runtime.resident import Resident
from lohan.runtime.sites import SiteRunner
from lohan.runtime.weights import Weights
from lohan.state import MODES
from lohan.storage.store import Store


class Executor:
    """Composes store, weights, activations, gradients and optimizer into steps."""

    def __init__(
        self, model: nn.Module, *, blocks: Blocks, plan: Plan, store: Store, adamw: AdamW,
        pool: HostPool,
    ) -> None:  # fmt: skip
        self.model, self.blocks, self.plan, self.store = model, blocks, plan, store
        self.adamw, self.mode = adamw, MODES[plan.mode]
        if self.mode.name == "fp16" and store.durability != "step":
            raise ConfigError(
                'fp16 with durability = "checkpoint": a step that overflows must be undone, which '
                'writing in place cannot; use durability = "step" or --dtype bf16'
            )
        parts = {"mode": self.mode, "chunk_params": plan.chunk_params}
        moving = [group for group in blocks.groups if group.key != RESIDENT]
        self.weights = Weights(store, pool, groups=moving, slots=plan.weight_slots, **parts)
        self.updater = Updater(store, pool, adamw=adamw, **parts)
        self.sink = GradientSink()
        self.progress = Progress.of(store.meta)
        self.resident = None
        if RESIDENT in blocks.by_key:
            self.resident = Resident(
                model, group=blocks.by_key[RESIDENT], slots=blocks.resident, store=store,
                pool=pool, **parts,
            )  # fmt: skip
        self.anchor = torch.zeros(
            (), requires_grad=True
        )  # so that an output of integer inputs has a gradient
        self.extra_meta: Callable[[], dict[str, Any]] = dict
        self.runners = [SiteRunner(self, s, model.get_submodule(s.name)) for s in blocks.sites]
        self._updated: set[str] = set()
        self._overflow = False
        self._in_backward = False

    # -- a block ----------------------------------------------------------------------------------

    def forward(self, runner: SiteRunner, call: SavedCall) -> tuple[list[Any], Any]:
        """Runs a site without a graph; returns its output as leaves and layout."""
        versions, joined, leaves, spec = call.versions(), [], [], None
        with self.held(runner.site) as flats, runner.installed(self.views(flats)):
            for part in call.slices(self.plan.micro_batch):
                call.rng.append(torch.get_rng_state())
                _, args, kwargs = call.restore(part, grad=False)
                leaves, spec = pytree.tree_flatten(runner.original(*args, **kwargs))
                joined = joined or [Gathered(call.batch) for _ in leaves]
                for slot, leaf in zip(joined, leaves, strict=True):
                    if isinstance(leaf, torch.Tensor):
                        slot.put(part, leaf)
        call.check_untouched(versions)
        return [
            leaf if slot.value is None else slot.value
            for slot, leaf in zip(joined, leaves, strict=True)
        ], spec

    def backward(
        self, runner: SiteRunner, call: SavedCall, grads: tuple[torch.Tensor | None, ...]
    ) -> list[torch.Tensor | None]:
        """Recomputes a site slice by slice; input gradients return, weight gradients move on."""
        parts = call.slices(self.plan.micro_batch)
        inputs = [Gathered(call.batch) for _ in call.tensors]
        with self.held(runner.site) as flats:
            leaves = self.leaves(runner.site, flats, wide=len(parts) > 1)
            with runner.installed(leaves), torch.random.fork_rng(devices=[]):
                for part, rng in zip(parts, call.rng, strict=True):
                    torch.set_rng_state(rng)
                    tensors, args, kwargs = call.restore(part, grad=True)
                    with torch.enable_grad():
                        out = pytree.tree_leaves(runner.original(*args, **kwargs))
                    _backward(out, grads, part, whole=len(parts) == 1)
                    for slot, tensor, full in zip(inputs, tensors, call.tensors, strict=True):
                        if tensor.grad is not None:
                            if call.sliced(full):
                                slot.put(part, tensor.grad)
                            else:
                                slot.add(tensor.grad)
            self.finish_use(runner.site, flats)
        return [slot.value for slot in inputs]

    def finish_use(self, site: Site, flats: dict[str, torch.Tensor]) -> None:
        """Updates the groups for which this was the last use in backward."""
        for key in site.groups:
            if self.sink.withdraw(key):
                self._update(self.blocks.by_key[key], flats[key])

    # -- a step -----------------------------------------------------------------------------------

    def enter_forward(self) -> None:
        if self._in_backward:  # the last backward died outside our code before it finished
            self.abort()

    def enter_backward(self) -> None:
        """Called by every backward of ours; the first asks autograd to call `finish_step`."""
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self.finish_step)

    def scalars(self) -> StepScalars:
        return StepScalars(
            lr=self.adamw.lr_at(self.progress.step),
            update=self.progress.updates + 1,
            grad_scale=1.0 / self.progress.loss_scale,
        )

    def finish_step(self) -> None:
        """Runs when autograd has finished: the rest of the updates, then the commit."""
        with self.guarded():
            for group in self.blocks.groups:
                if group.key != RESIDENT and group.key not in self._updated:
                    with self.held_group(group) as flat:
                        self._update(group, flat)
            if self.resident is not None and not self._overflows(self.resident.gradients()):
                self.resident.update(self.updater, self.scalars())
            if self._overflow:
                self._skip()
            else:
                self._commit()
            self._reset()

    def _update(self, group: Group, flat: torch.Tensor) -> None:
        grads = self.sink.take(group.key)
        if self._overflows(grads):
            return
        self.weights.mark_torn(group)
        self.updater.update(group, flat, grads, self.scalars())
        self.weights.mark_updated(group)
        self._updated.add(group.key)

    def _overflows(self, grads: dict[int, torch.Tensor]) -> bool:
        """fp16 gradients beyond the range: the whole step is given up, no update may count."""
        if self.mode.name == "fp16" and not self._overflow:
            self._overflow = not all(bool(torch.isfinite(g.sum())) for g in grads.values())
        return self._overflow

    def _commit(self) -> None:
        self.progress = self.progress.updated(scaled=self.mode.name == "fp16")
        self.store.commit(self._meta())
        if self.resident is not None:
            self.resident.publish()

    def _skip(self) -> None:
        """The other slot's half-written generation is dropped; only the counters move on."""
        self.store.discard()
        self.weights.forget()
        self.progress = self.progress.overflowed()
        self.store.commit(self._meta(), advance=False)
        if self.resident is not None:
            self.resident.drop_gradients()

    def _meta(self) -> dict[str, Any]:
        return {**self.store.meta, **self.progress.to_meta(), **self.extra_meta()}

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """An error inside a step gives up the step and leaves the last committed one intact."""
        try:
            yield
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        with suppress(StoreError):  # a store that cannot go on says so at its next use
            self.store.discard()
        self.weights.forget()
        if self.resident is not None:
            self.resident.drop_gradients()
        self.progress = Progress.of(self.store.meta)
        self._reset()

    def _reset(self) -> None:
        self.sink.clear()
        self._updated.clear()
        self._overflow = False
        self._in_backward = False

    def detach(self) -> None:
        """Gives the modules their own forward back."""
        for runner in self.runners:
            runner.remove()

    # -- weights for the duration of a call -------------------------------------------------------

    @contextmanager
    def held(self, site: Site) -> Iterator[dict[str, torch.Tensor]]:
        """Flat weights by group."""
        flats: dict[str, torch.Tensor] = {}
        try:
            for key in site.groups:
                flats[key] = self.weights.acquire(self.blocks.by_key[key])
            yield flats
        finally:
            for key in flats:
                self.weights.release(self.blocks.by_key[key])

    @contextmanager
    def held_group(self, group: Group) -> Iterator[torch.Tensor]:
        with self.held(Site(group.key, (), (group.key,))) as flats:
            yield flats[group.key]

    def views(self, flats: dict[str, torch.Tensor]) -> dict[str, list[torch.Tensor]]:
        return {key: views(self.blocks.by_key[key], flat) for key, flat in flats.items()}

    def leaves(
        self, site: Site, flats: dict[str, torch.Tensor], *, wide: bool
    ) -> dict[str, list[torch.Tensor]]:
        """Leaf tensors over the flat weights, whose gradients go to the sink one by one."""
        made = self.views(flats)
        for key in site.groups:
            wide_sum = self.mode.name != "fp32" and (wide or self.sink.uses(key) > 1)
            for index, spec in enumerate(self.blocks.by_key[key].tensors):
                leaf = made[key][index] = made[key][index].detach()
                if spec.trainable:
                    leaf.requires_grad_()
                    leaf.register_post_accumulate_grad_hook(self._to_sink(key, index, wide_sum))
        return made

    def _to_sink(self, key: str, index: int, wide: bool) -> Callable[[torch.Tensor], None]:
        def hook(leaf: torch.Tensor) -> None:
            assert leaf.grad is not None
            self.sink.add(key, index, leaf.grad, wide=wide)
            leaf.grad = None

        return hook


def _backward(
    outputs: list[Any], grads: tuple[torch.Tensor | None, ...], part: slice, *, whole: bool
) -> None:
    tensors = [out for out in outputs if isinstance(out, torch.Tensor)]
    pairs = [
        (out, grad if whole else grad[part])
        for out, grad in zip(tensors, grads, strict=True)
        if out.requires_grad and grad is not None
    ]
    if pairs:
        torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
