"""When two runs count as the same.

Both do the same arithmetic in another order, so they differ by rounding and by nothing else. The
limits are those that LoHan's own tests keep. A loss may differ by 1e-5 of itself in fp32, by four
unit roundoffs in 16-bit types. AdamW divides a gradient by its own size, so what counts for weights
is the way that a tensor has gone since the start: the distance between the two runs may be 1/1000
of it in fp32, four unit roundoffs in 16-bit types, plus the rounding of the weights themselves.
Where gradients are mostly rounding noise (the key bias of attention), plain PyTorch is no better:
how far it is from the same run in a finer type is measured, and one and a half times that much is
allowed on top. In the first steps AdamW takes little more than the sign of a gradient, so noise
comes as single weights that go the other way; where the measured noise of most tensors says that
this happens, a tensor may have a few of them by chance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

NOISE = 1.5
ROUNDING = 2.0**-23  # of a weight, by one update in each of the two runs
CHANCE = 0.01  # weights of the whole model that go the other way, at least, to be reckoned with
BY_CHANCE = 3.0  # such weights in any tensor, and as many standard deviations of their number


@dataclass(frozen=True)
class Tolerance:
    loss: float  # share of the loss
    way: float  # share of a tensor's way


TOLERANCES = {
    "fp32": Tolerance(loss=1e-5, way=1e-3),
    "bf16": Tolerance(loss=4 * 2.0**-9, way=4 * 2.0**-9),
    "fp16": Tolerance(loss=4 * 2.0**-12, way=4 * 2.0**-12),
}


@dataclass(frozen=True)
class Difference:
    """One tensor after one step: 2-norms, and the largest difference of a single weight."""

    name: str
    distance: float  # between the runs
    largest: float
    way: float  # of the in-memory run since the start
    size: float  # of its weights
    count: int  # of its weights


@dataclass(frozen=True)
class Noise:
    """Of the in-memory run, against a finer type: per step, of the loss and by tensor."""

    losses: Sequence[float]
    weights: Sequence[dict[str, float]]


@dataclass(frozen=True)
class Verdict:
    """One number that was compared; `limit` in the same unit."""

    what: str
    step: int
    difference: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.difference <= self.limit  # False for a NaN

    @property
    def share(self) -> float:
        """Of the limit."""
        if self.limit > 0:
            return self.difference / self.limit
        return 0.0 if self.difference == 0 else float("inf")


def judge_losses(
    found: Sequence[float], expected: Sequence[float], tolerance: Tolerance, noise: Noise | None
) -> list[Verdict]:
    return [
        Verdict(
            "loss", number + 1, abs(one - two),
            tolerance.loss * abs(two) + (NOISE * noise.losses[number] if noise else 0.0),
        )
        for number, (one, two) in enumerate(zip(found, expected, strict=True))
    ]  # fmt: skip


def judge_weights(
    steps: Sequence[Sequence[Difference]], tolerance: Tolerance, noise: Noise | None
) -> list[list[Verdict]]:
    """Per step a verdict for every tensor."""
    made = []
    for number, step in enumerate(steps):
        noisy = _allowances(step, noise.weights[number]) if noise else [0.0] * len(step)
        made.append([
            Verdict(
                each.name, number + 1, each.distance,
                tolerance.way * each.way + ROUNDING * (number + 1) * each.size + more,
            )
            for each, more in zip(step, noisy, strict=True)
        ])  # fmt: skip
    return made


def _allowances(step: Sequence[Difference], noise: dict[str, float]) -> list[float]:
    """For every tensor, what noise may add to its distance. A weight that goes the other way is
    twice its own way off; the median tensor says what share of weights does."""
    shares = [(noise[each.name] / each.way) ** 2 / 4 for each in step if each.way]
    share = min(1.0, median(shares)) if shares else 0.0
    known = share * sum(each.count for each in step) >= CHANCE
    made = []
    for each in step:
        mean = share * each.count
        astray = min(mean + BY_CHANCE * math.sqrt(mean) + BY_CHANCE, each.count) if known else 0.0
        chance = 2 * each.way * math.sqrt(astray / each.count) if each.count else 0.0
        made.append(max(NOISE * noise[each.name], chance))
    return made


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """A NaN is worse than anything."""
    return max(verdicts, key=lambda v: (v.difference != v.difference, v.share))
