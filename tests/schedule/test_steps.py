"""The course of a steady step: what it holds, and that every course of a small shape may run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lohan.config import GRAD_MODES
from lohan.errors import LohanError
from lohan.schedule.actions import ScheduleSpec
from lohan.schedule.steps import ExecutionOrder, check_course, steady_step

SHAPE = ScheduleSpec(  # the first group is used twice; the last is resident
    sites=((0,), (1,), (2,), (0,)), chunks=(2, 3, 1, 1), slots=2, ring=2, window=1, grads=1,
    pinned_weights=(3,),
)  # fmt: skip
ALL = (0, 1, 2, 3)
COURSE = ExecutionOrder(order=ALL, back=ALL[::-1], mode="optimized")


def names(course: ExecutionOrder, shape: ScheduleSpec = SHAPE) -> dict[str, list[str]]:
    phases = steady_step(shape, course)
    return {phase: [action.name for action in made] for phase, made in phases.items()}


def test_updates_lie_where_the_course_says():
    now, held = names(COURSE), replace(COURSE, later=ALL)
    assert list(now) == ["forward", "backward"] and now["backward"][-1] == "C"
    assert not any(name[0] == "U" for name in now["forward"])
    waiting = names(held)
    assert list(waiting) == ["forward", "backward"] and "C" in waiting["forward"]
    assert sum(name[0] == "U" for name in waiting["forward"]) == sum(SHAPE.chunks)
    assert sum(name[0] == "H" for name in waiting["backward"]) == len(SHAPE.chunks)
    for course in (replace(held, mode="serial"), replace(held, overlap=False)):
        assert course.pending == ()
        after = names(course)["after backward"]
        assert sum(name[0] == "U" for name in after) == sum(SHAPE.chunks) and after[-1] == "C"


def test_a_site_that_backward_leaves_out():
    """Its group is carried over when backward has ended."""
    made = names(replace(COURSE, back=(3, 2, 0)))["backward"]
    assert "B1" not in made and made.index("E") < made.index("U1.0")


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("mode", GRAD_MODES)
@pytest.mark.parametrize("later", [(), (1, 2), ALL])
@pytest.mark.parametrize("back", [ALL[::-1], (3, 1, 2, 0), (2, 1), ()])
def test_every_course_may_run(back, later, mode, overlap):
    check_course(
        SHAPE, ExecutionOrder(order=ALL, back=back, mode=mode, later=later, overlap=overlap)
    )


def test_a_course_that_cannot_be():
    with pytest.raises(LohanError, match="cannot hold the 2 groups"):
        check_course(
            replace(SHAPE, sites=((0, 1),), slots=1),
            ExecutionOrder(order=(0,), back=(0,), mode="naive"),
        )
