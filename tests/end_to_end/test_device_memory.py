"""The peak memory of a device equals the plan."""

from __future__ import annotations

import time

import pytest
import torch

import lohan
from lohan.device.emulated import EmulatedDevice
from lohan.util.units import MiB
from tests.support.models import MEMORY_TOLERANCE, save_llama

SHAPES = {
    "many blocks": {"hidden": 128, "layers": 5, "vocabulary": 512, "seq": 160},
    "small head": {"hidden": 128, "layers": 3, "vocabulary": 64, "seq": 160},
    "wide head": {"hidden": 128, "layers": 2, "vocabulary": 4096, "seq": 128},
}
SLOW = pytest.mark.slow
CASES = [
    ("many blocks", 64, {"activations": "recompute"}),
    pytest.param("small head", 64, {"activations": "recompute", "micro_batch": 1}, marks=SLOW),
    pytest.param("many blocks", 64, {"activations": "all", "micro_batch": 2}, marks=SLOW),
    ("wide head", 64, {"activations": "all", "micro_batch": 2}),
    ("many blocks", 10, {"activations": "all"}),
    pytest.param("many blocks", 64, {"activations": "all", "clip": 1.0}, marks=SLOW),
]


def late(lane: str) -> None:
    """Delay copies from the device, so that memory stays in use as long as possible."""
    if lane == "d2h":
        time.sleep(0.03)


@pytest.mark.parametrize(("shape", "room", "options"), CASES)
def test_the_peak_of_a_device_is_the_planned_one(shape, room, options, tmp_path):
    sizes = dict(SHAPES[shape])
    seq = sizes.pop("seq")
    model = lohan.load(save_llama(tmp_path / "model", **sizes)).train()
    ids = torch.randint(0, 60, (4, seq), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    device = EmulatedDevice(room * MiB)
    device.delay = late
    (tmp_path / "ssd").mkdir()
    with lohan.attach(
        model,
        optimizer=lohan.AdamW(lr=1e-3),
        device=device,
        budget=lohan.Budget(host="160MiB", ssd=[tmp_path / "ssd"]),
        batch={"input_ids": ids, "attention_mask": mask},
        **options,
    ) as session:
        for _ in range(2):
            model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
        planned = session.plan.tier_bytes("device")
    assert planned <= room * MiB
    assert (1 - MEMORY_TOLERANCE) * planned <= device.memory.peak <= planned
