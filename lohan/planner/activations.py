"""The choice of activations to keep, offload or recompute, and of updates to defer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from lohan.config import ACTIVATIONS
from lohan.errors import ConfigError, LohanError
from lohan.model.machine import Profile
from lohan.model.plan import Kept, Plan
from lohan.model.shapes import ModelShape
from lohan.model.workload import BatchWorkload
from lohan.planner.host_memory import Use, share_out
from lohan.planner.memory import INPUTS, MemoryModel
from lohan.schedule.placement import UpdateOptions, needs_all_gradients
from lohan.schedule.simulate import (
    DEQUANTISING,
    SUM_BYTES,
    TOUCHED,
    SiteWork,
    Traffic,
    activation_s,
    step_s,
)

# -- Which activations to keep and which updates to defer ------------------------------------------
#
# The price of a choice is its step time, which the closed form estimates.
#
# Classes are kept in the order of their offloading benefit (FLOPs saved per byte). The time of
# recomputation, and with it the step time, is therefore a convex function of the bytes kept, as the
# paper argues. Unlike in the paper, the price includes what the kept bytes displace: host memory
# that holds activations cannot hold weights, state or gradients, which then use the SSD lane.


SHARES = tuple(i / 8 for i in range(9))  # shares of the updates that may run in the next forward
HEAD_WORK = "(head)"  # the key of the head, whose site may share the group of the embedding
EQUAL_FACTOR = 1.00003  # choices within this factor of the best time count as equally fast
PARTS = 8  # number of increments in which a class is added to all blocks of a model


@dataclass(frozen=True)
class Choice:
    """A choice of kept activations and deferred updates, with the resulting step time."""

    kept: Kept  # the blocks that keep each class, as in `Plan.kept`
    deferred: float  # share of the updates that wait for the next forward
    step_s: float
    written: float  # bytes written to SSD per step


def choose(
    profile: Profile,
    memory: MemoryModel,
    workload: BatchWorkload,
    plan: Plan,
    *,
    limit: int,
    minimise: str = "time",
    kept: Kept | None = None,
    spill_all: bool = False,
) -> Choice:
    """Return the best choice over all levels of activations and all shares of deferred updates.

    If `kept` is given, only the share is chosen. Of equally fast choices, the one that keeps the
    fewest bytes is returned. `limit` is the budget of host memory in bytes, and `minimise` is as in
    PlanOptions. With `spill_all`, all held gradients go to SSD.
    """
    pricer = _Pricer(profile, memory, workload, plan, limit, spill_all)
    shares = SHARES if plan.update_mode == "balanced" and plan.overlap else (0.0,)
    if needs_all_gradients(plan):
        shares = (1.0,) if plan.overlap and plan.update_mode != "serial" else (0.0,)
    candidates: list[Choice] = []
    for level in levels(memory, workload) if kept is None else [kept]:
        priced = pricer.prices(level, shares)
        if not priced:  # The device cannot hold this level, and later levels need more memory.
            break
        candidates += priced
    if not candidates:
        candidates = pricer.prices((), shares)
    if minimise == "writes":
        return min(candidates, key=lambda c: (round(c.written, -6), c.step_s))
    if minimise == "cost":
        per_s, per_byte = profile.usd_per_s, plan.world * profile.usd_per_written_byte
        return min(candidates, key=lambda c: c.step_s * per_s + c.written * per_byte)
    best = min(candidates, key=lambda c: c.step_s)
    return next(c for c in candidates if c.step_s <= best.step_s * EQUAL_FACTOR)


def levels(memory: MemoryModel, workload: BatchWorkload) -> Iterator[Kept]:
    """Yield levels of kept activations, from block inputs only to everything.

    Classes are added in the order of their benefit, each for a growing number of blocks.
    """
    count = len(memory.sizes.names)
    # The last block is used, because the input of the first one may need no gradient.
    shape = workload.shapes[memory.sizes.names[-1]]
    kept: list[tuple[str, int]] = []
    yield ()
    for part in shape.by_benefit(workload.seq):
        for blocks in sorted({-(-count * i // PARTS) for i in range(1, PARTS + 1)}):
            yield (*kept, (part.name, blocks))
        kept.append((part.name, count))


class _Pricer:
    def __init__(
        self,
        profile: Profile,
        memory: MemoryModel,
        workload: BatchWorkload,
        plan: Plan,
        limit: int,
        spill_all: bool,
    ) -> None:
        self.profile, self.memory, self.workload, self.plan = profile, memory, workload, plan
        self.spill_all = spill_all
        # True if cached weights and state are written in every step.
        self.writes_cached = plan.commit.every_step
        base = replace(plan, kept=(), spilled_sites=())
        # Host memory for activations, waiting gradients, and cached weights and state.
        self.free_bytes = limit - memory.rest_bytes(base)
        self.parameters = float(sum(group.numel for group in memory.moving))
        self.trained = float(sum(group.numel for group in memory.trained))

    def prices(self, kept: Kept, shares: Sequence[float]) -> list[Choice]:
        """Return a choice for each share of deferred updates.

        The list is empty if the device cannot hold the activations in `kept`.
        """
        base = replace(self.plan, kept=kept, spilled_sites=())
        plan = self.memory.relieved(base, self.profile.device_bytes)
        if plan is None:
            return []
        activations = float(sum(self.memory.activations(plan).values()))
        free, out = max(0.0, self.free_bytes - activations), max(0.0, activations - self.free_bytes)
        cache, key = self.memory.priced, (self.profile, kept, needs_all_gradients(plan))
        compute = cache[key] = cache.get(key) or self._compute(plan)
        choices = []
        for share in shares:
            traffic = self._traffic(compute, share, free, out, activations)
            written = traffic.state_written + traffic.out + traffic.held
            choices.append(Choice(kept, traffic.deferred, step_s(self.profile, traffic), written))
        return choices

    def _traffic(
        self,
        compute: tuple[float, float, float],
        share: float,
        free: float,
        out: float,
        kept: float,
    ) -> Traffic:
        """Return the bytes that a step moves over each lane if it defers this share of its updates.

        `compute` are the seconds of forward, backward and head. `free` are the bytes of host memory
        for caches and waiting gradients, `out` the bytes of activations that go to SSD, and `kept`
        those that cross the link.
        """
        fmt, n, trained, plan = self.memory.state_format, self.parameters, self.trained, self.plan
        width = self.memory.gradient_width
        waiting = trained * width * share
        uses = share_out(
            free,
            {
                Use.GRADIENTS: 0.0 if self.spill_all else waiting,
                Use.WEIGHTS: n * fmt.weight_bytes,
                Use.STATE: trained * fmt.state_bytes,
            },
        )
        weights, state = uses[Use.WEIGHTS], uses[Use.STATE]
        spilled = waiting - uses[Use.GRADIENTS] if needs_all_gradients(plan) else 0.0
        in_memory = replace(plan, spilled_gradients=plan.spilled_gradients if spilled else ())
        if UpdateOptions.of(in_memory).can_speculate:
            # The price is that of a step that is not clipped: its updates run in backward.
            share, spilled = 0.0, 0.0
        if not needs_all_gradients(plan) and waiting > free:
            share = free / (trained * width)
        read_again = n * fmt.weight_bytes - weights
        written = trained * (fmt.state_bytes + fmt.weight_bytes)
        unwritten = 0.0 if self.writes_cached else state + weights * trained / max(n, 1.0)
        return Traffic(
            forward_s=compute[0],
            backward_s=compute[1],
            head_s=compute[2],
            weights=n * fmt.weight_bytes,
            weights_read=read_again,
            kept=kept,
            out=out,
            gradients=trained * width,
            state_read=trained * fmt.state_bytes - state,
            state_written=written - unwritten,
            held=spilled,
            updated=trained * fmt.update_cost,
            deferred=share,
            rounding_s=trained * fmt.rounding_s,
            update_bytes=trained * (2 * (fmt.weight_bytes + fmt.state_bytes) + width),
            alone=plan.device_grads == 1,
            gathered=(plan.world - 1) * n * fmt.weight_bytes,
            reduced=(plan.world - 1) * trained * width,
        )

    def _compute(self, plan: Plan) -> tuple[float, float, float]:
        """Return the seconds of forward, of backward, and of the head, which is part of forward."""
        memory, workload = self.memory, self.workload
        counts = Counter(
            zip(
                memory.sizes.kind.values(),
                memory.sizes.classes(plan.kept),
                map(memory.shares.__getitem__, memory.sizes.names),
                map(memory.unpacked.__getitem__, memory.sizes.names),
                strict=True,
            )
        )
        first = {kind: name for name, kind in reversed(memory.sizes.kind.items())}
        forward_s = backward_s = head_s = 0.0
        for (kind, classes, share, unpacked), count in counts.items():
            work = _block_work(
                memory, workload, plan, first[kind], classes, trained=share, unpacked=unpacked
            )
            # Activations of at most two blocks are copied at a time. A block whose copy takes
            # longer than its compute delays the next block, however little the others copy.
            copy_s = self._copy_s(first[kind], classes)
            forward_s += count * max(work.forward_s(self.profile), copy_s[0])
            backward_s += count * max(work.backward_s(self.profile), copy_s[1])
        for work in _other_works(memory, workload, plan).values():
            forward_s += work.forward_s(self.profile)
            head_s += work.forward_s(self.profile) if work.head else 0.0
        return forward_s, backward_s, head_s

    def _copy_s(self, name: str, classes: frozenset[str]) -> tuple[float, float]:
        """Return the seconds to copy these classes of one block to host memory, and back."""
        if not self.profile.has_link:
            return 0.0, 0.0
        size = self.memory.sizes.bytes_with(name, classes)
        return size / self.profile.d2h, size / self.profile.h2d


def site_works(memory: MemoryModel, workload: BatchWorkload, plan: Plan) -> dict[str, SiteWork]:
    """Return the work (compute and activation bytes) of all sites that have any, by site name."""
    moved, staying = set(plan.spilled_sites), set(plan.staying)
    works: dict[str, SiteWork] = {}
    cache: dict[tuple[object, ...], SiteWork] = {}
    for name in memory.sizes.names:
        classes = memory.sizes.classes_of(plan.kept, name)
        size, share = float(memory.site_bytes(plan, name)), memory.shares[name]
        unpacked = memory.unpacked[name]
        key = (
            memory.sizes.kind[name],
            classes,
            size,
            share,
            unpacked,
            name in moved,
            name in staying,
        )
        if key not in cache:
            cache[key] = replace(
                _block_work(
                    memory, workload, plan, name, classes, trained=share, unpacked=unpacked
                ),
                kept_bytes=0.0 if name in staying else size,
                out_bytes=size if name in moved else 0.0,
            )
        works[name] = cache[key]
    return works | _other_works(memory, workload, plan)


def _block_work(
    memory: MemoryModel,
    workload: BatchWorkload,
    plan: Plan,
    name: str,
    classes: frozenset[str],
    *,
    trained: float,
    unpacked: int,
) -> SiteWork:
    """Return the work of one block that keeps the activations in `classes`.

    If the block is computed in tiles, its matrix products are smaller, and every tile adds to the
    sums of weight gradients, as every slice does.
    """
    shape, tiles = workload.shapes[name], workload.tiles
    tokens = float((memory.micro_batch or workload.batch) * workload.seq)
    repeated = sum(part.elements for part in shape.activations if part.name not in classes)
    repeated, all_elements = repeated + shape.tile_elements, shape.elements + shape.tile_elements
    sums = memory.slices if memory.slices > 1 else 0.0
    if tiles and shape.tile_flops:
        share = shape.tile_flops / shape.flops  # The share of the weights equals that of FLOPs.
        sums += share * workload.tokens / tiles
        tokens = min(tokens, tiles)
    gradients = shape.parameters * trained
    return SiteWork(
        trained=trained,
        tokens=tokens,
        slices=memory.slices,
        summed_bytes=gradients * (SUM_BYTES * sums + _norm_bytes(memory, plan)),
        forward_flops=shape.flops_at(workload.seq) * workload.tokens,
        recompute_flops=shape.recompute_flops_at(workload.seq, classes) * workload.tokens,
        forward_bytes=TOUCHED * workload.tokens * all_elements,
        recompute_bytes=TOUCHED * workload.tokens * repeated,
        dequantised_bytes=DEQUANTISING * unpacked,
    )


def _norm_bytes(memory: MemoryModel, plan: Plan) -> int:
    """Return the bytes of device memory that the norm reads for each element of a gradient.

    The result is 0 on a CPU, because it sums the squares right after computing a gradient, and for
    several ranks, because the net lane sums the squares.
    """
    on_device = memory.has_own_memory and plan.world == 1
    return memory.gradient_width if needs_all_gradients(plan) and on_device else 0


def _other_works(memory: MemoryModel, workload: BatchWorkload, plan: Plan) -> dict[str, SiteWork]:
    """Return the work of the sites without a backward, by name, and of the head."""
    micro = (memory.micro_batch or workload.batch) * workload.seq
    works = {
        name: SiteWork(
            forward_flops=workload.shapes[name].flops_at(workload.seq) * workload.tokens,
            recompute_flops=0.0,
            tokens=micro,
            slices=memory.slices,
            no_backward=True,
            forward_bytes=TOUCHED
            * workload.tokens
            * (workload.shapes[name].elements + workload.shapes[name].tile_elements),
        )
        for name in memory.sizes.no_backward
    }
    if memory.head is not None:
        share, parts = memory.shares[memory.head.name], -(-workload.tokens // plan.head_tokens)
        gradients = share * sum(memory.blocks.by_key[key].numel for key in memory.head.groups)
        sums = SUM_BYTES * parts if parts > 1 else 0
        works[HEAD_WORK] = SiteWork(
            forward_flops=workload.head_flops,
            recompute_flops=0.0,
            tokens=plan.head_tokens,
            head=True,
            at_once=True,
            trained=share,
            summed_bytes=gradients * (sums + _norm_bytes(memory, plan)),
        )
    return works


# -- Activation policies ---------------------------------------------------------------------------
#
# The paper's Algorithm 1 and the policies it is compared with. The simulator applies them to model
# shapes, a run to its traced blocks.
#
# All of them keep the block inputs first and then add classes of activations. They differ in the
# order and in the criterion by which they stop. Checkmate solves a small integer program.


WIDTH = 2  # bytes of an element; the simulated systems compute in 16 bits


@dataclass(frozen=True, kw_only=True)
class Step:
    """The inputs of a policy for one step of one GPU: the paper's symbols, with compute in seconds.

    All amounts are in bytes. Without a link, the device uses host memory, and keeping activations
    needs no transfer.
    """

    profile: Profile
    forward_s: float
    backward_s: float  # without recomputation
    weights: float  # over the link, in each phase
    gradients: float  # over the link
    weights_read: float  # from SSD, in each phase
    state_read: float  # from SSD, in backward
    state_written: float  # to SSD, in backward
    room: float  # host memory for kept activations of all GPUs (MEM_avail)
    width: int = WIDTH  # bytes of an element
    slices: int = 1  # number of micro-batches

    @property
    def link_bytes(self) -> float:
        """The bytes that the link can move from the device while forward computes."""
        p = self.profile
        return self.forward_s * p.d2h if p.has_link else float("inf")

    def spilled(self, kept: float) -> float:
        """Return the bytes that all GPUs together spill to SSD if each GPU keeps `kept` bytes."""
        return max(0.0, self.profile.gpus * kept - self.room)

    def iteration_s(self, kept: float, recompute_s: float) -> float:
        """Return the step time, given the bytes kept and the seconds of recomputation."""
        p, out = self.profile, self.spilled(kept)
        ssd_s = _seconds_at(self.weights_read, p.ssd_read) + _seconds_at(out, p.ssd_write)
        forward_s = max(self.forward_s, ssd_s)
        ssd_s = _seconds_at(self.weights_read + self.state_read + out, p.ssd_read)
        ssd_s += _seconds_at(self.state_written, p.ssd_write)
        backward_s = max(self.backward_s + recompute_s, ssd_s)
        if p.has_link:
            forward_s = max(forward_s, kept / p.d2h, self.weights / p.h2d)
            backward_s = max(backward_s, self.gradients / p.d2h, (self.weights + kept) / p.h2d)
        return forward_s + backward_s


@dataclass(frozen=True)
class Candidate:
    """One class of activations of one block, which a policy may keep or recompute."""

    block: int
    name: str
    bytes: float
    recompute_s: float
    benefit: float  # FLOPs saved per byte


@dataclass(frozen=True)
class PolicyChoice:
    """The classes kept in each block, their bytes including block inputs, and T_iter."""

    classes: tuple[frozenset[str], ...]
    bytes: float
    iteration_s: float


def input_bytes(model: ModelShape, tokens: float, width: int = WIDTH) -> float:
    return width * tokens * sum(block.input_elements for block in model.blocks)


def candidates(step: Step, model: ModelShape, *, tokens: float, seq: int) -> list[Candidate]:
    """Return all classes of all blocks that a policy may keep, largest benefit first.

    Within a class, the last block comes first, because its backward runs first.
    """
    profile, width = step.profile, step.width
    rate = profile.flops_at(tokens / step.slices)
    classes = [
        Candidate(
            number,
            part.name,
            width * tokens * part.elements,
            tokens * part.flops_at(seq) / rate
            + activation_s(profile, TOUCHED * tokens * part.elements),
            part.benefit_at(seq) / width,
        )
        for number, block in enumerate(model.blocks)
        for part in block.activations
    ]
    return sorted(classes, key=lambda one: (-one.benefit, one.name, -one.block))


@dataclass(frozen=True)
class _Totals:
    """The bytes kept, and the seconds that result, if some of the candidates are kept."""

    bytes: float
    recompute_s: float
    iteration_s: float


# Decides whether a further candidate is kept, given the totals without it and with it.
GoOn = Callable[[_Totals, _Totals], bool]


def algorithm1(step: Step, model: ModelShape, *, tokens: float, seq: int) -> PolicyChoice:
    """Return the paper's choice: block inputs, then classes by benefit while T_iter decreases."""

    def falls(before: _Totals, now: _Totals) -> bool:
        return now.iteration_s < before.iteration_s

    return _choose(step, model, tokens, seq, falls)


