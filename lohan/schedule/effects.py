"""The waits that follow from what operations read and write.

A phase emits operations in program order. An operation that reads what an earlier one writes, or
writes what an earlier one reads or writes, has to wait for it. `Uses` keeps the last uses of every
resource and derives these waits, so that no wait is written down by hand. The effects of an
operation are in its row of the table (ops.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from lohan.schedule.actions import Action, ScheduleSpec
from lohan.schedule.ops import READ, WHOLE, WRITE, Effect, Op, Resource
from lohan.util.trace import LANES


def effects_of(action: Action, spec: ScheduleSpec) -> list[Effect]:
    """Return the resources that an action reads and writes."""
    kind, index, chunk, at, _, _ = action
    return kind.effects(index, chunk, at, spec)


_LANE_NUMBER = {lane: number for number, lane in enumerate(LANES)}
_SSD = LANES.index("ssd")


# An action that used a resource: its lane, its number in the lane, its name, and how many actions
# of each lane have finished when it has.
Use = tuple[int, int, str, list[int]]
# The last uses by several lanes. Each lane finishes in order, so its last use is enough.
LastUses = tuple[Use, ...]
# The uses of one part of a resource since the whole was written: its last write, and its reads.
_Part = tuple[Use | None, LastUses]


_UNUSED: _Part = (None, ())


class _Record:
    """The uses of a resource since it was last written as a whole."""

    __slots__ = ("parts", "parts_read", "parts_written", "read", "written")

    def __init__(self, written: Use | None = None) -> None:
        self.written = written  # the write of the whole
        self.read: LastUses = ()  # the reads of the whole
        # The last writes and reads of any part, and those of each part.
        self.parts_written: LastUses = ()
        self.parts_read: LastUses = ()
        self.parts: dict[int, _Part] = {}

    def copy(self) -> _Record:
        other = _Record(self.written)
        other.read, other.parts = self.read, self.parts.copy()
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
        according to the vector clock `lane_clocks` are left out. The clock is advanced in place to
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
                conflicts = record.parts_written
                if access is WRITE:
                    conflicts = record.read + conflicts + record.parts_read
                    records[resource] = _Record(this)
                elif access is READ:
                    record.read = _with(record.read, this)
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
                    lane_clocks[:] = map(max, lane_clocks, use[3])
                    missing[use[0]] = (use, effect)
            # The write is checked last: readers of the resource have waited for it, so that the
            # clock often includes it already.
            if written is not None and written[1] > lane_clocks[written[0]]:
                lane_clocks[:] = map(max, lane_clocks, written[3])
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


def _with(uses: LastUses, last: Use) -> LastUses:
    """Return the last uses, with `last` replacing an earlier use by the same lane."""
    if not uses or (len(uses) == 1 and uses[0][0] == last[0]):
        return (last,)
    return (*[use for use in uses if use[0] != last[0]], last)
