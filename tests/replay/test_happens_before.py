"""Compare the happens-before relation of today's schedules with the recorded one."""

from __future__ import annotations

import json

import pytest

from lohan.schedule.actions import ScheduleSpec
from tests.replay.happens_before import RECORDED, Order, cases, describe

CASES = list(cases())


@pytest.mark.parametrize(("name", "spec", "order"), CASES, ids=[case[0] for case in CASES])
def test_relation_and_step_time_are_unchanged(name: str, spec: ScheduleSpec, order: Order) -> None:
    recorded, today = json.loads(RECORDED.read_text())[name], describe(spec, order)
    actions = recorded["actions"].split()
    assert str(today["actions"]).split() == actions, "the program order differs"
    pairs = zip(actions, recorded["clocks"].split(), str(today["clocks"]).split(), strict=True)
    different = [
        f"{action}: recorded {old}, today {new}" for action, old, new in pairs if old != new
    ]
    assert not different, "an action waits for more or for less: " + "; ".join(different[:10])
    assert today["step_s"] == recorded["step_s"]


def test_every_recorded_case_is_compared() -> None:
    assert {name for name, *_ in CASES} == set(json.loads(RECORDED.read_text()))
