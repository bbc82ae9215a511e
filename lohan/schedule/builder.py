"""The bookkeeping behind the passes of phases.py: what lies in which slot and buffer, and after
which actions each may be overwritten."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lohan.errors import LohanError
from lohan.schedule.actions import Action, Schedule
from lohan.schedule.places import DEVICE_BUFFERS, Shape, Table


@dataclass
class Builder:
    """Emits actions in a runnable order; keeps slots and ring buffers."""

    shape: Shape
    table: Table
    mode: str = "optimized"
    out: list[Action] = field(default_factory=list)
    needed: list[int] = field(default_factory=list)  # groups prefetched and not yet used

    def __post_init__(self) -> None:
        self.slots = list(self.table.slots)
        self.slot_free = list(self.table.slot_free)
        self.ring_free = list(self.table.ring_free)
        self.stage_free = list(self.table.stage_free)
        self.ring_next, self.stage_next = self.table.ring_next, self.table.stage_next
        self.act_free, self.act_next = list(self.table.act_free), self.table.act_next
        self.device, self.device_free = list(self.table.device), list(self.table.device_free)
        self.travel_free, self.travel_next = list(self.table.travel_free), self.table.travel_next
        self.pinned_slot = {
            g: self.shape.slots + i for i, g in enumerate(self.shape.pinned_weights)
        }
        self.pinned_buffer = {
            key: self.shape.ring + i for i, key in enumerate(self.shape.pinned_state)
        }
        self.staged: dict[tuple[int, int], int] = {}  # chunk -> staging buffer of its gradients
        self.queue: list[tuple[int, int]] = []  # updates whose state may be read ahead
        self.read: dict[tuple[int, int], int] = {}  # chunk -> ring buffer it was read into
        self.fetched_to: dict[int, tuple[int, ...]] = {}  # site -> activation buffer
        self.fetched = 0  # of the queue
        self.done = 0
        self.last_write = ""

    def result(self) -> tuple[Schedule, Table]:
        table = Table(
            tuple(self.slots), tuple(self.slot_free), tuple(self.ring_free),
            tuple(self.stage_free), tuple(self.act_free), tuple(self.device),
            tuple(self.device_free), tuple(self.travel_free), self.ring_next, self.stage_next,
            self.act_next, self.travel_next,
        )  # fmt: skip
        return tuple(self.out), table

    def emit(self, action: Action) -> str:
        self.out.append(action)
        return action.name

    # -- weights ----------------------------------------------------------------------------------

    def each(self, kind: str, group: int) -> tuple[str, ...]:
        """Names of an action for every chunk of a group."""
        return tuple(f"{kind}{group}.{chunk}" for chunk in range(self.shape.chunks[group]))

    def slot_of(self, group: int) -> int | None:
        if group in self.pinned_slot:
            return self.pinned_slot[group]
        return self.slots.index(group) if group in self.slots else None

    def bring_site(self, site: int, upcoming: Sequence[int], *, must: bool) -> bool:
        """Room for all weights of a site, and for what others still need, or nothing happens."""
        groups = self.shape.sites[site]
        missing = [group for group in groups if self.slot_of(group) is None]
        free = [held for held in self.slots if held not in self.needed and held not in groups]
        if len(missing) > len(free):
            if must:
                raise LohanError(
                    f"{self.shape.slots} weight slots cannot hold the {len(groups)} groups of one "
                    "block; raise --host"
                )
            return False
        self.needed.extend(groups)
        for group in groups:
            self.bring(group, upcoming)
        return True

    def bring(self, group: int, upcoming: Sequence[int]) -> None:
        """Weights of `group` into a slot, in place of what is needed last."""
        if self.slot_of(group) is not None:
            return
        free = [i for i, held in enumerate(self.slots) if held not in self.needed]

        slot = max(free, key=lambda i: _distance(self.slots[i], upcoming))
        waits = (*self.slot_free[slot], *self.each("W", group))
        self.emit(Action("R", group, at=(slot,), waits=waits))
        self.slots[slot] = group
        # Without a link compute waits for the read; over it, weights may be on the device already.
        self.slot_free[slot] = (f"R{group}",) if self.shape.device_slots else ()

    def hold_slot(self, group: int, names: tuple[str, ...]) -> None:
        """The slot of `group` may be overwritten only after these too."""
        slot = self.slot_of(group)
        if slot is not None and slot < self.shape.slots:
            self.slot_free[slot] = tuple(dict.fromkeys((*self.slot_free[slot], *names)))

    def place(self, group: int) -> int:
        slot = self.slot_of(group)
        assert slot is not None
        return slot

    # -- the device -------------------------------------------------------------------------------

    def load_site(
        self, site: int, upcoming: Sequence[int], busy: Sequence[int], *, must: bool
    ) -> bool:
        """Weights of a site from host slots to the device, unless it would push out `busy`."""
        groups = self.shape.sites[site]
        missing = [group for group in groups if group not in self.device]
        free = [i for i, held in enumerate(self.device) if held not in busy and held not in groups]
        if len(missing) > len(free):
            if must:
                raise LohanError(
                    f"{self.shape.device_slots} weight slots on the device cannot hold the "
                    f"{len(groups)} groups of one block; raise --device-memory"
                )
            return False
        free.sort(key=lambda i: -_distance(self.device[i], upcoming))
        for group, place in zip(missing, free, strict=False):
            waits = (f"R{group}", *self.each("U", group), *self.device_free[place])
            name = self.emit(Action("L", group, at=(self.place(group), place), waits=waits))
            self.device[place], self.device_free[place] = group, self._gather(group, place, name)
            self.hold_slot(group, (name,))
        return True

    def _gather(self, group: int, place: int, loaded: str) -> tuple[str, ...]:
        """The pieces of other ranks come beside the one that was loaded."""
        if not self.shape.net:
            return ()
        return (self.emit(Action("A", group, at=(place,), waits=(loaded,))),)

    def ready(
        self, groups: Sequence[int], *, renewed: bool = True
    ) -> tuple[tuple[int, ...], list[str]]:
        """Where compute finds the weights of these groups, and what it waits for. `renewed`: an
        update of this schedule or, of weights that stayed in their slot, an earlier one's."""
        if self.shape.device_slots:
            there = "A" if self.shape.net else "L"
            return tuple(map(self.device.index, groups)), [f"{there}{g}" for g in groups]
        waits = [
            name for g in groups for name in (f"R{g}", *(self.each("U", g) if renewed else ()))
        ]
        return tuple(map(self.place, groups)), waits

    def used(self, groups: Sequence[int], name: str) -> None:
        """Compute has used the weights of these groups."""
        for group in groups:
            if self.shape.device_slots:
                place = self.device.index(group)
                self.device_free[place] = tuple(dict.fromkeys((*self.device_free[place], name)))
            else:
                self.hold_slot(group, (name,))

    def gradients(self, group: int, after: str, waits: Sequence[str] = ()) -> str:
        """After what the gradients of a group are in host memory."""
        if not self.shape.device_slots:
            return after
        if self.shape.net:
            after = self.emit(Action("X", group, waits=(after,)))
        return self.emit(Action("D", group, waits=(after, *waits)))

    # -- kept activations -------------------------------------------------------------------------

    def act_room(self, site: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """A buffer for activations on their way to or from SSD, and after what it is free."""
        if site not in self.shape.moved_out:
            return (), ()
        buffer = self.act_next % self.shape.act_buffers
        self.act_next += 1
        return (buffer,), self.act_free[buffer]

    def travel_room(self, site: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Room on the device for activations on their way, and after what it is free."""
        if site not in self.shape.kept:
            return (), ()
        place = self.travel_next % DEVICE_BUFFERS
        self.travel_next += 1
        return (place,), self.travel_free[place]

    def keep(self, site: int, made: str, into: tuple[int, ...], by: tuple[int, ...]) -> None:
        """Activations of a site leave the device, and host memory where they are to."""
        for place in by:
            made = self.emit(Action("K", site, at=(*into, place), waits=(made,)))
            self.travel_free[place] = (made,)
        for buffer in into:
            out = self.emit(Action("O", site, at=into, waits=(made, f"I{site}", f"O{site}")))
            self.act_free[buffer] = (out,)

    def fetch_kept(self, site: int) -> None:
        """Activations that were moved out come back to host memory, ahead of `restore`."""
        into, room = self.act_room(site)
        for buffer in into:
            self.emit(Action("I", site, at=into, waits=(f"O{site}", *room)))
            self.fetched_to[site] = into
            self.act_free[buffer] = (f"B{site}",)

    def restore(self, site: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Where backward of a site finds its activations, on the device or, if they were moved
        out, in host memory, and what it waits for."""
        where = self.fetched_to.pop(site, ())
        there = (f"I{site}",) if where else ()
        by, room = self.travel_room(site)
        for place in by:
            waits = (f"K{site}", *there, *room)
            there = (self.emit(Action("V", site, at=(*where, place), waits=waits)),)
            self.travel_free[place] = (f"B{site}",)
        return (*where, *by), there

    # -- updates ----------------------------------------------------------------------------------

    def read_ahead(self) -> None:
        """State reads run ahead of the updates by all ring buffers but one: the last is being
        written, so that reads and writes alternate and the drive always has the next in hand."""
        ahead = max(1, self.shape.ring - 1)
        while self.fetched < len(self.queue) and self.fetched < self.done + ahead:
            self._fetch(self.queue[self.fetched])
            self.fetched += 1

    def _fetch(self, key: tuple[int, int]) -> None:
        group, chunk = key
        if group in self.shape.spilled and self.held_before:
            self.staged[key] = self.stage("G", group, chunk, (f"P{group}.{chunk}",))
        if key in self.pinned_buffer:
            self.read[key] = self.pinned_buffer[key]
            return
        buffer = self.ring_next % self.shape.ring
        self.ring_next += 1
        waits = tuple(dict.fromkeys((*self.ring_free[buffer], f"W{group}.{chunk}")))
        if self.mode == "naive" and self.last_write:
            waits = tuple(dict.fromkeys((*waits, self.last_write)))
        self.emit(Action("S", group, chunk, at=(buffer,), waits=waits))
        self.ring_free[buffer] = ()
        self.read[key] = buffer

    def stage(self, kind: str, group: int, chunk: int, waits: tuple[str, ...]) -> int:
        """A chunk of held gradients through a staging buffer."""
        buffer = self.stage_next % self.shape.ring
        self.stage_next += 1
        waits = tuple(dict.fromkeys((*waits, *self.stage_free[buffer])))
        name = self.emit(Action(kind, group, chunk, (buffer,), waits))
        self.stage_free[buffer] = (name,)
        return buffer

    held_before = False  # updates of gradients that an earlier phase held

    def update(self, group: int, after: tuple[str, ...]) -> list[str]:
        """All chunks of a group: read, update, write. Returns the names of the updates."""
        slot = self.slot_of(group)
        assert slot is not None
        updates, writes = [], []
        loaded = (f"L{group}",) if self.shape.device_slots else ()
        for chunk in range(self.shape.chunks[group]):
            key = (group, chunk)
            if key not in self.read:
                if key not in self.queue:
                    self.queue.append(key)
                self.read_ahead_to(key)
            buffer = self.read.pop(key)
            pinned = buffer >= self.shape.ring
            waits = [*after, f"R{group}", *loaded]
            waits.append(f"W{group}.{chunk}" if pinned else f"S{group}.{chunk}")
            at: tuple[int, ...] = (buffer, slot)
            if key in self.staged:
                waits.append(f"G{group}.{chunk}")
                at = (buffer, slot, self.staged[key])
                self.stage_free[self.staged.pop(key)] = (f"U{group}.{chunk}",)
            updates.append(self.emit(Action("U", group, chunk, at, tuple(waits))))
            self.done += 1
            if not pinned or self.shape.write_pinned or slot < self.shape.slots:
                written = self.emit(
                    Action("W", group, chunk, (buffer, slot), (f"U{group}.{chunk}", "C"))
                )
                writes.append(written)
                self.last_write = written
                if not pinned:
                    self.ring_free[buffer] = (written,)
            if self.mode != "naive":
                self.read_ahead()
        self.hold_slot(group, tuple(writes or updates))
        self.device = [None if held == group else held for held in self.device]
        return updates

    def read_ahead_to(self, key: tuple[int, int]) -> None:
        while key not in self.read:
            self._fetch(self.queue[self.fetched])
            self.fetched += 1


def _distance(held: int | None, upcoming: Sequence[int]) -> float:
    """How far away the next use of what a slot holds is."""
    if held is None:
        return float("inf")
    return upcoming.index(held) if held in upcoming else len(upcoming)
