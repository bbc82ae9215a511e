"""Plans and forecasts of a model on a machine, from shapes or from a traced model.

Neither the model nor the machine has to be present. This module needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import TypeVar

from lohan.errors import BudgetError, ConfigError
from lohan.model.layout import (
    FROZEN,
    GROUP_ALIGN,
    RESIDENT,
    Blocks,
    FlatGroup,
    RankInfo,
    Site,
    TensorSpec,
)
from lohan.model.machine import Profile
from lohan.model.options import PlanOptions
from lohan.model.plan import Plan
from lohan.model.shapes import BlockShape, ModelShape
from lohan.model.state import FLOAT, STATE_FORMATS, packed_numel
from lohan.model.workload import BatchWorkload, Footprint, SiteFootprint
from lohan.optim import DEFAULT_KIND
from lohan.planner.forecast import BUS, Forecast, Simulator, on_machine
from lohan.planner.memory import card_overhead
from lohan.planner.planner import (
    PlanProblem,
    SpaceError,
    best_plan,
    check_fits,
    make_plan,
)
from lohan.planner.wear import Alternative, alternatives
from lohan.schedule.actions import Schedule, ScheduleSpec
from lohan.schedule.steps import (
    ExecutionOrder,
    check_order,
    planned_order,
    spec_of,
    steady_step,
)
from lohan.util.units import align_up, format_bytes

# -- Groups, sites and the footprint of a batch, derived from a model shape ------------------------


EMBEDDING, HEAD = "embedding", "head"


def layout_of(model: ModelShape, dtype: str = "bf16") -> Blocks:
    """Return the embedding, the blocks and the head of a model shape as groups and sites.

    A tied head is a second site that uses the group of the embedding. With adapters, all
    other parameters are frozen, and the weights of blocks may be packed.
    """
    rest = FROZEN if model.lora else ""
    groups = [_group(EMBEDDING + rest, model.embedding_parameters)]
    sites = [Site(EMBEDDING, (), (EMBEDDING + rest,))]
    for number, block in enumerate(model.blocks):
        key = _block(number)
        members = [_group(key, block.parameters)]
        if model.lora:
            frozen = _packed(model, block, dtype) if model.base else ()
            size = frozen[0].numel if frozen else block.parameters
            members = [_group(key, block.adapter_parameters(model.lora))]
            members.append(_group(key + FROZEN, size, frozen))
        groups += members
        sites.append(Site(key, (), tuple(group.key for group in members)))
    if model.head_parameters:
        groups.append(_group(HEAD + rest, model.head_parameters))
    if model.vocabulary:
        sites.append(Site(HEAD, (), (_head_group(model),)))
    if model.resident_parameters:
        groups.append(_group(RESIDENT + rest, model.resident_parameters))
    return Blocks(tuple(g for g in groups if g.numel), tuple(_real(sites, groups)), ())


def _packed(model: ModelShape, block: BlockShape, dtype: str) -> tuple[TensorSpec, ...]:
    """Return the frozen weights of a block as one packed matrix, ignoring its small vectors."""
    shape = (-(-block.parameters // model.hidden), model.hidden)
    numel = packed_numel(model.base, shape, STATE_FORMATS[dtype].weight_bytes)
    return (TensorSpec("weights", shape, 0, numel, True, False, packing=model.base),)


def _head_group(model: ModelShape) -> str:
    return (HEAD if model.head_parameters else EMBEDDING) + (FROZEN if model.lora else "")


def load_of_shape(
    model: ModelShape, *, batch: int, seq: int, dtype: str, tiles: int = 0
) -> BatchWorkload:
    """Return the workload of a batch, derived from the model shape.

    `tiles` is the number of tokens per tile, or 0 without tiles.
    """
    width = STATE_FORMATS[dtype].weight_bytes
    seq = model.sample_tokens or seq
    blocks = [block.in_tiles() if tiles else block for block in model.blocks]

    def footprint(micro_batch: int) -> Footprint:
        ids = 8 * batch * seq
        embedding = SiteFootprint(ids, 0, shared_bytes=ids)
        sites = {EMBEDDING: embedding} if model.embedding_parameters else {}
        for number, block in enumerate(blocks):
            each = micro_batch * seq * width
            # A tile needs memory for its activations, for the sums of weight gradients, and for
            # the terms that it adds to these sums.
            tile = block.tile_elements * min(tiles, micro_batch * seq) * width
            trained = block.adapter_parameters(model.lora) if model.lora else block.parameters
            sums = trained * (FLOAT + width) if tiles else 0
            # The first gradients are computed while most activations are still in memory.
            first = trained * width / 3 if micro_batch >= batch else 0
            inputs = int(block.input_elements * batch * seq * width)
            sites[_block(number)] = SiteFootprint(
                inputs,
                int(block.work(model.temporaries) * each + first)
                + int(tile * (1 + model.temporaries) + sums),
                int(block.widest * each + tile),
                inputs,
            )
        return Footprint(sites)

    return BatchWorkload(
        batch=batch,
        seq=seq,
        measure=footprint,
        hidden=model.hidden,
        vocabulary=model.vocabulary,
        head_group=_head_group(model) if model.vocabulary else None,
        text=not model.sample_tokens,
        shapes={
            _block(number): replace(block, flops=block.flops + 2 * model.lora * block.linear_ends)
            for number, block in enumerate(blocks)
        },
        tiles=tiles,
        tiled=lambda tokens: load_of_shape(model, batch=batch, seq=seq, dtype=dtype, tiles=tokens),
    )


def _block(number: int) -> str:
    return f"block.{number}"


def _group(key: str, parameters: int, tensors: tuple[TensorSpec, ...] = ()) -> FlatGroup:
    return FlatGroup(key, tensors, align_up(parameters, GROUP_ALIGN))


def _real(sites: list[Site], groups: list[FlatGroup]) -> list[Site]:
    keys = {group.key for group in groups if group.numel}
    return [site for site in sites if site.groups[0] in keys]


# -- Machine plan ---------------------------------------------------------------------------------


T = TypeVar("T")
Overhead = tuple[tuple[str, int], ...]  # bytes by owner
FASTER = 1e3  # speedup with which a lane is never the bottleneck
LARGEST_BATCH = 2**16
MOST_DRIVES = 24


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A model, a machine and a batch to plan for.

    Each GPU of the machine runs one rank. The ranks share the model, the batch and the `host` bytes
    of main memory, and all of them follow the same plan.
    """

    model: ModelShape
    machine: Profile
    options: PlanOptions
    batch: int
    seq: int
    host: int

    @property
    def ranks(self) -> int:
        return self.machine.gpus

    @property
    def blocks(self) -> Blocks:
        """The groups and sites of one rank, with its shard of every group."""
        return _shards(self.model, self.ranks, self.options.dtype)


