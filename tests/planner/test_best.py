"""Plans for which the closed form alone would choose wrongly."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from lohan.model.machine import Drive, Profile
from lohan.model.options import PlanOptions
from lohan.model.shapes import gpt_shape
from lohan.planner import presets
from lohan.planner.forecast import Simulator
from lohan.planner.machine_plan import (
    MachinePlan,
    PlanRequest,
    layout_of,
    load_of_shape,
    plan_for_machine,
    workload_of,
)
from lohan.planner.planner import PlanProblem, closed_form_plan, make_plan
from lohan.util.units import EVERY_STEP, Interval, MiB

MODEL = gpt_shape(12, 6, 384, vocabulary=2048, positions=256)
BLOCKS, WORKLOAD = layout_of(MODEL), load_of_shape(MODEL, batch=4, seq=32, dtype="fp32")
MACHINE = Profile(
    name="slow",
    device="emulated",
    device_bytes=512 * MiB,
    compute=((1.0, 8.5e9),),
    h2d=1.8e8,
    d2h=1.8e8,
    host_bytes=2**34,
    adam=7.5e6,
    drives=(Drive(name="d", read=1.8e8, write=1.8e8),),
)
OPTIONS = PlanOptions(dtype="fp32", activations="recompute", clip=0.0)


@pytest.mark.parametrize(("host", "deferring_pays"), [(96 * MiB, False), (160 * MiB, True)])
def test_balanced_is_never_slower_than_optimized(host, deferring_pays):
    """The closed form would defer in both cases."""
    settings = {"host_bytes": host, "workload": WORKLOAD, "profile": MACHINE}
    closed = closed_form_plan(PlanProblem(BLOCKS, OPTIONS, **settings))
    at_once = closed_form_plan(
        PlanProblem(BLOCKS, replace(OPTIONS, update_mode="optimized"), **settings)
    )
    result = make_plan(PlanProblem(BLOCKS, OPTIONS, **settings)).plan
    simulator = Simulator(MACHINE, BLOCKS, WORKLOAD)
    deferring, without, best = (
        simulator.forecast(plan).step_s for plan in (closed, at_once, result)
    )
    assert closed.deferred and (deferring < without) is deferring_pays
    assert best == min(deferring, without)
    assert result.update_mode == "balanced" and bool(result.deferred) is deferring_pays


def test_best_plan_of_a_large_model():
    """Only its levels of activations take too long to simulate."""
    model, machine = presets.model("qwen3-32b"), presets.machine("rtx4090")
    plan_request = PlanRequest(
        model=model,
        machine=machine,
        batch=64,
        seq=1024,
        options=PlanOptions(dtype="bf16"),
        host=machine.host_bytes,
    )
    how = {
        "host_bytes": plan_request.host,
        "workload": workload_of(plan_request),
        "profile": machine,
    }
    assert closed_form_plan(PlanProblem(plan_request.blocks, plan_request.options, **how)).deferred
    balanced, at_once = (
        plan_for_machine(
            replace(plan_request, options=replace(plan_request.options, update_mode=way))
        )
        for way in ("balanced", "optimized")
    )
    assert balanced.step_s <= at_once.step_s


def asked_of(model: str, **options) -> PlanRequest:
    machine = presets.machine("rtx4090")
    wished = PlanOptions(**{"dtype": "bf16", "can_rerun": True, "commit": None, **options})
    return PlanRequest(
        model=presets.model(model),
        machine=machine,
        options=wished,
        batch=64,
        seq=1024,
        host=machine.host_bytes,
    )


@functools.cache
def planned(model: str, **options) -> MachinePlan:
    return plan_for_machine(asked_of(model, **options))


def test_the_whole_batch_in_one_slice_where_that_is_faster():
    """One slice in tiles has 16-bit gradients; only a simulation shows the benefit."""
    result = planned("qwen3-14b", clip=1.0)
    assert result.plan.micro_batch == 64 and result.plan.tiles
    halves = planned("qwen3-14b", clip=1.0, micro_batch=32)
    assert result.step_s < halves.step_s and clipped_s(result) < clipped_s(halves)


@pytest.mark.slow
def test_slices_are_smaller_where_there_are_no_tiles():
    without = planned("qwen3-14b", clip=1.0, tiles="off")
    # Half of the batch would leave the head slices of 16 tokens, each with sums of its gradients.
    assert without.plan.micro_batch == 16 and without.plan.head_tokens == 1024


def test_tiles_save_no_compute():
    """Their work is that of the whole block: smaller matrix products, and sums of gradients."""
    seconds = []
    for tiles in ("off", 8192, 512):
        plan_request = asked_of("qwen3-14b", micro_batch=16, tiles=tiles, activations="recompute")
        forecast = plan_for_machine(plan_request).forecast
        seconds.append(forecast.busy_s["compute"])
    assert seconds[0] < seconds[1] < 1.1 * seconds[0] and seconds[2] > 1.2 * seconds[0]


@pytest.mark.parametrize(
    ("model", "clipped"),
    [
        ("qwen3-14b", 0.77),
        *(
            pytest.param(model, share, marks=pytest.mark.slow)
            for model, share in (("qwen3-8b", 0.85), ("qwen3-32b", 0.73), ("llama-3-70b", 0.72))
        ),
    ],
)
def test_defaults_next_to_no_clipping(model, clipped):
    """While no step is clipped, and if every step is."""
    default, free = (planned(model, clip=clip) for clip in (1.0, 0.0))
    assert default.step_s <= free.step_s / 0.92
    assert clipped_s(default) <= free.step_s / clipped
    if model == "qwen3-8b":
        assert default.forecast.tokens_per_s >= 2000
        assert default.forecast.written_bytes <= 20 * 2**30


def clipped_s(machine_plan: MachinePlan) -> float:
    """Return the seconds of a step if every step is clipped."""
    return (machine_plan.clipped or machine_plan.forecast).step_s


def test_commit_interval_spreads_cached_groups_and_writes_less():
    """Between two commits, the writes of cached groups are left out, in all parts of the model."""
    rarely, every = (
        plan_for_machine(asked_of("qwen3-14b", clip=1.0, commit=commit))
        for commit in (Interval(14), EVERY_STEP)
    )
    plan, keys = rarely.plan, [group.key for group in rarely.blocks.trained]
    assert {*plan.host_cached_weights} & {*keys[:4]} and {*plan.host_cached_weights} & {*keys[-4:]}
    assert rarely.clipped is None and every.step_s < rarely.step_s < every.clipped.step_s
    assert rarely.forecast.written_bytes < 0.75 * every.forecast.written_bytes


def test_rough_forecast_has_fewer_actions_and_same_bytes(monkeypatch):
    """A rough forecast has fewer actions and the same bytes.

    It is good enough to compare plans; with more actions it describes the chosen plan.
    """
    machine = presets.machine("ratel-4090")
    plan_request = PlanRequest(
        model=presets.model("llama-3.1-405b"),
        machine=machine,
        batch=8,
        seq=1024,
        options=PlanOptions(dtype="bf16", clip=1.0, can_rerun=True),
        host=machine.host_bytes,
    )
    workload = workload_of(plan_request)
    plan = closed_form_plan(
        PlanProblem(
            plan_request.blocks,
            plan_request.options,
            host_bytes=plan_request.host,
            workload=workload,
            profile=machine,
        )
    )
    simulator = Simulator(machine, plan_request.blocks, workload)
    last, rough = simulator.forecast(plan), simulator.forecast(plan, rough=True)
    monkeypatch.setattr("lohan.planner.forecast.MANY_CHUNKS", 10**6)
    exact = simulator.forecast(plan)
    for item, share, apart in ((last, 0.5, 0.05), (rough, 0.3, 0.1)):
        assert sum(map(len, item.phases)) < share * sum(map(len, exact.phases))
        assert item.written_bytes == exact.written_bytes
        assert item.busy_s == pytest.approx(exact.busy_s)
        assert item.step_s == pytest.approx(exact.step_s, rel=apart)
