"""`lohan plan` for a model and a machine that need not be here: from shapes, without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

from lohan.errors import BudgetError, ConfigError
from lohan.model.layout import (
    FROZEN,
    GROUP_ALIGN,
    RESIDENT,
    Blocks,
    Group,
    Ranks,
    Site,
    TensorSpec,
)
from lohan.model.machine import Profile
from lohan.model.plan import BatchWorkload, Footprint, Plan, SiteFootprint
from lohan.model.shapes import BlockShape, ModelShape
from lohan.model.state import FLOAT, MODES, packed_numel
from lohan.optim import DEFAULT_KIND
from lohan.planner.forecast import BUS, Forecast, forecast, most_clipped, on_machine
from lohan.planner.memory import card_overhead
from lohan.planner.planner import PlanOptions, check_fits, plan_with_forecast
from lohan.planner.wear import Alternative, alternatives
from lohan.schedule.actions import Schedule, ScheduleSpec
from lohan.schedule.steps import ExecutionOrder, planned_order, spec_of, steady_step
from lohan.util.units import align_up, counted, format_bytes

# -- A model shape as the planner sees a real model ------------------------------------------------
#
# Groups, sites, and the footprint of a batch.


EMBEDDING, HEAD = "embedding", "head"


def layout_of(model: ModelShape, mode: str = "bf16") -> Blocks:
    """Embedding, blocks and head as groups and sites; a tied head is a second site of the
    embedding. Under adapters, all but these is frozen, and blocks may be packed for a mode."""
    rest = FROZEN if model.lora else ""
    groups = [_group(EMBEDDING + rest, model.embedding_parameters)]
    sites = [Site(EMBEDDING, (), (EMBEDDING + rest,))]
    for number, block in enumerate(model.blocks):
        key = _block(number)
        own = [_group(key, block.parameters)]
        if model.lora:
            frozen = _packed(model, block, mode) if model.base else ()
            size = frozen[0].numel if frozen else block.parameters
            own = [_group(key, block.adapter_parameters(model.lora))]
            own.append(_group(key + FROZEN, size, frozen))
        groups += own
        sites.append(Site(key, (), tuple(group.key for group in own)))
    if model.head_parameters:
        groups.append(_group(HEAD + rest, model.head_parameters))
    if model.vocabulary:
        sites.append(Site(HEAD, (), (_head_group(model),)))
    if model.resident_parameters:
        groups.append(_group(RESIDENT + rest, model.resident_parameters))
    return Blocks(tuple(g for g in groups if g.numel), tuple(_real(sites, groups)), ())


def _packed(model: ModelShape, block: BlockShape, mode: str) -> tuple[TensorSpec, ...]:
    """All weights of a block as if they were one matrix; what else it has is little."""
    shape = (-(-block.parameters // model.hidden), model.hidden)
    numel = packed_numel(model.base, shape, MODES[mode].weight_bytes)
    return (TensorSpec("weights", shape, 0, numel, True, False, packing=model.base),)


def _head_group(model: ModelShape) -> str:
    return (HEAD if model.head_parameters else EMBEDDING) + (FROZEN if model.lora else "")


def load_of_shape(
    model: ModelShape, *, batch: int, seq: int, mode: str, tiles: int = 0
) -> BatchWorkload:
    """What a batch asks for, from the shape alone; `tiles`: as in Plan."""
    width = MODES[mode].weight_bytes
    seq = model.sample_tokens or seq
    blocks = [block.in_tiles() if tiles else block for block in model.blocks]

    def footprint(micro_batch: int) -> Footprint:
        found = {EMBEDDING: SiteFootprint(8 * batch * seq, 0)} if model.embedding_parameters else {}
        for number, block in enumerate(blocks):
            each = micro_batch * seq * width
            # Activations of one tile, and sums of weight gradients with what a tile adds to them.
            tile = block.tile_elements * min(tiles, micro_batch * seq) * width
            trained = block.adapter_parameters(model.lora) if model.lora else block.parameters
            sums = trained * (FLOAT + width) if tiles else 0
            # The first gradients come while most activations are still there.
            first = trained * width / 3 if micro_batch >= batch else 0
            inputs = int(block.input_elements * batch * seq * width)
            found[_block(number)] = SiteFootprint(
                inputs,
                int(block.work(model.temporaries) * each + first)
                + int(tile * (1 + model.temporaries) + sums),
                int(block.widest * each + tile),
                inputs,
            )
        return Footprint(found)

    return BatchWorkload(
        batch=batch, seq=seq, measure=footprint, hidden=model.hidden, vocabulary=model.vocabulary,
        head_group=_head_group(model) if model.vocabulary else None,
        text=not model.sample_tokens,
        shapes={
            _block(number): replace(block, flops=block.flops + 2 * model.lora * block.linear_ends)
            for number, block in enumerate(blocks)
        },
        tiles=tiles,
        tiled=lambda tokens: load_of_shape(model, batch=batch, seq=seq, mode=mode, tiles=tokens),
    )  # fmt: skip


def _block(number: int) -> str:
    return f"block.{number}"


def _group(key: str, parameters: int, tensors: tuple[TensorSpec, ...] = ()) -> Group:
    return Group(key, tensors, align_up(parameters, GROUP_ALIGN))


def _real(sites: list[Site], groups: list[Group]) -> list[Site]:
    there = {group.key for group in groups if group.numel}
    return [site for site in sites if site.groups[0] in there]


# -- Machine plan ---------------------------------------------------------------------------------


T = TypeVar("T")
FASTER = 1e3  # a lane that is out of the way
LARGEST_BATCH = 2**16


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What is asked: a model, a machine and the batch; `host`: bytes of main memory. The GPUs of
    the machine share all three: each has a rank of the run, and all of them the same plan."""

    model: ModelShape
    machine: Profile
    options: PlanOptions
    batch: int
    seq: int
    host: int

    @property
    def tokens(self) -> int:
        return self.batch * (self.model.sample_tokens or self.seq)

    @property
    def ranks(self) -> int:
        return self.machine.gpus

    @property
    def rank_host(self) -> int:
        """Main memory of each rank."""
        return self.host // self.ranks

    @property
    def blocks(self) -> Blocks:
        """Each rank's piece of every group."""
        return _shards(self.model, self.ranks, self.options.mode)


