"""One training step, block by block.

The model's own forward code drives it. Each site's call goes through an autograd function: forward
runs without a graph and keeps the inputs; backward recomputes, hands the weight gradients to the
optimizer and returns the input gradients. When autograd has finished, the step ends: with clipping
or loss scaling the held gradients get their factor, and the next forward is prepared. So user code
is `loss = model(**batch).loss; loss.backward()`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lohan.device.base import CpuDevice, Device, forked_random_state, move_buffers, to_device
from lohan.errors import RankError, StoreError
from lohan.layout import RESIDENT, Blocks, Site
from lohan.model_files.adapters import base_of
from lohan.optim import Optimizer
from lohan.plan import Plan
from lohan.runtime.activations import Gathered, Output, SavedCall
from lohan.runtime.ambient import Ambient, hand_on
from lohan.runtime.batching import Cuts
from lohan.runtime.buffers import ChangedBuffers, as_before
from lohan.runtime.build import Parts, build_parts
from lohan.runtime.compiling import Compiled
from lohan.runtime.elsewhere import leave_places
from lohan.runtime.gradients import GradientSink, sum_of_squares
from lohan.runtime.hollow import run_hollow
from lohan.runtime.keeping import run_again, run_and_keep
from lohan.runtime.optimizer import StepScalars
from lohan.runtime.pool import HostPool
from lohan.runtime.progress import Progress
from lohan.runtime.recipes import Recipes
from lohan.runtime.resident import Resident
from lohan.runtime.sites import SiteRunner, fills_cache
from lohan.runtime.together import Together
from lohan.storage.store import Store
from lohan.team import Team
from lohan.tensors import views
from lohan.trace import Trace


class Executor:
    """Composes lanes, weights, activations, gradients and optimizer into steps."""

    def __init__(
        self, model: nn.Module, *, blocks: Blocks, plan: Plan, store: Store, optimizer: Optimizer,
        pool: HostPool, trace: Trace, kept: Mapping[int, frozenset[str]] | None = None,
        device: Device | None = None, team: Team | None = None, compiled: Compiled | None = None,
    ) -> None:  # fmt: skip
        self.device = device or CpuDevice()
        self.team, self.together = team, Together(team, blocks.groups)
        self.mean_over = 1  # ranks over whose losses gradients are the mean, not the sum
        self.model, self.blocks, self.plan, self.store = model, blocks, plan, store
        self.optimizer, self.trace = optimizer, trace
        self.numbers = {group.key: number for number, group in enumerate(blocks.groups)}
        self.parts: Parts = build_parts(blocks, plan, store=store, pool=pool, optimizer=optimizer,
                                        trace=trace, device=self.device, team=team)  # fmt: skip
        self.pipeline, self.work, self.stash = (
            self.parts.pipeline, self.parts.work, self.parts.stash
        )  # fmt: skip
        self.sink = GradientSink()
        self.recipes, self.cuts = Recipes(kept or {}), Cuts()
        self.compiled = compiled or Compiled(None, sites=0)
        self.buffers = ChangedBuffers(model)
        self.progress = Progress.of(store.meta)
        self.resident = None
        if blocks.resident:
            self.resident = Resident(
                model, groups=self.parts.resident(), slots=blocks.resident,
                place=self.device.torch_device, team=team,
            )  # fmt: skip
        move_buffers(model, self.device.torch_device)
        # Gives integer inputs a gradient path.
        self.anchor = torch.zeros((), requires_grad=True, device=self.device.torch_device)
        self.extra_meta: Callable[[], dict[str, Any]] = dict
        self.grad_norm: float | None = None
        self.running: list[SiteRunner] = []  # whose weights are in place
        leave_places(model, blocks)
        self.runners = [
            SiteRunner(self, number, site, model.get_submodule(site.name))
            for number, site in enumerate(blocks.sites)
        ]
        entrances = {id(module): module for module in (model, base_of(model))}.values()
        self._hooks = [
            module.register_forward_pre_hook(self._enter, with_kwargs=True) for module in entrances
        ]
        self._in_backward = False
        self._lost = False
        self._renewed = True  # resident parameters are those of the last step
        self._seen: dict[int, frozenset[int]] = {}  # tensors that got a gradient, by group

    # -- a block ----------------------------------------------------------------------------------

    def forward(
        self, runner: SiteRunner, call: SavedCall, *, graph: bool = True
    ) -> tuple[list[Any], Any]:
        """Runs a site; returns its output as leaves and layout, without a graph. `graph`: backward
        will come to it."""
        versions, output = call.versions(), Output(call)
        weights = self.weights(runner, training=True, graph=graph)
        with weights as tensors, runner.installed(tensors), self.device.computing():
            self._cut(runner, call)
            if graph:
                self.stash.begin(runner.number, call, self.pipeline.act_places())
                runner.mark_trainable()
            buffers = runner.buffers.before()
            for part in call.slices(self.plan.micro_batch):
                call.rng.append(self.device.random_state())
                out, kept = self._run_slice(runner, call, part, graph=graph)
                call.kept.append(kept)
                self.stash.keep(runner.number, call)
                output.put(part, out)
            call.check_untouched(versions)
            call.buffers = runner.buffers.after(buffers)
            self.stash.hold(runner.number, call)
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
            states = call.rng[-1], self.device.random_state()
            self.compiled.learn(runner.number, runner.original, *states)
        return out, None

    def _cut(self, runner: SiteRunner, call: SavedCall) -> None:
        """Finds out how a call falls into slices; its weights are in place."""
        call.ambient = Ambient.now(self.device.torch_device.type)
        if self.plan.micro_batch and self.plan.micro_batch < call.batch:
            run = partial(call.ambient.run, runner.original)
            with forked_random_state(self.device), runner.buffers.untouched():
                call.cut = self.cuts.of(runner.module, call, run)

    def evaluate(self, runner: SiteRunner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a site without gradients: nothing is kept. What fills a cache is not cut."""
        call = SavedCall(runner.site.name, args, kwargs)
        weights = self.weights(runner, training=False)
        with weights as tensors, runner.installed(tensors), self.device.computing():
            if fills_cache((*args, *kwargs.values())):
                return runner.original(*args, **kwargs)
            self._cut(runner, call)
            output = Output(call)
            for part in call.slices(self.plan.micro_batch):
                _, args, kwargs = call.restore(part, grad=False)
                output.put(part, call.ambient.run(runner.original, *args, **kwargs))
        return hand_on(*pytree.tree_unflatten(output.leaves, output.spec))

    def backward(
        self, runner: SiteRunner, call: SavedCall, grads: tuple[torch.Tensor | None, ...]
    ) -> list[torch.Tensor | None]:
        """Recomputes a site slice by slice; input gradients return, weight gradients move on."""
        parts, site = call.slices(self.plan.micro_batch), runner.number
        inputs = [Gathered(call.batch) for _ in call.tensors]
        flats = self.pipeline.begin_backward(site)
        self.stash.restore(site, call, self.pipeline.act_places())
        self.take_back(runner.site.groups)
        leaves = self.leaves(runner.site, flats, wide=len(parts) > 1)
        with (
            runner.installed(leaves), forked_random_state(self.device), self.device.computing(),
            as_before(call.buffers),
        ):  # fmt: skip
            for number, part in enumerate(parts):
                self.device.set_random_state(call.rng[number])
                self.stash.restore_slice(site, call, number)
                kept = call.kept[number]
                tensors, args, kwargs = call.restore(part, grad=True)
                fast = self.compiled.of(site) if kept is None else None
                run = partial(call.ambient.run, fast or runner.original, *args, **kwargs)
                with torch.enable_grad():
                    out = pytree.tree_leaves(run()) if kept is None else run_again(run, kept)
                _backward(out, _gradients(call, grads, number, part))
                for position, (slot, tensor) in enumerate(zip(inputs, tensors, strict=True)):
                    if tensor.grad is not None:
                        if len(parts) == 1 or call.cut.inputs[position]:
                            slot.put(part, tensor.grad)
                        else:
                            slot.add(tensor.grad)
                self.stash.drop_slice(site, call, number)
        self.stash.drop(site, call)
        self.finish_backward(runner)
        return [slot.value for slot in inputs]

    def finish_backward(self, runner: SiteRunner) -> None:
        """Hands over the groups for which this was the last use in backward."""
        over = [key for key in runner.site.groups if self.sink.withdraw(key)]
        self._set_aside([key for key in runner.site.groups if key not in over])
        finished = [self.numbers[key] for key in over if not self.blocks.by_key[key].frozen]
        scheduled = self.pipeline.finals()
        handed = finished if scheduled is None else scheduled
        for number in handed:
            self._hand_over(number, self.sink.take(self.blocks.groups[number].key))
        self.pipeline.end_backward(runner.number, handed)

    def _hand_over(
        self, number: int, grads: dict[int, torch.Tensor], *, late: bool = False
    ) -> None:
        """`late`: when backward has ended, beside what the schedule brings to host memory."""
        self._seen[number] = frozenset(grads)
        if self.work.device is None:
            self.work.handover.grads[number] = grads
            return
        if late:
            here = {i: grad.cpu() for i, grad in grads.items()}
            here |= self.work.device.landing.aside().pop(number, {})  # nobody else added to it
            self._seen[number] = frozenset(here)
            self.work.handover.grads[number] = self.together.summed(number, here)
        else:
            self.work.handover.on_device[number] = grads

    def _set_aside(self, keys: list[str]) -> None:
        """Gradients to which an earlier block adds, as of a head that shares the embedding's
        weights, do not wait on the device for it, unless ranks are to exchange them there."""
        if self.work.device is None or self.team is not None:
            return
        for key in keys:
            number, grads = self.numbers[key], self.sink.take(key)
            self.work.device.landing.set_aside(number, self.blocks.groups[number], grads)

    def take_back(self, keys: Iterable[str]) -> None:
        """A block is about to add to gradients that were set aside."""
        if self.work.device is None:
            return
        for key in keys:
            if grads := self.work.device.landing.take_back(self.numbers[key]):
                self.sink.put(key, grads, factor=1.0)

    # -- a step -----------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.enter_forward()
        here = self.device.torch_device.type == "cpu"
        return None if here else to_device(self.device, (args, kwargs))

    def enter_forward(self) -> None:
        """Before any module of the model runs: resident parameters are those of the last step."""
        if self._in_backward:  # the last backward died outside our code before it finished
            self._check_alone()
            self.abort()
        if self.resident is not None and RESIDENT in self.numbers and not self._renewed:
            with self.guarded():
                self.pipeline.renewed(self.numbers[RESIDENT])
            self.resident.publish()
            self._renewed = True
        if not torch.is_grad_enabled():
            with self.guarded():
                self.pipeline.enter_pass()

    def enter_backward(self) -> None:
        """Called by every backward of ours; the first asks autograd to call `finish_step`."""
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self.finish_step)
            self.pipeline.turn(self._scalars(1.0))

    def _scalars(self, clip_factor: float) -> StepScalars:
        return StepScalars(
            lr=self.optimizer.lr_at(self.progress.step),
            update=self.progress.updates + 1,
            grad_scale=clip_factor / (self.progress.loss_scale * self.mean_over),
            missed=self.progress.missed,
        )

    def finish_step(self) -> None:
        """Runs when autograd has finished."""
        with self.guarded():
            late = self.together.late(self.pipeline.way, self._unfinished())
            for number in late:  # some of their uses got no gradient
                grads = self.sink.take(self.blocks.groups[number].key)
                self._hand_over(number, grads, late=True)
            if self.resident is not None and RESIDENT in self.numbers:
                grads = self.resident.take_gradients()
                self._hand_over(self.numbers[RESIDENT], grads, late=True)
            self.pipeline.finish()
            scalars = self._held_scalars() if self.plan.holds_all else self._scalars(1.0)
            if scalars is None:
                self.progress = self.progress.overflowed()
            else:
                scaled = self.plan.mode == "fp16"
                self.progress = self.progress.updated(scaled=scaled, absent=self._absent())
            meta = {
                **self.store.meta, **self._progress_meta(), **self.buffers.to_meta(),
                **self.extra_meta(),
            }  # fmt: skip
            if scalars is not None:
                self.work.metas.append(meta)
            self.pipeline.end_step(scalars)
            if scalars is None:
                self._skip(meta)
            self._start_over()

    def _unfinished(self) -> list[int]:
        """Groups whose gradients nobody has handed over."""
        aside = self.work.device.landing.aside() if self.work.device is not None else {}
        waiting = [self.numbers[key] for key in self.sink.waiting()]
        return waiting + [n for n in aside if n not in self._seen and n not in waiting]

    def _progress_meta(self) -> dict[str, Any]:
        return self.progress.to_meta(self.device.random_state())

    def _absent(self) -> list[str]:
        """Parameters that got no gradient: PyTorch does not count the step for them."""
        names = [
            tensor.name
            for number, group in enumerate(self.blocks.groups)
            for index, tensor in enumerate(group.tensors)
            if tensor.trainable and index not in self._seen.get(number, ())
        ]
        return self.together.absent(names)

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
        summed = self.together.added(math.fsum(squares.values()))
        total = math.sqrt(summed) / (self.progress.loss_scale * self.mean_over)
        squares.clear()
        self.grad_norm = total
        if not math.isfinite(total) and self.plan.mode == "fp16":
            return None
        limit = self.plan.clip
        return self._scalars(min(1.0, limit / (total + 1e-6)) if limit else 1.0)

    def _skip(self, meta: dict[str, Any]) -> None:
        """No update counts; only the counters move on. The lanes are at rest, and what the step
        before left is committed."""
        self.work.drop_gradients()
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
            if self.team is not None:  # Note [an error on one rank]
                self.team.give_up()
            else:
                self.abort()
            raise

    def _check_alone(self) -> None:
        if self.team is not None:
            self.team.give_up()
            raise RankError(
                "the last backward did not finish, and the other ranks wait in it; resume the run "
                "with all its ranks"
            )

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
        for hook in self._hooks:
            hook.remove()
        for runner in self.runners:
            runner.remove()
        self.parts.lanes.close()
        if self.work.acts is not None:
            self.work.acts.close()

    # -- weights for the duration of a call -------------------------------------------------------

    @contextmanager
    def weights(
        self, runner: SiteRunner, *, training: bool, graph: bool = True
    ) -> Iterator[dict[str, list[torch.Tensor]]]:
        """The site's parameters for a forward."""
        with self.guarded():
            flats = self.pipeline.begin_forward(runner.number, training=training, graph=graph)
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
