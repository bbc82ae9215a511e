"""Plans with a log of gradients: what they keep in memory, write and refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lohan.errors import BudgetError, ConfigError
from lohan.model.options import PlanOptions, with_log
from lohan.model.plan import LOG
from lohan.planner import presets
from lohan.planner.machine_plan import MachinePlan, PlanRequest, plan_for_machine
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


def test_keeps_all_trained_weights_in_memory_and_writes_less() -> None:
    usual, logged = planned(OPTIONS), planned(LOGGED)
    moving = [group.key for group in logged.blocks.trained if not group.resident]
    assert set(moving) <= set(logged.plan.host_cached_weights)
    assert usual.forecast is not None and logged.forecast is not None
    assert logged.forecast.written_bytes < 0.5 * usual.forecast.written_bytes
    assert logged.step_s < usual.step_s
    trained = sum(group.numel for group in logged.blocks.trained)
    assert logged.plan.owner_bytes(LOG) == 9 * 4 * trained


def test_rejects_memory_that_does_not_hold_the_trained_weights() -> None:
    with pytest.raises(BudgetError, match=r"host budget .* \(largest: cached weights"):
        planned(LOGGED, host=6 * GiB)


def test_rejects_several_gpus() -> None:
    with pytest.raises(ConfigError, match="log_gradients: 2 ranks share the state"):
        planned(LOGGED, gpus=2)