@dataclass(frozen=True, kw_only=True)
class MachinePlan:
    """The answer, where the run fits: a plan and what it will do, for a model of known shapes or
    one that was traced. Memory, blocks and workload are those of each rank."""

    model: str
    parameters: int
    batch: int  # of all ranks
    machine: Profile | None  # None: it was not measured
    options: PlanOptions
    host_bytes: int
    device_bytes: int | None  # of a device with a memory of its own
    blocks: Blocks
    workload: BatchWorkload
    plan: Plan
    order: ExecutionOrder  # of a step
    forecast: Forecast | None  # where the machine is known
    without_binding_s: float = 0.0  # a step if the binding lane cost nothing
    usual: MachinePlan | None = None  # with AdamW and fp32 moments, where that is another and fits
    scarce: bool = False  # the drives have no room for activations that would be worth it
    traced: bool = False  # not from shapes alone
    clipped: Forecast | None = None  # if every step were clipped, where that is another
    instead: tuple[Alternative, ...] = ()  # options with which less is written

    @property
    def step_s(self) -> float:
        assert self.forecast is not None
        return self.forecast.step_s

    @property
    def spec(self) -> ScheduleSpec:
        return spec_of(self.blocks, self.plan, durable=self.options.durability == "step")

    @property
    def phases(self) -> dict[str, Schedule]:
        """Of a steady step."""
        return steady_step(self.spec, self.order)

    @property
    def peak_bytes(self) -> dict[str, int]:
        """Of each GPU, and of the machine's memory and drives."""
        ranks = {"device": 1, "host": self.plan.world, "ssd": self.plan.world}
        return {tier: count * self.plan.tier_bytes(tier) for tier, count in ranks.items()}


class SpaceError(BudgetError):
    """The drives are too small."""


def plan_for_machine(request: PlanRequest) -> MachinePlan:
    """The plan and what it will do, or a BudgetError that names every change that would help."""
    _check_ranks(request)
    try:
        plan, known, scarce = _within_drives(request)
    except BudgetError as refused:
        changes = [text for text in _changes(request) if text]
        hint = "; fits with " + ", or ".join(changes) if changes else ""
        raise type(refused)(f"{refused}{hint}") from None
    usual = None
    if request.options.kind != DEFAULT_KIND:
        other = replace(request, options=replace(request.options, kind=DEFAULT_KIND))
        with suppress(BudgetError):
            usual = _answer(other, *_within_drives(other)[:2])
    made = _answer(request, plan, known)
    return replace(with_binding_lane(made), usual=usual, scarce=scarce)


