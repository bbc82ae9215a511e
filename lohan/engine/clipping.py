"""Clipping and loss scaling: the gradient norm, the resulting factor, and speculative updates.

The clipping factor depends on all gradients, so no update can know it during backward. While steps
stay below the limit, the factor is 1 for all of them. Updates therefore run in backward as if there
were no limit (speculation), into the generation that is not committed, and the norm is computed at
the end of backward. If it is below the limit, the step is committed. Otherwise that generation is
discarded, the cache in host memory is read again from the committed one, and the step is

* redone, if the plan keeps the gradients in memory: the updates run again with the clipping factor;
* rerun, if gradients would be spilled to SSD: the whole step runs again, from the same batch and
  random state, with the known factor. This requires a caller that checks `Session.must_run_again`,
  as `lohan train` does, and a model whose buffers do not change in a step.

All of these give the same bits as waiting for the norm.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lohan.engine.collectives import StepCollectives
from lohan.engine.gradients import sum_of_squares
from lohan.engine.scheduler import ActionScheduler
from lohan.engine.step import Decision, Step, Steps
from lohan.model.plan import Plan
from lohan.schedule.placement import Gate, UpdateOptions
from lohan.store.store import Store

if TYPE_CHECKING:
    from lohan.engine.actions import ActionRunner

RECENT_STEPS = 8  # The plan limits how many of this many last steps may be clipped.


def clip_factor(norm: float, limit: float) -> float:
    """Return the factor of `torch.nn.utils.clip_grad_norm_`. A limit of 0 disables clipping."""
    return min(1.0, limit / (norm + 1e-6)) if limit else 1.0


class Clipping:
    """Decides for each step whether updates wait for the norm.

    The decision depends on the recent steps. The class also computes the norm, and accepts or
    rolls back updates that did not wait for it.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        scheduler: ActionScheduler,
        runner: ActionRunner,
        store: Store,
        collectives: StepCollectives,
        steps: Steps,
    ) -> None:
        self.steps = steps
        self._plan, self._scheduler, self._runner = plan, scheduler, runner
        self._store, self._collectives = store, collectives
        self._updates = UpdateOptions.of(plan)
        # Whether all held gradients stay in memory until the norm is known.
        self.all_held_in_memory = not plan.spilled_gradients
        self._clipped: deque[bool] = deque(maxlen=RECENT_STEPS)
        self.norm: float | None = None  # The norm of all gradients of the last step.
        # Metrics of the last step: clipped, speculated and rolled_back.
        self.counts: dict[str, int] = {}

    @property
    def gate(self) -> Gate:
        return self._updates.gate

    @property
    def over_limit(self) -> bool:
        """Whether the last norm exceeded the limit or the range of fp16."""
        return bool(self._clipped) and self._clipped[-1]

    @property
    def must_rerun(self) -> bool:
        """Whether the last backward was that of a clipped step, which must be rerun."""
        return self.steps.current.first_run is not None

    @property
    def known_factor(self) -> float:
        """The factor of updates that do not wait for the norm: 1, unless a step is rerun."""
        first_run = self.steps.current.first_run
        return 1.0 if first_run is None else first_run.clip_factor

    def skips_norm_wait(self, *, repeatable: bool) -> bool:
        """Decide whether updates run in this backward without waiting for the norm.

        `repeatable` states that the step can be run again with the same results.
        """
        can_speculate = self._updates.can_speculate and (self.all_held_in_memory or repeatable)
        last_unclipped = bool(self._clipped) and not self._clipped[-1]
        speculates = (
            can_speculate
            and last_unclipped
            and sum(self._clipped) <= self._plan.most_clipped * RECENT_STEPS
        )
        return speculates or self.steps.current.first_run is not None

    def resolve_step(self, divisor: float, *, unsummed: Sequence[int]) -> Decision:
        """Compute the norm after backward, and return the decision about the step.

        `divisor` unscales the gradients: it contains the loss scale and the number of ranks over
        which they are averaged. `unsummed` are the groups whose squares have not been summed.

        Updates that ran early are accepted if the factor is 1. Otherwise they are rolled back and,
        if their gradients were not kept, the step must run again.
        """
        step = self.steps.current
        step.decision = self._decide(step, divisor, unsummed)
        return step.decision

    def _decide(self, step: Step, divisor: float, unsummed: Sequence[int]) -> Decision:
        if self._updates.gate is Gate.NONE:
            return Decision.ACCEPT
        norm, first_run, speculated = self._norm(divisor, unsummed), step.first_run, step.speculates
        if first_run is not None and speculated:
            # The decision of the first run holds, even if the two runs differ.
            self.norm, step.factor = first_run.norm, first_run.clip_factor
            return Decision.ACCEPT
        self.norm, factor = norm, self._factor(norm)
        clipped = factor != 1.0
        if first_run is None:
            self._count(step, clipped=clipped, overflowed=factor is None)
        step.factor = 1.0 if factor is None else factor
        if speculated and not clipped:
            self._runner.pending.accept()
            return Decision.ACCEPT
        if speculated:
            self._scheduler.roll_back()
            self._store.discard()
            self._runner.undo_updates()
        if factor is None:
            return Decision.SKIP
        if speculated and not self.all_held_in_memory:
            self._runner.pending.clear()
            return Decision.RERUN
        return Decision.REDO if speculated else Decision.ACCEPT

    def _count(self, step: Step, *, clipped: bool, overflowed: bool) -> None:
        """Update the metrics and the record of recent steps."""
        self._clipped.append(clipped)
        if self._plan.clip:
            self.counts["clipped"] = int(clipped and not overflowed)
        if self._updates.can_speculate:
            self.counts |= {
                "speculated": int(step.speculates),
                "rolled_back": int(step.speculates and clipped),
            }

    def _norm(self, divisor: float, unsummed: Sequence[int]) -> float:
        """Return the norm of all gradients of the model, over all ranks."""
        grads, squares = self._runner.pending.on_host, self._runner.pending.squares
        for number in unsummed:
            squares.setdefault(number, sum_of_squares(grads.get(number, {})))
        summed = self._collectives.all_reduce_sum(math.fsum(squares.values()))
        return math.sqrt(summed) / divisor

    def _factor(self, norm: float) -> float | None:
        """Return the clipping factor, or None if a gradient overflows fp16."""
        if not math.isfinite(norm) and self._plan.dtype == "fp16":
            return None
        return clip_factor(norm, self._plan.clip)
