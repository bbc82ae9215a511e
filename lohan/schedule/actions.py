"""The actions of a schedule, their text form, and their waits.

A schedule is a sequence of tokens, one per action. A token has the form
`KIND INDEX [.CHUNK] [@BUFFER,...] [(WAIT,...)]`, written without blanks. KIND is the letter of an
operation (ops.py), INDEX a site or a group, CHUNK a state chunk of the group, BUFFER a slot or
buffer, and WAIT the name of an action that must finish before this one starts. The name of an
action is the beginning of its token, up to the @.

Executing the actions one after the other, in the order of the schedule, is always valid. Lanes
execute it concurrently: each lane keeps the order of its own actions, and an action waits for the
actions named in parentheses. A name refers to the most recently enqueued action of that name, which
may belong to an earlier schedule, so that the end of one phase overlaps with the start of the next.
No action waits for a later one, so a schedule cannot deadlock.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from lohan.errors import LohanError
from lohan.schedule.ops import OPERATIONS, READ, WHOLE, WRITE, Effect, Op, Operation, Resource
from lohan.util.trace import LANES

_TOKEN = re.compile(r"([A-Z])(\d*)(?:\.(\d+))?(?:@([\d,]+))?(?:\(([^)]*)\))?")


class _Fields(NamedTuple):
    kind: Operation
    # The site or group, or -1. The field hides tuple.index(), which is not needed here.
    index: int  # type: ignore[assignment]
    chunk: int  # -1 if the operation does not act on a single chunk
    at: tuple[int, ...]  # slots and buffers
    waits: tuple[str, ...]  # names of the actions that must finish before this one starts
    name: str  # the name by which other actions wait for this one, such as "U5.1"


class Action(_Fields):
    """One action of a schedule. It is a tuple, because large models have very many actions."""

    __slots__ = ()

    def __new__(
        cls,
        kind: Operation,
        index: int = -1,
        chunk: int = -1,
        at: tuple[int, ...] = (),
        waits: tuple[str, ...] = (),
    ) -> Self:
        return tuple.__new__(cls, (kind, index, chunk, at, waits, kind.of(index, chunk)))

    def waiting_for(self, waits: tuple[str, ...]) -> Action:
        """Return the same action with the given waits."""
        kind, index, chunk, at, _, name = self
        return tuple.__new__(Action, (kind, index, chunk, at, waits, name))

    @property
    def lane(self) -> str:
        return self.kind.lane

    def token(self) -> str:
        at = "@" + ",".join(map(str, self.at)) if self.at else ""
        return self.name + at + (f"({','.join(self.waits)})" if self.waits else "")


def parse_token(token: str) -> Action:
    match = _TOKEN.fullmatch(token)
    if match is None or match[1] not in OPERATIONS:
        raise LohanError(f"{token!r} is not a schedule token; they look like S5.1@0(W4.0)")
    kind, index, chunk, at, waits = match.groups()
    return Action(
        OPERATIONS[kind],
        int(index) if index else -1,
        int(chunk) if chunk else -1,
        tuple(map(int, at.split(","))) if at else (),
        tuple(waits.split(",")) if waits else (),
    )


Schedule = tuple[Action, ...]


def to_text(schedule: Iterable[Action]) -> str:
    return " ".join(action.token() for action in schedule)


def from_text(text: str) -> Schedule:
    return tuple(parse_token(token) for token in text.split())


# -- The model and the plan as a schedule sees them ------------------------------------------------


DEVICE_BUFFERS = 2  # number of sites whose kept activations are being copied from or to the device


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """The properties of the model and the plan that determine a schedule.

    Weight slots numbered `slots` and above, and ring buffers numbered `ring` and above, are a cache
    in host memory. Each of them holds the same group or the same chunk for the whole run.
    """

    sites: tuple[tuple[int, ...], ...]  # groups of each site
    chunks: tuple[int, ...]  # state chunks of each group; 0 if it is frozen and never updated
    slots: int  # weight slots in host memory, without the cache
    ring: int  # buffers for state chunks, without the cache; also the number of staging buffers
    window: int  # number of sites whose weights are read ahead
    grads: int  # number of groups whose gradients may wait in host memory for their update
    host_cached_weights: tuple[int, ...] = ()  # group of each cache slot
    host_cached_state: tuple[tuple[int, int], ...] = ()  # (group, chunk) of each cache buffer
    # Groups whose held gradients are spilled to SSD.
    spilled_gradients: frozenset[int] = frozenset()
    # Sites whose kept activations are spilled to SSD.
    spilled_sites: frozenset[int] = frozenset()
    act_buffers: int = 2  # host buffers for activations in flight from or to SSD
    device_slots: int = 0  # weight slots on the device; 0 if compute works in host memory
    device_grads: int = 2  # number of groups whose gradients are on the device at a time
    # True if the gradients of the first group of backward leave the device before others are
    # computed.
    head_alone: bool = False
    offloaded: frozenset[int] = frozenset()  # sites whose activations are offloaded to the host
    net: bool = False  # whether ranks gather weights and reduce gradients on the device
    # True if gradients are appended to a log, and full state is written by some steps only.
    log: bool = False


# -- Waits, derived from what actions read and write -----------------------------------------------
#
# A phase emits operations in program order. An operation that reads what an earlier one writes, or
# writes what an earlier one reads or writes, has to wait for it. `Uses` keeps the last uses of
# every resource and derives these waits, so that no wait is written down by hand. The effects of an
# operation are in its row of the table (ops.py).


def effects_of(action: Action, spec: ScheduleSpec) -> list[Effect]:
    """Return the resources that an action reads and writes."""
    kind, index, chunk, at, _, _ = action
    return kind.effects(index, chunk, at, spec)


_LANE_NUMBER = {lane: number for number, lane in enumerate(LANES)}
_SSD = LANES.index("ssd")


# An action that used a resource: its lane, its number in the lane, its name, and how many actions
# of each lane have finished when this action has finished.
Use = tuple[int, int, str, list[int]]
# The last uses by several lanes. Each lane finishes in order, so its last use is enough.
LastUses = tuple[Use, ...]
# The uses of one part of a resource since the whole resource was written: its last write, and the
# reads after it.
_Part = tuple[Use | None, LastUses]


_UNUSED: _Part = (None, ())


class _Record:
    """The uses of a resource since it was last written as a whole."""

    __slots__ = ("parts", "parts_read", "parts_written", "read", "written")

    def __init__(self, written: Use | None = None) -> None:
        self.written = written  # last write of the whole resource
        self.read: LastUses = ()  # reads of the whole resource since then
        self.parts_written: LastUses = ()  # last writes of any part since then
        self.parts_read: LastUses = ()  # reads of any part since then
        self.parts: dict[int, _Part] = {}  # the same for each part, by number

    def copy(self) -> _Record:
        other = _Record.__new__(_Record)
        other.written, other.read = self.written, self.read
        other.parts = self.parts.copy() if self.parts else {}
        other.parts_written, other.parts_read = self.parts_written, self.parts_read
        return other


class Uses:
    """The last uses of all resources, from which the waits of the next action are derived."""

    def __init__(self) -> None:
        self._records: dict[Resource, _Record] = {}
        self.counts = [0] * len(LANES)  # number of actions recorded for each lane
        # For each lane a vector clock: how many actions of every lane have certainly finished when
        # its next action starts, because earlier actions of the lane waited for them.
        self.clocks = [[0] * len(LANES) for _ in LANES]

    def copy(self) -> Uses:
        other = Uses()
        other._records = {resource: record.copy() for resource, record in self._records.items()}
        other.counts = self.counts.copy()
        other.clocks = [clock.copy() for clock in self.clocks]
        return other

    def waits_of(self, action: Action, effects: Sequence[Effect]) -> tuple[str, ...]:
        """Record the effects of the next action and return the names it has to wait for."""
        lane = _LANE_NUMBER[action.kind.lane]
        missing = self.missing(action, effects, self.clocks[lane])
        return tuple([use[2] for use, _ in missing.values()]) if missing else ()

    def missing(
        self, action: Action, effects: Sequence[Effect], lane_clocks: list[int]
    ) -> dict[int, tuple[Use, Effect]]:
        """Record the effects of the next action and return the conflicting use in each lane.

        Each use is returned with the effect that conflicts with it. Uses that have finished
        according to the vector clock `lane_clocks` are omitted. The clock is advanced in place to
        include the uses that are returned.
        """
        kind, name = action[0], action[5]
        lane = _LANE_NUMBER[kind.lane]
        self.counts[lane] += 1
        number = self.counts[lane]
        clock: list[int] = []
        this = (lane, number, name, clock)
        own_clock = lane_clocks[lane]
        if lane != _SSD or kind is Op.END_STEP:
            # A lane starts an action after the previous one has finished. The ssd lane starts
            # actions earlier, but they finish in order, and END_STEP takes effect at its finish.
            lane_clocks[lane] = number
        records = self._records
        record_of = records.get  # Looked up once, because the loop runs for every effect.
        missing: dict[int, tuple[Use, Effect]] = {}
        for effect in effects:
            resource, access, part = effect
            record = record_of(resource)
            if record is None:
                record = records[resource] = _Record()
            written = record.written
            if part == WHOLE:
                if access is WRITE:
                    conflicts = record.read
                    if record.parts:
                        conflicts += record.parts_written + record.parts_read
                        record.parts_written = record.parts_read = ()
                        record.parts = {}
                    record.written, record.read = this, ()
                else:
                    conflicts = record.parts_written
                    if access is READ:
                        record.read = _with(record.read, this) if record.read else (this,)
            else:
                part_written, part_read = record.parts.get(part, _UNUSED)
                conflicts = () if part_written is None else (part_written,)
                if access is WRITE:
                    conflicts = record.read + conflicts + part_read
                    record.parts[part] = (this, ())
                    record.parts_written = _with(record.parts_written, this)
                elif access is READ:
                    record.parts[part] = (part_written, _with(part_read, this))
                    record.parts_read = _with(record.parts_read, this)
            for use in conflicts:
                if use[1] > lane_clocks[use[0]]:
                    lane_clocks[:] = [
                        a if a > b else b for a, b in zip(lane_clocks, use[3], strict=True)
                    ]
                    missing[use[0]] = (use, effect)
            # The write is checked last: readers of the resource have waited for it, so the clock
            # often includes it already.
            if written is not None and written[1] > lane_clocks[written[0]]:
                lane_clocks[:] = [
                    a if a > b else b for a, b in zip(lane_clocks, written[3], strict=True)
                ]
                missing[written[0]] = (written, effect)
        clock += lane_clocks
        clock[lane] = number
        if kind is Op.END_STEP:
            lane_clocks[lane] = own_clock
        return missing

    def recorded(self) -> dict[str, Use]:
        """Return the latest recorded action of each name."""
        uses: list[Use | None] = []
        for record in self._records.values():
            uses += [record.written, *record.read, *record.parts_written, *record.parts_read]
            for written, read in record.parts.values():
                uses += [written, *read]
        return {use[2]: use for use in sorted(use for use in uses if use is not None)}


class NoUses(Uses):
    """Uses that record nothing, for schedules whose waits are not needed."""

    def copy(self) -> NoUses:
        return self

    def waits_of(self, action: Action, effects: Sequence[Effect]) -> tuple[str, ...]:
        return ()


def _with(uses: LastUses, last: Use) -> LastUses:
    """Return the last uses, with `last` replacing an earlier use by the same lane."""
    if not uses or (len(uses) == 1 and uses[0][0] == last[0]):
        return (last,)
    return (*[use for use in uses if use[0] != last[0]], last)


# -- The state of weight slots and buffers between two schedules -----------------------------------


@dataclass(frozen=True)
class BufferState:
    """The contents and the last uses of slots and buffers between two schedules."""

    slots: tuple[int | None, ...]  # the group in each weight slot in host memory
    device: tuple[int | None, ...]  # the group in each weight slot on the device
    uses: Uses = field(compare=False)  # last uses of every resource by the actions so far
    # The number of buffers taken so far from each ring.
    ring: int = 0  # optimizer state
    stage: int = 0  # held gradients in flight from or to SSD
    acts: int = 0  # activations in flight from or to SSD
    device_acts: int = 0  # activations in flight from or to the device
    # Writes that a forward leaves to the backward after it, followed by the end of the step.
    behind: tuple[Action, ...] = ()


def empty_buffers(spec: ScheduleSpec, *, waits: bool = True) -> BufferState:
    """Return the state in which no slot holds weights and all lanes are idle.

    Without `waits`, the actions of the schedules that follow have no waits.
    """
    uses = Uses() if waits else NoUses()
    return BufferState((None,) * spec.slots, (None,) * spec.device_slots, uses)
