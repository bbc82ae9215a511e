"""The order of a steady step: what it holds, and that every order of a small spec may run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lohan.config import UPDATE_MODES
from lohan.errors import LohanError
from lohan.schedule.actions import ScheduleSpec
from lohan.schedule.steps import ExecutionOrder, check_order, steady_step

SPEC = ScheduleSpec(  # the first group is used twice; the last is resident
    sites=((0,), (1,), (2,), (0,)),
    chunks=(2, 3, 1, 1),
    slots=2,
    ring=2,
    window=1,
    grads=1,
    host_cached_weights=(3,),
)
ALL = (0, 1, 2, 3)
ORDER = ExecutionOrder(forward=ALL, backward=ALL[::-1], update_mode="optimized")


def names(order: ExecutionOrder, spec: ScheduleSpec = SPEC) -> dict[str, list[str]]:
    phases = steady_step(spec, order)
    return {phase: [action.name for action in made] for phase, made in phases.items()}


def test_updates_lie_where_the_order_says():
    now, held = names(ORDER), replace(ORDER, deferred=ALL)
    assert list(now) == ["forward", "backward"] and now["backward"][-1] == "C"
    assert not any(name[0] == "U" for name in now["forward"])
    waiting = names(held)
    assert list(waiting) == ["forward", "backward"] and "C" in waiting["forward"]
    assert sum(name[0] == "U" for name in waiting["forward"]) == sum(SPEC.chunks)
    assert sum(name[0] == "H" for name in waiting["backward"]) == len(SPEC.chunks)
    for order in (replace(held, update_mode="serial"), replace(held, overlap=False)):
        assert order.deferred_to_forward == ()
        after = names(order)["after backward"]
        assert sum(name[0] == "U" for name in after) == sum(SPEC.chunks) and after[-1] == "C"


def test_a_site_that_backward_leaves_out():
    """Its group is carried over when backward has ended."""
    made = names(replace(ORDER, backward=(3, 2, 0)))["backward"]
    assert "B1" not in made and made.index("E") < made.index("U1.0")


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("mode", UPDATE_MODES)
@pytest.mark.parametrize("deferred", [(), (1, 2), ALL])
@pytest.mark.parametrize("back", [ALL[::-1], (3, 1, 2, 0), (2, 1), ()])
def test_every_order_may_run(back, deferred, mode, overlap):
    check_order(
        SPEC,
        ExecutionOrder(
            forward=ALL, backward=back, update_mode=mode, deferred=deferred, overlap=overlap
        ),
    )


def test_an_order_that_cannot_be():
    with pytest.raises(LohanError, match="cannot hold the 2 groups"):
        check_order(
            replace(SPEC, sites=((0, 1),), slots=1),
            ExecutionOrder(forward=(0,), backward=(0,), update_mode="naive"),
        )
