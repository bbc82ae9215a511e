"""Which activations to keep and which updates to defer: the closed form, asked for every choice.

Classes are kept in the order of their offloading benefit (FLOPs saved per byte), so the time to
recompute is a convex function of the bytes kept, and so is the step: the paper's argument. Unlike
it, every candidate is priced with what its bytes displace: host memory that activations take cannot
hold weights, state or gradients, and what does not fit goes over the SSD lane.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lohan.model.demand import Load
from lohan.model.machine import Profile
from lohan.model.plan import Kept, Plan
from lohan.model.state import FLOAT
from lohan.planner.cost import TOUCHED, SiteWork, Traffic, step_s
from lohan.planner.memory import Books

SHARES = tuple(i / 8 for i in range(9))  # of the updates, that may run in the next forward
HEAD_WORK = "(head)"  # in place of a name: its site may share the embedding's group
EQUAL = 1.00003  # times the best: fewer bytes kept are worth as much
PARTS = 8  # in which the blocks of a model begin to keep a class


@dataclass(frozen=True)
class Choice:
    """`kept` as in Plan; `deferred`: the share of the updates that wait for the next forward."""

    kept: Kept
    deferred: float
    step_s: float
    written: float  # bytes to SSD


def choose(
    profile: Profile, books: Books, load: Load, plan: Plan, *, limit: int, writes_pinned: bool,
    minimise: str = "time", kept: Kept | None = None,
) -> Choice:  # fmt: skip
    """The best of all levels and shares, or of the shares alone with what is `kept` given. Equal
    times: fewer bytes kept."""
    pricer = _Pricer(profile, books, load, plan, limit, writes_pinned)
    shares = SHARES if plan.grad_offload == "balanced" and plan.overlap else (0.0,)
    if plan.holds_all:
        shares = (1.0,) if plan.overlap and plan.grad_offload != "serial" else (0.0,)
    candidates: list[Choice] = []
    for level in levels(books, load) if kept is None else [kept]:
        priced = pricer.prices(level, shares)
        if not priced:  # more than the device can hold, and later levels take more still
            break
        candidates += priced
    if not candidates:
        candidates = pricer.prices((), shares)
    if minimise == "writes":
        return min(candidates, key=lambda c: (round(c.written, -6), c.step_s))
    best = min(candidates, key=lambda c: c.step_s)
    return next(c for c in candidates if c.step_s <= best.step_s * EQUAL)


def levels(books: Books, load: Load) -> Iterator[Kept]:
    """From nothing but block inputs to everything, in order of benefit, by parts of the blocks."""
    count = len(books.block_sites)
    shape = load.shapes[books.block_sites[-1]]  # nothing may want the gradient of the first's input
    kept: list[tuple[str, int]] = []
    yield ()
    for part in shape.by_benefit(load.seq):
        for blocks in sorted({-(-count * i // PARTS) for i in range(1, PARTS + 1)}):
            yield (*kept, (part.name, blocks))
        kept.append((part.name, count))


class _Pricer:
    def __init__(
        self, profile: Profile, books: Books, load: Load, plan: Plan, limit: int,
        writes_pinned: bool,
    ) -> None:  # fmt: skip
        self.profile, self.books, self.load, self.plan = profile, books, load, plan
        self.writes_pinned = writes_pinned
        bare = replace(plan, kept=(), moved_out=())
        # What is left for activations, gradients that wait, weights and state.
        self.spare = limit - books.rest_bytes(bare)
        self.parameters = float(sum(group.numel for group in books.moving))
        self.trained = float(sum(group.numel for group in books.trained))

    def prices(self, kept: Kept, shares: Sequence[float]) -> list[Choice]:
        """Choices with these activations kept; none if the device cannot hold them."""
        bare = replace(self.plan, kept=kept, moved_out=())
        plan = self.books.relieved(bare, self.profile.device_bytes)
        if plan is None:
            return []
        activations = float(sum(self.books.activations(plan).values()))
        spare, out = max(0.0, self.spare - activations), max(0.0, activations - self.spare)
        known, key = self.books.priced, (id(self.profile), kept)
        compute = known[key] = known.get(key) or self._compute(plan)
        made = []
        for share in shares:
            traffic = self._traffic(compute, share, spare, out, activations)
            written = traffic.state_written + traffic.out + traffic.held
            made.append(Choice(kept, traffic.deferred, step_s(self.profile, traffic), written))
        return made

    def _traffic(
        self, compute: tuple[float, float, float], share: float, spare: float, out: float,
        kept: float,
    ) -> Traffic:  # fmt: skip
        """Spare host memory goes to gradients that wait, then weights, then state."""
        mode, n, trained, plan = self.books.mode, self.parameters, self.trained, self.plan
        width = self.books.gradient_width
        waiting = trained * width * share
        spilled = max(0.0, waiting - spare) if plan.holds_all else 0.0
        if not plan.holds_all and waiting > spare:
            share, waiting = spare / (trained * width), spare
        spare = max(0.0, spare - waiting)
        weights = min(spare, n * mode.weight_bytes)
        state = min(spare - weights, trained * mode.state_bytes)
        read_again = n * mode.weight_bytes - weights
        written = trained * (mode.state_bytes + mode.weight_bytes)
        unwritten = 0.0 if self.writes_pinned else state + weights * trained / max(n, 1.0)
        return Traffic(
            forward_s=compute[0], backward_s=compute[1], head_s=compute[2],
            weights=n * mode.weight_bytes, weights_read=read_again,
            kept=kept, out=out, gradients=trained * width,
            state_read=trained * mode.state_bytes - state, state_written=written - unwritten,
            held=spilled / width * FLOAT, updated=trained * mode.update_cost, deferred=share,
            rounding_s=trained * mode.rounding_s,
            alone=plan.device_grads == 1, gathered=(plan.world - 1) * n * mode.weight_bytes,
            reduced=(plan.world - 1) * trained * width,
        )  # fmt: skip

    def _compute(self, plan: Plan) -> tuple[float, float, float]:
        """Forward, backward, and how much of forward is the head."""
        books, load = self.books, self.load
        micro = (books.micro_batch or load.batch) * load.seq
        alike = Counter(
            zip(
                books.sizes.kind.values(), books.sizes.classes(plan.kept),
                map(books.shares.__getitem__, books.block_sites), strict=True,
            )
        )  # fmt: skip
        first = {kind: name for name, kind in reversed(books.sizes.kind.items())}
        forward_s = backward_s = head_s = 0.0
        for (kind, classes, share), count in alike.items():
            work = _block_work(load, first[kind], classes, tokens=micro, trained=share)
            # Two blocks' activations travel at a time: a block with more than its own time allows
            # holds the next one up, however little the others have.
            travel_s = self._travel_s(first[kind], classes)
            forward_s += count * max(work.forward_s(self.profile), travel_s[0])
            backward_s += count * max(work.backward_s(self.profile), travel_s[1])
        for work in _other_works(books, load, plan).values():
            forward_s += work.forward_s(self.profile)
            head_s += work.forward_s(self.profile) if work.head else 0.0
        return forward_s, backward_s, head_s

    def _travel_s(self, name: str, classes: frozenset[str]) -> tuple[float, float]:
        """Of one block's activations from the device, and back."""
        if not self.profile.has_link:
            return 0.0, 0.0
        size = self.books.sizes.bytes_with(name, classes)
        return size / self.profile.d2h, size / self.profile.h2d


