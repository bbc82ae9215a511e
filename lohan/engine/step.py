"""The steps in flight: the one that the model runs, and those whose end is still queued.

A step begins with a forward. After its backward, it is closed: its decision is made, and its
remaining updates and its commit are queued. It is then the previous step, and the model may already
run the next one. Executor, scheduler, runner, clipping and collector share one `Steps`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from lohan.engine.buffers import StepScalars
from lohan.schedule.placement import StepPlacement

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
    SKIP = "skip"  # A gradient has overflowed in fp16, so that no weight changes.


@dataclass(frozen=True)
class Factor:
    """The number by which clipping multiplies the gradients of a step, and the norm behind it."""

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
    whole_phase: bool = False  # whether the current phase is scheduled as a whole
    placed: StepPlacement | None = None  # when its updates run; set when backward begins
    scalars: StepScalars | None = None  # of updates in backward
    # The groups whose last use is each site of backward, if backward was scheduled as a whole.
    last_uses: list[tuple[int, ...]] | None = None
    unreached: list[int] = field(default_factory=list)  # groups that backward does not reach
    handed_over: set[int] = field(default_factory=set)  # groups that were finished in backward
    # The tensors that got a gradient, for each group whose gradients were handed over.
    gradients: dict[int, frozenset[int]] = field(default_factory=dict)
    # Whether gradients are kept after their use until the norm is known; `used` lists the used
    # ones.
    keeps_gradients: bool = False
    used: list[int] = field(default_factory=list)
    decision: Decision | None = None
    factor: float = 1.0  # by which clipping multiplies the gradients of updates that have waited
    meta: dict[str, Any] = field(default_factory=dict)  # the metadata that its commit records

    @property
    def speculates(self) -> bool:
        """Whether the updates of the step run in backward without waiting for the norm."""
        return self.placed is not None and self.placed.speculates

    def finished_groups(self) -> tuple[int, ...] | None:
        """Return the groups whose last use is the current backward, if it was scheduled."""
        return None if self.last_uses is None else self.last_uses[len(self.backward) - 1]

    def begin_part(self) -> None:
        """Forget the order of a backward call that has ended without ending the step."""
        self.state, self.parts = State.PAUSED, self.parts + 1
        self.forward, self.reached, self.backward = [], [], []
        self.handed_over, self.whole_phase, self.last_uses = set(), False, None


class Steps:
    """The current step, the previous one, and those whose end is queued."""

    def __init__(self) -> None:
        self.current = Step()
        self.previous: Step | None = None
        self.ending: deque[Step] = deque()  # closed steps whose end is still queued
        self.ended_metas: deque[dict[str, Any]] = deque(maxlen=MAX_PENDING_META)
        # The metadata of the last step that has ended, if it is not committed.
        self.uncommitted: dict[str, Any] | None = None
        self.unfinished = False  # whether updates of a step that has not ended have run

    def next(self, *, commits: bool) -> None:
        """Close the current step, and begin the next one."""
        self.current.state = State.CLOSED
        self.previous, self.current = self.current, Step(commits=commits)

    def run_again(self, first_run: Factor) -> None:
        """Return to the previous step, after which the batch of the current one runs again."""
        self.current = Step(commits=self.current.commits, first_run=first_run)

    def ended(self, step: Step) -> None:
        """Record that a closed step has ended, with or without a commit."""
        self.uncommitted = None if step.commits else step.meta
        self.ended_metas.append(step.meta)
        self.unfinished = False

    def forget(self) -> None:
        """Forget all steps that are not committed, after an error."""
        self.current, self.previous = Step(), None
        self.ending.clear()
        self.uncommitted, self.unfinished = None, False
