"""Learning-rate schedules as one pure function of the step number.

Steps count from 0. Without warm-up the values are those of transformers'
`get_{constant,linear,cosine}_schedule_with_warmup`. Warm-up differs on purpose: transformers
gives step s the factor s / warmup, so its first step has rate 0 and trains nothing; here it is
(s + 1) / warmup, so the first step counts and step warmup - 1 is the first at the peak rate.
"""

from __future__ import annotations

import math

from lohan.errors import ConfigError

SCHEDULES = ("constant", "linear", "cosine")


def lr_at(
    step: int,
    *,
    total_steps: int,
    peak_lr: float,
    schedule: str = "constant",
    warmup_steps: int = 0,
    min_lr_ratio: float = 0.0,
) -> float:
    """The learning rate of a step, counted from 0.

    The decay goes from the peak at step `warmup_steps` to `min_lr_ratio * peak_lr` at step
    `total_steps`, which is the first step after the run; later steps stay there.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(f"schedule: unknown {schedule!r}; choose {', '.join(SCHEDULES)}")
    if step < warmup_steps:
        return peak_lr * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak_lr
    done = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    left = 1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return peak_lr * (min_lr_ratio + (1.0 - min_lr_ratio) * left)
