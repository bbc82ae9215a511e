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
    BufferState,
    Schedule,
    ScheduleSpec,
    empty_buffers,
)
from lohan.schedule.placement import Phase, StepPlacement, UpdateOptions, place

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


@dataclass(frozen=True, kw_only=True)
class ExecutionOrder:
    """The order of sites in forward and in backward, and the options for updates."""

    forward: tuple[int, ...]  # sites
    backward: tuple[int, ...]  # sites
    updates: UpdateOptions


def planned_order(
    blocks: Blocks,
    plan: Plan,
    sites: Sequence[int] = (),
    *,
    clipped: bool = False,
) -> ExecutionOrder:
    """Return the order of a plan: `sites` in forward, and in reverse order in backward.

    Without `sites`, all sites run in the order of their numbers. Backward ends at the first site of
    forward that has a trained group. With `clipped`, every step is assumed to be clipped, so no
    update is speculative.
    """
    sites = tuple(sites) or tuple(range(len(blocks.sites)))
    learning = [n for n, site in enumerate(sites) if _learns(blocks, site)]
    reached = sites[learning[0] :] if learning else sites
    updates = UpdateOptions.of(plan, blocks)
    if clipped:
        updates = replace(updates, can_speculate=False)
    return ExecutionOrder(forward=sites, backward=reached[::-1], updates=updates)


def _learns(blocks: Blocks, site: int) -> bool:
    """Return whether a site has a group that is trained.

    Sites before the first such site have no backward.
    """
    return any(not blocks.by_key[key].frozen for key in blocks.sites[site].groups)


Phases = dict[str, Schedule]


def steady_step(spec: ScheduleSpec, order: ExecutionOrder) -> Phases:
    """Return the non-empty phases of a step in the steady state.

    If steps speculate, the step is one that is not clipped. If not every step commits, it is one
    between two commits.
    """
    *_, phases = steps(spec, order, STEADY_AFTER)
    return {name: phase for name, phase in phases.items() if phase}


@lru_cache(maxsize=16)
def check_order(spec: ScheduleSpec, order: ExecutionOrder) -> None:
    """Raise a LohanError if a schedule of this order is wrong or has a race between lanes.

    Several consecutive steps are checked, so that the work that one step leaves to the next is
    checked too. If steps may speculate, both transitions between waiting for the norm and
    speculating are included. If some steps do not commit, both transitions between steps that
    commit and steps that do not are included.
    """
    # Imported here, because forecasts use this module without checking schedules.
    from lohan.schedule.check import validate

    buffers, chain = empty_buffers(spec), []
    speculates, every = order.updates.can_speculate, order.updates.every_step_commits
    ways = (False, True, True, False) if speculates else (False, False)
    commits = (True,) * len(ways) if every else (False, True, True, False)
    for phases in chain_of(spec, order, commits, ways):
        chain += [action for phase in phases.values() for action in phase]
    validate(tuple(chain), spec, buffers, whole=True, by_interval=not every)


def steps(spec: ScheduleSpec, order: ExecutionOrder, count: int) -> Iterator[Phases]:
    """Yield the phases of the first `count` steps, all with the same order of sites."""
    return chain_of(spec, order, (order.updates.every_step_commits,) * count)


def chain_of(
    spec: ScheduleSpec,
    order: ExecutionOrder,
    commits: Sequence[bool],
    speculates: Sequence[bool] = (),
    *,
    waits: bool = True,
) -> Iterator[Phases]:
    """Yield the phases of consecutive steps; without `waits`, their actions have no waits.

    `commits` says for each step whether it commits, `speculates` whether it runs updates before the
    norm is known. Steps beyond the end of `speculates` speculate if the options allow it.
    """
    buffers, previous = empty_buffers(spec, waits=waits), None
    compiled: dict[tuple[bool, bool], StepPlacement] = {}
    for number, commit in enumerate(commits):
        can = order.updates.can_speculate
        way = (speculates[number] if number < len(speculates) else can), commit
        if way not in compiled:
            compiled[way] = place(spec, order.updates, speculates=way[0], commits=commit)
        placed = compiled[way]
        build = _overlapped if order.updates.overlap else _plain
        phases, buffers = build(spec, buffers, order, placed, previous)
        previous = placed
        yield phases


def _overlapped(
    spec: ScheduleSpec,
    buffers: BufferState,
    order: ExecutionOrder,
    placed: StepPlacement,
    previous: StepPlacement | None,
) -> tuple[Phases, BufferState]:
    """Return the phases of a step, including the work that the previous one left to forward."""
    if previous is not None and previous.ends is not Phase.NEXT_FORWARD:
        previous = None  # It has ended.
    forward, buffers = sched.forward(spec, buffers, order.forward, previous)
    unreached = _unreached(spec, order)
    backward, buffers = sched.backward(spec, buffers, order.backward, placed, unreached=unreached)
    if spec.log:
        end, buffers = sched.commit_log(spec, buffers)
        backward += end
    after: Schedule = ()
    if placed.ends is Phase.AFTER_BACKWARD:
        after, buffers = sched.finish_step(spec, buffers, placed)
    return {"forward": forward, "backward": backward, "after backward": after}, buffers


def _plain(
    spec: ScheduleSpec,
    buffers: BufferState,
    order: ExecutionOrder,
    placed: StepPlacement,
    previous: StepPlacement | None,
) -> tuple[Phases, BufferState]:
    """Return the phases of a step without overlap, in which each site is scheduled on demand."""
    forward: list[Action] = []
    backward: list[Action] = []
    for site in order.forward:
        schedule, buffers = sched.forward(spec, buffers, [site])
        forward += schedule
    for site, finished in zip(order.backward, sched.last_uses(spec, order.backward), strict=True):
        schedule, buffers = sched.one_backward(spec, buffers, site)
        backward += schedule
        schedule, buffers = sched.updates(spec, buffers, finished, placed)
        backward += schedule
    schedule, buffers = sched.updates(spec, buffers, _unreached(spec, order), placed, end=True)
    backward += schedule
    after: Schedule = ()
    if placed.ends is not Phase.BACKWARD:
        after, buffers = sched.finish_step(spec, buffers, placed)
    return {
        "forward": tuple(forward),
        "backward": tuple(backward),
        "after backward": after,
    }, buffers


def _unreached(spec: ScheduleSpec, order: ExecutionOrder) -> list[int]:
    """Return the groups that no site of backward uses, including frozen ones."""
    used = {group for site in order.backward for group in spec.sites[site]}
    return [group for group in range(len(spec.chunks)) if group not in used]
