"""What a plan will do on a machine: its schedule, run by the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lohan.model.layout import Blocks
from lohan.model.machine import Profile
from lohan.model.plan import BatchWorkload, Plan
from lohan.model.state import FLOAT
from lohan.planner.activations import HEAD_WORK, site_works
from lohan.planner.cost import Clock, Layout, SiteWork, StepWork, shared_s
from lohan.planner.memory import HostMemoryModel
from lohan.schedule.actions import LANE_OF, Schedule
from lohan.schedule.simulate import Timeline, simulate
from lohan.schedule.steps import ExecutionOrder, later_of, spec_of, steps
from lohan.util.trace import LANES, overlap_shares

PHASES = ("forward", "backward", "after backward")
STEPS = 2  # simulated: the second is the one that counts
AGAIN = 3  # times, where lanes take something from each other
_IDLE = SiteWork(forward_flops=0.0, recompute_flops=0.0, tokens=1.0)


@dataclass(frozen=True)
class Forecast:
    """A steady step of one rank, and of all of them: tokens, and `written_bytes` to SSD."""

    plan: Plan
    timeline: Timeline
    tokens: int
    written_bytes: float
    phases: tuple[Schedule, ...] = field(repr=False)
    work: StepWork = field(repr=False)
    lane_s: dict[str, float]  # of all actions of one step
    shared_s: float  # of lanes that are one thing

    def steady_phases(self) -> dict[str, Schedule]:
        """The schedules of the last step, by name."""
        last = self.phases[-(len(self.phases) // STEPS) :]
        return {name: phase for name, phase in zip(PHASES, last, strict=True) if phase}

    @property
    def step_s(self) -> float:
        """Of a steady step. What one step leaves to the next, writes above all, adds up: in the
        long run no lane can have more to do in a step than the step lasts."""
        return max(self.timeline.step_s, *self.lane_s.values(), self.shared_s)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s

    @property
    def busy_s(self) -> dict[str, float]:
        return self.lane_s

    @property
    def binding(self) -> str:
        busy = self.busy_s
        return max(busy, key=lambda lane: busy[lane])


def forecast(
    profile: Profile, blocks: Blocks, workload: BatchWorkload, plan: Plan, *, write_pinned: bool,
    clipped: bool = False,
) -> Forecast:  # fmt: skip
    """`clipped`: with a norm above the limit in every step; otherwise in none."""
    spec = spec_of(blocks, plan, write_pinned=write_pinned)
    work = step_work(blocks, workload, plan, has_own_memory=profile.has_link)
    order = ExecutionOrder.straight(
        range(len(blocks.sites)), plan.grad_offload, later_of(blocks, plan), overlap=plan.overlap,
        speculates=plan.speculates(durable=write_pinned) and not clipped,
    )  # fmt: skip
    phases = tuple(phase for step in steps(spec, order, STEPS) for phase in step.values())
    timeline, clock = _timed(profile, phases, work)
    last = phases[-(len(phases) // STEPS) :]
    written = sum(work.written(action) for phase in last for action in phase)
    lane_s, world = _lane_s(clock, last), plan.world
    return Forecast(
        plan, timeline, world * workload.tokens, world * written, phases, work, lane_s,
        shared_s(profile, lane_s),
    )  # fmt: skip


def on_machine(made: Forecast, profile: Profile) -> Forecast:
    """The same plan and schedule on another machine."""
    timeline, clock = _timed(profile, made.phases, made.work)
    lane_s = _lane_s(clock, tuple(made.steady_phases().values()))
    return replace(made, timeline=timeline, lane_s=lane_s, shared_s=shared_s(profile, lane_s))


def _lane_s(clock: Clock, phases: Sequence[Schedule]) -> dict[str, float]:
    total = dict.fromkeys(LANES, 0.0)
    seconds = clock.seconds
    for phase in phases:
        for action in phase:
            total[LANE_OF[action.kind]] += seconds(action)
    return total


def _timed(profile: Profile, phases: Sequence[Schedule], work: StepWork) -> tuple[Timeline, Clock]:
    """What cores and drives take from each other depends on what runs at a time, and that
    on what they take: simulated again and again, which soon changes nothing any more."""
    clock, shared = Clock(profile, work), not profile.has_link
    timeline = simulate(phases, clock.seconds, caller_updates=shared)
    for _ in range(AGAIN if shared and (profile.io_share or profile.compute_share) else 0):
        clock = Clock(profile, work, lost=_lost(profile, timeline))
        timeline = simulate(phases, clock.seconds, caller_updates=shared)
    return timeline, clock


def _lost(profile: Profile, timeline: Timeline) -> dict[str, float]:
    """Of its speed, for each action of the last step: compute and updates during I/O, and I/O
    during them. What a step leaves to the next is seen where the one before left it."""
    stop = timeline.step_ends[-1]
    start, cores, drives = stop - timeline.step_s, ("gpu", "cpu"), ("ssd",)
    lost = overlap_shares(timeline.spans, cores, drives, start, stop)
    lost = {name: profile.io_share * share for name, share in lost.items()}
    others = overlap_shares(timeline.spans, drives, cores, start, stop)
    return lost | {name: profile.compute_share * share for name, share in others.items()}


def step_work(
    blocks: Blocks, workload: BatchWorkload, plan: Plan, *, has_own_memory: bool
) -> StepWork:
    memory = HostMemoryModel.of(blocks, plan, workload, has_own_memory=has_own_memory)
    works = site_works(memory, workload, plan)
    mode = memory.mode
    head = [s.name for s in blocks.sites if workload.head_group in s.groups][-1:]
    sites = tuple(
        works.get(HEAD_WORK, _IDLE) if site.name in head
        else works.get(site.name, _IDLE)
        for site in blocks.sites
    )  # fmt: skip
    return StepWork(
        sites=sites, groups=tuple(group.numel for group in blocks.groups),
        chunk_params=plan.chunk_params, slices=memory.slices, world=plan.world,
        layout=Layout(weight=mode.weight_bytes, state=mode.state_bytes,
                      gradient=memory.gradient_width, held=FLOAT, update=mode.update_cost,
                      rounding_s=mode.rounding_s),
    )  # fmt: skip
