"""Gradients that a later block adds to wait in host memory, which changes no bit."""

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
from tests.support.models import SMALL_SIZES, attached, batches, master_weights


@pytest.fixture
def device():
    result = EmulatedDevice(16 * MiB, h2d=1e9, d2h=1e9)
    yield result
    result.close()


def test_offloaded_gradients_return_unchanged(device):
    group = FlatGroup(
        "g",
        (TensorSpec("a", (8,), 0, 8, True, True), TensorSpec("b", (2, 4), 8, 8, True, True)),
        16,
    )
    gradient_offload = GradientOffload(device, 1 * MiB)
    for _ in range(2):  # memory is used again in the next step
        created = {1: torch.randn(2, 4), 0: torch.randn(8)}
        gradient_offload.set_aside(3, group, created)
        assert sorted(gradient_offload.aside[3]) == [0, 1]
        back = gradient_offload.fetch_aside(3)
        assert all(torch.equal(back[index], created[index]) for index in created)
        assert not gradient_offload.aside and gradient_offload.fetch_aside(3) == {}
    assert device.memory.peak <= 2 * 16 * FLOAT


def tied_run(place, monkeypatch, *, micro_batch, **options):
    """Return losses, weights, and the groups whose gradients waited when each backward began."""
    config = LlamaConfig(**SMALL_SIZES, tie_word_embeddings=True, use_cache=False)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    waiting, backward = [], BlockRunner.backward

    def watched(self, wrapped, call, grads):
        if "layers" in wrapped.site.name:
            waiting.append(self._collector.sink.waiting())
        return backward(self, wrapped, call, grads)

    train_batches = batches(3, batch=4, seq=16)
    with monkeypatch.context() as patch:
        patch.setattr(BlockRunner, "backward", watched)
        session = attached(model, place, batch=train_batches[0], micro_batch=micro_batch, **options)
        with session:
            losses = []
            for batch in train_batches:
                loss = model(**batch).loss
                loss.backward()
                losses.append(loss.item())
            return losses, master_weights(session), waiting


@pytest.mark.parametrize("micro_batch", [None, 1])
def test_tied_weights_on_a_device(micro_batch, tmp_path, monkeypatch):
    on_cpu = tied_run(tmp_path / "cpu", monkeypatch, micro_batch=micro_batch)
    on_device = tied_run(
        tmp_path / "device", monkeypatch, micro_batch=micro_batch, device=EmulatedDevice(64 * MiB)
    )
    assert on_cpu[0] == on_device[0]
    assert all(torch.equal(on_cpu[1][name], on_device[1][name]) for name in on_cpu[1])
    assert all(groups for groups in on_cpu[2]), "the head's wait for the embedding's"
    assert not any(on_device[2])
