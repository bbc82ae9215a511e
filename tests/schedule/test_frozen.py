"""Groups without a state chunk are read and never updated, held, written or waited for."""

from __future__ import annotations

import pytest

from lohan.config import UPDATE_MODES
from lohan.schedule.actions import ScheduleSpec
from lohan.schedule.placement import UpdateOptions
from lohan.schedule.steps import ExecutionOrder, check_order, steps

FROZEN = {1, 4}
SHAPES = {
    "host": {},
    "cached": {"host_cached_weights": (2, 4), "host_cached_state": ((0, 1),)},
    "linked": {"device_slots": 3, "offloaded": frozenset((0, 1, 2))},
}


@pytest.mark.parametrize("mode", UPDATE_MODES)
@pytest.mark.parametrize("place", SHAPES)
@pytest.mark.parametrize("all_held", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_frozen_groups_are_only_read(mode, place, all_held, overlap):
    """Three blocks, each over a frozen and a trained group; backward does not reach the first."""
    spec = ScheduleSpec(
        sites=((1,), (1, 0), (4, 2), (3,)),
        chunks=(2, 0, 1, 1, 0),
        slots=3,
        ring=2,
        window=1,
        grads=1,
        **SHAPES[place],
    )
    deferred = tuple(g for g in range(5) if g not in FROZEN) if all_held or mode == "serial" else ()
    order = ExecutionOrder(
        forward=(0, 1, 2, 3),
        backward=(3, 2, 1),
        updates=UpdateOptions(mode=mode, late=frozenset(deferred), overlap=overlap),
    )
    check_order(spec, order)
    seen = [
        action
        for phases in steps(spec, order, 3)
        for phase in phases.values()
        for action in phase
        if action.kind in "RLSUWHPGD" and action.index in FROZEN
    ]
    assert {action.kind for action in seen} <= {"R", "L"}
    assert any(action.kind == "R" and action.index == 1 for action in seen)
