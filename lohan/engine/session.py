"""A model attached to its store: steps, commits, export, and new plans while it runs."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from traceback import clear_frames
from typing import Any

import torch
from torch import nn

from lohan.capture.saved_call import forget_last_weights
from lohan.checkpoint.adapters import (
    base_of,
)
from lohan.checkpoint.hf_folder import (
    persistent_buffers,
)
from lohan.checkpoint.store_io import folder_of, gathering_reader, overwrite
from lohan.device.ranks import ProcessGroup
from lohan.engine.context import PlanContext
from lohan.engine.executor import Executor
from lohan.engine.export import export_store
from lohan.engine.gradients import bytes_of_sums
from lohan.engine.head import SlicedHead
from lohan.engine.replanning import Replanner
from lohan.engine.step import MAX_PENDING_META
from lohan.errors import BudgetError, ConfigError, LohanError, StoreError
from lohan.model.plan import Plan
from lohan.param_groups import META_KEY, changed_members
from lohan.planner.planner import PlanProblem, make_plan
from lohan.store.admin import rewind
from lohan.store.transfers import Counters
from lohan.util.memory import return_freed_memory
from lohan.util.units import format_bytes

ExecutorAndHead = tuple[Executor, SlicedHead | None]


def _plan_beside_sums(problem: PlanProblem, sums_bytes: int) -> Any:
    """Return a plan, as JSON, for a problem whose host memory excludes sums of gradients."""
    try:
        return make_plan(problem).plan.to_json()
    except BudgetError as error:
        host_bytes = problem.host_bytes + sums_bytes
        raise BudgetError(
            f"accumulate: sums of gradients take {format_bytes(sums_bytes)} of the "
            f"{format_bytes(host_bytes)} of host memory, and no plan fits in the rest"
            f"{f' ({error})' if problem.host_bytes > 0 else ''}; "
            "raise the host budget, or run the batches as one, which needs no memory for gradients"
        ) from None


class Session:
    """A model attached to its store. Close it, or use `with`, to release the store."""

    def __init__(
        self,
        model: nn.Module,
        context: PlanContext,
        make_executor: Callable[[Plan], ExecutorAndHead],
        plan: Plan,
    ) -> None:
        return_freed_memory()
        self.model, self.context = model, context
        # creates the executor for a plan, which runs the model from the store
        self._make_executor = make_executor
        self._executor: Executor | None = None
        # With a sliced head, a call with labels returns a loss and no logits.
        self.head: SlicedHead | None = None
        # metadata of steps under earlier plans that was not taken yet
        self._earlier_metas: list[dict[str, Any]] = []
        # `stopped`: the modules of the model have their own forward again; the store may be open.
        # `planless`: a change of plan failed, and the old plan could not be restored.
        self.closed = self.stopped = self.planless = False
        self._updates_in_backward = True
        self._replanner: Replanner | None = None  # created by the first call of `replan`
        # settings of the previous executor, restored by `_start`, like those of the head below
        self._mean_over: int | None = None
        self._norm: float | None = None
        self._head_settings: dict[str, Any] = {}
        self._start(plan)
        self.store = self.executor.store
        self._earlier_counters = Counters(0, 0)  # bytes of activations under earlier plans

    def _start(self, plan: Plan) -> None:
        """Create executor and head for a plan, with the settings of the previous executor and head.

        The last norm is also kept.
        """
        self._executor, self.head = self._make_executor(plan)
        if self._mean_over is not None:
            self._executor.mean_over = self._mean_over
        self._executor.clipping.norm = self._norm
        self._executor.step_gradients.updates = self._updates_in_backward
        if self.head is not None:  # User code may have changed the settings of the head.
            for name, value in self._head_settings.items():
                setattr(self.head, name, value)
        self.stopped = self.planless = False

    @property
    def executor(self) -> Executor:
        if self._executor is None or self.planless:
            raise StoreError(
                "the session has no plan: a change of plan failed, and the old plan could not be "
                "restored; close the session and resume from the last step"
            )
        return self._executor

    @contextmanager
    def unhooked(self) -> Iterator[None]:
        """Temporarily remove the forwards and hooks that LoHan has installed in the model."""
        calls = [*(self._executor.wrapped_sites if self._executor is not None else ())]
        modules: list[tuple[nn.Module, Any]] = [(call.module, call) for call in calls]
        if self.head is not None:
            modules.append((self.head.model, self.head))
        with ExitStack() as undo:
            if self._executor is not None:
                undo.enter_context(self._executor.without_hooks())
            for module, forward in modules:
                if vars(module).get("forward") is forward:
                    del module.forward
                    undo.callback(setattr, module, "forward", forward)
            yield

    @contextmanager
    def handing_over(self) -> Iterator[None]:
        """End this session when the body has attached its model to another session.

        If the body raises an error, this session continues with its plan.
        """
        plan = self.plan
        self.commit()
        self._stop()
        try:
            yield
        except BaseException:
            self._start(plan)
            raise
        self.close(flush=False)

    @property
    def host_bytes(self) -> int:
        """The budget that the plan was made for."""
        return self.context.host_bytes

    def describe_plan(self) -> list[str]:
        """Return the memory ledger, tier by tier, as lines of text."""
        context = self.context
        return self.plan.describe(host_bytes=context.host_bytes, device_bytes=context.device_bytes)

    @property
    def process_group(self) -> ProcessGroup:
        """The ranks that share the state."""
        return self.context.process_group

    @property
    def step(self) -> int:
        return self.executor.train_state.step

    @property
    def must_run_again(self) -> bool:
        """True if the last backward belonged to a clipped step that must be rerun.

        The training loop then has to run the same batch again; see `OffloadPolicy.run_again`.
        """
        return self.executor.clipping.must_rerun

    @property
    def lost(self) -> bool:
        """True if a step failed and could not be rolled back."""
        return self._executor is None or bool(self._executor.lost)

    def train_step(
        self, batch: Any, loss: Callable[[Any], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Run forward and backward of a batch as one step, and return its loss, detached.

        `loss` computes the loss of a batch. By default the model is called with the batch (a dict,
        a tuple or a tensor). An error is raised unless its output is the loss or has an attribute
        `loss`. If the step is clipped and must be run again, this method runs it again from the
        same random state.
        """
        compute = self._loss if loss is None else loss
        device = self.executor.device
        drawn = device.random_state()
        loss_value = compute(batch)
        loss_value.backward()
        while self.must_run_again:
            del loss_value
            device.set_random_state(drawn)
            loss_value = compute(batch)
            loss_value.backward()
        return loss_value.detach()

    def _loss(self, batch: Any) -> torch.Tensor:
        if isinstance(batch, Mapping):
            out = self.model(**batch)
        else:
            out = self.model(*batch) if isinstance(batch, tuple) else self.model(batch)
        loss = out if isinstance(out, torch.Tensor) else getattr(out, "loss", None)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ConfigError(
                f"train_step: the output of {type(self.model).__name__} is not a loss and has "
                "none; call it with labels, or give train_step(batch, loss=...)"
            )
        return loss

    @property
    def lr(self) -> float:
        """The learning rate of the next step, for parameters without their own group."""
        return self.executor.groups.at(self.step).rates[0]

    def changed_groups(self) -> str:
        """Describe how parameter groups differ from those of the last committed step.

        Returns an empty string if they do not. Optimizer state belongs to each parameter,
        so such a change is allowed.
        """
        groups = self.executor.groups
        now = groups.to_json(groups.at(self.step))
        return changed_members(self.store.meta.get(META_KEY), now)

    @property
    def plan(self) -> Plan:
        return self.executor.plan

    @property
    def counters(self) -> Counters:
        """The bytes read from and written to SSD by the session, including activations."""
        activation_spill = self.executor.runner.activation_spill
        counters = [self._earlier_counters, self.store.counters]
        counters += [activation_spill.counters] if activation_spill is not None else []
        return Counters(sum(c.bytes_read for c in counters), sum(c.bytes_written for c in counters))

    def export(
        self,
        out: str | os.PathLike[str],
        *,
        dtype: str | None = None,
        source_folder: str | os.PathLike[str] | None = None,
        overwrite: bool = False,
        ema: bool = False,
    ) -> Path:
        """Write the weights of the last step as a Hugging Face folder.

        For a PEFT model, the adapter is written as a PEFT folder. With `ema`, the moving
        average of the weights is written, if one is kept. With several ranks, all of them
        call this, and the first writes.
        """
        source = source_folder or folder_of(self.model)
        return self.export_committed(
            out,
            source_folder=source,
            dtype=dtype,
            overwrite=overwrite,
            buffers=persistent_buffers(base_of(self.model)),
            ema=ema,
        )

    def export_committed(
        self, out: str | os.PathLike[str], *, ema: bool = False, **how: Any
    ) -> Path:
        """Export the last step, as `export_store` does for a store."""
        self.commit()
        group, folder = self.process_group, Path(out)
        with group.all_or_none(), gathering_reader(group, self.store, ema=ema) as read:
            if read is not None:
                folder = export_store(self.store, out, model=self.model, read=read, **how)
        return folder

    def take_finished(self) -> list[dict[str, Any]]:
        """Return the metadata of steps that have ended since the last call, oldest first.

        They include steps between two commits, which are not durable yet. If this method is not
        called, only the metadata of the last few steps is kept.
        """
        before, self._earlier_metas = self._earlier_metas, []
        if self._executor is None:
            return before
        finished = self._executor.steps.ended_metas
        return before + [finished.popleft() for _ in range(len(finished))]

    def flush(self) -> None:
        """Wait for the updates of every finished step and, if every step commits, for its commit.

        A loop does not need this, because the next forward waits for what it uses.
        """
        self.executor.flush()

    def make_durable(self) -> None:
        """Flush, and make the last step durable. With a log, only its gradients are written."""
        if self.plan.log_gradients:
            self.flush()
        else:
            self.commit()

    def commit(self) -> None:
        """Flush, and write the last step to the store. `export` and `close` call this method."""
        self.executor.commit()

    @property
    def accumulates(self) -> bool:
        """True if a backward only adds to the sums of gradients, as inside `accumulate`."""
        return self.executor.collector.accumulated is not None

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Run one step with the sums of the gradients of all `backward` calls in the `with` body.

        The optimizer runs when the body ends. Weights are transferred once per call. One larger
        batch, divided into micro-batches, transfers them once in total and needs no memory for
        gradients. The sums are held in host memory. If the plan leaves too little for them, the
        session continues with one that does.
        """
        if not self.accumulates:
            self.make_room_for_sums()
        with self.executor.accumulating():
            yield

    def make_room_for_sums(self) -> None:
        """Follow a plan that leaves host memory for sums of gradients, if the current one does not.

        A plan that was given to `attach`, or whose forward has begun, is kept.
        """
        context, executor, plan = self.context, self.executor, self.plan
        pool, stays = executor.pool, context.plan_is_given or bool(executor.steps.current.forward)
        needed = bytes_of_sums(context.blocks.groups)
        if stays or pool.used_bytes + needed <= pool.budget_bytes:
            return
        rest = replace(context, host_bytes=pool.budget_bytes - needed)
        options = replace(context.options.fixed_by(plan), world=plan.world)
        problem = rest.problem(options, profile=context.profile)
        plan_json = self.process_group.broadcast_made(lambda: _plan_beside_sums(problem, needed))
        self.follow(Plan.from_json(plan_json))
        self.context = rest

    def follow(self, plan: Plan | Callable[[], Plan]) -> None:
        """Continue with another plan, after writing what is in memory to the store.

        Results stay the same, bit for bit, if the new plan has the same micro-batch, head slices
        and chunks. If the plan cannot be followed (for example, because an SSD is full), the old
        plan continues and the error is raised; with several ranks, all stop. To plan for other
        micro-batches, pass a function that returns the plan. It is called while the model has its
        own forwards, so that they can be measured.
        """
        old, consumed = self.plan, self.executor.step_gradients.consumed
        self.commit()
        moved, store = self.counters, self.store.counters
        self._earlier_counters = Counters(
            moved.bytes_read - store.bytes_read, moved.bytes_written - store.bytes_written
        )
        self._earlier_metas = self.take_finished()[-MAX_PENDING_META:]
        self.planless = True
        self._stop()
        self._executor = self.head = None
        # Modules and executor refer to each other. Free their memory before the new plan allocates.
        gc.collect()
        self.context.device.release_cached_memory()
        try:
            self._start(plan() if callable(plan) else plan)
            self.executor.step_gradients.consumed = consumed
        except BaseException as error:  # such as too little memory, or Ctrl-C
            if self.process_group.several:  # Note [an error on one rank]: others may have begun
                self.process_group.abort()
                raise
            clear_frames(error.__traceback__)  # Frames hold what the new plan has allocated.
            gc.collect()
            self.context.device.release_cached_memory()
            self._start(old)
            raise

    def replan(self) -> str | None:
        """Choose a better plan if the measured machine allows one. Call it after each step.

        Release the losses of earlier steps before the call. After the third step, the session
        continues with a plan for the measured machine if that is faster. Results stay the same, bit
        for bit. Returns a description of what was measured and changed, or None. With several
        ranks, all of them call this.
        """
        if self.closed:
            raise StoreError("the session is closed, so there is no step to plan for")
        if self._replanner is None:
            self._replanner = Replanner(self)
        return self._replanner.after_own_step()

    @property
    def grad_norm(self) -> float | None:
        """The global gradient norm of the last step, or None if no update needs it."""
        return self.executor.grad_norm

    @property
    def updates_in_backward(self) -> bool:
        """True if `backward` runs the optimizer step.

        If False, backward leaves gradients in `.grad`, as in PyTorch, if they fit in
        memory, and updates nothing.
        """
        return self._updates_in_backward

    @updates_in_backward.setter
    def updates_in_backward(self, updates: bool) -> None:
        if updates == self._updates_in_backward:
            return
        if updates:
            for parameter in self.model.parameters():
                parameter.grad = None
        self._updates_in_backward = updates
        if self._executor is not None:
            self._executor.step_gradients.updates = updates
            self._executor.step_gradients.consumed = False

    def weight(self, name: str) -> torch.Tensor:
        """Return a copy of a parameter's current values, by its name in the model.

        The values have the type in which the block computes.
        """
        with torch.no_grad():
            return self.model.get_parameter(name).clone()

    def write_weights(self, values: Mapping[str, torch.Tensor]) -> None:
        """Write values of parameters, given by their names in the store, and commit them.

        Optimizer state is not changed.
        """
        if self.process_group.several:
            raise ConfigError(
                f"{next(iter(values), 'a parameter')} cannot be written: its values are spread "
                f"over {self.process_group.world} ranks; load the weights before attach"
            )
        plan = self.plan
        self.commit()
        self._stop()
        try:
            overwrite(self.store, values)
        finally:
            self._start(plan)

    def rewind(self, target: str | os.PathLike[str]) -> None:
        """Restore weights, optimizer state and step from a snapshot of this session's store.

        Until this has succeeded, the store contains the current state.
        """
        plan = self.plan
        self.commit()
        self._stop()
        try:
            rewind(self.store, Path(target))
        finally:
            self._start(plan)

    def _stop(self) -> None:
        """Restore the original forward of the model's modules.

        If this is interrupted, `close` calls it again.
        """
        self.stopped = True
        if self.head is not None:
            self._head_settings = {name: getattr(self.head, name) for name in self.head.SETTINGS}
            self.head.remove()
        if self._executor is not None:
            self._mean_over = self._executor.mean_over
            self._norm = self._executor.clipping.norm
            self._executor.close()
        forget_last_weights(self.model)

    def close(self, *, flush: bool = True) -> None:
        """Release model and store.

        With `flush`, the last step is made durable first, unless a failed roll-back has
        left memory in a state that belongs to no step. If this is interrupted, it can be
        called again.
        """
        if self.closed:
            return
        if self.process_group.aborted:  # Note [an error on one rank]
            self.closed = True
            return
        with ExitStack() as ending:
            ending.callback(self.context.settings.close)
            ending.callback(self.store.close)
            ending.callback(self.context.device.close)
            ending.callback(self._stop)
            if flush and not self.stopped and not self.executor.lost:
                self.commit()
        self.closed = True

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        if error is None:
            self.close()
            return
        if self.process_group.several:  # Note [an error on one rank]
            self.closed = True
            self.process_group.abort()
            return
        try:
            self.close(flush=self._commits_after(error))
        except LohanError as second:
            error.add_note(f"closing the session failed too: {second}")

    def _commits_after(self, error: BaseException) -> bool:
        """Return whether `close` commits the steps that ended before an error.

        An error of the user's own code does not lose them. After Ctrl-C they are committed only
        if there may be many of them, that is, if commits are made by interval.
        """
        if self.stopped or self._executor is None:
            return False
        return isinstance(error, Exception) or not self.plan.commit.every_step