def at_most(step: Step, model: ModelShape, *, tokens: float, seq: int, most: float) -> PolicyChoice:
    """Return the choice of block inputs and then classes by benefit, up to `most` bytes in all."""
    return _choose(step, model, tokens, seq, lambda _, now: now.bytes <= most)


def static(step: Step, model: ModelShape, *, tokens: float, seq: int) -> PolicyChoice:
    """Return the choice that keeps only block inputs."""
    return at_most(step, model, tokens=tokens, seq=seq, most=0.0)


def capuchin(step: Step, model: ModelShape, *, tokens: float, seq: int) -> PolicyChoice:
    """Return the choice of Capuchin, which keeps the tensors with the longest time until reuse.

    It therefore keeps all classes of the first block, then those of the second, and so on, as far
    as host memory holds them and the link moves them while forward computes. It ignores other
    transfers over the link.
    """
    most = min(step.link_bytes, step.room / step.profile.gpus)
    return _choose(
        step, model, tokens, seq, lambda _, now: now.bytes <= most, order=lambda one: one.block
    )


def checkmate(step: Step, model: ModelShape, *, tokens: float, seq: int) -> PolicyChoice:
    """Return the choice of Checkmate: the least recomputation that host memory allows.

    It ignores the cost of transfers. An integer program determines how many candidates of each kind
    are kept.
    """
    classes = candidates(step, model, tokens=tokens, seq=seq)
    start = _start(step, model, classes, tokens)
    equal_classes = groupby(classes, key=lambda c: (c.name, c.bytes, c.recompute_s))
    kinds = [list(kind) for _, kind in equal_classes]
    counts = _least_recompute(kinds, step.room / step.profile.gpus - start.bytes)
    chosen = [one for kind, count in zip(kinds, counts, strict=True) for one in kind[:count]]
    *_, end = start, *_walk(step, start, chosen)
    return _kept(model, chosen, end)


