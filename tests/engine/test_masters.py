"""Master weights keep all bits of a model that is loaded in a wider type than it computes in."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.support.models import assert_same, attached, master_weights, small_model


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_master_weights_have_every_bit_of_the_model(dtype, tmp_path):
    model = small_model("gpt2")
    expected = {name: p.detach() for name, p in copy.deepcopy(model).named_parameters()}
    with attached(model, tmp_path, dtype=dtype) as session:
        actual = master_weights(session)
    assert_same(actual, expected)
    weight = expected["transformer.h.0.mlp.c_fc.weight"]
    assert not torch.equal(weight, weight.half().float())
