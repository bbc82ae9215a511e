"""Generated cases: grids of settings, random schedules, and shapes for the planner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import strategies as st

from lohan.config import UPDATE_MODES
from lohan.model.machine import Drive, Profile
from lohan.model.shapes import Activation, BlockShape, ModelShape
from lohan.schedule.actions import Action, BufferState, Schedule, ScheduleSpec, empty_buffers
from lohan.schedule.check import validate
from lohan.schedule.phases import (
    backward,
    finish_step,
    forward,
    last_uses,
    one_backward,
    updates,
    write_behind,
)
from lohan.schedule.placement import StepPlacement, UpdateOptions, place

# -- grids of settings -----------------------------------------------------------------------------


def pairwise(*axes: Sequence[Any]) -> list[Any]:
    """Return all combinations of the axes, as parameters for pytest.mark.parametrize.

    A few of them contain every pair of values of two axes; the others are marked `slow`.
    """
    grid = list(product(*(range(len(axis)) for axis in axes)))
    chosen = _covering(grid)
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(axes, place, strict=True)),
            marks=() if place in chosen else pytest.mark.slow,
        )
        for place in grid
    ]


def _covering(grid: Iterable[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Choose, one after the other, the combination with most pairs that are not covered yet."""
    left = {place: set(combinations(enumerate(place), 2)) for place in grid}
    chosen, missing = set(), set().union(*left.values())
    while missing:
        place = max(left, key=lambda place: len(left[place] & missing))
        chosen.add(place)
        missing -= left[place]
    return chosen


def each_value(*axes: Sequence[Any]) -> list[Any]:
    """Return all combinations of the axes, as parameters for pytest.mark.parametrize.

    As many as the longest axis is long contain every value; the others are marked `slow`.
    """
    longest = max(map(len, axes))
    chosen = {tuple(n % len(axis) for axis in axes) for n in range(longest)}
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(axes, place, strict=True)),
            marks=() if place in chosen else pytest.mark.slow,
        )
        for place in product(*(range(len(axis)) for axis in axes))
    ]


def thinned(cases: Iterable[Any], *quick: int) -> list[Any]:
    """Return all cases, and mark those `slow` that are not among the given numbers."""
    return [
        case
        if number in quick
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for number, case in enumerate(cases)
    ]


# -- random schedules of several steps -------------------------------------------------------------


def placed_step(
    spec: ScheduleSpec,
    mode: str = "optimized",
    late: Sequence[int] = (),
    *,
    speculates: bool = False,
    commits: bool = True,
) -> StepPlacement:
    """Return the placements of a step in which the `late` groups are updated in forward."""
    options = UpdateOptions(mode=mode, late=frozenset(late), needs_all_gradients=speculates)
    return place(spec, options, speculates=speculates, commits=commits)


@dataclass(frozen=True)
class ScheduledRun:
    """A shape, and how each of its steps goes."""

    spec: ScheduleSpec
    mode: str
    deferred: tuple[int, ...]
    steps: tuple[ScheduledStep, ...]
    commits: bool = True


@dataclass(frozen=True)
class ScheduledStep:
    order: tuple[int, ...]
    back: tuple[int, ...]
    ahead: bool  # scheduled as a whole, or block by block
    evaluated: tuple[int, ...]  # sites that ran without gradients before it
    speculates: bool  # updates do not wait for the norm, where all would


@st.composite
def scheduled_runs(draw: st.DrawFn) -> ScheduledRun:
    groups = draw(st.integers(1, 5))
    moving = range(groups)
    sites = tuple(
        tuple(draw(st.lists(st.sampled_from(moving), min_size=1, max_size=2, unique=True)))
        for _ in range(draw(st.integers(1, 6)))
    )
    resident = draw(st.booleans())
    chunks = tuple(draw(st.integers(1, 3)) for _ in range(groups + resident))
    cached = [g for g in moving if draw(st.booleans())] if draw(st.booleans()) else []
    everything = [(g, c) for g, n in enumerate(chunks) for c in range(n)]
    host_cached_state = (
        [k for k in everything if draw(st.booleans())] if draw(st.booleans()) else []
    )
    widest = max(len([g for g in site if g not in cached]) for site in sites)
    mode = draw(st.sampled_from(UPDATE_MODES))
    if mode == "serial" or draw(st.booleans()):
        deferred = list(range(len(chunks)))
        spilled = [g for g in moving if draw(st.booleans())]
    else:
        deferred = [g for g in moving if draw(st.booleans())] if mode == "balanced" else []
        spilled = []
    spec = ScheduleSpec(
        sites=sites,
        chunks=chunks,
        slots=draw(st.integers(max(1, widest), 5)),
        ring=draw(st.integers(1, 4)),
        window=draw(st.integers(0, 4)),
        grads=draw(st.integers(1, 3)),
        host_cached_weights=(*([groups] if resident else []), *cached),
        host_cached_state=tuple(host_cached_state),
        spilled_gradients=frozenset(spilled),
    )
    steps = []
    order = tuple(draw(st.lists(st.sampled_from(range(len(sites))), min_size=1, max_size=7)))
    for _ in range(3):
        if draw(st.integers(0, 3)) == 0:
            some = st.lists(st.sampled_from(range(len(sites))), min_size=1, max_size=7)
            order = tuple(draw(some))
        back = tuple(draw(st.permutations(order))) if draw(st.booleans()) else order[::-1]
        evaluated = draw(st.lists(st.sampled_from(range(len(sites))), max_size=2))
        ahead, speculates = draw(st.booleans()), draw(st.booleans())
        steps.append(ScheduledStep(order, back, ahead, tuple(evaluated), speculates))
    return ScheduledRun(
        draw(kept_groups(spec, steps)), mode, tuple(deferred), tuple(steps), draw(st.booleans())
    )


