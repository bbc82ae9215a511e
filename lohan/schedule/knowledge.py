"""What an action of a schedule knows to be finished, and how it uses a place.

What an action knows is one number per lane: actions finish before the next of their lane starts;
only those of the ssd lane start in order and finish in order, but the next may start before the
last has finished. Whatever an action waits for has finished, with all that it knew.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from lohan.schedule.actions import LANE_OF, Action
from lohan.schedule.places import Shape
from lohan.util.trace import LANES

UNKNOWN, BEFORE = -1, 0  # finished actions of a lane; BEFORE: all from before the schedule
NAME = re.compile(r"([A-Z])(\d*)(?:\.(\d+))?")


@dataclass(frozen=True)
class Clock:
    """What is known to be finished: so many actions of each lane, and names from before."""

    upto: tuple[int, ...] = (UNKNOWN,) * len(LANES)
    names: frozenset[str] = frozenset()

    def join(self, other: Clock) -> Clock:
        return Clock(tuple(map(max, self.upto, other.upto)), self.names | other.names)


def at_least(lane: str, count: int) -> Clock:
    return Clock(tuple(count if lane == other else UNKNOWN for other in LANES))


@dataclass(frozen=True)
class Use:
    """One action's use of a place. `part` is a chunk of it, None all of it."""

    name: str
    position: int  # in its lane, from 1; BEFORE: from before the schedule
    part: tuple[int, int] | None
    writes: bool

    def known(self, clock: Clock) -> bool:
        lane = LANES.index(LANE_OF[self.name[0]])
        return clock.upto[lane] >= self.position or (
            self.position == BEFORE and self.name in clock.names
        )

    def meets(self, other: Use) -> bool:
        apart = self.part is not None and other.part is not None and self.part != other.part
        return (self.writes or other.writes) and not apart


def from_before(name: str) -> Use:
    match = NAME.fullmatch(name)
    assert match is not None
    part = (int(match[2]), int(match[3])) if match[3] else None
    return Use(name, BEFORE, part, False)


def split_places(
    action: Action, shape: Shape, places: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where a site's activations lie: a buffer in host memory, a place on the device."""
    if action.index in shape.kept:
        return places[:-1], places[-1:]
    return places, ()


Touch = tuple[tuple[object, ...], tuple[int, int] | None, bool]  # place, part of it, writes


def touches(action: Action, shape: Shape) -> Iterator[Touch]:
    """What an action touches."""
    kind, index, at, chunk = action.kind, action.index, action.at, (action.index, action.chunk)
    if kind in "FB":
        groups = len(shape.sites[index])
        for slot in at[:groups]:
            yield ("device" if shape.device_slots else "slot", slot), None, False
        buffers, by = split_places(action, shape, at[groups:])
        for buffer in buffers:
            yield ("act", buffer), None, kind == "F"
        for place in by:
            yield ("travel", place), None, kind == "F"
    elif kind == "R":
        yield ("slot", at[0]), None, True
        yield ("weights of group", index), None, False
    elif kind == "S":
        yield ("ring", at[0]), None, True
        yield ("state of group", index), chunk, False
    elif kind in "UW":
        yield ("ring", at[0]), None, kind == "U"
        yield ("slot", at[1]), chunk, kind == "U"
        for buffer in at[2:]:
            yield ("stage", buffer), None, False
        if kind == "W":
            yield ("weights of group", index), chunk, True
            yield ("state of group", index), chunk, True
    elif kind in "PG":
        yield ("stage", at[0]), None, True
        yield ("gradients of group on SSD", index), chunk, kind == "P"
    elif kind == "L":
        yield ("slot", at[0]), None, False
        yield ("device", at[1]), None, True
    elif kind == "A":
        yield ("device", at[0]), None, True
    elif kind in "KV":
        yield ("activations of site", index), None, kind == "K"
        yield ("travel", at[-1]), None, kind == "V"
        for buffer in at[:-1]:
            yield ("act", buffer), None, kind == "K"
    elif kind in "OI":
        yield ("act", at[0]), None, kind == "I"
        yield ("activations of site on SSD", index), None, kind == "O"
