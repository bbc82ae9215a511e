"""A GPU that computes in host memory: one budget, no copies, one set of weight slots."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from lohan.config import UPDATE_MODES
from lohan.device.base import CpuDevice, Event
from lohan.device.choose import open_device
from lohan.device.emulated import UNIFIED_NAME, EmulatedDevice, UnifiedDevice
from lohan.engine.attach import machine_with
from lohan.engine.lanes import Progress
from lohan.errors import BudgetError, ConfigError
from lohan.model.machine import Profile
from lohan.model.options import PlanOptions
from lohan.planner import presets
from lohan.planner.forecast import on_machine
from lohan.planner.machine_plan import (
    PlanRequest,
    faster_drives,
    plan_for_machine,
    with_alternatives,
)
from lohan.planner.memory import CARD_OWNERS
from lohan.util.units import Interval, MiB
from tests.support.delayed_runs import (
    NET_KINDS,
    OVERLAP_CLIP,
    OverlapCase,
    PlanTuning,
    check_overlap,
    memory_engine,
    net_batches,
    small_net,
)
from tests.support.generated_cases import pairwise
from tests.support.models import attached

SPARK = presets.machine("dgx-spark")
GB = 10**9


def request(machine: Profile = SPARK, host: int = 32 * GB) -> PlanRequest:
    return PlanRequest(
        model=presets.model("gpt-6b"),
        machine=machine,
        options=PlanOptions(dtype="bf16"),
        batch=8,
        seq=1024,
        host=host,
    )


# -- planning --------------------------------------------------------------------------------------


def test_plans_with_one_budget_and_no_copies():
    machine_plan = plan_for_machine(request())
    assert machine_plan.plan.tier_bytes("device") == 0 and machine_plan.plan.device_slots == 0
    assert machine_plan.plan.tier_bytes("host") <= 32 * GB
    lanes = {action.lane for phase in machine_plan.phases.values() for action in phase}
    assert not lanes & {"h2d", "d2h"}


def test_counts_overhead_of_the_gpu_in_host_memory():
    machine_plan = plan_for_machine(request())
    owners = {
        entry.owner: entry.bytes for entry in machine_plan.plan.ledger if entry.tier == "host"
    }
    assert all(owners[owner] > 0 for owner in CARD_OWNERS)


def test_updates_run_beside_compute_of_a_gpu_in_host_memory():
    """On the CPU, updates share the cores with compute, so the same plan takes longer."""
    machine = faster_drives(SPARK, 1000.0)
    forecast = plan_for_machine(request(machine)).forecast
    assert forecast is not None and forecast.shared_s == 0
    on_cores = on_machine(forecast, replace(machine, unified=False))
    assert forecast.step_s < on_cores.step_s
    assert on_cores.shared_s == forecast.busy_s["compute"] + forecast.busy_s["optimizer"]


def test_rejects_device_memory_of_a_machine_that_has_none(tmp_path):
    file = tmp_path / "machine.toml"
    file.write_text(SPARK.to_toml())
    assert presets.machine(file) == SPARK
    file.write_text(SPARK.to_toml().replace("device_bytes = 0", 'device_bytes = "24GiB"'))
    with pytest.raises(ConfigError, match="unified memory has only host_bytes"):
        presets.machine(file)
    file.write_text(SPARK.to_toml().replace("unified = true", "unified = 1"))
    with pytest.raises(ConfigError, match="true or false"):
        presets.machine(file)


def test_proposes_no_more_memory_than_the_machine_has():
    """Memory that is soldered to the board cannot be doubled."""
    small = replace(SPARK, host_bytes=32 * GB)
    options = PlanOptions(dtype="bf16", commit=Interval(0, 900.0))
    for machine, proposed in ((SPARK, True), (small, False)):
        machine_plan = with_alternatives(
            plan_for_machine(replace(request(machine), options=options))
        )
        assert any(each.option.startswith("--host") for each in machine_plan.instead) == proposed
    with pytest.raises(BudgetError, match=r"spark has .*cannot be extended; lower --host"):
        plan_for_machine(request(small, host=33 * GB))


def test_rejects_several_gpus():
    with pytest.raises(ConfigError, match="dgx-spark has one GPU"):
        plan_for_machine(request(replace(SPARK, gpus=2)))


# -- training on the emulated device ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "mode", "clip"), pairwise(NET_KINDS, UPDATE_MODES, [0.0, OVERLAP_CLIP])
)
def test_training_in_host_memory_changes_no_bit(kind, mode, clip, tmp_path):
    tuning = PlanTuning(window=1, slots=1, ring=2, spilled=0.6)
    check_overlap(
        OverlapCase(kind=kind, clip=clip),
        tmp_path,
        tuning,
        mode=mode,
        seed=1,
        device=UnifiedDevice(),
    )


def test_unified_device_keeps_a_single_copy_of_weights(tmp_path):
    """With the emulated link, the same model has a second set of slots on the device."""
    rows, plans = net_batches(2, kind="llama"), {}
    for device in (UnifiedDevice(), EmulatedDevice(64 * MiB)):
        model, place = small_net("llama"), tmp_path / device.name
        place.mkdir()
        with attached(model, place, device=device, batch=rows[0]) as session:
            for row in rows:
                model(**row).loss.backward()
            plans[device.name] = session.plan
    slots = {(e.tier, e.owner) for e in plans["emulated"].ledger}
    assert ("device", "weights") in slots and plans["emulated"].device_slots
    assert plans[UNIFIED_NAME].tier_bytes("device") == plans[UNIFIED_NAME].device_slots == 0


def test_peak_of_the_one_memory_is_within_the_plan(tmp_path):
    rows, device, model = net_batches(2, kind="llama"), UnifiedDevice(), small_net("llama")
    with attached(model, tmp_path, device=device, batch=rows[0]) as session:
        for row in rows:
            model(**row).loss.backward()
        planned = session.plan.tier_bytes("host")
    assert 0 < device.memory.peak <= 1.05 * planned


def test_lanes_see_a_block_when_its_compute_is_done(monkeypatch, tmp_path):
    """Lanes use the memory of compute, so a block must not end before its event has come."""
    device, unfinished, finish = UnifiedDevice(), list[str](), Progress.finish
    marks, mark = [device.mark()], device.mark

    def marked() -> Event:
        marks.append(mark())
        return marks[-1]

    def finished(progress: Progress, job: Any, *rest: Any) -> None:
        if job.action.lane == "compute" and not marks[-1].passed:
            unfinished.append(job.action.name)
        finish(progress, job, *rest)

    monkeypatch.setattr(device, "mark", marked)
    monkeypatch.setattr(Progress, "finish", finished)
    rows, model = net_batches(2), small_net()
    with attached(model, tmp_path, device=device, engine=memory_engine()) as session:
        device.delay = lambda lane: time.sleep(0.005)
        for row in rows:
            model(**row).backward()
        blocks = len(session.executor.blocks.sites)
    assert len(marks) > 2 * blocks and unfinished == []


def test_updates_have_a_thread_beside_compute(tmp_path):
    for device, on_caller in ((UnifiedDevice(), False), (CpuDevice(), True)):
        place = tmp_path / device.name
        place.mkdir()
        with attached(small_net(), place, device=device, engine=memory_engine()) as session:
            assert (session.executor.lanes._caller_jobs is not None) == on_caller


def test_takes_profiles_of_the_same_kind_of_machine_only():
    on_cores = replace(SPARK, unified=False)
    assert machine_with(UnifiedDevice(), SPARK) is SPARK
    assert machine_with(CpuDevice(), on_cores) is on_cores
    assert machine_with(CpuDevice(), SPARK) is machine_with(UnifiedDevice(), on_cores) is None


def test_opens_by_name_without_memory_or_link():
    assert isinstance(open_device(UNIFIED_NAME), UnifiedDevice)
    with pytest.raises(ConfigError, match="no memory of its own; leave --device-memory out"):
        open_device(UNIFIED_NAME, memory=MiB)
    with pytest.raises(ConfigError, match=r"--link applies only to emulated devices.*leave it out"):
        open_device(UNIFIED_NAME, link=1e9)
