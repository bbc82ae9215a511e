"""Losses and gradient norms that no training has: the run stops before such a step is committed."""

from __future__ import annotations

import math

from lohan.checkpoint.train_state import SMALLEST_SCALE, TrainState
from lohan.errors import TrainingError

LARGEST = 1e15  # far beyond any loss or norm that could still be trained with


def check_loss(loss: float, state: TrainState) -> None:
    """Before backward. A loss of exactly zero may come of data learnt by heart, but not at once."""
    if not math.isfinite(loss) or abs(loss) > LARGEST:
        raise _stopped("loss", loss, state.step)
    if loss == 0.0 and state.step == 0:
        raise _stopped("loss", loss, 0)


def check_norm(norm: float | None, before: TrainState, after: TrainState) -> None:
    """When backward has ended, where the norm is known. An fp16 gradient that leaves the range
    costs its step and halves the scale; it stops the run only where the scale has no way down."""
    if after.skipped > before.skipped:
        if before.loss_scale <= SMALLEST_SCALE:
            raise _stopped(
                f"gradient norm with loss scale {before.loss_scale:g}", norm, before.step
            )
        return
    if norm is None:
        return
    if not math.isfinite(norm) or norm > LARGEST or (norm == 0.0 and before.step == 0):
        raise _stopped("gradient norm", norm, before.step)


def _stopped(what: str, value: float | None, done: int) -> TrainingError:
    left = f"step {done}, the last committed one, is whole" if done else "nothing was trained"
    return TrainingError(
        f"step {done + 1}: the {what} is {value}, which no training has; the run stops before it "
        f"is committed or exported ({left}). Lower --lr, look at the data, or compare the first "
        "steps with plain PyTorch: `lohan verify`"
    )
