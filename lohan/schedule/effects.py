"""What each operation reads and writes, and the waits that follow from it.

A phase emits operations in program order. An operation that reads what an earlier one writes, or
writes what an earlier one reads or writes, has to wait for it. `Uses` keeps the last uses of every
resource and derives these waits, so that no wait is written down by hand.

A resource is a slot, a buffer, a region on SSD, the gradients of a group, or a fact such as the end
of backward. Its name is a tuple. Some resources have parts, the chunks of a group: two operations
on different chunks of a slot do not conflict, but each of them conflicts with an operation on the
whole slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from lohan.schedule.actions import LANE_OF, Action, Op, ScheduleSpec
from lohan.util.trace import LANES


class Access(Enum):
    """How an operation uses a resource."""

    READ = "read"
    WRITE = "write"
    # Ordered after all earlier writes, but later writes do not wait for it. It is used for facts
    # that every step establishes again, such as the end of backward.
    AFTER = "after"


Resource = tuple[str | int, ...]


# One use of a resource: the resource, the access, and the number of the chunk, or WHOLE.
Effect = tuple[Resource, Access, int]
WHOLE = -1

READ, WRITE, AFTER = Access.READ, Access.WRITE, Access.AFTER
BACKWARD_END: Resource = ("end of backward",)
GENERATION: Resource = ("open generation",)
UPDATES: Resource = ("updates",)
SQUARES: Resource = ("squares",)


def effects_of(action: Action, spec: ScheduleSpec) -> list[Effect]:
    """Return the resources that an operation reads and writes."""
    kind, index, chunk, at, _, _ = action
    found: list[Effect] = []
    if kind is Op.FORWARD or kind is Op.BACKWARD:
        groups = spec.sites[index]
        weights = "device slot" if spec.device_slots else "slot"
        for slot in at[: len(groups)]:
            found.append(((weights, slot), READ, WHOLE))
        access = WRITE if kind is Op.FORWARD else READ
        buffers = at[len(groups) :]
        if index in spec.offloaded and buffers:
            found.append((("device activations", buffers[-1]), access, WHOLE))
            # The activations of a site that is offloaded and spilled also use a host buffer. It is
            # written by OFFLOAD_ACTIVATIONS, not by FORWARD.
            if kind is Op.BACKWARD and len(buffers) > 1:
                found.append((("activation buffer", buffers[0]), READ, WHOLE))
        elif buffers:
            found.append((("activation buffer", buffers[0]), access, WHOLE))
        if kind is Op.BACKWARD:
            made = "device gradients" if spec.device_slots else "gradients"
            for group in groups:
                if spec.chunks[group]:
                    found.append(((made, group), WRITE, WHOLE))
    elif kind is Op.READ_WEIGHTS:
        found.append((("slot", at[0]), WRITE, WHOLE))
        found.append((("group on SSD", index), READ, WHOLE))
    elif kind is Op.READ_STATE:
        found.append((("state buffer", at[0]), WRITE, WHOLE))
        found.append((("group on SSD", index), READ, chunk))
    elif kind is Op.UPDATE:
        found.append((BACKWARD_END, AFTER, WHOLE))
        found.append((("gradients", index), WRITE, chunk))  # The last chunk frees them.
        found.append((("state buffer", at[0]), WRITE, WHOLE))
        found.append((("slot", at[1]), WRITE, chunk))
        if len(at) > 2:
            found.append((("staging buffer", at[2]), READ, WHOLE))
        found.append((UPDATES, WRITE, WHOLE))
    elif kind is Op.WRITE:
        found.append((("state buffer", at[0]), READ, WHOLE))
        found.append((("slot", at[1]), READ, chunk))
        found.append((("group on SSD", index), WRITE, chunk))
        found.append((GENERATION, AFTER, WHOLE))
    elif kind is Op.SUM_SQUARES:
        found.append((BACKWARD_END, AFTER, WHOLE))
        found.append((("gradients", index), READ, WHOLE))
        found.append((SQUARES, WRITE, WHOLE))
    elif kind is Op.SPILL_GRADIENTS:
        found.append((("gradients", index), WRITE, chunk))  # The last chunk frees them.
        found.append((("staging buffer", at[0]), WRITE, WHOLE))
        found.append((("gradients on SSD", index, chunk), WRITE, WHOLE))
    elif kind is Op.FETCH_GRADIENTS:
        found.append((("staging buffer", at[0]), WRITE, WHOLE))
        found.append((("gradients on SSD", index, chunk), READ, WHOLE))
    elif kind is Op.LOAD_WEIGHTS:
        found.append((("slot", at[0]), READ, WHOLE))
        found.append((("device slot", at[1]), WRITE, WHOLE))
    elif kind is Op.ALL_GATHER:
        found.append((("device slot", at[0]), WRITE, WHOLE))
    elif kind is Op.REDUCE_SCATTER:
        found.append((("device gradients", index), WRITE, WHOLE))
    elif kind is Op.OFFLOAD_GRADIENTS:
        found.append((("device gradients", index), READ, WHOLE))
        found.append((("gradients", index), WRITE, WHOLE))
    elif kind is Op.OFFLOAD_ACTIVATIONS:
        found.append((("device activations", at[-1]), READ, WHOLE))
        host = ("activation buffer", at[0]) if len(at) > 1 else ("activations", index)
        found.append((host, WRITE, WHOLE))
    elif kind is Op.RESTORE_ACTIVATIONS:
        host = ("activation buffer", at[0]) if len(at) > 1 else ("activations", index)
        found.append((host, READ, WHOLE))
        found.append((("device activations", at[-1]), WRITE, WHOLE))
    elif kind is Op.SPILL_ACTIVATIONS:
        found.append((("activation buffer", at[0]), READ, WHOLE))
        found.append((("activations on SSD", index), WRITE, WHOLE))
    elif kind is Op.FETCH_ACTIVATIONS:
        found.append((("activations on SSD", index), READ, WHOLE))
        found.append((("activation buffer", at[0]), WRITE, WHOLE))
    elif kind is Op.BACKWARD_DONE:
        found.append((BACKWARD_END, WRITE, WHOLE))
    elif kind is Op.END_STEP:
        found.append((BACKWARD_END, AFTER, WHOLE))
        found.append((UPDATES, AFTER, WHOLE))
        found.append((GENERATION, WRITE, WHOLE))
    return found


# -- The uses of every resource, and the waits ----------------------------------------------------

_LANE_NUMBER = {op: LANES.index(lane) for op, lane in LANE_OF.items()}
_SSD = LANES.index("ssd")


# An action that used a resource: its lane, its number in the lane, its name, and how many actions
# of each lane have finished when it has.
Use = tuple[int, int, str, list[int]]
# The last uses by several lanes. Each lane finishes in order, so its last use is enough.
LastUses = tuple[Use, ...]
# The uses of a resource since it was last written as a whole: that write, the reads of the whole,
# and the last writes and reads of any of its parts.
_Record = tuple[Use | None, LastUses, LastUses, LastUses]
# The uses of one part since then: the write of the whole resource, the last write of the part, and
# the reads of the part.
_PartRecord = tuple[Use | None, Use | None, LastUses]


class Uses:
    """The last uses of all resources, from which the waits of the next action are derived."""

    def __init__(self) -> None:
        self._records: dict[Resource, _Record] = {}
        self._parts: dict[tuple[Resource, int], _PartRecord] = {}
        self.counts = [0] * len(LANES)  # number of actions recorded for each lane
        # For each lane a vector clock: how many actions of every lane have certainly finished when
        # its next action starts, because earlier actions of the lane waited for them.
        self.known = [[0] * len(LANES) for _ in LANES]

    def copy(self) -> Uses:
        other = Uses()
        other._records, other._parts = self._records.copy(), self._parts.copy()
        other.counts = self.counts.copy()
        other.known = [known.copy() for known in self.known]
        return other

    def waits_of(self, action: Action, effects: Sequence[Effect]) -> tuple[str, ...]:
        """Record the effects of the next action and return the names it has to wait for."""
        lane = _LANE_NUMBER[action.kind]
        missing = self.missing(action, effects, self.known[lane])
        return tuple([use[2] for use, _ in missing.values()]) if missing else ()

    def missing(
        self, action: Action, effects: Sequence[Effect], known: list[int]
    ) -> dict[int, tuple[Use, Effect]]:
        """Record the effects of the next action and return the conflicting use in each lane.

        Each use is returned with the effect that conflicts with it. Uses that have finished
        according to the vector clock `known` are left out. The clock is advanced in place to
        include the uses that are returned.
        """
        kind, name = action[0], action[5]
        lane = _LANE_NUMBER[kind]
        self.counts[lane] += 1
        number = self.counts[lane]
        clock: list[int] = []
        this = (lane, number, name, clock)
        own_known = known[lane]
        if lane != _SSD or kind is Op.END_STEP:
            # A lane starts an action after the previous one has finished. The ssd lane starts
            # actions earlier, but they finish in order, and END_STEP takes effect at its finish.
            known[lane] = number
        records, parts = self._records, self._parts
        missing: dict[int, tuple[Use, Effect]] = {}
        for effect in effects:
            resource, access, part = effect
            record = records.get(resource)
            if record is None:
                record = (None, (), (), ())
            written, read, parts_written, parts_read = record
            conflicts: LastUses = read if access is WRITE else ()
            if part == WHOLE:
                if parts_written:
                    conflicts += parts_written
                if access is WRITE:
                    if parts_read:
                        conflicts += parts_read
                    records[resource] = (this, (), (), ())
                elif access is READ:
                    records[resource] = (written, _with(read, this), parts_written, parts_read)
            else:
                key = (resource, part)
                since, part_written, part_read = parts.get(key, (written, None, ()))
                if since is not written:
                    part_written, part_read = None, ()
                if part_written is not None:
                    conflicts += (part_written,)
                if access is WRITE:
                    conflicts += part_read
                    parts[key] = (written, this, ())
                    records[resource] = (written, read, _with(parts_written, this), parts_read)
                elif access is READ:
                    parts[key] = (written, part_written, _with(part_read, this))
                    records[resource] = (written, read, parts_written, _with(parts_read, this))
            for use in conflicts:
                if use[1] > known[use[0]]:
                    known[:] = map(max, known, use[3])
                    missing[use[0]] = (use, effect)
            # The write is checked last: readers of the resource have waited for it, so that the
            # clock often includes it already.
            if written is not None and written[1] > known[written[0]]:
                known[:] = map(max, known, written[3])
                missing[written[0]] = (written, effect)
        clock += known
        clock[lane] = number
        if kind is Op.END_STEP:
            known[lane] = own_known
        return missing

    def recorded(self) -> dict[str, Use]:
        """Return the latest recorded action of each name."""
        uses = [
            use
            for written, *others in self._records.values()
            for use in (written, *(use for last in others for use in last))
        ]
        for _, written, read in self._parts.values():
            uses += [written, *read]
        return {use[2]: use for use in sorted(use for use in uses if use is not None)}


def _with(uses: LastUses, last: Use) -> LastUses:
    """Return the last uses, with `last` replacing an earlier use by the same lane."""
    if not uses or (len(uses) == 1 and uses[0][0] == last[0]):
        return (last,)
    return (*[use for use in uses if use[0] != last[0]], last)
