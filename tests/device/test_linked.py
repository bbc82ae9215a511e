"""The CPU as a device with its own memory, for several ranks, has the bits of the CPU."""

from __future__ import annotations

import pytest
import torch

from lohan.device.base import LinkedCpuDevice
from lohan.util.units import MiB
from tests.support.delayed_runs import OVERLAP_CLIP, OverlapCase, PlanTuning, check_overlap

TINY = PlanTuning(window=1, slots=1, ring=2, spilled=0.6)


@pytest.mark.parametrize(
    ("kind", "mode", "clip"),
    [("several", "balanced", 0.0), ("tied", "optimized", OVERLAP_CLIP), ("several", "serial", 0.0)],
)
def test_equals_the_cpu_bit_for_bit(kind, mode, clip, tmp_path):
    """Lanes are delayed at random."""
    device = LinkedCpuDevice(64 * MiB)
    case = OverlapCase(kind=kind, clip=clip, micro_batch=1, dropout=0.2)
    check_overlap(case, tmp_path, TINY, mode=mode, seed=4, device=device)


def test_copies_are_done_when_they_return():
    device = LinkedCpuDevice(MiB)
    slot, given = device.allocate(16), torch.arange(16, dtype=torch.uint8)
    device.copy("h2d", [(slot, given)], after=device.mark()).synchronize()
    assert torch.equal(slot, given) and device.memory_bytes() == MiB