@dataclass(frozen=True, kw_only=True)
class MachineProblem:
    """A model shape or a traced model, a machine, and a memory budget.

    Budget, blocks and workload are those of one rank.
    """

    model: str
    parameters: int
    batch: int  # samples of all ranks
    machine: Profile | None  # None if the machine was not measured
    options: PlanOptions
    host_bytes: int
    device_bytes: int | None  # None if the device has no memory of its own
    overhead: Callable[[int], Overhead]  # overhead in device memory, given the bytes of host memory
    blocks: Blocks
    workload: BatchWorkload
    drive_bytes: int = 0  # capacity of the drives; 0 if it is not known before the run
    # Returns the order in which a traced model calls its sites under a plan; None for a shape.
    site_order: Callable[[Plan], Sequence[int]] | None = None

    @property
    def rank_machine(self) -> Profile | None:
        return None if self.machine is None else self.machine.share(self.options.world)

    @cached_property
    def rank_problem(self) -> PlanProblem:
        """The problem that the planner solves for each rank."""
        if self.machine is not None:
            self.machine.check_host(self.host_bytes)
        return PlanProblem(
            self.blocks,
            replace(self.options, device_overhead=self.overhead(self.host_bytes)),
            host_bytes=self.host_bytes,
            workload=self.workload,
            profile=self.rank_machine,
            device_bytes=self.device_bytes,
            drive_bytes=self.drive_bytes,
            drives=len(self.machine.drives) if self.machine is not None else 0,
        )

    @property
    def simulator(self) -> Simulator | None:
        """The simulator of this problem, or None if the machine is not known."""
        return self.rank_problem.simulator

    @property
    def traced(self) -> bool:
        """True if the model was traced."""
        return self.site_order is not None


