"""The inventory of a block equals what autograd saves and what the block computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from lohan.capture.tracing import inventory
from lohan.errors import ModelError
from lohan.model.shapes import Activation
from tests.support.architectures import (
    BLOCK_CONFIGS,
    BLOCK_SEQ,
    BLOCK_SIZES,
    block_call,
    second_block,
    small_block,
)
from tests.support.models import FAMILY_CONFIGS

BATCH = 3
HIDDEN, INNER = BLOCK_SIZES["hidden_size"], BLOCK_SIZES["intermediate_size"]


def parts(block, call):
    _, args, kwargs = call.restore(slice(0, BATCH), grad=True)
    return inventory(block, args, kwargs)


def really_saved(block, call) -> int:
    """Return the bytes that autograd saves in a real run, without weights, buffers and masks."""
    tensors, args, kwargs = call.restore(slice(0, BATCH), grad=True)
    existing = [*block.parameters(), *block.buffers(), *(t for t in tensors if not t.requires_grad)]
    existing_keys = {tensor.untyped_storage()._cdata for tensor in existing}
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = block(*args, **kwargs)
    assert out is not None
    return sum(t.untyped_storage().nbytes() for key, t in saved.items() if key not in existing_keys)


@pytest.mark.parametrize("kind", BLOCK_CONFIGS)
def test_input_and_classes_are_what_autograd_saves(kind):
    block, call = small_block(kind, batch=BATCH)
    actual = parts(block, call)
    names = [part.name for part in actual.classes]
    assert len(set(names)) == len(names) > 8
    elements = actual.shape.input_elements + sum(a.elements for a in actual.shape.activations)
    assert elements * 4 * BATCH * BLOCK_SEQ == pytest.approx(really_saved(block, call), rel=1e-12)
    assert actual.shape.input_elements == HIDDEN
    assert actual.kept_bytes(names) == sum(part.bytes for part in actual.classes)


@pytest.mark.parametrize("family", FAMILY_CONFIGS)
def test_every_family_has_an_inventory(family):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILY_CONFIGS[family]).train()
    block = second_block(model)
    batch = {"input_ids": torch.ones(BATCH, 16, dtype=torch.long), "use_cache": False}
    call = block_call(model, block, batch)
    actual = parts(block, call)
    everything = actual.kept_bytes([part.name for part in actual.classes])
    hidden = call.tensors[0].numel() * 4
    assert really_saved(block, call) - hidden <= everything <= really_saved(block, call)
    again = actual.shape.recompute_flops_at(16)
    assert 0.3 * actual.shape.flops_at(16) < again < actual.shape.flops_at(16)


def test_flops_are_those_of_the_real_block():
    block, call = small_block("llama", batch=BATCH)
    _, args, kwargs = call.restore(slice(0, BATCH), grad=True)
    actual = inventory(block, args, kwargs, flops_per_byte=0.0)
    with FlopCounterMode(display=False) as counter:
        block(*args, **kwargs)
    assert (
        actual.shape.flops * BATCH * BLOCK_SEQ == counter.get_total_flops()
    )  # has no CPU attention
    assert actual.shape.flops_per_context == 2 * HIDDEN  # causal
    by_name = {a.name: a for a in actual.shape.activations}
    assert by_name["mm gate_proj+up_proj"] == Activation(
        "mm gate_proj+up_proj", 2 * INNER, 4 * HIDDEN * INNER
    )
    assert by_name["add q_proj"] == Activation("add q_proj", HIDDEN, 2 * HIDDEN * HIDDEN)
    assert by_name["mm v_proj"].flops == 2 * HIDDEN * HIDDEN / 2
    attention = next(a for a in actual.shape.activations if a.flops_per_context)
    heads = BLOCK_SIZES["num_attention_heads"]
    assert attention.elements == HIDDEN + heads  # with the logarithms of its sums
    last = 2 * HIDDEN * INNER  # of the last product nothing in backward needs the result
    assert actual.shape.flops - sum(a.flops for a in actual.shape.activations) == last


def test_activation_classes_are_sorted_by_benefit_and_named_by_module():
    block, call = small_block("gpt2", batch=BATCH)
    actual = parts(block, call)
    benefits = [part.benefit for part in actual.classes]
    assert benefits == sorted(benefits, reverse=True)
    assert {a.name for a in actual.shape.activations} == set(actual.keys)
    assert [a.name for a in actual.shape.activations] != [part.name for part in actual.classes]
    # One product makes queries, keys and values, so they are one class.
    assert [a.elements for a in actual.shape.activations if a.name.endswith(" c_attn")] == [96]
    assert sum(len(keys) for keys in actual.keys.values()) == len(
        {key for keys in actual.keys.values() for key in keys}
    )


def test_a_small_tensor_stands_in_for_its_wide_copy():
    """The norm saves a 32-bit copy of the 16-bit sum behind attention."""
    block, call = small_block("llama", batch=BATCH, dtype=torch.bfloat16)
    actual = parts(block, call)
    by_name = {part.name: part for part in actual.classes}
    total = by_name["add o_proj"]
    assert total.activation.elements == HIDDEN and total.activation.flops > 2 * HIDDEN * HIDDEN
    copies = [part for part in actual.classes if part.name.startswith("to_copy")]
    assert any(part.activation.elements == 2 * HIDDEN for part in copies)
    # With the copy there, the sum itself is of no use.
    everything = [part.name for part in actual.classes]
    assert total.keys.isdisjoint(actual.save_plan(everything).keep)
    assert total.keys <= actual.save_plan(["add o_proj"]).keep
    hidden = BATCH * BLOCK_SEQ * HIDDEN * 2
    assert actual.kept_bytes(everything) <= really_saved(block, call)
    assert actual.kept_bytes(everything) >= really_saved(block, call) - hidden


def test_mask_does_not_depend_on_the_masked_values():
    block, call = small_block("gpt2", batch=BATCH)
    save_plan = parts(block, call).save_plan([])
    last = max(count for name, count in save_plan.skip if name == "aten.addmm.default")
    assert last == 3  # the product behind the last dropout is not made again


def test_tracing_leaves_no_trace():
    block, call = small_block("gpt2", batch=BATCH)
    before = {name: (id(p), p.detach().clone()) for name, p in block.named_parameters()}
    state = torch.get_rng_state()
    real = parts(block, call)
    assert torch.equal(torch.get_rng_state(), state)
    after = dict(block.named_parameters())
    assert all(id(after[n]) == i and torch.equal(after[n], v) for n, (i, v) in before.items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in block.modules())
    # Shapes are enough: parameters without memory, arguments of a fake run.
    _, args, kwargs = call.restore(slice(0, BATCH), grad=True)
    block.to("meta")
    with FakeTensorMode(allow_non_fake_inputs=True):
        args = (torch.empty(args[0].shape).requires_grad_(), *args[1:])
        assert inventory(block, args, kwargs).classes == real.classes


class Moody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        x = self.linear(x)
        return torch.tanh(x) if torch.is_grad_enabled() else torch.sigmoid(x)


def test_a_block_that_runs_differently_without_a_graph_is_traced_with_one():
    actual = inventory(Moody(), (torch.empty(4, 8),), name="moody")
    assert (
        "aten.tanh.default" in actual.graph.ops and "aten.sigmoid.default" not in actual.graph.ops
    )
    assert {part.name for part in actual.classes} == {"tanh linear"}


def test_an_unknown_class_is_named():
    actual = inventory(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), (torch.empty(4, 8),), name="b")
    with pytest.raises(ModelError, match="block b has no activations 'mlp'; it has tanh 0"):
        actual.save_plan(["mlp"])
