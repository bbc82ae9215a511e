"""The order of a steady step; every order of a small spec is valid."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lohan.config import UPDATE_MODES
from lohan.errors import LohanError
from lohan.schedule.actions import ScheduleSpec
from lohan.schedule.placement import (
    RULES,
    Persist,
    Update,
    UpdateOptions,
    place,
    rule_of,
    table,
)
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
ORDER = ExecutionOrder(forward=ALL, backward=ALL[::-1], updates=UpdateOptions())


def names(order: ExecutionOrder, spec: ScheduleSpec = SPEC) -> dict[str, list[str]]:
    phases = steady_step(spec, order)
    return {phase: [action.name for action in item] for phase, item in phases.items()}


def test_updates_follow_the_order():
    waits = UpdateOptions(needs_all_gradients=True)
    now, held = names(ORDER), replace(ORDER, updates=waits)
    assert list(now) == ["forward", "backward"] and now["backward"][-1] == "C"
    assert not any(name[0] == "U" for name in now["forward"])
    waiting = names(held)
    assert list(waiting) == ["forward", "backward"] and "C" in waiting["forward"]
    assert sum(name[0] == "U" for name in waiting["forward"]) == sum(SPEC.chunks)
    assert sum(name[0] == "H" for name in waiting["backward"]) == len(SPEC.chunks)
    for updates in (replace(waits, mode="serial"), replace(waits, overlap=False)):
        assert rule_of(updates).update is Update.AFTER_BACKWARD
        after = names(replace(ORDER, updates=updates))["after backward"]
        assert sum(name[0] == "U" for name in after) == sum(SPEC.chunks) and after[-1] == "C"


def test_updates_a_group_that_backward_skips_after_backward_ends():
    """Its group is carried over when backward has ended."""
    result = names(replace(ORDER, backward=(3, 2, 0)))["backward"]
    assert "B1" not in result and result.index("E") < result.index("U1.0")


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("mode", UPDATE_MODES)
@pytest.mark.parametrize("deferred", [(), (1, 2), ALL])
@pytest.mark.parametrize("back", [ALL[::-1], (3, 1, 2, 0), (2, 1), ()])
def test_accepts_every_combination_of_order_and_update_mode(back, deferred, mode, overlap):
    updates = UpdateOptions(mode=mode, late=frozenset(deferred), overlap=overlap)
    check_order(SPEC, ExecutionOrder(forward=ALL, backward=back, updates=updates))


def test_rejects_impossible_order():
    with pytest.raises(LohanError, match="cannot hold the 2 groups"):
        check_order(
            replace(SPEC, sites=((0, 1),), slots=1),
            ExecutionOrder(forward=(0,), backward=(0,), updates=UpdateOptions(mode="naive")),
        )


def test_the_documentation_shows_the_rules():
    page = Path(__file__).resolve().parents[2] / "docs/how-it-works.md"
    assert "\n".join(table()) in page.read_text()
    assert len(RULES) <= 10


@pytest.mark.parametrize(
    ("options", "speculates", "update"),
    [
        (UpdateOptions(mode="serial"), False, Update.AFTER_BACKWARD),
        (UpdateOptions(needs_all_gradients=True, overlap=False), False, Update.AFTER_BACKWARD),
        (UpdateOptions(overlap=False), False, Update.BACKWARD),
        (UpdateOptions(mode="naive"), False, Update.BACKWARD),
        (UpdateOptions(needs_all_gradients=True), True, Update.BACKWARD),
        (UpdateOptions(needs_all_gradients=True), False, Update.NEXT_FORWARD),
        (UpdateOptions(needs_all_gradients=True, mode="balanced"), False, Update.NEXT_FORWARD),
    ],
)
def test_update_options_decide_where_updates_are_placed(options, speculates, update):
    result = place(SPEC, options, speculates=speculates)
    assert {placement.update for placement in result.groups} == {update}
    assert result.all_held is (update is not Update.BACKWARD)
    assert result.ends_in_backward is (update is Update.BACKWARD and not speculates)


def test_cached_chunks_are_persisted_when_the_drives_are_idle():
    spec = replace(SPEC, host_cached_state=((3, 0), (1, 2)))
    for options, commits, wanted in (
        (UpdateOptions(), True, Persist.NOW),
        (UpdateOptions(needs_all_gradients=True), True, Persist.BEHIND),
        (UpdateOptions(needs_all_gradients=True), False, Persist.AT_COMMIT),
    ):
        result = place(spec, options, commits=commits)
        assert result.of(3).persist_of(0) is wanted
        # Their weights are not cached, so they are written in any case.
        assert {result.of(1).persist_of(chunk) for chunk in range(3)} == {Persist.NOW}
