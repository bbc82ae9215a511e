"""A step as data: small pure passes from shape and table to the actions of a phase.

The tokens are described in actions.py. `overlap=False` runs a schedule in its own order; lanes run
it with everything under way that waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lohan.schedule.actions import Action, Schedule
from lohan.schedule.builder import Builder
from lohan.schedule.places import DEVICE_BUFFERS, Shape, Table

GRAD_MODES = ("serial", "naive", "optimized", "balanced")


def forward(
    shape: Shape, table: Table, order: Sequence[int], *, pending: Sequence[int] = (),
    commit: bool = False, training: bool = True,
) -> tuple[Schedule, Table]:  # fmt: skip
    """Forward over the sites in `order`. Updates of `pending` groups, left over from the step
    before, run first, each before its group is needed; then, with `commit`, that step is
    committed. Without `training` no backward follows, and no activations are kept."""
    b = Builder(shape, table)
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
    back = [group for site in reversed(order) for group in shape.sites[site]] if training else []
    reached = _Reach(b, order, upcoming, release=True, then=back)
    for position, site in enumerate(order):
        reached.bring(position, then=renew)
        reached.load(position)
        groups = shape.sites[site]
        places, waits = b.ready(groups)
        into, room = b.act_room(site) if training else ((), ())
        by, free = b.travel_room(site) if training else ((), ())
        name = b.emit(Action("F", site, at=(*places, *into, *by), waits=(*waits, *room, *free)))
        b.used(groups, name)
        reached.passed(groups)
        b.keep(site, name, into, by)
    return b.result()


def backward(
    shape: Shape, table: Table, order: Sequence[int], *, mode: str, later: Sequence[int] = (),
    rest: Sequence[int] = (),
) -> tuple[Schedule, Table]:  # fmt: skip
    """Backward over the sites in `order`. A group is updated after its last use, unless it is one
    of `later`, whose gradients are held; groups in `rest` are updated when backward has ended. If
    nothing is left for later, the step is committed."""
    b = Builder(shape, table, mode)
    upcoming = [group for site in order for group in shape.sites[site]]
    finals = last_uses(shape, order)
    now = [g for groups in finals for g in groups if g not in later]
    if mode != "naive":
        b.queue = [(g, c) for g in now for c in range(shape.chunks[g])]
    finished: list[str] = []  # after what the gradients of each group are gone from host memory
    left_device: list[str] = []  # and from the device
    reached, restoring = _Reach(b, order, upcoming), _Restoring(b, order)
    for position, site in enumerate(order):
        reached.bring(position)
        restoring.fetch(position)
        if mode != "naive":
            b.read_ahead()
        reached.load(position)
        groups = shape.sites[site]
        places, waits = b.ready(groups, renewed=False)
        where, restored = restoring.restore(position)
        full = [finished[-shape.grads]] if len(finished) >= shape.grads else []
        if not shape.device_slots:
            waits += full
        elif len(left_device) >= shape.device_grads:
            waits.append(left_device[-shape.device_grads])
        name = b.emit(Action("B", site, at=places + where, waits=(*waits, *restored)))
        b.used(groups, name)
        reached.passed(groups)
        for group in finals[position]:
            there = b.gradients(group, name, full)
            left_device.append(there)
            if group not in later:
                finished.append(b.update(group, (there,))[-1])
            elif (put_away := _hold(b, group, there)) is not None:
                finished.append(put_away)
    end = b.emit(Action("E"))
    for group in _trained(shape, rest):
        if group in later:
            _hold(b, group, end)
        else:
            b.bring(group, ())
            b.update(group, (end,))
    if not later:
        b.emit(Action("C", waits=(end,)))
    return b.result()


class _Reach:
    """How far ahead weights are: in host slots by the window, on the device as slots allow. With
    `release`, host slots are free once loaded; otherwise updates still need them. `then`: groups
    that the next phase uses; what it needs first stays on the device for it."""

    def __init__(
        self, builder: Builder, order: Sequence[int], upcoming: list[int], *,
        release: bool = False, then: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self._b, self._order, self._upcoming, self._then = builder, order, upcoming, then
        self._release = release and builder.shape.device_slots > 0
        self._brought = self._loaded = 0
        self._busy: list[int] = []  # groups on the device, not yet used

    def bring(self, position: int, then: Callable[[int], None] | None = None) -> None:
        b, order = self._b, self._order
        while self._brought < len(order) and self._brought <= position + b.shape.window:
            site = order[self._brought]
            if not b.bring_site(site, self._upcoming, must=self._brought == position):
                break
            for group in b.shape.sites[site] if then is not None else ():
                then(group)  # type: ignore[misc]
            self._brought += 1

    def load(self, position: int) -> None:
        b, order = self._b, self._order
        while b.shape.device_slots and self._loaded < self._brought:
            site, must = order[self._loaded], self._loaded == position
            if not b.load_site(site, (*self._upcoming, *self._then), self._busy, must=must):
                break
            self._busy.extend(b.shape.sites[site])
            if self._release:
                self._forget(b.needed, b.shape.sites[site])
            self._loaded += 1

    def passed(self, groups: Sequence[int]) -> None:
        if not self._release:
            self._forget(self._b.needed, groups)
        if self._b.shape.device_slots:
            self._forget(self._busy, groups)
        self._forget(self._upcoming, groups)

    @staticmethod
    def _forget(those: list[int], groups: Sequence[int]) -> None:
        for group in groups:
            those.remove(group)


class _Restoring:
    """Kept activations on their way back: from SSD by the buffers, to the device one ahead."""

    def __init__(self, builder: Builder, order: Sequence[int]) -> None:
        self._b, self._order = builder, order
        self._fetched = 0
        self._ready: list[tuple[tuple[int, ...], tuple[str, ...]]] = []

    def fetch(self, position: int) -> None:
        ahead = min(position + self._b.shape.act_buffers, len(self._order))
        while self._fetched < ahead:
            self._b.fetch_kept(self._order[self._fetched])
            self._fetched += 1

    def restore(self, position: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Where backward at this position finds its activations, and what it waits for."""
        while len(self._ready) < min(position + DEVICE_BUFFERS, self._fetched):
            self._ready.append(self._b.restore(self._order[len(self._ready)]))
        return self._ready[position]