def _least_recompute(kinds: Sequence[Sequence[Candidate]], room: float) -> list[int]:
    """Return how many candidates of each kind to keep in `room` bytes of host memory.

    This choice saves the most seconds of recomputation.
    """
    if not kinds or room < min(kind[0].bytes for kind in kinds):
        return [0] * len(kinds)
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError:
        raise LohanError(
            "activations checkmate: its integer program is solved by scipy, which is not "
            "installed; `pip install scipy`, or choose another policy"
        ) from None
    whole_s = sum(kind[0].recompute_s * len(kind) for kind in kinds) or 1.0
    solved = milp(
        [-kind[0].recompute_s / whole_s for kind in kinds],
        integrality=[1] * len(kinds),
        bounds=Bounds(0, [len(kind) for kind in kinds]),
        constraints=LinearConstraint([[kind[0].bytes / room for kind in kinds]], ub=1.0),
    )
    return [round(count) for count in solved.x]


def g10(step: Step, model: ModelShape, *, tokens: float, seq: int) -> PolicyChoice:
    """Return the choice of G10, which keeps everything."""
    return at_most(step, model, tokens=tokens, seq=seq, most=float("inf"))


CHOOSERS: dict[str, Callable[..., PolicyChoice]] = {
    "holistic": algorithm1,
    "static": static,
    "capuchin": capuchin,
    "checkmate": checkmate,
    "g10": g10,
}
HOST_ONLY = ("static", "capuchin", "checkmate")  # policies that do not use the SSD
# Checkmate reserves memory for a tensor and for its recomputed copy at the same time.
INPUT_COPIES = {"checkmate": 2}


