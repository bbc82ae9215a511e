"""Functions that build the schedule of a phase from the spec and the state of the buffers.

The text form of the actions is described in actions.py. With `overlap=False`, the actions run one
after the other in the order of the schedule. Otherwise lanes run them concurrently, and each action
starts as soon as the actions that it waits for have finished.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from lohan.errors import LohanError
from lohan.schedule.actions import (
    DEVICE_BUFFERS,
    Action,
    BufferState,
    Schedule,
    ScheduleSpec,
    effects_of,
)
from lohan.schedule.ops import AFTER, READ, SQUARES, WHOLE, WRITE, Effect, Op, Operation
from lohan.schedule.placement import (
    Gradient,
    Persist,
    Phase,
    Placement,
    Residence,
    StepPlacement,
)

# Resources of a phase, in addition to those of its actions (actions.py).
# In mode `naive`, a chunk is read only after the previous chunk was written.
CHUNK_TURN = ("turn of a chunk",)
# With `head_alone`, the gradients of the first group leave the device before others are computed.
HEAD_ROOM = ("gradients of the head on the device",)

# -- The bookkeeping behind the phases ------------------------------------------------------------


class Ring:
    """A set of buffers that are taken in turn. `taken` counts how many were taken so far."""

    def __init__(self, size: int, taken: int) -> None:
        self.size, self.taken = size, taken

    def take(self) -> int:
        """Take the next buffer and return its number."""
        self.taken += 1
        return (self.taken - 1) % self.size


class Upcoming:
    """The remaining uses of each group in this phase and, with `then`, in the next phase."""

    def __init__(self, groups: Sequence[int], then: Sequence[int] = ()) -> None:
        self._passed, self._phase_end, self._all = 0, len(groups), len(groups) + len(then)
        self._at: dict[int, deque[int]] = {}
        for position, group in enumerate((*groups, *then)):
            self._at.setdefault(group, deque()).append(position)

    def passed(self, groups: Sequence[int]) -> None:
        """Record that `groups` were used. They are expected to be the next groups in the order."""
        self._passed += len(groups)
        for group in groups:
            self._at[group].popleft()

    def distance(self, held: int | None, *, then: bool = False) -> float:
        """Return the number of uses until the group `held` is used again.

        `held` is None for an empty slot, and the result is then inf.

        A group without a further use counts as used at the end of the phase or, with `then`, at the
        end of the phase after it.
        """
        if held is None:
            return float("inf")
        end = self._all if then else self._phase_end
        at = self._at.get(held)
        return min(at[0] if at else end, end) - self._passed


class Builder:
    """A builder that emits the actions of a phase in program order and tracks slots and buffers.

    The waits of an action are derived from its effects (actions.py). `placed` determines, for the
    updates in this phase, when each group is updated and where its data is. The writes that the
    previous phase left behind are emitted first. With `defer_writes`, the caller places them
    between the actions of this phase.
    """

    def __init__(
        self,
        spec: ScheduleSpec,
        buffers: BufferState,
        placed: StepPlacement | None = None,
        *,
        defer_writes: bool = False,
    ) -> None:
        self.spec, self._placed = spec, placed
        self.out: list[Action] = []
        self.uses = buffers.uses.copy()
        # The group in each weight slot in host memory and on the device, or None.
        self.slots, self.device = list(buffers.slots), list(buffers.device)
        self.ring, self.staging = Ring(spec.ring, buffers.ring), Ring(spec.ring, buffers.stage)
        self.acts = Ring(spec.act_buffers, buffers.acts)
        self.device_acts = Ring(DEVICE_BUFFERS, buffers.device_acts)
        # The slot of each cached group, and the state buffer of each cached (group, chunk).
        self.cached: dict[int | tuple[int, int], int] = {
            **{group: spec.slots + i for i, group in enumerate(spec.host_cached_weights)},
            **{key: spec.ring + i for i, key in enumerate(spec.host_cached_state)},
        }
        self.needed: list[int] = []  # groups that were prefetched and are still to be used
        self.queue: list[tuple[int, int]] = []  # (group, chunk) to update, in this order
        self.fetched = self.done = 0  # how many chunks of the queue were read, and updated
        self.read: dict[tuple[int, int], int] = {}  # (group, chunk) -> its state buffer
        self.staged: dict[tuple[int, int], int] = {}  # (group, chunk) -> its staging buffer
        self.unwritten: list[Action] = []  # writes that this phase leaves to the next one
        # Held groups that this phase updates before they are used.
        self.due: dict[int, None] = {}
        self.behind = deque(buffers.behind)  # writes that the previous phase left to this one
        if not defer_writes:
            self.emit_left_writes(len(self.behind))

    @property
    def placed(self) -> StepPlacement:
        assert self._placed is not None
        return self._placed

    @property
    def one_by_one(self) -> bool:
        """True if chunks are updated one after the other, as in mode `naive`."""
        return self._placed is not None and self._placed.mode == "naive"

    def result(self) -> tuple[Schedule, BufferState]:
        """Return the schedule and the state of slots and buffers after it."""
        return tuple(self.out), BufferState(
            tuple(self.slots),
            tuple(self.device),
            self.uses,
            self.ring.taken,
            self.staging.taken,
            self.acts.taken,
            self.device_acts.taken,
            tuple(self.behind),
        )

    def emit(
        self,
        kind: Operation,
        index: int = -1,
        chunk: int = -1,
        at: tuple[int, ...] = (),
        *more: Effect,
    ) -> None:
        """Add an action. `more` are effects that depend on the phase and not only on the action."""
        self.emit_action(Action(kind, index, chunk, at), *more)

    def emit_action(self, action: Action, *more: Effect) -> None:
        effects = effects_of(action, self.spec)
        waits = self.uses.waits_of(action, [*effects, *more] if more else effects)
        self.out.append(action.waiting_for(waits) if waits else action)

    def emit_left_writes(self, count: int) -> None:
        """Emit up to `count` of the writes that the previous phase left behind."""
        for _ in range(min(count, len(self.behind))):
            self.emit_action(self.behind.popleft())

    # -- weights ----------------------------------------------------------------------------------

    def slot_of(self, group: int) -> int | None:
        if group in self.cached:
            return self.cached[group]
        return self.slots.index(group) if group in self.slots else None

    def bring_site(self, site: int, upcoming: Upcoming, *, must: bool) -> bool:
        """Read all missing weights of a site into host slots.

        Weights that are still needed are not evicted. If there are too few other slots, read
        nothing and return False; with `must`, this is an error.
        """
        groups = self.spec.sites[site]
        missing = [group for group in groups if self.slot_of(group) is None]
        free = [held for held in self.slots if held not in self.needed and held not in groups]
        if len(missing) > len(free):
            if must:
                raise LohanError(
                    f"{self.spec.slots} weight slots cannot hold the {len(groups)} groups of one "
                    "block; raise --host"
                )
            return False
        self.needed.extend(groups)
        for group in groups:
            self.bring(group, upcoming)
        return True

    def bring(self, group: int, upcoming: Upcoming) -> None:
        """Read the weights of a group, replacing the group whose next use is farthest away.

        If logged gradients are about to be applied, the weights of the last full state are read.
        `upcoming` has the next uses.
        """
        replays = self.spec.log and group in self.due and group not in self.cached
        slot = self.slot_of(group)
        if slot is not None and not replays:
            return
        if slot is None:
            free = [i for i, held in enumerate(self.slots) if held not in self.needed]
            slot = max(free, key=lambda i: upcoming.distance(self.slots[i]))
        self.emit(Op.READ_BASE_WEIGHTS if replays else Op.READ_WEIGHTS, group, at=(slot,))
        self.slots[slot] = group

    def held_slot(self, group: int) -> int:
        slot = self.slot_of(group)
        assert slot is not None
        return slot

    # -- the device -------------------------------------------------------------------------------

    def load_site(self, site: int, upcoming: Upcoming, busy: Sequence[int], *, must: bool) -> bool:
        """Load the weights of a site from host slots to the device.

        Groups in `busy` are not evicted. If there are too few other slots on the device, load
        nothing and return False; with `must`, this is an error.
        """
        groups, held = self.spec.sites[site], self.device
        missing = [group for group in groups if group not in held]
        if not missing:
            return True
        free = [i for i, group in enumerate(held) if group not in busy and group not in groups]
        if len(missing) > len(free):
            if must:
                raise LohanError(
                    f"{self.spec.device_slots} weight slots on the device cannot hold the "
                    f"{len(groups)} groups of one block; raise --device-memory"
                )
            return False
        free.sort(key=lambda i: -upcoming.distance(held[i], then=True))
        for group, slot in zip(missing, free, strict=False):
            self.emit(Op.LOAD_WEIGHTS, group, at=(self.held_slot(group), slot))
            held[slot] = group
            if self.spec.net:  # Only the shard of this rank was loaded.
                self.emit(Op.ALL_GATHER, group, at=(slot,))
        return True

    def weights_of(self, groups: Sequence[int]) -> tuple[int, ...]:
        """Return the slots from which compute reads the weights of these groups."""
        find = self.device.index if self.spec.device_slots else self.held_slot
        return tuple(map(find, groups))

    def offload_gradients(self, group: int, *rooms: Effect) -> None:
        """Copy the gradients of a group to host memory.

        `rooms` are the effects of the copy on the rooms for gradients (`_GradientRooms`).
        """
        if self.spec.device_slots:
            if self.spec.net:
                self.emit(Op.REDUCE_SCATTER, group)
            self.emit(Op.OFFLOAD_GRADIENTS, group, -1, (), *rooms)

    # -- kept activations -------------------------------------------------------------------------

    def act_buffer(self, site: int) -> tuple[int, ...]:
        """Take a host buffer for a site's activations, and return its number as a tuple.

        The result is empty if the activations of the site are not spilled.
        """
        return (self.acts.take(),) if site in self.spec.spilled_sites else ()

    def device_act_buffer(self, site: int) -> tuple[int, ...]:
        """Take a device buffer for a site's activations, and return its number as a tuple.

        The result is empty if the activations of the site are not offloaded.
        """
        return (self.device_acts.take(),) if site in self.spec.offloaded else ()

    def offload_activations(
        self, site: int, host_buffers: tuple[int, ...], device_buffers: tuple[int, ...]
    ) -> None:
        """Copy a site's activations to the host, and from there to SSD if they are spilled.

        Each of the two arguments has at most one buffer.
        """
        if device_buffers:
            self.emit(Op.OFFLOAD_ACTIVATIONS, site, at=(*host_buffers, *device_buffers))
        if host_buffers:
            self.emit(Op.SPILL_ACTIVATIONS, site, at=host_buffers)

    # -- updates ----------------------------------------------------------------------------------

    def read_ahead(self) -> None:
        """Read the state of the next chunks of the queue, ahead of their updates.

        All ring buffers but one are used to read ahead. The last buffer is being written. Reads and
        writes therefore alternate, and the drive always has a queued request. With a ring of one
        buffer, one chunk is read ahead.
        """
        ahead = max(1, self.spec.ring - 1)
        while self.fetched < len(self.queue) and self.fetched < self.done + ahead:
            self._fetch(self.queue[self.fetched])
            self.fetched += 1

    def _fetch(self, key: tuple[int, int]) -> None:
        group, chunk = key
        if self.placed.of(group).gradient is Gradient.SSD:
            logged = self.spec.log and key not in self.cached
            fetch = Op.FETCH_LOGGED if logged else Op.FETCH_GRADIENTS
            self.staged[key] = self.stage(fetch, group, chunk)
        if key in self.cached:
            self.read[key] = self.cached[key]
            return
        buffer = self.ring.take()
        self.read[key] = buffer
        if self.spec.log and group in self.cached:
            self.emit(Op.READ_BASE, group, chunk, (buffer, self.cached[group]))
            return
        one_by_one = [(CHUNK_TURN, WRITE, WHOLE)] if self.one_by_one else []
        self.emit(Op.READ_STATE, group, chunk, (buffer,), *one_by_one)

    def stage(self, kind: Operation, group: int, chunk: int, *more: Effect) -> int:
        """Spill or fetch a chunk of held gradients through a staging buffer; return the buffer."""
        buffer = self.staging.take()
        while buffer in self.staged.values():
            buffer = self.staging.take()
        self.emit(kind, group, chunk, (buffer,), *more)
        return buffer

    def update(self, group: int, *, frees: Sequence[Effect] = ()) -> None:
        """Read, update and write all chunks of a group.

        `frees` are the effects with which the update of the last chunk frees the gradient room.
        """
        slot, placement = self.held_slot(group), self.placed.of(group)
        for chunk in range(self.spec.chunks[group]):
            key = (group, chunk)
            if key not in self.read and key not in self.queue:
                self.queue.append(key)
            while key not in self.read:
                self._fetch(self.queue[self.fetched])
                self.fetched += 1
            buffer = self.read.pop(key)
            at: tuple[int, ...] = (buffer, slot)
            if key in self.staged:
                at = (buffer, slot, self.staged.pop(key))
            last = chunk == self.spec.chunks[group] - 1
            self.emit(Op.UPDATE, group, chunk, at, *(frees if last else ()))
            self.done += 1
            self._write(Action(Op.WRITE, group, chunk, (buffer, slot)), placement)
            if not self.one_by_one:
                self.read_ahead()
        self.device = [None if held == group else held for held in self.device]

    def _write(self, action: Action, placement: Placement) -> None:
        """Emit the write of an updated chunk, defer it to the next phase, or omit it.

        `placement` decides which. If the log can restore the chunk, only its weights are written,
        unless they are cached.
        """
        persist = placement.persist_of(action.chunk)
        if persist is Persist.NOW:
            self.emit_action(action, *([(CHUNK_TURN, READ, WHOLE)] if self.one_by_one else []))
        elif persist is Persist.BEHIND:
            self.unwritten.append(action)
        elif persist is Persist.LOG and placement.weights is Residence.STREAM:
            self.emit(Op.WRITE_WEIGHTS, action.index, action.chunk, action.at[1:])


# -- Phases ---------------------------------------------------------------------------------------


def forward(
    spec: ScheduleSpec,
    buffers: BufferState,
    order: Sequence[int],
    previous: StepPlacement | None = None,
    *,
    training: bool = True,
) -> tuple[Schedule, BufferState]:
    """Return the schedule of forward over the sites in `order`.

    `previous` is the placement of the previous step if this forward completes that step. The held
    groups of that step are then updated here, each before it is used, and that step ends after the
    last update. If it has chunks that are persisted BEHIND, they are written in the following
    backward, and the previous step ends there.

    Without `training`, no backward follows and no activations are kept.
    """
    b = Builder(spec, buffers, previous)
    held = b.due = dict.fromkeys(() if previous is None else previous.held)
    ends = previous is not None and previous.ends is not Phase.BACKWARD
    used = [group for site in order for group in spec.sites[site]]
    backward_groups = (
        [group for site in reversed(order) for group in spec.sites[site]] if training else []
    )
    upcoming = Upcoming(used, backward_groups)
    first_use = dict.fromkeys(g for g in used if g in held)
    # Groups that this forward does not use, which include resident groups, are updated first.
    unused = [g for g in held if g not in first_use]
    b.queue = [(g, c) for g in (*unused, *first_use) for c in range(spec.chunks[g])]
    if ends and not held:
        b.emit(Op.END_STEP)

    def update_first(group: int) -> None:
        if group in held:
            del held[group]
            b.update(group)
            if not held and not b.unwritten:
                b.emit(Op.END_STEP)

    for group in unused:
        b.bring(group, upcoming)
        update_first(group)
    reached = _Reach(b, order, upcoming, release=True)
    for position, site in enumerate(order):
        reached.bring(position, then=update_first)
        reached.load(position)
        groups = spec.sites[site]
        host_buffers = b.act_buffer(site) if training else ()
        by = b.device_act_buffer(site) if training else ()
        b.emit(Op.FORWARD, site, at=(*b.weights_of(groups), *host_buffers, *by))
        reached.passed(groups)
        b.offload_activations(site, host_buffers, by)
    b.behind.extend(b.unwritten)
    if b.unwritten:
        b.behind.append(Action(Op.END_STEP))
    if not (order and training):
        b.emit_left_writes(len(b.behind))
    return b.result()


def backward(
    spec: ScheduleSpec,
    buffers: BufferState,
    order: Sequence[int],
    placed: StepPlacement,
    *,
    unreached: Sequence[int] = (),
) -> tuple[Schedule, BufferState]:
    """Return the schedule of backward over the sites in `order`.

    `placed` determines for each group whether it is updated after its last use or its gradients are
    held. `unreached` groups are updated after the end of backward. If nothing is held, the step
    ends.

    If the step speculates, the norm is known at E, and the step ends in the next forward. If the
    plan spills no gradients, they stay in memory until the step ends, so that a clipped step can be
    corrected.
    """
    last_use_groups, held = last_uses(spec, order), frozenset(placed.held)
    b = Builder(spec, buffers, placed, defer_writes=bool(order) and placed.all_held)
    used = [group for site in order for group in spec.sites[site]]
    upcoming = Upcoming(used)
    share = -(-len(b.behind) // max(1, len(order)))
    if not b.one_by_one:
        updated = [g for groups in last_use_groups for g in groups if g not in held]
        b.queue += [(g, c) for g in updated for c in range(spec.chunks[g])]
    reached, restoring = _Reach(b, order, upcoming), _Restoring(b, order)
    rooms = _GradientRooms(spec)
    for position, site in enumerate(order):
        reached.bring(position)
        restoring.fetch(position)
        if not b.one_by_one:
            b.read_ahead()
        reached.load(position)
        groups = spec.sites[site]
        buffers_read = restoring.restore(position)
        b.emit(
            Op.BACKWARD, site, -1, b.weights_of(groups) + buffers_read, *rooms.taken_by_backward()
        )
        reached.passed(groups)
        for group in last_use_groups[position]:
            b.offload_gradients(group, *rooms.taken_by_offload())
            _update_or_hold(b, group, rooms)
        b.emit_left_writes(share)
    summed = [(SQUARES, AFTER, WHOLE)] if placed.speculates else []
    b.emit(Op.BACKWARD_DONE, -1, -1, (), *summed)
    for group in _trained(spec, unreached):
        if group in held:
            _hold(b, group)
        else:
            b.bring(group, Upcoming(()))
            b.update(group)
    if placed.ends is Phase.BACKWARD:
        b.emit(Op.END_STEP)
    return b.result()


def finish_step(
    spec: ScheduleSpec, buffers: BufferState, placed: StepPlacement
) -> tuple[Schedule, BufferState]:
    """Return the schedule that runs the held updates of a step and ends it before a forward."""
    return forward(spec, buffers, (), placed)


def commit_log(spec: ScheduleSpec, buffers: BufferState) -> tuple[Schedule, BufferState]:
    """Return the schedule that commits the log of a step after its backward."""
    b = Builder(spec, buffers)
    b.emit(Op.COMMIT_LOG)
    return b.result()


def write_behind(spec: ScheduleSpec, buffers: BufferState) -> tuple[Schedule, BufferState]:
    """Return the writes that forward left to backward, for a forward that no backward follows."""
    return Builder(spec, buffers).result()


class _Reach:
    """A prefetcher of the weights of the sites in `order`.

    Weights are read into host slots up to `window` sites ahead, and loaded to the device as far as
    its slots allow. With `release`, a host slot is free as soon as its weights were loaded;
    otherwise it is kept for the updates. The device evicts the group whose next use is farthest
    away, including uses in the next phase.
    """

    def __init__(
        self, builder: Builder, order: Sequence[int], upcoming: Upcoming, *, release: bool = False
    ) -> None:
        self._b, self._order, self._upcoming = builder, order, upcoming
        self._release = release and builder.spec.device_slots > 0
        self._brought = self._loaded = 0
        self._busy: list[int] = []  # groups on the device, not yet used

    def bring(self, position: int, then: Callable[[int], None] | None = None) -> None:
        b, order = self._b, self._order
        while self._brought < len(order) and self._brought <= position + b.spec.window:
            site = order[self._brought]
            if not b.bring_site(site, self._upcoming, must=self._brought == position):
                break
            for group in b.spec.sites[site] if then is not None else ():
                then(group)  # type: ignore[misc]
            self._brought += 1

    def load(self, position: int) -> None:
        b, order = self._b, self._order
        while b.spec.device_slots and self._loaded < self._brought:
            site, must = order[self._loaded], self._loaded == position
            if not b.load_site(site, self._upcoming, self._busy, must=must):
                break
            self._busy.extend(b.spec.sites[site])
            if self._release:
                self._forget(b.needed, b.spec.sites[site])
            self._loaded += 1

    def passed(self, groups: Sequence[int]) -> None:
        if not self._release:
            self._forget(self._b.needed, groups)
        if self._b.spec.device_slots:
            self._forget(self._busy, groups)
        self._upcoming.passed(groups)

    @staticmethod
    def _forget(those: list[int], groups: Sequence[int]) -> None:
        for group in groups:
            those.remove(group)


class _Restoring:
    """A prefetcher of kept activations for backward, limited by the buffers on host and device."""

    def __init__(self, builder: Builder, order: Sequence[int]) -> None:
        self._b, self._order = builder, order
        # For each position in the order: the host buffers into which activations are fetched from
        # SSD, and all buffers from which backward reads.
        self._fetched: list[tuple[int, ...]] = []
        self._ready: list[tuple[int, ...]] = []

    def fetch(self, position: int) -> None:
        """Read spilled activations into host buffers, as far ahead as these allow.

        `position` is the site that backward runs now.
        """
        ahead = min(position + self._b.spec.act_buffers, len(self._order))
        for site in self._order[len(self._fetched) : ahead]:
            host_buffers = self._b.act_buffer(site)
            if host_buffers:
                self._b.emit(Op.FETCH_ACTIVATIONS, site, at=host_buffers)
            self._fetched.append(host_buffers)

    def restore(self, position: int) -> tuple[int, ...]:
        """Copy activations to the device, as far ahead as its buffers allow.

        `position` is the site that backward runs now. Return the buffers that it reads.
        """
        ready = min(position + DEVICE_BUFFERS, len(self._fetched))
        for number in range(len(self._ready), ready):
            site = self._order[number]
            buffers, device_buffers = self._fetched[number], self._b.device_act_buffer(site)
            if device_buffers:
                buffers += device_buffers
                self._b.emit(Op.RESTORE_ACTIVATIONS, site, at=buffers)
            self._ready.append(buffers)
        return self._ready[position]


class _GradientRooms:
    """Rooms for the gradients of one group each, in host memory and on the device.

    A backward takes the next room, and waits until the previous group in that room has freed it. A
    room in host memory is freed by an update or by a spill, a room on the device by the copy to the
    host. A group whose gradients stay in host memory until the norm is known occupies no room
    there.
    """

    def __init__(self, spec: ScheduleSpec) -> None:
        self._spec = spec
        self._host = self._device = 0  # number of groups that have freed a room so far
        self._host_room: Effect | None = None  # host room of the current site, until it is taken

    def taken_by_backward(self) -> Iterator[Effect]:
        spec = self._spec
        room = ("gradient room", self._host % spec.grads)
        self._host_room = (room, WRITE, WHOLE)
        if not spec.device_slots:
            yield self._host_room
            return
        yield (("device gradient room", self._device % spec.device_grads), WRITE, WHOLE)
        if spec.head_alone and self._device < spec.device_grads:
            yield (HEAD_ROOM, WRITE, WHOLE)

    def taken_by_offload(self) -> Iterator[Effect]:
        """Yield the host room that a copy from the device takes and the device room it frees."""
        if self._spec.device_slots:
            if self._host_room is not None:
                yield self._host_room
                self._host_room = None  # All groups of a site share one room.
            yield (("device gradient room", self._device % self._spec.device_grads), READ, WHOLE)
            if self._spec.head_alone and self._device == 0:
                yield (HEAD_ROOM, READ, WHOLE)
            self._device += 1

    def freed(self) -> list[Effect]:
        """Return the effects with which a group's last update or spill frees its gradient room.

        The room is the place for the gradients of one group in host memory.
        """
        room = ("gradient room", self._host % self._spec.grads)
        self._host += 1
        return [(room, READ, WHOLE)]


def last_uses(spec: ScheduleSpec, order: Sequence[int]) -> list[tuple[int, ...]]:
    """Return for each position the trained groups that no later position uses."""
    last = {group: i for i, site in enumerate(order) for group in spec.sites[site]}
    return [
        tuple(g for g in dict.fromkeys(_trained(spec, spec.sites[site])) if last[g] == i)
        for i, site in enumerate(order)
    ]


def _trained(spec: ScheduleSpec, groups: Sequence[int]) -> list[int]:
    return [group for group in groups if spec.chunks[group]]


def one_backward(
    spec: ScheduleSpec, buffers: BufferState, site: int
) -> tuple[Schedule, BufferState]:
    """Return the schedule of the backward of one site, without updates.

    It is used while the order is not known. The updates of a group follow, by `updates`, when its
    last use is known.
    """
    b = Builder(spec, buffers)
    groups = spec.sites[site]
    reached, restoring = _Reach(b, [site], Upcoming(groups)), _Restoring(b, [site])
    reached.bring(0)
    restoring.fetch(0)
    reached.load(0)
    buffers_read = restoring.restore(0)
    b.emit(Op.BACKWARD, site, at=b.weights_of(groups) + buffers_read)
    return b.result()


def updates(
    spec: ScheduleSpec,
    buffers: BufferState,
    groups: Sequence[int],
    placed: StepPlacement,
    *,
    end: bool = False,
) -> tuple[Schedule, BufferState]:
    """Return the schedule of updates of groups whose gradients are complete.

    If `placed` updates a group later, its gradients are held instead. With `end`, backward ends
    first, and the step ends afterwards if nothing is held.
    """
    b, held = Builder(spec, buffers, placed), frozenset(placed.held)
    if end:
        b.emit(Op.BACKWARD_DONE)
    for group in _trained(spec, groups):
        if not end:
            b.offload_gradients(group)
        if group in held:
            _hold(b, group)
            continue
        if placed.speculates and not end:
            b.emit(Op.SUM_SQUARES, group)
        b.bring(group, Upcoming(()))
        b.update(group)
    if end and placed.ends is Phase.BACKWARD:
        b.emit(Op.END_STEP)
    return b.result()


def _update_or_hold(b: Builder, group: int, rooms: _GradientRooms) -> None:
    """Update a group whose gradients are in host memory, or hold them if it is updated later."""
    if b.placed.of(group).update is not Phase.BACKWARD:
        _hold(b, group, rooms)
        return
    if b.placed.speculates:
        b.emit(Op.SUM_SQUARES, group)
    stays = b.placed.speculates and not b.spec.spilled_gradients
    b.update(group, frees=[] if stays else rooms.freed())


def _hold(b: Builder, group: int, rooms: _GradientRooms | None = None) -> None:
    """Hold the gradients of a group, in memory or on SSD, until its update."""
    b.emit(Op.SUM_SQUARES, group)
    if b.placed.of(group).gradient is Gradient.SSD:
        frees = [] if rooms is None else rooms.freed()
        last = b.spec.chunks[group] - 1
        for chunk in range(last + 1):
            b.stage(Op.SPILL_GRADIENTS, group, chunk, *(frees if chunk == last else ()))
