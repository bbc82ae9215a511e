"""Which activations leave the device and which are made again: the paper's Algorithm 1, and the
policies it is compared with. The simulator asks them of model shapes, a run of its traced blocks.

All of them keep the block inputs first and add classes of activations in some order; they differ in
the order and in what they look at before they stop. Checkmate solves a small integer program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from lohan.errors import ConfigError, LohanError
from lohan.model.machine import Profile
from lohan.model.shapes import ModelShape
from lohan.planner.cost import TOUCHED, memory_s

WIDTH = 2  # bytes of an element: all that is simulated here computes in 16 bit


@dataclass(frozen=True, kw_only=True)
class Step:
    """What the choice depends on, per step of one GPU: the paper's symbols, compute as seconds.

    `state_read` and `state_written` are bytes between SSD and host memory in backward; `room` is
    the host memory that is left for kept activations of all GPUs (MEM_avail). Without a link the
    device's memory is the host's, and keeping costs no transfer."""

    profile: Profile
    forward_s: float
    backward_s: float  # without recomputation
    weights: float  # bytes: over the link in each phase
    gradients: float
    weights_read: float  # from SSD, in each phase
    state_read: float
    state_written: float
    room: float
    width: int = WIDTH  # bytes of an element
    slices: int = 1  # in which a block sees the tokens

    @property
    def link_bytes(self) -> float:
        """That the link moves from the device while forward computes."""
        p = self.profile
        return self.forward_s * p.d2h if p.has_link else float("inf")

    def spilled(self, kept: float) -> float:
        """Bytes that overflow to SSD when every GPU keeps so many."""
        return max(0.0, self.profile.gpus * kept - self.room)

    def iteration_s(self, kept: float, again_s: float) -> float:
        """T_iter with so many bytes kept and so many seconds of recomputation left."""
        p, out = self.profile, self.spilled(kept)
        ssd_s = _over(self.weights_read, p.ssd_read) + _over(out, p.ssd_write)
        forward_s = max(self.forward_s, ssd_s)
        ssd_s = _over(self.weights_read + self.state_read + out, p.ssd_read)
        ssd_s += _over(self.state_written, p.ssd_write)
        backward_s = max(self.backward_s + again_s, ssd_s)
        if p.has_link:
            forward_s = max(forward_s, kept / p.d2h, self.weights / p.h2d)
            backward_s = max(backward_s, self.gradients / p.d2h, (self.weights + kept) / p.h2d)
        return forward_s + backward_s


@dataclass(frozen=True)
class Candidate:
    """One class of activations of one block."""

    block: int
    name: str
    bytes: float
    again_s: float  # to make it again
    benefit: float  # FLOPs saved per byte


@dataclass(frozen=True)
class Kept:
    """The choice: classes kept in each block, their bytes with the inputs, and T_iter."""

    classes: tuple[frozenset[str], ...]
    bytes: float
    iteration_s: float


def input_bytes(model: ModelShape, tokens: float, width: int = WIDTH) -> float:
    return width * tokens * sum(block.input_elements for block in model.blocks)


def candidates(step: Step, model: ModelShape, *, tokens: float, seq: int) -> list[Candidate]:
    """Everything that could be kept, best first; of equal classes those of the last block first,
    whose backward comes first."""
    profile, width = step.profile, step.width
    rate = profile.flops_at(tokens / step.slices)
    found = [
        Candidate(
            number, part.name, width * tokens * part.elements,
            tokens * part.flops_at(seq) / rate
            + memory_s(profile, TOUCHED * tokens * part.elements),
            part.benefit_at(seq) / width,
        )
        for number, block in enumerate(model.blocks)
        for part in block.activations
    ]  # fmt: skip
    return sorted(found, key=lambda one: (-one.benefit, one.name, -one.block))


@dataclass(frozen=True)
class _So:
    """Totals after some candidates were taken."""

    bytes: float
    again_s: float
    iteration_s: float


GoOn = Callable[[_So, _So], bool]  # from before and after one more candidate


def algorithm1(step: Step, model: ModelShape, *, tokens: float, seq: int) -> Kept:
    """The paper's choice: block inputs first, then by benefit for as long as T_iter falls."""

    def falls(before: _So, now: _So) -> bool:
        return now.iteration_s < before.iteration_s

    return _choose(step, model, tokens, seq, falls)


def at_most(step: Step, model: ModelShape, *, tokens: float, seq: int, most: float) -> Kept:
    """By benefit, up to so many bytes."""
    return _choose(step, model, tokens, seq, lambda _, now: now.bytes <= most)


def static(step: Step, model: ModelShape, *, tokens: float, seq: int) -> Kept:
    """Block inputs and nothing else."""
    return at_most(step, model, tokens=tokens, seq=seq, most=0.0)


