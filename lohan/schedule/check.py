"""Whether a schedule may run on lanes. Two questions, asked of every action in order:

1. Is the plain order right: does each action find in slots, buffers and on SSD what it expects?
2. Can two lanes meet: of two actions that touch the same buffer, one of them writing, the second
   must know the first to be finished before it starts.

What an action knows comes first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from lohan.errors import LohanError
from lohan.schedule.actions import (
    DEVICE_BUFFERS,
    LANE_OF,
    Action,
    BufferState,
    Op,
    Schedule,
    ScheduleSpec,
)
from lohan.util.trace import LANES

# -- What an action of a schedule knows to be finished, and how it uses a buffer -------------------
#
# What an action knows is one number per lane: actions finish before the next of their lane starts;
# only those of the ssd lane start in order and finish in order, but the next may start before the
# last has finished. Whatever an action waits for has finished, with all that it knew.


UNKNOWN, BEFORE = -1, 0  # finished actions of a lane; BEFORE: all from before the schedule
NAME = re.compile(r"([A-Z])(\d*)(?:\.(\d+))?")


@dataclass(frozen=True)
class VectorClock:
    """What is known to be finished: so many actions of each lane, and names from before."""

    upto: tuple[int, ...] = (UNKNOWN,) * len(LANES)
    names: frozenset[str] = frozenset()

    def join(self, other: VectorClock) -> VectorClock:
        return VectorClock(tuple(map(max, self.upto, other.upto)), self.names | other.names)


def at_least(lane: str, count: int) -> VectorClock:
    return VectorClock(tuple(count if lane == other else UNKNOWN for other in LANES))


@dataclass(frozen=True)
class Use:
    """One action's use of a slot, a buffer or a region. `part` is a chunk of it, None all of it."""

    name: str
    position: int  # in its lane, from 1; BEFORE: from before the schedule
    part: tuple[int, int] | None
    writes: bool

    def known(self, clock: VectorClock) -> bool:
        lane = LANES.index(LANE_OF[Op(self.name[0])])
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


