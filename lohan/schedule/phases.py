"""A step as data: small pure functions from spec and buffers to the actions of a phase.

The tokens are described in actions.py. `overlap=False` runs a schedule in its own order; lanes run
it with everything in flight that waits for nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence

from lohan.errors import LohanError
from lohan.schedule.actions import (
    DEVICE_BUFFERS,
    Action,
    BufferState,
    Op,
    RingState,
    Schedule,
    ScheduleSpec,
    SlotState,
)

# -- The bookkeeping behind the phases ------------------------------------------------
#
# What lies in which slot and buffer, and after which actions each may be overwritten.


class Slots:
    """Slots for weights, and after which actions each may be overwritten."""

    def __init__(self, state: SlotState) -> None:
        self.held, self.overwrite_after = list(state.held), list(state.overwrite_after)

    def state(self) -> SlotState:
        return SlotState(tuple(self.held), tuple(self.overwrite_after))


class Ring:
    """Buffers that are taken in turn, and after which actions each may be overwritten."""

    def __init__(self, state: RingState) -> None:
        self.overwrite_after, self.next = list(state.overwrite_after), state.next

    def take(self) -> int:
        self.next += 1
        return (self.next - 1) % len(self.overwrite_after)

    def state(self) -> RingState:
        return RingState(tuple(self.overwrite_after), self.next)


class Upcoming:
    """Groups in the order of their use, in this phase and in the one after it."""

    def __init__(self, groups: Sequence[int], then: Sequence[int] = ()) -> None:
        self._passed, self._here, self._all = 0, len(groups), len(groups) + len(then)
        self._at: dict[int, deque[int]] = {}
        for position, group in enumerate((*groups, *then)):
            self._at.setdefault(group, deque()).append(position)

    def passed(self, groups: Sequence[int]) -> None:
        """The next of them were used."""
        self._passed += len(groups)
        for group in groups:
            self._at[group].popleft()

    def distance(self, held: int | None, *, then: bool = False) -> float:
        """How far away the next use of what a slot holds is, `then` in the phase after it too."""
        if held is None:
            return float("inf")
        end = self._all if then else self._here
        at = self._at.get(held)
        return min(at[0] if at else end, end) - self._passed


class Builder:
    """Emits actions in a runnable order; keeps slots and buffers. `held_before`: it updates with
    gradients that an earlier phase held. What the phase before left to be written comes first,
    unless it is to come between the actions of this one (`defer_writes`)."""

    def __init__(
        self, spec: ScheduleSpec, buffers: BufferState, update_mode: str = "optimized", *,
        held_before: bool = False, defer_writes: bool = False,
    ) -> None:  # fmt: skip
        self.spec, self.update_mode, self.held_before = spec, update_mode, held_before
        self.out: list[Action] = []
        self.slots, self.device = Slots(buffers.slots), Slots(buffers.device)
        self.ring, self.staging = Ring(buffers.ring), Ring(buffers.stage)
        self.acts, self.device_acts = Ring(buffers.acts), Ring(buffers.device_acts)
        self.cached_slot = {g: spec.slots + i for i, g in enumerate(spec.host_cached_weights)}
        self.cached_buffer = {key: spec.ring + i for i, key in enumerate(spec.host_cached_state)}
        self.needed: list[int] = []  # groups prefetched and not yet used
        self.fetched_to: dict[int, tuple[int, ...]] = {}  # site -> activation buffer
        # Updates: whose state may be read ahead, how many of them are read and done, and where
        # state and held gradients of a chunk lie.
        self.queue: list[tuple[int, int]] = []
        self.fetched = self.done = 0
        self.read: dict[tuple[int, int], int] = {}
        self.staged: dict[tuple[int, int], int] = {}
        self.last_write = ""
        self.last_in_memory: tuple[str, ...] = ()  # the last update of a chunk that is not written
        self.second_updates = dict.fromkeys(buffers.second_updates)
        # Write-behind: chunks that stay in memory are written during the next phase.
        self.write_behind = False
        self.unwritten: list[Action] = []
        self.behind = deque(buffers.behind)
        if not defer_writes:
            assert not self.second_updates
            self.emit_left_writes(len(self.behind))

    def result(self) -> tuple[Schedule, BufferState]:
        return tuple(self.out), BufferState(
            self.slots.state(), self.device.state(), self.ring.state(), self.staging.state(),
            self.acts.state(), self.device_acts.state(), tuple(self.behind),
            tuple(self.second_updates),
        )  # fmt: skip

    def emit(
        self, kind: Op, index: int = -1, chunk: int = -1, at: tuple[int, ...] = (),
        waits: tuple[str, ...] = (),
    ) -> str:  # fmt: skip
        """Adds an action; returns the name by which others wait for it."""
        action = Action(kind, index, chunk, at, waits)
        self.out.append(action)
        return action.name

    def emit_left_writes(self, count: int) -> None:
        """So many of the writes that the phase before left."""
        for _ in range(min(count, len(self.behind))):
            self.out.append(self.behind.popleft())

    # -- weights ----------------------------------------------------------------------------------

    def each(self, kind: str, group: int) -> tuple[str, ...]:
        """Names of an action for every chunk of a group."""
        return tuple(f"{kind}{group}.{chunk}" for chunk in range(self.spec.chunks[group]))

    def slot_of(self, group: int) -> int | None:
        if group in self.cached_slot:
            return self.cached_slot[group]
        return self.slots.held.index(group) if group in self.slots.held else None

    def bring_site(self, site: int, upcoming: Upcoming, *, must: bool) -> bool:
        """Room for all weights of a site, and for what others still need, or nothing happens."""
        groups = self.spec.sites[site]
        missing = [group for group in groups if self.slot_of(group) is None]
        free = [held for held in self.slots.held if held not in self.needed and held not in groups]
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
        """Weights of `group` into a slot, in place of what is needed last."""
        if self.slot_of(group) is not None:
            return
        free = [i for i, held in enumerate(self.slots.held) if held not in self.needed]
        slot = max(free, key=lambda i: upcoming.distance(self.slots.held[i]))
        waits = (*self.slots.overwrite_after[slot], *self.each("W", group))
        self.emit(Op.READ_WEIGHTS, group, at=(slot,), waits=waits)
        self.slots.held[slot] = group
        # Without a link compute waits for the read; over it, weights may be on the device already.
        self.slots.overwrite_after[slot] = (f"R{group}",) if self.spec.device_slots else ()

    def hold_slot(self, group: int, names: tuple[str, ...]) -> None:
        """The slot of `group` may be overwritten only after these too."""
        slot = self.slot_of(group)
        if slot is not None and slot < self.spec.slots:
            self.slots.overwrite_after[slot] = tuple(
                dict.fromkeys((*self.slots.overwrite_after[slot], *names))
            )

    def held_slot(self, group: int) -> int:
        slot = self.slot_of(group)
        assert slot is not None
        return slot

    # -- the device -------------------------------------------------------------------------------

    def load_site(self, site: int, upcoming: Upcoming, busy: Sequence[int], *, must: bool) -> bool:
        """Weights of a site from host slots to the device, unless it would push out `busy`."""
        groups, held = self.spec.sites[site], self.device.held
        missing = [group for group in groups if group not in held]
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
            waits = (f"R{group}", *self.each("U", group), *self.device.overwrite_after[slot])
            name = self.emit(Op.LOAD_WEIGHTS, group, at=(self.held_slot(group), slot), waits=waits)
            held[slot] = group
            self.device.overwrite_after[slot] = ()
            if self.spec.net:  # the shards of other ranks, next to the one that was loaded
                gathered = self.emit(Op.ALL_GATHER, group, at=(slot,), waits=(name,))
                self.device.overwrite_after[slot] = (gathered,)
            self.hold_slot(group, (name,))
        return True

    def ready(
        self, groups: Sequence[int], *, updated: bool = True
    ) -> tuple[tuple[int, ...], list[str]]:
        """Where compute finds the weights of these groups, and what it waits for. `updated`: an
        update of this schedule or, of weights that stayed in their slot, an earlier one's."""
        if self.spec.device_slots:
            there = "A" if self.spec.net else "L"
            return tuple(map(self.device.held.index, groups)), [f"{there}{g}" for g in groups]
        waits = [
            name for g in groups for name in (f"R{g}", *(self.each("U", g) if updated else ()))
        ]
        return tuple(map(self.held_slot, groups)), waits

    def used(self, groups: Sequence[int], name: str) -> None:
        """Compute has used the weights of these groups."""
        for group in groups:
            if self.spec.device_slots:
                slot = self.device.held.index(group)
                self.device.overwrite_after[slot] = tuple(
                    dict.fromkeys((*self.device.overwrite_after[slot], name))
                )
            else:
                self.hold_slot(group, (name,))

    def offload_gradients(self, group: int, after: str, waits: Sequence[str] = ()) -> str:
        """After what the gradients of a group are in host memory."""
        if not self.spec.device_slots:
            return after
        if self.spec.net:
            after = self.emit(Op.REDUCE_SCATTER, group, waits=(after,))
        return self.emit(Op.OFFLOAD_GRADIENTS, group, waits=(after, *waits))

    # -- kept activations -------------------------------------------------------------------------

    def act_buffer(self, site: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """A buffer for activations in flight to or from SSD, and after what it is free."""
        if site not in self.spec.spilled_sites:
            return (), ()
        buffer = self.acts.take()
        return (buffer,), self.acts.overwrite_after[buffer]

    def device_act_buffer(self, site: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Room on the device for activations in flight, and after what it is free."""
        if site not in self.spec.offloaded:
            return (), ()
        buffer = self.device_acts.take()
        return (buffer,), self.device_acts.overwrite_after[buffer]

    def offload_activations(
        self, site: int, made: str, into: tuple[int, ...], by: tuple[int, ...]
    ) -> None:
        """Activations of a site leave the device, and host memory where they are to."""
        for buffer in by:
            made = self.emit(Op.OFFLOAD_ACTIVATIONS, site, at=(*into, buffer), waits=(made,))
            self.device_acts.overwrite_after[buffer] = (made,)
        for buffer in into:
            out = self.emit(
                Op.SPILL_ACTIVATIONS, site, at=into, waits=(made, f"I{site}", f"O{site}")
            )
            self.acts.overwrite_after[buffer] = (out,)

    def fetch_kept(self, site: int) -> None:
        """Activations that were moved out come back to host memory, ahead of `restore`."""
        into, room = self.act_buffer(site)
        for buffer in into:
            self.emit(Op.FETCH_ACTIVATIONS, site, at=into, waits=(f"O{site}", *room))
            self.fetched_to[site] = into
            self.acts.overwrite_after[buffer] = (f"B{site}",)

    def restore(self, site: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Where backward of a site finds its activations, on the device or, if they were moved
        out, in host memory, and what it waits for."""
        where = self.fetched_to.pop(site, ())
        there = (f"I{site}",) if where else ()
        by, room = self.device_act_buffer(site)
        for buffer in by:
            waits = (f"K{site}", *there, *room)
            there = (self.emit(Op.RESTORE_ACTIVATIONS, site, at=(*where, buffer), waits=waits),)
            self.device_acts.overwrite_after[buffer] = (f"B{site}",)
        return (*where, *by), there

    # -- updates ----------------------------------------------------------------------------------

    def read_ahead(self) -> None:
        """State reads run ahead of the updates by all ring buffers but one: the last is being
        written, so that reads and writes alternate and the drive always has the next in hand.
        For second updates in backward there is one read less: gradients that are spilled meanwhile
        need the last staging buffer."""
        ahead = self.spec.ring - 1 if self.second_updates else max(1, self.spec.ring - 1)
        while self.fetched < len(self.queue) and self.fetched < self.done + ahead:
            self._fetch(self.queue[self.fetched])
            self.fetched += 1

    def _fetch(self, key: tuple[int, int]) -> None:
        group, chunk = key
        if group in self.spec.spilled_gradients and (
            self.held_before or key in self.second_updates
        ):
            self.staged[key] = self.stage(Op.FETCH_GRADIENTS, group, chunk, (f"P{group}.{chunk}",))
        if key in self.cached_buffer:
            self.read[key] = self.cached_buffer[key]
            return
        buffer = self.ring.take()
        waits = tuple(dict.fromkeys((*self.ring.overwrite_after[buffer], f"W{group}.{chunk}")))
        if self.update_mode == "naive" and self.last_write:
            waits = tuple(dict.fromkeys((*waits, self.last_write)))
        self.emit(Op.READ_STATE, group, chunk, at=(buffer,), waits=waits)
        self.ring.overwrite_after[buffer] = ()
        self.read[key] = buffer

    def stage(self, kind: Op, group: int, chunk: int, waits: tuple[str, ...]) -> int:
        """A chunk of held gradients through a staging buffer."""
        buffer = self.staging.take()
        while buffer in self.staged.values():
            buffer = self.staging.take()
        waits = tuple(dict.fromkeys((*waits, *self.staging.overwrite_after[buffer])))
        name = self.emit(kind, group, chunk, (buffer,), waits)
        self.staging.overwrite_after[buffer] = (name,)
        return buffer

    def update(
        self, group: int, after: tuple[str, ...], only: Sequence[int] | None = None, *,
        write: bool = True,
    ) -> list[str]:  # fmt: skip
        """All chunks of a group, or `only` some: read, update, write, or leave that to a
        second update. Returns the names of the updates."""
        slot = self.slot_of(group)
        assert slot is not None
        updates, writes = [], []
        loaded = (f"L{group}",) if self.spec.device_slots else ()
        for chunk in range(self.spec.chunks[group]) if only is None else only:
            key = (group, chunk)
            if key not in self.read and key not in self.queue:
                self.queue.append(key)
            while key not in self.read:
                self._fetch(self.queue[self.fetched])
                self.fetched += 1
            buffer = self.read.pop(key)
            cached = buffer >= self.spec.ring
            waits = [*after, f"R{group}", *loaded]
            waits.append(f"W{group}.{chunk}" if cached else f"S{group}.{chunk}")
            at: tuple[int, ...] = (buffer, slot)
            if key in self.staged:
                waits.append(f"G{group}.{chunk}")
                at = (buffer, slot, self.staged[key])
                self.staging.overwrite_after[self.staged.pop(key)] = (f"U{group}.{chunk}",)
            updates.append(self.emit(Op.UPDATE, group, chunk, at, tuple(waits)))
            self.done += 1
            if not write:
                self.ring.overwrite_after[buffer] = (updates[-1],)
                self.second_updates[key] = None
            elif not cached or self.spec.write_through or slot < self.spec.slots:
                at, ready = (buffer, slot), (f"U{group}.{chunk}", "C")
                if self.write_behind and cached and slot >= self.spec.slots:
                    self.unwritten.append(Action(Op.WRITE, group, chunk, at, ready))
                else:
                    written = self.emit(Op.WRITE, group, chunk, at, ready)
                    writes.append(written)
                    self.last_write = written
                if not cached:
                    self.ring.overwrite_after[buffer] = (written,)
            else:
                self.last_in_memory = (updates[-1],)
            if self.update_mode != "naive":
                self.read_ahead()
        self.hold_slot(group, tuple(writes or updates))
        self.device.held = [None if held == group else held for held in self.device.held]
        return updates

    def second_update(self, group: int) -> None:
        """The update of a group that was not written, from the state of before, with the weights of
        before in its slot."""
        chunks = [chunk for number, chunk in self.second_updates if number == group]
        self.update(group, (f"H{group}", Op.BACKWARD_DONE), chunks)
        self.second_updates = {key: None for key in self.second_updates if key[0] != group}

    def forget(self, groups: Collection[int]) -> None:
        """Their weights are to be read again."""
        for slots in (self.slots, self.device):
            slots.held = [None if held in groups else held for held in slots.held]

    def end_step(self, *waits: str) -> None:
        """Behind all writes, which are before it in its lane, and all updates without one. Whether
        the step is committed, or only counted, is known when it has ended."""
        self.out.append(self.end_step_action(*waits))

    def end_step_action(self, *waits: str) -> Action:
        return Action(Op.END_STEP, waits=(*waits, *self.last_in_memory))


# -- Phases ---------------------------------------------------------------------------------------


def forward(
    spec: ScheduleSpec, buffers: BufferState, order: Sequence[int], *, deferred: Sequence[int] = (),
    end_step: bool = False, training: bool = True,
) -> tuple[Schedule, BufferState]:  # fmt: skip
    """Forward over the sites in `order`. Updates of `deferred` groups are left over from the step
    before, and each runs before its group is used; behind the last, with `end_step`, that step
    ends. Where all groups are deferred, drives are the bottleneck of forward and idle in backward:
    cached chunks are written during the backward that follows, and the step ends there. Updates of
    `updated_twice` groups only make weights here, and are made a second time and written there.
    Without `training` no backward follows, and no activations are kept."""
    b = Builder(spec, buffers, held_before=True)
    left = dict.fromkeys(deferred)
    b.write_behind = bool(left) and _all_wait(spec, left)
    used = [group for site in order for group in spec.sites[site]]
    back = [group for site in reversed(order) for group in spec.sites[site]] if training else []
    upcoming = Upcoming(used, back)
    first_use = dict.fromkeys(g for g in used if g in left)
    unused = [g for g in left if g not in first_use]  # resident groups too; updated at once
    b.queue = [(g, c) for g in (*unused, *first_use) for c in range(spec.chunks[g])]

    twice = spec.updated_twice if b.write_behind and training else frozenset()

    def update_first(group: int) -> None:
        if group in left:
            del left[group]
            unwritten = group in twice and used.count(group) == 1  # or it would be read in between
            b.update(group, (f"H{group}", Op.BACKWARD_DONE), write=not unwritten)
            if not left and end_step and not b.unwritten and not b.second_updates:
                b.end_step()

    for group in unused:
        b.bring(group, upcoming)
        update_first(group)
    if end_step and not deferred:
        b.end_step()
    reached = _Reach(b, order, upcoming, release=True)
    for position, site in enumerate(order):
        reached.bring(position, then=update_first)
        reached.load(position)
        groups = spec.sites[site]
        slots, waits = b.ready(groups)
        into, room = b.act_buffer(site) if training else ((), ())
        by, free = b.device_act_buffer(site) if training else ((), ())
        name = b.emit(Op.FORWARD, site, at=(*slots, *into, *by), waits=(*waits, *room, *free))
        b.used(groups, name)
        reached.passed(groups)
        b.offload_activations(site, name, into, by)
    b.behind.extend(b.unwritten)
    if end_step and (b.unwritten or b.second_updates):
        b.behind.append(b.end_step_action())
    b.forget({group for group, _ in b.second_updates})  # these take the weights of before
    if not (order and training):
        b.emit_left_writes(len(b.behind))
    return b.result()


def backward(
    spec: ScheduleSpec,
    buffers: BufferState,
    order: Sequence[int],
    *,
    update_mode: str,
    deferred: Collection[int] = (),
    unreached: Sequence[int] = (),
    speculate: bool = False,
) -> tuple[Schedule, BufferState]:
    """Backward over the sites in `order`. A group is updated after its last use, unless it is one
    of `deferred`, whose gradients are held; `unreached` groups are updated at its end. If nothing
    is deferred, the step ends. `speculate`: updates do not wait for the norm of all gradients; it
    is known at E, and the step ends in the next forward. Gradients stay in memory until then, if
    the plan spills none."""
    last_use_groups, deferred = last_uses(spec, order), frozenset(deferred)
    b = Builder(spec, buffers, update_mode, defer_writes=bool(order) and _all_wait(spec, deferred))
    used = [group for site in order for group in spec.sites[site]]
    second, upcoming = _SecondUpdates(b, used), Upcoming(used)
    share = -(-len(b.behind) // max(1, len(order)))
    now = [g for groups in last_use_groups for g in groups if g not in deferred]
    if update_mode != "naive":
        b.queue += [(g, c) for g in now for c in range(spec.chunks[g])]
    reached, restoring = _Reach(b, order, upcoming), _Restoring(b, order)
    gradients = _GradientRoom(spec)
    for position, site in enumerate(order):
        reached.bring(position, then=second.update)
        restoring.fetch(position)
        if update_mode != "naive":
            b.read_ahead()
        reached.load(position)
        groups = spec.sites[site]
        slots, waits = b.ready(groups, updated=False)
        written = second.written(groups)
        if not spec.device_slots:
            waits += written
        where, restored = restoring.restore(position)
        room = gradients.waits_to_make()
        name = b.emit(Op.BACKWARD, site, at=slots + where, waits=(*waits, *room, *restored))
        b.used(groups, name)
        reached.passed(groups)
        for group in last_use_groups[position]:
            there = b.offload_gradients(group, name, [*gradients.waits_to_copy, *written])
            gone = _update_or_hold(b, group, there, deferred=deferred, speculate=speculate)
            gradients.made(there, gone)
        b.emit_left_writes(share)
    second.finish()
    last = [group for groups in last_use_groups for group in groups][-1:]
    end = b.emit(Op.BACKWARD_DONE, waits=tuple(f"H{group}" for group in last if speculate))
    for group in _trained(spec, unreached):
        if group in deferred:
            _hold(b, group, end)
        else:
            if spec.clips_groups:
                b.emit(Op.SUM_SQUARES, group, waits=(end,))
            b.bring(group, Upcoming(()))
            b.update(group, (end,))
    if not deferred and not speculate:
        b.end_step(end)
    return b.result()


def write_behind(spec: ScheduleSpec, buffers: BufferState) -> tuple[Schedule, BufferState]:
    """All that a forward has left to the backward after it, where none comes that can take it."""
    b = Builder(spec, buffers, held_before=True, defer_writes=True)
    groups = {group for group, _ in b.second_updates}
    second = _SecondUpdates(b, ())
    b.emit_left_writes(len(b.behind))
    second.finish()
    b.forget(groups)  # what uses them next waits for reads, not for updates
    return b.result()


class _SecondUpdates:
    """Updates of the step before that have made weights and are to be made a second time: each when
    backward brings its group, the end of their step behind all of them."""

    def __init__(self, builder: Builder, used: Sequence[int]) -> None:
        self._b, b = builder, builder
        self._groups = {group for group, _ in b.second_updates}
        self._step_end = [b.behind.pop()] if b.second_updates and b.behind else []
        first_use = {group: at for at, group in reversed(list(enumerate(used)))}
        b.queue = sorted(b.second_updates, key=lambda key: (first_use.get(key[0], len(used)), key))

    def update(self, group: int) -> None:
        if group in self._groups and any(number == group for number, _ in self._b.second_updates):
            self._b.second_update(group)

    def written(self, groups: Sequence[int]) -> list[str]:
        """What new gradients of these groups wait for: they take the place of those that a second
        update needs."""
        return [name for g in groups if g in self._groups for name in self._b.each("W", g)]

    def finish(self) -> None:
        """With groups that backward has not come to."""
        for group in dict.fromkeys(group for group, _ in self._b.queue):
            if any(number == group for number, _ in self._b.second_updates):
                self._b.bring(group, Upcoming(()))
                self._b.second_update(group)
        self._b.out += self._step_end


class _Reach:
    """How far ahead weights are: in host slots by the window, on the device as slots allow. With
    `release`, host slots are free once loaded; otherwise updates still need them. What the next
    phase needs first stays on the device for it."""

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
    """Kept activations in flight back: from SSD by the buffers, to the device one ahead."""

    def __init__(self, builder: Builder, order: Sequence[int]) -> None:
        self._b, self._order = builder, order
        self._fetched = 0
        self._ready: list[tuple[tuple[int, ...], tuple[str, ...]]] = []

    def fetch(self, position: int) -> None:
        ahead = min(position + self._b.spec.act_buffers, len(self._order))
        while self._fetched < ahead:
            self._b.fetch_kept(self._order[self._fetched])
            self._fetched += 1

    def restore(self, position: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Where backward at this position finds its activations, and what it waits for."""
        while len(self._ready) < min(position + DEVICE_BUFFERS, self._fetched):
            self._ready.append(self._b.restore(self._order[len(self._ready)]))
        return self._ready[position]


class _GradientRoom:
    """Room for gradients, in the buffers of the host and on the device: what a site's backward
    waits for until the gradients of earlier groups are gone."""

    def __init__(self, spec: ScheduleSpec) -> None:
        self._spec = spec
        self._left_host: list[str] = []  # after what those of each group are gone from the host
        self._left_device: list[str] = []
        self.waits_to_copy: list[str] = []  # to the host, of the site that is next

    def waits_to_make(self) -> list[str]:
        spec, host, device = self._spec, self._left_host, self._left_device
        self.waits_to_copy = [host[-spec.grads]] if len(host) >= spec.grads else []
        if not spec.device_slots:
            return self.waits_to_copy
        if len(device) >= spec.device_grads:
            return [device[-spec.device_grads]]
        return device[:1] if spec.head_alone else []

    def made(self, left_device: str, left_host: str | None) -> None:
        self._left_device.append(left_device)
        self._left_host += [] if left_host is None else [left_host]


def last_uses(spec: ScheduleSpec, order: Sequence[int]) -> list[tuple[int, ...]]:
    """For each position the groups to update that no later position uses."""
    last = {group: i for i, site in enumerate(order) for group in spec.sites[site]}
    return [
        tuple(g for g in dict.fromkeys(_trained(spec, spec.sites[site])) if last[g] == i)
        for i, site in enumerate(order)
    ]


def _all_wait(spec: ScheduleSpec, deferred: Collection[int]) -> bool:
    """All updates wait for the next forward: in backward the drives have little to do."""
    return set(deferred) >= set(_trained(spec, range(len(spec.chunks))))


def _trained(spec: ScheduleSpec, groups: Sequence[int]) -> list[int]:
    return [group for group in groups if spec.chunks[group]]


def one_backward(
    spec: ScheduleSpec, buffers: BufferState, site: int
) -> tuple[Schedule, BufferState]:
    """Backward of one site on demand: its updates follow when it is known what was its last use."""
    b = Builder(spec, buffers)
    groups = spec.sites[site]
    reached, restoring = _Reach(b, [site], Upcoming(groups)), _Restoring(b, [site])
    reached.bring(0)
    restoring.fetch(0)
    reached.load(0)
    slots, waits = b.ready(groups, updated=False)
    where, restored = restoring.restore(0)
    name = b.emit(Op.BACKWARD, site, at=slots + where, waits=(*waits, *restored))
    b.used(groups, name)
    return b.result()


def updates(
    spec: ScheduleSpec, buffers: BufferState, groups: Sequence[int], *, after: str,
    deferred: Sequence[int] = (), end: bool = False, speculate: bool = False,
) -> tuple[Schedule, BufferState]:  # fmt: skip
    """Updates on demand of groups whose gradients are complete after `after`; those of `deferred`
    are held instead. With `end`, backward ends first, and the step if nothing waits.
    `speculate` as in `backward`."""
    b = Builder(spec, buffers)
    if end:
        b.emit(Op.BACKWARD_DONE)
    for group in _trained(spec, groups):
        there = after if end else b.offload_gradients(group, after)
        if group in deferred:
            _hold(b, group, there)
            continue
        if spec.clips_groups or (speculate and not end):
            b.emit(Op.SUM_SQUARES, group, waits=(there,))
        b.bring(group, Upcoming(()))
        b.update(group, (there,))
    if end and not deferred and not speculate:
        # C comes behind all writes of its lane; updates of earlier schedules without one are named.
        in_memory = dict(() if spec.write_through else sorted(spec.host_cached_state))
        earlier = [g for g in in_memory if g in spec.host_cached_weights and g not in groups]
        b.end_step(Op.BACKWARD_DONE, *(f"U{g}.{in_memory[g]}" for g in earlier))
    return b.result()


def _update_or_hold(
    b: Builder, group: int, there: str, *, deferred: Collection[int], speculate: bool
) -> str | None:
    """For a group whose gradients are in host memory after `there`; returns after what they have
    left it, if they do."""
    if group in deferred:
        return _hold(b, group, there)
    if speculate or b.spec.clips_groups:
        b.emit(Op.SUM_SQUARES, group, waits=(there,))
    updated = b.update(group, (there,))[-1]
    return None if speculate and not b.spec.spilled_gradients else updated


def _hold(b: Builder, group: int, after: str) -> str | None:
    """Holds a group's gradients; returns after what they have left host memory, if they do."""
    b.emit(Op.SUM_SQUARES, group, waits=(after,))
    if group not in b.spec.spilled_gradients:
        return None
    for chunk in range(b.spec.chunks[group]):
        b.stage(Op.SPILL_GRADIENTS, group, chunk, (f"H{group}", f"U{group}.{chunk}"))
    return f"P{group}.{b.spec.chunks[group] - 1}"
