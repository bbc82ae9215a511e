"""A packed frozen base under adapters computes the numbers of the dequantised base in memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lohan
from lohan.checkpoint.packed import dequantise, dequantised_range, quantise
from lohan.errors import ConfigError, ModelError, StoreError
from lohan.model.layout import TensorSpec
from lohan.model.state import FORMATS, packed_bytes
from tests.support.models import (
    adapted,
    assert_close,
    assert_same,
    attached,
    batches,
    lohan_run,
    master_weights,
    plain_run,
    small_model,
    train_steps,
)

FP8 = torch.float8_e4m3fn
NF4 = """-1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635
-0.18477343022823334 -0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725
0.24611230194568634 0.33791524171829224 0.44070982933044434 0.5626170039176941
0.7229568362236023 1.0"""


def rounded(weight: torch.Tensor, packing: str) -> torch.Tensor:
    """Return a matrix as it is after packing, computed in another way than by the package."""
    out = torch.empty_like(weight)
    if packing == "nf4":
        codes = torch.tensor([float(x) for x in NF4.split()])
        for block, into in zip(weight.reshape(-1).split(64), out.view(-1).split(64), strict=True):
            most = block.abs().max()
            near = (block[:, None] / most - codes).abs().argmin(1)
            into.copy_(codes[near] * most)
    elif packing == "int8":
        for row, into in zip(weight, out, strict=True):
            scale = row.abs().max() / 127
            into.copy_((row / scale).round() * scale)
    else:
        for i in range(0, weight.shape[0], 128):
            for j in range(0, weight.shape[1], 128):
                block = weight[i : i + 128, j : j + 128]
                scale = block.abs().max() / 448
                out[i : i + 128, j : j + 128] = (block / scale).to(FP8).float() * scale
    return out


def dequantised(model: nn.Module, packing: str) -> nn.Module:
    """Return a PEFT model with the linear layers of its blocks as they are after packing."""
    result = copy.deepcopy(model)
    for name, parameter in result.named_parameters():
        if name.endswith("_proj.base_layer.weight") or (
            ".c_" in name and "base_layer.weight" in name
        ):
            parameter.data = rounded(parameter.detach(), packing)
    return result


@pytest.mark.parametrize("packing", FORMATS)
def test_packed_tensor_dequantises_to_rounded_values(packing):
    for shape in ((7, 13), (130, 257), (3, 130, 65)):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        spec = TensorSpec("w", shape, 0, 0, True, False, packing=packing)
        packed = quantise(spec, lambda _, start, stop, v=values: v.reshape(-1)[start:stop])
        assert len(packed) == packed_bytes(packing, shape)
        actual = torch.empty(values.numel())
        dequantise(packed, packing, shape, actual)
        if packing == "nf4" or len(shape) == 2:
            wanted = rounded(values, packing)
        else:
            wanted = torch.stack([rounded(matrix, packing) for matrix in values])
        assert torch.equal(actual, wanted.view(-1))
        part = dequantised_range(packed, packing, shape, 5, values.numel() - 3)
        assert torch.equal(part, actual[5:-3])
        half = torch.empty(values.numel(), dtype=torch.bfloat16)
        dequantise(packed, packing, shape, half)
        assert torch.equal(half, actual.bfloat16())


@pytest.mark.parametrize(
    ("packing", "kind", "options"),
    [
        ("nf4", "llama", {}),
        ("int8", "llama", {"micro_batch": 2}),
        ("fp8", "gpt2", {"overlap": False}),
    ],
)
def test_equals_peft_on_the_dequantised_base(packing, kind, options, tmp_path):
    lora = {"target_modules": ["c_attn", "c_proj", "c_fc"]} if kind == "gpt2" else {}
    model, data = adapted(small_model(kind), **lora), batches(2, batch=4, seq=16)
    plain = dequantised(model, packing)
    expected_losses, expected = plain_run(copy.deepcopy(plain), data)
    same = lohan_run(plain, data, tmp_path / "plain", batch=data[0], **options)
    losses, weights = lohan_run(
        model, data, tmp_path / "packed", batch=data[0], base=packing, **options
    )
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert_close(weights, expected)
    assert losses == same[0]
    assert_same(weights, same[1])


def test_packed_base_trains_equally_on_emulated_device(tmp_path):
    """Packed weights are copied to it as they are; a block is dequantised there."""
    data = batches(2, batch=2, seq=16)
    runs = []
    for device, memory in (("cpu", None), ("emulated", "32MiB")):
        model, place = adapted(small_model("llama")), tmp_path / device
        budget = lohan.Budget(host="64MiB", device=memory, ssd=[place])
        how = {"batch": data[0], "base": "nf4", "device": device, "micro_batch": 2}
        runs.append(lohan_run(model, data, place, budget=budget, **how))
    assert runs[0][0] == runs[1][0]
    assert_same(runs[0][1], runs[1][1])


def test_biases_follow_their_slot_on_a_device(tmp_path):
    """Unpacked tensors of a packed group are read from the current slot of the group.

    A flush, a commit or a `state_dict` lets the group move to another slot.
    """
    data, runs = batches(3, batch=2, seq=16), []
    for device, memory in (("cpu", None), ("emulated", "680KiB")):
        model = adapted(small_model("gpt2"), target_modules=["c_attn"])
        place, losses = tmp_path / device, []
        budget = lohan.Budget(host="64MiB", device=memory, ssd=[place])
        options = {"batch": data[0], "base": "nf4", "device": device, "micro_batch": 1}
        with attached(model, place, budget=budget, **options) as session:
            for batch, interrupt in zip(
                data, (session.flush, session.commit, model.state_dict), strict=True
            ):
                losses += train_steps(model, [batch])
                interrupt()
            with torch.no_grad():
                losses.append(model(**data[0]).loss.item())
            runs.append((losses, master_weights(session)))
    assert runs[0][0] == runs[1][0]
    assert_same(runs[0][1], runs[1][1])


def test_packed_base_stores_and_reads_fewer_bytes(tmp_path):
    data, collected = batches(2, batch=2, seq=16), {}
    for base in ("", "nf4"):
        model = adapted(small_model("llama"), target_modules=["q_proj"])
        budget = lohan.Budget(host="800KiB", ssd=[tmp_path / f"with {base}"])
        with attached(model, tmp_path, batch=data[0], base=base, budget=budget) as session:
            frozen = [g for g in session.executor.blocks.groups if g.key.endswith("0/frozen")]
            before = session.counters.bytes_read
            train_steps(model, data)
            session.flush()
            read = session.counters.bytes_read - before
            collected[base] = sum(group.numel for group in frozen), read
            owners = {entry.owner for entry in session.plan.ledger if entry.tier == "host"}
            assert ("dequantised weights" in owners) == bool(base)
    assert collected["nf4"][0] < 0.2 * collected[""][0]
    assert collected["nf4"][1] < 0.7 * collected[""][1]


def test_resumed_with_the_same_base_only(tmp_path):
    data = batches(3, batch=2, seq=12)
    model = adapted(small_model("llama"))
    whole = copy.deepcopy(model)
    with attached(whole, tmp_path / "whole", batch=data[0], base="int8") as session:
        expected, last = train_steps(whole, data), master_weights(session)
    first = copy.deepcopy(model)
    with attached(first, tmp_path / "parts", batch=data[0], base="int8"):
        losses = train_steps(first, data[:2])
    with pytest.raises(StoreError, match="another model"):
        attached(copy.deepcopy(model), tmp_path / "parts", resume=True, base="nf4")
    second = copy.deepcopy(model)
    with attached(second, tmp_path / "parts", resume=True, base="int8") as session:
        assert losses + train_steps(second, data[2:]) == expected
        assert_same(master_weights(session), last)


def test_rejects_models_and_formats_that_cannot_be_packed(tmp_path):
    with pytest.raises(ConfigError, match="no linear layer in a block that is frozen"):
        attached(small_model("llama"), tmp_path, base="nf4")
    with pytest.raises(ConfigError, match="base is 'nf3'; choose nf4, int8, fp8"):
        attached(adapted(small_model("llama")), tmp_path, base="nf3")
    model = adapted(small_model("llama"))
    broken = model.get_parameter("base_model.model.model.layers.1.mlp.up_proj.base_layer.weight")
    broken.data[3, 4] = float("nan")
    with pytest.raises(ModelError, match=r"layers.1.mlp.up_proj.*not finite, which nf4 cannot"):
        attached(model, tmp_path, base="nf4")
