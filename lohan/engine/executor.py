"""The beginning, the end and the roll-back of a training step.

The model's own forward code determines the calls. The call of each site goes through an autograd
function (wrapping.py) with its own forward and backward, and gradients are passed to the optimizer
by gradients.py. When autograd has finished, the step ends: updates that have waited for the norm
are queued with the clipping factor, and the next forward is scheduled. User code is therefore
`loss = model(**batch).loss; loss.backward()`.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lohan.capture.blocks import dtype_of
from lohan.capture.placeholders import (
    StepGradients,
    install_placeholders,
)
from lohan.capture.recompute import SlicedCompute
from lohan.capture.tiling import Tiling
from lohan.capture.tracing import SavePlans
from lohan.checkpoint.adapters import base_of
from lohan.checkpoint.train_state import ChangedBuffers, TrainState
from lohan.device.base import move_buffers, to_device
from lohan.device.choose import Compiled
from lohan.engine.actions import ActionRunner
from lohan.engine.buffers import Dequantised, HostPool, SharedSlots, StepScalars
from lohan.engine.gradient_transport import GroupGrads
from lohan.engine.gradients import Accumulated, GradientCollector, StepCollectives
from lohan.engine.lanes import Lanes
from lohan.engine.resident import Resident
from lohan.engine.scheduler import ActionScheduler
from lohan.engine.step import Clipping, CommitClock, Decision, Factor, State, Step, Steps
from lohan.engine.user_code import KeptGradients, UnwantedGradients, WatchedParameters
from lohan.engine.wrapping import BlockRunner, WrappedSite
from lohan.errors import LohanError, ModelError, RankError, StoreError
from lohan.model.layout import RESIDENT, Blocks
from lohan.model.plan import Plan
from lohan.model.state import STATE_FORMATS
from lohan.param_groups import META_KEY, HyperParameters
from lohan.schedule.placement import Gate, UpdateOptions
from lohan.schedule.steps import spec_of
from lohan.store.store import Status, Store
from lohan.util.trace import Trace
from lohan.util.units import counted

if TYPE_CHECKING:
    from lohan.engine.context import PlanContext


class Executor:
    """Combines lanes, weights, activations, gradients and optimizer into training steps."""

    # The number of ranks over whose losses gradients are averaged; 1 if they are summed.
    mean_over = 1
    in_head = False  # True while the fused forward and backward of the head runs.
    resident: Resident | None = None
    # A callback that gets the inputs of a forward by name, before and after their copy to a device.
    inputs_moved: Callable[[dict[str, Any], dict[str, Any]], None] | None = None
    forward_began_s = 0.0  # Start of the last call of the model with gradients.
    inference_began_s = math.inf  # Start of the first call without gradients since then.
    # The reason why the weights in memory are inconsistent; empty if they are consistent.
    _lost = ""
    _resident_current = True  # True if resident parameters have the values of the last step.

    def __init__(
        self,
        model: nn.Module,
        context: PlanContext,
        plan: Plan,
        *,
        store: Store,
        groups: HyperParameters,
        trace: Trace,
        save_plans: SavePlans,
    ) -> None:
        blocks, device = context.blocks, context.device
        self.model, self.blocks, self.device, self.plan = model, blocks, device, plan
        self.store, self.groups, self.trace = store, groups, trace
        self.process_group = context.process_group
        self.numbers = {group.key: number for number, group in enumerate(blocks.groups)}
        self.tiling = Tiling(plan.tiles) if plan.tiles else None
        # sites whose weights are installed in their module
        self.sites_with_weights: list[WrappedSite] = []
        self.wrapped_sites: list[WrappedSite] = []
        self._hooks: list[RemovableHandle] = []
        self._gradient_hooks: list[RemovableHandle] = []  # hooks of resident parameters
        self.step_gradients = StepGradients(self.refresh_resident)
        self.steps = Steps()
        self.collectives = StepCollectives(context.process_group, blocks.groups)
        self.spec = spec_of(context.shards, plan)
        self.pool = HostPool(context.host_bytes, device)
        self.runner = ActionRunner(
            context,
            plan,
            self.spec,
            store=store,
            pool=self.pool,
            collectives=self.collectives,
            steps=self.steps,
        )
        self.lanes = Lanes(
            self.runner,
            overlap=plan.overlap,
            trace=trace,
            device=device,
            net=self.spec.net,
            updates_on_caller=device.computes_on_cores and not device.has_own_memory,
        )
        on_device = self.runner.device_parts
        self.scheduler = ActionScheduler(
            blocks.groups,
            self.spec,
            lanes=self.lanes,
            slots=(
                SharedSlots(self.runner.slots, self.pool) if on_device is None else on_device.slots
            ),
            updates=UpdateOptions.of(plan, blocks),
            steps=self.steps,
        )
        self.commit_clock = CommitClock(plan, context.process_group)
        self.collector = GradientCollector(
            blocks,
            plan,
            scheduler=self.scheduler,
            pending=self.runner.pending,
            gradient_offload=self.runner.pending.offload,
            collectives=self.collectives,
            steps=self.steps,
        )
        self.block_runner = self._make_block_runner(context, save_plans)
        self.train_state = TrainState.of(store.meta)
        # An additional input of every block and of the head. It requires a gradient, so autograd
        # also calls the backward of a block whose other inputs are integers.
        # User code may write weights, and so make an executor, where gradients are disabled.
        with torch.inference_mode(False), torch.enable_grad():
            self.anchor = torch.zeros((), requires_grad=True, device=device.torch_device)
            function: Any = self.anchor.view_as(self.anchor).grad_fn
        # The node of `anchor` in the graph. Autograd executes it if a backward computes all
        # gradients, but not in torch.autograd.grad for selected inputs.
        self._anchor_node = function.next_functions[0][0]
        # The sums of `accumulating` and the gradients of resident parameters, set aside during a
        # backward whose gradients are not added to them.
        self._sums_before: tuple[Any, list[torch.Tensor | None]] = None, []
        self.extra_meta: Callable[[], dict[str, Any]] = dict
        self.clipping = Clipping(
            plan,
            scheduler=self.scheduler,
            runner=self.runner,
            store=store,
            collectives=self.collectives,
            steps=self.steps,
        )
        try:
            self._take_over(model, blocks)
        except BaseException:
            self.close()
            raise
        self.buffers = ChangedBuffers(model, store.meta)  # the buffers on the compute device

    def _make_block_runner(self, context: PlanContext, save_plans: SavePlans) -> BlockRunner:
        blocks, plan, device = self.blocks, self.plan, self.device
        compute = SlicedCompute(
            device,
            micro_batch=plan.micro_batch,
            activations=self.runner.activations,
            save_plans=save_plans,
            compiled=Compiled(None if plan.tiles else context.backend, sites=len(blocks.sites)),
        )
        return BlockRunner(
            blocks.groups,
            self.scheduler,
            self.collector,
            compute,
            device=device,
            guarded=self.guarded,
            dequantised=Dequantised(blocks, self.pool, device, dtype_of(STATE_FORMATS[plan.dtype])),
        )

    def _take_over(self, model: nn.Module, blocks: Blocks) -> None:
        """Replace the forward of the model's blocks; they run from the store until `close`."""
        if blocks.resident:
            cached = [
                (blocks.groups[number], flat) for number, flat in self.runner.host_cache.resident()
            ]
            self.resident = Resident(
                model,
                groups=cached,
                refs=blocks.resident,
                torch_device=self.device.torch_device,
                process_group=self.process_group,
                step=self.step_gradients,
            )
            for parameter in self.resident.parameters:
                takes_gradient = parameter.requires_grad
                parameter.requires_grad_()  # A frozen parameter would refuse the hook.
                hook = parameter.register_post_accumulate_grad_hook(self._got_resident_gradient)
                parameter.requires_grad_(takes_gradient)
                self._gradient_hooks.append(hook)
        move_buffers(model, self.device.torch_device)
        placeholders = install_placeholders(
            model, blocks, self.device.torch_device, self.step_gradients
        )
        in_memory = {} if self.resident is None else self.resident.by_tensor
        self.watched = WatchedParameters(model, blocks.by_key, {**placeholders, **in_memory})
        self.collector.watched = self.watched
        for number, site in enumerate(blocks.sites):
            wrapped = WrappedSite(self, number, site, model.get_submodule(site.name))
            self.wrapped_sites.append(wrapped)
        for module in {id(module): module for module in (model, base_of(model))}.values():
            self._hooks.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))

    @contextmanager
    def without_hooks(self) -> Iterator[None]:
        """Temporarily remove LoHan's hooks from the model. All other hooks stay."""
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

    def refresh_resident(self) -> None:
        """Copy the values of the last step to the resident parameters, if these are outdated."""
        if self.resident is None or RESIDENT not in self.numbers or self._resident_current:
            return
        with self.guarded():
            self.scheduler.wait_updated(self.numbers[RESIDENT])
        self.resident.copy_updated()
        self._resident_current = True

    def enter_forward(self) -> None:
        """Prepare a call of the model.

        Resident parameters get the values of the last step, and changes that user code has
        made to parameters are applied.
        """
        if torch.is_grad_enabled() and self.sites_with_weights:
            raise ModelError(
                "the model is called while one of its own blocks runs, as torch.utils.checkpoint "
                "around the model does to repeat its forward; leave the checkpoint out, because "
                "blocks are recomputed from their inputs in any case"
            )
        self._roll_back_unfinished()
        self.refresh_resident()
        if torch.is_grad_enabled():
            self.watched.check()
            for wrapped in self.wrapped_sites:
                wrapped.refresh()
            self.forward_began_s, self.inference_began_s = time.perf_counter(), math.inf
        else:
            self.inference_began_s = min(self.inference_began_s, time.perf_counter())
            self.trace.begin_inference()
            with self.guarded():
                self.scheduler.enter_inference()

    def _roll_back_unfinished(self) -> None:
        """Roll back a step whose backward failed outside LoHan before it finished."""
        self._check_usable()
        if self.in_backward:
            if self.process_group.several:
                self.process_group.abort()
                raise RankError(
                    "the last backward did not finish, and the other ranks wait in it; resume the "
                    "run with all its ranks"
                )
            self.abort_step()
            self._check_usable()

    def enter_backward(self, *, wanted: bool | None = None) -> None:
        """Begin a backward if none has begun, and let autograd call `on_backward_done` at its end.

        Every backward of a block or of the head calls this. `wanted` states whether
        autograd computes the gradients of all parameters; None means that this is
        determined here.
        """
        self._check_usable()
        if not self.in_backward:
            self.watched.check_in_backward()
            if wanted is None:
                wanted = torch._C._will_engine_execute_node(self._anchor_node)
            if not wanted:
                grads = [] if self.resident is None else self.resident.swap_gradients([])
                self._sums_before = self.collector.accumulated, grads
                self.collector.accumulated = UnwantedGradients()
            elif not self.step_gradients.updates:
                self._keep_gradients()
            self._begin_backward()
            hooked = self.collector.hooked = self.watched.hooked()
            if hooked:
                self._check_hooks(next(iter(hooked.values())).label[0])
            whole = self.collector.accumulated is None
            finish = self.on_backward_done if whole else self._on_part_done
            torch.autograd.Variable._execution_engine.queue_callback(finish)
            self.runner.pending.squares = {}
            repeatable = self.buffers.unchanged and not hooked
            self.scheduler.schedule_backward(
                self._scalars(self.clipping.known_factor),
                whole=whole,
                speculate=self.clipping.skips_norm_wait(repeatable=repeatable),
            )
            step = self.steps.current
            step.keeps_gradients = step.speculates and self.clipping.all_held_in_memory

    def _begin_backward(self) -> None:
        self.steps.current.state = State.BACKWARD
        self.step_gradients.in_backward = True

    def _got_resident_gradient(self, _: torch.Tensor) -> None:
        """Begin a backward even if it reaches no block, so that resident parameters are updated."""
        if not self.in_head:
            with self.guarded():
                self.enter_backward(wanted=True)

    @property
    def _unscale_divisor(self) -> float:
        """The number that divides gradients before clipping: loss scale times averaged ranks."""
        return self.train_state.loss_scale * self.mean_over

    @property
    def grad_norm(self) -> float | None:
        """The global gradient norm of the last step, or None if no update needs it."""
        return self.clipping.norm

    def _scalars(self, clip_factor: float) -> StepScalars:
        return StepScalars(
            groups=self.groups.at(self.train_state.step),
            update=self.train_state.updates + 1,
            grad_multiplier=clip_factor / self._unscale_divisor,
            missed_updates=self.train_state.missed_updates,
        )

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Sum the gradients of all backward calls in the `with` body; then run one step."""
        if self.collector.accumulated is not None:
            raise LohanError(
                "accumulate: gradients are already being added up; one `with session.accumulate()` "
                "is one step, and the next begins after it"
            )
        self._roll_back_unfinished()
        step = self.train_state.step
        sums = self.collector.accumulated = Accumulated(self.blocks.groups, self.pool)
        try:
            yield
            self._roll_back_unfinished()
            if sums.numbers() or (self.resident is not None and self.resident.has_gradients):
                self._begin_backward()
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
        """End a backward that is only a part of a step, and add its gradients to the sums."""
        with self.guarded():
            self.collector.accumulate_rest()
            self.scheduler.pause()
            self.collector.sink.clear()
            self.steps.current.gradients.clear()
            self.step_gradients.in_backward = False
            if isinstance(self.collector.accumulated, Accumulated):
                self.step_gradients.consumed = True
            self._end_backward_without_step()

    def _end_backward_without_step(self) -> None:
        """Restore the previous target of gradients after a backward that was not part of a step."""
        if isinstance(self.collector.accumulated, UnwantedGradients):
            self.collector.accumulated, grads = self._sums_before
            self._sums_before = None, []
            if self.resident is not None:
                self.resident.swap_gradients(grads)
        elif isinstance(self.collector.accumulated, KeptGradients):
            self.collector.accumulated = None

    def _keep_gradients(self) -> None:
        """Let this backward add its gradients to `.grad` instead of running a step.

        With several ranks or a loss scale, this raises LohanError.
        """
        if self.process_group.several or self._unscale_divisor != 1.0:
            what = "fp16" if self.plan.dtype == "fp16" else f"{self.process_group.world} ranks"
            raise LohanError(
                f"backward outside training, with {what}: gradients would be scaled or summed for "
                "an update that does not follow; train with train(), or compute gradients of a "
                "model that is loaded from a save_pretrained folder"
            )
        self.collector.accumulated = KeptGradients(self.watched, self.blocks.groups)

    def _check_hooks(self, name: str) -> None:
        if self.process_group.several:
            raise ModelError(
                f"{name} has a gradient hook, but no rank has its whole gradient: "
                f"{self.process_group.world} ranks share it; train on one rank, or remove the hook"
            )

    def read_weight(self, name: str) -> torch.Tensor:
        """Return a copy of a parameter's current values, by its name in the store."""
        self._roll_back_unfinished()
        key, index = self._place_of(name)
        wrapped = next(site for site in self.wrapped_sites if key in site.site.groups)
        weights = self.block_runner.weights(wrapped, training=False)
        with self.scheduler.reading(), weights as tensors, self.device.computing():
            return tensors[key][index].detach().clone()

    def add_gradient(
        self, name: str, label: str, grad: torch.Tensor, *, step: int | None, wanted: bool
    ) -> None:
        """Add the gradient of a parameter whose values were read outside a call of its block."""
        key, index = self._place_of(name)
        with self.guarded():
            if step != self.train_state.step:
                raise LohanError(
                    f"{label}: this loss depends on values from before the last step, and the "
                    "weights have changed since; compute the loss again"
                )
            self.enter_backward(wanted=wanted)
            if self.collector.is_handed_over(self.numbers[key]):
                raise ModelError(
                    f"the loss depends on {label}, which was read before its block was called, so "
                    "its gradient comes after the block's update; read it after the model's "
                    f"forward, or keep its module in memory with attach(resident=["
                    f"{label.rpartition('.')[0]!r}])"
                )
            # With several ranks or in fp16, the gradients of the model's loss are scaled, so scale
            # this one too.
            factor = self._unscale_divisor / self.process_group.world
            self.collector.add_outside(key, index, grad if factor == 1.0 else grad * factor)

    def _place_of(self, name: str) -> tuple[str, int]:
        return next(place for place, p in self.watched.parameters.items() if p.stored_as == name)

    def on_backward_done(self) -> None:
        """Finish the step. Autograd calls this at the end of backward."""
        with self.guarded():
            resident: dict[int, GroupGrads] = {}
            if self.resident is not None and RESIDENT in self.numbers:
                resident[self.numbers[RESIDENT]] = self.resident.take_gradients()
            self.collector.finish_rest(resident)
            self.scheduler.backward_done()
            step = self.steps.current
            gated = self.clipping.gate is Gate.NORM
            unsummed = self.scheduler.wait_for_squares() if gated else ()
            decision = self.clipping.resolve_step(self._unscale_divisor, unsummed=unsummed)
            if decision is Decision.RERUN:
                assert self.clipping.norm is not None
                self.steps.run_again(Factor(step.factor, self.clipping.norm))
                self._reset_step()
                return
            skipped = decision is Decision.SKIP
            scalars = None if skipped else self._scalars(step.factor)
            self._count_step(step, scalars)
            next_commits = self.commit_clock.after_step(commits=step.commits)
            if scalars is not None:
                self.steps.ending.append(step)
                if self.runner.logged is not None:
                    self.runner.logged.close_step(step.meta, scalars, commits=step.commits)
            self.scheduler.close_step(scalars)
            if skipped:  # The lanes are idle, and the previous step has ended.
                self._skip(step)
            self.steps.next(commits=next_commits)
            self.trace.end_step()
            self._reset_step()
            self.step_gradients.consumed = True

    def _count_step(self, step: Step, scalars: StepScalars | None) -> None:
        """Count a step, and collect the metadata for its commit."""
        committed, recorded = self.store.meta, dict[str, Any]()
        if scalars is None:
            self.train_state = self.train_state.overflowed()
        else:
            scaled = self.plan.dtype == "fp16"
            absent = self.collector.absent()
            self.train_state = self.train_state.updated(scaled=scaled, absent=absent)
            recorded = {META_KEY: self.groups.to_json(scalars.groups)}
        step.meta = {
            **committed,
            **recorded,
            **self.train_state.to_meta(self.device.random_state()),
            **self.buffers.to_meta(),
            **self.extra_meta(),
        }

    def _skip(self, step: Step) -> None:
        """End a step that changes no weight."""
        self.runner.pending.clear()
        self.steps.ended_metas.append(step.meta)
        if self.steps.uncommitted is None:
            self.store.commit(step.meta, advance=False)
        else:
            if self.runner.logged is not None:
                self.store.commit_logged_meta(step.meta)
            self.steps.uncommitted = step.meta
            if step.commits:
                self._commit_uncommitted()

    def _reset_step(self) -> None:
        self.collector.sink.clear()
        self.collector.sink.end_period()
        self._end_backward_without_step()
        self.step_gradients.in_backward = False
        self._resident_current = False

    def flush(self) -> None:
        """Wait until the updates of every finished step are done.

        Steps that commit are then durable.
        """
        self._roll_back_unfinished()
        with self.guarded():
            self.scheduler.drain()

    def commit(self) -> None:
        """Make every finished step durable."""
        self.flush()
        with self.guarded():
            self._commit_uncommitted()
            self.commit_clock.committed()

    def _commit_uncommitted(self) -> None:
        """Commit the last step if it has ended without a commit."""
        if self.steps.uncommitted is not None and self.runner.logged is not None:
            self.scheduler.drain()  # Groups that are not cached are folded in a weight slot.
            self.scheduler.forget_slots()
        self.runner.commit_uncommitted()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Roll back the step if the body raises an error. The last committed step stays intact."""
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
    def in_backward(self) -> bool:
        """True while a backward is running."""
        return self.steps.current.state is State.BACKWARD

    @property
    def lost(self) -> bool:
        """True if a roll-back did not complete, which leaves the weights in memory inconsistent."""
        return bool(self._lost)

    def _check_usable(self) -> None:
        if self._lost:
            raise StoreError(f"{self._lost}; close the session and resume")

    def abort_step(self) -> None:
        """Restore the last committed step after an error.

        Until this has succeeded, only `close` is possible, because memory may contain
        weights of two steps.
        """
        self._lost = "the roll-back of a step that failed was interrupted"
        newest_step = 0  # The last of the steps whose backward has returned.
        try:
            if self.steps.ending or self.steps.uncommitted is not None:
                # Steps whose backward has returned are kept, unless a lane has failed. The error to
                # report is that of the step that failed.
                with suppress(Exception):
                    self.scheduler.finish_earlier_steps(in_backward=self.in_backward)
                    if not self.steps.unfinished:  # Only if no update of the failed step has run.
                        self.runner.commit_uncommitted()
            newest = self.steps.ending[-1].meta if self.steps.ending else self.steps.uncommitted
            newest_step = 0 if newest is None else TrainState.of(newest).step
            self.scheduler.reset()
            self.store.discard()
            if self.runner.activation_spill is not None:
                self.runner.activation_spill.discard_in_flight()
            if self.store.status is Status.FAILED:
                self._lost = f"a step failed, and the store cannot go on: {self.store.cause}"
            else:
                self.runner.load_host_cached()
                self.runner.recover_log()
                self._lost = ""
        except LohanError as error:
            self._lost = f"a step failed, and rolling it back failed too ({error})"
        self.runner.forget()
        self.steps.forget()
        if self.resident is not None:
            self.resident.drop_gradients()
        self.train_state = TrainState.of(self.store.meta)
        lost = max(0, newest_step - self.train_state.step)
        self._reset_step()
        self.commit_clock.committed()
        if lost:
            warnings.warn(
                f"a step failed, which also undoes {counted(lost, 'step')} that had not been "
                f"committed; training continues after step {self.train_state.step}",
                stacklevel=2,
            )

    def close(self) -> None:
        """Restore the modules' own forwards, and stop the lanes."""
        self.step_gradients.refresh = lambda: None  # Parameters outlive the executor.
        self.step_gradients.consumed = False
        for hook in (*self._hooks, *self._gradient_hooks):  # The hooks refer to the executor.
            hook.remove()
        for wrapped in self.wrapped_sites:
            wrapped.remove()
        self.lanes.close()
        self.runner.close()