def capuchin(step: Step, model: ModelShape, *, tokens: float, seq: int) -> Kept:
    """By the time until a tensor is needed again, so all of the first block, then of the second:
    what host memory holds and the link moves while forward computes. It does not see what else
    travels."""
    most = min(step.link_bytes, step.room / step.profile.gpus)
    return _choose(
        step, model, tokens, seq, lambda _, now: now.bytes <= most, order=lambda one: one.block
    )


def checkmate(step: Step, model: ModelShape, *, tokens: float, seq: int) -> Kept:
    """The least recomputation that host memory allows, whatever the transfers cost: how many of
    each kind of candidate, as an integer program."""
    found = candidates(step, model, tokens=tokens, seq=seq)
    start = _start(step, model, found, tokens)
    kinds = [list(kind) for _, kind in groupby(found, key=lambda c: (c.name, c.bytes, c.again_s))]
    counts = _least_recompute(kinds, step.room / step.profile.gpus - start.bytes)
    taken = [one for kind, count in zip(kinds, counts, strict=True) for one in kind[:count]]
    *_, end = start, *_walk(step, start, taken)
    return _kept(model, taken, end)


def _least_recompute(kinds: Sequence[Sequence[Candidate]], room: float) -> list[int]:
    """How many of each kind, so that their bytes fit and the most seconds are saved."""
    if not kinds or room < min(kind[0].bytes for kind in kinds):
        return [0] * len(kinds)
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError:
        raise LohanError(
            "activations checkmate: its integer program is solved by scipy, which is not "
            "installed; `pip install scipy`, or choose another policy"
        ) from None
    whole_s = sum(kind[0].again_s * len(kind) for kind in kinds) or 1.0
    solved = milp(
        [-kind[0].again_s / whole_s for kind in kinds], integrality=[1] * len(kinds),
        bounds=Bounds(0, [len(kind) for kind in kinds]),
        constraints=LinearConstraint([[kind[0].bytes / room for kind in kinds]], ub=1.0),
    )  # fmt: skip
    return [round(count) for count in solved.x]


def g10(step: Step, model: ModelShape, *, tokens: float, seq: int) -> Kept:
    """Everything is kept."""
    return at_most(step, model, tokens=tokens, seq=seq, most=float("inf"))


CHOOSERS: dict[str, Callable[..., Kept]] = {
    "holistic": algorithm1, "static": static, "capuchin": capuchin, "checkmate": checkmate,
    "g10": g10,
}  # fmt: skip
HOST_ONLY = ("static", "capuchin", "checkmate")  # do not know that there is an SSD
# Checkmate plans for a tensor and its recomputed twin at once.
INPUT_COPIES = {"checkmate": 2}


def choose(name: str, step: Step, model: ModelShape, *, tokens: float, seq: int) -> Kept:
    if name not in CHOOSERS:
        raise ConfigError(f"{name!r} is not an activation policy; they are {', '.join(CHOOSERS)}")
    return CHOOSERS[name](step, model, tokens=tokens, seq=seq)


def _choose(
    step: Step, model: ModelShape, tokens: float, seq: int, go_on: GoOn,
    order: Callable[[Candidate], float] | None = None,
) -> Kept:  # fmt: skip
    found = candidates(step, model, tokens=tokens, seq=seq)
    if order is not None:
        found.sort(key=order)
    before, taken = _start(step, model, found, tokens), 0
    for now in _walk(step, before, found):
        if not go_on(before, now):
            break
        before, taken = now, taken + 1
    return _kept(model, found[:taken], before)


def _kept(model: ModelShape, taken: Sequence[Candidate], so: _So) -> Kept:
    classes: list[set[str]] = [set() for _ in model.blocks]
    for one in taken:
        classes[one.block].add(one.name)
    return Kept(tuple(map(frozenset, classes)), so.bytes, so.iteration_s)


def _start(step: Step, model: ModelShape, found: Sequence[Candidate], tokens: float) -> _So:
    kept = input_bytes(model, tokens, step.width)
    again_s = sum(one.again_s for one in found)
    return _So(kept, again_s, step.iteration_s(kept, again_s))


def _walk(step: Step, start: _So, found: Sequence[Candidate]) -> Iterator[_So]:
    kept, again_s = start.bytes, start.again_s
    for one in found:
        kept, again_s = kept + one.bytes, max(0.0, again_s - one.again_s)
        yield _So(kept, again_s, step.iteration_s(kept, again_s))


def curve(step: Step, model: ModelShape, *, tokens: float, seq: int) -> list[tuple[float, float]]:
    """(bytes kept, T_iter) from block inputs alone to everything, in the order of benefit."""
    found = candidates(step, model, tokens=tokens, seq=seq)
    start = _start(step, model, found, tokens)
    return [(so.bytes, so.iteration_s) for so in (start, *_walk(step, start, found))]


def _over(amount: float, rate: float) -> float:
    if not amount:
        return 0.0
    return amount / rate if rate else float("inf")
