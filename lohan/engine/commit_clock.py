"""The decision which steps are committed."""

from __future__ import annotations

import time

from lohan.device.ranks import ProcessGroup
from lohan.model.plan import Plan

# The first steps of a plan are always committed, because they are the most likely to fail.
SETTLING_STEPS = 2


class CommitClock:
    """Decides after each step whether the next one is committed; all ranks decide alike."""

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
        # Whether the interval will be exceeded at the end of the step after the next one.
        late = now_s + 2 * took_s - self._committed_s > interval.seconds
        return bool(interval.seconds) and self._process_group.any_rank(late)

    def committed(self) -> None:
        self._steps_since_commit, self._committed_s = 0, time.monotonic()
