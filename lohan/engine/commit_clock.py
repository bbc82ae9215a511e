"""When a step is committed."""

from __future__ import annotations

import time

from lohan.device.ranks import ProcessGroup
from lohan.model.plan import Plan

SETTLING = 2  # steps of a plan that are committed in any case: what is wrong shows in them


class CommitClock:
    """Decides, step by step, whether the next one is committed; of several ranks, all alike."""

    def __init__(self, plan: Plan, process_group: ProcessGroup) -> None:
        self._plan, self._process_group = plan, process_group
        self._steps = self._since = 0  # of the plan, and of them since the last commit
        self._committed_s = self._ended_s = time.monotonic()

    def after_step(self, *, commits: bool) -> bool:
        """Note the end of a step, and return whether the next step commits."""
        now_s = time.monotonic()
        took_s, self._ended_s = now_s - self._ended_s, now_s
        self._steps, self._since = self._steps + 1, self._since + 1
        if commits:
            self.committed()
        interval = self._plan.commit
        if interval.every_step or self._steps < SETTLING:
            return True
        if interval.steps and self._since + 1 >= interval.steps:
            return True
        late = now_s + 2 * took_s - self._committed_s > interval.seconds  # the step after it
        return bool(interval.seconds) and self._process_group.any_rank(late)

    def committed(self) -> None:
        self._since, self._committed_s = 0, time.monotonic()
