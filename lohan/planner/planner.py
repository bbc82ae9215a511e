"""The search for the best plan of a run within its memory budgets."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property, partial

from lohan.errors import BudgetError
from lohan.model.layout import Blocks
from lohan.model.machine import Profile
from lohan.model.options import PlanOptions
from lohan.model.plan import CACHED_WEIGHTS, Kept, LedgerEntry, Plan
from lohan.model.state import STATE_FORMATS
from lohan.model.workload import BatchWorkload
from lohan.planner.activations import Choice, levels
from lohan.planner.forecast import Forecast, Simulator, most_clipped
from lohan.planner.host_memory import FillOrder
from lohan.planner.memory import (
    CARD_OWNERS,
    INPUTS,
    SHARED,
    WORK,
    MemoryModel,
    dequantised_ledger,
)
from lohan.planner.sizer import DEVICE_SLOTS, Sizer
from lohan.planner.wear import LONGEST_S, choose_commit_interval, weights_too
from lohan.schedule.placement import Phase, UpdateOptions, rule_of
from lohan.util.units import EVERY_STEP, Interval, counted, format_bytes, format_bytes_up

# -- The closed-form plan, or an error that names budgets that suffice -----------------------------
#
# Host memory is assigned in this order: the buffers that a step needs, at their smallest sizes;
# overlap (prefetch, waiting gradients, state buffers); activations and the gradients of deferred
# updates, as far as they make steps faster on the machine; cached weights; cached optimizer state.
# Weights precede state, because every cached byte of weights saves two reads per step. The state is
# used in a fixed cyclic order, so a fixed part of it is cached: with LRU eviction, the evicted
# chunk would always be the one needed next.


TILES = (8192, 2048, 512, 128)  # tile sizes in tokens that the planner may choose
SPARE_SHARE = 0.03  # share of the budget that is reserved for rounding by the allocator


@dataclass(frozen=True)
class PlanProblem:
    """The input of the planner: what one rank computes, and the memory that it may use.

    With several ranks, blocks and workload are those of one rank.
    """

    blocks: Blocks
    options: PlanOptions
    _: KW_ONLY
    host_bytes: int
    workload: BatchWorkload | None = None  # None if the batch is not known
    profile: Profile | None = None  # None if the machine was not measured
    # The bytes of device memory. If None, the profile's size is used, if it has one.
    device_bytes: int | None = None
    # True if the device has no memory of its own and uses a share of `host_bytes`, as it does for
    # several ranks that compute on the CPU.
    in_one_memory: bool = False
    drive_bytes: int = 0  # bytes available on the drives for all ranks; 0 if not known
    drives: int = 0
    # The bytes available for the run's store where they limit only the choice of a log, unlike
    # `drive_bytes`, which limits every plan. None if not known.
    log_room: int | None = None

    @cached_property
    def simulator(self) -> Simulator | None:
        """The simulator of this problem, or None if the batch or the machine is not known."""
        if self.workload is None or self.profile is None:
            return None
        return Simulator(self.profile, self.blocks, self.workload)

    def check_drives(self, plan: Plan) -> None:
        """Raise a SpaceError if the drives have no room for the files of a plan."""
        needed = plan.world * plan.tier_bytes("ssd")
        if self.drive_bytes and needed > self.drive_bytes:
            raise SpaceError(
                f"SSD space too small: the run needs {format_bytes(needed)}, and "
                f"{counted(self.drives, 'drive')} can hold {format_bytes(self.drive_bytes)}"
            )


@dataclass(frozen=True)
class Planned:
    """The solution of a problem: the plan that a run follows, and its forecasts."""

    plan: Plan
    # The forecast of a step that is not clipped; None if the batch or the machine is not known.
    forecast: Forecast | None
    # The forecast of clipped steps, if it differs because updates may be speculative.
    clipped: Forecast | None = None
    scarce: bool = False  # whether the drives have no room for the activations of the best plan
    # The forecast of the best plan without a log, if the planner chose one.
    unlogged: Forecast | None = None
    # The bytes of device memory; if host and device share one memory, the part for compute.
    device_bytes: int | None = None


class SpaceError(BudgetError):
    """Raised when the drives are too small for a plan."""


def closed_form_plan(problem: PlanProblem, order: FillOrder = FillOrder()) -> Plan:  # noqa: B008
    """Return the best plan according to the closed form, or raise a BudgetError.

    Several micro-batch sizes are tried, because a smaller one leaves the device more room for
    activations in flight.
    """
    workload, host_bytes = problem.workload, problem.host_bytes
    cache = {} if workload is None else workload.plan_cache
    key = (
        "plan",
        id(problem.blocks),
        problem.options,
        host_bytes,
        problem.profile,
        problem.device_bytes,
        order,
    )
    if key in cache:
        return cache[key][1]  # type: ignore[no-any-return]
    limit = int(host_bytes * (1 - SPARE_SHARE))
    candidates: list[tuple[Sizer, Plan, Choice | None]] = []
    for sizer, plan in _fitting(problem, order):
        candidates.append((sizer, *sizer.chosen(plan, limit)))
        if not sizer.device:
            break
    sizer, plan, choice = min(candidates, key=lambda m: m[2].step_s if m[2] is not None else 0.0)
    plan = sizer.grown(plan, choice, limit)
    cache[key] = problem.blocks, plan  # Keep `blocks` alive so that its id() is not reused.
    return plan


def check_fits(problem: PlanProblem) -> Plan:
    """Return a plan that fits, not necessarily the best, or raise a BudgetError if none does.

    Only the largest and the smallest micro-batch are tried. Usually, a smaller micro-batch needs
    less memory. The exception is the whole batch in one slice, because its gradients need not be
    summed in fp32.
    """
    return next(_fitting(problem, FillOrder(), ends=True))[1]


def _fitting(
    problem: PlanProblem, order: FillOrder, *, ends: bool = False
) -> Iterator[tuple[Sizer, Plan]]:
    """Yield the smallest plan for every micro-batch size that fits, largest micro-batch first.

    With `ends`, only the largest and the smallest micro-batch are tried. If nothing fits, a
    BudgetError is raised.
    """
    options, workload, profile = problem.options, problem.workload, problem.profile
    host_bytes, device = problem.host_bytes, problem.device_bytes
    if device is None:
        device = profile.device_bytes if profile is not None else 0
    candidates: Sequence[int | None] = [options.micro_batch]
    if workload is not None and options.micro_batch is None:
        candidates = _micro_batches(workload, profile if device else None)
        candidates = sorted({candidates[0], candidates[-1]}, reverse=True) if ends else candidates
    refused: Plan | None = None
    fitting = 0

    def over(plan: Plan) -> int:
        return max(device, plan.tier_bytes("device"))

    for tokens in _tile_sizes(workload, options):
        if fitting or (refused is not None and not _tiles_help(refused, device, host_bytes)):
            break
        tiled = None if workload is None else workload.in_tiles(tokens)
        for micro_batch in candidates:
            if fitting > 1 and not _fast(micro_batch, workload, profile):
                continue
            sizer = Sizer(problem.blocks, options, tiled, micro_batch, profile, device, order)
            plan = sizer.smallest(host_bytes)
            if plan.tier_bytes("device") <= device and plan.tier_bytes("host") <= host_bytes:
                fitting += 1
                yield sizer, plan
            refused = min(refused or plan, plan, key=lambda p: (over(p), p.tier_bytes("host")))
    if not fitting:
        assert refused is not None
        tier = "device" if refused.tier_bytes("device") > device else "host"
        limit, hint = {"device": device, "host": host_bytes}[tier], lower_hint(workload, options)
        raise over_budget(refused, tier, limit, what="the run", hint=hint)


def _tile_sizes(workload: BatchWorkload | None, options: PlanOptions) -> list[int]:
    """Return the tile sizes to try: the user's choice, or no tiles and then decreasing sizes."""
    if isinstance(options.tiles, int):
        return [options.tiles]
    if workload is None or workload.tiled is None or options.tiles != "auto":
        return [0]
    tokens = (options.micro_batch or 1) * workload.seq
    return [0, *(size for size in TILES if size < tokens)]


