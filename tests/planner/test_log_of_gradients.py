"""Plans with a log of gradients: what they keep in memory, write and refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lohan.errors import ConfigError
from lohan.model.layout import RESIDENT
from lohan.model.options import PlanOptions, with_log
from lohan.model.plan import LOG
from lohan.planner import presets
from lohan.planner.machine_plan import MachinePlan, PlanRequest, plan_for_machine
from lohan.schedule.steps import check_order
from lohan.util.units import GiB

OPTIONS = PlanOptions(dtype="bf16", clip=1.0, can_rerun=True)
LOGGED = with_log(OPTIONS, 8, commit_every="auto", world=1)


def planned(options: PlanOptions, *, gpus: int = 1, host: int = 0) -> MachinePlan:
    machine = replace(presets.machine("rtx4090"), gpus=gpus)
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


def test_rejects_several_gpus() -> None:
    with pytest.raises(ConfigError, match="log_gradients: 2 ranks share the state"):
        planned(LOGGED, gpus=2)
