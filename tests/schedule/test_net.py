"""Schedules of ranks have a network lane.

Weights are gathered after they are loaded, and gradients are exchanged before they leave the
device.
"""

from __future__ import annotations

import pytest

from lohan.config import UPDATE_MODES
from lohan.errors import LohanError
from lohan.schedule.actions import ScheduleSpec, empty_buffers, from_text, to_text
from lohan.schedule.check import validate
from lohan.schedule.phases import backward, forward
from lohan.schedule.placement import UpdateOptions, place
from lohan.schedule.simulate import simulate
from lohan.schedule.steps import ExecutionOrder, check_order, steady_step

TWO = ScheduleSpec(
    sites=((0,), (1,)), chunks=(1, 1), slots=2, ring=2, window=1, grads=1, device_slots=2, net=True
)


def test_forward_gathers_what_was_loaded():
    schedule, _ = forward(TWO, empty_buffers(TWO), (0, 1))
    assert to_text(schedule) == (
        "R0@0 R1@1 L0@0,0(R0) A0@0(L0) L1@1,1(R1) A1@1(L1) F0@0(A0) F1@1(A1)"
    )


def test_backward_exchanges_before_gradients_leave():
    _, buffers = forward(TWO, empty_buffers(TWO), (0, 1))
    schedule, _ = backward(TWO, buffers, (1, 0), place(TWO, UpdateOptions(mode="naive")))
    assert to_text(schedule) == (
        "B1@1 X1(B1) D1(X1) S1.0@0 U1.0@0,1(D1,S1.0) W1.0@0,1(U1.0) "
        "B0@0 X0(B0) D0(X0,U1.0) S0.0@1(W1.0) U0.0@1,0(D0,S0.0) W0.0@1,0(U0.0) E C(E)"
    )
    assert {action.lane for action in schedule if action.kind in "AX"} == {"net"}


def check_forward(text: str) -> None:
    validate(from_text(text), TWO, empty_buffers(TWO))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("R0@0 L0@0,0(R0) F0@0(L0)", "holds a shard of group 0"),
        ("R0@0 L0@0,0(R0) A0@0 F0@0(A0)", "overwrites device slot 0 while L0 may be in flight"),
        ("R0@0 L0@0,0(R0) A0@0(L0) F0@0(L0)", "uses device slot 0 while A0 may be in flight"),
        ("A0@0", "slot 0 holds group None"),
        ("R0@0 L0@0,0(R0) A0@0(L0) L1@0,0(L0)", "slot 0 holds group 0"),
    ],
)
def test_rejects_forward_that_races_with_the_net(text, problem):
    with pytest.raises(LohanError, match=problem):
        check_forward(text)


def test_rejects_reduction_before_gradients_are_complete():
    good = "R0@0 L0@0,0(R0) A0@0(L0) F0@0(A0) B0@0(A0) X0(B0) D0(X0) H0(D0)"
    check_forward(good)
    for wait, action in (("X0(B0)", "X0"), ("D0(X0)", "D0(B0)")):
        with pytest.raises(LohanError, match="gradient"):
            check_forward(good.replace(wait, action))


@pytest.mark.parametrize("mode", UPDATE_MODES)
@pytest.mark.parametrize("overlap", [True, False])
def test_steady_steps_gather_and_reduce_every_group(mode, overlap):
    late = frozenset((1,) if mode == "balanced" else ())
    updates = UpdateOptions(mode=mode, late=late, overlap=overlap)
    order = ExecutionOrder(forward=(0, 1), backward=(1, 0), updates=updates)
    check_order(TWO, order)
    actions = [action for phase in steady_step(TWO, order).values() for action in phase]
    assert sum(action.kind == "X" for action in actions) == 2
    assert 2 <= sum(action.kind == "A" for action in actions) <= 4
    assert sum(a.kind == "A" for a in actions) == sum(a.kind == "L" for a in actions)


def test_simulator_runs_collectives_one_after_the_other():
    """Collectives run one after the other, and backward waits for the weights."""
    order = ExecutionOrder(forward=(0, 1), backward=(1, 0), updates=UpdateOptions())
    phases = list(steady_step(TWO, order).values())
    result = simulate(phases, lambda action: 1.0 if action.lane == "net" else 0.0)
    assert [(span.name, span.start_s) for span in result.spans if span.lane == "net"] == [
        ("A0", 0.0),
        ("A1", 1.0),
        ("X1", 2.0),
        ("X0", 3.0),
    ]
    assert result.step_ends == (2.0,)
