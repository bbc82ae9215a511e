"""Sums of gradients over slices, and their norm, have a price: bytes through device memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lohan.model.options import PlanOptions
from lohan.planner import presets
from lohan.planner.machine_plan import PlanRequest, plan_for_machine
from lohan.schedule.simulate import SUM_BYTES, SiteWork

MODEL, MACHINE = presets.model("qwen3-1.7b"), presets.machine("rtx4090")
BLOCKS = sum(block.parameters for block in MODEL.blocks)
HEAD = MODEL.vocabulary * MODEL.hidden  # its matrix is the embedding's too
BATCH, SEQ = 16, 4096  # one row is enough for the card to be at its fastest


def compute_s(*, machine=MACHINE, **options) -> float:
    wanted = {"dtype": "bf16", "tiles": "off", "activations": "recompute", **options}
    plan_request = PlanRequest(
        model=MODEL,
        machine=machine,
        options=PlanOptions(**wanted),
        batch=BATCH,
        seq=SEQ,
        host=machine.host_bytes,
    )
    return plan_for_machine(plan_request).forecast.busy_s["compute"]


def test_every_slice_adds_gradients_to_their_sums():
    slower_s = compute_s(micro_batch=2) - compute_s(micro_batch=4)
    assert slower_s == pytest.approx(4 * SUM_BYTES * BLOCKS / MACHINE.device_rate, rel=1e-6)


def test_head_adds_gradients_for_each_of_its_slices():
    slower_s = compute_s(micro_batch=4, head_tokens=512) - compute_s(micro_batch=4)
    parts = BATCH * SEQ // 1024
    assert slower_s == pytest.approx(parts * SUM_BYTES * HEAD / MACHINE.device_rate, rel=1e-6)


def test_norm_reads_every_gradient_once():
    norm_s = compute_s(micro_batch=4, clip=1.0) - compute_s(micro_batch=4, clip=0.0)
    assert norm_s == pytest.approx(4 * (BLOCKS + HEAD) / MACHINE.device_rate, rel=1e-2)


def test_measured_block_includes_activations_but_not_sums():
    work = SiteWork(
        forward_flops=1e12, recompute_flops=0.0, tokens=4096, forward_bytes=1e9, summed_bytes=3e9
    )
    measured = replace(MACHINE, block_width=4096)
    flops_s = 1e12 / MACHINE.flops_at(4096)
    assert work.forward_s(measured) == pytest.approx(flops_s)
    assert work.backward_s(measured) == pytest.approx(2 * flops_s + 3e9 / MACHINE.device_rate)
    assert work.backward_s(MACHINE) == pytest.approx(2 * flops_s + 5e9 / MACHINE.device_rate)
