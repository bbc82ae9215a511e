"""The steps in flight: the step that the model runs, and steps whose end is still queued.

A step begins with a forward. After its backward, it is closed: its decision is made, and its
remaining updates and its commit are queued. It is then the previous step, and the model may already
run the next one. Executor, scheduler, runner and collector share one `Steps`.
`Clipping` makes the decision, and `CommitClock` chooses the steps that are committed.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from lohan.engine.buffers import StepScalars
from lohan.engine.gradients import sum_of_squares
from lohan.schedule.placement import RECENT_STEPS, StepPlacement, UpdateOptions, speculates

if TYPE_CHECKING:
    from lohan.device.ranks import ProcessGroup
    from lohan.engine.actions import ActionRunner
    from lohan.engine.gradients import StepCollectives
    from lohan.engine.scheduler import ActionScheduler
    from lohan.model.plan import Plan
    from lohan.schedule.steps import ExecutionOrder
    from lohan.store.store import Store


MAX_PENDING_META = 16  # Steps whose metadata is kept until it is taken. A loop need not take any.


class State(Enum):
    """The progress of a step."""

    FORWARD = "forward"  # no backward has begun
    BACKWARD = "backward"
    PAUSED = "paused"  # between two backward calls of the step
    CLOSED = "closed"  # its remaining updates and its end are queued


class Decision(Enum):
    """The result of a step after its backward."""

    ACCEPT = "accept"  # The step counts. Updates that have waited get the clipping factor.
    REDO = "redo"  # The updates were rolled back, and are repeated with the kept gradients.
    RERUN = "rerun"  # The updates were rolled back, and the loop runs the batch again.
    SKIP = "skip"  # A gradient has overflowed in fp16, so no weight changes.


@dataclass(frozen=True)
class Factor:
    """The factor by which clipping multiplies the gradients of a step, and the norm of the step."""

    clip_factor: float
    norm: float


@dataclass(eq=False)
class Step:
    """The state of one step."""

    commits: bool = True
    # If this is the second run of a batch: the factor that the first run has determined.
    first_run: Factor | None = None
    state: State = State.FORWARD
    parts: int = 0  # backward calls that were added to the step so far, without ending it
    # The order of sites as called so far. `reached` are the sites that backward will visit.
    forward: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)
    # True if backward is scheduled as a whole, in the order of the last step; False if it is
    # scheduled block by block, or its remaining actions were cancelled.
    scheduled_ahead: bool = False
    placed: StepPlacement | None = None  # when its updates run; set when backward begins
    scalars: StepScalars | None = None  # numbers for the updates that run in backward
    # The groups whose last use is each site of backward, if backward is scheduled ahead.
    last_uses: list[tuple[int, ...]] | None = None
    # The groups whose gradients blocks have handed over after their last use. The others, also
    # those that backward does not reach, are updated or held after the end of backward.
    complete_groups: set[int] = field(default_factory=set)
    updated_at_end: list[int] = field(default_factory=list)
    # For each group whose gradients were handed over: the indices of the tensors that got one.
    tensors_with_gradient: dict[int, frozenset[int]] = field(default_factory=dict)
    # True if gradients are kept after their use until the norm is known. `used` lists the groups
    # whose gradients were used.
    keeps_gradients: bool = False
    used: list[int] = field(default_factory=list)
    decision: Decision | None = None
    factor: float = 1.0  # the clipping factor for updates that wait for the norm
    meta: dict[str, Any] = field(default_factory=dict)  # the metadata that its commit records

    @property
    def speculates(self) -> bool:
        """True if the updates of the step run in backward without waiting for the norm."""
        return self.placed is not None and self.placed.speculates

    def groups_to_hand_over(self) -> tuple[int, ...] | None:
        """Return the groups whose last use is the site that backward runs now.

        Return None if the backward is not scheduled ahead.
        """
        return None if self.last_uses is None else self.last_uses[len(self.backward) - 1]

    def begin_part(self) -> None:
        """Prepare for the next forward of the step, after a backward that did not end the step."""
        self.state, self.parts = State.PAUSED, self.parts + 1
        self.forward, self.reached, self.backward = [], [], []
        self.complete_groups, self.scheduled_ahead, self.last_uses = set(), False, None


class Steps:
    """The current step, and the steps whose end is queued but has not run."""

    def __init__(self, clock: CommitClock) -> None:
        self.clock = clock
        self.current = Step()
        self.last_order: ExecutionOrder | None = None  # the order of sites in the last step
        self.ending: deque[Step] = deque()  # closed steps whose end is still queued
        self.ended_metas: deque[dict[str, Any]] = deque(maxlen=MAX_PENDING_META)
        # The metadata of the last step that has ended, if it is not committed.
        self.uncommitted: dict[str, Any] | None = None
        self.partly_updated = False  # whether updates of a step that has not ended have run

    def repeats_last_order(self) -> bool:
        """Return whether the current step has called the sites in the order of the last step.

        If backward will also visit every call that it visited in the last step, the last use of a
        group in the known order is its last use in any order with the same beginning.
        """
        return (
            self.last_order is not None
            and self.last_order.forward == tuple(self.current.forward)
            and Counter(self.last_order.backward) == Counter(self.current.reached)
        )

    def next(self, *, commits: bool) -> None:
        """Close the current step, and begin the next one."""
        self.current.state = State.CLOSED
        self.current = Step(commits=commits)

    def run_again(self, first_run: Factor) -> None:
        """Replace the current step by a new one, which runs the same batch again."""
        self.current = Step(commits=self.current.commits, first_run=first_run)

    def ended(self, step: Step) -> None:
        """Record that a closed step has ended, with or without a commit."""
        self.uncommitted = None if step.commits else step.meta
        self.ended_metas.append(step.meta)
        self.partly_updated = False

    def forget(self) -> None:
        """Forget all steps that are not committed, after an error."""
        self.current = Step()
        self.ending.clear()
        self.uncommitted, self.partly_updated = None, False


# -- When a step is committed ----------------------------------------------------------------------


# The first steps of a plan are always committed, because they are the most likely to fail.
SETTLING_STEPS = 2


class CommitClock:
    """The decision, after each step, whether the next one is committed; all ranks decide alike."""

    def __init__(self, plan: Plan, process_group: ProcessGroup) -> None:
        self._plan, self._process_group = plan, process_group
        # steps with this plan, and steps since the last commit
        self._steps = self._steps_since_commit = 0
        self._committed_s = self._ended_s = time.monotonic()

    def after_step(self, *, commits: bool) -> bool:
        """Record the end of a step, and return whether the next step commits."""
        now_s = time.monotonic()
        took_s, self._ended_s = now_s - self._ended_s, now_s
        self._steps, self._steps_since_commit = self._steps + 1, self._steps_since_commit + 1
        if commits:
            self.committed()
        interval = self._plan.commit
        if interval.every_step or self._steps < SETTLING_STEPS:
            return True
        if interval.steps and self._steps_since_commit + 1 >= interval.steps:
            return True
        # True if the interval will be exceeded at the end of the step after the next one.
        late = now_s + 2 * took_s - self._committed_s > interval.seconds
        return bool(interval.seconds) and self._process_group.any_rank(late)

    def committed(self) -> None:
        self._steps_since_commit, self._committed_s = 0, time.monotonic()


# -- Whether updates wait for the norm, and what becomes of a step ---------------------------------
#
# The clipping factor depends on all gradients, so no update can know it during backward. While
# steps stay below the limit, the factor is 1 for all of them. Updates therefore run in backward as
# if there were no limit (speculation), into the generation that is not committed, and the norm is
# computed at the end of backward. If it is below the limit, the step is committed. Otherwise that
# generation is discarded, the cache in host memory is read again from the committed one, and the
# step is
#
# * redone, if the plan keeps the gradients in memory: the updates run again with the clipping
#   factor;
# * rerun, if gradients would be spilled to SSD: the whole step runs again, from the same batch and
#   random state, with the known factor. This requires a caller that checks
#   `Session.must_run_again`, as `lohan train` does, and a model whose buffers do not change in a
#   step.
#
# All of these give the same bits as waiting for the norm.


def clip_factor(norm: float, limit: float) -> float:
    """Return the factor by which clip_grad_norm_ of torch scales gradients; 1 if `limit` is 0."""
    return min(1.0, limit / (norm + 1e-6)) if limit else 1.0


class Clipping:
    """The decision, for each step, whether updates wait for the norm.

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
        # True if all held gradients stay in memory until the norm is known.
        self.all_held_in_memory = not plan.spilled_gradients
        self._clipped: deque[bool] = deque(maxlen=RECENT_STEPS)
        self.norm: float | None = None  # The norm of all gradients of the last step.
        # Metrics of the last step: clipped, speculated and rolled_back.
        self.counts: dict[str, int] = {}

    @property
    def needs_all_gradients(self) -> bool:
        return self._updates.needs_all_gradients

    @property
    def must_rerun(self) -> bool:
        """True if the last backward belonged to a clipped step that must be rerun."""
        return self.steps.current.first_run is not None

    @property
    def known_factor(self) -> float:
        """The factor of updates that do not wait for the norm: 1, unless a step is rerun."""
        first_run = self.steps.current.first_run
        return 1.0 if first_run is None else first_run.clip_factor

    def speculates(self, *, same_order: bool, repeatable: bool) -> bool:
        """Decide whether updates run in this backward without waiting for the norm."""
        return speculates(
            self._plan,
            clipped=self._clipped,
            same_order=same_order,
            repeatable=repeatable,
            factor_is_known=self.steps.current.first_run is not None,
        )

    def resolve_step(self, divisor: float, *, unsummed: Sequence[int]) -> Decision:
        """Compute the norm after backward, and return the decision about the step.

        `divisor` unscales the gradients: it is the loss scale times the number of ranks over which
        gradients are averaged. `unsummed` are the groups whose squares have not been summed.

        Updates that ran early are accepted if the factor is 1. Otherwise they are rolled back and,
        if their gradients were not kept, the step must run again.
        """
        step = self.steps.current
        step.decision = self._decide(step, divisor, unsummed)
        return step.decision

    def _decide(self, step: Step, divisor: float, unsummed: Sequence[int]) -> Decision:
        if not self._updates.needs_all_gradients:
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
