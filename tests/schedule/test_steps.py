"""The order of a steady step; every order of a small spec is valid."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from lohan.config import UPDATE_MODES
from lohan.errors import LohanError
from lohan.schedule.actions import ScheduleSpec
from lohan.schedule.placement import (
    RULES,
    Persist,
    Phase,
    UpdateOptions,
    place,
    rule_of,
    speculates,
    table,
)
from lohan.schedule.steps import ExecutionOrder, check_order, steady_step
from lohan.util.units import EVERY_STEP, Interval

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
        assert rule_of(updates).update is Phase.AFTER_BACKWARD
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
        (UpdateOptions(mode="serial"), False, Phase.AFTER_BACKWARD),
        (UpdateOptions(needs_all_gradients=True, overlap=False), False, Phase.AFTER_BACKWARD),
        (UpdateOptions(overlap=False), False, Phase.BACKWARD),
        (UpdateOptions(mode="naive"), False, Phase.BACKWARD),
        (UpdateOptions(needs_all_gradients=True), True, Phase.BACKWARD),
        (UpdateOptions(needs_all_gradients=True), False, Phase.NEXT_FORWARD),
        (UpdateOptions(needs_all_gradients=True, mode="balanced"), False, Phase.NEXT_FORWARD),
    ],
)
def test_update_options_decide_where_updates_are_placed(options, speculates, update):
    result = place(SPEC, options, speculates=speculates)
    assert {placement.update for placement in result.groups} == {update}
    assert result.all_held is (update is not Phase.BACKWARD)
    assert result.ends is (Phase.NEXT_FORWARD if speculates else update)


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


@pytest.mark.parametrize(
    ("plan", "step", "expected"),
    [
        ({}, {}, True),
        ({"dtype": "fp16", "clip": 0.0}, {}, True),
        ({"clip": 0.0}, {}, False),
        ({"overlap": False}, {}, False),
        ({"update_mode": "serial"}, {}, False),
        ({"commit": Interval(steps=10)}, {}, False),
        ({}, {"clipped": ()}, False),
        ({}, {"clipped": (False, True)}, False),
        ({}, {"clipped": (True, True, False)}, True),
        ({}, {"clipped": (True, True, True, False)}, False),
        ({"most_clipped": -1.0}, {}, False),
        ({}, {"same_order": False}, False),
        ({}, {"repeatable": False}, True),
        ({"spilled_gradients": ("a",)}, {}, False),
        ({"spilled_gradients": ("a",), "can_rerun": True}, {}, True),
        ({"spilled_gradients": ("a",), "can_rerun": True}, {"repeatable": False}, False),
        ({}, {"factor_is_known": True, "clipped": (True,)}, True),
        ({}, {"factor_is_known": True, "same_order": False}, False),
    ],
)
def test_a_step_speculates_only_if_it_can_be_corrected_and_is_likely_to_be_accepted(
    plan, step, expected
):
    defaults = {
        "clip": 1.0,
        "dtype": "fp32",
        "update_mode": "balanced",
        "overlap": True,
        "log_gradients": 0,
        "commit": EVERY_STEP,
        "can_rerun": False,
        "spilled_gradients": (),
        "most_clipped": 0.25,
    }
    usual = {
        "clipped": (False,),
        "same_order": True,
        "repeatable": True,
        "factor_is_known": False,
    }
    assert speculates(SimpleNamespace(**(defaults | plan)), **(usual | step)) is expected
