"""What a device with a memory of its own holds: slots and places that are always there, and beside
them the moment of a step when most is held.

Forward has no gradients of blocks: a block runs when its weights are renewed, and links keep their
order. The head has none either. In backward, gradients of earlier blocks may be on their way, and
activations that stayed are gone after the first block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lohan.planner.moments import STREAMS, WORK, Moment

GRADIENTS, STAYING = "gradients", "activations that stay"
AHEAD, AT_HEAD = 3, 5  # hidden states: of forward, with two on their way; of the head, with losses


@dataclass(frozen=True)
class Stop:
    """One site, in the order of forward: bytes of work of its forward, with what it makes to keep,
    and of its backward; of activations that stay with it; of its trained weights' gradients."""

    ahead: int
    back: int
    stays: int
    gradients: int


@dataclass(frozen=True, kw_only=True)
class Around:
    """What is the same for all sites. `stream`: bytes of the hidden state; `beside`: of its parts
    that backward holds for other slices; `outside`: of what is held between sites before the head.
    `groups`: whose gradients may be there at a time; with `sums`, those of the block at work are
    not part of its work."""

    stream: int
    beside: int
    outside: int
    head: int
    head_gradients: int
    groups: int
    sums: bool


def most_on_device(stops: Sequence[Stop], around: Around) -> Moment:
    moments = [*_forward(stops, around), *_backward(stops, around)]
    return max(moments, key=lambda moment: sum(moment.values()), default={})


def _forward(stops: Sequence[Stop], around: Around) -> Iterator[Moment]:
    staying = sum(stop.stays for stop in stops)
    moving = [stop.ahead for stop in stops if not stop.stays]
    yield {STREAMS: AHEAD * around.stream, WORK: max(moving, default=0)}
    at_rest = [stop.ahead for stop in stops if stop.stays]
    if at_rest:
        yield {STREAMS: AHEAD * around.stream, WORK: max(at_rest), STAYING: staying}
    if around.head:
        streams = max(AT_HEAD * around.stream, around.outside + 2 * around.stream)
        yield {STREAMS: streams, WORK: around.head, STAYING: staying}


def _backward(stops: Sequence[Stop], around: Around) -> Iterator[Moment]:
    staying = sum(stop.stays for stop in stops)
    passing = [around.head_gradients]
    others = around.groups if around.sums else around.groups - 1
    seen = set[tuple[int, int, int]]()  # equal blocks have equal moments
    for stop in reversed(stops):
        own = [stop.gradients] if around.sums else []
        there = sum([*passing, *own][-others:]) if others else 0
        if (moment := (there, staying, stop.back)) not in seen:
            seen.add(moment)
            yield {
                GRADIENTS: there, STAYING: staying, STREAMS: around.beside, WORK: stop.back
            }  # fmt: skip
        passing = [*passing[-around.groups :], stop.gradients]
        staying -= stop.stays
