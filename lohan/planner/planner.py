"""From blocks, footprint and budgets to a plan, or to a message that says what would fit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from lohan.errors import BudgetError, ConfigError
from lohan.model.layout import Blocks
from lohan.model.machine import Profile
from lohan.model.plan import CACHED_WEIGHTS, BatchWorkload, Kept, LedgerEntry, Plan, PlanOptions
from lohan.model.state import STATE_FORMATS
from lohan.planner.activations import Choice, levels
from lohan.planner.forecast import Forecast, Simulator, most_clipped
from lohan.planner.memory import (
    CARD_OWNERS,
    INPUTS,
    SHARED,
    WORK,
    MemoryModel,
    dequantised_ledger,
)
from lohan.planner.sizer import DEVICE_SLOTS, Sizer, spread
from lohan.planner.wear import LONGEST_S, choose_commit_interval, weights_too
from lohan.schedule.actions import Action, Op
from lohan.schedule.simulate import ActionCosts
from lohan.util.trace import busy_s
from lohan.util.units import EVERY_STEP, Interval, format_bytes

# -- From blocks, footprint and budgets to a plan, or to a message that says what would fit --------
#
# Host memory goes first to what a step cannot do without, at the smallest sizes; then to overlap
# (prefetch, gradients that may wait, state buffers); then, as far as it pays on the machine at
# hand, to activations and to gradients of updates that run in the next forward; what is still left
# keeps weights and then optimizer state in memory instead of on SSD: weights first, since every
# byte of them saves two reads a step. The state is used in a fixed cyclic order, so a fixed share
# is kept; the least recently used would always be the next needed.


__all__ = ["SPARE_SHARE", "PlanOptions", "check_fits", "closed_form_plan"]

TILES = (8192, 2048, 512, 128)  # tokens, where the plan chooses
SPARE_SHARE = 0.03  # of the budget, left to the allocator's rounding


def closed_form_plan(
    blocks: Blocks, options: PlanOptions, *, host_bytes: int, workload: BatchWorkload | None = None,
    profile: Profile | None = None, device_bytes: int | None = None,
) -> Plan:  # fmt: skip
    """The plan that uses `host_bytes` best, or a BudgetError with the numbers. A smaller
    micro-batch leaves the device room for activations in flight, so some are tried.
    `device_bytes`: of the device's own memory, where the profile does not say."""
    known = {} if workload is None else workload.known
    key = "plan", id(blocks), options, host_bytes, profile, device_bytes
    if key in known:
        return known[key][1]  # type: ignore[no-any-return]
    limit = int(host_bytes * (1 - SPARE_SHARE))
    made: list[tuple[Sizer, Plan, Choice | None]] = []
    for sizer, plan in _fitting(blocks, options, host_bytes, workload, profile, device_bytes):
        made.append((sizer, *sizer.chosen(plan, limit)))
        if not sizer.device:
            break
    sizer, plan, choice = min(made, key=lambda m: m[2].step_s if m[2] is not None else 0.0)
    _check_grad_dtype(options, sizer)
    plan = sizer.grown(plan, choice, limit)
    known[key] = blocks, plan  # with them its id is theirs
    return plan


def _check_grad_dtype(options: PlanOptions, sizer: Sizer) -> None:
    batch, memory = sizer.workload, sizer.memory
    if options.grad_dtype != "bf16" or batch is None or memory.slices > 1 or memory.tied:
        return
    raise ConfigError(
        f"grad_dtype: bf16 is for sums of slices, and the {batch.batch} examples of this batch go "
        "through a block at once, whose gradients have 16 bits anyway; leave it out"
    )


def check_fits(
    blocks: Blocks, options: PlanOptions, *, host_bytes: int, workload: BatchWorkload | None = None,
    profile: Profile | None = None, device_bytes: int | None = None,
) -> Plan:  # fmt: skip
    """A plan that fits, or a BudgetError: whether a run is possible, not how it would go. A smaller
    micro-batch takes less, but for the whole batch in one slice, whose gradients may have fewer
    bits: of all sizes, these two are tried."""
    fitting = _fitting(blocks, options, host_bytes, workload, profile, device_bytes, ends=True)
    return next(fitting)[1]


