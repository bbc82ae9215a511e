"""The beginning, the end and the roll-back of a training step.

The model's own forward code determines the calls. The call of each site goes through an autograd
function (wrapping.py) with its own forward and backward, and gradients are passed to the optimizer
by gradients.py. When autograd has finished, the step ends: updates that have waited for the norm
are queued with the clipping factor, and the next forward is scheduled. User code is therefore
`loss = model(**batch).loss; loss.backward()`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lohan.capture.blocks import dtype_of
from lohan.capture.placeholders import (
    StepGradients,
)
from lohan.capture.recompute import ActivationHooks, SlicedCompute
from lohan.capture.tiling import Tiling
from lohan.capture.tracing import SavePlans
from lohan.checkpoint.train_state import TrainState
from lohan.device.base import to_device
from lohan.device.choose import Compiled
from lohan.engine.actions import ActionRunner
from lohan.engine.buffers import Dequantised, HostPool, SharedSlots
from lohan.engine.gradient_transport import GroupGrads
from lohan.engine.gradients import Accumulated, GradientCollector, StepCollectives
from lohan.engine.lanes import Lanes
from lohan.engine.model_hooks import ModelHooks
from lohan.engine.run_record import RunRecord
from lohan.engine.scheduler import ActionScheduler
from lohan.engine.step import Clipping, CommitClock, Decision, Factor, State, Step, Steps
from lohan.engine.user_code import KeptGradients, UnwantedGradients
from lohan.engine.wrapping import BlockRunner
from lohan.errors import LohanError, ModelError, RankError, StoreError
from lohan.model.layout import RESIDENT
from lohan.model.plan import Plan
from lohan.model.state import STATE_FORMATS
from lohan.param_groups import HyperParameters
from lohan.schedule.placement import UpdateOptions
from lohan.schedule.steps import spec_of
from lohan.store.store import Status, Store
from lohan.util.trace import Trace
from lohan.util.units import counted

if TYPE_CHECKING:
    from lohan.engine.context import PlanContext


class Executor:
    """The combination of lanes, weights, activations, gradients and updates into training steps."""

    in_head = False  # True while the fused forward and backward of the head runs.
    # The reason why the weights in memory are inconsistent; empty if they are consistent.
    lost = ""

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
        self.blocks, self.device, self.plan = blocks, device, plan
        self.store, self.trace = store, trace
        self.hooks = ModelHooks(model, Tiling(plan.tiles) if plan.tiles else None)
        self.step_gradients = StepGradients()
        self.steps = Steps(CommitClock(plan, context.process_group))
        self.collectives = StepCollectives(context.process_group, blocks.groups)
        spec = spec_of(context.shards, plan)
        self.pool = HostPool(context.host_bytes, device)
        self.runner = ActionRunner(
            context,
            plan,
            spec,
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
            net=spec.net,
            updates_on_caller=device.computes_on_cores and not device.has_own_memory,
        )
        on_device = self.runner.device_parts
        self.scheduler = ActionScheduler(
            blocks.groups,
            spec,
            lanes=self.lanes,
            slots=(
                SharedSlots(self.runner.slots, self.pool) if on_device is None else on_device.slots
            ),
            updates=UpdateOptions.of(plan, blocks),
            steps=self.steps,
        )
        self.collector = GradientCollector(
            blocks,
            plan,
            scheduler=self.scheduler,
            pending=self.runner.pending,
            gradient_offload=self.runner.pending.offload,
            collectives=self.collectives,
            steps=self.steps,
        )
        self.block_runner = BlockRunner(
            blocks.groups,
            self.scheduler,
            self.collector,
            _sliced_compute(context, plan, self.runner.activations, save_plans),
            device=device,
            guarded=self.guarded,
            dequantised=Dequantised(blocks, self.pool, device, dtype_of(STATE_FORMATS[plan.dtype])),
        )
        self.anchor = Anchor(device.torch_device)
        self.clipping = Clipping(
            plan,
            scheduler=self.scheduler,
            runner=self.runner,
            store=store,
            collectives=self.collectives,
            steps=self.steps,
        )
        try:
            self.hooks.install(
                self,
                before_forward=self._before_model_call,
                after_resident_gradient=self._got_resident_gradient,
            )
            self.record = RunRecord(model, plan, store=store, device=device, groups=groups)
        except BaseException:
            self.close()
            raise
        self.collector.watched = self.hooks.watched
        self.step_gradients.refresh = self.refresh_resident

    def _before_model_call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.enter_forward()
        if self.device.torch_device.type == "cpu":
            return None
        moved = to_device(self.device, (args, kwargs))
        if self.hooks.inputs_moved is not None:
            self.hooks.inputs_moved(kwargs, moved[1])
        return moved

    def refresh_resident(self) -> None:
        """Copy the values of the last step to the resident parameters, if these are outdated."""
        resident = self.hooks.resident
        if not resident.outdated:
            return
        with self.guarded():
            self.scheduler.wait_updated(self.collector.numbers[RESIDENT])
        resident.copy_updated()

    def enter_forward(self) -> None:
        """Prepare a call of the model.

        Resident parameters get the values of the last step, and changes that user code has
        made to parameters are applied.
        """
        if torch.is_grad_enabled() and self.hooks.sites_with_weights:
            raise ModelError(
                "the model is called while one of its own blocks runs, as torch.utils.checkpoint "
                "around the model does to repeat its forward; leave the checkpoint out, because "
                "blocks are recomputed from their inputs in any case"
            )
        self.roll_back_unfinished()
        self.refresh_resident()
        if torch.is_grad_enabled():
            self.hooks.watched.check()
            for wrapped in self.hooks.wrapped_sites:
                wrapped.refresh()
            self.trace.begin_forward()
        else:
            self.trace.begin_inference()
            with self.guarded():
                self.scheduler.enter_inference()

    def roll_back_unfinished(self) -> None:
        """Roll back a step whose backward failed outside LoHan before it finished."""
        self._check_usable()
        if self.in_backward:
            if self.collectives.process_group.several:
                self.collectives.process_group.abort()
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
            self.hooks.watched.check_in_backward()
            if wanted is None:
                wanted = self.anchor.is_executed()
            if not wanted:
                self.collector.accumulated = UnwantedGradients(
                    self.collector.accumulated, self.hooks.resident.swap_gradients([])
                )
            elif not self.step_gradients.updates:
                self._check_unscaled()
                self.collector.accumulated = KeptGradients(self.hooks.watched, self.blocks.groups)
            self._begin_backward()
            ranks = self.collectives.process_group.world
            hooked = self.collector.hooked = self.hooks.watched.hooked(ranks)
            is_step = self.collector.accumulated is None
            finish = self.on_backward_done if is_step else self._on_part_done
            torch.autograd.Variable._execution_engine.queue_callback(finish)
            self.runner.pending.squares = {}
            repeatable = self.record.buffers.unchanged and not hooked
            same_order = is_step and self.steps.repeats_last_order()
            self.scheduler.schedule_backward(
                self.record.scalars(self.clipping.known_factor),
                same_order=same_order,
                speculates=self.clipping.speculates(same_order=same_order, repeatable=repeatable),
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

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Sum the gradients of all backward calls in the `with` body; then run one step."""
        if self.collector.accumulated is not None:
            raise LohanError(
                "accumulate: gradients are already being added up; one `with session.accumulate()` "
                "is one step, and the next begins after it"
            )
        self.roll_back_unfinished()
        step = self.record.train_state.step
        sums = self.collector.accumulated = Accumulated(self.blocks.groups, self.pool)
        try:
            yield
            self.roll_back_unfinished()
            if sums.numbers() or self.hooks.resident.has_gradients:
                self._begin_backward()
                with self.guarded():
                    self.scheduler.schedule_backward(self.record.scalars(1.0))
                self.on_backward_done()
        except BaseException:
            if self.record.train_state.step == step:
                self.hooks.resident.drop_gradients()
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
            self.steps.current.tensors_with_gradient.clear()
            self.step_gradients.in_backward = False
            if isinstance(self.collector.accumulated, Accumulated):
                self.step_gradients.consumed = True
            self._end_backward_without_step()

    def _end_backward_without_step(self) -> None:
        """Restore the previous target of gradients after a backward that was not part of a step."""
        target = self.collector.accumulated
        if isinstance(target, UnwantedGradients):
            self.collector.accumulated = target.target_before
            self.hooks.resident.swap_gradients(target.resident_before)
        elif isinstance(target, KeptGradients):
            self.collector.accumulated = None

    def _check_unscaled(self) -> None:
        """Raise LohanError if a backward without a step would scale or sum its gradients."""
        group = self.collectives.process_group
        if group.several or self.record.unscale_divisor != 1.0:
            what = "fp16" if self.plan.dtype == "fp16" else f"{group.world} ranks"
            raise LohanError(
                f"backward outside training, with {what}: gradients would be scaled or summed for "
                "an update that does not follow; train with train(), or compute gradients of a "
                "model that is loaded from a save_pretrained folder"
            )

    def add_gradient(
        self, name: str, label: str, grad: torch.Tensor, *, step: int | None, wanted: bool
    ) -> None:
        """Add the gradient of a parameter whose values were read outside a call of its block."""
        key, index = self.hooks.watched.place_of(name)
        with self.guarded():
            if step != self.record.train_state.step:
                raise LohanError(
                    f"{label}: this loss depends on values from before the last step, and the "
                    "weights have changed since; compute the loss again"
                )
            self.enter_backward(wanted=wanted)
            if self.collector.is_handed_over(self.collector.numbers[key]):
                raise ModelError(
                    f"the loss depends on {label}, which was read before its block was called, so "
                    "its gradient comes after the block's update; read it after the model's "
                    f"forward, or keep its module in memory with attach(resident=["
                    f"{label.rpartition('.')[0]!r}])"
                )
            # With several ranks or in fp16, the gradients of the model's loss are scaled, so scale
            # this one too.
            factor = self.record.unscale_divisor / self.collectives.process_group.world
            self.collector.add_outside(key, index, grad if factor == 1.0 else grad * factor)

    def on_backward_done(self) -> None:
        """Finish the step. Autograd calls this at the end of backward."""
        with self.guarded():
            resident: dict[int, GroupGrads] = {}
            if RESIDENT in self.collector.numbers:
                number = self.collector.numbers[RESIDENT]
                resident[number] = self.hooks.resident.take_gradients()
            self.collector.finish_rest(resident)
            self.scheduler.end_backward()
            step = self.steps.current
            needs_norm = self.clipping.needs_all_gradients
            unsummed = self.scheduler.wait_for_squares() if needs_norm else ()
            decision = self.clipping.resolve_step(self.record.unscale_divisor, unsummed=unsummed)
            if decision is Decision.RERUN:
                assert self.clipping.norm is not None
                self.steps.run_again(Factor(step.factor, self.clipping.norm))
                self._reset_step()
                return
            skipped = decision is Decision.SKIP
            scalars = None if skipped else self.record.scalars(step.factor)
            absent = () if skipped else self.collector.absent()
            step.meta = self.record.advance(scalars, absent=absent)
            next_commits = self.steps.clock.after_step(commits=step.commits)
            if scalars is not None:
                self.steps.ending.append(step)
                if self.runner.logged is not None:
                    self.runner.logged.close_step(step.meta, scalars, commits=step.commits)
            self.scheduler.schedule_step_end(scalars)
            if skipped:  # The lanes are idle, and the previous step has ended.
                self._skip(step)
            self.steps.next(commits=next_commits)
            self.trace.end_step()
            self._reset_step()
            self.step_gradients.consumed = True

    def _skip(self, step: Step) -> None:
        """End a step that changes no weight."""
        self.runner.pending.clear()
        self.steps.ended_metas.append(step.meta)
        if self.steps.uncommitted is None:
            self.store.commit(step.meta, advance=False)
        else:
            if self.runner.logged is not None:
                self.store.commit_logged(step.meta, None)
            self.steps.uncommitted = step.meta
            if step.commits:
                self._commit_uncommitted()

    def _reset_step(self) -> None:
        self.collector.sink.clear()
        self.collector.sink.end_period()
        self._end_backward_without_step()
        self.step_gradients.in_backward = False
        self.hooks.resident.outdated = RESIDENT in self.collector.numbers

    def flush(self) -> None:
        """Wait until the updates of every finished step are done.

        Steps that commit are then durable.
        """
        self.roll_back_unfinished()
        with self.guarded():
            self.scheduler.drain()

    def commit(self) -> None:
        """Make every finished step durable."""
        self.flush()
        with self.guarded():
            self._commit_uncommitted()
            self.steps.clock.committed()

    def _commit_uncommitted(self) -> None:
        """Commit the last step if it has ended without a commit."""
        if self.steps.uncommitted is not None and self.runner.logged is not None:
            self.scheduler.drain()  # Groups that are not cached are folded in a weight slot.
            self.scheduler.forget_slots()
        self.runner.commit_uncommitted()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Roll back the step if the `with` body raises an error.

        The last committed step stays intact.
        """
        self._check_usable()
        try:
            yield
        except BaseException:
            if self.collectives.process_group.several:  # Note [an error on one rank]
                self.collectives.process_group.abort()
            else:
                self.abort_step()
            raise

    @property
    def in_backward(self) -> bool:
        """True while a backward is running."""
        return self.steps.current.state is State.BACKWARD

    def _check_usable(self) -> None:
        if self.lost:
            raise StoreError(f"{self.lost}; close the session and resume")

    def abort_step(self) -> None:
        """Restore the last committed step after an error.

        Until this has succeeded, only `close` is possible, because memory may contain
        weights of two steps.
        """
        self.lost = "the roll-back of a step that failed was interrupted"
        newest_step = 0  # The last of the steps whose backward has returned.
        try:
            if self.steps.ending or self.steps.uncommitted is not None:
                # Steps whose backward has returned are kept, unless a lane has failed. The error to
                # report is that of the step that failed.
                with suppress(Exception):
                    self.scheduler.finish_earlier_steps(in_backward=self.in_backward)
                    # The weights in memory must not contain updates of the failed step.
                    if not self.steps.partly_updated:
                        self.runner.commit_uncommitted()
            newest = self.steps.ending[-1].meta if self.steps.ending else self.steps.uncommitted
            newest_step = 0 if newest is None else TrainState.of(newest).step
            self.scheduler.reset()
            self.store.discard()
            if self.runner.activation_spill is not None:
                self.runner.activation_spill.discard_in_flight()
            if self.store.health.status is Status.FAILED:
                self.lost = f"a step failed, and the store cannot go on: {self.store.health.cause}"
            else:
                self.runner.load_host_cached()
                self.runner.recover_log()
                self.lost = ""
        except LohanError as error:
            self.lost = f"a step failed, and rolling it back failed too ({error})"
        self.runner.forget()
        self.steps.forget()
        self.hooks.resident.drop_gradients()
        self.record.restore()
        step = self.record.train_state.step
        lost = max(0, newest_step - step)
        self._reset_step()
        self.steps.clock.committed()
        if lost:
            warnings.warn(
                f"a step failed, which also undoes {counted(lost, 'step')} that had not been "
                f"committed; training continues after step {step}",
                stacklevel=2,
            )

    def close(self) -> None:
        """Restore the modules' own forwards, and stop the lanes."""
        self.step_gradients.refresh = lambda: None  # Parameters outlive the executor.
        self.step_gradients.consumed = False
        self.hooks.remove()  # The hooks refer to the executor.
        self.lanes.close()
        self.runner.close()


class Anchor:
    """An additional input of every block and of the head.

    It requires a gradient, so autograd also calls the backward of a block whose other inputs are
    integers.
    """

    def __init__(self, torch_device: torch.device) -> None:
        # User code may write weights, and so make an executor, where gradients are disabled.
        with torch.inference_mode(False), torch.enable_grad():
            self.tensor = torch.zeros((), requires_grad=True, device=torch_device)
            function: Any = self.tensor.view_as(self.tensor).grad_fn
        # The node of the tensor in the graph. Autograd executes it if a backward computes all
        # gradients, but not in torch.autograd.grad for selected inputs.
        self._node = function.next_functions[0][0]

    def is_executed(self) -> bool:
        """Return whether the backward that is running computes the gradients of all parameters."""
        return bool(torch._C._will_engine_execute_node(self._node))


def _sliced_compute(
    context: PlanContext, plan: Plan, activations: ActivationHooks, save_plans: SavePlans
) -> SlicedCompute:
    backend = None if plan.tiles else context.backend
    return SlicedCompute(
        context.device,
        micro_batch=plan.micro_batch,
        activations=activations,
        save_plans=save_plans,
        compiled=Compiled(backend, sites=len(context.blocks.sites)),
    )
