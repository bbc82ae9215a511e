"""A step after the first few, as ActionScheduler schedules it; nothing of it needs torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from lohan.model.layout import RESIDENTS, Blocks
from lohan.model.plan import Plan
from lohan.model.state import chunks
from lohan.schedule import phases as sched
from lohan.schedule.actions import (
    Action,
    BufferState,
    Op,
    Schedule,
    ScheduleSpec,
    empty_buffers,
)

STEADY_AFTER = 3  # steps: slots and rings have found their rhythm


def spec_of(blocks: Blocks, plan: Plan, *, two_generations: bool) -> ScheduleSpec:
    """What schedules need to know, by number of group and site."""
    numbers = {group.key: number for number, group in enumerate(blocks.groups)}
    cached = [numbers[key] for key in (*RESIDENTS, *plan.host_cached_weights) if key in numbers]
    return ScheduleSpec(
        sites=tuple(tuple(numbers[key] for key in site.groups) for site in blocks.sites),
        chunks=tuple(
            0 if group.frozen else len(chunks(group, plan.chunk_params)) for group in blocks.groups
        ),
        slots=plan.weight_slots,
        ring=plan.ring,
        window=plan.window,
        grads=plan.grad_groups,
        host_cached_weights=tuple(cached),
        host_cached_state=tuple((numbers[key], chunk) for key, chunk in plan.host_cached_state),
        write_through=two_generations,
        spilled_gradients=frozenset(numbers[key] for key in plan.spilled_gradients),
        spilled_sites=frozenset(
            n for n, s in enumerate(blocks.sites) if s.name in plan.spilled_sites
        ),
        act_buffers=plan.act_buffers,
        device_slots=plan.device_slots,
        device_grads=plan.device_grads,
        head_alone=plan.head_alone,
        offloaded=frozenset(
            n
            for n, s in enumerate(blocks.sites)
            if plan.device_slots and s.name not in plan.staying
        ),
        net=plan.world > 1,
        clips_groups=plan.block_clip > 0,
        updated_twice=frozenset(numbers[key] for key in plan.updated_twice),
    )


def deferred_groups(blocks: Blocks, plan: Plan) -> tuple[int, ...]:
    """Groups whose updates wait until backward has ended."""
    return tuple(
        number
        for number, group in enumerate(blocks.groups)
        if not group.frozen and (plan.needs_all_gradients or group.key in plan.deferred)
    )


@dataclass(frozen=True, kw_only=True)
class ExecutionOrder:
    """How steps go: sites in the order of forward and of backward, and when updates run."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    update_mode: str  # serial | naive | optimized | balanced
    deferred: tuple[int, ...] = ()
    overlap: bool = True
    speculates: bool = False  # updates do not wait for the norm while steps are not clipped
    commits: bool = True  # every step; if not, cached chunks are written by steps that do

    @property
    def deferred_to_forward(self) -> tuple[int, ...]:
        """Groups that are updated during the next forward."""
        return self.deferred if self.overlap and self.update_mode != "serial" else ()


def planned_order(
    blocks: Blocks,
    plan: Plan,
    sites: Sequence[int] = (),
    *,
    two_generations: bool,
    clipped: bool = False,
) -> ExecutionOrder:
    """The order that a plan leads to: `sites`, or all of them as they come, and back again."""
    sites = tuple(sites) or tuple(range(len(blocks.sites)))
    learning = [n for n, site in enumerate(sites) if _learns(blocks, site)]
    reached = sites[learning[0] :] if learning else sites
    return ExecutionOrder(
        forward=sites, backward=reached[::-1], update_mode=plan.update_mode, overlap=plan.overlap,
        deferred=deferred_groups(blocks, plan),
        speculates=plan.may_speculate(two_generations=two_generations) and not clipped,
        commits=not (two_generations and plan.commits_by_interval),
    )  # fmt: skip


def _learns(blocks: Blocks, site: int) -> bool:
    """Frozen sites before the first that learns have no backward."""
    return any(not blocks.by_key[key].frozen for key in blocks.sites[site].groups)


Phases = dict[str, Schedule]


def steady_step(spec: ScheduleSpec, order: ExecutionOrder) -> Phases:
    """The phases of a step after the first few, as ActionScheduler schedules them; of an order that
    speculates, of a step whose norm stays below the limit, and of one that does not commit, of a
    step between two commits."""
    *_, phases = steps(spec, order, STEADY_AFTER)
    return {name: phase for name, phase in phases.items() if phase}


