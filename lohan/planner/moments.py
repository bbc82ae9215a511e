"""When a step holds most: what compute has in host memory in forward, head and backward.

Inputs and kept activations grow until forward ends and go with every block's backward; gradients
come with it. So what is held at once is less than the most of each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from lohan.model.layout import Group
from lohan.model.state import FLOAT

INPUTS, KEPT, WAITING = "block inputs", "kept activations", "waiting gradients"
STREAMS, WORK = "hidden state and its gradient", "work of one block or the head"
Moment = dict[str, int]  # bytes by owner


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a site: bytes that it leaves in memory until its backward (`inputs`, `kept`), or
    until they are on SSD (`moved`); and what its forward (`ahead`) and its backward take for work,
    with `streams` beside. The head does both at once, as if in backward."""

    groups: tuple[Group, ...]
    inputs: int = 0
    kept: int = 0
    moved: int = 0
    ahead: int = 0
    work: int = 0
    streams: int = 0


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How gradients wait: `held` groups until the next forward, others until `groups` more have
    come; `width`: bytes of an element. `moving`: calls whose activations may be on their way to SSD
    at a time, the one that makes them included."""

    held: Collection[str]
    groups: int
    width: int
    moving: int


def most_held(calls: Sequence[Call], rules: Rules) -> Moment:
    """Of calls in the order of forward."""
    moments = [*_forward(calls, rules), *_backward(calls, rules)]
    return max(moments, key=lambda moment: sum(moment.values()), default={})


def _first_calls(calls: Sequence[Call]) -> dict[str, int]:
    numbered = reversed(list(enumerate(calls)))
    return {group.key: number for number, call in numbered for group in call.groups}


def _forward(calls: Sequence[Call], rules: Rules) -> Iterator[Moment]:
    """Where activations leave for SSD; elsewhere backward holds as much and works harder. Gradients
    that were held are gone when their group is needed."""
    sizes = {group.key: group.numel for call in calls for group in call.groups}
    first = _first_calls(calls)
    inputs = kept = 0
    moving: list[int] = []
    for number, call in enumerate(calls):
        inputs, kept = inputs + call.inputs, kept + call.kept
        if not call.moved:
            continue
        moving = [*moving, call.moved][-rules.moving :]
        held = sum(sizes[key] for key in rules.held if first.get(key, -1) > number)
        yield {
            INPUTS: inputs, KEPT: kept + sum(moving), WAITING: rules.width * held,
            STREAMS: call.streams, WORK: call.ahead,
        }  # fmt: skip


def _backward(calls: Sequence[Call], rules: Rules) -> Iterator[Moment]:
    inputs, kept = sum(call.inputs for call in calls), sum(call.kept for call in calls)
    first = _first_calls(calls)
    held, passing, unfinished = 0, list[int](), dict[str, int]()
    # What is still on its way to SSD is there before the first of it comes back.
    moving = sum([call.moved for call in calls if call.moved][-rules.moving :])
    for number, call in reversed(list(enumerate(calls))):
        moving = 0 if call.moved else moving
        under_way = sum(passing[max(0, len(passing) - rules.groups + 1) :])
        waiting = rules.width * (held + under_way) + FLOAT * sum(unfinished.values())
        yield {
            INPUTS: inputs, KEPT: kept + moving, WAITING: waiting, STREAMS: call.streams,
            WORK: call.work,
        }  # fmt: skip
        inputs, kept = inputs - call.inputs, kept - call.kept
        for group in call.groups:
            if group.frozen or group.resident:
                continue
            if first[group.key] < number:  # an earlier call adds to it
                unfinished[group.key] = group.numel
                continue
            unfinished.pop(group.key, None)
            if group.key in rules.held:
                held += group.numel
            else:
                passing.append(group.numel)
