"""Every term of the cost model, compared with a manual calculation."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lohan.model.machine import Drive, Profile
from lohan.planner import presets
from lohan.planner.activations import Step
from lohan.planner.forecast import Forecast
from lohan.planner.systems import PolicyCosts, policy
from lohan.schedule.actions import Action
from lohan.schedule.ops import OPERATIONS, Op
from lohan.schedule.simulate import (
    ActionCosts,
    BytesPerParameter,
    SiteWork,
    StepWork,
    Traffic,
    lane_seconds,
)

DRIVE = Drive(name="d", read=8e9, write=4e9)
MACHINE = Profile(
    name="m",
    device="gpu",
    device_bytes=2**30,
    compute=((1024.0, 1e12),),
    h2d=16e9,
    d2h=10e9,
    host_bytes=2**34,
    adam=1e9,
    drives=(DRIVE,),
)
SITE = SiteWork(
    forward_flops=2e12, recompute_flops=1e12, tokens=1024, kept_bytes=5e9, out_bytes=2e9
)
WORK = StepWork(
    sites=(SITE,),
    groups=(10**9,),
    chunk_params=4 * 10**8,
    per_parameter=BytesPerParameter(weight=2.0, state=10.0, gradient=4.0),
)


@pytest.mark.parametrize(
    "kind, chunk, seconds",
    [
        ("F", -1, 2.0),
        ("B", -1, 1.0 + 4.0),  # once more, then the gradients of inputs and weights
        ("R", -1, 2e9 / 8e9),
        ("S", 0, 4e9 / 8e9),
        ("W", 0, (4e9 + 0.8e9) / 4e9),  # state and weights
        ("W", 2, (2e9 + 0.4e9) / 4e9),  # the last chunk is shorter
        ("P", 0, 1.6e9 / 4e9),
        ("G", 0, 1.6e9 / 8e9),
        ("O", -1, 2e9 / 4e9),
        ("I", -1, 2e9 / 8e9),
        ("U", 0, 0.4),
        ("L", -1, 2e9 / 16e9),
        ("D", -1, 4e9 / 10e9),
        ("K", -1, 5e9 / 10e9),
        ("V", -1, 5e9 / 16e9),
    ],
)
def test_seconds_of_an_action(kind, chunk, seconds):
    assert ActionCosts(MACHINE, WORK).seconds(Action(OPERATIONS[kind], 0, chunk)) == pytest.approx(
        seconds
    )


def test_kernels_that_reach_a_share_of_the_speed():
    half = replace(policy("lohan"), compute_share=0.5, stall=0.0)
    assert PolicyCosts(half, MACHINE, WORK).seconds(Action(Op.FORWARD, 0)) == pytest.approx(4.0)


def test_deferred_updates_are_forwards():
    result = Traffic(
        forward_s=1.0,
        backward_s=3.0,
        weights=0.0,
        weights_read=0.0,
        kept=0.0,
        out=0.0,
        gradients=0.0,
        state_read=8e9,
        state_written=4e9,
        held=0.0,
        updated=2e9,
        deferred=0.25,
    )
    forward, backward = lane_seconds(MACHINE, result)
    assert (forward["ssd"], backward["ssd"]) == pytest.approx((0.5, 1.5))
    assert (forward["optimizer"], backward["optimizer"]) == pytest.approx((0.5, 1.5))


@pytest.mark.parametrize("drives, shared, step_s", [(0.5, 0.5, 1.0), (2.0, 0.5, 2.0), (2, 3, 3.0)])
def test_no_lane_has_more_to_do_than_a_step_lasts(drives, shared, step_s):
    timeline: Any = SimpleNamespace(step_s=1.0)
    nothing: Any = None
    result = Forecast(
        nothing, timeline, 1, 0.0, (), nothing, {"compute": 0.9, "ssd": drives}, shared
    )
    assert result.step_s == step_s


def test_host_memory_is_for_the_activations_of_all_gpus():
    step = Step(
        profile=replace(MACHINE, gpus=4),
        forward_s=1.0,
        backward_s=1.0,
        weights=0.0,
        gradients=0.0,
        weights_read=0.0,
        state_read=0.0,
        state_written=0.0,
        room=10e9,
    )
    assert (step.spilled(2e9), step.spilled(3e9)) == (0.0, 2e9)


def test_a_machine_overrides_its_parts():
    assert presets.machine("rtx5090").h2d == 42e9 != presets.machine("rtx4090").h2d