@lru_cache(maxsize=16)
def check_order(spec: ScheduleSpec, order: ExecutionOrder) -> None:
    """Raises a LohanError if a schedule of this order could go wrong on lanes: asked of steps in a
    row, so that what one leaves to the next is seen too, from waiting for the norm to not waiting
    for it and back, and with commits between steps without."""
    from lohan.schedule.check import validate  # what only looks ahead needs it not

    buffers, chain = empty_buffers(spec), []
    ways = (False, True, True, False) if order.speculates else (False, False)
    commits = (True,) * len(ways) if order.commits else (False, True, True, False)
    for phases in chain_of(spec, order, commits, ways):
        chain += [action for phase in phases.values() for action in phase]
    validate(tuple(chain), spec, buffers, whole=True, by_interval=not order.commits)


def steps(spec: ScheduleSpec, order: ExecutionOrder, count: int) -> Iterator[Phases]:
    """The phases of the first steps, as if their order had been known from the start."""
    return chain_of(spec, order, (order.commits,) * count)


def chain_of(
    spec: ScheduleSpec, order: ExecutionOrder, commits: Sequence[bool],
    speculates: Sequence[bool] = (),
) -> Iterator[Phases]:  # fmt: skip
    """Steps in a row, each of which commits or not, and speculates or waits for the norm."""
    buffers, before = empty_buffers(spec), None
    for number, commit in enumerate(commits):
        bold = speculates[number] if number < len(speculates) else order.speculates
        deferred = () if bold else order.deferred
        now = replace(order, speculates=bold, deferred=deferred, commits=commit)
        if order.overlap:
            phases, buffers = _overlapped(spec, buffers, now, before)
        else:
            phases, buffers = _plain(spec_for_step(spec, now.commits), buffers, now)
        before = now
        yield phases


def spec_for_step(spec: ScheduleSpec, commits: bool) -> ScheduleSpec:
    """For a step that may not commit: then what stays in memory is not written."""
    return spec if commits else replace(spec, write_through=False)


def _overlapped(
    spec: ScheduleSpec, buffers: BufferState, order: ExecutionOrder, before: ExecutionOrder | None
) -> tuple[Phases, BufferState]:
    """A step, and what the one `before` it left to its forward."""
    left = before.deferred_to_forward if before is not None else ()
    ends = bool(left) or (before is not None and before.speculates)
    earlier = spec_for_step(spec, before is None or before.commits)
    forward, buffers = sched.forward(earlier, buffers, order.forward, deferred=left, end_step=ends)
    spec = spec_for_step(spec, order.commits)
    late: Schedule = ()
    if buffers.second_updates and order.speculates:  # its updates are of the step itself
        late, buffers = sched.write_behind(spec, buffers)
    backward, buffers = sched.backward(
        spec, buffers, order.backward, update_mode=order.update_mode, deferred=order.deferred,
        unreached=_unreached(spec, order), speculate=order.speculates,
    )  # fmt: skip
    after: Schedule = ()
    if order.deferred and not order.deferred_to_forward:
        after, buffers = sched.forward(spec, buffers, (), deferred=order.deferred, end_step=True)
    return {"forward": forward + late, "backward": backward, "after backward": after}, buffers


def _plain(
    spec: ScheduleSpec, buffers: BufferState, order: ExecutionOrder
) -> tuple[Phases, BufferState]:
    """Overlap off: each block is scheduled on demand."""
    forward: list[Action] = []
    backward: list[Action] = []
    deferred = order.deferred
    for site in order.forward:
        made, buffers = sched.forward(spec, buffers, [site])
        forward += made
    for site, finished in zip(order.backward, sched.last_uses(spec, order.backward), strict=True):
        made, buffers = sched.one_backward(spec, buffers, site)
        backward += made
        made, buffers = sched.updates(spec, buffers, finished, after=f"B{site}", deferred=deferred)
        backward += made
    last = _unreached(spec, order)
    made, buffers = sched.updates(
        spec, buffers, last, after=Op.BACKWARD_DONE, deferred=deferred, end=True
    )
    backward += made
    after, buffers = sched.forward(spec, buffers, (), deferred=deferred, end_step=bool(deferred))
    return {
        "forward": tuple(forward),
        "backward": tuple(backward),
        "after backward": after,
    }, buffers


def _unreached(spec: ScheduleSpec, order: ExecutionOrder) -> list[int]:
    """Groups that no site of the backward uses. (Frozen ones among them are not updated.)"""
    used = {group for site in order.backward for group in spec.sites[site]}
    return [group for group in range(len(spec.chunks)) if group not in used]