def choose_by_policy(
    name: str, step: Step, model: ModelShape, *, tokens: float, seq: int
) -> PolicyChoice:
    if name not in CHOOSERS:
        raise ConfigError(f"{name!r} is not an activation policy; they are {', '.join(CHOOSERS)}")
    return CHOOSERS[name](step, model, tokens=tokens, seq=seq)


def _choose(
    step: Step,
    model: ModelShape,
    tokens: float,
    seq: int,
    go_on: GoOn,
    order: Callable[[Candidate], float] | None = None,
) -> PolicyChoice:
    classes = candidates(step, model, tokens=tokens, seq=seq)
    if order is not None:
        classes.sort(key=order)
    before, count = _start(step, model, classes, tokens), 0
    for now in _walk(step, before, classes):
        if not go_on(before, now):
            break
        before, count = now, count + 1
    return _kept(model, classes[:count], before)


def _kept(model: ModelShape, chosen: Sequence[Candidate], totals: _Totals) -> PolicyChoice:
    classes: list[set[str]] = [set() for _ in model.blocks]
    for one in chosen:
        classes[one.block].add(one.name)
    return PolicyChoice(tuple(map(frozenset, classes)), totals.bytes, totals.iteration_s)


def _start(step: Step, model: ModelShape, classes: Sequence[Candidate], tokens: float) -> _Totals:
    kept = input_bytes(model, tokens, step.width)
    recompute_s = sum(one.recompute_s for one in classes)
    return _Totals(kept, recompute_s, step.iteration_s(kept, recompute_s))


