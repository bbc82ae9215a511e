"""Runs a schedule lane by lane against the clock of a machine that need not be here.

The rules are those of engine/lanes.py: every lane keeps its order; an action starts when what it
waits for has finished; ssd actions are submitted as soon as they may start and served one after the
other. Where compute and updates share the cores (`caller_updates`), an update runs between two
compute actions as soon as it is ready, as the executor's own thread does it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from lohan.errors import LohanError
from lohan.schedule.actions import LANE_OF, Action, Op, Schedule
from lohan.util.trace import LANES, Span, busy_s, chrome_trace


@dataclass(frozen=True)
class Timeline:
    """What every lane did when, and when each step's backward ended."""

    spans: tuple[Span, ...]
    step_ends: tuple[float, ...]

    @property
    def step_s(self) -> float:
        """Length of the last step, from the end of one backward to the end of the next."""
        before = self.step_ends[-2] if len(self.step_ends) > 1 else 0.0
        return self.step_ends[-1] - before

    @property
    def forward_s(self) -> float:
        """Of the last step, until its backward begins."""
        start = self.step_ends[-1] - self.step_s
        begins = (span.start_s for span in self.spans if span.name[0] == Op.BACKWARD)
        return min((at for at in begins if at >= start), default=start) - start

    def busy_s(self) -> dict[str, float]:
        """Busy seconds of each lane in the last step."""
        stop = self.step_ends[-1]
        return busy_s(self.spans, stop - self.step_s, stop)

    def trace(self) -> dict[str, Any]:
        """As Chrome and Perfetto show it."""
        return chrome_trace(list(self.spans))


@dataclass(slots=True)
class _Task:
    action: Action
    missing: int = 0  # of what it waits for
    ready_s: float = 0.0
    waiting: list[_Task] = field(default_factory=list)
    finish_s: float = 0.0


def simulate(
    phases: Iterable[Schedule], seconds: Callable[[Action], float], *, caller_updates: bool = False
) -> Timeline:
    """The timeline of phases in a row, as the executor queues them: each when the compute of the
    one before has ended or, where it has none, all of it."""
    if caller_updates:
        return _Shared(seconds).run(phases)
    return _in_order(phases, seconds)


def _in_order(phases: Iterable[Schedule], seconds: Callable[[Action], float]) -> Timeline:
    """Every lane on its own: nothing waits for something later, so one pass in the schedule's
    order is enough."""
    free = dict.fromkeys(LANES, 0.0)  # when each lane can start its next action
    finished: dict[str, float] = {}
    known: dict[str, float] = {}  # a name takes as long in every step
    lane_of, spans, end = LANE_OF, list[Span](), Op.END_BACKWARD
    ends: list[float] = []
    when, took, span_of = finished.get, known.get, tuple.__new__  # as many calls as actions
    served_s = floor_s = 0.0
    for phase in phases:
        compute_s = last_s = floor_s
        computes = False
        for action in phase:
            kind, _, _, _, waits, name = action
            lane = lane_of[kind]
            start_s = free[lane]
            if floor_s > start_s:
                start_s = floor_s
            for other in waits:
                if when(other, 0.0) > start_s:
                    start_s = finished[other]
            took_s = took(name)
            if took_s is None:
                took_s = known[name] = seconds(action)
            if lane == "ssd":  # submitted in order, served one after the other
                free[lane] = start_s
                if served_s > start_s:
                    start_s = served_s
                stop_s = served_s = start_s + took_s
            else:
                stop_s = free[lane] = start_s + took_s
                if lane == "gpu":
                    compute_s, computes = stop_s, True
            finished[name] = stop_s
            if stop_s > last_s:
                last_s = stop_s
            if took_s:
                spans.append(span_of(Span, (lane, name, start_s, stop_s)))
            if kind is end:
                ends.append(stop_s)
        floor_s = compute_s if computes else last_s
    return Timeline(tuple(spans), tuple(ends))


class _Shared:
    """Compute and updates take turns on one thread: which goes first is known only on the way."""

    def __init__(self, seconds: Callable[[Action], float]) -> None:
        self._seconds = seconds
        self._queues: dict[str, deque[_Task]] = {lane: deque() for lane in LANES}
        self._free = dict.fromkeys(LANES, 0.0)  # when each lane can start its next action
        self._served_s = 0.0  # when the drives have served what was submitted
        self._latest: dict[str, _Task] = {}
        self._spans: list[Span] = []
        self._ends: list[float] = []

    def run(self, phases: Iterable[Schedule]) -> Timeline:
        left, before = 0, list[_Task]()
        for phase in phases:
            tasks = [self._add(action) for action in phase]
            first = {task.action.lane: task for task in reversed(tasks)}
            for task, other in product(first.values(), before):
                task.missing += 1
                other.waiting.append(task)
            compute = [task for task in tasks if task.action.lane == "gpu"]
            before = compute[-1:] or tasks or before
            left += len(tasks)
        for _ in range(left):
            self._step()
        return Timeline(tuple(self._spans), tuple(self._ends))

    def _add(self, action: Action) -> _Task:
        task = _Task(action)
        for name in action.waits:
            other = self._latest.get(name)
            if other is not None:
                task.missing += 1
                other.waiting.append(task)
        self._latest[action.name] = task
        self._queues[action.lane].append(task)
        return task

    def _step(self) -> None:
        """Starts the action that can start first. Whatever is unknown yet comes later."""
        best: tuple[float, int, str] | None = None
        for rank, lane in enumerate(_PRIORITY):
            queue = self._queues[lane]
            if queue and not queue[0].missing:
                start = max(self._free[lane], queue[0].ready_s)
                if best is None or (start, rank) < best[:2]:
                    best = (start, rank, lane)
        if best is None:
            stuck = [queue[0].action.token() for queue in self._queues.values() if queue]
            raise LohanError(f"the schedule locks up at {' '.join(stuck)}")
        self._start(best[2], best[0])

    def _start(self, lane: str, start_s: float) -> None:
        task = self._queues[lane].popleft()
        took_s = self._seconds(task.action)
        if lane == "ssd":
            begun_s = max(start_s, self._served_s)
            task.finish_s = self._served_s = begun_s + took_s
            self._free[lane] = start_s
        else:
            begun_s = start_s
            task.finish_s = self._free[lane] = start_s + took_s
            if lane in ("gpu", "cpu"):
                self._free["gpu"] = self._free["cpu"] = task.finish_s
        if took_s:
            self._spans.append(Span(lane, task.action.name, begun_s, task.finish_s))
        if task.action.kind == Op.END_BACKWARD:
            self._ends.append(task.finish_s)
        for other in task.waiting:
            other.missing -= 1
            other.ready_s = max(other.ready_s, task.finish_s)


_PRIORITY = ("cpu", "gpu", "ssd", "h2d", "d2h", "net")  # a ready update goes before compute
