"""Plans with a log of gradients: what they keep in memory, write and refuse."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from lohan.cli.plan import describe
from lohan.model.layout import RESIDENT
from lohan.model.machine import Profile
from lohan.model.options import LOG_CHOICES, PlanOptions, with_log
from lohan.model.plan import LOG
from lohan.planner import presets
from lohan.planner.machine_plan import MachinePlan, PlanRequest, plan_for_machine
from lohan.planner.planner import LOG_SPEEDUP
from lohan.schedule.steps import check_order
from lohan.util.units import GiB, Interval

OPTIONS = PlanOptions(dtype="bf16", clip=1.0, can_rerun=True)
CHOOSES = with_log(OPTIONS, "auto", commit_every="auto")
LOGGED = with_log(OPTIONS, 8, commit_every="auto")


def planned(
    options: PlanOptions, *, gpus: int = 1, host: int = 0, machine: Profile | None = None
) -> MachinePlan:
    machine = replace(machine or presets.machine("rtx4090"), gpus=gpus)
    request = PlanRequest(
        model=presets.model("qwen3-4b"),
        machine=machine,
        options=options,
        batch=8,
        seq=1024,
        host=host or 24 * GiB,
    )
    return plan_for_machine(request)


def test_writes_less_and_is_faster() -> None:
    usual, logged = planned(OPTIONS), planned(LOGGED)
    moving = [group.key for group in logged.blocks.trained if not group.resident]
    assert set(moving) <= set(logged.plan.host_cached_weights)
    assert usual.forecast is not None and logged.forecast is not None
    assert logged.forecast.written_bytes < 0.5 * usual.forecast.written_bytes
    assert logged.step_s < usual.step_s
    trained = sum(group.numel for group in logged.blocks.trained)
    assert logged.plan.owner_bytes(LOG) == 9 * 4 * trained


def test_streams_the_weights_that_do_not_fit_in_memory() -> None:
    """Backward reads them again, so every step also writes them."""
    usual, logged = planned(OPTIONS, host=10 * GiB), planned(LOGGED, host=10 * GiB)
    moving = {group.key for group in logged.blocks.trained if not group.resident}
    cached = set(logged.plan.host_cached_weights)
    assert moving - cached
    assert {key for key, _ in logged.plan.host_cached_state} <= {*cached, RESIDENT}
    assert usual.forecast is not None and logged.forecast is not None
    assert logged.forecast.written_bytes < 0.5 * usual.forecast.written_bytes
    assert logged.step_s < usual.step_s
    check_order(logged.spec, logged.order)


def test_chooses_a_log_where_steps_wait_for_drives_that_write_slowly() -> None:
    chosen = planned(CHOOSES)
    assert chosen.plan.log_gradients in LOG_CHOICES
    assert chosen.plan.commit == Interval(chosen.plan.log_gradients, 0.0)
    assert chosen.unlogged is not None and chosen.forecast is not None
    assert chosen.unlogged.step_s >= LOG_SPEEDUP * chosen.step_s
    assert chosen.unlogged == planned(replace(CHOOSES, log_choices=())).forecast
    text = "\n".join(describe(chosen, steps=None))
    assert re.search(r"\nthe log +saves .* per step; .* less is written, so drives last", text)


def test_chooses_no_log_where_drives_write_as_fast_as_they_read() -> None:
    machine = presets.machine("rtx4090")
    drives = tuple(replace(drive, write=drive.read) for drive in machine.drives)
    chosen = planned(CHOOSES, machine=replace(machine, drives=drives))
    assert not chosen.plan.log_gradients and chosen.unlogged is None


def test_chooses_a_shorter_log_or_none_where_the_drives_are_small() -> None:
    machine, longest = presets.machine("rtx4090"), planned(CHOOSES)
    assert longest.plan.log_gradients == max(LOG_CHOICES)
    needed = longest.plan.tier_bytes("ssd")

    def limited(room: int) -> int:
        drives = tuple(replace(drive, bytes=room // 2) for drive in machine.drives)
        return planned(CHOOSES, machine=replace(machine, drives=drives)).plan.log_gradients

    assert limited(needed - GiB) == min(LOG_CHOICES)
    assert limited(needed - longest.plan.owner_bytes(LOG)) == 0


@pytest.mark.parametrize(
    "changes", [{"overlap": False}, {"update_mode": "naive"}, {"commit": Interval(5)}]
)
def test_leaves_the_log_out_where_another_option_forbids_it(changes: Any) -> None:
    options = replace(OPTIONS, **changes)
    assert with_log(options, "auto", commit_every="auto") == options


def test_chooses_a_log_for_several_ranks() -> None:
    chosen = planned(CHOOSES, gpus=2)
    assert chosen.plan.log_gradients and chosen.plan.world == 2


def test_another_plan_of_a_run_keeps_its_log() -> None:
    for steps in (0, 4):
        plan = planned(OPTIONS.logging(steps)).plan
        fixed = CHOOSES.fixed_by(plan)
        assert (fixed.log_gradients, fixed.log_choices) == (steps, ())