def _walk(step: Step, start: _Totals, classes: Sequence[Candidate]) -> Iterator[_Totals]:
    kept, recompute_s = start.bytes, start.recompute_s
    for one in classes:
        kept, recompute_s = kept + one.bytes, max(0.0, recompute_s - one.recompute_s)
        yield _Totals(kept, recompute_s, step.iteration_s(kept, recompute_s))


def curve(step: Step, model: ModelShape, *, tokens: float, seq: int) -> list[tuple[float, float]]:
    """Return points (bytes kept, T_iter), from keeping only block inputs to keeping everything.

    Classes are added in the order of their benefit.
    """
    classes = candidates(step, model, tokens=tokens, seq=seq)
    start = _start(step, model, classes, tokens)
    return [(totals.bytes, totals.iteration_s) for totals in (start, *_walk(step, start, classes))]


def _seconds_at(amount: float, rate: float) -> float:
    if not amount:
        return 0.0
    return amount / rate if rate else float("inf")


# -- Activations kept by a policy that the user selects --------------------------------------------
#
# The policies of the simulator are applied to the blocks of the run and to the host memory that the
# plan leaves.


ALIASES = {"recompute": "static", "inputs": "static", "all": "g10"}
# The substitute for an unknown machine. It has a constant speed and no link, so the choices do not
# depend on the speed.
_ANY = Profile(name="any", device="cpu", compute=((1.0, 1e9),), host_bytes=0, adam=1e9)


