"""One training step: how it begins, ends, and is given up.

The model's own forward code drives it. Each site's call goes through an autograd function
(wrapping.py) with its own forward and backward, and gradients go to the optimizer
through gradients.py. When autograd has finished, the step ends: with clipping or loss scaling the
held gradients get their factor, and the next forward is prepared. So user code is
`loss = model(**batch).loss; loss.backward()`.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lohan.capture.blocks import dtype_of, install_placeholders, put_parameter, views
from lohan.capture.recompute import SlicedCompute
from lohan.capture.tiling import Tiling
from lohan.capture.tracing import SavePlans
from lohan.checkpoint.adapters import base_of
from lohan.checkpoint.store_io import ChangedBuffers, TrainState
from lohan.device.base import move_buffers, to_device
from lohan.device.choose import Compiled
from lohan.device.ranks import ProcessGroup
from lohan.engine.actions import ActionRunner
from lohan.engine.buffers import Dequantised, HostPool, StepScalars
from lohan.engine.clipping import Clipping
from lohan.engine.gradients import (
    Accumulated,
    GradientCollector,
    GroupGrads,
    StepCollectives,
)
from lohan.engine.lanes import Lanes
from lohan.engine.scheduler import ActionScheduler
from lohan.engine.wrapping import BlockRunner, WrappedSite
from lohan.errors import LohanError, RankError, StoreError
from lohan.model.layout import RESIDENT, Blocks, FlatGroup, ParameterRef, TensorSpec
from lohan.model.plan import Plan
from lohan.model.state import STATE_FORMATS
from lohan.optim import Optimizer
from lohan.schedule.steps import deferred_groups, spec_of
from lohan.store.store import Status, Store
from lohan.util.trace import Trace
from lohan.util.units import counted

if TYPE_CHECKING:
    from lohan.engine.session import PlanContext


# -- Small parameters that stay in memory for the whole run ----------------------------------------
#
# As ordinary leaves of the user's graph.
#
# Norms and loose vectors. Their groups have cached weight slots. The one that is trained is
# updated like any other; its leaves are a copy of it, updated when the next forward begins. Frozen
# ones are views of their slot, or copies on a device. Of several ranks each has a shard in its
# slot, and the caller gathers them.


class Resident:
    """Owner of the parameters of the resident groups, each given with its cached slot."""

    def __init__(
        self, model: nn.Module, *, groups: Sequence[tuple[FlatGroup, torch.Tensor]],
        refs: tuple[ParameterRef, ...], torch_device: torch.device, process_group: ProcessGroup,
    ) -> None:  # fmt: skip
        self._process_group = process_group
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # of a slot that is updated
        made: dict[str, list[nn.Parameter]] = {RESIDENT: []}
        for group, flat in groups:
            if group.frozen:
                current = self._gathered(flat, group.numel).to(torch_device)
            else:
                current = flat.new_empty(group.numel, device=torch_device)
                self._copies.append((current, flat))
            made[group.key] = [
                _resident_parameter(view, spec)
                for view, spec in zip(views(group, current), group.tensors, strict=True)
            ]
        self.parameters = made[RESIDENT]
        for ref in refs:
            put_parameter(model, ref, made[ref.group][ref.tensor])
        self.copy_updated()

    def copy_updated(self) -> None:
        with torch.no_grad():
            for current, flat in self._copies:
                # The slot is updated when compute is done with the step, and with this copy.
                current.copy_(self._gathered(flat, current.numel()), non_blocking=True)

    def _gathered(self, flat: torch.Tensor, count: int) -> torch.Tensor:
        return self._process_group.all_gather(flat)[:count]

    def take_gradients(self) -> dict[int, torch.Tensor]:
        """Where compute made them."""
        grads = {
            index: parameter.grad.contiguous()
            for index, parameter in enumerate(self.parameters)
            if parameter.grad is not None
        }
        self.drop_gradients()
        return grads

    @property
    def has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self.parameters)

    def drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def _resident_parameter(values: torch.Tensor, spec: TensorSpec) -> nn.Parameter:
    made = nn.Parameter(values, requires_grad=spec.trainable)
    made.stored_as = spec.name  # type: ignore[attr-defined]
    return made


# -- When a step is committed ----------------------------------------------------------------------


SETTLING = 2  # steps of a plan that are committed in any case: what is wrong shows in them


class CommitClock:
    """Decides, step by step, whether the next one is committed; of several ranks, all alike."""

    def __init__(self, plan: Plan, process_group: ProcessGroup) -> None:
        self._plan, self._process_group = plan, process_group
        self._steps = self._since = 0  # of the plan, and of them since the last commit
        self._committed_s = self._ended_s = time.monotonic()

    def after_step(self, *, commits: bool) -> bool:
        """A step has ended, which `commits`: whether the next one does."""
        now_s = time.monotonic()
        took_s, self._ended_s = now_s - self._ended_s, now_s
        self._steps, self._since = self._steps + 1, self._since + 1
        if commits:
            self.committed()
        interval = self._plan.commit
        if not self._plan.commits_by_interval or self._steps < SETTLING:
            return True
        if interval.steps and self._since + 1 >= interval.steps:
            return True
        late = now_s + 2 * took_s - self._committed_s > interval.seconds  # the step after it
        return bool(interval.seconds) and self._process_group.any_rank(late)

    def committed(self) -> None:
        self._since, self._committed_s = 0, time.monotonic()


# -- Executor -------------------------------------------------------------------------------------


class Executor:
    """Composes lanes, weights, activations, gradients and optimizer into steps."""

    mean_over = 1  # ranks over whose losses gradients are the mean, not the sum
    in_head = False  # forward makes the head's gradients, which is no backward yet
    resident: Resident | None = None
    # Called with the inputs of a forward by name, before and after they went to a device.
    inputs_moved: Callable[[dict[str, Any], dict[str, Any]], None] | None = None
    forward_began_s = 0.0  # of the last call of the model with gradients
    inference_began_s = math.inf  # of the first one without, since then
    _in_backward = False
    _lost = ""  # why weights in memory are of no step, if they are
    _resident_current = True  # resident parameters are those of the last step

    def __init__(
        self, model: nn.Module, context: PlanContext, plan: Plan, *, store: Store,
        optimizer: Optimizer, trace: Trace, save_plans: SavePlans,
    ) -> None:  # fmt: skip
        blocks, device = context.blocks, context.device
        self.model, self.blocks, self.device, self.plan = model, blocks, device, plan
        self.store, self.optimizer, self.trace = store, optimizer, trace
        self.process_group = context.process_group
        self.numbers = {group.key: number for number, group in enumerate(blocks.groups)}
        self.tiling = Tiling(plan.tiles) if plan.tiles else None
        self.sites_with_weights: list[WrappedSite] = []  # whose weights are in place
        self.wrapped_sites: list[WrappedSite] = []
        self._hooks: list[RemovableHandle] = []
        self._gradient_hooks: list[RemovableHandle] = []  # of resident parameters
        self.collectives = StepCollectives(context.process_group, blocks.groups)
        two_generations = store.durability == "step"  # a committed one to go back to
        self.spec = spec_of(context.shards, plan, two_generations=two_generations)
        self.pool = HostPool(context.host_bytes, device)
        self.runner = ActionRunner(
            context, plan, self.spec, store=store, pool=self.pool, optimizer=optimizer,
            collectives=self.collectives,
        )  # fmt: skip
        self.lanes = Lanes(
            self.runner, overlap=plan.overlap, trace=trace, device=device, net=self.spec.net,
            updates_on_caller=not device.has_own_memory,
        )  # fmt: skip
        on_device = self.runner.device_parts
        self.scheduler = ActionScheduler(
            blocks.groups, self.spec, lanes=self.lanes, overlap=plan.overlap,
            slots=self.runner.slots if on_device is None else on_device.slots,
            update_mode=plan.update_mode, deferred=deferred_groups(blocks, plan),
            speculates=plan.may_speculate(two_generations=two_generations),
            by_interval=plan.commits_by_interval,
        )  # fmt: skip
        self.commit_clock = CommitClock(plan, context.process_group)
        self.collector = GradientCollector(
            blocks, plan, scheduler=self.scheduler, pending=self.runner.pending,
            gradient_offload=self.runner.gradient_offload, collectives=self.collectives,
        )  # fmt: skip
        self.block_runner = self._make_block_runner(context, save_plans)
        self.train_state = TrainState.of(store.meta)
        # Gives integer inputs a gradient path.
        self.anchor = torch.zeros((), requires_grad=True, device=device.torch_device)
        self.extra_meta: Callable[[], dict[str, Any]] = dict
        self.clipping = Clipping(
            plan, two_generations=two_generations, scheduler=self.scheduler, runner=self.runner,
            store=store, collectives=self.collectives,
        )  # fmt: skip
        try:
            self._take_over(model, blocks)
        except BaseException:
            self.close()
            raise
        self.buffers = ChangedBuffers(model, store.meta)  # as they are where compute is

    def _make_block_runner(self, context: PlanContext, save_plans: SavePlans) -> BlockRunner:
        blocks, plan, device = self.blocks, self.plan, self.device
        compute = SlicedCompute(
            device, micro_batch=plan.micro_batch, activations=self.runner.activations,
            save_plans=save_plans,
            compiled=Compiled(None if plan.tiles else context.backend, sites=len(blocks.sites)),
        )  # fmt: skip
        return BlockRunner(
            blocks.groups, self.scheduler, self.collector, compute, device=device,
            guarded=self.guarded,
            dequantised=Dequantised(blocks, self.pool, device, dtype_of(STATE_FORMATS[plan.dtype])),
        )  # fmt: skip

    def _take_over(self, model: nn.Module, blocks: Blocks) -> None:
        """The model's blocks run from the store, until `close`."""
        if blocks.resident:
            cached = [(blocks.groups[number], flat) for number, flat in self.runner.resident()]
            self.resident = Resident(
                model, groups=cached, refs=blocks.resident, torch_device=self.device.torch_device,
                process_group=self.process_group,
            )  # fmt: skip
            for parameter in self.resident.parameters:
                hook = parameter.register_post_accumulate_grad_hook(self._got_resident_gradient)
                self._gradient_hooks.append(hook)
        move_buffers(model, self.device.torch_device)
        install_placeholders(model, blocks, self.device.torch_device)
        for number, site in enumerate(blocks.sites):
            wrapped = WrappedSite(self, number, site, model.get_submodule(site.name))
            self.wrapped_sites.append(wrapped)
        for module in {id(module): module for module in (model, base_of(model))}.values():
            self._hooks.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))

    @contextmanager
    def without_hooks(self) -> Iterator[None]:
        """The model's own hooks alone."""
        modules = {id(module): module for module in (self.model, base_of(self.model))}.values()
        before = [(module, dict(module._forward_pre_hooks)) for module in modules]
        for hook in self._hooks:
            for module in modules:
                module._forward_pre_hooks.pop(hook.id, None)
        try:
            yield
        finally:
            for module, hooks in before:
                module._forward_pre_hooks.update(hooks)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.enter_forward()
        if self.device.torch_device.type == "cpu":
            return None
        moved = to_device(self.device, (args, kwargs))
        if self.inputs_moved is not None:
            self.inputs_moved(kwargs, moved[1])
        return moved

    def enter_forward(self) -> None:
        """Before any module of the model runs: resident parameters are those of the last step."""
        self._roll_back_unfinished()
        if self.resident is not None and RESIDENT in self.numbers and not self._resident_current:
            with self.guarded():
                self.scheduler.wait_updated(self.numbers[RESIDENT])
            self.resident.copy_updated()
            self._resident_current = True
        if torch.is_grad_enabled():
            self.forward_began_s, self.inference_began_s = time.perf_counter(), math.inf
        else:
            self.inference_began_s = min(self.inference_began_s, time.perf_counter())
            self.trace.begin_inference()
            with self.guarded():
                self.scheduler.enter_inference()

    def _roll_back_unfinished(self) -> None:
        """Rolls a step back whose backward died outside our code before it finished."""
        self._check_usable()
        if self._in_backward:
            if self.process_group.several:
                self.process_group.abort()
                raise RankError(
                    "the last backward did not finish, and the other ranks wait in it; resume the "
                    "run with all its ranks"
                )
            self.abort_step()
            self._check_usable()

    def enter_backward(self) -> None:
        """Called by every backward of ours; the first asks autograd to call `on_backward_done`."""
        self._check_usable()
        if not self._in_backward:
            self._in_backward = True
            whole = self.collector.accumulated is None
            finish = self.on_backward_done if whole else self._on_part_done
            torch.autograd.Variable._execution_engine.queue_callback(finish)
            self.runner.pending.squares = {}
            self.scheduler.schedule_backward(
                self._scalars(self.clipping.known_factor), whole=whole,
                speculate=self.clipping.skips_norm_wait(repeatable=self.buffers.unchanged),
            )  # fmt: skip
            if self.scheduler.skips_norm_wait and self.clipping.all_held_in_memory:
                self.runner.keep_gradients()

    def _got_resident_gradient(self, _: torch.Tensor) -> None:
        """A backward may reach no block at all: resident parameters are updated all the same."""
        if not self.in_head:
            with self.guarded():
                self.enter_backward()

    @property
    def _unscale_divisor(self) -> float:
        """Divisor that unscales gradients, before they are clipped."""
        return self.train_state.loss_scale * self.mean_over

    @property
    def grad_norm(self) -> float | None:
        """Global gradient norm of the last step, where it is taken (`Plan.needs_norm`)."""
        return self.clipping.norm

    def _scalars(self, clip_factor: float) -> StepScalars:
        return StepScalars(
            lr=self.optimizer.lr_at(self.train_state.step),
            update=self.train_state.updates + 1,
            grad_multiplier=clip_factor / self._unscale_divisor,
            missed_updates=self.train_state.missed_updates,
            squares=self.runner.pending.squares,
        )

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Every backward inside adds to the gradients of one step, which is taken at the end."""
        if self.collector.accumulated is not None:
            raise LohanError(
                "accumulate: gradients are added up already; one `with session.accumulate()` is "
                "one step, and the next begins behind it"
            )
        self._roll_back_unfinished()
        folder, step = self.store.dirs[0].parent, self.train_state.step
        sums = self.collector.accumulated = Accumulated(self.blocks.groups, self.pool, folder)
        try:
            yield
            self._roll_back_unfinished()
            if sums.numbers() or (self.resident is not None and self.resident.has_gradients):
                self._in_backward = True
                with self.guarded():
                    self.scheduler.schedule_backward(self._scalars(1.0), whole=False)
                self.on_backward_done()
        except BaseException:
            if self.train_state.step == step and self.resident is not None:
                self.resident.drop_gradients()
            raise
        finally:
            sums.close()
            self.collector.accumulated = None

    def _on_part_done(self) -> None:
        """Runs when autograd has finished, and the step has not."""
        with self.guarded():
            self.collector.accumulate_rest()
            self.scheduler.pause()
            self.collector.clear()
            self._in_backward = False

    def on_backward_done(self) -> None:
        """Runs when autograd has finished."""
        with self.guarded():
            resident: dict[int, GroupGrads] = {}
            if self.resident is not None and RESIDENT in self.numbers:
                resident[self.numbers[RESIDENT]] = self.resident.take_gradients()
            self.collector.finish_rest(resident)
            self.scheduler.backward_done()
            unsummed = self.scheduler.wait_for_squares() if self.plan.needs_norm else ()
            factor = self.clipping.resolve_step(self._unscale_divisor, unsummed=unsummed)
            if self.clipping.must_rerun:
                self._reset_step()
                return
            scalars = None if factor is None else self._scalars(factor)
            committed = self.store.meta
            if scalars is None:
                self.train_state = self.train_state.overflowed()
            else:
                scaled = self.plan.dtype == "fp16"
                self.train_state = self.train_state.updated(
                    scaled=scaled, absent=self.collector.absent()
                )
            meta = {
                **committed, **self.train_state.to_meta(self.device.random_state()),
                **self.buffers.to_meta(), **self.extra_meta(),
            }  # fmt: skip
            commits = self.scheduler.commits
            next_commits = self.commit_clock.after_step(commits=commits)
            if scalars is not None:
                self.runner.steps_to_end.append((meta, commits))
            self.scheduler.close_step(scalars)
            if scalars is None:  # lanes are idle, and the step before has ended
                self._skip(meta, commits=commits)
            self.scheduler.commits = next_commits
            self.trace.end_step()
            self._reset_step()

    def _skip(self, meta: dict[str, Any], *, commits: bool) -> None:
        """The end of a step that changes no weight."""
        self.runner.drop_gradients()
        self.runner.ended_metas.append(meta)
        if self.runner.uncommitted is None:
            self.store.commit(meta, advance=False)
        else:
            self.runner.uncommitted = meta
            if commits:
                self.runner.commit_uncommitted()

    def _reset_step(self) -> None:
        self.collector.clear()
        self._in_backward = False
        self._resident_current = False

    def flush(self) -> None:
        """The updates of every finished step have ended when it returns; those that commit are
        durable."""
        self._roll_back_unfinished()
        with self.guarded():
            self.scheduler.drain()

    def commit(self) -> None:
        """Every finished step is durable when it returns, where there are two generations."""
        self.flush()
        with self.guarded():
            self.runner.commit_uncommitted()
            self.commit_clock.committed()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """An error inside a step rolls the step back; the last committed one is intact."""
        self._check_usable()
        try:
            yield
        except BaseException:
            if self.process_group.several:  # Note [an error on one rank]
                self.process_group.abort()
            else:
                self.abort_step()
            raise

    @property
    def outside_backward(self) -> bool:
        """Weights and state are those of the last finished step, or will be when it is flushed."""
        return not self._lost and not self._in_backward

    @property
    def lost(self) -> bool:
        """A roll-back did not complete: memory holds the weights of no step."""
        return bool(self._lost)

    def _check_usable(self) -> None:
        if self._lost:
            raise StoreError(f"{self._lost}; close the session and resume")

    def abort_step(self) -> None:
        """Back to the last committed step. Until that is done, and if it cannot be done, nothing
        but `close` is possible: weights of two steps in memory would be trained and committed."""
        self._lost = "the roll-back of a step that failed was interrupted"
        lost = 0
        try:
            if self.runner.steps_to_end or self.runner.uncommitted is not None:
                # Steps whose backward has returned are not given up with the one after them, unless
                # a lane has failed. What counts is the error of the step that failed.
                with suppress(Exception):
                    self.scheduler.finish_earlier_steps(in_backward=self._in_backward)
                    if not self.runner.unfinished:  # no update of the step that failed has run
                        self.runner.commit_uncommitted()
            lost = len(self.runner.steps_to_end)
            if self.runner.uncommitted is not None:
                lost += TrainState.of(self.runner.uncommitted).step
                lost -= TrainState.of(self.store.meta).step
            self.scheduler.reset()
            self.store.discard()
            if self.runner.activation_spill is not None:
                self.runner.activation_spill.discard_in_flight()
            if self.store.status is Status.FAILED:
                self._lost = f"a step failed, and the store cannot go on: {self.store.cause}"
            elif self.store.durability == "step":
                self.runner.load_host_cached()
                self._lost = ""
            elif self.runner.unfinished:  # the SSD is behind what is cached: nothing to go back to
                self._lost = (
                    "the weights in memory belong to a step that did not finish, and with "
                    "durability = checkpoint they have no copy on SSD"
                )
            else:
                self._lost = ""
        except LohanError as error:
            self._lost = f"a step failed, and rolling it back failed too ({error})"
        self.runner.forget()
        self.clipping.forget()
        if self.resident is not None:
            self.resident.drop_gradients()
        self.train_state = TrainState.of(self.store.meta)
        self._reset_step()
        self.scheduler.commits = True
        self.commit_clock.committed()
        if lost:
            warnings.warn(
                f"a step failed before {counted(lost, 'step')} before it could be committed: "
                f"training goes on after step {self.train_state.step}", stacklevel=2,
            )  # fmt: skip

    def close(self) -> None:
        """Gives the modules their own forward back and stops the lanes."""
        for hook in (*self._hooks, *self._gradient_hooks):  # they hold the executor
            hook.remove()
        for wrapped in self.wrapped_sites:
            wrapped.remove()
        self.lanes.close()
        self.runner.close()
