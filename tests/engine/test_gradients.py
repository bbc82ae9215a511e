"""Gradients to which a later block adds do not wait on the device, and no bit changes by it."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from lohan.device.emulated import EmulatedDevice
from lohan.engine.gradient_transport import GradientOffload
from lohan.engine.wrapping import BlockRunner
from lohan.model.layout import FlatGroup, TensorSpec
from lohan.model.state import FLOAT
from lohan.util.units import MiB
from tests.support.small_models import SMALL, attached, batches, master_weights


@pytest.fixture
def device():
    made = EmulatedDevice(16 * MiB, h2d=1e9, d2h=1e9)
    yield made
    made.close()


def test_offloaded_gradients_return_unchanged(device):
    group = FlatGroup(
        "g",
        (TensorSpec("a", (8,), 0, 8, True, True), TensorSpec("b", (2, 4), 8, 8, True, True)),
        16,
    )
    gradient_offload = GradientOffload(device, 1 * MiB)
    for _ in range(2):  # memory is used again in the next step
        made = {1: torch.randn(2, 4), 0: torch.randn(8)}
        gradient_offload.set_aside(3, group, made)
        assert sorted(gradient_offload.aside[3]) == [0, 1]
        back = gradient_offload.fetch_aside(3)
        assert all(torch.equal(back[index], made[index]) for index in made)
        assert not gradient_offload.aside and gradient_offload.fetch_aside(3) == {}
    assert device.memory.peak <= 2 * 16 * FLOAT


def tied_run(place, monkeypatch, *, micro_batch, **options):
    """Return losses, weights, and the groups whose gradients waited when each backward began."""
    config = LlamaConfig(**SMALL, tie_word_embeddings=True, use_cache=False)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    waiting, backward = [], BlockRunner.backward

    def watched(self, wrapped, call, grads):
        if "layers" in wrapped.site.name:
            waiting.append(self._collector.sink.waiting())
        return backward(self, wrapped, call, grads)

    made = batches(3, batch=4, seq=16)
    with monkeypatch.context() as patch:
        patch.setattr(BlockRunner, "backward", watched)
        session = attached(model, place, batch=made[0], micro_batch=micro_batch, **options)
        with session:
            losses = []
            for batch in made:
                loss = model(**batch).loss
                loss.backward()
                losses.append(loss.item())
            return losses, master_weights(session), waiting


@pytest.mark.parametrize("micro_batch", [None, 1])
def test_tied_weights_on_a_device(micro_batch, tmp_path, monkeypatch):
    on_cpu = tied_run(tmp_path / "cpu", monkeypatch, micro_batch=micro_batch)
    there = tied_run(
        tmp_path / "device", monkeypatch, micro_batch=micro_batch, device=EmulatedDevice(64 * MiB)
    )
    assert on_cpu[0] == there[0]
    assert all(torch.equal(on_cpu[1][name], there[1][name]) for name in on_cpu[1])
    assert all(groups for groups in on_cpu[2]), "the head's wait for the embedding's"
    assert not any(there[2])
