"""A step as data: which action runs on which lane, after what.

One token per action, `KIND INDEX [.CHUNK] [@PLACE,...] [(WAIT,...)]` without blanks:

    F3@0        gpu  forward of site 3, its weights in slot 0
    B3@1        gpu  backward of site 3
    E           gpu  backward has ended
    R5@2        ssd  read the weights of group 5 into slot 2
    S5.1@0      ssd  read state chunk 1 of group 5 into ring buffer 0
    U5.1@0,2    cpu  update that chunk; its weights lie in slot 2
    W5.1@0,2    ssd  write its state and weights
    H5          cpu  hold the gradients of group 5: their norm is taken, the update comes later
    P5.1@0      ssd  put chunk 1 of held gradients away through staging buffer 0
    G5.1@1      ssd  get it back into staging buffer 1; its update is U5.1@0,2,1
    C           ssd  commit

The order of a schedule is a valid order to run everything one after the other: that is the plain
form. Lanes keep the order among their own actions and wait for the names in parentheses; a name
means its latest earlier occurrence, also in an earlier schedule, so tails of one phase overlap
with the next. Nothing waits for something later, so no schedule can lock up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lohan.errors import LohanError

LANE_OF = {
    "F": "gpu", "B": "gpu", "E": "gpu",
    "R": "ssd", "S": "ssd", "W": "ssd", "P": "ssd", "G": "ssd", "C": "ssd",
    "U": "cpu", "H": "cpu",
}  # fmt: skip
GRAD_MODES = ("serial", "naive", "optimized", "balanced")
_TOKEN = re.compile(r"([A-Z])(\d*)(?:\.(\d+))?(?:@([\d,]+))?(?:\(([^)]*)\))?")


@dataclass(frozen=True, slots=True)
class Action:
    kind: str
    index: int = -1
    chunk: int = -1
    at: tuple[int, ...] = ()
    waits: tuple[str, ...] = ()

    @property
    def lane(self) -> str:
        return LANE_OF[self.kind]

    @property
    def name(self) -> str:
        return self.kind + (str(self.index) if self.index >= 0 else "") + (
            f".{self.chunk}" if self.chunk >= 0 else ""
        )  # fmt: skip

    def token(self) -> str:
        place = "@" + ",".join(map(str, self.at)) if self.at else ""
        return self.name + place + (f"({','.join(self.waits)})" if self.waits else "")


def parse_token(token: str) -> Action:
    match = _TOKEN.fullmatch(token)
    if match is None or match[1] not in LANE_OF:
        raise LohanError(f"{token!r} is not a schedule token; they look like S5.1@0(W4.0)")
    kind, index, chunk, at, waits = match.groups()
    return Action(
        kind,
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


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a schedule must know of model and plan. Slots and ring buffers from `slots` and `ring`
    upwards are pinned: one group, one chunk each, for the whole run."""

    sites: tuple[tuple[int, ...], ...]  # groups of each site
    chunks: tuple[int, ...]  # state chunks of each group
    slots: int
    ring: int
    window: int  # sites whose weights are read ahead
    grads: int  # groups whose gradients may wait for their update
    pinned_weights: tuple[int, ...] = ()  # group of each pinned slot
    pinned_state: tuple[tuple[int, int], ...] = ()  # (group, chunk) of each pinned buffer
    write_pinned: bool = True  # pinned chunks are written through every step
    spilled: frozenset[int] = frozenset()  # groups whose held gradients go to SSD


@dataclass(frozen=True)
class Table:
    """What weight slots and ring buffers hold, and after which actions each may be overwritten."""

    slots: tuple[int | None, ...]
    slot_free: tuple[tuple[str, ...], ...]
    ring_free: tuple[tuple[str, ...], ...]
    stage_free: tuple[tuple[str, ...], ...]
    ring_next: int = 0
    stage_next: int = 0


def empty_table(shape: Shape) -> Table:
    free: tuple[tuple[str, ...], ...] = ((),) * shape.ring
    return Table((None,) * shape.slots, ((),) * shape.slots, free, free)


