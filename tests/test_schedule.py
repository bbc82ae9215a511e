"""Schedules: their text, what they say for small shapes, and that no lane can ever be too early."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hypothesis import Phase; PH=(Phase.generate,)
from lohan.errors import LohanError
from lohan.schedule import (
    GRAD_MODES,
    Action,
    Schedule,
    Shape,
    Table,
    backward,
    empty_table,
    forward,
    from_text,
    last_uses,
    one_backward,
    parse_token,
    to_text,
    updates,
)
from lohan.schedule_check import validate

# -- any shape ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A shape, and how each of its steps goes."""

    shape: Shape
    mode: str
    later: tuple[int, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Step:
    order: tuple[int, ...]
    back: tuple[int, ...]
    ahead: bool  # scheduled as a whole, or block by block
    evaluated: tuple[int, ...]  # sites that ran without gradients before it


@st.composite
def runs(draw: st.DrawFn) -> Run:
    groups = draw(st.integers(1, 5))
    moving = range(groups)
    sites = tuple(
        tuple(draw(st.lists(st.sampled_from(moving), min_size=1, max_size=2, unique=True)))
        for _ in range(draw(st.integers(1, 6)))
    )
    resident = draw(st.booleans())
    chunks = tuple(draw(st.integers(1, 3)) for _ in range(groups + resident))
    pinned = [g for g in moving if draw(st.booleans())] if draw(st.booleans()) else []
    everything = [(g, c) for g, n in enumerate(chunks) for c in range(n)]
    pinned_state = [k for k in everything if draw(st.booleans())] if draw(st.booleans()) else []
    widest = max(len([g for g in site if g not in pinned]) for site in sites)
    mode = draw(st.sampled_from(GRAD_MODES))
    if mode == "serial" or draw(st.booleans()):
        later = list(range(len(chunks)))
        spilled = [g for g in moving if draw(st.booleans())]
    else:
        later = [g for g in moving if draw(st.booleans())] if mode == "balanced" else []
        spilled = []
    shape = Shape(
        sites=sites, chunks=chunks, slots=draw(st.integers(max(1, widest), 5)),
        ring=draw(st.integers(1, 4)), window=draw(st.integers(0, 4)),
        grads=draw(st.integers(1, 3)), pinned_weights=(*([groups] if resident else []), *pinned),
        pinned_state=tuple(pinned_state), write_pinned=draw(st.booleans()),
        spilled=frozenset(spilled),
    )  # fmt: skip
    steps = []
    order = tuple(draw(st.lists(st.sampled_from(range(len(sites))), min_size=1, max_size=7)))
    for _ in range(3):
        if draw(st.integers(0, 3)) == 0:
            some = st.lists(st.sampled_from(range(len(sites))), min_size=1, max_size=7)
            order = tuple(draw(some))
        back = tuple(draw(st.permutations(order))) if draw(st.booleans()) else order[::-1]
        evaluated = draw(st.lists(st.sampled_from(range(len(sites))), max_size=2))
        steps.append(Step(order, back, draw(st.booleans()), tuple(evaluated)))
    return Run(shape, mode, tuple(later), tuple(steps))


class Chain:
    """Calls the passes as the pipeline does; checks each schedule alone, and keeps all of them."""

    def __init__(self, run: Run) -> None:
        self.run, self.shape = run, run.shape
        self.table = empty_table(run.shape)
        self.all: list[Action] = []

    def add(self, made: tuple[Schedule, Table]) -> None:
        validate(made[0], self.shape, self.table)
        self.all += made[0]
        self.table = made[1]

    def step(self, step: Step, after: Step | None) -> None:
        for site in step.evaluated:
            self.add(forward(self.shape, self.table, [site]))
        if not step.ahead:
            for site in step.order:
                self.add(forward(self.shape, self.table, [site]))
        groups = range(len(self.shape.chunks))
        later = self.run.later
        finals = last_uses(self.shape, step.back)
        rest = [g for g in groups if g not in {g for some in finals for g in some}]
        if step.ahead:
            self.add(
                backward(
                    self.shape, self.table, step.back, mode=self.run.mode, later=later, rest=rest
                )
            )
        else:
            for site, final in zip(step.back, finals, strict=True):
                self.add(one_backward(self.shape, self.table, site))
                if final:
                    self.add(
                        updates(self.shape, self.table, final, after=f"B{site}", later=later)
                    )
            self.add(updates(self.shape, self.table, rest, after="E", later=later, end=True))
        pending = later
        if self.run.mode == "serial":
            self.add(forward(self.shape, self.table, (), pending=pending, commit=bool(pending)))
            pending = ()
        order = after.order if after is not None and after.ahead else step.order
        self.add(
            forward(self.shape, self.table, order, pending=pending, commit=bool(pending))
        )


def chain_of(run: Run) -> Schedule:
    chain = Chain(run)
    if run.steps[0].ahead:
        chain.add(forward(run.shape, chain.table, run.steps[0].order))
    for number, step in enumerate(run.steps):
        chain.step(step, run.steps[number + 1] if number < 2 else None)
    return tuple(chain.all)


@settings(max_examples=6000, phases=PH, deadline=None, suppress_health_check=list(HealthCheck))
@given(runs())
def test_no_schedule_can_go_wrong(run):
    chain = chain_of(run)
    validate(chain, run.shape, empty_table(run.shape), whole=True)
    assert from_text(to_text(chain)) == chain
    assert sum(action.kind == "C" for action in chain) == 3


@pytest.mark.slow
@settings(max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck))
@given(runs())
def test_no_schedule_can_go_wrong_long_form(run):
    validate(chain_of(run), run.shape, empty_table(run.shape), whole=True)