def forecasts(
    profile: Profile, blocks: Blocks, workload: BatchWorkload, plan: Plan, *, durable: bool,
    tokens: int, known: Forecast | None = None,
) -> tuple[Forecast, Forecast | None]:  # fmt: skip
    """Of steps of which none is clipped and, where that is another, of which each is; `tokens`: of
    all ranks; `known`: the first of them, if it was made before, maybe roughly."""
    if known is None or known.work.joined:
        known = forecast(profile, blocks, workload, plan, durable=durable)
    made = known
    clipped = None
    if plan.speculates(durable=durable):
        clipped = forecast(profile, blocks, workload, plan, durable=durable, clipped=True)
        clipped = replace(clipped, tokens=tokens)
    return replace(made, tokens=tokens), clipped


def _answer(request: PlanRequest, plan: Plan, known: Forecast | None) -> MachinePlan:
    workload = workload_of(request)
    durable = request.options.durability == "step"
    made, clipped = forecasts(
        request.machine.share(request.ranks), request.blocks, workload, plan, durable=durable,
        tokens=request.tokens, known=known,
    )  # fmt: skip
    if clipped is not None:
        share = most_clipped(request.machine.share(request.ranks), made, clipped)
        plan = replace(plan, most_clipped=share)
    return MachinePlan(
        model=request.model.name, parameters=request.model.parameters, batch=request.batch,
        machine=request.machine, options=request.options, host_bytes=request.rank_host,
        device_bytes=request.machine.device_bytes or None, blocks=request.blocks,
        workload=workload, plan=plan, order=planned_order(request.blocks, plan, durable=durable),
        forecast=made, clipped=clipped,
    )  # fmt: skip


def with_binding_lane(made: MachinePlan) -> MachinePlan:
    """With what the busiest lane costs, where the machine is known."""
    if made.forecast is None or made.machine is None:
        return made
    faster = without_lane(made.machine, made.forecast.binding).share(made.plan.world)
    return replace(made, without_binding_s=on_machine(made.forecast, faster).step_s)


def with_alternatives(request: PlanRequest, made: MachinePlan) -> MachinePlan:
    """With what other options would write, each planned as `plan_for_machine` does it."""
    assert made.forecast is not None
    machine = request.machine.share(request.ranks)

    def planned(options: PlanOptions, host: int) -> Forecast:
        asked = replace(request, options=options, host=host)
        plan, known, _ = _within_drives(asked)
        durable = options.durability == "step"
        return known or forecast(machine, asked.blocks, workload_of(asked), plan, durable=durable)

    found = alternatives(made.forecast, request.options, request.host, planned)
    return replace(made, instead=tuple(found))


def _check_ranks(request: PlanRequest) -> None:
    ranks, machine = request.ranks, request.machine
    if ranks > 1 and not machine.has_link:
        raise ConfigError(f"--gpus {ranks}: {machine.name} has no GPU; take a machine with some")
    if request.batch < ranks:
        raise ConfigError(
            f"--batch {request.batch} is less than one row for each of {ranks} GPUs; raise it to "
            f"{ranks}, or lower --gpus"
        )


def _within_drives(request: PlanRequest) -> tuple[Plan, Forecast | None, bool]:
    """The best plan or, where the drives have no room for its activations, the best without; what
    it does, where that was found on the way; and whether the drives are too small for the best."""
    plan, known = _sized(request, plan_with_forecast)
    try:
        _check_ssd(request, plan)
        return plan, known, False
    except SpaceError:
        if request.options.activations != "holistic" or not plan.moved_out:
            raise
    least = replace(request.options, activations="recompute")
    plan, known = _sized(replace(request, options=least), plan_with_forecast)
    _check_ssd(request, plan)
    return plan, known, True


def _sized(request: PlanRequest, size: Callable[..., T]) -> T:
    if not request.machine.drives:
        raise ConfigError(f"{request.machine.name} has no drive; take a machine with one")
    return size(
        request.blocks,
        replace(request.options, world=request.ranks, device_overhead=_overhead(request)),
        host_bytes=request.rank_host, workload=workload_of(request),
        profile=request.machine.share(request.ranks),
    )  # fmt: skip


