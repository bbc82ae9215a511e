"""Which activations leave the device and which are made again: the paper's Algorithm 1, and the
policies it is compared with.

All of them keep the block inputs first and add classes of activations in some order; they differ in
the order and in what they look at before they stop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lohan.errors import ConfigError
from lohan.planning.cost import TOUCHED, memory_s
from lohan.profile import Profile
from lohan.shapes.shape import ModelShape

WIDTH = 2  # bytes of an element: all that is compared here computes in 16 bit


@dataclass(frozen=True, kw_only=True)
class Step:
    """What the choice depends on, per step of one GPU: the paper's symbols, compute as seconds.

    `state_read` and `state_written` are bytes between SSD and host memory in backward; `room` is
    the host memory that is left for kept activations of all GPUs (MEM_avail)."""

    profile: Profile
    forward_s: float
    backward_s: float  # without recomputation
    weights: float  # bytes: over the link in each phase
    gradients: float
    weights_read: float  # from SSD, in each phase
    state_read: float
    state_written: float
    room: float

    def spilled(self, kept: float) -> float:
        """Bytes that overflow to SSD when every GPU keeps so many."""
        return max(0.0, self.profile.gpus * kept - self.room)

    def iteration_s(self, kept: float, again_s: float) -> float:
        """T_iter with so many bytes kept and so many seconds of recomputation left."""
        p, out = self.profile, self.spilled(kept)
        ssd_s = _over(self.weights_read, p.ssd_read) + _over(out, p.ssd_write)
        forward_s = max(self.forward_s, kept / p.d2h, self.weights / p.h2d, ssd_s)
        ssd_s = _over(self.weights_read + self.state_read + out, p.ssd_read)
        ssd_s += _over(self.state_written, p.ssd_write)
        link_s = max(self.gradients / p.d2h, (self.weights + kept) / p.h2d)
        return forward_s + max(self.backward_s + again_s, link_s, ssd_s)


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


def input_bytes(model: ModelShape, tokens: float) -> float:
    return WIDTH * tokens * sum(block.input_elements for block in model.blocks)


def candidates(profile: Profile, model: ModelShape, *, tokens: float, seq: int) -> list[Candidate]:
    """Everything that could be kept, best first; of equal classes those of the last block first,
    whose backward comes first."""
    rate = profile.flops_at(tokens)
    found = [
        Candidate(
            number, part.name, WIDTH * tokens * part.elements,
            tokens * part.flops_at(seq) / rate
            + memory_s(profile, TOUCHED * tokens * part.elements),
            part.benefit_at(seq) / WIDTH,
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
    most = min(step.forward_s * step.profile.d2h, step.room / step.profile.gpus)
    return _choose(
        step, model, tokens, seq, lambda _, now: now.bytes <= most, order=lambda one: one.block
    )


def checkmate(step: Step, model: ModelShape, *, tokens: float, seq: int) -> Kept:
    """The least recomputation that host memory allows, whatever the transfers cost."""
    return at_most(step, model, tokens=tokens, seq=seq, most=step.room / step.profile.gpus)


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
    found = candidates(step.profile, model, tokens=tokens, seq=seq)
    if order is not None:
        found.sort(key=order)
    before, taken = _start(step, model, found, tokens), 0
    for now in _walk(step, before, found):
        if not go_on(before, now):
            break
        before, taken = now, taken + 1
    classes: list[set[str]] = [set() for _ in model.blocks]
    for one in found[:taken]:
        classes[one.block].add(one.name)
    return Kept(tuple(map(frozenset, classes)), before.bytes, before.iteration_s)


def _start(step: Step, model: ModelShape, found: Sequence[Candidate], tokens: float) -> _So:
    kept, again_s = input_bytes(model, tokens), sum(one.again_s for one in found)
    return _So(kept, again_s, step.iteration_s(kept, again_s))


def _walk(step: Step, start: _So, found: Sequence[Candidate]) -> Iterator[_So]:
    kept, again_s = start.bytes, start.again_s
    for one in found:
        kept, again_s = kept + one.bytes, max(0.0, again_s - one.again_s)
        yield _So(kept, again_s, step.iteration_s(kept, again_s))


def curve(step: Step, model: ModelShape, *, tokens: float, seq: int) -> list[tuple[float, float]]:
    """(bytes kept, T_iter) from block inputs alone to everything, in the order of benefit."""
    found = candidates(step.profile, model, tokens=tokens, seq=seq)
    start = _start(step, model, found, tokens)
    return [(so.bytes, so.iteration_s) for so in (start, *_walk(step, start, found))]


def _over(amount: float, rate: float) -> float:
    if not amount:
        return 0.0
    return amount / rate if rate else float("inf")
