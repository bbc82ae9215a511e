"""One training step, block by block.

The model's own forward code drives it. Each site's call goes through an autograd function: forward
runs without a graph and keeps the inputs; backward recomputes, hands the weight gradients to the
optimizer and returns the input gradients. When autograd has finished, the step ends: with clipping
or loss scaling the held gradients get their factor, and the next forward is prepared. So user code
is `loss = model(**batch).loss; loss.backward()`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lohan.errors import StoreError
from lohan.layout import RESIDENT, Blocks, Site
from lohan.optim import AdamW
from lohan.plan import Plan
from lohan.runtime.activations import Gathered, SavedCall
from lohan.runtime.build import Parts, build_parts
from lohan.runtime.gradients import GradientSink, sum_of_squares
from lohan.runtime.keeping import run_again, run_and_keep
from lohan.runtime.optimizer import StepScalars
from lohan.runtime.pool import HostPool
from lohan.runtime.progress import Progress
from lohan.runtime.recipes import Recipes
from lohan.runtime.resident import Resident
from lohan.runtime.sites import SiteRunner
from lohan.storage.store import Store
from lohan.tensors import views
from lohan.trace import Trace


class Executor:
    """Composes lanes, weights, activations, gradients and optimizer into steps."""

    def __init__(
        self, model: nn.Module, *, blocks: Blocks, plan: Plan, store: Store, adamw: AdamW,
        pool: HostPool, trace: Trace, kept: Mapping[int, frozenset[str]] | None = None,
    ) -> None:  # fmt: skip
        self.model, self.blocks, self.plan, self.store = model, blocks, plan, store
        self.adamw, self.trace = adamw, trace
        self.numbers = {group.key: number for number, group in enumerate(blocks.groups)}
        self.parts: Parts = build_parts(blocks, plan, store=store, pool=pool, adamw=adamw,
                                        trace=trace)  # fmt: skip
        self.pipeline, self.work = self.parts.pipeline, self.parts.work
        self.sink = GradientSink()
        self.recipes = Recipes(kept or {})
        self.progress = Progress.of(store.meta)
        self.resident = None
        if RESIDENT in blocks.by_key:
            self.resident = Resident(
                model, group=blocks.by_key[RESIDENT], slots=blocks.resident,
                flat=self.parts.resident_flat(),
            )  # fmt: skip
        self.anchor = torch.zeros((), requires_grad=True)  # gives integer inputs a gradient path
        self.extra_meta: Callable[[], dict[str, Any]] = dict
        self.grad_norm: float | None = None
        self.runners = [
            SiteRunner(self, number, site, model.get_submodule(site.name))
            for number, site in enumerate(blocks.sites)
        ]
        self._hook = model.register_forward_pre_hook(lambda *_: self.enter_forward())
        self._in_backward = False
        self._lost = False
        self._renewed = True  # resident parameters are those of the last step
        self._seen: dict[int, frozenset[int]] = {}  # tensors that got a gradient, by group

    # -- a block ----------------------------------------------------------------------------------

    def forward(self, runner: SiteRunner, call: SavedCall) -> tuple[list[Any], Any]:
        """Runs a site without a graph; returns its output as leaves and layout."""
        versions, spec = call.versions(), None
        joined: list[Gathered] = []
        leaves: list[Any] = []
        with self.weights(runner, training=True) as tensors, runner.installed(tensors):
            for part in call.slices(self.plan.micro_batch):
                call.rng.append(torch.get_rng_state())
                _, args, kwargs = call.restore(part, grad=False)
                run = partial(runner.original, *args, **kwargs)
                recipe = self.recipes.recipe(runner, call, part)
                out, kept = (run(), None) if recipe is None else run_and_keep(run, recipe)
                call.kept.append(kept)
                leaves, spec = pytree.tree_flatten(out)
                joined = joined or [Gathered(call.batch) for _ in leaves]
                for slot, leaf in zip(joined, leaves, strict=True):
                    if isinstance(leaf, torch.Tensor):
                        slot.put(part, leaf)
            call.check_untouched(versions)
            if self.work.acts is not None:
                self.work.acts.hold(runner.number, call)
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
        flats = self.pipeline.begin_backward(runner.number)
        if self.work.acts is not None:
            self.work.acts.restore(call, self.pipeline.act_places())
        leaves = self.leaves(runner.site, flats, wide=len(parts) > 1)
        with runner.installed(leaves), torch.random.fork_rng(devices=[]):
            for part, rng, kept in zip(parts, call.rng, call.kept, strict=True):
                torch.set_rng_state(rng)
                tensors, args, kwargs = call.restore(part, grad=True)
                run = partial(runner.original, *args, **kwargs)
                with torch.enable_grad():
                    out = pytree.tree_leaves(run()) if kept is None else run_again(run, kept)
                _backward(out, grads, part, whole=len(parts) == 1)
                for slot, tensor, full in zip(inputs, tensors, call.tensors, strict=True):
                    if tensor.grad is not None:
                        if call.sliced(full):
                            slot.put(part, tensor.grad)
                        else:
                            slot.add(tensor.grad)
        self.finish_backward(runner)
        return [slot.value for slot in inputs]

    def finish_backward(self, runner: SiteRunner) -> None:
        """Hands over the groups for which this was the last use in backward."""
        finished = [self.numbers[key] for key in runner.site.groups if self.sink.withdraw(key)]
        scheduled = self.pipeline.finals()
        handed = finished if scheduled is None else scheduled
        for number in handed:
            self._hand_over(number, self.sink.take(self.blocks.groups[number].key))
        self.pipeline.end_backward(runner.number, handed)

    def _hand_over(self, number: int, grads: dict[int, torch.Tensor]) -> None:
        self.work.handover.grads[number] = grads
        self._seen[number] = frozenset(grads)

    # -- a step -----------------------------------------------------------------------------------

    def enter_forward(self) -> None:
        """Before any module of the model runs: resident parameters are those of the last step."""
        if self._in_backward:  # the last backward died outside our code before it finished
            self.abort()
        if self.resident is not None and not self._renewed:
            with self.guarded():
                self.pipeline.renewed(self.numbers[RESIDENT])
            self.resident.publish()
            self._renewed = True

    def enter_backward(self) -> None:
        """Called by every backward of ours; the first asks autograd to call `finish_step`."""
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self.finish_step)
            self.pipeline.turn(self._scalars(1.0))

    def _scalars(self, clip_factor: float) -> StepScalars:
        return StepScalars(
            lr=self.adamw.lr_at(self.progress.step),
            update=self.progress.updates + 1,
            grad_scale=clip_factor / self.progress.loss_scale,
            missed=self.progress.missed,
        )

    def finish_step(self) -> None:
        """Runs when autograd has finished."""
        with self.guarded():
            for key in self.sink.waiting():  # some of their uses got no gradient
                self._hand_over(self.numbers[key], self.sink.take(key))
            if self.resident is not None:
                self._hand_over(self.numbers[RESIDENT], self.resident.take_gradients())
            self.pipeline.finish()
            scalars = self._held_scalars() if self.plan.holds_all else self._scalars(1.0)
            if scalars is None:
                self.progress = self.progress.overflowed()
            else:
                scaled = self.plan.mode == "fp16"
                self.progress = self.progress.updated(scaled=scaled, absent=self._absent())
            meta = {**self.store.meta, **self.progress.to_meta(), **self.extra_meta()}
            if scalars is not None:
                self.work.metas.append(meta)
            self.pipeline.end_step(scalars)
            if scalars is None:
                self._skip(meta)
            self._start_over()

    def _absent(self) -> list[str]:
        """Parameters that got no gradient: PyTorch does not count the step for them."""
        return [
            tensor.name
            for number, group in enumerate(self.blocks.groups)
            for index, tensor in enumerate(group.tensors)
            if tensor.trainable and index not in self._seen.get(number, ())
        ]

    def _start_over(self) -> None:
        self.sink.clear()
        self._seen.clear()
        self._in_backward = False
        self._renewed = False

    def _held_scalars(self) -> StepScalars | None:
        """The factor of the held gradients from their norm over the whole model; None if an fp16
        gradient has left the range, so that the step must be skipped."""
        late = self.pipeline.held_squares()
        grads, squares = self.work.handover.grads, self.work.handover.squares
        squares.update({number: sum_of_squares(grads.get(number, {})) for number in late})
        total = math.sqrt(math.fsum(squares.values())) / self.progress.loss_scale
        squares.clear()
        self.grad_norm = total
        if not math.isfinite(total) and self.plan.mode == "fp16":
            return None
        limit = self.plan.clip
        return self._scalars(min(1.0, limit / (total + 1e-6)) if limit else 1.0)

    def _skip(self, meta: dict[str, Any]) -> None:
        """No update counts; only the counters move on. The lanes are at rest, and what the step
        before left is committed."""
        self.work.handover.grads.clear()
        self.store.commit(meta, advance=False)
        self.work.committed.append(meta)

    def flush(self) -> None:
        """Every finished step is updated, durable and committed when it returns."""
        with self.guarded():
            self.pipeline.settle()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """An error inside a step gives up the step and leaves the last committed one intact."""
        if self._lost:
            raise StoreError(
                "the weights in memory belong to a step that did not finish, and with durability = "
                "checkpoint they have no copy on SSD; close the session and resume"
            )
        try:
            yield
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        self.pipeline.reset()
        with suppress(StoreError):  # a store that cannot go on says so at its next use
            self.store.discard()
            if self.parts.shape.write_pinned:
                self.parts.load_pinned()
            else:  # the SSD is behind what is pinned: there is nothing to go back to
                self._lost = self.work.unfinished
        self.work.forget()
        if self.resident is not None:
            self.resident.drop_gradients()
        self.progress = Progress.of(self.store.meta)
        self._start_over()

    def close(self) -> None:
        """Gives the modules their own forward back and stops the lanes."""
        self._hook.remove()
        for runner in self.runners:
            runner.remove()
        self.parts.lanes.close()
        if self.work.acts is not None:
            self.work.acts.close()

    # -- weights for the duration of a call -------------------------------------------------------

    @contextmanager
    def weights(
        self, runner: SiteRunner, *, training: bool
    ) -> Iterator[dict[str, list[torch.Tensor]]]:
        """The site's parameters for a forward."""
        with self.guarded():
            flats = self.pipeline.begin_forward(runner.number, training=training)
            yield self.views(flats)
            self.pipeline.end()

    def views(self, flats: dict[int, torch.Tensor]) -> dict[str, list[torch.Tensor]]:
        groups = self.blocks.groups
        return {groups[n].key: views(groups[n], flat) for n, flat in flats.items()}

    def leaves(
        self, site: Site, flats: dict[int, torch.Tensor], *, wide: bool
    ) -> dict[str, list[torch.Tensor]]:
        """Leaf tensors over the flat weights, whose gradients go to the sink one by one."""
        made = self.views(flats)
        for key in site.groups:
            wide_sum = self.plan.mode != "fp32" and (wide or self.sink.uses(key) > 1)
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