def last_uses(shape: Shape, order: Sequence[int]) -> list[tuple[int, ...]]:
    """For each position the groups to update that no later position uses."""
    last = {group: i for i, site in enumerate(order) for group in shape.sites[site]}
    return [
        tuple(g for g in dict.fromkeys(_trained(shape, shape.sites[site])) if last[g] == i)
        for i, site in enumerate(order)
    ]


def _trained(shape: Shape, groups: Sequence[int]) -> list[int]:
    return [group for group in groups if shape.chunks[group]]


def one_backward(shape: Shape, table: Table, site: int) -> tuple[Schedule, Table]:
    """Backward of one site on demand: its updates follow when it is known what was its last use."""
    b = Builder(shape, table)
    groups = shape.sites[site]
    reached, restoring = _Reach(b, [site], list(groups)), _Restoring(b, [site])
    reached.bring(0)
    restoring.fetch(0)
    reached.load(0)
    places, waits = b.ready(groups, renewed=False)
    where, restored = restoring.restore(0)
    name = b.emit(Action("B", site, at=places + where, waits=(*waits, *restored)))
    b.used(groups, name)
    return b.result()


def updates(
    shape: Shape, table: Table, groups: Sequence[int], *, after: str, mode: str = "optimized",
    later: Sequence[int] = (), end: bool = False,
) -> tuple[Schedule, Table]:  # fmt: skip
    """Updates on demand of groups whose gradients are complete after `after`; those in `later` are
    held instead. With `end`, backward ends first, and the step is committed if nothing waits."""
    b = Builder(shape, table, mode)
    if end:
        b.emit(Action("E"))
    for group in _trained(shape, groups):
        there = after if end else b.gradients(group, after)
        if group in later:
            _hold(b, group, there)
        else:
            b.bring(group, ())
            b.update(group, (there,))
    if end and not later:
        b.emit(Action("C", waits=("E",)))
    return b.result()


def _hold(b: Builder, group: int, after: str) -> str | None:
    """Holds a group's gradients; returns after what they have left host memory, if they do."""
    b.emit(Action("H", group, waits=(after,)))
    if group not in b.shape.spilled:
        return None
    for chunk in range(b.shape.chunks[group]):
        b.stage("P", group, chunk, (f"H{group}", f"U{group}.{chunk}"))
    return f"P{group}.{b.shape.chunks[group] - 1}"


def _by_use(groups: Sequence[int], first_use: Sequence[int]) -> list[int]:
    """Groups that no site uses first (they are renewed at once), then in order of use."""
    return [g for g in groups if g not in first_use] + list(first_use)