@dataclass
class _Builder:
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
        self.staged: dict[tuple[int, int], int] = {}  # chunk -> staging buffer of its gradients
        self.queue: list[tuple[int, int]] = []  # updates whose state may be read ahead
        self.read: dict[tuple[int, int], int] = {}  # chunk -> ring buffer it was read into
        self.fetched = 0  # of the queue
        self.done = 0
        self.last_write = ""

    def result(self) -> tuple[Schedule, Table]:
        table = Table(
            tuple(self.slots), tuple(self.slot_free), tuple(self.ring_free),
            tuple(self.stage_free), self.ring_next, self.stage_next,
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
        if group in self.shape.pinned_weights:
            return self.shape.slots + self.shape.pinned_weights.index(group)
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

        def distance(slot: int) -> float:
            held = self.slots[slot]
            if held is None:
                return float("inf")
            return upcoming.index(held) if held in upcoming else len(upcoming)

        slot = max(free, key=distance)
        waits = (*self.slot_free[slot], *self.each("W", group))
        self.emit(Action("R", group, at=(slot,), waits=waits))
        self.slots[slot], self.slot_free[slot] = group, ()

    def hold_slot(self, group: int, names: tuple[str, ...]) -> None:
        """The slot of `group` may be overwritten only after these too."""
        slot = self.slot_of(group)
        if slot is not None and slot < self.shape.slots:
            self.slot_free[slot] = tuple(dict.fromkeys((*self.slot_free[slot], *names)))

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
        if key in self.shape.pinned_state:
            self.read[key] = self.shape.ring + self.shape.pinned_state.index(key)
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
        for chunk in range(self.shape.chunks[group]):
            key = (group, chunk)
            if key not in self.read:
                if key not in self.queue:
                    self.queue.append(key)
                self.read_ahead_to(key)
            buffer = self.read.pop(key)
            pinned = buffer >= self.shape.ring
            waits = [*after, f"R{group}"]
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
        return updates

    def read_ahead_to(self, key: tuple[int, int]) -> None:
        while key not in self.read:
            self._fetch(self.queue[self.fetched])
            self.fetched += 1


def forward(
    shape: Shape, table: Table, order: Sequence[int], *, pending: Sequence[int] = (),
    commit: bool = False,
) -> tuple[Schedule, Table]:  # fmt: skip
    """Forward over the sites in `order`. Updates of `pending` groups, left over from the step
    before, run first, each before its group is needed; then, with `commit`, that step is
    committed."""
    b = _Builder(shape, table)
    b.held_before = True
    left = list(dict.fromkeys(pending))
    upcoming = [group for site in order for group in shape.sites[site]]
    first_use = list(dict.fromkeys(g for g in upcoming if g in left))
    b.queue = [(g, c) for g in _by_use(left, first_use) for c in range(shape.chunks[g])]

    def renew(group: int) -> None:
        if group in left:
            left.remove(group)
            b.update(group, (f"H{group}", "E"))
            if not left and commit:
                b.emit(Action("C"))

    for group in [g for g in left if g not in upcoming]:  # resident and unused groups
        b.bring(group, upcoming)
        renew(group)
    if commit and not pending:
        b.emit(Action("C"))
    reached = 0
    for position, site in enumerate(order):
        while reached < len(order) and reached <= position + shape.window:
            if not b.bring_site(order[reached], upcoming, must=reached == position):
                break
            for group in shape.sites[order[reached]]:
                renew(group)
            reached += 1
        groups = shape.sites[site]
        # The updates may be this schedule's or, of weights that stayed in their slot, an earlier's.
        waits = [name for g in groups for name in (f"R{g}", *b.each("U", g))]
        places = tuple(_place(b, g) for g in groups)
        name = b.emit(Action("F", site, at=places, waits=tuple(waits)))
        for group in groups:
            b.needed.remove(group)
            b.hold_slot(group, (name,))
            upcoming.remove(group)
    return b.result()


def backward(
    shape: Shape, table: Table, order: Sequence[int], *, mode: str, later: Sequence[int] = (),
    rest: Sequence[int] = (),
) -> tuple[Schedule, Table]:  # fmt: skip
    """Backward over the sites in `order`. A group is updated after its last use, unless it is one
    of `later`, whose gradients are held; groups in `rest` are updated when backward has ended. If
    nothing is left for later, the step is committed."""
    b = _Builder(shape, table, mode)
    upcoming = [group for site in order for group in shape.sites[site]]
    finals = last_uses(shape, order)
    now = [g for groups in finals for g in groups if g not in later]
    if mode != "naive":
        b.queue = [(g, c) for g in now for c in range(shape.chunks[g])]
    finished: list[str] = []  # after what the gradients of each group are gone
    reached = 0
    for position, site in enumerate(order):
        while reached < len(order) and reached <= position + shape.window:
            if not b.bring_site(order[reached], upcoming, must=reached == position):
                break
            reached += 1
        if mode != "naive":
            b.read_ahead()
        groups = shape.sites[site]
        waits = [f"R{g}" for g in groups]
        if len(finished) >= shape.grads:
            waits.append(finished[-shape.grads])
        name = b.emit(Action("B", site, at=tuple(_place(b, g) for g in groups), waits=tuple(waits)))
        for group in groups:
            b.needed.remove(group)
            b.hold_slot(group, (name,))
            upcoming.remove(group)
        for group in finals[position]:
            if group not in later:
                finished.append(b.update(group, (name,))[-1])
            elif (put_away := _hold(b, group, name)) is not None:
                finished.append(put_away)
    end = b.emit(Action("E"))
    for group in rest:
        if group in later:
            _hold(b, group, end)
        else:
            b.bring(group, ())
            b.update(group, (end,))
    if not later:
        b.emit(Action("C", waits=(end,)))
    return b.result()


def last_uses(shape: Shape, order: Sequence[int]) -> list[tuple[int, ...]]:
    """For each position the groups that no later position uses."""
    last = {group: i for i, site in enumerate(order) for group in shape.sites[site]}
    return [
        tuple(g for g in dict.fromkeys(shape.sites[site]) if last[g] == i)
        for i, site in enumerate(order)
    ]


def one_backward(shape: Shape, table: Table, site: int) -> tuple[Schedule, Table]:
    """Backward of one site on demand: its updates follow when it is known what was its last use."""
    b = _Builder(shape, table)
    groups = shape.sites[site]
    b.bring_site(site, (), must=True)
    places, waits = tuple(_place(b, g) for g in groups), tuple(f"R{g}" for g in groups)
    name = b.emit(Action("B", site, at=places, waits=waits))
    for group in groups:
        b.hold_slot(group, (name,))
    return b.result()


def updates(
    shape: Shape, table: Table, groups: Sequence[int], *, after: str, mode: str = "optimized",
    later: Sequence[int] = (), end: bool = False,
) -> tuple[Schedule, Table]:  # fmt: skip
    """Updates on demand of groups whose gradients are complete after `after`; those in `later` are
    held instead. With `end`, backward ends first, and the step is committed if nothing waits."""
    b = _Builder(shape, table, mode)
    if end:
        b.emit(Action("E"))
    for group in groups:
        if group in later:
            _hold(b, group, after)
        else:
            b.bring(group, ())
            b.update(group, (after,))
    if end and not later:
        b.emit(Action("C", waits=("E",)))
    return b.result()


def _hold(b: _Builder, group: int, after: str) -> str | None:
    """Holds a group's gradients; returns after what they have left host memory, if they do."""
    b.emit(Action("H", group, waits=(after,)))
    if group not in b.shape.spilled:
        return None
    for chunk in range(b.shape.chunks[group]):
        b.stage("P", group, chunk, (f"H{group}", f"U{group}.{chunk}"))
    return f"P{group}.{b.shape.chunks[group] - 1}"


def _place(b: _Builder, group: int) -> int:
    slot = b.slot_of(group)
    assert slot is not None
    return slot


def _by_use(groups: Sequence[int], first_use: Sequence[int]) -> list[int]:
    """Groups that no site uses first (they are renewed at once), then in order of use."""
    return [g for g in groups if g not in first_use] + list(first_use)
