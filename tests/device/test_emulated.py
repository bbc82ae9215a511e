"""A device with its own memory changes no bit, with any delays and any size."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from lohan.capture.blocks import cut
from lohan.config import UPDATE_MODES
from lohan.device.base import CpuDevice
from lohan.device.choose import open_device
from lohan.device.emulated import EmulatedDevice
from lohan.engine.context import workload_of
from lohan.errors import BudgetError, ConfigError, LohanError
from lohan.model.options import PlanOptions
from lohan.model.plan import Plan
from lohan.planner.planner import PlanProblem, closed_form_plan
from lohan.planner.sizer import Sizer
from lohan.schedule.placement import UpdateOptions
from lohan.schedule.steps import ExecutionOrder, spec_of, steady_step
from lohan.util.units import MiB
from tests.support.delayed_runs import (
    NET_KINDS,
    OVERLAP_CLIP,
    OverlapCase,
    PlanTuning,
    RunResult,
    check_overlap,
    train_with_delays,
)
from tests.support.generated_cases import each_value, pairwise, thinned
from tests.support.models import attached, batches, deep_model, small_model

TINY = PlanTuning(window=1, slots=1, ring=2, spilled=0.6)


def emulated() -> EmulatedDevice:
    return EmulatedDevice(64 * MiB)


# -- every mode of updates ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "mode", "clip"), pairwise(NET_KINDS, UPDATE_MODES, [0.0, OVERLAP_CLIP])
)
def test_every_mode_works_with_the_least_memory(kind, mode, clip, tmp_path):
    """Every mode works with one spare weight slot and the gradients of one block.

    With so little, every buffer is used again and again.
    """
    check_overlap(
        OverlapCase(kind=kind, clip=clip), tmp_path, TINY, mode=mode, seed=1, device=emulated()
    )


@pytest.mark.parametrize(("slots", "overlap"), each_value([0, 1, 4], [True, False]))
def test_every_number_of_device_slots_equals_the_serial_path(slots, overlap, tmp_path):
    tuning = PlanTuning(window=2, device_slots=slots, device_grads=1 + slots % 2, cached=0.4)
    case = OverlapCase(kind="several", clip=OVERLAP_CLIP * (slots % 2))
    check_overlap(
        case, tmp_path, tuning, mode="balanced", seed=2, overlap=overlap, device=emulated()
    )


@pytest.mark.parametrize("clip", [0.0, OVERLAP_CLIP])
def test_dropout_and_micro_batches(clip, tmp_path):
    case = OverlapCase(kind="several", clip=clip, micro_batch=1, dropout=0.2)
    check_overlap(case, tmp_path, TINY, mode="balanced", seed=3, device=emulated())


def test_evaluation_between_steps(tmp_path):
    case = OverlapCase(kind="tied", clip=OVERLAP_CLIP, evaluated=True)
    check_overlap(case, tmp_path, TINY, mode="balanced", seed=4, device=emulated())


@pytest.mark.parametrize(
    ("kind", "still", "skip", "mode", "clip"),
    [
        ("plain", ((1, 2),), (), "optimized", 0.0),
        ("several", ((1, 0), (3, 0)), (), "balanced", OVERLAP_CLIP),
        ("plain", (), ((0, 2),), "balanced", 0.0),
        ("plain", (), ((1, 3), (2, 3)), "serial", 0.0),
    ],
)
def test_backward_that_visits_other_blocks_keeps_the_bits(kind, still, skip, mode, clip, tmp_path):
    case = OverlapCase(kind=kind, still=still, skip=skip, clip=clip)
    check_overlap(case, tmp_path, replace(TINY, window=2), mode=mode, seed=5, device=emulated())


def test_fp16_overflow_skips_its_step(tmp_path):
    case = OverlapCase(kind="llama", dtype=torch.float16, overflow=1)
    check_overlap(case, tmp_path, TINY, mode="balanced", seed=6, device=emulated())


def test_bf16_with_micro_batches(tmp_path):
    case = OverlapCase(kind="gpt2", dtype=torch.bfloat16, micro_batch=2)
    check_overlap(case, tmp_path, TINY, mode="balanced", seed=7, device=emulated())


# -- activations ----------------------------------------------------------------------------------


def language_run(place: Path, seed: int | None = None, **options: object) -> tuple[RunResult, Plan]:
    seen: list[Plan] = []
    train_batches = batches(3, batch=4, seq=24)
    model = small_model("llama")

    def note(model: torch.nn.Module, step: int) -> None:
        seen.append(session_plan(model))

    result = train_with_delays(
        model, train_batches, place, seed=seed, batch=train_batches[0], between=note, **options
    )
    return result, seen[0]


def session_plan(model: torch.nn.Module) -> Plan:
    return model.model.layers[0].forward.executor.plan


@pytest.mark.parametrize(
    ("activations", "micro_batch"), thinned(product(["recompute", "all"], [1, 2, None]), 1, 5)
)
def test_activations_are_offloaded(activations, micro_batch, tmp_path):
    """Kept results leave slice by slice and come back slice by slice."""
    options = {"activations": activations, "micro_batch": micro_batch, "clip": 0.3}
    wanted, _ = language_run(tmp_path / "cpu", **options)
    actual, plan = language_run(tmp_path / "there", 8, device=emulated(), **options)
    actual.check(wanted)
    assert bool(plan.kept) == (activations == "all")


@pytest.mark.parametrize("micro_batch", [1, None])
def test_activations_go_on_to_ssd(micro_batch, tmp_path, monkeypatch):
    """Activations pass from the device through host memory to SSD and back."""
    options = {"activations": "all", "micro_batch": micro_batch}
    wanted, _ = language_run(tmp_path / "cpu", **options)
    grown = Sizer.grown

    def moved(self: Sizer, plan: Plan, *args: object) -> Plan:
        plan = grown(self, plan, *args)
        away = tuple(n for n in self.memory.sizes.names if n not in plan.staying)
        return self.memory.with_ledger(replace(plan, spilled_sites=away))

    monkeypatch.setattr(Sizer, "grown", moved)
    actual, plan = language_run(tmp_path / "there", 9, device=emulated(), **options)
    actual.check(wanted)
    assert plan.spilled_sites and plan.kept


# -- budgets --------------------------------------------------------------------------------------


def test_a_quarter_of_what_the_model_needs(tmp_path):
    """Weights, gradients and AdamW's moments alone, without activations."""
    train_batches = batches(2, batch=4, seq=16)
    quarter = sum(p.numel() for p in deep_model().parameters()) * 16 // 4
    device = EmulatedDevice(quarter)
    options = {"micro_batch": 2, "clip": 0.5}
    wanted = train_with_delays(deep_model(), train_batches, tmp_path / "cpu", **options)
    place = tmp_path / "there"
    result = train_with_delays(
        deep_model(),
        train_batches,
        place,
        seed=10,
        device=device,
        batch=train_batches[0],
        **options,
    )
    result.check(wanted)
    assert 0 < device.memory.peak <= quarter


