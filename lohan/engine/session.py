"""A model attached to its store: steps, commits, export, and new plans while it runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lohan.checkpoint.adapters import (
    base_of,
)
from lohan.checkpoint.hf_folder import (
    persistent_buffers,
)
from lohan.checkpoint.store_io import folder_of
from lohan.device.ranks import ProcessGroup
from lohan.engine.context import PlanContext
from lohan.engine.executor import Executor
from lohan.engine.export import export_session
from lohan.engine.gradients import bytes_of_sums
from lohan.engine.head import SlicedHead
from lohan.engine.plan_execution import ExecutorAndHead, PlanExecution
from lohan.engine.replanning import Replanner
from lohan.errors import BudgetError, ConfigError, LohanError, StoreError
from lohan.model.plan import Plan
from lohan.planner.planner import PlanProblem, make_plan
from lohan.store.admin import rewind
from lohan.store.transfers import Counters
from lohan.util.memory import return_freed_memory
from lohan.util.units import format_bytes


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
        self.model, self.context, self.closed = model, context, False
        self.execution = PlanExecution(model, context, make_executor, plan)
        self._replanner: Replanner | None = None  # created by the first call of `replan`
        self.store = self.executor.store

    @property
    def executor(self) -> Executor:
        return self.execution.executor

    @property
    def head(self) -> SlicedHead | None:
        """The sliced head, if the model has one: a call with labels returns a loss, no logits."""
        return self.execution.head

    @property
    def process_group(self) -> ProcessGroup:
        """The ranks that share the state."""
        return self.context.process_group

    @property
    def step(self) -> int:
        return self.executor.record.train_state.step

    @property
    def must_run_again(self) -> bool:
        """True if the last backward belonged to a clipped step that must be rerun.

        The training loop then has to run the same batch again; see `OffloadPolicy.run_again`.
        """
        return self.executor.clipping.must_rerun

    def train_step(
        self, batch: Any, loss: Callable[[Any], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Run forward and backward of a batch as one step, and return its loss, detached.

        `loss` computes the loss of a batch. By default the model is called with the batch (a dict,
        a tuple or a tensor). An error is raised unless its output is the loss or has an attribute
        `loss`. If the step is clipped and must be run again, this method runs it again from the
        same random state.
        """
        compute = partial(_own_loss, self.model) if loss is None else loss
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

    @property
    def lr(self) -> float:
        """The learning rate of the next step, for parameters without their own group."""
        return self.executor.record.groups.at(self.step).rates[0]

    @property
    def plan(self) -> Plan:
        return self.executor.plan

    @property
    def counters(self) -> Counters:
        """The bytes read from and written to SSD by the session, including activations."""
        return self.store.counters + self.execution.activation_counters

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
        return export_session(
            self,
            out,
            source_folder=source,
            dtype=dtype,
            overwrite=overwrite,
            buffers=persistent_buffers(base_of(self.model)),
            ema=ema,
        )

    def take_finished(self) -> list[dict[str, Any]]:
        """Return the metadata of steps that have ended since the last call, oldest first.

        This includes steps between two commits, which are not durable yet. If this method is not
        called, only the metadata of the last few steps is kept.
        """
        return self.execution.take_finished()

    def flush(self) -> None:
        """Wait until the updates of every finished step are done.

        Steps that commit are then durable. With a commit interval, call `commit` to make the last
        step durable. A loop does not need this, because the next forward waits for what it uses.
        """
        self.executor.flush()

    def commit(self) -> None:
        """Flush, and write the last step to the store. `export` and `close` call this method."""
        self.executor.commit()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Run one step with the sums of the gradients of all `backward` calls in the `with` body.

        The optimizer runs when the body ends. Weights are transferred once per call. One larger
        batch, divided into micro-batches, transfers them once in total and needs no memory for
        gradients. The sums are held in host memory. If the plan leaves too little memory for the
        sums, the session continues with a plan that leaves enough.
        """
        if self.executor.collector.accumulated is None:
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
        self.execution.follow(plan)

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
        return self.executor.clipping.norm

    @property
    def updates_in_backward(self) -> bool:
        """True if `backward` runs the optimizer step.

        If False, backward leaves gradients in `.grad`, as in PyTorch, if they fit in
        memory, and updates nothing.
        """
        return self.execution.updates_in_backward

    @updates_in_backward.setter
    def updates_in_backward(self, updates: bool) -> None:
        self.execution.update_in_backward(updates)

    def weight(self, name: str) -> torch.Tensor:
        """Return a copy of a parameter's current values, by its name in the model.

        The values have the type in which the block computes.
        """
        with torch.no_grad():
            return self.model.get_parameter(name).clone()

    def rewind(self, target: str | os.PathLike[str]) -> None:
        """Restore weights, optimizer state and step from a snapshot of this session's store.

        Until this has succeeded, the store contains the current state.
        """
        with self.execution.paused():
            rewind(self.store, Path(target))

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
            ending.callback(self.execution.stop)
            if flush and not self.execution.stopped and not self.executor.lost:
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
        # The steps that ended before an error are committed if the error is one of the user's own
        # code. After Ctrl-C they are committed only if there may be many of them, that is, if
        # commits are made by interval.
        commits = not self.execution.stopped and not self.execution.planless
        if commits and not isinstance(error, Exception):
            commits = not self.plan.commit.every_step
        try:
            self.close(flush=commits)
        except LohanError as second:
            error.add_note(f"closing the session failed too: {second}")


def _own_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Call the model with a batch, and return the loss in its output."""
    if isinstance(batch, Mapping):
        out = model(**batch)
    else:
        out = model(*batch) if isinstance(batch, tuple) else model(batch)
    loss = out if isinstance(out, torch.Tensor) else getattr(out, "loss", None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise ConfigError(
            f"train_step: the output of {type(model).__name__} is not a loss and has none; call "
            "it with labels, or give train_step(batch, loss=...)"
        )
    return loss