@dataclass(frozen=True, kw_only=True)
class MachinePlan(MachineProblem):
    """A solved MachineProblem: the plan and its forecast."""

    plan: Plan
    order: ExecutionOrder  # of a step
    forecast: Forecast | None  # None if the machine is not known
    clipped: Forecast | None = None  # the forecast if every step is clipped; None if it is the same
    without_binding_s: float = 0.0  # step time if the binding lane took almost no time
    scarce: bool = False  # whether the drives have no room for activations of the best plan
    # The plan with AdamW and fp32 moments, if the run uses another optimizer and this plan fits.
    default_plan: MachinePlan | None = None
    unlogged: Forecast | None = None  # the forecast of the plan without a log, if there is a log
    instead: tuple[Alternative, ...] = ()  # options with which the run writes less to SSD

    @property
    def step_s(self) -> float:
        assert self.forecast is not None
        return self.forecast.step_s

    @property
    def spec(self) -> ScheduleSpec:
        return spec_of(self.blocks, self.plan)

    @property
    def phases(self) -> dict[str, Schedule]:
        """The phases of a step in the steady state."""
        return steady_step(self.spec, self.order)

    @property
    def export_bytes(self) -> int:
        """The size of the exported model, or of the adapter."""
        width = STATE_FORMATS[self.options.dtype].weight_bytes
        return width * self.plan.world * sum(group.numel for group in self.blocks.trained)

    @property
    def has_room_for_export(self) -> bool:
        """True if the drives can hold the exported model besides the store."""
        needed = self.peak_bytes["ssd"] + self.export_bytes
        return not self.drive_bytes or needed <= self.drive_bytes

    @property
    def peak_bytes(self) -> dict[str, int]:
        """The peak bytes of each GPU, and of the host memory and drives of the whole machine."""
        ranks = {"device": 1, "host": self.plan.world, "ssd": self.plan.world}
        return {tier: count * self.plan.tier_bytes(tier) for tier, count in ranks.items()}


def plan_for_machine(request: PlanRequest) -> MachinePlan:
    """Return the plan and its forecast, or raise a BudgetError with changes that would help."""
    ranks, machine = request.ranks, request.machine
    if ranks > 1 and not machine.has_link:
        count = "one GPU" if machine.unified else "no GPU"
        raise ConfigError(f"--gpus {ranks}: {machine.name} has {count}; take a machine with some")
    if request.batch < ranks:
        raise ConfigError(
            f"--batch {request.batch} is less than one row for each of {ranks} GPUs; raise it to "
            f"{ranks}, or lower --gpus"
        )
    try:
        return solve(problem_of(request))
    except BudgetError as refused:
        changes = [text for text in _changes(request) if text]
        hint = "; fits with " + ", or ".join(changes) if changes else ""
        raise type(refused)(f"{refused}{hint}") from None


