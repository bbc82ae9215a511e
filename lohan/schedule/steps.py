"""Schedules of whole training steps, as ActionScheduler builds them. This module needs no torch."""

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
    Schedule,
    ScheduleSpec,
)
from lohan.schedule.buffers import BufferState, empty_buffers

STEADY_AFTER = 3  # number of steps after which the use of slots and rings is periodic


def spec_of(blocks: Blocks, plan: Plan) -> ScheduleSpec:
    """Return the schedule spec of a model and a plan, with groups and sites as numbers."""
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
        # The log has the gradients of all trained groups, those of resident parameters included.
        spilled_gradients=frozenset(
            numbers[group.key]
            for group in blocks.trained
            if plan.log_gradients or group.key in plan.spilled_gradients
        ),
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
        log=plan.log_gradients > 0,
    )


def deferred_groups(blocks: Blocks, plan: Plan) -> tuple[int, ...]:
    """Return the numbers of the groups whose updates wait until backward has ended."""
    return tuple(
        number
        for number, group in enumerate(blocks.groups)
        if not group.frozen and (plan.needs_all_gradients or group.key in plan.deferred)
    )


@dataclass(frozen=True, kw_only=True)
class ExecutionOrder:
    """The order of sites in forward and in backward, and when updates run."""

    forward: tuple[int, ...]  # sites
    backward: tuple[int, ...]  # sites
    update_mode: str  # serial | naive | optimized | balanced
    deferred: tuple[int, ...] = ()  # groups that are updated after backward
    overlap: bool = True
    speculates: bool = False  # whether updates run before the gradient norm is known
    # Whether every step commits. If not, only the steps that commit write cached chunks.
    commits: bool = True

    @property
    def deferred_to_forward(self) -> tuple[int, ...]:
        """The groups that are updated during the next forward."""
        return self.deferred if self.overlap and self.update_mode != "serial" else ()


def planned_order(
    blocks: Blocks,
    plan: Plan,
    sites: Sequence[int] = (),
    *,
    clipped: bool = False,
) -> ExecutionOrder:
    """Return the order of a plan: `sites` in forward, and in reverse order in backward.

    Without `sites`, all sites run in the order of their numbers. Backward ends at the first site of
    forward that has a trained group. `clipped` assumes that every step is clipped, so that no
    update is speculative.
    """
    sites = tuple(sites) or tuple(range(len(blocks.sites)))
    learning = [n for n, site in enumerate(sites) if _learns(blocks, site)]
    reached = sites[learning[0] :] if learning else sites
    return ExecutionOrder(
        forward=sites,
        backward=reached[::-1],
        update_mode=plan.update_mode,
        overlap=plan.overlap,
        deferred=deferred_groups(blocks, plan),
        speculates=plan.may_speculate and not clipped,
        commits=not plan.commits_by_interval,
    )


def _learns(blocks: Blocks, site: int) -> bool:
    """Return whether a site has a group that is trained.

    Sites before the first such site have no backward.
    """
    return any(not blocks.by_key[key].frozen for key in blocks.sites[site].groups)


Phases = dict[str, Schedule]


def steady_step(spec: ScheduleSpec, order: ExecutionOrder) -> Phases:
    """Return the non-empty phases of a step in the steady state.

    If the order speculates, the step is one that is not clipped. If not every step commits, it is
    one between two commits.
    """
    *_, phases = steps(spec, order, STEADY_AFTER)
    return {name: phase for name, phase in phases.items() if phase}


@lru_cache(maxsize=16)
def check_order(spec: ScheduleSpec, order: ExecutionOrder) -> None:
    """Raise a LohanError if a schedule of this order is wrong or has a race between lanes.

    Several consecutive steps are checked, so that the work that one step leaves to the next is
    checked too. They include both transitions between waiting for the norm and speculating, and
    those between steps that commit and steps that do not, as far as the order has them.
    """
    # Imported here, because forecasts use this module without checking schedules.
    from lohan.schedule.check import validate

    buffers, chain = empty_buffers(spec), []
    ways = (False, True, True, False) if order.speculates else (False, False)
    commits = (True,) * len(ways) if order.commits else (False, True, True, False)
    for phases in chain_of(spec, order, commits, ways):
        chain += [action for phase in phases.values() for action in phase]
    validate(tuple(chain), spec, buffers, whole=True, by_interval=not order.commits)


def steps(spec: ScheduleSpec, order: ExecutionOrder, count: int) -> Iterator[Phases]:
    """Yield the phases of the first `count` steps, all of them in the same order."""
    return chain_of(spec, order, (order.commits,) * count)


def chain_of(
    spec: ScheduleSpec,
    order: ExecutionOrder,
    commits: Sequence[bool],
    speculates: Sequence[bool] = (),
) -> Iterator[Phases]:
    """Yield the phases of consecutive steps.

    `commits` says for each step whether it commits, `speculates` whether it runs updates before the
    norm is known. Steps beyond the end of `speculates` follow the order.
    """
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
    """Return the spec of a step: cached chunks are not written by a step without a commit."""
    return spec if commits else replace(spec, write_through=False)


def _overlapped(
    spec: ScheduleSpec, buffers: BufferState, order: ExecutionOrder, before: ExecutionOrder | None
) -> tuple[Phases, BufferState]:
    """Return the phases of a step, including the updates that the step `before` it deferred."""
    left = before.deferred_to_forward if before is not None else ()
    ends = bool(left) or (before is not None and before.speculates)
    earlier = spec_for_step(spec, before is None or before.commits)
    forward, buffers = sched.forward(earlier, buffers, order.forward, deferred=left, end_step=ends)
    spec = spec_for_step(spec, order.commits)
    backward, buffers = sched.backward(
        spec,
        buffers,
        order.backward,
        update_mode=order.update_mode,
        deferred=order.deferred,
        unreached=_unreached(spec, order),
        speculate=order.speculates,
    )
    if spec.log:
        end, buffers = sched.commit_log(spec, buffers)
        backward += end
    after: Schedule = ()
    if order.deferred and not order.deferred_to_forward:
        after, buffers = sched.forward(spec, buffers, (), deferred=order.deferred, end_step=True)
    return {"forward": forward, "backward": backward, "after backward": after}, buffers


def _plain(
    spec: ScheduleSpec, buffers: BufferState, order: ExecutionOrder
) -> tuple[Phases, BufferState]:
    """Return the phases of a step without overlap, in which each site is scheduled on demand."""
    forward: list[Action] = []
    backward: list[Action] = []
    deferred = order.deferred
    for site in order.forward:
        made, buffers = sched.forward(spec, buffers, [site])
        forward += made
    for site, finished in zip(order.backward, sched.last_uses(spec, order.backward), strict=True):
        made, buffers = sched.one_backward(spec, buffers, site)
        backward += made
        made, buffers = sched.updates(spec, buffers, finished, deferred=deferred)
        backward += made
    last = _unreached(spec, order)
    made, buffers = sched.updates(spec, buffers, last, deferred=deferred, end=True)
    backward += made
    after, buffers = sched.forward(spec, buffers, (), deferred=deferred, end_step=bool(deferred))
    return {
        "forward": tuple(forward),
        "backward": tuple(backward),
        "after backward": after,
    }, buffers


def _unreached(spec: ScheduleSpec, order: ExecutionOrder) -> list[int]:
    """Return the groups that no site of backward uses, including frozen ones."""
    used = {group for site in order.backward for group in spec.sites[site]}
    return [group for group in range(len(spec.chunks)) if group not in used]
