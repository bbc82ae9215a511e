"""A GPU that shares the host's memory computes in the host's slots, with the bits of the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lohan.config import UPDATE_MODES
from lohan.device.integrated import IntegratedDevice
from lohan.errors import ConfigError
from lohan.util.units import MiB
from tests.softcuda import extension
from tests.support import delayed_runs
from tests.support.delayed_runs import (
    NET_KINDS,
    OVERLAP_CLIP,
    SLOW_PROFILE,
    OverlapCase,
    PlanTuning,
    budget_that_spills,
    check_overlap,
    folder_fixture,  # noqa: F401 - a fixture
    train_with_delays,
)
from tests.support.generated_cases import pairwise
from tests.support.models import attached, batches, small_model

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]
TINY = PlanTuning(window=1, slots=1, ring=2, spilled=0.6)
cuda: Any = extension()


@pytest.fixture(autouse=True)
def late_and_poisoned() -> Iterator[None]:
    cuda.set_delays(2000, 200, 1)
    cuda.set_poison(True)
    yield


@pytest.mark.parametrize(
    ("kind", "mode", "clip"), pairwise(NET_KINDS, UPDATE_MODES, [0.0, OVERLAP_CLIP])
)
def test_training_in_host_memory_changes_no_bit(kind, mode, clip, tmp_path):
    case = OverlapCase(kind=kind, clip=clip)
    check_overlap(case, tmp_path, TINY, mode=mode, seed=1, device=IntegratedDevice())


@pytest.mark.parametrize("activations", ["recompute", "all"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_language_models(kind, activations, tmp_path):
    rows, collected = batches(3, batch=4, seq=24), []
    for device in ("cpu", IntegratedDevice()):
        place = tmp_path / str(len(collected))
        place.mkdir()
        options = {"micro_batch": 2, "activations": activations, "device": device}
        collected.append(
            train_with_delays(small_model(kind), rows, place, batch=rows[0], **options)
        )
    collected[1].check(collected[0])


class WithoutOverhead(IntegratedDevice):
    """A device for which the planner makes the CPU's plan."""

    def overhead(self, host_bytes: int) -> dict[str, int]:
        return {}


def test_activations_come_back_from_the_ssd(folder, tmp_path):
    """A lane packs the activations, and compute reads them in the buffer of the drive."""
    options = {"micro_batch": 2, "host": budget_that_spills(folder, 2, 0.0)}
    wanted, _, _ = delayed_runs.train_with_kept_activations(
        folder, tmp_path / "plain", activations="recompute", overlap=False, **options
    )
    result, plan, moved = delayed_runs.train_with_kept_activations(
        folder,
        tmp_path / "kept",
        activations="all",
        profile=replace(SLOW_PROFILE, unified=True),
        device=WithoutOverhead(),
        delays=1,
        **options,
    )
    assert plan.spilled_sites and plan.kept and moved
    assert result[0] == wanted[0]


def test_compute_reads_weights_in_the_slots_of_the_host(tmp_path):
    """The device allocates nothing as large as a slot before the first step."""
    rows, model = batches(1, batch=4, seq=24), small_model("llama")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with attached(model, tmp_path, device=IntegratedDevice(), batch=rows[0]) as session:
        runner, plan = session.executor.runner, session.plan
        assert runner.device_parts is None and plan.tier_bytes("device") == plan.device_slots == 0
        slots = {buffer.tensor(torch.uint8).data_ptr() for buffer in runner.slots._buffers}
        assert torch.cuda.memory_allocated() - before < MiB // 8
        model(**rows[0]).loss.backward()
        flats = session.executor.scheduler._flats.values()
        used = {flat.data_ptr() for flat in flats}
        assert used and used <= slots and {flat.device.type for flat in flats} == {"cuda"}


def test_memory_that_cannot_be_registered_is_an_error_with_a_next_move():
    cuda.set_pinnable(4096)
    with pytest.raises(ConfigError, match=r"cannot register .*--host.*--device-memory"):
        IntegratedDevice().host_memory(MiB)


OPEN = """
from lohan.device.choose import open_device
from lohan.util.units import GiB
print(type(open_device("cuda")).__name__, type(open_device("cuda", memory=GiB)).__name__)
"""


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({}, "AcceleratorDevice AcceleratorDevice"),
        ({"SOFTCUDA_INTEGRATED": "1"}, "IntegratedDevice AcceleratorDevice"),
    ],
)
def test_device_that_reports_it_is_opened_as_integrated(env, says):
    """With a given device memory, it is used like a card with its own memory."""
    done = subprocess.run(
        [sys.executable, "-c", OPEN],
        env={**os.environ, **env},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == says, done


CHECK = """
import sys
from lohan.tools.gpu_checks import run_here
from pathlib import Path
print(run_here("shared-memory", "cuda", Path(sys.argv[1])))
"""


def test_doctor_compares_it_with_a_run_that_copies(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", CHECK, tmp_path],
        env={**os.environ, "SOFTCUDA_INTEGRATED": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert "'state': 'ok'" in done.stdout and "gradient norms" in done.stdout, done
