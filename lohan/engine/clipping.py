"""Clipping and loss scaling: the norm, the factor that follows from it, and whether updates wait.

Both need every gradient before the first update. While steps stay below the limit, the factor of
all of them turns out to be 1: so updates run in backward as if there were no limit (speculation),
into the generation that is not committed, and the norm is known when backward has ended. Below the
limit the step is committed. Above it nothing is lost but time: that generation is forgotten, what
is cached in host memory is read again from the committed one, and the step is

* redone: updated once more with its factor from the gradients, where the plan holds those in
  memory anyway;
* rerun: as a whole, from the same batch and random state, with its factor known, where they would
  go to SSD. That takes a caller who does it where `Session.must_run_again` says so, as `lohan
  train` does, and a model whose buffers a step leaves alone.

Every way gives the bits of waiting. `clip_by = "block"` clips each group by its own norm, in its
update, and nothing waits for the norm of all.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lohan.engine.buffers import StepScalars
from lohan.engine.gradients import StepCollectives, sum_of_squares
from lohan.engine.scheduler import ActionScheduler
from lohan.model.plan import Plan
from lohan.store.store import Store

if TYPE_CHECKING:
    from lohan.engine.actions import ActionRunner

RECENT = 8  # steps, of which the plan says how many may be clipped


def clip_factor(norm: float, limit: float) -> float:
    """As `torch.nn.utils.clip_grad_norm_` has it; a limit of 0 is none."""
    return min(1.0, limit / (norm + 1e-6)) if limit else 1.0


def clip_by_block(scalars: StepScalars, group: int, limit: float) -> StepScalars:
    """For the update of one group, by the norm of its own gradients."""
    factor = clip_factor(math.sqrt(scalars.squares[group]) * scalars.grad_multiplier, limit)
    return replace(scalars, grad_multiplier=factor * scalars.grad_multiplier)


@dataclass(frozen=True)
class Factor:
    """What clipping multiplies the gradients of a step with, and the norm that it follows from."""

    clip_factor: float
    norm: float


class Clipping:
    """Decides, step by step, from what the last ones were like, whether updates wait for the norm;
    takes it, and accepts updates that did not wait or rolls them back."""

    def __init__(
        self, plan: Plan, *, two_generations: bool, scheduler: ActionScheduler,
        runner: ActionRunner, store: Store, collectives: StepCollectives,
    ) -> None:  # fmt: skip
        """`two_generations`: there is a committed generation to go back to."""
        self._plan, self._scheduler, self._runner = plan, scheduler, runner
        self._store, self._collectives = store, collectives
        self._possible = plan.may_speculate(two_generations=two_generations)
        self.all_held_in_memory = not plan.spilled_gradients  # in memory, until the norm is known
        self._known: Factor | None = None  # of the step that is to be rerun
        self._clipped: deque[bool] = deque(maxlen=RECENT)
        self.norm: float | None = None  # of all gradients of the last step
        # Of the last step: clipped, speculated and rolled_back, or clipped_blocks.
        self.counts: dict[str, int] = {}

    @property
    def over_limit(self) -> bool:
        """Whether the norm of the last step was, or has left the range of fp16."""
        return bool(self._clipped) and self._clipped[-1]

    @property
    def must_rerun(self) -> bool:
        """The last backward was that of a clipped step, and did not count."""
        return self._known is not None

    @property
    def known_factor(self) -> float:
        """Of updates that do not wait for the norm: 1, but for a step that is rerun."""
        return 1.0 if self._known is None else self._known.clip_factor

    def skips_norm_wait(self, *, repeatable: bool) -> bool:
        """Whether updates are to run in this backward, without waiting for the norm. `repeatable`:
        a step that is rerun finds what it found."""
        able = self._possible and (self.all_held_in_memory or repeatable)
        calm = bool(self._clipped) and not self._clipped[-1]
        pays = able and calm and sum(self._clipped) <= self._plan.most_clipped * RECENT
        return pays or self._known is not None

    def resolve_step(self, divisor: float, *, unsummed: Sequence[int]) -> float | None:
        """Backward has ended. `divisor`: what unscales gradients (loss scale, ranks that they are
        the mean over). `unsummed`: groups without the sum of their squares.
        Returns the factor of updates that have waited, or None if a gradient has left the range of
        fp16, so that the step must be skipped. Updates that ran early are accepted if the factor is
        1. Otherwise they are rolled back and, if their gradients were not kept, the step must be
        rerun."""
        if not self._plan.needs_norm:
            return 1.0
        speculated, known = self._scheduler.skips_norm_wait, self._known
        norm = self._norm(divisor, unsummed)
        if not self._plan.needs_all_gradients:  # an update waits for the norm of its group at most
            self.norm = norm
            return 1.0
        if known is not None:
            self._known = None
            if speculated:  # its first run decides, also where no two runs are equal
                self.norm = known.norm
                return known.clip_factor
        self.norm, factor = norm, self._factor(norm)
        if known is not None:
            return factor
        clipped = factor != 1.0
        self._clipped.append(clipped)
        if self._plan.clip > self._plan.block_clip:
            self.counts["clipped"] = int(clipped and factor is not None)
        if self._possible:
            rolled_back = int(speculated and clipped)
            self.counts |= {"speculated": int(speculated), "rolled_back": rolled_back}
        if speculated and not clipped:
            self._runner.accept_updates()
        elif speculated:
            self._scheduler.roll_back()
            self._store.discard()
            self._runner.undo_updates()
            if factor is not None and not self.all_held_in_memory:
                self._known = Factor(factor, norm)
                self._runner.drop_gradients()
        return factor

    def forget(self) -> None:
        """After an error: no step is to be rerun."""
        self._known = None

    def _norm(self, divisor: float, unsummed: Sequence[int]) -> float:
        """Of the gradients of the whole model; where groups are clipped one by one, how many of
        them are is counted."""
        grads, squares = self._runner.pending.on_host, self._runner.pending.squares
        for number in unsummed:
            squares.setdefault(number, sum_of_squares(grads.get(number, {})))
        limit, summed = self._plan.block_clip, math.fsum(squares.values())
        if limit:
            norms = (math.sqrt(own) / divisor for own in squares.values())
            self.counts = {"clipped_blocks": sum(clip_factor(n, limit) != 1.0 for n in norms)}
        if not (limit and self._collectives.process_group.several):  # else of all ranks already
            summed = self._collectives.all_reduce_sum(summed)
        return math.sqrt(summed) / divisor

    def _factor(self, norm: float) -> float | None:
        """Of all gradients alike."""
        if not math.isfinite(norm) and self._plan.dtype == "fp16":
            return None
        return clip_factor(norm, 0.0 if self._plan.block_clip else self._plan.clip)
