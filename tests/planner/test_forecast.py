"""Contention between cores, drives and main memory in forecasts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lohan.model.machine import Drive, Profile
from lohan.model.options import PlanOptions
from lohan.model.shapes import gpt_shape
from lohan.planner import presets
from lohan.planner.forecast import Simulator
from lohan.planner.machine_plan import (
    PlanRequest,
    layout_of,
    load_of_shape,
    plan_for_machine,
)
from lohan.planner.planner import PlanProblem, closed_form_plan
from lohan.schedule.ops import Op
from lohan.schedule.simulate import BytesPerParameter, bus_bytes
from lohan.util.units import MiB

MODEL = gpt_shape(12, 6, 384, vocabulary=2048, positions=256)
BLOCKS, WORKLOAD = layout_of(MODEL), load_of_shape(MODEL, batch=4, seq=32, dtype="fp32")
OPTIONS = PlanOptions(dtype="fp32", activations="recompute", clip=0.0)


def forecast_on_cpu(*, flops, rate, **shares):
    """Forecast a fixed plan on a CPU with a drive of this rate."""
    drive = Drive(name="d", read=rate, write=rate)
    machine = Profile(
        name="small",
        device="cpu",
        compute=((1.0, flops),),
        host_bytes=2**34,
        adam=1e9,
        drives=(drive,),
    )
    plan = closed_form_plan(
        PlanProblem(BLOCKS, OPTIONS, host_bytes=224 * MiB, workload=WORKLOAD, profile=machine)
    )
    simulator = Simulator(replace(machine, **shares), BLOCKS, WORKLOAD)
    return simulator.forecast(plan)


def test_compute_is_slower_for_as_long_as_drives_work():
    alone, with_io = (forecast_on_cpu(flops=1e9, rate=2e9, io_share=share) for share in (0.0, 0.4))
    more_s = with_io.timeline.step_s - alone.timeline.step_s
    # What is lost in each second of I/O, all of which goes on during compute or an update.
    assert more_s == pytest.approx(0.4 * alone.busy_s["ssd"], rel=0.1)
    assert (
        with_io.busy_s["compute"] > alone.busy_s["compute"]
        and with_io.busy_s["optimizer"] > alone.busy_s["optimizer"]
    )
    assert with_io.busy_s["ssd"] == alone.busy_s["ssd"]


def test_compute_loses_nothing_to_drives_that_are_done_at_once():
    alone, with_io = (
        forecast_on_cpu(flops=1e10, rate=1e15, io_share=share) for share in (0.0, 0.4)
    )
    assert with_io.step_s == pytest.approx(alone.step_s, rel=1e-4)


def test_drives_are_slower_beside_compute():
    alone, with_io = (
        forecast_on_cpu(flops=1e9, rate=2e9, compute_share=share) for share in (0.0, 0.5)
    )
    assert with_io.busy_s["ssd"] == pytest.approx(2 * alone.busy_s["ssd"], rel=0.1)
    assert with_io.busy_s["compute"] == alone.busy_s["compute"]


def test_drives_lose_nothing_where_there_is_little_to_compute():
    alone, with_io = (
        forecast_on_cpu(flops=1e15, rate=1e8, compute_share=share) for share in (0.0, 0.5)
    )
    assert with_io.busy_s["ssd"] == pytest.approx(alone.busy_s["ssd"], rel=0.05)


# -- main memory, which drives, links and updates share --------------------------------------------


def on_device(*, drives: int, host_rate: float):
    """Return a forecast for a desktop whose GPU computes in no time: only transfers count."""
    fast = Drive(name="d", read=7e9, write=6e9)
    machine = Profile(
        name="desk",
        device="gpu",
        device_bytes=2**34,
        compute=((1.0, 1e18),),
        h2d=2.5e10,
        d2h=2.5e10,
        host_bytes=2**37,
        host_rate=host_rate,
        adam=2.4e9,
        drives=(fast,) * drives,
    )
    model = gpt_shape(12, 6, 384, vocabulary=2048, positions=256)
    blocks, workload = layout_of(model), load_of_shape(model, batch=1, seq=32, dtype="bf16")
    options = PlanOptions(dtype="bf16", activations="recompute", clip=0.0)
    plan = closed_form_plan(
        PlanProblem(blocks, options, host_bytes=120 * MiB, workload=workload, profile=machine)
    )
    return Simulator(machine, blocks, workload).forecast(plan)


def test_four_fast_drives_tie_with_main_memory():
    """Two drives are the bottleneck, eight are not, and four are about even with main memory."""
    two, four, eight = (on_device(drives=count, host_rate=7e10) for count in (2, 4, 8))
    assert two.binding == "ssd" and eight.binding == "bus"
    assert eight.step_s >= eight.bus_s > eight.busy_s["ssd"]
    assert four.bus_s == pytest.approx(four.busy_s["ssd"], rel=0.25)
    unknown = on_device(drives=8, host_rate=0.0)
    assert unknown.bus_s == 0.0 and unknown.step_s < eight.step_s


def test_a_machine_without_a_link_has_no_bus_of_its_own():
    # compute is in main memory too
    assert forecast_on_cpu(flops=1e9, rate=2e9, host_rate=1e3).bus_s == 0.0


BF16 = BytesPerParameter(weight=2.0, state=10.0, gradient=4.0)
# Passes of their own: over what was written, until updates took checksums, and over gradients,
# until the device summed their squares.
BEFORE = {"checksums": 12, "norm": 4}


def step_bus_bytes(layout: BytesPerParameter) -> dict[str, float]:
    """Return the bus bytes of a step with clipping, per parameter on SSD.

    Weights are read in forward and in backward.
    """
    each = bus_bytes(layout)
    return {
        "from SSD": 2 * each[Op.READ_WEIGHTS] + each[Op.READ_STATE],
        "to the device": 2 * each[Op.LOAD_WEIGHTS],
        "from the device": each[Op.OFFLOAD_GRADIENTS],
        "update": each[Op.UPDATE],
        "to SSD": each[Op.WRITE],
    }


def test_bytes_through_main_memory_are_those_of_the_document():
    """docs/planning.md, by part, where a batch is cut into slices and where it is not."""
    text = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    several, one = step_bus_bytes(BF16), step_bus_bytes(replace(BF16, gradient=2.0))
    for part, count in several.items():
        assert f"| {part} | {count:.0f} | {count:.0f} | {one[part]:.0f} |" in text, part
    for part, count in BEFORE.items():
        assert f"| {part} | {count} | 0 | 0 |" in text
    before = sum(several.values()) + sum(BEFORE.values())
    totals = (before, sum(several.values()), sum(one.values()))
    assert "| all | {:.0f} | {:.0f} | {:.0f} |".format(*totals) in text and before == 78
    held = bus_bytes(BF16)
    assert held[Op.SPILL_GRADIENTS] + held[Op.FETCH_GRADIENTS] == 16


def test_the_forecast_counts_what_the_document_says():
    """The parameters are stored on SSD."""
    actual = on_device(drives=4, host_rate=7e10)
    parts = step_bus_bytes(actual.work.per_parameter)
    trained = sum(actual.work.groups)
    moved = actual.bus_s * 7e10 / trained
    assert moved == pytest.approx(sum(parts.values()), rel=0.2)


def test_share_of_clipped_steps_up_to_which_updates_need_not_wait():
    """At this share, speculative steps take as long as steps that wait for the norm."""
    machine = presets.machine("rtx4090")
    options = PlanOptions(dtype="bf16", clip=1.0, can_rerun=True)
    model = gpt_shape(6, 16, 2048)
    actual = plan_for_machine(
        PlanRequest(
            model=model, machine=machine, options=options, batch=8, seq=1024, host=2048 * MiB
        )
    )
    kept, waiting, share = actual.forecast, actual.clipped, actual.plan.most_clipped
    assert actual.plan.spilled_gradients and 0 < share <= 1
    # Gradients that were spilled are not in memory, so a clipped step is run again.
    assert kept.step_s * (1 + share) == pytest.approx(waiting.step_s)