def solve(problem: MachineProblem) -> MachinePlan:
    """Return the plan for a model shape or a traced model, with its forecast."""
    planned = make_plan(problem.rank_problem)
    plan, forecast, clipped, faster_s = planned.plan, planned.forecast, planned.clipped, 0.0
    if forecast is not None:
        tokens = problem.batch * problem.workload.seq
        forecast = replace(forecast, tokens=tokens)
        clipped = None if clipped is None else replace(clipped, tokens=tokens)
        assert problem.machine is not None
        faster = without_lane(problem.machine, forecast.binding).share(plan.world)
        faster_s = on_machine(forecast, faster).step_s
    calls = problem.site_order(plan) if problem.site_order is not None else ()
    order = planned_order(problem.blocks, plan, calls)
    if calls:
        check_order(spec_of(problem.blocks, plan), order)
    return MachinePlan(
        **{field.name: getattr(problem, field.name) for field in fields(MachineProblem)},
        plan=plan,
        order=order,
        forecast=forecast,
        clipped=clipped,
        without_binding_s=faster_s,
        scarce=planned.scarce,
        unlogged=planned.unlogged,
    )


def with_alternatives(plan: MachinePlan) -> MachinePlan:
    """Return the plan with alternatives, each of which is planned in the same way as the run.

    The alternatives are the default optimizer, if the run uses another optimizer, and options with
    which less is written.
    """
    default_plan, unlogged, world = None, plan.unlogged, plan.options.world
    problem = MachineProblem(
        **{field.name: getattr(plan, field.name) for field in fields(MachineProblem)}
    )
    instead: tuple[Alternative, ...] = ()
    # The alternatives keep the decision for or against a log.
    options = plan.options.logging(plan.plan.log_gradients)
    if plan.options.kind != DEFAULT_KIND:
        with suppress(BudgetError):
            default_plan = solve(replace(problem, options=replace(plan.options, kind=DEFAULT_KIND)))
    if plan.forecast is not None:

        def planned(options: PlanOptions, host: int) -> Forecast:
            other = replace(problem, options=options, host_bytes=host // world)
            plan, forecast, _ = best_plan(other.rank_problem)
            assert other.simulator is not None
            return forecast or other.simulator.forecast(plan)

        cheaper = alternatives(plan.forecast, options, world * plan.host_bytes, planned)
        instead = tuple(cheaper)
        if plan.plan.log_gradients and unlogged is None:
            with suppress(BudgetError):
                unlogged = planned(
                    replace(options.logging(0), commit=None), world * plan.host_bytes
                )
    return replace(plan, default_plan=default_plan, instead=instead, unlogged=unlogged)


# -- From shapes ----------------------------------------------------------------------------------


def problem_of(request: PlanRequest) -> MachineProblem:
    machine = request.machine
    if not machine.drives:
        raise ConfigError(f"{machine.name} has no drive; take a machine with one")

    def overhead(host_bytes: int) -> Overhead:
        """Return the overhead of libraries and kernels that a run on this card has."""
        if not machine.has_gpu:
            return ()
        memory = host_bytes if machine.unified else machine.device_bytes
        return tuple(card_overhead(memory, host_bytes).items())

    return MachineProblem(
        model=request.model.name,
        parameters=request.model.parameters,
        batch=request.batch,
        machine=machine,
        options=replace(request.options, world=request.ranks),
        host_bytes=request.host // request.ranks,
        device_bytes=machine.device_bytes or None,
        overhead=overhead,
        blocks=request.blocks,
        workload=workload_of(request),
        drive_bytes=sum(drive.bytes for drive in machine.drives),
    )


def workload_of(request: PlanRequest) -> BatchWorkload:
    """Return the workload of the rank with the largest share of the batch."""
    rows = -(-request.batch // request.ranks)
    return _load(request.model, rows, request.seq, request.options.dtype)


# The following functions are cached, so all plans for one batch share one object and the results
# that are cached in it.


@lru_cache(maxsize=4)
def _shards(model: ModelShape, ranks: int, dtype: str) -> Blocks:
    return RankInfo(world=ranks).shards(layout_of(model, dtype))


@lru_cache(maxsize=4)
def _load(model: ModelShape, rows: int, seq: int, dtype: str) -> BatchWorkload:
    return load_of_shape(model, batch=rows, seq=seq, dtype=dtype)


def fits(request: PlanRequest) -> bool:
    try:
        problem = problem_of(request).rank_problem
        problem.check_drives(check_fits(problem))
    except BudgetError:
        return False
    return True


# -- Changes that make a run fit ------------------------------------------------------------------


def _changes(request: PlanRequest) -> Iterator[str]:
    """Yield, as text, the smallest change of each kind that alone makes the run fit."""
    smaller = largest(lambda n: fits(replace(request, batch=n)), request.batch - 1)
    if smaller >= request.ranks:
        yield f"--batch {smaller}"
    for share in (1.25, 1.5, 2, 3, 4, 8):
        more = int(request.host * share)
        if fits(replace(request, host=more)):
            yield f"--host {format_bytes(more).replace(' ', '')}"
            break
    device = request.machine.device_bytes
    for gib in (12, 16, 24, 32, 48, 80):
        if 0 < device < gib * 2**30:
            bigger = replace(request.machine, device_bytes=gib * 2**30)
            if fits(replace(request, machine=bigger)):
                yield f"a GPU of {gib} GiB"
                break
    if count := _enough_drives(request):
        yield f"{count} drives like the first"


def _enough_drives(request: PlanRequest) -> int:
    """Return the number of drives with which the run fits; 0 if more drives do not help."""
    with suppress(BudgetError):
        plan = check_fits(problem_of(request).rank_problem)
        for count in range(len(request.machine.drives) + 1, MOST_DRIVES + 1):
            more = replace(request, machine=request.machine.with_drives(count))
            with suppress(SpaceError):
                problem_of(more).rank_problem.check_drives(plan)
                return count
    return 0


def largest(possible: Callable[[int], bool], limit: int) -> int:
    """Return the largest number from 1 to `limit` for which `possible` is true, or 0.

    If `possible` is true for a number, it must be true for all smaller ones.
    """
    low, high = 0, 1
    while high <= limit and possible(high):
        low, high = high, high * 2
    high = min(high, limit + 1)
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if possible(middle) else (low, middle)
    return low


def largest_batch(request: PlanRequest) -> int:
    most = largest(lambda n: fits(replace(request, batch=n)), LARGEST_BATCH)
    return most if most >= request.ranks else 0


def largest_model(request: PlanRequest, models: list[ModelShape]) -> ModelShape | None:
    """Return the largest of `models` that the requested machine can train, or None."""
    for model in sorted(models, key=lambda m: -m.parameters):
        if fits(replace(request, model=model)):
            return model
    return None


def faster_drives(machine: Profile, factor: float) -> Profile:
    drives = tuple(
        replace(d, read=d.read * factor, write=d.write * factor, mixed=d.mixed * factor)
        for d in machine.drives
    )
    return replace(machine, drives=drives, ssd_limit=machine.ssd_limit * factor)


def without_lane(machine: Profile, lane: str) -> Profile:
    """Return a copy of the machine in which one lane takes almost no time."""
    if lane == "compute":
        faster = tuple((tokens, flops * FASTER) for tokens, flops in machine.compute)
        backward = tuple((tokens, flops * FASTER) for tokens, flops in machine.backward)
        return replace(
            machine, compute=faster, backward=backward, head_flops=machine.head_flops * FASTER
        )
    if lane == "ssd":
        return replace(faster_drives(machine, FASTER), ssd_limit=0.0)
    if lane == BUS:
        return replace(machine, host_rate=0.0)
    if lane == "net":
        return replace(machine, net=machine.net_rate * FASTER)
    field = {"optimizer": "adam", "h2d": "h2d", "d2h": "d2h"}[lane]
    limit = 0.0 if lane in ("h2d", "d2h") else machine.link_limit
    return replace(machine, link_limit=limit, **{field: getattr(machine, field) * FASTER})
