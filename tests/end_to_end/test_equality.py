"""Training equals AdamW in memory, for every family and every mode."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import lohan
from tests.support import models
from tests.support.generated_cases import thinned
from tests.support.models import (
    SMALL_SIZES,
    assert_close,
    attached,
    batches,
    lohan_run,
    master_weights,
    plain_run,
    small_model,
)

STEPS = 20


@pytest.mark.parametrize(
    ("kind", "batch", "micro_batch"),
    thinned(
        [
            ("llama", 1, None),
            ("llama", 4, None),
            ("llama", 4, 3),
            ("gpt2", 3, 1),
            ("gpt2", 4, None),
            ("qwen3", 2, None),
            ("qwen3", 4, 2),
        ],
        *(0, 2, 3, 6),
    ),
)
def test_fp32_equals_in_memory_adamw(kind, batch, micro_batch, tmp_path):
    model = small_model(kind)
    data = batches(STEPS, batch=batch, seq=24)
    expected_losses, expected = plain_run(model, data)
    losses, weights = lohan_run(model, data, tmp_path, micro_batch=micro_batch)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert_close(weights, expected)


def gentle(step: int) -> float:
    """Return a rate far below the spacing of 16-bit weights.

    Without its master copy, a run with this rate would not change its weights.
    """
    return 2e-5 * (1 + step / 10)


@pytest.mark.parametrize(
    ("dtype", "kind", "micro_batch"),
    thinned(
        [
            ("bf16", "llama", None),
            ("bf16", "gpt2", 2),
            ("bf16", "qwen3", 1),
            ("fp16", "llama", 2),
            ("fp16", "gpt2", None),
        ],
        *(0, 1, 3),
    ),
)
def test_16_bit_modes_equal_fp32_masters_in_memory(dtype, kind, micro_batch, tmp_path):
    """The 16-bit modes equal fp32 masters in memory, within rounding.

    Both runs round weights, activations and gradients to the same dtype, with unit roundoff u =
    2^-9 (bf16) or 2^-12 (fp16), but sum in different orders: ignored tokens are left out before
    the head, and micro-batches and tied uses are summed in fp32. So losses may differ by a few
    u. Adam divides a gradient by its own size, so the update of a matrix from start to end
    differs by a few u of its length, except where cancellation makes the gradient mostly
    rounding noise (query and key of a random model). The reference shows how much noise that
    is: it is as far from the same run in fp32. A lost remainder or a 16-bit master is off by
    about 1.
    """
    u = {"bf16": 2**-9, "fp16": 2**-12}[dtype]
    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    model = small_model(kind, dtype=torch_dtype)
    start = {name: p.detach().float().clone() for name, p in model.named_parameters()}
    data = batches(STEPS, batch=3, seq=16)
    scale = 65536.0 if dtype == "fp16" else 1.0
    _, exact = plain_run(copy.deepcopy(model).float(), data, lr=gentle)
    expected_losses, expected = plain_run(model, data, lr=gentle, loss_scale=scale)
    adamw = lohan.AdamW(lr=gentle, betas=(0.9, 0.95), weight_decay=0.1)
    losses, weights = lohan_run(model, data, tmp_path, micro_batch=micro_batch, optimizer=adamw)
    assert losses == pytest.approx(expected_losses, rel=4 * u)
    assert weights.keys() == expected.keys()
    for name, wanted in expected.items():
        way = (wanted - start[name]).norm()
        noise = (wanted - exact[name]).norm()
        assert noise < 0.5 * way or wanted.ndim < 2
        assert (weights[name] - wanted).norm() < 4 * u * way + 1.5 * noise, name


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3", "opt", "mistral", "qwen2-tied"])
def test_other_families_equal_in_memory_training(family, tmp_path):
    torch.manual_seed(0)
    config = copy.deepcopy(models.FAMILY_CONFIGS[family])
    config.use_cache = False
    for name in ("dropout", "attention_dropout"):
        setattr(config, name, 0.0)
    if family == "gemma2":
        assert config.final_logit_softcapping and config.attn_logit_softcapping
        config.final_logit_softcapping = 0.3  # near the logits, so that it bends them
    model = AutoModelForCausalLM.from_config(config).train()
    data = batches(4, batch=3, seq=16, vocab=models.FAMILY_VOCAB)
    expected_losses, expected = plain_run(model, data)
    losses, weights = lohan_run(model, data, tmp_path, micro_batch=2)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert_close(weights, expected)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_padding_and_ignored_labels(kind, side, tmp_path):
    model = small_model(kind)
    data = batches(4, batch=4, seq=16, ignored=False)
    for number, batch in enumerate(data):
        mask = torch.ones_like(batch["input_ids"])
        for row in range(4):
            length = 4 + (5 * row + 3 * number) % 13
            mask[row, length:] = 0
        if side == "left":
            mask = mask.flip(1)
        batch["attention_mask"] = mask
        batch["labels"][mask == 0] = -100
        batch["labels"][1] = -100  # an example without any loss
    expected_losses, expected = plain_run(model, data)
    losses, weights = lohan_run(model, data, tmp_path, micro_batch=3)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert_close(weights, expected)


@pytest.mark.parametrize("tied", [True, False])
def test_head_in_slices_of_tokens(tied, tmp_path):
    """A host budget that leaves room for few logits: many slices, the same result."""
    torch.manual_seed(0)
    sizes = {**SMALL_SIZES, "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 4099}
    config = LlamaConfig(**sizes, tie_word_embeddings=tied, use_cache=False)
    model = AutoModelForCausalLM.from_config(config).train()
    data = batches(3, batch=4, seq=48, vocab=4099)
    expected_losses, expected = plain_run(model, data)
    budget = lohan.Budget(host="6MiB", ssd=[tmp_path])
    with attached(model, tmp_path, batch=data[0], budget=budget) as session:
        assert session.plan.head_tokens < 4 * 36 / 2
        losses = []
        for batch in data:
            loss = model(**batch).loss
            loss.backward()
            losses.append(loss.item())
        weights = master_weights(session)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert_close(weights, expected)


def test_evaluation_between_steps(tmp_path):
    """A call without gradients trains nothing and uses the committed weights."""
    model = small_model("llama")
    data = batches(3, batch=2, seq=16)
    _, expected = plain_run(model, data)
    reference = copy.deepcopy(model)
    reference.load_state_dict(expected)
    with attached(model, tmp_path) as session:
        for batch in data:
            with torch.no_grad():
                before = model(**batch).loss.item()
            loss = model(**batch).loss
            assert loss.item() == before
            loss.backward()
        with torch.no_grad():
            logits = model(input_ids=data[0]["input_ids"]).logits
            wanted = reference(input_ids=data[0]["input_ids"]).logits
        assert_close(master_weights(session), expected)
    assert torch.allclose(logits, wanted, atol=1e-4)
