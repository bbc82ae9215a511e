"""Forecasts of plans by simulating their schedules, and machine profiles measured by a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from typing import TypeVar

from lohan.model.layout import Blocks
from lohan.model.machine import Drive, Profile
from lohan.model.plan import CACHED_STATE, CACHED_WEIGHTS, Plan
from lohan.model.workload import BatchWorkload
from lohan.planner.activations import HEAD_WORK, site_works
from lohan.planner.memory import MemoryModel
from lohan.schedule.actions import Schedule, ScheduleSpec
from lohan.schedule.ops import Op, Subject, parse_name
from lohan.schedule.simulate import (
    ActionCosts,
    BytesPerParameter,
    SiteWork,
    StepWork,
    Timeline,
    shared_s,
    simulate,
)
from lohan.schedule.steps import ExecutionOrder, Phases, chain_of, planned_order, spec_of
from lohan.util.trace import LANES, Span, busy_s, overlap_shares

BUS = "bus"  # the lane of main memory, which drives, links and updates share
K = TypeVar("K")
V = TypeVar("V")
PHASES = ("forward", "backward", "after backward")
STEPS = 2  # number of simulated steps; the forecast describes the second
# For each simulated step, whether it commits. This is used if not every step of the plan commits.
COMMITTING_STEPS = (False, False, True, False)
FEW_CHUNKS = 256  # number of chunks that remain if a rough forecast joins chunks
ROUGH_FACTOR = 5  # A rough forecast joins chunks if there are more than this many times FEW_CHUNKS.
# The number of chunks that remain if any other forecast joins chunks. Chunks are joined if there
# are more than twice as many.
MANY_CHUNKS = 1024
CACHED_FORECASTS = 8  # number of rough forecasts, and of schedules, that are cached
SLOWDOWN_ROUNDS = 3  # number of repeated simulations if lanes slow each other down
_IDLE = SiteWork(forward_flops=0.0, recompute_flops=0.0, tokens=1.0)


@dataclass(frozen=True)
class Commit:
    """The cost of a commit if not every step commits."""

    steps: float  # number of steps from one commit to the next
    seconds: float  # added by a commit
    written_bytes: float  # added by a commit, over all ranks


@dataclass(frozen=True)
class Forecast:
    """The forecast of a step in the steady state.

    Times are those of one rank; `tokens` and `written_bytes` are totals over all ranks.
    """

    plan: Plan
    timeline: Timeline
    tokens: int
    written_bytes: float  # to SSD, including the step's share of the commits
    phases: tuple[Schedule, ...] = field(repr=False)  # as simulated; chunks may be joined
    work: StepWork = field(repr=False)
    busy_s: dict[str, float]  # seconds of each lane for all actions of one step
    shared_s: float  # total seconds of lanes that share one resource
    bus_s: float = 0.0  # seconds of all transfers through main memory; 0 if its rate is not known
    commit: Commit | None = None  # the cost of a commit, if not every step commits

    def steady_phases(self) -> dict[str, Schedule]:
        """Return the non-empty schedules of the last simulated step by name."""
        last = self.phases[-(len(self.phases) // STEPS) :]
        return {name: phase for name, phase in zip(PHASES, last, strict=True) if phase}

    @property
    def step_s(self) -> float:
        """The seconds of a step in the steady state, including its share of the commits.

        A step is at least as long as the work of its busiest lane. The simulated timeline may be
        shorter, because it leaves work, mostly writes, to the next step.
        """
        commit_s = self.commit.seconds / self.commit.steps if self.commit else 0.0
        # The busy seconds of the drives include the writes of commits.
        return max(
            self.timeline.step_s + commit_s, *self.busy_s.values(), self.shared_s, self.bus_s
        )

    @property
    def lane_bound(self) -> bool:
        """True if the busiest lane is busy during the whole step."""
        return max(self.busy_s.values()) >= self.step_s

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s

    @property
    def binding(self) -> str:
        busy = {**self.busy_s, BUS: self.bus_s}
        return max(busy, key=lambda lane: busy[lane])


class _Chain:
    """The phases of consecutive steps. A step is built when it is first requested."""

    def __init__(self, steps: Iterator[Phases]) -> None:
        self._built, self._others = list[Phases](), steps

    def steps(self, count: int) -> list[Phases]:
        """Return the phases of the first `count` steps."""
        self._built += islice(self._others, max(0, count - len(self._built)))
        return self._built[:count]


@dataclass(frozen=True)
class Simulator:
    """A simulator that forecasts plans for one batch on one machine."""

    profile: Profile
    blocks: Blocks
    workload: BatchWorkload
    # Rough forecasts by (plan, clipped), cached because planning requests them repeatedly.
    _rough: dict[tuple[Plan, bool], Forecast] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    # Cached schedules. Plans that differ only in what compute does share one schedule.
    _schedules: dict[tuple[ScheduleSpec, ExecutionOrder], _Chain] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def forecast(self, plan: Plan, *, clipped: bool = False, rough: bool = False) -> Forecast:
        """Return the forecast of a plan; `clipped` states whether every step is clipped, or none.

        A `rough` forecast, which is used to compare plans, joins chunks if there are many. If there
        are very many, every forecast joins them.
        """
        cached = self._rough.get((plan, clipped)) if rough else None
        if cached is not None:
            return cached
        forecast = self._simulated(plan, clipped=clipped, rough=rough)
        assert forecast is not None
        return forecast

    def faster(self, plan: Plan, than_s: float, *, bound_first: bool = False) -> Forecast | None:
        """Return the rough forecast of a plan if a step takes less than `than_s`, else None.

        Most plans that take longer are recognized before all of their steps are simulated. With
        `bound_first`, the seconds of the busiest lane are computed before anything is simulated.
        This saves time if the busiest lane is expected to take `than_s` or more.
        """
        forecast = self._rough.get((plan, False))
        if forecast is None:
            forecast = self._simulated(
                plan, clipped=False, rough=True, than_s=than_s, bound_first=bound_first
            )
        return forecast if forecast is not None and forecast.step_s < than_s else None

    def _simulated(
        self,
        plan: Plan,
        *,
        clipped: bool,
        rough: bool,
        than_s: float = inf,
        bound_first: bool = False,
    ) -> Forecast | None:
        """Return the forecast of a plan, or None if a lower bound of a step is at least `than_s`.

        The lower bounds are the time of the busiest lane and the time of a step without commits.
        The arguments are those of `forecast` and `faster`.
        """
        profile, blocks, workload = self.profile, self.blocks, self.workload
        work = step_work(blocks, workload, plan, has_own_memory=profile.has_link)
        spec = self.spec(plan)
        chunks = sum(spec.chunks)
        if rough and chunks > ROUGH_FACTOR * FEW_CHUNKS:
            spec, work = _joined(spec, work, FEW_CHUNKS)
        elif chunks > 2 * MANY_CHUNKS:
            spec, work = _joined(spec, work, MANY_CHUNKS)
        order = planned_order(blocks, plan, clipped=clipped)
        every = order.updates.every_step_commits
        durable = every or spec.log
        machine = profile if durable else replace(profile, commit_s=0.0)
        commits = (True,) * STEPS if every else COMMITTING_STEPS
        costs = ActionCosts(machine, work)
        if than_s < inf and bound_first and (spec, order) not in self._schedules:
            # The busy time of a lane does not depend on waits, and deriving them is expensive.
            *_, step = chain_of(spec, order, commits[:STEPS], waits=False)
            if max(_lane_s(costs, tuple(step.values())).values()) >= than_s:
                return None
        chain = _remembered(
            self._schedules, (spec, order), lambda: _Chain(chain_of(spec, order, commits))
        )
        phases = tuple(phase for step in chain.steps(STEPS) for phase in step.values())
        last = phases[-(len(phases) // STEPS) :]
        if than_s < inf and max(_lane_s(costs, last).values()) >= than_s:
            return None
        timeline, costs = _timed(costs, phases)
        written = sum(work.written(a) for phase in last for a in phase if a.kind.writes)
        lane_s, world = _lane_s(costs, last), plan.world
        forecast = Forecast(
            plan,
            timeline,
            world * workload.tokens,
            world * written,
            phases,
            work,
            lane_s,
            shared_s(profile, lane_s),
            _bus_s(profile, work, last),
        )
        if forecast.step_s >= than_s:
            return None
        if not every:
            steps = chain.steps(len(commits))[STEPS:]
            later = tuple(phase for step in steps for phase in step.values())
            forecast = _with_commits(forecast, profile, spec, later)
        if rough:
            _remember(self._rough, (plan, clipped), forecast)
        return forecast

    def spec(self, plan: Plan) -> ScheduleSpec:
        return spec_of(self.blocks, plan)


def _remembered(cache: dict[K, V], key: K, compute: Callable[[], V]) -> V:
    """Return the cached value of a key; if there is none, compute and cache it."""
    if key not in cache:
        _remember(cache, key, compute())
    return cache[key]


def _remember(cache: dict[K, V], key: K, value: V) -> None:
    """Cache the value of a key, and evict the oldest values if the cache is full."""
    while len(cache) >= CACHED_FORECASTS:
        del cache[next(iter(cache))]
    cache[key] = value


def _joined(spec: ScheduleSpec, work: StepWork, limit: int) -> tuple[ScheduleSpec, StepWork]:
    """Return the spec and the work with neighbouring chunks joined to about `limit` chunks.

    Cached chunks are joined separately from the others. A step moves the same bytes, but buffers
    hold more and lanes wait for longer actions, so the step time differs by a few percent.
    """
    count = -(-sum(spec.chunks) // limit)
    cached, kept = set(spec.host_cached_state), list[tuple[int, int]]()
    chunk_sizes: list[tuple[int, ...]] = []
    for group, chunks in enumerate(spec.chunks):
        joined: list[int] = []
        for first in range(0, chunks, count):
            sizes = {True: 0, False: 0}
            for number in range(first, min(first + count, chunks)):
                sizes[(group, number) in cached] += work.chunk(group, number)
            for stays, size in sizes.items():
                if size:
                    kept += [(group, len(joined))] if stays else []
                    joined.append(size)
        chunk_sizes.append(tuple(joined))
    spec = replace(spec, chunks=tuple(map(len, chunk_sizes)), host_cached_state=tuple(kept))
    return spec, replace(work, chunk_sizes=tuple(chunk_sizes), joined=True)


def most_clipped(profile: Profile, accepted: Forecast, waiting: Forecast) -> float:
    """Return the share of clipped steps up to which speculative updates are faster on average.

    `accepted` is the forecast of speculative steps that are not clipped, `waiting` that of steps
    that wait for the norm. If the plan spills gradients, a speculative step that turns out to be
    clipped is run again. Otherwise cached weights and state are read back from SSD, and the updates
    are repeated in the next forward.
    """
    gain_s, loss_s = waiting.step_s - accepted.step_s, accepted.step_s
    if not accepted.plan.spilled_gradients:
        cached = accepted.plan.owner_bytes(CACHED_WEIGHTS, CACHED_STATE)
        back_s = cached / profile.ssd_read if profile.ssd_read else 0.0
        loss_s = back_s + waiting.timeline.forward_s - accepted.timeline.forward_s
    return min(1.0, gain_s / loss_s) if loss_s > 0 else 1.0


def _with_commits(
    forecast: Forecast, profile: Profile, spec: ScheduleSpec, later: tuple[Schedule, ...]
) -> Forecast:
    """Return the forecast with the cost of commits added.

    `later` are the phases of a step that commits and of the step after it, which together write
    what the commit adds.
    """
    machine = replace(profile, commit_s=0.0)
    timeline, _ = _timed(ActionCosts(machine, forecast.work), forecast.phases + later)
    step_s, world, interval = forecast.step_s, forecast.plan.world, forecast.plan.commit
    longer_s = timeline.step_ends[-1] - timeline.step_ends[1] - 2 * step_s
    added = Commit(
        steps=max(1.0, min(interval.steps or inf, (interval.seconds or inf) / step_s)),
        seconds=max(0.0, round(longer_s, 6)) + profile.commit_s,
        written_bytes=world * commit_bytes(forecast.work, spec),
    )
    per_step = added.written_bytes / added.steps
    ssd_s = per_step / world / (profile.ssd_mixed or profile.ssd_write)
    lane_s = {**forecast.busy_s, "ssd": forecast.busy_s["ssd"] + ssd_s}
    return replace(
        forecast,
        written_bytes=forecast.written_bytes + per_step,
        busy_s=lane_s,
        shared_s=shared_s(profile, lane_s),
        commit=added,
    )


def commit_bytes(work: StepWork, spec: ScheduleSpec) -> float:
    """Return the bytes that a step with a commit writes in addition to those of other steps."""
    if spec.log:
        params = sum(count for group, count in enumerate(work.groups) if spec.chunks[group])
        return params * (work.per_parameter.state + work.per_parameter.weight)
    cached = set(spec.host_cached_weights)
    params = sum(work.chunk(*key) for key in spec.host_cached_state if key[0] in cached)
    return params * (work.per_parameter.state + work.per_parameter.weight)


def on_machine(forecast: Forecast, profile: Profile) -> Forecast:
    """Return the forecast of the same plan and schedule on another machine."""
    timeline, costs = _timed(ActionCosts(profile, forecast.work), forecast.phases)
    lane_s = _lane_s(costs, tuple(forecast.steady_phases().values()))
    bus_s = _bus_s(profile, forecast.work, tuple(forecast.steady_phases().values()))
    shared = shared_s(profile, lane_s)
    return replace(forecast, timeline=timeline, busy_s=lane_s, shared_s=shared, bus_s=bus_s)


def _bus_s(profile: Profile, work: StepWork, phases: Sequence[Schedule]) -> float:
    if not profile.has_link or not profile.host_rate:
        return 0.0
    return work.bus_bytes(phases) / profile.host_rate


def _lane_s(costs: ActionCosts, phases: Sequence[Schedule]) -> dict[str, float]:
    total = dict.fromkeys(LANES, 0.0)
    seconds_of = costs.cached_s.get  # Looked up once, because the loop runs once per action.
    for phase in phases:
        for action in phase:
            kind, _, _, _, _, name = action
            took_s = seconds_of(name)
            total[kind.lane] += costs.seconds(action) if took_s is None else took_s
    return total


def _timed(costs: ActionCosts, phases: Sequence[Schedule]) -> tuple[Timeline, ActionCosts]:
    """Simulate the phases and return the timeline and the costs of the actions.

    If cores and drives slow each other down, the slowdown depends on which actions overlap, and the
    overlap depends on the slowdown. The simulation is repeated a few times and converges quickly.
    `costs` are those without a slowdown.
    """
    profile, work = costs.profile, costs.work
    shared = not profile.has_gpu
    timeline = simulate(phases, costs.seconds, caller_updates=shared)
    for _ in range(
        SLOWDOWN_ROUNDS if shared and (profile.io_share or profile.compute_share) else 0
    ):
        costs = ActionCosts(profile, work, lost=_lost(profile, timeline))
        timeline = simulate(phases, costs.seconds, caller_updates=shared)
    return timeline, costs


def _lost(profile: Profile, timeline: Timeline) -> dict[str, float]:
    """Return, for each action of the last step, the share of speed lost to concurrent actions.

    I/O slows down compute and updates, and compute and updates slow down I/O. Actions that run
    beyond the end of the last step are represented by the corresponding actions of the step before
    it.
    """
    stop = timeline.step_ends[-1]
    start, cores, drives = stop - timeline.step_s, ("compute", "optimizer"), ("ssd",)
    lost = overlap_shares(timeline.spans, cores, drives, start, stop)
    lost = {name: profile.io_share * share for name, share in lost.items()}
    others = overlap_shares(timeline.spans, drives, cores, start, stop)
    return lost | {name: profile.compute_share * share for name, share in others.items()}


def step_work(
    blocks: Blocks, workload: BatchWorkload, plan: Plan, *, has_own_memory: bool
) -> StepWork:
    workload = workload.in_tiles(plan.tiles)
    memory = MemoryModel.of(blocks, plan, workload, has_own_memory=has_own_memory)
    works = site_works(memory, workload, plan)
    fmt = memory.state_format
    head = [s.name for s in blocks.sites if workload.head_group in s.groups][-1:]
    sites = tuple(
        works.get(HEAD_WORK, _IDLE) if site.name in head else works.get(site.name, _IDLE)
        for site in blocks.sites
    )
    return StepWork(
        sites=sites,
        groups=tuple(group.numel for group in blocks.groups),
        chunk_params=plan.chunk_params,
        slices=memory.slices,
        world=plan.world,
        logged=(plan.log_gradients + 1) / 2 if plan.log_gradients else 0.0,
        per_parameter=BytesPerParameter(
            weight=fmt.weight_bytes,
            state=fmt.state_bytes,
            gradient=memory.gradient_width,
            update=fmt.update_cost,
            rounding_s=fmt.rounding_s,
        ),
    )


# -- A machine profile measured by a run: rates of its lanes from the spans of one step ------------


LEAST_BACKWARD = 0.2  # smallest share of backward that is attributed to gradients
HEAD = "head"  # key under which the seconds of the head are summed, beside those of operations
UNKNOWN_DRIVE = 1e9  # bytes/s; a conservative guess if the step used no drive


def profile_of_step(
    spans: Sequence[Span],
    work: StepWork,
    *,
    host_bytes: int,
    device: str = "cpu",
    device_bytes: int = 0,
    unified: bool = False,
) -> Profile | None:
    """Return the machine profile measured by one step of a run, or None if it is incomplete.

    The profile is incomplete if the step had no forward, backward or update, or if it moved nothing
    over the link of a device. The rates of compute include the slowdown by concurrent I/O.
    `device_bytes` is the memory of a device that has its own, or 0. `unified` is as in Profile.
    """
    seconds: dict[str, float] = defaultdict(float)  # by operation; the head has its own key
    # Bytes by lane. On links and between ranks, only weights and gradients are counted.
    moved: dict[str, float] = defaultdict(float)
    updated = 0.0  # parameters, multiplied by the cost of an update relative to AdamW
    for span in spans:
        named = parse_name(span.name)
        if named is None:
            continue
        kind, index, chunk = named
        site = kind.subject is Subject.SITE
        head = site and span.lane == "compute" and work.sites[index].head
        seconds[HEAD if head else kind] += span.stop_s - span.start_s
        if kind == Op.UPDATE:
            updated += work.parameters(index, chunk) * work.per_parameter.update
        elif kind.moves is not None and (not site or span.lane == "ssd"):
            moved[span.lane] += kind.moves(work, index, chunk)
    blocks = [site for site in work.sites if not site.head]
    forward = sum(site.forward_flops for site in blocks)
    trained = [site for site in blocks if not site.no_backward]
    repeated_flops = sum(site.recompute_flops for site in trained)
    gradients = sum(site.gradient_flops for site in trained)
    needed = [Op.FORWARD, Op.BACKWARD, Op.UPDATE]
    needed += [Op.LOAD_WEIGHTS, Op.OFFLOAD_GRADIENTS] if device_bytes else []
    if not all(seconds[kind] for kind in needed) or not forward:
        return None
    rate = forward / seconds[Op.FORWARD]
    computed_s = seconds[Op.BACKWARD]
    back_s = max(computed_s - repeated_flops / rate, LEAST_BACKWARD * computed_s)
    heads = [site for site in work.sites if site.head]
    head_flops = sum(site.forward_flops + site.gradient_flops for site in heads)
    ssd_s = busy_s(spans, float("-inf"), float("inf"))["ssd"]
    ssd = moved["ssd"] / ssd_s if ssd_s and moved["ssd"] else UNKNOWN_DRIVE
    h2d = moved["h2d"] / seconds[Op.LOAD_WEIGHTS] if device_bytes else 0.0
    d2h = moved["d2h"] / seconds[Op.OFFLOAD_GRADIENTS] if device_bytes else 0.0
    net_s = seconds[Op.ALL_GATHER] + seconds[Op.REDUCE_SCATTER]
    net = moved["net"] / net_s if net_s else 0.0
    return Profile(
        name="this run",
        device=device,
        device_bytes=device_bytes,
        unified=unified,
        compute=((1.0, rate),),
        # A run that trains only the head measures no backward of a block.
        backward=((1.0, gradients / back_s),) if gradients else (),
        head_flops=head_flops / seconds[HEAD] if seconds[HEAD] else 0.0,
        h2d=h2d,
        d2h=d2h,
        # 0 means that ranks communicate over the links, which is assumed unless the network is
        # slower.
        net=net if net < min(h2d, d2h) else 0.0,
        host_bytes=host_bytes,
        adam=updated / seconds[Op.UPDATE],
        drives=(Drive(name="measured", read=ssd, write=ssd, mixed=ssd),),
    )
