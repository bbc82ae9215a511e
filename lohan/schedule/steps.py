"""A step after the first few, as the pipeline schedules it; nothing of it needs torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from lohan.model.layout import RESIDENTS, Blocks
from lohan.model.plan import Plan
from lohan.model.state import chunks
from lohan.schedule import phases as sched
from lohan.schedule.actions import Action, BufferState, Schedule, ScheduleSpec, empty_buffers

STEADY_AFTER = 3  # steps: slots and rings have found their rhythm


def spec_of(blocks: Blocks, plan: Plan, *, write_pinned: bool) -> ScheduleSpec:
    """What schedules need to know, by number of group and site."""
    numbers = {group.key: number for number, group in enumerate(blocks.groups)}
    pinned = [numbers[key] for key in (*RESIDENTS, *plan.pinned_weights) if key in numbers]
    return ScheduleSpec(
        sites=tuple(tuple(numbers[key] for key in site.groups) for site in blocks.sites),
        chunks=tuple(
            0 if group.frozen else len(chunks(group, plan.chunk_params)) for group in blocks.groups
        ),
        slots=plan.weight_slots,
        ring=plan.ring,
        window=plan.window,
        grads=plan.grad_groups,
        pinned_weights=tuple(pinned),
        pinned_state=tuple((numbers[key], chunk) for key, chunk in plan.pinned_state),
        write_pinned=write_pinned,
        spilled=frozenset(numbers[key] for key in plan.spilled),
        moved_out=frozenset(n for n, s in enumerate(blocks.sites) if s.name in plan.moved_out),
        act_buffers=plan.act_buffers,
        device_slots=plan.device_slots,
        device_grads=plan.device_grads,
        kept=frozenset(
            n
            for n, s in enumerate(blocks.sites)
            if plan.device_slots and s.name not in plan.staying
        ),
        net=plan.world > 1,
    )


def later_of(blocks: Blocks, plan: Plan) -> tuple[int, ...]:
    """Groups whose updates wait until backward has ended."""
    return tuple(
        number
        for number, group in enumerate(blocks.groups)
        if not group.frozen and (plan.holds_all or group.key in plan.deferred)
    )


@dataclass(frozen=True, kw_only=True)
class ExecutionOrder:
    """How steps go: sites in the order of forward and of backward, and when updates run."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    mode: str  # serial | naive | optimized | balanced
    later: tuple[int, ...] = ()
    overlap: bool = True
    speculates: bool = False  # updates do not wait for the norm while steps are not clipped

    @classmethod
    def straight(
        cls, sites: Sequence[int], mode: str, later: tuple[int, ...] = (), *, overlap: bool = True,
        speculates: bool = False,
    ) -> ExecutionOrder:  # fmt: skip
        """Backward as forward, the other way round."""
        return cls(
            forward=tuple(sites), backward=tuple(sites)[::-1], mode=mode, later=later,
            overlap=overlap, speculates=speculates,
        )  # fmt: skip

    @property
    def pending(self) -> tuple[int, ...]:
        """Groups that are updated during the next forward."""
        return self.later if self.overlap and self.mode != "serial" else ()


Phases = dict[str, Schedule]


def steady_step(spec: ScheduleSpec, order: ExecutionOrder) -> Phases:
    """The phases of a step after the first few, as the pipeline schedules them; of an order that
    speculates, of a step whose norm stays below the limit."""
    *_, phases = steps(spec, order, STEADY_AFTER)
    return {name: phase for name, phase in phases.items() if phase}


@lru_cache(maxsize=16)
def check_order(spec: ScheduleSpec, order: ExecutionOrder) -> None:
    """Raises a LohanError if a schedule of this order could go wrong on lanes: asked of steps in a
    row, so that what one leaves to the next is seen too, from waiting for the norm to not waiting
    for it and back."""
    from lohan.schedule.check import validate  # what only looks ahead needs it not

    buffers, chain = empty_buffers(spec), []
    ways = (False, True, True, False) if order.speculates else (False, False)
    for phases in _chain(spec, order, ways):
        chain += [action for phase in phases.values() for action in phase]
    validate(tuple(chain), spec, buffers, whole=True)


def steps(spec: ScheduleSpec, order: ExecutionOrder, count: int) -> Iterator[Phases]:
    """The phases of the first steps, as if their order had been known from the start."""
    return _chain(spec, order, (order.speculates,) * count)


def _chain(spec: ScheduleSpec, order: ExecutionOrder, ways: Sequence[bool]) -> Iterator[Phases]:
    """Steps in a row, each of which speculates or waits for the norm."""
    buffers, before = empty_buffers(spec), None
    for speculates in ways:
        now = replace(order, speculates=speculates, later=() if speculates else order.later)
        if order.overlap:
            phases, buffers = _overlapped(spec, buffers, now, before)
        else:
            phases, buffers = _plain(spec, buffers, now)
        before = now
        yield phases


def _overlapped(
    spec: ScheduleSpec, buffers: BufferState, order: ExecutionOrder, before: ExecutionOrder | None
) -> tuple[Phases, BufferState]:
    """A step, and what the one `before` it left to its forward."""
    pending = before.pending if before is not None else ()
    commit = bool(pending) or (before is not None and before.speculates)
    forward, buffers = sched.forward(spec, buffers, order.forward, pending=pending, commit=commit)
    backward, buffers = sched.backward(
        spec, buffers, order.backward, mode=order.mode, later=order.later, rest=_rest(spec, order),
        speculate=order.speculates,
    )  # fmt: skip
    after: Schedule = ()
    if order.later and not order.pending:
        after, buffers = sched.forward(spec, buffers, (), pending=order.later, commit=True)
    return {"forward": forward, "backward": backward, "after backward": after}, buffers


def _plain(
    spec: ScheduleSpec, buffers: BufferState, order: ExecutionOrder
) -> tuple[Phases, BufferState]:
    """Overlap off: each block is scheduled on demand."""
    forward: list[Action] = []
    backward: list[Action] = []
    later = order.later
    for site in order.forward:
        made, buffers = sched.forward(spec, buffers, [site])
        forward += made
    for site, finished in zip(order.backward, sched.last_uses(spec, order.backward), strict=True):
        made, buffers = sched.one_backward(spec, buffers, site)
        backward += made
        made, buffers = sched.updates(spec, buffers, finished, after=f"B{site}", later=later)
        backward += made
    rest = _rest(spec, order)
    made, buffers = sched.updates(spec, buffers, rest, after="E", later=later, end=True)
    backward += made
    after, buffers = sched.forward(spec, buffers, (), pending=later, commit=bool(later))
    return {
        "forward": tuple(forward),
        "backward": tuple(backward),
        "after backward": after,
    }, buffers


def _rest(spec: ScheduleSpec, order: ExecutionOrder) -> list[int]:
    """Groups that no site of the backward uses. (Frozen ones among them are not updated.)"""
    used = {group for site in order.backward for group in spec.sites[site]}
    return [group for group in range(len(spec.chunks)) if group not in used]
