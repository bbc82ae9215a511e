"""Cores and drives that take something from each other, in a forecast."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lohan.model.machine import Drive, Profile
from lohan.model.shapes import gpt_shape
from lohan.planner.forecast import forecast
from lohan.planner.machine_plan import layout_of, load_of_shape
from lohan.planner.planner import PlanOptions, closed_form_plan
from lohan.util.units import MiB

MODEL = gpt_shape(12, 6, 384, vocabulary=2048, positions=256)
BLOCKS, WORKLOAD = layout_of(MODEL), load_of_shape(MODEL, batch=4, seq=32, mode="fp32")
OPTIONS = PlanOptions(mode="fp32", activations="recompute", clip=0.0)


def made(*, flops, rate, **shares):
    """On a CPU with a drive of this rate; the plan is the same for all shares."""
    drive = Drive(name="d", read=rate, write=rate)
    machine = Profile(
        name="small", device="cpu", compute=((1.0, flops),), host_bytes=2**34, adam=1e9,
        drives=(drive,),
    )  # fmt: skip
    plan = closed_form_plan(
        BLOCKS, OPTIONS, host_bytes=224 * MiB, workload=WORKLOAD, profile=machine
    )
    return forecast(replace(machine, **shares), BLOCKS, WORKLOAD, plan, durable=True)


def test_compute_is_slower_for_as_long_as_drives_work():
    alone, with_io = (made(flops=1e9, rate=2e9, io_share=share) for share in (0.0, 0.4))
    more_s = with_io.timeline.step_s - alone.timeline.step_s
    # What is lost in each second of I/O, all of which goes on during compute or an update.
    assert more_s == pytest.approx(0.4 * alone.lane_s["ssd"], rel=0.1)
    assert (
        with_io.lane_s["gpu"] > alone.lane_s["gpu"] and with_io.lane_s["cpu"] > alone.lane_s["cpu"]
    )
    assert with_io.lane_s["ssd"] == alone.lane_s["ssd"]


def test_compute_loses_nothing_to_drives_that_are_done_at_once():
    alone, with_io = (made(flops=1e10, rate=1e15, io_share=share) for share in (0.0, 0.4))
    assert with_io.step_s == pytest.approx(alone.step_s, rel=1e-4)


def test_drives_are_slower_beside_compute():
    alone, with_io = (made(flops=1e9, rate=2e9, compute_share=share) for share in (0.0, 0.5))
    assert with_io.lane_s["ssd"] == pytest.approx(2 * alone.lane_s["ssd"], rel=0.1)
    assert with_io.lane_s["gpu"] == alone.lane_s["gpu"]


def test_drives_lose_nothing_where_there_is_little_to_compute():
    alone, with_io = (made(flops=1e15, rate=1e8, compute_share=share) for share in (0.0, 0.5))
    assert with_io.lane_s["ssd"] == pytest.approx(alone.lane_s["ssd"], rel=0.05)