def test_leftover_memory_caches_weights():
    """The last blocks of forward are still there at the turn: the schedule has no load of them."""
    model = deep_model()
    blocks = cut(model)
    workload = workload_of(model, blocks, {"input_ids": torch.zeros(2, 8, dtype=torch.long)})
    slots = {}
    for memory in (1 * MiB, 64 * MiB):
        options = PlanOptions(dtype="fp32", micro_batch=2)
        plan = closed_form_plan(
            PlanProblem(
                blocks, options, host_bytes=64 * MiB, workload=workload, device_bytes=memory
            )
        )
        slots[memory] = plan.device_slots
        assert plan.tier_bytes("device") <= memory
        spec = spec_of(blocks, plan)
        sites = tuple(range(len(blocks.sites)))
        order = ExecutionOrder(
            forward=sites, backward=sites[::-1], updates=UpdateOptions(mode="balanced")
        )
        loads = [a for a in steady_step(spec, order)["backward"] if a.kind == "L"]
        assert len(loads) == max(0, len(sites) - plan.device_slots)
    assert slots[1 * MiB] < slots[64 * MiB] == len(sites)


def test_a_device_that_is_too_small_is_refused(tmp_path):
    train_batches = batches(1, batch=1, seq=8)
    with pytest.raises(BudgetError, match=r"device budget too small.*--device-memory"):
        attached(
            small_model("llama"), tmp_path, batch=train_batches[0], device=EmulatedDevice(64 * 1024)
        )


def test_out_of_memory_raises_the_error_of_torch_and_aborts_the_step(tmp_path):
    train_batches = batches(2, batch=2, seq=8)
    device = EmulatedDevice(64 * MiB)
    with attached(small_model("llama"), tmp_path, device=device) as session:
        device.memory.budget = device.memory.live + 1024
        with pytest.raises(torch.OutOfMemoryError, match="emulated device out of memory"):
            session.model(**train_batches[0])
        device.memory.budget = 64 * MiB
        session.model(**train_batches[1]).loss.backward()
        assert session.step == 1


def test_host_memory_that_cannot_be_pinned(tmp_path):
    """A warning gives the reason and the cost once; the results are the same."""
    case, tuning = OverlapCase(kind="plain"), TINY
    device = EmulatedDevice(64 * MiB, pinnable=4096)
    with pytest.warns(RuntimeWarning, match=r"cannot pin .*Cannot allocate memory.*half") as caught:
        check_overlap(case, tmp_path, tuning, mode="balanced", seed=11, device=device)
    assert len([w for w in caught if "cannot pin" in str(w.message)]) == 1


# -- choosing -------------------------------------------------------------------------------------


def test_opens_devices_by_name_and_rejects_wrong_options():
    assert isinstance(open_device("cpu"), CpuDevice)
    result = open_device("emulated", memory=3 * MiB, link=2e9)
    assert result.memory_bytes() == 3 * MiB and result.rates["h2d"] == result.rates["d2h"] == 2e9
    for name, options, message in (
        ("emulated", {}, "--device-memory"),
        ("cpu", {"memory": 1}, "no memory of its own"),
        ("cpu", {"link": 1.0}, "--link"),
        ("graphics", {}, "one of auto, cpu, accelerator, emulated, emulated-unified, cuda, cuda:1"),
        ("cuda:x", {}, "one of auto, cpu, accelerator, emulated, emulated-unified, cuda, cuda:1"),
        ("gpu", {}, "--device cpu"),
        ("cuda:1", {}, "--device cpu"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_device(name, **options)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_rejects_accelerator_on_a_machine_without_one():
    assert isinstance(open_device("auto"), CpuDevice)
    with pytest.raises(LohanError, match=r"finds no accelerator.*--device cpu"):
        open_device("accelerator")