def _overhead(request: PlanRequest) -> tuple[tuple[str, int], ...]:
    """As in a run on such a card."""
    machine = request.machine
    if not machine.has_link:
        return ()
    return tuple(card_overhead(machine.device_bytes, request.rank_host).items())


def workload_of(request: PlanRequest) -> BatchWorkload:
    """What the largest share of the batch asks of a rank."""
    rows = -(-request.batch // request.ranks)
    return _load(request.model, rows, request.seq, request.options.mode)


# One object for all plans of a batch, which keeps what was found out about it.


@lru_cache(maxsize=4)
def _shards(model: ModelShape, ranks: int, mode: str) -> Blocks:
    return Ranks(world=ranks).shards(layout_of(model, mode))


@lru_cache(maxsize=4)
def _load(model: ModelShape, rows: int, seq: int, mode: str) -> BatchWorkload:
    return load_of_shape(model, batch=rows, seq=seq, mode=mode)


def fits(request: PlanRequest) -> bool:
    try:
        _check_ssd(request, _sized(request, check_fits))
    except BudgetError:
        return False
    return True


# -- what would help ------------------------------------------------------------------------------


def _changes(request: PlanRequest) -> Iterator[str]:
    """The nearest change of each kind that makes the run fit, alone."""
    smaller = largest(lambda n: fits(replace(request, batch=n)), request.batch - 1)
    if smaller >= request.ranks:
        yield f"--batch {smaller}"
    for share in (1.25, 1.5, 2, 3, 4, 8):
        more = int(request.host * share)
        if fits(replace(request, host=more)):
            yield f"--host {format_bytes(more).replace(' ', '')}"
            break
    once = replace(request.options, durability="checkpoint")
    if request.options.durability != "checkpoint" and fits(replace(request, options=once)):
        yield "--durability checkpoint"
    device = request.machine.device_bytes
    for gib in (12, 16, 24, 32, 48, 80):
        if 0 < device < gib * 2**30:
            bigger = replace(request.machine, device_bytes=gib * 2**30)
            if fits(replace(request, machine=bigger)):
                yield f"a GPU of {gib} GiB"
                break
    for count in range(len(request.machine.drives) + 1, 25):
        if fits(replace(request, machine=request.machine.with_drives(count))):
            yield f"{count} drives like the first"
            break


def _check_ssd(request: PlanRequest, plan: Plan) -> None:
    room = sum(drive.bytes for drive in request.machine.drives)
    needed = request.ranks * plan.tier_bytes("ssd")
    if room and needed > room:
        drives = counted(len(request.machine.drives), "drive")
        raise SpaceError(
            f"SSD space too small: the run needs {format_bytes(needed)}, and {drives} can hold "
            f"{format_bytes(room)}"
        )


def largest(possible: Callable[[int], bool], limit: int) -> int:
    """The largest number from 1 to `limit` for which something is possible that gets harder with
    it; 0 if none."""
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
    """The largest of these that fits."""
    for model in sorted(models, key=lambda m: -m.parameters):
        if fits(replace(request, model=model)):
            return model
    return None


def without_lane(machine: Profile, lane: str) -> Profile:
    """The same machine with one lane out of the way."""
    if lane == "gpu":
        faster = tuple((tokens, flops * FASTER) for tokens, flops in machine.compute)
        back = tuple((tokens, flops * FASTER) for tokens, flops in machine.backward)
        return replace(
            machine, compute=faster, backward=back, head_flops=machine.head_flops * FASTER
        )
    if lane == "ssd":
        drives = tuple(
            replace(d, read=d.read * FASTER, write=d.write * FASTER, mixed=d.mixed * FASTER)
            for d in machine.drives
        )
        return replace(machine, drives=drives, ssd_limit=0.0)
    if lane == BUS:
        return replace(machine, host_rate=0.0)
    if lane == "net":
        return replace(machine, net=machine.net_rate * FASTER)
    field = {"cpu": "adam", "h2d": "h2d", "d2h": "d2h"}[lane]
    limit = 0.0 if lane in ("h2d", "d2h") else machine.link_limit
    return replace(machine, link_limit=limit, **{field: getattr(machine, field) * FASTER})
