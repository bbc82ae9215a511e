"""The output of a sliced head is that of the model: as an object, a dict and a tuple."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from tests.support.models import FAMILY_SIZES, attached, batches, small_model

BATCH = batches(1, batch=3, seq=8, ignored=False)[0]
SHIFTED = BATCH["labels"].roll(-2, 1).masked_fill(BATCH["labels"] % 3 == 0, -100)
WITH_HIDDEN = {"output_hidden_states": True}


def gradient_and_value(model: nn.Module, penalty: Callable[[Any], Any], **named: Any) -> Any:
    """Return a loss that depends on the output, and a gradient that shows where it came from."""
    collected: list[torch.Tensor] = []
    handle = model.get_input_embeddings().weight.register_hook(
        lambda grad: collected.append(grad.clone())
    )
    loss = penalty(model(**BATCH, **named))
    loss.backward()
    handle.remove()
    return loss.detach(), collected[0]


@pytest.mark.parametrize(
    ("penalty", "named"),
    [
        (lambda out: out[0] + out[1].square().mean(), {}),
        (lambda out: out[0] + out[1].square().mean(), WITH_HIDDEN),
        (lambda out: out[:2][0] + out[:2][1].square().mean(), WITH_HIDDEN),
        (lambda out: out.to_tuple()[1].square().mean() + out[-1][0].mean(), WITH_HIDDEN),
        (lambda out: list(out.values())[1].square().mean() + out["loss"], WITH_HIDDEN),
        (lambda out: dict(out)["logits"].square().mean() + out["loss"], {}),
        (lambda out: (out["logits"] if "logits" in out else out["loss"]).square().mean(), {}),
        (lambda out: out.loss * len(out) + len([*out]), WITH_HIDDEN),
        (lambda out: out[0] + out[1].square().mean(), {"return_dict": False, **WITH_HIDDEN}),
        (lambda out: out.loss, {"ignore_index": int(BATCH["labels"][0, 2])}),
        (lambda out: out.loss, {"shift_labels": SHIFTED}),
        (lambda out: out.loss, {"num_items_in_batch": 5}),
    ],
)
def test_output_and_loss_arguments_are_those_of_the_model(penalty, named, tmp_path):
    model = small_model("llama")
    expected = gradient_and_value(copy.deepcopy(model), penalty, **named)
    with attached(model, tmp_path):
        actual = gradient_and_value(model, penalty, **named)
    for value, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-6)


def test_output_with_an_auxiliary_loss_has_the_logits_of_the_model(tmp_path):
    torch.manual_seed(2)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    model = MixtralForCausalLM(MixtralConfig(**FAMILY_SIZES, **experts, use_cache=False)).train()
    ids = BATCH["input_ids"] % model.config.vocab_size
    batch = {"input_ids": ids, "labels": ids, "output_router_logits": True}
    plain = copy.deepcopy(model)(**batch)
    with attached(model, tmp_path):
        out = model(**batch)
        for name in plain:
            torch.testing.assert_close(out[name], plain[name], rtol=1e-4, atol=1e-5)
        assert list(out) == list(plain)
        out.loss.backward()
