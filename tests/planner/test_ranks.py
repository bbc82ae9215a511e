"""Several GPUs in one machine: shared and separate resources, and the cost of communication."""

from __future__ import annotations

import functools
import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from lohan.cli.compare import outcome_of
from lohan.cli.main import app
from lohan.errors import BudgetError, ConfigError
from lohan.model.layout import GROUP_ALIGN
from lohan.model.options import PlanOptions
from lohan.model.plan import Plan
from lohan.model.shapes import gpt_shape
from lohan.planner import presets
from lohan.planner.machine_plan import (
    MachinePlan,
    PlanRequest,
    largest_batch,
    layout_of,
    plan_for_machine,
    without_lane,
)
from lohan.schedule.actions import to_text
from tests.support.generated_cases import thinned

MODEL = gpt_shape(layers=8, heads=16, hidden=2048, name="small")
MACHINE = replace(presets.machine("ratel-4090"), host_bytes=64 * 10**9)


def plan_request(gpus: int, batch: int, **changes) -> PlanRequest:
    machine = replace(MACHINE, gpus=gpus, **changes)
    return PlanRequest(
        model=MODEL,
        machine=machine,
        options=PlanOptions(dtype="bf16"),
        batch=batch,
        seq=512,
        host=machine.host_bytes,
    )


@functools.cache
def planned(gpus: int, batch: int) -> MachinePlan:
    return plan_for_machine(plan_request(gpus, batch))


def test_the_ranks_of_a_machine_move_no_more_than_one_would():
    one, four = planned(1, 8), planned(4, 32)
    padding = 4 * GROUP_ALIGN * len(layout_of(MODEL).groups) * 24
    assert one.peak_bytes["ssd"] <= four.peak_bytes["ssd"] <= one.peak_bytes["ssd"] + padding
    assert four.forecast.written_bytes == pytest.approx(one.forecast.written_bytes, rel=0.01)
    busy, alone = four.forecast.busy_s, one.forecast.busy_s
    # A quarter of the updates, with a quarter of the machine; rows, of which it may recompute more.
    assert busy["optimizer"] == pytest.approx(alone["optimizer"], rel=0.01)
    assert busy["compute"] == pytest.approx(alone["compute"], rel=0.2)
    assert busy["h2d"] < alone["h2d"] and alone["net"] == 0 < busy["net"]
    assert four.forecast.tokens_per_s > 2.5 * one.forecast.tokens_per_s


def test_blocks_are_whole_on_the_device_and_pieces_elsewhere():
    one, four = planned(1, 8), planned(4, 32)
    plan = {(e.tier, e.owner): e.bytes for e in one.plan.ledger}
    shards = {(e.tier, e.owner): e.bytes for e in four.plan.ledger}
    assert four.plan.world == 4
    slot = plan["device", "weights"] / one.plan.device_slots
    assert shards["device", "weights"] / four.plan.device_slots >= slot
    assert shards["host", "cached weights"] < 0.3 * plan["host", "cached weights"]
    assert Plan.from_json(json.loads(json.dumps(four.plan.to_json()))) == four.plan


def test_the_net_lane_carries_all_but_the_ranks_own_piece():
    request = plan_request(4, 32, net=10e9)
    forecast = plan_for_machine(request).forecast
    others = 3 * sum(g.numel for g in request.blocks.groups if not g.resident)
    tokens = [a for phase in forecast.steady_phases().values() for a in phase if a.kind in "AX"]
    gathered = sum(3 * forecast.work.groups[a.index] * 2 for a in tokens if a.kind == "A")
    summed = sum(3 * forecast.work.groups[a.index] * 4 for a in tokens if a.kind == "X")
    assert summed == 4 * others and gathered <= 4 * others  # blocks that stay need it only once
    expected = (gathered + summed) / 10e9 + len(tokens) * request.machine.action_s
    assert forecast.busy_s["net"] == pytest.approx(expected)