def site_works(books: Books, load: Load, plan: Plan) -> dict[str, SiteWork]:
    """Compute and activation bytes of every site that has any, by name."""
    micro = (books.micro_batch or load.batch) * load.seq
    moved, staying = set(plan.moved_out), set(plan.staying)
    works: dict[str, SiteWork] = {}
    made: dict[tuple[object, ...], SiteWork] = {}
    for name in books.block_sites:
        classes = books.sizes.classes_of(plan.kept, name)
        size, share = float(books.site_bytes(plan, name)), books.shares[name]
        key = (books.sizes.kind[name], classes, size, share, name in moved, name in staying)
        if key not in made:
            made[key] = replace(
                _block_work(load, name, classes, tokens=micro, trained=share),
                kept_bytes=0.0 if name in staying else size,
                out_bytes=size if name in moved else 0.0,
            )
        works[name] = made[key]
    return works | _other_works(books, load, plan)


def _block_work(
    load: Load, name: str, classes: frozenset[str], *, tokens: float, trained: float
) -> SiteWork:
    """Compute of one block that keeps these classes."""
    shape = load.shapes[name]
    again = sum(part.elements for part in shape.activations if part.name not in classes)
    return SiteWork(
        trained=trained, tokens=tokens,
        forward_flops=shape.flops_at(load.seq) * load.tokens,
        recompute_flops=shape.recompute_flops_at(load.seq, classes) * load.tokens,
        forward_bytes=TOUCHED * load.tokens * shape.elements,
        recompute_bytes=TOUCHED * load.tokens * again,
    )  # fmt: skip


def _other_works(books: Books, load: Load, plan: Plan) -> dict[str, SiteWork]:
    """Of sites without a backward, and of the head."""
    micro = (books.micro_batch or load.batch) * load.seq
    works = {
        name: SiteWork(
            forward_flops=load.shapes[name].flops_at(load.seq) * load.tokens, recompute_flops=0.0,
            forward_bytes=TOUCHED * load.tokens * load.shapes[name].elements, tokens=micro,
            still=True,
        )
        for name in books.sizes.still
    }  # fmt: skip
    if books.head is not None:
        works[HEAD_WORK] = SiteWork(
            forward_flops=load.head_flops, recompute_flops=0.0, tokens=plan.head_tokens,
            head=True, at_once=True, trained=books.shares[books.head.name],
        )  # fmt: skip
    return works
