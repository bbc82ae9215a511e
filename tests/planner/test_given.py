"""Given plans are compared with the model, the options and the budgets before anything runs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lohan.errors import BudgetError, ConfigError
from lohan.model.plan import PlanOptions
from lohan.planner import presets
from lohan.planner.given import accept_plan, read_plan
from lohan.planner.machine_plan import PlanRequest, problem_of
from lohan.planner.planner import PlanProblem, closed_form_plan


@pytest.fixture(scope="module")
def problem() -> PlanProblem:
    machine = presets.machine("rtx4090")
    options = PlanOptions(dtype="bf16", clip=1.0, can_rerun=True, commit=None)
    request = PlanRequest(
        model=presets.model("llama-3-8b"),
        machine=machine,
        options=options,
        batch=8,
        seq=1024,
        host=machine.host_bytes,
    )
    return problem_of(request).rank_problem


def test_accepts_plan_of_the_planner_unchanged(problem):
    plan = closed_form_plan(problem)
    given = read_plan(json.loads(json.dumps({"plan": plan.to_json()})))
    assert accept_plan(given, problem).plan == plan


def test_plan_decides_when_updates_run(problem):
    plan = replace(closed_form_plan(problem), update_mode="serial", overlap=False, window=0)
    accepted = accept_plan(plan, problem).plan
    assert (accepted.update_mode, accepted.overlap, accepted.window) == ("serial", False, 0)


def test_recomputes_ledger_and_refuses_what_does_not_fit(problem):
    plan = replace(closed_form_plan(problem), ring=10_000, ledger=())
    with pytest.raises(BudgetError, match=r"the given plan needs [\d.]+ TiB, --host allows 11"):
        accept_plan(plan, problem)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dtype": "fp16"}, "plan: dtype is fp16, this run has bf16"),
        ({"clip": 0.5}, "plan: clip is 0.5, this run has 1.0"),
        ({"device_slots": 0}, "plan: device_slots is 0, this model needs at least 1"),
        ({"deferred": ("block.99",)}, "deferred names 'block.99', and this model has no such tra"),
        ({"host_cached_state": (("block.3", 77),)}, "has chunk 77 of group 'block.3', which has"),
        ({"staying": ("none",)}, "staying names 'none', and this model has no such block"),
    ],
)
def test_refuses_by_name(fields, words, problem):
    with pytest.raises(ConfigError) as refused:
        accept_plan(replace(closed_form_plan(problem), **fields), problem)
    assert words in str(refused.value)


def test_refuses_gradients_on_ssd_without_room_in_the_store(problem):
    plan = replace(closed_form_plan(problem), spilled_gradients=("block.0",))
    without = replace(problem, options=replace(problem.options, gradients_on_ssd=False))
    with pytest.raises(ConfigError, match="gradients of 1 group to SSD, and the store was created"):
        accept_plan(plan, without)