def resolve_activation_policy(
    requested: str | Kept,
    memory: MemoryModel,
    workload: BatchWorkload | None,
    plan: Plan,
    *,
    limit: int,
    profile: Profile | None,
) -> Kept | None:
    """Return the classes to keep and their blocks, or None if the planner is to choose them.

    `requested` is the name of a policy, or the classes themselves, which are checked. `plan` is a
    plan without activations; `limit` is the budget of host memory in bytes.
    """
    if isinstance(requested, tuple):
        shapes = workload.shapes.values() if workload is not None else ()
        existing = {part.name for shape in shapes for part in shape.activations}
        if unknown := [name for name, _ in requested if name not in existing]:
            raise ConfigError(
                f"activations: no block of this model keeps {unknown[0]!r}; `lohan plan "
                "--classes` lists the classes of a model folder"
            )
        return requested
    if requested not in ACTIVATIONS:
        raise ConfigError(f"activations: {requested!r}; choose {', '.join(ACTIVATIONS)}")
    if requested == "holistic" or workload is None or not memory.sizes.names:
        return None
    policy = ALIASES.get(requested, requested)
    blocks = tuple(workload.shapes[name] for name in memory.sizes.names)
    model = ModelShape(
        name="traced",
        hidden=workload.hidden,
        vocabulary=workload.vocabulary,
        blocks=blocks,
        embedding_parameters=0,
        head_parameters=0,
    )
    step = _step(policy, model, memory, workload, plan, limit, profile or _ANY)
    chosen = choose_by_policy(policy, step, model, tokens=workload.tokens, seq=workload.seq)
    return by_class(chosen.classes, [part.name for part in blocks[0].by_benefit(workload.seq)])


