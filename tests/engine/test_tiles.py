"""Runs whose blocks work in tiles of tokens: less memory, the same gradients up to rounding."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import lohan
from lohan.capture.blocks import cut_for
from lohan.capture.footprint import measure
from lohan.device.emulated import EmulatedDevice
from lohan.errors import ConfigError
from lohan.planner import planner
from lohan.util.units import MiB
from tests.support.models import attached, batches, loss_of, master_weights, small_model

LONG = 2048


def long_model() -> LlamaForCausalLM:
    """Return a model whose MLP is eight times as wide as its hidden state, like Gemma's."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=1,
        vocab_size=32,
        tie_word_embeddings=False,
        max_position_embeddings=LONG,
    )
    return LlamaForCausalLM(config).train()


def one_step(device: EmulatedDevice, place: Path, **options: Any):
    """Return the plan, and the weights after one step of plain gradient descent."""
    place.mkdir()
    model = long_model()
    ids = torch.randint(0, 32, (1, LONG), generator=torch.Generator().manual_seed(2))
    budget = lohan.Budget(host="64MiB", ssd=[place])
    with lohan.attach(
        model,
        optimizer=lohan.SGD(lr=1.0, momentum=0.0),
        budget=budget,
        device=device,
        batch={"input_ids": ids},
        activations="recompute",
        overlap=False,
        **options,
    ) as session:
        model(input_ids=ids, labels=ids).loss.backward()
        session.flush()
        return session.plan, master_weights(session)


def test_a_long_sequence_trains_in_a_quarter_of_the_memory(tmp_path, monkeypatch):
    """Compared with what it really takes without tiles, by bytes that the device held."""
    monkeypatch.setattr(planner, "TILES", (32,))
    roomy = EmulatedDevice(200 * MiB)
    plan, whole = one_step(roomy, tmp_path / "whole")
    assert plan.tiles == 0  # it fits without
    quarter = roomy.memory.peak // 4
    small = EmulatedDevice(quarter)
    plan, tiled = one_step(small, tmp_path / "tiled")
    assert plan.tiles == 32
    assert small.memory.peak <= plan.tier_bytes("device") <= quarter
    before = dict(long_model().named_parameters())
    for name, one in whole.items():
        gradient = one - before[name]
        assert gradient.norm() > 0
        assert (one - tiled[name]).norm() <= 1e-5 * gradient.norm()


def run(
    place: Path, *, steps: int = 2, resume: bool = False, call_first: bool = False, **options: Any
):
    """Train, and call the model once without gradients before that if `call_first` is true."""
    place.mkdir(exist_ok=True)
    data = batches(steps, batch=2, seq=16)
    with attached(small_model("llama"), place, resume=resume, clip=1.0, **options) as session:
        model = session.model
        if call_first:
            with torch.no_grad():
                loss_of(model, data[0])
        for batch in data[session.step :]:
            loss_of(model, batch).backward()
        session.flush()
        assert session.plan.tiles == options["tiles"]
        return master_weights(session)


def test_overlap_resume_and_a_device_change_no_bit_at_one_size_of_tiles(tmp_path):
    serial = run(tmp_path / "serial", tiles=8, overlap=False)
    run(tmp_path / "resumed", tiles=8, steps=1)
    batch = batches(1, batch=2, seq=16)[0]
    others = {
        "overlap": run(tmp_path / "overlap", tiles=8),
        "called first": run(tmp_path / "called-first", tiles=8, call_first=True),
        "resumed": run(tmp_path / "resumed", tiles=8, resume=True),
        "device": run(
            tmp_path / "device",
            tiles=8,
            device=EmulatedDevice(64 * MiB),
            batch=batch,
            activations="all",
        ),
    }
    for name, other in others.items():
        assert all(torch.equal(serial[key], other[key]) for key in serial), name
    whole = run(tmp_path / "whole", tiles=1 << 20)  # no sequence is that long
    assert any(not torch.equal(serial[key], whole[key]) for key in serial)


@pytest.mark.parametrize("tiles", [0, -1, "some", 1.5, True])
def test_rejects_text_that_is_no_tile_size(tiles, tmp_path):
    with pytest.raises(ConfigError, match=r"tiles.*auto, off, or a number of tokens"):
        attached(small_model("llama"), tmp_path, tiles=tiles)


def test_footprint_does_not_depend_on_garbage_collection():
    """Trials that find the tiles leave tensors behind until it is: no run has those."""
    model = long_model()
    model.config.use_cache = False
    ids = torch.empty((1, LONG), dtype=torch.long, device="meta")
    batch = {"input_ids": ids, "labels": ids}
    blocks = cut_for(model, batch)
    gc.collect()
    gc.disable()
    try:
        whole, tiled = (
            measure(model, blocks, batch, micro_batch=1, tiles=tiles).outside for tiles in (0, 32)
        )
    finally:
        gc.enable()
    assert tiled == whole