def _tiles_help(plan: Plan, device: int, host_bytes: int) -> bool:
    """Return whether a plan would fit if blocks needed almost no memory for their computation.

    Masks are ignored too, because plans count them unless it is known that there are none.
    """
    work: Counter[str] = Counter()
    for entry in plan.ledger:
        if entry.owner in (WORK, INPUTS, SHARED):
            work[entry.tier] += entry.bytes
    limits = {"device": device, "host": host_bytes}
    return all(plan.tier_bytes(tier) - work[tier] <= limit for tier, limit in limits.items())


def _micro_batches(workload: BatchWorkload, profile: Profile | None) -> list[int]:
    """Return the micro-batch sizes to try, largest first.

    These are the batch halved repeatedly and, with a profile, the smallest size at which the device
    reaches its highest speed.
    """
    sizes = {1, *(-(-workload.batch // 2**i) for i in range(12))}
    if profile is not None:
        sizes.add(min(workload.batch, math.ceil(profile.compute[-1][0] / workload.seq)))
    return sorted(sizes, reverse=True)


def _fast(micro_batch: int | None, workload: BatchWorkload | None, profile: Profile | None) -> bool:
    """Return whether a micro-batch is close to the size at which the device is fastest.

    Sizes from one half to four times that size count as close: half of it has fewer bytes in
    flight, and two to four times that size sums gradients less often.
    """
    if workload is None or profile is None or micro_batch is None:
        return False
    return 0.5 <= micro_batch * workload.seq / profile.compute[-1][0] < 4


def over_budget(plan: Plan, tier: str, limit: int, *, what: str, hint: str) -> BudgetError:
    """Return the error for a tier that is too small, which names the largest owners and a remedy.

    `limit` is the budget of the tier in bytes, `what` the subject of the message, such as "the
    run", and `hint` its end.
    """
    needed, option = plan.tier_bytes(tier), {"device": "--device-memory", "host": "--host"}[tier]
    rows = sorted((e for e in plan.ledger if e.tier == tier), key=lambda e: -e.bytes)
    largest = ", ".join(f"{e.owner} {format_bytes(e.bytes)}" for e in rows[:3])
    # The overhead of a card grows with its memory, at most in proportion.
    overhead = sum(e.bytes for e in rows if e.owner in CARD_OWNERS)
    enough = needed if not overhead else math.ceil((needed - overhead) / (1 - overhead / limit))
    allowed, ranks = f"{option} allows", ""
    if tier == "host" and plan.world > 1:  # the ranks of a machine share its memory
        what, allowed = f"{what} of each rank", "its share of --host is"
        enough, ranks = plan.world * enough, f" for {plan.world} ranks on a machine"
    return BudgetError(
        f"{tier} budget too small: {what} needs {format_bytes_up(needed)}, {allowed} "
        f"{format_bytes(limit)} (largest: {largest}); raise {option} to {format_bytes_up(enough)}"
        f"{ranks}{hint}"
    )


def lower_hint(workload: BatchWorkload | None, options: PlanOptions) -> str:
    """Return the end of an error message: the options that can be lowered to save memory."""
    if workload is None:
        return ""
    each, micro = " for each rank" if options.world > 1 else "", options.micro_batch or 1
    samples = workload.samples or workload.batch
    lower = [f"--batch (now {samples}{each})"] if samples > 1 else []
    lower += [f"--micro-batch (now {micro})"] if micro > 1 else []
    lower += [f"--seq (now {workload.seq})"] if workload.text else []
    words = f", or lower {' or '.join(lower)}" if lower else ""
    return words if workload.text else f"{words}, or train on smaller images or latents"


# -- The plan that a run follows -------------------------------------------------------------------
#
# The closed form ignores waits, so its plan is refined by simulation. If a simulation is quick,
# other levels of activations are simulated too, first far apart and then near the best. For every
# model, the plan that defers no update to the next forward is simulated as well.


QUICK = 500  # largest number of chunks and sites of a model that is simulated several times
FAR, NEAR = 8, 2  # distances between simulated levels of activations
BETTER_SHARE = 0.999  # another plan is preferred if its step takes less than this share of the time
# If more than this share of the groups spills its gradients, spilling all of them saves little.
FEW_HELD = 0.9
REPLAN_SPEEDUP = 1.05  # speedup from which a running run changes its plan
LOG_SPEEDUP = 1.05  # speedup from which a log of gradients is used
# No other number of logged steps is tried after one whose steps take this many times the best time.
LOG_HOPELESS = 1.1
ASSUMED_CLIPPED_SHARE = 0.1  # assumed share of clipped steps if it is not known
# The whole batch in tiles is preferred to slices only below this share of their cost, because tiles
# have costs that are not modelled.
WHOLE = 0.99


def make_plan(problem: PlanProblem) -> Planned:
    """Return the plan that a run follows, with its forecasts, or raise a BudgetError.

    This is the one way to plan a training run. The closed form chooses activations and buffers,
    simulation refines the choice, and the plan gets its commit interval and the share of clipped
    steps up to which updates are speculative.
    """
    if problem.in_one_memory:
        return _in_one_memory(problem)
    plan, forecast, scarce = best_plan(problem)
    simulator = problem.simulator
    if simulator is None:
        return Planned(plan, None, scarce=scarce, device_bytes=problem.device_bytes)
    unlogged, logged = None, _logged_plan(problem, simulator, plan, forecast)
    if logged is not None:
        unlogged = forecast or simulator.forecast(plan, rough=True)
        plan, forecast = logged
    if forecast is None or forecast.work.joined:
        forecast = simulator.forecast(plan)
    speculates = UpdateOptions.of(plan).can_speculate
    clipped = simulator.forecast(plan, clipped=True) if speculates else None
    if clipped is not None:
        plan = replace(plan, most_clipped=most_clipped(simulator.profile, forecast, clipped))
    return Planned(plan, forecast, clipped, scarce, unlogged, problem.device_bytes)


def _logged_plan(
    problem: PlanProblem, simulator: Simulator, plan: Plan, forecast: Forecast | None
) -> tuple[Plan, Forecast] | None:
    """Return a plan with a log of gradients if it is clearly faster than `plan`, or None.

    Only steps that wait for the drives become faster, so nothing is tried if another lane binds.
    The candidates keep micro-batch, tiles and activations of `plan`.
    """
    if not problem.options.log_choices:
        return None
    forecast = forecast or simulator.forecast(plan, rough=True)
    least_s = forecast.step_s / LOG_SPEEDUP
    others = (seconds for lane, seconds in forecast.busy_s.items() if lane != "ssd")
    if max(*others, forecast.shared_s, forecast.bus_s) > least_s:
        return None
    options = replace(
        _keeping(problem.options, plan.kept),
        micro_batch=plan.micro_batch,
        tiles=plan.tiles or "off",
    )
    # The log leaves room for two exported models.
    exported = sum(group.numel for group in problem.blocks.trained)
    spare = 2 * STATE_FORMATS[plan.dtype].weight_bytes * exported
    rooms = [problem.drive_bytes or math.inf]
    rooms += [] if problem.log_room is None else [problem.log_room]
    best: tuple[Plan, Forecast] | None = None
    for steps in problem.options.log_choices:
        with suppress(BudgetError):
            candidate = closed_form_plan(replace(problem, options=options.logging(steps)))
            if candidate.world * (candidate.tier_bytes("ssd") + spare) > min(rooms):
                continue
            # Longer steps than these end the search.
            hopeless_s = math.nextafter(LOG_HOPELESS * least_s, math.inf)
            logged = simulator.faster(candidate, hopeless_s)
            if logged is None:
                break
            if logged.step_s <= least_s:
                best, least_s = (candidate, logged), BETTER_SHARE * logged.step_s
            elif best is not None:
                break
    return best


def best_plan(problem: PlanProblem) -> tuple[Plan, Forecast | None, bool]:
    """Return the best plan, its forecast if it was simulated, and whether the drives are too small.

    The drives are too small if they have no room for the activations of the best plan. In that
    case, the best plan that recomputes activations is returned. The share of clipped steps is not
    set, and the forecast may be a rough one.
    """
    plan, forecast = _best_plan(problem)
    try:
        problem.check_drives(plan)
        return plan, forecast, False
    except SpaceError:
        if problem.options.activations != "holistic" or not plan.spilled_sites:
            raise
    least = replace(problem.options, activations="recompute")
    plan, forecast = _best_plan(replace(problem, options=least))
    problem.check_drives(plan)
    return plan, forecast, True


def _best_plan(problem: PlanProblem) -> tuple[Plan, Forecast | None]:
    search, options, simulator = _PlanSearch(problem), problem.options, problem.simulator
    planned = search.best(options)
    if options.minimise != "writes" or simulator is None:
        return planned

    def written_bytes(planned: tuple[Plan, Forecast | None]) -> float:
        plan, forecast = planned
        return (forecast or simulator.forecast(plan)).written_bytes

    # The fastest plan is chosen by simulation and may cache more, so it may write less.
    return min(planned, search.best(replace(options, minimise="time")), key=written_bytes)


class _PlanSearch:
    """The search for the best plan of one run over options that the user leaves open.

    Candidates are plans of the closed form. If the batch and the machine are known, they are
    compared by simulation.
    """

    def __init__(self, problem: PlanProblem) -> None:
        self._problem, self._simulator = problem, problem.simulator

    def _closed_form(self, options: PlanOptions, order: FillOrder) -> Plan:
        return closed_form_plan(replace(self._problem, options=options), order)

    def best(self, options: PlanOptions) -> tuple[Plan, Forecast | None]:
        options, simulator = self._with_micro_batch(options), self._simulator
        if options.commit is not None:
            return self._with_interval(options)
        if simulator is None:
            return self._with_interval(replace(options, commit=EVERY_STEP))
        return choose_commit_interval(
            simulator.profile,
            lambda commit: self._with_interval(replace(options, commit=commit)),
            partial(simulator.forecast, rough=True),
        )

    def _with_micro_batch(self, options: PlanOptions) -> PlanOptions:
        """Return the options with the best micro-batch and tiles, if the user leaves them open.

        Gradients have 16 bits if the whole batch is one slice, if necessary in tiles; several
        slices sum them in fp32. One slice is chosen if it reduces the step time, or the quantity
        that is minimised instead. If one slice leaves the device little room, half of the batch is
        tried too. Half of the steps are assumed to be clipped, because a run cannot change its
        slices when norms change.
        """
        simulator = self._simulator
        if simulator is None or not simulator.profile.has_gpu:
            return options
        if options.micro_batch is not None or options.tiles == "off" or not options.overlap:
            return options
        blocks, workload = simulator.blocks, simulator.workload
        candidates = [whole := replace(options, micro_batch=workload.batch)]
        if options.tiles == "auto" and workload.tiled is not None and TILES[0] < workload.tokens:
            candidates.append(replace(whole, tiles=TILES[0]))
        commit = options.commit or EVERY_STEP

        def plan_of(changed: PlanOptions) -> Plan:
            spills = options.clip > 0 and options.can_rerun and commit == EVERY_STEP
            return self._closed_form(replace(changed, commit=commit), FillOrder(spill_all=spills))

        def with_inputs_alone(changed: PlanOptions) -> Plan:
            kept = "recompute" if options.activations == "holistic" else options.activations
            return plan_of(replace(changed, activations=kept))

        best = plan_of(options)
        every = sum(-(-group.numel // best.chunk_params) for group in blocks.trained)
        most_cached = 2 * sum(weights_too(best)) > every
        if options.commit is None and most_cached:
            # Most of the state is cached and need not be written in every step.
            commit = Interval(0, LONGEST_S)
            best = plan_of(options)
        if best.micro_batch == workload.batch and not best.tiles:
            # One slice may leave the device little room for activations.
            candidates.append(replace(options, micro_batch=-(-workload.batch // 2)))
        options = replace(options, micro_batch=best.micro_batch, tiles=best.tiles or "off")
        minimised = partial(_to_minimise, simulator, options.minimise)

        def least_of(plan: Plan, options: PlanOptions, least: float = math.inf) -> float:
            """Return the smaller cost of two plans.

            One is `plan`, which keeps only block inputs, the other the plan whose activations the
            closed form chooses. The activations are chosen more carefully later.
            """
            chosen = plan_of(options)
            plans = [plan] if chosen.kept == plan.kept else [plan, chosen]
            return min(minimised(plan, least) for plan in plans)

        least = WHOLE * least_of(with_inputs_alone(options), options)
        seen = {(best.micro_batch, best.tiles)}
        for candidate in candidates:
            with suppress(BudgetError):
                plan = with_inputs_alone(candidate)
                if (plan.micro_batch, plan.tiles) in seen:
                    continue
                seen.add((plan.micro_batch, plan.tiles))
                if (cost := least_of(plan, candidate, least)) < least:
                    options, least = candidate, cost
        return options

    def _with_interval(self, options: PlanOptions) -> tuple[Plan, Forecast | None]:
        """Return the best plan for the interval in `options`, and its forecast if it was simulated.

        Two plans are compared. The first holds gradients in memory. The second spills all of them,
        and uses the memory to cache more. The second may be better in two cases: if clipped steps
        can be run again, because gradients then need to be held only in clipped steps; and if all
        updates wait between two commits, because cached state may then save more than gradients in
        memory.
        """
        held, forecast = self._simulated_plan(options, FillOrder())
        updates = UpdateOptions.of(held)
        if not held.commit.every_step:
            fixed = rule_of(updates).update is not Phase.NEXT_FORWARD
        else:
            fixed = not (options.can_rerun and updates.can_speculate)
        if forecast is None or fixed:
            return held, forecast
        simulator = self._simulator
        assert simulator is not None
        if len(held.spilled_gradients) <= FEW_HELD * len(simulator.blocks.trained):
            spilling = FillOrder(spill_all=True)
            _, other = self._simulated_plan(options, spilling, near=[held.kept])
            assert other is not None
            forecast = min(
                forecast, other, key=partial(_expected_s, simulator, clipped=ASSUMED_CLIPPED_SHARE)
            )
            held = forecast.plan
        return held, forecast

    def _simulated_plan(
        self, options: PlanOptions, order: FillOrder, *, near: Sequence[Kept] = ()
    ) -> tuple[Plan, Forecast | None]:
        """Return the best plan for these options, with a rough forecast if it was simulated.

        `near` are the levels of activations of similar plans, from which the search starts.
        """
        plan_of, simulator = partial(self._closed_form, order=order), self._simulator
        plan = plan_of(options)
        if simulator is None:
            return plan, None
        blocks, workload = simulator.blocks, simulator.workload
        forecast = simulator.forecast(plan, rough=True)
        if options.minimise != "time" or not plan.overlap:
            return plan, forecast
        memory = MemoryModel.of(blocks, plan, workload, has_own_memory=simulator.profile.has_link)
        chunks = sum(simulator.spec(plan).chunks)
        quick = chunks + len(blocks.sites) <= QUICK and memory.sizes.names
        if quick:
            options = replace(options, micro_batch=plan.micro_batch, tiles=plan.tiles or "off")
        if quick and options.activations == "holistic":
            kept_levels = list(levels(memory, workload.in_tiles(plan.tiles)))
            forecast = _best_level(
                forecast,
                kept_levels,
                lambda kept, than_s, bound_first: simulator.faster(
                    plan_of(_keeping(options, kept)), than_s, bound_first=bound_first
                ),
                near=near,
            )
            options = _keeping(options, forecast.plan.kept)
        update_mode = options.update_mode
        if forecast.plan.deferred:
            optimized = plan_of(replace(options, update_mode="optimized"))
            at_once = simulator.faster(optimized, forecast.step_s, bound_first=forecast.lane_bound)
            if at_once is not None:
                forecast, options = at_once, replace(options, update_mode="optimized")
        best, plan = forecast, forecast.plan
        # With a log, a byte of weights in memory saves three transfers, so weights come first.
        if not options.log_gradients and (
            0 < len(plan.host_cached_weights) < len(memory.moving)
            or 0 < len(plan.host_cached_state) < chunks
        ):
            fixed = replace(options, micro_batch=plan.micro_batch)
            whole = self._closed_form(fixed, replace(order, whole_groups=True))
            if whole.host_cached_state != plan.host_cached_state:
                best = (
                    simulator.faster(
                        whole, BETTER_SHARE * forecast.step_s, bound_first=forecast.lane_bound
                    )
                    or forecast
                )
        plan = replace(best.plan, update_mode=update_mode)
        return plan, replace(best, plan=plan)


def _to_minimise(simulator: Simulator, minimise: str, plan: Plan, least: float = math.inf) -> float:
    """Return the quantity to minimise for a plan, assuming that half of the steps are clipped.

    `least` is the best value so far. If the quantity is certainly not below it, return inf.
    """
    if minimise == "time":
        # A plan is too slow if its steps are, because clipped steps usually take longer still.
        fast = simulator.faster(plan, least)
        return math.inf if fast is None else _expected_s(simulator, fast, clipped=0.5)
    forecast, profile = simulator.forecast(plan, rough=True), simulator.profile
    if minimise == "writes":
        return forecast.written_bytes
    step_s = _expected_s(simulator, forecast, clipped=0.5)
    return step_s * profile.usd_per_s + forecast.written_bytes * profile.usd_per_written_byte


def _expected_s(simulator: Simulator, forecast: Forecast, *, clipped: float) -> float:
    """Return the expected step time, given the probability `clipped` that a step is clipped.

    `forecast` is that of a step that is not clipped.
    """
    speculates = UpdateOptions.of(forecast.plan).can_speculate
    if not clipped or not speculates:
        return forecast.step_s
    other = simulator.forecast(forecast.plan, clipped=True, rough=True)
    return forecast.step_s + clipped * (other.step_s - forecast.step_s)


def _best_level(
    best: Forecast,
    kept_levels: list[Kept],
    faster: Callable[[Kept, float, bool], Forecast | None],
    *,
    near: Sequence[Kept],
) -> Forecast:
    """Return the forecast of the fastest level of activations that the search finds.

    The search simulates levels over the whole range, or the levels `near` if there are any, and
    then the neighbours of the best level. `faster` returns the forecast of a level if its step is
    shorter than the given seconds; its last argument is as in Simulator.faster.
    """
    at = kept_levels.index(best.plan.kept) if best.plan.kept in kept_levels else 0
    seen = set[int]()
    hints = [kept_levels.index(kept) for kept in near if kept in kept_levels]
    for apart in (FAR, NEAR):
        around = [at + i * apart for i in (-2, -1, 1, 2)]
        far = hints or range(at % apart, len(kept_levels), apart)
        for number in far if apart == FAR else around:
            if number in seen or not 0 <= number < len(kept_levels):
                continue
            seen.add(number)
            other = faster(kept_levels[number], BETTER_SHARE * best.step_s, best.lane_bound)
            if other is not None:
                best, at = other, number
    return best


def _keeping(options: PlanOptions, kept: Kept) -> PlanOptions:
    return replace(options, activations=kept or "recompute")


# -- The plan of a rank that computes on the CPU, in one memory with its host budget ---------------
#
# Several shares of the budget are tried for compute. The first one with a plan that fits is used.


SHARES = (0.5, 0.65, 0.35, 0.75, 0.25, 0.85, 0.15)  # shares of the budget for compute
DOUBLED, HALVED = 20, 4  # numbers of doublings and bisections to find a sufficient budget


def _in_one_memory(problem: PlanProblem) -> Planned:
    """Return the plan for the first share of the budget that is enough for compute."""

    def planned(size: int) -> Planned | None:
        for share in SHARES:
            room = int(share * size)
            apart = replace(problem, host_bytes=size - room, device_bytes=room, in_one_memory=False)
            with suppress(BudgetError):
                return make_plan(apart)
        return None

    plan = planned(problem.host_bytes)
    if plan is not None:
        return plan
    enough = _enough(lambda size: planned(size) is not None, problem.host_bytes)
    world, each = problem.options.world, format_bytes_up(enough)
    raise BudgetError(
        f"host budget too small: each of {world} ranks needs {each} for its share of the state and "
        f"for compute, its share of --host is {format_bytes(problem.host_bytes)}; raise --host to "
        f"{format_bytes_up(world * enough)} for {world} ranks on a machine"
        f"{lower_hint(problem.workload, problem.options)}, or start fewer ranks"
    )


def _enough(fits: Callable[[int], bool], little: int) -> int:
    """Return a size above `little` that fits and is close to the smallest such size."""
    sizes = (little * 2**times for times in range(1, DOUBLED))
    high: int = next(filter(fits, sizes), little * 2**DOUBLED)
    low = high // 2
    for _ in range(HALVED):
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


# -- The plan of a model that only runs forward, without state and gradients -----------------------
#
# The remaining memory caches weights.


def forward_plan(
    blocks: Blocks,
    dtype: str,
    *,
    chunk_params: int,
    micro_batch: int | None,
    head_tokens: int,
    host_bytes: int,
    device_bytes: int | None,
    needs: Mapping[str, int],
) -> Plan:
    """Return the forward-only plan that uses `host_bytes` best; raise a BudgetError if none fits.

    `needs` are the bytes that compute needs besides the weights, by owner. They are in host memory,
    or on the device if it has its own memory of `device_bytes`.
    """
    widest = max((len(site.groups) for site in blocks.sites), default=1)
    plan = Plan(
        dtype=dtype,
        micro_batch=micro_batch,
        chunk_params=chunk_params,
        head_tokens=head_tokens,
        weight_slots=widest,
        window=0,
        ring=0,
        grad_groups=0,
        device_slots=min(2 * widest, DEVICE_SLOTS) if device_bytes is not None else 0,
    )
    plan = _with_ledger(plan, blocks, needs)
    for tier, limit in (("device", device_bytes or 0), ("host", host_bytes)):
        if plan.tier_bytes(tier) > limit:
            hint = ", or ask for less at a time"
            raise over_budget(plan, tier, limit, what="this", hint=hint)
    limit = int(host_bytes * (1 - SPARE_SHARE))
    for slots, window in ((widest + 1, 1), (widest + 2, 1), (widest + 3, 2)):
        grown = _with_ledger(replace(plan, weight_slots=slots, window=window), blocks, needs)
        plan = grown if grown.tier_bytes("host") <= limit else plan
    moving = [group for group in blocks.groups if not group.resident]
    for group in sorted(moving, key=lambda group: -group.numel):
        cached = (*plan.host_cached_weights, group.key)
        grown = _with_ledger(replace(plan, host_cached_weights=cached), blocks, needs)
        plan = grown if grown.tier_bytes("host") <= limit else plan
    return plan


def _with_ledger(plan: Plan, blocks: Blocks, needs: Mapping[str, int]) -> Plan:
    width, cached = STATE_FORMATS[plan.dtype].weight_bytes, set(plan.host_cached_weights)
    resident = sum(group.numel for group in blocks.groups if group.resident)
    moving = {g.key: g.numel for g in blocks.groups if not g.resident}
    passing = max((numel for key, numel in moving.items() if key not in cached), default=0)
    host = {
        "weight slots": plan.weight_slots * passing * width,
        CACHED_WEIGHTS: (resident + sum(moving[key] for key in cached)) * width,
    }
    compute = {
        "resident parameters": resident * width,
        **dequantised_ledger(blocks, width),
        **needs,
    }
    if plan.device_slots:
        device = {"weights": plan.device_slots * max(moving.values(), default=0) * width, **compute}
    else:
        host, device = {**host, **compute}, {}
    entries = [LedgerEntry("device", owner, count) for owner, count in device.items() if count]
    entries += [LedgerEntry("host", owner, count) for owner, count in host.items() if count]
    return replace(plan, ledger=tuple(entries))