def split_buffers(
    action: Action, spec: ScheduleSpec, buffers_at: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where a site's activations lie: a buffer in host memory, one on the device."""
    if action.index in spec.offloaded:
        return buffers_at[:-1], buffers_at[-1:]
    return buffers_at, ()


Touch = tuple[tuple[object, ...], tuple[int, int] | None, bool]  # buffer, part of it, writes


def touches(action: Action, spec: ScheduleSpec) -> Iterator[Touch]:
    """What an action touches."""
    kind, index, at, chunk = action.kind, action.index, action.at, (action.index, action.chunk)
    if kind in (Op.FORWARD, Op.BACKWARD):
        groups = len(spec.sites[index])
        for slot in at[:groups]:
            yield ("device" if spec.device_slots else "slot", slot), None, False
        buffers, by = split_buffers(action, spec, at[groups:])
        for buffer in buffers:
            yield ("act", buffer), None, kind == Op.FORWARD
        for buffer in by:
            yield ("device_act", buffer), None, kind == Op.FORWARD
    elif kind == Op.READ_WEIGHTS:
        yield ("slot", at[0]), None, True
        yield ("weights of group", index), None, False
    elif kind == Op.READ_STATE:
        yield ("ring", at[0]), None, True
        yield ("state of group", index), chunk, False
    elif kind in (Op.UPDATE, Op.WRITE):
        yield ("ring", at[0]), None, kind == Op.UPDATE
        yield ("slot", at[1]), chunk, kind == Op.UPDATE
        for buffer in at[2:]:
            yield ("stage", buffer), None, False
        if kind == Op.WRITE:
            yield ("weights of group", index), chunk, True
            yield ("state of group", index), chunk, True
    elif kind in (Op.SPILL_GRADIENTS, Op.FETCH_GRADIENTS):
        yield ("stage", at[0]), None, True
        yield ("gradients of group on SSD", index), chunk, kind == Op.SPILL_GRADIENTS
    elif kind == Op.LOAD_WEIGHTS:
        yield ("slot", at[0]), None, False
        yield ("device", at[1]), None, True
    elif kind == Op.ALL_GATHER:
        yield ("device", at[0]), None, True
    elif kind in (Op.OFFLOAD_ACTIVATIONS, Op.RESTORE_ACTIVATIONS):
        yield ("activations of site", index), None, kind == Op.OFFLOAD_ACTIVATIONS
        yield ("device_act", at[-1]), None, kind == Op.RESTORE_ACTIVATIONS
        for buffer in at[:-1]:
            yield ("act", buffer), None, kind == Op.OFFLOAD_ACTIVATIONS
    elif kind in (Op.SPILL_ACTIVATIONS, Op.FETCH_ACTIVATIONS):
        yield ("act", at[0]), None, kind == Op.FETCH_ACTIVATIONS
        yield ("activations of site on SSD", index), None, kind == Op.SPILL_ACTIVATIONS


# -- Check ----------------------------------------------------------------------------------------


SITE_OPS = (
    Op.FORWARD, Op.BACKWARD, Op.OFFLOAD_ACTIVATIONS, Op.RESTORE_ACTIVATIONS, Op.SPILL_ACTIVATIONS,
    Op.FETCH_ACTIVATIONS,
)  # fmt: skip
GROUP_OPS = (
    Op.READ_WEIGHTS, Op.SUM_SQUARES, Op.LOAD_WEIGHTS, Op.OFFLOAD_GRADIENTS, Op.ALL_GATHER,
    Op.REDUCE_SCATTER,
)  # fmt: skip


def validate(
    schedule: Schedule, spec: ScheduleSpec, buffers: BufferState, *, whole: bool = False,
    by_interval: bool = False,
) -> None:  # fmt: skip
    """Raises a LohanError that names the token. `buffers` is the one the schedule was made from.
    `whole`: it starts with a step, so that its first C must find every group updated; every further
    one must in any case. `by_interval`: some steps end without a commit, and write all or
    nothing of what stays in memory."""
    check = _Check(spec, buffers, whole=whole, by_interval=by_interval)
    for action in schedule:
        check.form(action)
        check.clock(action)
        check.content(action)
        check.races(action)


class _Check:
    def __init__(
        self, spec: ScheduleSpec, buffers: BufferState, *, whole: bool, by_interval: bool
    ) -> None:
        self.spec, self.by_interval = spec, by_interval
        self.from_start = whole  # nothing that the schedule relies on came before it
        self.whole_step = whole  # since the last C, or the start, is one step
        self.slots = [*buffers.slots.held, *spec.host_cached_weights]
        self.ring: list[tuple[int, int] | None] = [*[None] * spec.ring, *spec.host_cached_state]
        self.stage: list[tuple[int, int] | None] = [None] * spec.ring
        self.device: list[int | None] = list(buffers.device.held)
        there = {i for i, held in enumerate(buffers.device.held) if held is not None}
        self.whole_there = there  # by A
        self.acts: list[int | None] = [None] * spec.act_buffers  # site of each buffer
        self.device_acts: list[int | None] = [None] * DEVICE_BUFFERS
        self.out: set[int] = set()  # sites whose kept activations are on SSD
        # Updated, on SSD still the old one.
        self.unwritten = {(a.index, a.chunk) for a in buffers.behind if a.kind == Op.WRITE}
        # Updated, not written, and not to be used but for forward.
        self.second_updates = set(buffers.second_updates)
        self.old: set[tuple[int, int]] = set()  # whose weights of before lie in a slot
        self.updated: set[tuple[int, int]] = set()  # since the last C
        self.held: set[int] = set()  # gradients known, update to come
        self.put_away: set[tuple[int, int]] = set()  # held gradients that are on SSD
        self.since_forward: set[int] = set()  # groups updated after the last F
        self.count = dict.fromkeys(LANES, 0)
        # The compute lane is the caller: what it did before it made the schedule is finished. Of a
        # device with a memory of its own only its order is known.
        begun = VectorClock() if spec.device_slots else at_least("compute", BEFORE)
        self.last_start = {lane: begun for lane in LANES}
        self.last_done = {lane: begun.join(at_least(lane, BEFORE)) for lane in LANES}
        self.done: dict[str, VectorClock] = {}  # clock of the latest action of each name
        self.start = VectorClock()  # of the action under check
        self.last_gradient: dict[int, Use] = {}  # latest B of each group
        self.step_end: Use | None = None  # the latest
        self.last_update: Use | None = None  # of this step
        self.uses: dict[tuple[object, ...], list[Use]] = {}
        for kind in ("slots", "device", "ring", "stage", "acts", "device_acts"):
            for number, names in enumerate(getattr(buffers, kind).overwrite_after):
                buffer = kind.removesuffix("s")
                self.uses[buffer, number] = [from_before(name) for name in names]
        self.before = {use.name for uses in self.uses.values() for use in uses}

    def fail(self, action: Action, problem: str) -> None:
        raise LohanError(f"schedule: {action.token()}: {problem}")

    # -- form -------------------------------------------------------------------------------------

    def form(self, action: Action) -> None:
        """Names, slots and buffers exist."""
        if not self._exists(action.kind, action.index, action.chunk):
            self.fail(action, "there is no such site, group or chunk")
        for wait in action.waits:
            match = NAME.fullmatch(wait)
            if match is None or match[1] not in LANE_OF or not self._exists(
                match[1], int(match[2] or -1), int(match[3] or -1)
            ):  # fmt: skip
                self.fail(action, f"waits for {wait}, which no schedule of this spec has")
        sizes = self._sizes(action)
        least = len(sizes)
        if action.kind == Op.FORWARD:  # without training nothing is kept
            least = len(self.spec.sites[action.index])
        elif action.kind == Op.UPDATE:
            least = 2
        if len(action.at) not in (least, len(sizes)):
            self.fail(action, f"has {len(action.at)} slots and buffers, wants {len(sizes)}")
        if any(number >= size for number, size in zip(action.at, sizes, strict=False)):
            self.fail(action, "names a slot or buffer that does not exist")

    def _sizes(self, action: Action) -> tuple[int, ...]:
        """How many slots or buffers there are, for each that an action names."""
        slots, ring, stage = len(self.slots), len(self.ring), len(self.stage)
        act = (self.spec.act_buffers,)
        moved = act if action.index in self.spec.spilled_sites else ()
        on_device = (DEVICE_BUFFERS,) if action.index in self.spec.offloaded else ()
        if action.kind in (Op.FORWARD, Op.BACKWARD):
            weights = (len(self.device) if self.spec.device_slots else slots,)
            return weights * len(self.spec.sites[action.index]) + moved + on_device
        if action.kind in (Op.OFFLOAD_ACTIVATIONS, Op.RESTORE_ACTIVATIONS):
            return moved + on_device
        return {
            "R": (slots,), "S": (ring,), "U": (ring, slots, stage), "W": (ring, slots),
            "P": (stage,), "G": (stage,), "L": (slots, len(self.device)), "O": act, "I": act,
            "A": (len(self.device),),
        }.get(action.kind, ())  # fmt: skip

    def _exists(self, kind: str, index: int, chunk: int) -> bool:
        if kind in (Op.BACKWARD_DONE, Op.END_STEP):
            return index == chunk == -1
        if kind in SITE_OPS:
            return 0 <= index < len(self.spec.sites) and chunk == -1
        if not 0 <= index < len(self.spec.chunks):
            return False
        return chunk == -1 if kind in GROUP_OPS else 0 <= chunk < self.spec.chunks[index]

    # -- what is known when -----------------------------------------------------------------------

    def clock(self, action: Action) -> None:
        lane = action.lane
        # An ssd action starts when the one before it has started, any other when it has finished.
        start = (self.last_start if lane == "ssd" else self.last_done)[lane]
        for wait in action.waits:
            if wait in self.done:
                start = start.join(self.done[wait])
            elif wait in self.before:  # others from before touch nothing that is checked
                start = start.join(VectorClock(names=frozenset((wait,))))
        self.count[lane] += 1
        self.start = self.last_start[lane] = start
        done = start.join(self.last_done[lane]).join(at_least(lane, self.count[lane]))
        self.last_done[lane] = self.done[action.name] = done

    def races(self, action: Action) -> None:
        for touched, part, writes in touches(action, self.spec):
            use = Use(action.name, self.count[action.lane], part, writes)
            others = self.uses.setdefault(touched, [])
            for other in others:
                if use.meets(other) and not other.known(self.start):
                    verb = "overwrites" if writes else "uses"
                    where = " ".join(map(str, touched))
                    self.fail(action, f"{verb} {where} while {other.name} may be in flight")
            if writes:
                others[:] = [o for o in others if part is not None and o.part != part]
            others.append(use)

    # -- the plain order --------------------------------------------------------------------------

    def content(self, action: Action) -> None:
        self._CONTENT[action.kind](self, action)

    def _forward(self, action: Action) -> None:
        self._weights(action)
        for group in self.spec.sites[action.index]:
            if group in self.held:
                self.fail(action, f"the weights of group {group} are not updated yet")
        self._put_activations(action, action.at[len(self.spec.sites[action.index]) :])
        self.since_forward.clear()

    def _backward(self, action: Action) -> None:
        self._weights(action)
        for group in self.spec.sites[action.index]:
            if group in self.since_forward or group in self.held:
                self.fail(action, f"group {group} was handed over before its last use")
            self.last_gradient[group] = Use(action.name, self.count["compute"], None, True)
        self._activations(action, action.at[len(self.spec.sites[action.index]) :])

    def _weights(self, action: Action) -> None:
        held = self.device if self.spec.device_slots else self.slots
        for group, slot in zip(self.spec.sites[action.index], action.at, strict=False):
            if held[slot] != group:
                self.fail(action, f"slot {slot} holds group {held[slot]}, not {group}")
            self._new(action, group)
            if self.spec.net and slot not in self.whole_there:
                self.fail(action, f"slot {slot} holds a shard of group {group}, not all of it")

    def _new(self, action: Action, group: int) -> None:
        if any(key[0] == group for key in self.old):
            self.fail(action, f"the weights of group {group} are those of the step before")

    def _load(self, action: Action) -> None:
        slot, device_slot = action.at
        if self.slots[slot] != action.index:
            self.fail(action, f"slot {slot} holds group {self.slots[slot]}")
        self._new(action, action.index)
        self.device[device_slot] = action.index
        self.whole_there.discard(device_slot)

    def _all_gather(self, action: Action) -> None:
        slot = action.at[0]
        if self.device[slot] != action.index:
            self.fail(action, f"slot {slot} holds group {self.device[slot]}")
        self.whole_there.add(slot)

    def _move_gradients(self, action: Action) -> None:
        self._gradient(action)
        self.last_gradient[action.index] = Use(action.name, self.count[action.lane], None, True)

    def _offload_activations(self, action: Action) -> None:
        self._activations(action, action.at)

    def _restore(self, action: Action) -> None:
        for buffer in action.at[:-1]:
            self._holds(action, "buffer", self.acts[buffer])
        self.device_acts[action.at[-1]] = action.index

    def _spill_activations(self, action: Action) -> None:
        self._holds(action, "buffer", self.acts[action.at[0]])
        self.out.add(action.index)

    def _fetch_activations(self, action: Action) -> None:
        if self.from_start and action.index not in self.out:
            self.fail(action, "these activations were not moved out")
        self.acts[action.at[0]] = action.index

    def _put_activations(self, action: Action, at: tuple[int, ...]) -> None:
        buffers, by = split_buffers(action, self.spec, at)
        for buffer in buffers:
            self.acts[buffer] = action.index
        for buffer in by:
            self.device_acts[buffer] = action.index

    def _activations(self, action: Action, at: tuple[int, ...]) -> None:
        buffers, by = split_buffers(action, self.spec, at)
        for buffer in buffers:
            self._holds(action, "buffer", self.acts[buffer])
        for buffer in by:
            self._holds(action, "the device", self.device_acts[buffer])

    def _holds(self, action: Action, buffer: str, site: int | None) -> None:
        if site != action.index:
            self.fail(action, f"{buffer} holds activations of {site}")

    def _end_backward(self, action: Action) -> None:
        self.last_gradient.clear()
        self.since_forward.clear()

    def _read_weights(self, action: Action) -> None:
        if action.at[0] >= self.spec.slots:
            self.fail(action, f"slot {action.at[0]} belongs to the host cache")
        group = action.index
        if group in self.spec.updated_twice:
            self._drop(group)
        if any(number == group for number, _ in self.unwritten):
            self.fail(action, "the newest weights are not written yet")
        self.slots[action.at[0]] = group

    def _drop(self, group: int) -> None:
        """What updates of a group have made and nobody wrote is to be made a second time."""
        once = {key for key in self.unwritten | self.second_updates if key[0] == group}
        if not once:
            return
        self.unwritten -= once
        self.updated -= once
        self.second_updates -= once
        self.old |= once
        slots = [slot for slot, held in enumerate(self.slots) if held == group]
        for slot in slots:
            self.slots[slot] = None
        self.device = [None if held == group else held for held in self.device]

    def _read_state(self, action: Action) -> None:
        if action.at[0] >= self.spec.ring:
            self.fail(action, f"ring buffer {action.at[0]} belongs to the host cache")
        unwritten = (action.index, action.chunk) in self.unwritten
        if unwritten and action.index not in self.spec.updated_twice:
            self.fail(action, "the newest state is not written yet")
        self.ring[action.at[0]] = (action.index, action.chunk)

    def _hold(self, action: Action) -> None:
        self._gradient(action)
        self.held.add(action.index)

    def _gradient(self, action: Action) -> None:
        """Gradients are complete: after the group's last B, or after the end of backward."""
        source = self.last_gradient.get(action.index)
        if source is not None and not source.known(self.start):
            self.fail(action, f"the gradients of {source.name} may not be there yet")
        if not any(wait[0] in "BXDHE" for wait in action.waits):
            self.fail(action, "waits for no gradient (B, X, D, H or E)")

    def _update(self, action: Action) -> None:
        key = (action.index, action.chunk)
        self._gradient(action)
        self._chunk_at(action)
        if key in self.updated:
            self.fail(action, "is updated a second time in this step")
        if self.from_start and self.spec.clips_groups and action.index not in self.held:
            self.fail(action, "the norm of its gradients is not taken")
        if key in self.put_away and (len(action.at) < 3 or self.stage[action.at[2]] != key):
            self.fail(action, "its held gradients are on SSD and in no staging buffer")
        self.updated.add(key)
        self.unwritten.add(key)
        self.last_update = Use(action.name, self.count["optimizer"], None, True)
        if action.index not in self.spec.updated_twice:
            self.put_away.discard(key)
        if key in self.old:  # of a step whose backward has ended
            self.old.discard(key)
        else:
            self.since_forward.add(action.index)
        self.device = [None if held == action.index else held for held in self.device]
        if action.chunk == self.spec.chunks[action.index] - 1:
            self.held.discard(action.index)

    def _write(self, action: Action) -> None:
        self._chunk_at(action)
        if (action.index, action.chunk) not in self.unwritten:
            self.fail(action, "there is nothing new to write")
        self.unwritten.discard((action.index, action.chunk))
        if action.index in self.spec.updated_twice:
            self.put_away.discard((action.index, action.chunk))
        if self.step_end is not None and not self.step_end.known(self.start):
            self.fail(action, "would write into the generation that C is committing")

    def _chunk_at(self, action: Action) -> None:
        """State and weights of the chunk lie where the action says."""
        buffer, slot = action.at[:2]
        if self.ring[buffer] != (action.index, action.chunk):
            self.fail(action, f"ring buffer {buffer} holds {self.ring[buffer]}")
        if self.slots[slot] != action.index:
            self.fail(action, f"slot {slot} holds group {self.slots[slot]}")

    def _spill_gradients(self, action: Action) -> None:
        if action.index not in self.held:
            self.fail(action, "these gradients are not held")
        self.put_away.add((action.index, action.chunk))
        self.stage[action.at[0]] = None

    def _fetch_gradients(self, action: Action) -> None:
        if self.from_start and (action.index, action.chunk) not in self.put_away:
            self.fail(action, "these gradients were not put away")
        self.stage[action.at[0]] = (action.index, action.chunk)

    def _end_step(self, action: Action) -> None:
        stays = {k for k in self.spec.host_cached_state if k[0] in self.spec.host_cached_weights}
        lost = self.unwritten - stays
        if self.spec.write_through and (not self.by_interval or not stays <= self.unwritten):
            lost = self.unwritten
        if lost:
            group, chunk = min(lost)
            self.fail(action, f"U{group}.{chunk} is not written yet")
        everything = {(g, c) for g, n in enumerate(self.spec.chunks) for c in range(n)}
        if self.whole_step and self.updated != everything:
            group, chunk = min(everything - self.updated)
            self.fail(action, f"group {group} chunk {chunk} was not updated in this step")
        if self.last_update is not None and not self.last_update.known(self.start):
            self.fail(action, f"{self.last_update.name} may still be in flight")
        self.last_update = None
        self.unwritten.clear()
        self.updated.clear()
        self.whole_step = True
        self.step_end = Use("C", self.count["ssd"], None, True)

    _CONTENT: ClassVar[dict[str, Callable[[_Check, Action], None]]] = {
        Op.FORWARD: _forward,
        Op.BACKWARD: _backward,
        Op.LOAD_WEIGHTS: _load,
        Op.ALL_GATHER: _all_gather,
        Op.REDUCE_SCATTER: _move_gradients,
        Op.OFFLOAD_GRADIENTS: _move_gradients,
        Op.OFFLOAD_ACTIVATIONS: _offload_activations,
        Op.RESTORE_ACTIVATIONS: _restore,
        Op.SPILL_ACTIVATIONS: _spill_activations,
        Op.FETCH_ACTIVATIONS: _fetch_activations,
        Op.BACKWARD_DONE: _end_backward,
        Op.READ_WEIGHTS: _read_weights,
        Op.READ_STATE: _read_state,
        Op.SUM_SQUARES: _hold,
        Op.UPDATE: _update,
        Op.WRITE: _write,
        Op.SPILL_GRADIENTS: _spill_gradients,
        Op.FETCH_GRADIENTS: _fetch_gradients,
        Op.END_STEP: _end_step,
    }
