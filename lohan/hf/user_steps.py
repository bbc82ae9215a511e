"""Training steps that a Trainer subclass runs itself, with `accelerator.backward`.

Trainer calls its `training_step` for a forward and a backward, and then its optimizer for a step.
LoHan's own training_step does all of this at once.

An overridden training_step may call `accelerator.backward` instead. The model is then attached
before the method runs, the backward performs the step, and the gradients of all batches of one
optimizer step are added up. In any subclass, it is an error if an optimizer step has not changed
the weights exactly once.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any

from torch import nn

from lohan.engine.session import Session
from lohan.errors import ModelError
from lohan.hf.precision import losses_in_fp32

LIBRARIES = ("transformers", "trl", "lohan")  # packages whose methods LoHan supports


def is_of_library(method: Any) -> bool:
    """Return whether a method is defined by LoHan, transformers or TRL."""
    return str(getattr(method, "__module__", "")).partition(".")[0] in LIBRARIES


class _Dropped(Exception):
    """Raised to discard accumulated gradients that no optimizer step uses."""


class UserSteps:
    """The optimizer steps of a Trainer, as counted by its loop and by the session."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = weakref.ref(trainer)
        self.in_own_step = False  # True inside LoHan's own training_step.
        # True once fp32 losses are enabled for the whole training, so that no step need enable them
        # again.
        self._in_fp32 = False
        # Whether the Trainer's `_clip_grad_norm`, which a subclass may override, was called in this
        # step.
        self.norm_is_read = False
        self._precision = ExitStack()
        # the context that sums the gradients of a step's batches; None if none is open
        self._sums: AbstractContextManager[None] | None = None
        self._checks = True
        # the optimizers whose steps are checked
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        # True if a backward has performed a step since the last optimizer step.
        self._stepped = False
        # The step number of the session after the last optimizer step.
        self._last_step: int | None = None

    @property
    def overridden(self) -> bool:
        """True if training_step was overridden outside of LoHan, transformers and TRL."""
        return not is_of_library(self._trainer().training_step)  # type: ignore[union-attr]

    def prepare(self, batches: Sequence[Any]) -> None:
        """Attach the model before an overridden training_step, which might not call LoHan's.

        `batches` are those of the optimizer step, and give the shapes.
        """
        trainer: Any = self._trainer()
        if not batches or not self.overridden:
            return
        if trainer.session is None or trainer.session.closed:
            joined = trainer._joined_batch(batches) if len(batches) > 1 else None
            trainer.attach(batches[0] if joined is None else joined)
        # This must happen before the first forward, which fixes the plan of the step.
        if len(batches) > 1:
            trainer.session.make_room_for_sums()
        if not self._in_fp32:
            self._precision.enter_context(losses_in_fp32(trainer.model, trainer.args))
            self._in_fp32 = True

    def losses_in_fp32(self, model: nn.Module) -> AbstractContextManager[None]:
        """Compute losses in fp32 in the `with` body, unless they are for the whole training."""
        args = self._trainer().args  # type: ignore[union-attr]
        return nullcontext() if self._in_fp32 else losses_in_fp32(model, args)

    def watch(self, optimizer: Any) -> None:
        """Check every step of the Trainer's optimizer, whose own step does nothing."""
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            optimizer.register_step_pre_hook(lambda *_: self.check_step())

    def attached(self, session: Session) -> None:
        """Start counting optimizer steps at the current step of the session."""
        self._last_step, self._stepped = session.step, False

    @contextmanager
    def own_step(self, session: Session) -> Iterator[None]:
        """Make every backward in the `with` body run a step.

        LoHan's own `training_step` uses this. A `training_step` of the user does not.
        """
        before = session.updates_in_backward
        session.updates_in_backward = self.in_own_step = True
        try:
            yield
        finally:
            self.in_own_step = False
            if not session.closed:
                session.updates_in_backward = before

    def wrapped(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap accelerator.backward to sum gradients of batches, and run the step with the last."""

        def wrapped(loss: Any, **kwargs: Any) -> None:
            trainer: Any = self._trainer()
            session = trainer.session
            if self.in_own_step or session is None or session.closed or not trainer.is_in_train:
                backward(loss, **kwargs)
                return
            if self._stepped:
                raise ModelError(
                    f"{type(trainer).__name__}.training_step called backward again after the "
                    "step: LoHan updates the weights in backward, so both gradients cannot be "
                    "added; add the losses and call backward once, or call both inside `with "
                    "self.session.accumulate():`"
                )
            self._run(backward, loss, kwargs, session, last=trainer.accelerator.sync_gradients)

        return wrapped

    def _run(
        self, backward: Callable[..., Any], loss: Any, kwargs: Any, session: Session, *, last: bool
    ) -> None:
        accumulates = session.executor.collector.accumulated is not None
        user_sums = self._sums is None and accumulates
        if self._sums is None and not last and not user_sums:
            self._sums = session.accumulate()
            self._sums.__enter__()
        try:
            backward(loss, **kwargs)
        except BaseException:
            sums, self._sums = self._sums, None
            if sums is not None:
                sums.__exit__(*sys.exc_info())
            raise
        if last and not user_sums:
            self._stepped, sums = True, self._sums
            self._sums = None
            if sums is not None:
                sums.__exit__(None, None, None)

    @contextmanager
    def unchecked(self) -> Iterator[None]:
        """Permit optimizer steps without an update; schedulers require one before they step."""
        self._checks = False
        try:
            yield
        finally:
            self._checks = True

    def check_step(self) -> None:
        """Raise ModelError unless the weights were updated once since the last optimizer step."""
        if not self._checks:
            return
        trainer: Any = self._trainer()
        session, name = trainer.session, type(trainer).__name__
        steps = 0 if session is None else session.step - (self._last_step or 0)
        if steps == 0:
            raise ModelError(
                f"{name}: no step was taken for this optimizer step, so nothing would be trained; "
                "an overridden training_step must call self.accelerator.backward(loss) with a loss "
                "of the model's forward, or super().training_step(...)"
            )
        if steps != 1:
            raise ModelError(
                f"{name}: {steps} steps were taken for one optimizer step, since every backward is "
                "a step; call self.accelerator.backward(loss) in training_step instead of "
                "loss.backward(), or super().training_step(...)"
            )
        if not session.executor.step_gradients.consumed:
            raise ModelError(
                f"{name}: gradients were set to zero between backward and the optimizer step, to "
                "skip the step, but its update has already run inside backward; to skip a step, "
                "leave its batch out of the data"
            )
        self.attached(session)
        trainer._take_place(session)  # as LoHan's own training_step does

    def end(self) -> None:
        """Discard accumulated gradients and hooks that an interrupted training has left."""
        sums, self._sums = self._sums, None
        if sums is not None:
            with suppress(_Dropped):
                sums.__exit__(_Dropped, _Dropped(), None)
        self._precision.close()
        self._in_fp32 = False
