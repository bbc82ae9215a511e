"""The commit interval chosen by the planner, by time and by wear."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from lohan.cli.plan import describe, to_json
from lohan.model.options import PlanOptions
from lohan.planner import presets
from lohan.planner.machine_plan import MachinePlan, PlanRequest, plan_for_machine
from lohan.planner.wear import LONGEST_S
from lohan.util.units import EVERY_STEP, GiB, Interval
from tests.support.generated_cases import thinned


def planned(model: str = "qwen3-8b", machine: object = None, **options) -> MachinePlan:
    profile = machine or presets.machine("rtx4090")
    options = {"dtype": "bf16", "clip": 1.0, "can_rerun": True, "commit": None, **options}
    return plan_for_machine(
        PlanRequest(
            model=presets.model(model),
            machine=profile,
            options=PlanOptions(**options),
            batch=64,
            seq=1024,
            host=profile.host_bytes,
        )
    )


@pytest.fixture(scope="module")
def made() -> MachinePlan:
    return planned()


def test_state_in_memory_is_rarely_written(made):
    """8B on a desktop: a fifth of the bytes, no slower, whether steps are clipped or not."""
    every = planned(commit=EVERY_STEP)
    assert made.forecast.written_bytes <= 20 * GiB < 0.3 * every.forecast.written_bytes
    assert made.forecast.step_s <= 1.01 * every.forecast.step_s
    assert made.clipped is None  # no step is rolled back
    unclipped = planned(clip=0.0)
    assert made.forecast.step_s <= 1.02 * unclipped.forecast.step_s


def test_a_crash_costs_at_most_a_quarter_of_an_hour(made):
    interval, added = made.plan.commit, made.forecast.commit
    assert interval.seconds == LONGEST_S and interval.steps * made.step_s <= LONGEST_S
    assert added.steps == interval.steps > 1
    assert added.seconds <= 0.02 * interval.steps * made.step_s


def test_describes_interval_and_cost_of_a_crash(made):
    text = "\n".join(describe(made, steps=None))
    steps = made.plan.commit.steps
    reported = rf"every {steps} steps or 15 min 0 s: a crash costs up to [\d.]+ min; saves "
    assert re.search(reported, text)
    assert "if clipped    the same: updates wait for every norm" in text
    reported = to_json(made, steps=None, schedule=False)
    assert reported["commit"]["steps"] == steps and reported["plan"]["commit"]["steps"] == steps


@pytest.mark.parametrize("model", thinned(["qwen3-32b", "llama-3-70b"], 0))
def test_commits_every_step_if_intervals_save_nothing(model):
    assert planned(model).plan.commit == EVERY_STEP


def test_durable_drives_commit_as_often_as_time_allows():
    """Every step is committed, or every second one if that takes too long."""
    machine = presets.machine("rtx4090")
    lasting = tuple(replace(d, endurance_bytes=1e20, write=1.5e9) for d in machine.drives)
    assert planned(machine=replace(machine, drives=lasting)).plan.commit.steps == 2
    fast = tuple(replace(d, read=1e11, write=1e11) for d in lasting)
    assert planned(machine=replace(machine, drives=fast)).plan.commit == EVERY_STEP


def test_follows_the_interval_of_the_user():
    assert planned(commit=Interval(7)).plan.commit == Interval(7)
