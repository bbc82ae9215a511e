"""Activation policies of the simulator, applied to the blocks of a run."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import product

import pytest

from lohan.config import ACTIVATIONS
from lohan.errors import ConfigError, LohanError
from lohan.model.machine import Drive, Profile
from lohan.model.options import PlanOptions
from lohan.model.plan import Plan
from lohan.model.shapes import gpt_shape
from lohan.planner.activations import CHOOSERS, by_class, resolve_activation_policy
from lohan.planner.machine_plan import layout_of, load_of_shape
from lohan.planner.memory import MemoryModel
from lohan.planner.planner import PlanProblem, closed_form_plan

MODEL = gpt_shape(6, 4, 256, vocabulary=1000, positions=256)
WORKLOAD = load_of_shape(MODEL, batch=4, seq=256, dtype="fp32")
LAYOUT = layout_of(MODEL)
NAMES = [part.name for part in MODEL.blocks[0].by_benefit(256)]
# Slow compute: whatever can be kept is worth it.
SLOW = Profile(
    name="slow",
    device="cpu",
    compute=((1.0, 1e9),),
    host_bytes=2**34,
    adam=1e9,
    drives=(Drive(name="fast", read=1e11, write=1e11, mixed=1e11),),
)
AMPLE, SOME = 2**31, 7 * 2**24


def plan(policy, host=AMPLE, profile=SLOW):
    options = PlanOptions(dtype="fp32", activations=policy)
    return closed_form_plan(
        PlanProblem(LAYOUT, options, host_bytes=host, workload=WORKLOAD, profile=profile)
    )


def test_every_policy_of_the_simulator_can_be_requested():
    assert set(CHOOSERS) <= set(ACTIVATIONS)


@pytest.mark.parametrize("policy", ["static", "recompute", "inputs"])
def test_static_and_recompute_keep_only_inputs(policy):
    machine_plan = plan(policy)
    assert machine_plan.kept == () and machine_plan.spilled_sites == ()


def test_g10_sends_everything_to_ssd():
    machine_plan = plan("g10")
    assert machine_plan.kept_counts == dict.fromkeys(NAMES, 6)
    assert len(machine_plan.spilled_sites) == 6
    assert plan("all").kept == machine_plan.kept and plan("all").spilled_sites == ()


def test_capuchin_keeps_all_of_the_first_blocks():
    machine_plan = plan("capuchin", SOME)
    memory = MemoryModel(LAYOUT, "fp32", WORKLOAD, machine_plan.micro_batch)
    kept = memory.sizes.classes(machine_plan.kept)
    whole = kept.count(set(NAMES))
    assert 0 < whole < 6
    assert all(classes == set(NAMES) for classes in kept[:whole])
    assert kept[whole] < set(NAMES) and (not kept[whole] or NAMES[0] in kept[whole])  # by benefit
    assert not any(kept[whole + 1 :])
    assert machine_plan.spilled_sites == ()


@pytest.mark.parametrize("profile", [SLOW, None])
@pytest.mark.parametrize("policy", ["capuchin", "checkmate"])
def test_policies_that_know_no_ssd_stay_in_memory(policy, profile):
    pytest.importorskip("scipy")
    for host in range(SOME, 4 * SOME, SOME // 4):
        machine_plan = plan(policy, host, profile)
        assert machine_plan.spilled_sites == () and machine_plan.tier_bytes("host") <= host


def test_checkmate_recomputes_least():
    """No other choice that takes as many bytes recomputes less."""
    pytest.importorskip("scipy")
    machine_plan = plan("checkmate", SOME)
    parts = [part for part in MODEL.blocks[0].activations if part.name in NAMES[:5]]

    def total(counts, of):
        return sum(of(part) * counts.get(part.name, 0) for part in MODEL.blocks[0].activations)

    def elements(part):
        return part.elements

    held = total(machine_plan.kept_counts, elements)
    assert 0 < held < total(dict.fromkeys(NAMES, 6), elements)
    choices = (
        dict(zip((part.name for part in parts), counts, strict=True))
        for counts in product(range(0, 7, 2), repeat=len(parts))
    )
    best = max(
        total(counts, lambda part: part.flops_at(256))
        for counts in choices
        if total(counts, elements) <= held
    )
    assert total(machine_plan.kept_counts, lambda part: part.flops_at(256)) >= best * 0.999


def test_a_missing_solver_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    WORKLOAD.plan_cache.clear()  # plans that were made before
    with pytest.raises(LohanError, match="pip install scipy"):
        plan("checkmate", SOME)
    plan("capuchin", SOME)


def test_unknown_policy_is_refused():
    with pytest.raises(ConfigError, match="'best'; choose holistic, recompute"):
        plan("best")


def test_exact_blocks_survive_json():
    kept = by_class([frozenset("ab"), frozenset("a"), frozenset()], ["b", "a"])
    assert kept == (("b", (0,)), ("a", (0, 1)))
    result = replace(plan("static"), kept=kept)
    assert Plan.from_json(json.loads(json.dumps(result.to_json()))) == result


def test_holistic_is_left_to_the_planner():
    memory = MemoryModel(LAYOUT, "fp32", WORKLOAD, 4)
    assert (
        resolve_activation_policy(
            "holistic", memory, WORKLOAD, plan("static"), limit=AMPLE, profile=None
        )
        is None
    )