@st.composite
def kept_groups(draw: st.DrawFn, spec: ScheduleSpec, steps: list[ScheduledStep]) -> ScheduleSpec:
    """Draw the same shape with spilled activations, and perhaps a device or several ranks."""
    once = [site for site in range(len(spec.sites)) if all(s.order.count(site) < 2 for s in steps)]
    moved = frozenset(site for site in once if draw(st.booleans()))
    spec = replace(spec, spilled_sites=moved, act_buffers=draw(st.integers(1, 3)))
    if not draw(st.booleans()):
        return spec
    wide = max(map(len, spec.sites))
    others = {site for site in range(len(spec.sites)) if draw(st.booleans())}
    return replace(
        spec,
        device_slots=draw(st.integers(wide, wide + 3)),
        offloaded=moved | others,
        net=draw(st.booleans()),
    )


class ScheduleChain:
    """Calls the phases as ActionScheduler does; checks each schedule alone, keeps all of them."""

    def __init__(self, run: ScheduledRun) -> None:
        self.run, self.spec = run, run.spec
        self.buffers = empty_buffers(run.spec)
        self.all: list[Action] = []

    def add(self, scheduled: tuple[Schedule, BufferState]) -> None:
        validate(scheduled[0], self.spec, self.buffers, by_interval=not self.run.commits)
        self.all += scheduled[0]
        self.buffers = scheduled[1]

    def step(self, step: ScheduledStep, after: ScheduledStep | None) -> None:
        for site in step.evaluated:
            self.add(forward(self.spec, self.buffers, [site], training=False))
        if not step.ahead:
            for site in step.order:
                self.add(forward(self.spec, self.buffers, [site]))
        groups = range(len(self.spec.chunks))
        deferred = self.run.deferred
        waits = self.run.mode != "serial" and len(deferred) == len(groups)
        speculate = step.speculates and step.ahead and waits and self.run.commits
        now = placed_step(
            self.spec, self.run.mode, deferred, speculates=speculate, commits=self.run.commits
        )
        last_use_groups = last_uses(self.spec, step.back)
        rest = [g for g in groups if g not in {g for some in last_use_groups for g in some}]
        if step.ahead:
            self.add(backward(self.spec, self.buffers, step.back, now, unreached=rest))
        else:
            for site, final in zip(step.back, last_use_groups, strict=True):
                self.add(one_backward(self.spec, self.buffers, site))
                if final:
                    self.add(updates(self.spec, self.buffers, final, now))
            self.add(updates(self.spec, self.buffers, rest, now, end=True))
        previous: StepPlacement | None = now
        if self.run.mode == "serial":
            self.add(finish_step(self.spec, self.buffers, now))
            previous = None
        order = after.order if after is not None and after.ahead else step.order
        self.add(forward(self.spec, self.buffers, order, previous))


def chain_of(run: ScheduledRun) -> Schedule:
    chain = ScheduleChain(run)
    if run.steps[0].ahead:
        chain.add(forward(run.spec, chain.buffers, run.steps[0].order))
    for number, step in enumerate(run.steps):
        chain.step(step, run.steps[number + 1] if number < 2 else None)
    chain.add(write_behind(run.spec, chain.buffers))
    return tuple(chain.all)


# -- shapes and a machine for the planner ----------------------------------------------------------

SHAPE_HIDDEN = 100
SHAPE_DRIVE = Drive(name="drive", read=4e9, write=2e9, bytes=10**12)


def machine_profile(**changes) -> Profile:
    given = {
        "name": "plain",
        "device": "gpu",
        "device_bytes": 10**10,
        "compute": ((1024.0, 1e13),),
        "h2d": 1e10,
        "d2h": 1e10,
        "host_bytes": 10**12,
        "adam": 1e9,
        "drives": (SHAPE_DRIVE,),
    }
    return Profile(**{**given, **changes})


def model_shape(
    layers: int = 3, classes: tuple[tuple[float, float], ...] = ((400.0, 8e6), (100.0, 1e5))
) -> ModelShape:
    """Return a model; `classes` are elements and FLOPs per token of its activations."""
    parts = tuple(Activation(f"a{n}", size, flops) for n, (size, flops) in enumerate(classes))
    flops = sum(part.flops for part in parts) + 2e6
    blocks = tuple(
        BlockShape(f"layers.{n}", 10**7, SHAPE_HIDDEN, flops, 0.0, parts) for n in range(layers)
    )
    return ModelShape(
        name="small",
        hidden=SHAPE_HIDDEN,
        vocabulary=1000,
        blocks=blocks,
        embedding_parameters=SHAPE_HIDDEN * 1000,
        head_parameters=0,
        tied=True,
    )
