"""The plan that a run follows, where the closed form alone would be wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lohan.model.machine import Drive, Profile
from lohan.model.shapes import gpt_shape
from lohan.planner import presets
from lohan.planner.forecast import forecast
from lohan.planner.machine_plan import (
    PlanRequest,
    layout_of,
    load_of_shape,
    plan_for_machine,
    workload_of,
)
from lohan.planner.planner import PlanOptions, closed_form_plan, plan_for_budget
from lohan.util.units import MiB

MODEL = gpt_shape(12, 6, 384, vocabulary=2048, positions=256)
BLOCKS, WORKLOAD = layout_of(MODEL), load_of_shape(MODEL, batch=4, seq=32, mode="fp32")
MACHINE = Profile(
    name="slow", device="emulated", device_bytes=512 * MiB, compute=((1.0, 8.5e9),), h2d=1.8e8,
    d2h=1.8e8, host_bytes=2**34, adam=7.5e6, drives=(Drive(name="d", read=1.8e8, write=1.8e8),),
)  # fmt: skip
OPTIONS = PlanOptions(mode="fp32", activations="recompute", clip=0.0)


@pytest.mark.parametrize(("host", "deferring_pays"), [(96 * MiB, False), (160 * MiB, True)])
def test_balanced_is_never_slower_than_optimized(host, deferring_pays):
    """The closed form would defer in both cases."""
    asked = {"host_bytes": host, "workload": WORKLOAD, "profile": MACHINE}
    closed = closed_form_plan(BLOCKS, OPTIONS, **asked)
    at_once = closed_form_plan(BLOCKS, replace(OPTIONS, grad_offload="optimized"), **asked)
    made = plan_for_budget(BLOCKS, OPTIONS, **asked)
    deferring, without, best = (
        forecast(MACHINE, BLOCKS, WORKLOAD, plan, durable=True).step_s
        for plan in (closed, at_once, made)
    )
    assert closed.deferred and (deferring < without) is deferring_pays
    assert best == min(deferring, without)
    assert made.grad_offload == "balanced" and bool(made.deferred) is deferring_pays


def test_of_a_large_model_too():
    """Only its levels of activations take too long to simulate."""
    model, machine = presets.model("qwen3-32b"), presets.machine("rtx4090")
    asked = PlanRequest(
        model=model, machine=machine, batch=64, seq=1024, options=PlanOptions(mode="bf16"),
        host=machine.host_bytes,
    )  # fmt: skip
    how = {"host_bytes": asked.host, "workload": workload_of(asked), "profile": machine}
    assert closed_form_plan(asked.blocks, asked.options, **how).deferred
    balanced, at_once = (
        plan_for_machine(replace(asked, options=replace(asked.options, grad_offload=way)))
        for way in ("balanced", "optimized")
    )
    assert balanced.step_s <= at_once.step_s