def _fitting(
    blocks: Blocks,
    options: PlanOptions,
    host_bytes: int,
    workload: BatchWorkload | None,
    profile: Profile | None,
    device_bytes: int | None = None,
    *,
    ends: bool = False,
) -> Iterator[tuple[Sizer, Plan]]:
    """The smallest plan of every micro-batch that fits, the largest first. `ends`: only of the
    largest and the smallest."""
    device = device_bytes
    if device is None:
        device = profile.device_bytes if profile is not None else 0
    candidates: Sequence[int | None] = [options.micro_batch]
    if workload is not None and options.micro_batch is None:
        candidates = _micro_batches(workload, profile if device else None)
        candidates = sorted({candidates[0], candidates[-1]}, reverse=True) if ends else candidates
    refused: Plan | None = None
    found = 0

    def over(plan: Plan) -> int:
        return max(device, plan.tier_bytes("device"))

    for tokens in _tile_sizes(workload, options):
        if found or (refused is not None and not _tiles_help(refused, device, host_bytes)):
            break
        tiled = None if workload is None else workload.in_tiles(tokens)
        for micro_batch in candidates:
            if found > 1 and not _fast(micro_batch, workload, profile):
                continue
            sizer = Sizer(blocks, options, tiled, micro_batch, profile, device)
            plan = sizer.smallest(host_bytes)
            if plan.tier_bytes("device") <= device and plan.tier_bytes("host") <= host_bytes:
                found += 1
                yield sizer, plan
            refused = min(refused or plan, plan, key=lambda p: (over(p), p.tier_bytes("host")))
    if not found:
        assert refused is not None
        tier = "device" if refused.tier_bytes("device") > device else "host"
        limit, hint = {"device": device, "host": host_bytes}[tier], lower_hint(workload, options)
        raise over_budget(refused, tier, limit, what="the run", hint=hint)


def _tile_sizes(workload: BatchWorkload | None, options: PlanOptions) -> list[int]:
    """What the user wants or, if that is left to the plan, no tiles and then smaller and smaller
    ones."""
    if isinstance(options.tiles, int):
        return [options.tiles]
    if workload is None or workload.tiled is None or options.tiles != "auto":
        return [0]
    tokens = (options.micro_batch or 1) * workload.seq
    return [0, *(size for size in TILES if size < tokens)]


def _tiles_help(plan: Plan, device: int, host_bytes: int) -> bool:
    """Whether a plan would fit if blocks took next to nothing for their work, and for masks: those
    are counted where it is not known that there are none."""
    work: Counter[str] = Counter()
    for entry in plan.ledger:
        if entry.owner in (WORK, INPUTS, SHARED):
            work[entry.tier] += entry.bytes
    limits = {"device": device, "host": host_bytes}
    return all(plan.tier_bytes(tier) - work[tier] <= limit for tier, limit in limits.items())