def test_weights_are_gathered_before_use_and_gradients_summed_before_they_leave():
    phases = plan_for_machine(plan_request(2, 8)).forecast.steady_phases()
    forward, backward = to_text(phases["forward"]), to_text(phases["backward"])
    assert "A1@" in forward and "X1(B1)" in backward and "D1(X1" in backward
    assert "A1@" not in to_text(
        plan_for_machine(plan_request(1, 4)).forecast.steady_phases()["forward"]
    )


def test_links_that_are_shared_and_a_net_of_its_own_make_a_difference():
    slow = {"h2d": 2e9, "d2h": 2e9}
    separate = plan_for_machine(plan_request(4, 32, **slow)).forecast
    shared = plan_for_machine(plan_request(4, 32, **slow, link_limit=2e9)).forecast
    apart = plan_for_machine(plan_request(4, 32, **slow, net=200e9)).forecast
    assert shared.step_s > 1.5 * separate.step_s
    assert apart.step_s < separate.step_s
    assert apart.busy_s["net"] < separate.busy_s["net"] / 50


def test_step_is_not_shorter_than_the_traffic_of_a_shared_link():
    """GPUs without a net of their own: no step is shorter than a link is busy with both."""
    forecast = plan_for_machine(plan_request(8, 8, h2d=1e9, d2h=1e9)).forecast
    busy = forecast.busy_s
    assert forecast.step_s >= max(busy["h2d"], busy["d2h"]) + busy["net"]
    free = without_lane(plan_request(8, 8, h2d=1e9, d2h=1e9).machine, "net")
    assert free.net_rate > 100e9 and not free.net_over_links


def test_share_divides_host_drives_and_links():
    half = replace(MACHINE, link_limit=30e9).share(2)
    assert half.host_bytes == MACHINE.host_bytes // 2 and half.adam == MACHINE.adam / 2
    assert half.ssd_read == pytest.approx(MACHINE.ssd_read / 2)
    assert half.h2d == 15e9 and half.device_bytes == MACHINE.device_bytes
    assert half.flops_at(4096) == MACHINE.flops_at(4096)
    cores = replace(MACHINE, device_bytes=0).share(2)
    assert cores.flops_at(4096) == MACHINE.flops_at(4096) / 2
    assert MACHINE.share(1) is MACHINE


@pytest.mark.parametrize(
    ("impossible", "words"),
    [
        (plan_request(4, 3), "--batch 3 is less than one row for each of 4 GPUs; raise it to 4"),
        (plan_request(4, 8, device_bytes=0), "--gpus 4: ratel-4090 has no GPU"),
    ],
)
def test_rejects_impossible_rank_settings(impossible, words):
    with pytest.raises(ConfigError, match=words):
        plan_for_machine(impossible)


def test_memory_is_asked_of_every_rank():
    poor = replace(plan_request(8, 8), host=3 * 10**8)
    with pytest.raises(BudgetError, match=r"fits with --host") as refused:
        plan_for_machine(poor)
    assert "--batch" not in str(refused.value).partition("fits with")[2]  # a row each is the least
    assert largest_batch(plan_request(4, 4)) >= 4


def test_the_command_line_plans_several_gpus():
    runner = CliRunner()
    common = ["--model", "gpt-13b", "--machine", "ratel-4090", "--gpus", "4"]
    text = runner.invoke(app, ["plan", *common, "--batch", "64"]).output
    assert "gpt-13b on ratel-4090 with 4 GPUs" in text and "of each of 4 ranks:" in text
    assert "exchange between ranks" in text and "micro-batch      16 of 16" in text
    output = runner.invoke(app, ["plan", *common, "--batch", "64", "--json"]).output
    assert json.loads(output)["gpus"] == 4 and json.loads(output)["plan"]["world"] == 4


@pytest.mark.parametrize("batch", thinned([32, 128], 0))
def test_four_gpus_do_not_do_worse_than_the_papers_own_method(batch):
    """Its sums in host memory, by the cores that also update, are what limits it there."""
    machine = replace(presets.machine("ratel-4090"), gpus=4)
    model = presets.model("gpt-13b")
    actual, expected = (
        outcome_of(name, model, machine, batch=batch, seq=1024) for name in ("auto", "lohan")
    )
    assert actual.tokens_per_s > expected.tokens_per_s
