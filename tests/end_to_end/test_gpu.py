"""Equality, budgets and races on a real accelerator: `pytest -m gpu`.

The tests are skipped without one; the same code is tested on the emulated device
(device/test_emulated.py, engine/test_races.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lohan.config import UPDATE_MODES
from lohan.device.accelerator import AcceleratorDevice
from lohan.device.choose import has_accelerator
from lohan.util.units import GiB, MiB
from tests.support.delayed_runs import (
    PlanTuning,
    RunResult,
    net_batches,
    small_net,
    train_with_delays,
    tune_plans,
)
from tests.support.models import assert_close, batches, lohan_run, plain_run, small_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_accelerator(), reason="there is no accelerator"),
]
CLIP = 0.3
TINY = PlanTuning(window=1, slots=1, ring=2, spilled=0.6)


@pytest.fixture(autouse=True)
def same_every_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use deterministic kernels, since kernels that sum in any order would hide a race.

    cuBLAS needs a workspace setting for this, and only the plain attention has a deterministic
    backward.
    """
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.use_deterministic_algorithms(False)


def gpu_device() -> AcceleratorDevice:
    return AcceleratorDevice(1 * GiB)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("micro_batch", [None, 1])
def test_equal_to_in_memory_adamw(kind, micro_batch, tmp_path):
    """Kernels differ from the CPU's, so only within rounding."""
    model, train_batches = small_model(kind), batches(6, batch=3, seq=16)
    expected_losses, expected = plain_run(model, train_batches)
    losses, weights = lohan_run(
        model, train_batches, tmp_path, micro_batch=micro_batch, device=gpu_device()
    )
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    assert_close(weights, expected, limit=1e-4)


def test_bf16_and_fp16_learn(tmp_path):
    for dtype in (torch.bfloat16, torch.float16):
        model, result = small_model("llama", dtype=dtype), batches(1, batch=3, seq=16) * 8
        losses, _ = lohan_run(model, result, tmp_path / str(dtype), device=gpu_device())
        assert losses[-1] < losses[0]


def run(place: Path, kind: str, tuning: PlanTuning, **options: object) -> RunResult:
    with pytest.MonkeyPatch.context() as patch:
        tune_plans(patch, tuning)
        return train_with_delays(
            small_net(kind), net_batches(4, kind=kind), place, device=gpu_device(), **options
        )


@pytest.mark.parametrize("clip", [0.0, CLIP])
@pytest.mark.parametrize("kind", ["plain", "several", "llama"])
def test_overlap_changes_no_bit(kind, clip, tmp_path):
    """Lanes late at random, every buffer used again and again."""
    wanted = run(tmp_path / "plain", kind, TINY, clip=clip, overlap=False, update_mode="serial")
    for seed, mode in enumerate(UPDATE_MODES):
        result = run(tmp_path / mode, kind, TINY, clip=clip, update_mode=mode, seed=seed)
        if result.norms[0] is None:
            result = replace(result, norms=wanted.norms)
        result.check(wanted)


@pytest.mark.parametrize("micro_batch", [1, None])
def test_activations_change_no_bit(micro_batch, tmp_path):
    train_batches = batches(3, batch=4, seq=24)
    results = [
        train_with_delays(
            small_model("llama"),
            train_batches,
            tmp_path / activations,
            batch=train_batches[0],
            seed=1,
            micro_batch=micro_batch,
            activations=activations,
            device=gpu_device(),
        )
        for activations in ("recompute", "all")
    ]
    results[1].check(results[0])


def test_memory_stays_within_its_budget(tmp_path):
    train_batches = batches(3, batch=8, seq=64)
    device = AcceleratorDevice(64 * MiB)
    with suppress(RuntimeError, AttributeError):  # a backend that does not keep count
        torch.accelerator.reset_peak_memory_stats()
    train_with_delays(
        small_model("llama"), train_batches, tmp_path, batch=train_batches[0], device=device
    )
    with suppress(RuntimeError, AttributeError):
        assert torch.accelerator.max_memory_allocated() <= 64 * MiB


def test_host_memory_is_pinned_page_by_page():
    memory = gpu_device().host_memory(5 * 4096)
    assert memory.nbytes == 5 * 4096 and memory.ctypes.data % 4096 == 0
    assert torch.from_numpy(memory).is_pinned()