def by_class(classes: Sequence[frozenset[str]], first: Sequence[str] = ()) -> Kept:
    """Invert a list of the classes that each block keeps into the blocks that keep each class.

    The result begins with the classes in `first`, in that order. A class that all blocks keep is
    given with the number of blocks instead of their list.
    """
    names = dict.fromkeys([*first, *(name for kept in classes for name in sorted(kept))])
    blocks_of = {name: tuple(n for n, kept in enumerate(classes) if name in kept) for name in names}
    return tuple(
        (name, len(blocks) if len(blocks) == len(classes) else blocks)
        for name, blocks in blocks_of.items()
        if blocks
    )


def _step(
    policy: str,
    model: ModelShape,
    memory: MemoryModel,
    workload: BatchWorkload,
    plan: Plan,
    limit: int,
    profile: Profile,
) -> Step:
    """Return the terms of the paper's T_iter for this run, with all weights and state on SSD.

    `plan` keeps only block inputs, and `limit` is the budget of host memory in bytes.
    """
    fmt, width = memory.state_format, memory.state_format.weight_bytes
    count = float(sum(group.numel for group in memory.moving))
    base = replace(plan, kept=(), spilled_sites=())
    everything = by_class([frozenset(a.name for a in block.activations) for block in model.blocks])
    works = site_works(memory, workload, replace(base, kept=everything)).values()
    inputs = input_bytes(model, workload.tokens, width)
    room = limit - memory.rest_bytes(base) - memory.activations(base)[INPUTS] + inputs
    return Step(
        profile=profile,
        forward_s=sum(work.forward_s(profile) for work in works),
        backward_s=sum(work.backward_s(profile) for work in works),
        weights=count * width,
        gradients=count * memory.gradient_width,
        weights_read=count * width,
        state_read=count * fmt.state_bytes,
        state_written=count * (fmt.state_bytes + width),
        room=max(0.0, room - (INPUT_COPIES.get(policy, 1) - 1) * inputs),
        width=width,
        slices=memory.slices,
    )