def _micro_batches(workload: BatchWorkload, profile: Profile | None) -> list[int]:
    """Halves of halves and, with a profile, the smallest with which the device is at its
    fastest; the largest first."""
    sizes = {1, *(-(-workload.batch // 2**i) for i in range(12))}
    if profile is not None:
        sizes.add(min(workload.batch, math.ceil(profile.compute[-1][0] / workload.seq)))
    return sorted(sizes, reverse=True)


def _fast(micro_batch: int | None, workload: BatchWorkload | None, profile: Profile | None) -> bool:
    """Whether a micro-batch is among the smallest with which the device is about at its fastest:
    larger ones only take more of its memory."""
    if workload is None or profile is None or micro_batch is None:
        return False
    return 0.5 <= micro_batch * workload.seq / profile.compute[-1][0] < 2


def over_budget(plan: Plan, tier: str, limit: int, *, what: str, hint: str) -> BudgetError:
    """A tier is too small: both numbers, the largest owners, and the next move."""
    needed, option = plan.tier_bytes(tier), {"device": "--device-memory", "host": "--host"}[tier]
    rows = sorted((e for e in plan.ledger if e.tier == tier), key=lambda e: -e.bytes)
    largest = ", ".join(f"{e.owner} {format_bytes(e.bytes)}" for e in rows[:3])
    # What a card needs for itself grows with its memory, at most in proportion.
    own = sum(e.bytes for e in rows if e.owner in CARD_OWNERS)
    enough = needed if not own else int((needed - own) / (1 - own / limit))
    return BudgetError(
        f"{tier} budget too small: {what} needs {format_bytes(needed)}, {option} allows "
        f"{format_bytes(limit)} (largest: {largest}); raise {option} to {format_bytes(enough)}"
        f"{hint}"
    )


def lower_hint(workload: BatchWorkload | None, options: PlanOptions) -> str:
    """What else a user can lower who has no more memory: the end of a message."""
    if workload is None:
        return ""
    each, micro = " for each rank" if options.world > 1 else "", options.micro_batch or 1
    lower = [f"--batch (now {workload.batch}{each})"] if workload.batch > 1 else []
    lower += [f"--micro-batch (now {micro})"] if micro > 1 else []
    lower += [f"--seq (now {workload.seq})"] if workload.text else []
    words = f", or lower {' or '.join(lower)}" if lower else ""
    return words if workload.text else f"{words}, or train on smaller images or latents"


# -- The plan that a run follows -------------------------------------------------------------------
#
# The planner's, with its choice of activations looked at again.
#
# The closed form knows no waits. Where a simulation takes little time, other levels of activations
# are simulated too, first far apart, then near the best. So is, of any model, the plan that leaves
# no update to the next forward.


QUICK = 500  # chunks and sites of a model that is simulated several times
FAR, NEAR = 8, 2  # levels apart
BETTER = 0.999  # of the time of the choice before
FEW_HELD = 0.9  # of the groups, whose gradients go to SSD: the others take little memory
WORTH = 1.05  # times as fast a new plan must promise to be, while a run goes on
CLIPPED = 0.1  # of the steps of a run, where it is not known how many are
WHOLE = 0.99  # of what slices take, that the whole batch in tiles may: tiles have costs of theirs


def plan_for_budget(
    blocks: Blocks, options: PlanOptions, *, host_bytes: int, workload: BatchWorkload | None = None,
    profile: Profile | None = None, device_bytes: int | None = None,
) -> Plan:  # fmt: skip
    """As `closed_form_plan`, with the same errors, with an interval of commits where the user
    leaves that open, and with the share of clipped steps up to which updates need not wait."""
    simulator = None
    if workload is not None and profile is not None:
        simulator = Simulator(profile, blocks, workload, options.two_generations)
    plan, known = plan_with_forecast(
        blocks, options, host_bytes=host_bytes, workload=workload, profile=profile,
        device_bytes=device_bytes, simulator=simulator,
    )  # fmt: skip
    if simulator is None or not plan.may_speculate(two_generations=options.two_generations):
        return plan
    if options.every_clipped:  # what is known is of clipped steps
        known = None
    return foreseen(simulator, plan, known)[0]


def foreseen(
    simulator: Simulator, plan: Plan, known: Forecast | None
) -> tuple[Plan, Forecast, Forecast | None]:
    """The plan with updates made twice where they wait, and with the share of clipped steps up to
    which they need not; what it does while no step is clipped (`known`, if that is no rough one);
    and if each were, where that is another."""
    if known is None or known.work.joined:
        known = simulator.forecast(plan)
    if not plan.may_speculate(two_generations=simulator.two_generations):
        return plan, known, None
    if not plan.updated_twice:
        waits = simulator.forecast(plan, clipped=True, rough=True)
        plan = _with_updates_twice(simulator, waits).plan
    clipped = simulator.forecast(plan, clipped=True)
    most = most_clipped(simulator.profile, known, clipped)
    return replace(plan, most_clipped=most), known, clipped


def plan_with_forecast(
    blocks: Blocks, options: PlanOptions, *, host_bytes: int, workload: BatchWorkload | None,
    profile: Profile | None, device_bytes: int | None, simulator: Simulator | None,
) -> tuple[Plan, Forecast | None]:  # fmt: skip
    """The plan of `plan_for_budget` and, where it was simulated at the end, what it does.
    `simulator`: where batch and machine are known."""
    search = _PlanSearch(
        partial(
            closed_form_plan, blocks, host_bytes=host_bytes, workload=workload, profile=profile,
            device_bytes=device_bytes,
        ),
        simulator,
    )  # fmt: skip
    made = search.best(options)
    if options.minimise != "writes" or simulator is None:
        return made

    def written_bytes(made: tuple[Plan, Forecast | None]) -> float:
        plan, found = made
        return (found or simulator.forecast(plan)).written_bytes

    # The fastest plan is chosen by simulation, and may keep more in memory.
    return min(made, search.best(replace(options, minimise="time")), key=written_bytes)


class _PlanSearch:
    """Plans of one run with different options: the closed form's, of which the fastest is found by
    simulation, where batch and machine are known."""

    def __init__(
        self, closed_form: Callable[[PlanOptions], Plan], simulator: Simulator | None
    ) -> None:
        self._closed_form, self._simulator = closed_form, simulator

    def best(self, options: PlanOptions) -> tuple[Plan, Forecast | None]:
        options, simulator = self._with_micro_batch(options), self._simulator
        if options.commit is not None:
            return self._with_interval(options)
        if simulator is None or not options.two_generations:
            return self._with_interval(replace(options, commit=EVERY_STEP))
        return choose_commit_interval(
            simulator.profile,
            lambda commit: self._with_interval(replace(options, commit=commit)),
            partial(simulator.forecast, clipped=options.every_clipped, rough=True),
        )

    def _with_micro_batch(self, options: PlanOptions) -> PlanOptions:
        """The whole batch in one slice, if need be in tiles, has 16-bit gradients where several
        have sums of them in fp32: taken where that makes steps faster, or what else is to be
        minimised less; and halves of it, where it leaves the device too little. As many clipped
        steps count as others: a run keeps its slices, whatever its norms are."""
        simulator = self._simulator
        if simulator is None or not simulator.profile.has_link:
            return options
        if options.micro_batch is not None or options.tiles == "off" or not options.overlap:
            return options
        blocks, workload = simulator.blocks, simulator.workload
        candidates = [whole := replace(options, micro_batch=workload.batch)]
        if options.tiles == "auto" and workload.tiled is not None and TILES[0] < workload.tokens:
            candidates.append(replace(whole, tiles=TILES[0]))
        commit = options.commit or EVERY_STEP

        def plan_of(asked: PlanOptions) -> Plan:
            spills = options.clip > 0 and options.can_rerun and commit == EVERY_STEP
            return self._closed_form(replace(asked, commit=commit, spill_all=spills))

        def bare(asked: PlanOptions) -> Plan:
            """With block inputs alone: what else is kept is chosen with more care later."""
            kept = "recompute" if options.activations == "holistic" else options.activations
            return plan_of(replace(asked, activations=kept))

        best = plan_of(options)
        every = sum(-(-group.numel // best.chunk_params) for group in blocks.trained)
        most_cached = 2 * sum(weights_too(best)) > every
        if options.commit is None and options.two_generations and most_cached:
            commit = Interval(0, LONGEST_S)  # most of it need not be written in every step
            best = plan_of(options)
        if best.micro_batch == workload.batch and not best.tiles:  # maybe little room is left
            candidates.append(replace(options, micro_batch=-(-workload.batch // 2)))
        options = replace(options, micro_batch=best.micro_batch, tiles=best.tiles or "off")
        worth = partial(_to_minimise, simulator, options.minimise)
        least, seen = WHOLE * worth(bare(options)), {(best.micro_batch, best.tiles)}
        for candidate in candidates:
            with suppress(BudgetError):
                plan = bare(candidate)
                if (plan.micro_batch, plan.tiles) in seen:
                    continue
                seen.add((plan.micro_batch, plan.tiles))
                if (found := worth(plan, least)) < least:
                    options, least = candidate, found
        return options

    def _with_interval(self, options: PlanOptions) -> tuple[Plan, Forecast | None]:
        """Where clipped steps can be run again, held gradients need no memory in the others: they
        get it if that costs those less than it saves. Where all updates wait, between two commits,
        state in that memory may be worth more."""
        held, made = self._simulated_plan(options)
        two_generations, every_clipped = options.two_generations, options.every_clipped
        if held.commits_by_interval or every_clipped:
            fixed = not held.always_waits(
                two_generations=two_generations, every_clipped=every_clipped
            )
        else:
            fixed = not (options.can_rerun and held.may_speculate(two_generations=two_generations))
        if made is None or fixed or options.spill_all:
            return held, made
        simulator = self._simulator
        assert simulator is not None
        if len(held.spilled_gradients) <= FEW_HELD * len(simulator.blocks.trained):
            spilling = replace(options, spill_all=True)
            _, other = self._simulated_plan(spilling, near=[held.kept])
            assert other is not None
            clipped = 0.0 if every_clipped else CLIPPED  # forecasts are of clipped steps anyway
            made = min(made, other, key=partial(_expected_s, simulator, clipped=clipped))
            held = made.plan
        return held, made

    def _simulated_plan(
        self, options: PlanOptions, *, near: Sequence[Kept] = ()
    ) -> tuple[Plan, Forecast | None]:
        """With a rough forecast, where the plan was simulated. `near`: what a plan that differs
        little has kept."""
        plan_of, simulator = self._closed_form, self._simulator
        plan = plan_of(options)
        if simulator is None:
            return plan, None
        blocks, workload = simulator.blocks, simulator.workload
        simulated = partial(simulator.forecast, clipped=options.every_clipped, rough=True)
        made = simulated(plan)
        if options.minimise != "time" or not plan.overlap:
            return plan, made
        memory = MemoryModel.of(blocks, plan, workload, has_own_memory=simulator.profile.has_link)
        chunks = sum(simulator.spec(plan).chunks)
        quick = chunks + len(blocks.sites) <= QUICK and memory.block_sites
        if quick:
            options = replace(options, micro_batch=plan.micro_batch, tiles=plan.tiles or "off")
        if quick and options.activations == "holistic":
            known = list(levels(memory, workload.in_tiles(plan.tiles)))
            made = _best_level(
                made, known, lambda kept: simulated(plan_of(_keeping(options, kept))), near=near
            )
            options = _keeping(options, made.plan.kept)
        update_mode = options.update_mode
        if made.plan.deferred:
            at_once = simulated(plan_of(replace(options, update_mode="optimized")))
            if at_once.step_s < made.step_s:
                made, options = at_once, replace(options, update_mode="optimized")

        def updated_twice(made: Forecast) -> Forecast:
            if not made.plan.always_waits(
                two_generations=options.two_generations, every_clipped=options.every_clipped
            ):
                return made
            return _with_updates_twice(simulator, made)

        best, plan = made, made.plan
        if (
            0 < len(plan.host_cached_weights) < len(memory.moving)
            or 0 < len(plan.host_cached_state) < chunks
        ):
            whole = plan_of(replace(options, micro_batch=plan.micro_batch, cache_groups=True))
            if whole.host_cached_state != plan.host_cached_state:
                best = updated_twice(simulated(whole))
        if best.step_s >= BETTER * made.step_s:
            best = updated_twice(made)
        plan = replace(best.plan, update_mode=update_mode)
        return plan, replace(best, plan=plan)


def _to_minimise(simulator: Simulator, minimise: str, plan: Plan, least: float = math.inf) -> float:
    """What the user wants little of, where half of the steps are clipped. `least`: what others
    take; from there on the answer may be too small."""
    made, profile = simulator.forecast(plan, rough=True), simulator.profile
    if minimise == "writes":
        return made.written_bytes
    if minimise == "time" and made.step_s >= least:  # as a rule clipped ones take longer
        return made.step_s
    step_s = _expected_s(simulator, made, clipped=0.5)
    if minimise == "time":
        return step_s
    return step_s * profile.usd_per_s + made.written_bytes * profile.usd_per_written_byte


def _expected_s(simulator: Simulator, made: Forecast, *, clipped: float) -> float:
    """Of a step of which it is not known whether it is clipped; `made`: if it is not, `clipped`:
    how likely it is."""
    speculates = made.plan.may_speculate(two_generations=simulator.two_generations)
    if not clipped or not speculates:
        return made.step_s
    other = simulator.forecast(made.plan, clipped=True, rough=True)
    return made.step_s + clipped * (other.step_s - made.step_s)


def _with_updates_twice(simulator: Simulator, waiting: Forecast) -> Forecast:
    """Where all updates wait for forward, it waits for their writes, while the drives rest in
    backward. Updates of some groups are then made twice: for their weights in forward, and again,
    from the state of before, to be written during backward. Reads are cheap: as many groups as the
    drives have time for. It needs gradients for longer, but no more of them. `waiting`: a rough
    forecast without."""
    plan, blocks = waiting.plan, simulator.blocks
    groups = _passing(blocks, plan) if simulator.profile.has_link else []
    if not groups:
        return waiting
    costs, work = ActionCosts(simulator.profile, waiting.work), waiting.work
    numbers = {group.key: number for number, group in enumerate(blocks.groups)}
    ops = [Op.READ_STATE, Op.WRITE, *([Op.FETCH_GRADIENTS] if plan.spilled_gradients else [])]

    def second_update_s(key: str) -> float:
        number = numbers[key]
        parts = [Action(op, number, chunk) for op in ops for chunk in range(work.chunks(number))]
        return costs.seconds(Action(Op.READ_WEIGHTS, number)) + sum(map(costs.seconds, parts))

    each_s = sum(map(second_update_s, groups)) / len(groups)
    count = min(len(groups), int(_resting_s(waiting) / each_s)) if each_s else 0
    if not count:
        return waiting
    twice = replace(plan, updated_twice=spread(groups, count))
    other = simulator.forecast(twice, clipped=True, rough=True)
    return other if other.step_s < BETTER * waiting.step_s else waiting


def _passing(blocks: Blocks, plan: Plan) -> list[str]:
    """Groups of one site each, nothing of which stays in memory."""
    uses = Counter(key for site in blocks.sites for key in site.groups)
    stay = {*plan.host_cached_weights, *(key for key, _ in plan.host_cached_state)}
    trained = (group.key for group in blocks.trained if not group.resident)
    return [key for key in trained if uses[key] == 1 and key not in stay]


def _resting_s(made: Forecast) -> float:
    """For which drives have nothing to do in backward."""
    timeline = made.timeline
    stop = timeline.step_ends[-1]
    start = stop - timeline.step_s + timeline.forward_s
    return stop - start - busy_s(timeline.spans, start, stop)["ssd"]


def _best_level(
    made: Forecast, known: list[Kept], simulated: Callable[[Kept], Forecast], *,
    near: Sequence[Kept],
) -> Forecast:  # fmt: skip
    """Other levels of activations than that of the plan, where they are faster: all over the range,
    or `near` that of a similar plan, then next to the best of them."""
    at = known.index(made.plan.kept) if made.plan.kept in known else 0
    seen = set[int]()
    hints = [known.index(kept) for kept in near if kept in known]
    for apart in (FAR, NEAR):
        around = [at + i * apart for i in (-2, -1, 1, 2)]
        far = hints or range(at % apart, len(known), apart)
        for number in far if apart == FAR else around:
            if number in seen or not 0 <= number < len(known):
                continue
            seen.add(number)
            other = simulated(known[number])
            if other.step_s < BETTER * made.step_s:
                made, at = other, number
    return made


def _keeping(options: PlanOptions, kept: Kept) -> PlanOptions:
    return replace(options, activations=kept or "recompute")


# -- The plan of a rank that computes on the CPU: its host budget is also that of compute ----------
#
# Which part of it compute gets is tried: the first that a plan fits into.


SHARES = (0.5, 0.65, 0.35, 0.75, 0.25, 0.85, 0.15)  # of the budget, for compute
DOUBLED, HALVED = 20, 4  # times, to find out how much would be enough


def plan_in_one_memory(
    blocks: Blocks, options: PlanOptions, *, host_bytes: int, workload: BatchWorkload | None = None
) -> tuple[Plan, int]:
    """The plan, and the bytes of the budget that are compute's."""

    def planned(size: int) -> tuple[Plan, int] | None:
        for share in SHARES:
            room = int(share * size)
            try:
                plan = plan_for_budget(
                    blocks, options, host_bytes=size - room, workload=workload, device_bytes=room
                )
            except BudgetError:
                continue
            return plan, room
        return None

    found = planned(host_bytes)
    if found is not None:
        return found
    enough = _enough(lambda size: planned(size) is not None, host_bytes)
    world, each = options.world, format_bytes(enough)
    raise BudgetError(
        f"host budget too small: each of {world} ranks needs {each} for its share of the state and "
        f"for compute, its share of --host is {format_bytes(host_bytes)}; raise --host to "
        f"{format_bytes(world * enough)} for {world} ranks on a machine"
        f"{lower_hint(workload, options)}, or start fewer ranks"
    )


def _enough(fits: Callable[[int], bool], little: int) -> int:
    """A size that fits and is not much more than it takes."""
    sizes = (little * 2**times for times in range(1, DOUBLED))
    high: int = next(filter(fits, sizes), little * 2**DOUBLED)
    low = high // 2
    for _ in range(HALVED):
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


# -- The plan of a model that only runs forward: no state, no gradients ----------------------------
#
# The rest keeps weights.


def forward_plan(
    blocks: Blocks, dtype: str, *, chunk_params: int, micro_batch: int | None, head_tokens: int,
    host_bytes: int, device_bytes: int | None, needs: Mapping[str, int],
) -> Plan:  # fmt: skip
    """The plan that uses `host_bytes` best, or a BudgetError with the numbers. `needs` is what
    compute takes besides the weights, by owner: in host memory, or on a device with a memory of its
    own, `device_bytes`."""
    widest = max((len(site.groups) for site in blocks.sites), default=1)
    plan = Plan(
        dtype=dtype, micro_batch=micro_batch, chunk_params=chunk_params, head_tokens=head_tokens,
        weight_slots=widest, window=0, ring=0, grad_groups=0,
        device_slots=min(2 * widest, DEVICE_SLOTS) if device_bytes is not None else 0,
    )  # fmt: skip
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
        "resident parameters": resident * width, **dequantised_ledger(blocks, width), **needs,
    }  # fmt: skip
    if plan.device_slots:
        device = {"weights": plan.device_slots * max(moving.values(), default=0) * width, **compute}
    else:
        host, device = {**host, **compute}, {}
    entries = [LedgerEntry("device", owner, count) for owner, count in device.items() if count]
    entries += [LedgerEntry("host", owner, count) for owner, count in host.items() if count]
    return replace(plan, ledger=tuple(entries))
