"""The executor and the head that run a model by a plan, and their replacement by those of another.

What the user has set on executor and head, and what the steps of earlier plans have left to be
read, outlasts a change of plan.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from traceback import clear_frames
from typing import Any

from torch import nn

from lohan.capture.saved_call import forget_last_weights
from lohan.engine.context import PlanContext
from lohan.engine.executor import Executor
from lohan.engine.head import SlicedHead
from lohan.engine.step import MAX_PENDING_META
from lohan.errors import StoreError
from lohan.model.plan import Plan
from lohan.store.transfers import Counters

ExecutorAndHead = tuple[Executor, SlicedHead | None]


class PlanExecution:
    """The executor and the head of the current plan, and what outlasts a change of plan."""

    def __init__(
        self,
        model: nn.Module,
        context: PlanContext,
        make_executor: Callable[[Plan], ExecutorAndHead],
        plan: Plan,
    ) -> None:
        self._model = model
        self._device, self._process_group = context.device, context.process_group
        # creates the executor for a plan, which runs the model from the store
        self._make_executor = make_executor
        self._executor: Executor | None = None
        # With a sliced head, a call with labels returns a loss and no logits.
        self.head: SlicedHead | None = None
        # `stopped`: the modules of the model have their own forward again; the store may be open.
        # `planless`: a change of plan failed, and the old plan could not be restored.
        self.stopped = self.planless = False
        self.updates_in_backward = True
        # settings of the previous executor, restored by `start`, like those of the head below
        self._mean_over: int | None = None
        self._norm: float | None = None
        self._head_settings: dict[str, Any] = {}
        # metadata of steps under earlier plans that was not taken yet
        self._earlier_metas: list[dict[str, Any]] = []
        self._earlier_counters = Counters(0, 0)  # bytes of activations under earlier plans
        self.start(plan)

    @property
    def executor(self) -> Executor:
        if self._executor is None or self.planless:
            raise StoreError(
                "the session has no plan: a change of plan failed, and the old plan could not be "
                "restored; close the session and resume from the last step"
            )
        return self._executor

    @property
    def lost(self) -> bool:
        """True if a step failed and could not be rolled back."""
        return self._executor is None or bool(self._executor.lost)

    def start(self, plan: Plan) -> None:
        """Create executor and head for a plan, with the settings of the previous executor and head.

        The last norm is also kept.
        """
        self._executor, self.head = self._make_executor(plan)
        if self._mean_over is not None:
            self._executor.record.mean_over = self._mean_over
        self._executor.clipping.norm = self._norm
        self._executor.step_gradients.updates = self.updates_in_backward
        if self.head is not None:  # User code may have changed the settings of the head.
            for name, value in self._head_settings.items():
                setattr(self.head, name, value)
        self.stopped = self.planless = False

    def stop(self) -> None:
        """Restore the original forward of the model's modules.

        If this is interrupted, it can be called again.
        """
        self.stopped = True
        if self.head is not None:
            self._head_settings = {name: getattr(self.head, name) for name in self.head.SETTINGS}
            self.head.remove()
        if self._executor is not None:
            self._mean_over = self._executor.record.mean_over
            self._norm = self._executor.clipping.norm
            self._executor.close()
        forget_last_weights(self._model)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Commit, and stop while the body changes the store."""
        plan = self.executor.plan
        self.executor.commit()
        self.stop()
        try:
            yield
        finally:
            self.start(plan)

    def follow(self, plan: Plan | Callable[[], Plan]) -> None:
        """Continue with another plan, or with the current one if that fails."""
        old, consumed = self.executor.plan, self.executor.step_gradients.consumed
        self.executor.commit()
        self._earlier_counters = self.activation_counters
        self._earlier_metas = self.take_finished()[-MAX_PENDING_META:]
        self.planless = True
        self.stop()
        self._executor = self.head = None
        # Modules and executor refer to each other. Free their memory before the new plan allocates.
        gc.collect()
        self._device.release_cached_memory()
        try:
            self.start(plan() if callable(plan) else plan)
            self.executor.step_gradients.consumed = consumed
        except BaseException as error:  # such as too little memory, or Ctrl-C
            if self._process_group.several:  # Note [an error on one rank]: others may have begun
                self._process_group.abort()
                raise
            clear_frames(error.__traceback__)  # Frames hold what the new plan has allocated.
            gc.collect()
            self._device.release_cached_memory()
            self.start(old)
            raise

    @contextmanager
    def unhooked(self) -> Iterator[None]:
        """Temporarily remove the forwards and hooks that LoHan has installed in the model."""
        calls = [*(self._executor.hooks.wrapped_sites if self._executor is not None else ())]
        modules: list[tuple[nn.Module, Any]] = [(call.module, call) for call in calls]
        if self.head is not None:
            modules.append((self.head.model, self.head))
        with ExitStack() as undo:
            if self._executor is not None:
                undo.enter_context(self._executor.hooks.removed())
            for module, forward in modules:
                if vars(module).get("forward") is forward:
                    del module.forward
                    undo.callback(setattr, module, "forward", forward)
            yield

    def update_in_backward(self, updates: bool) -> None:
        """Set whether `backward` runs the optimizer step; see `Session.updates_in_backward`."""
        if updates == self.updates_in_backward:
            return
        if updates:
            for parameter in self._model.parameters():
                parameter.grad = None
        self.updates_in_backward = updates
        if self._executor is not None:
            self._executor.step_gradients.updates = updates
            self._executor.step_gradients.consumed = False

    def take_finished(self) -> list[dict[str, Any]]:
        """Return the metadata of steps that have ended since the last call, oldest first."""
        before, self._earlier_metas = self._earlier_metas, []
        if self._executor is None:
            return before
        finished = self._executor.steps.ended_metas
        return before + [finished.popleft() for _ in range(len(finished))]

    @property
    def activation_counters(self) -> Counters:
        """The bytes of activations that all plans have read from SSD and written to it."""
        spill = self.executor.runner.activation_spill
        return self._earlier_counters + (Counters(0, 0) if spill is None else spill.counters)
