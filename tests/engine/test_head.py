"""The kind of loss is detected by what the model computes.

The next-token loss runs in slices; any other loss runs in the forward of the model.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import (
    BartConfig,
    BartForCausalLM,
    BertConfig,
    BertLMHeadModel,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MambaConfig,
    MambaForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    RwkvConfig,
    RwkvForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    XLNetConfig,
    XLNetLMHeadModel,
)

from lohan.engine.attach import find_decoder
from tests.support.models import (
    FAMILY_SIZES,
    FAMILY_VOCAB,
    assert_close,
    attached,
    lohan_run,
    loss_of,
    plain_run,
    small_model,
)


def text(steps: int = 2, seq: int = 10) -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    created = []
    for _ in range(steps):
        ids = torch.randint(3, FAMILY_VOCAB, (3, seq), generator=g)
        created.append({"input_ids": ids, "labels": ids.masked_fill(ids < 9, -100)})
    return created


def bart() -> nn.Module:
    config = BartConfig(
        vocab_size=FAMILY_VOCAB,
        d_model=32,
        decoder_layers=2,
        decoder_attention_heads=4,
        dropout=0.0,
        decoder_ffn_dim=48,
        max_position_embeddings=64,
    )
    return BartForCausalLM(config)


def bert() -> nn.Module:
    zero = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertLMHeadModel(BertConfig(**FAMILY_SIZES, **zero, is_decoder=True))


def llama4() -> nn.Module:
    experts = {"num_local_experts": 2, "intermediate_size_mlp": 48, "head_dim": 8}
    return Llama4ForCausalLM(Llama4TextConfig(**FAMILY_SIZES, **experts, num_key_value_heads=2))


def mamba() -> nn.Module:
    sizes = {"hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "time_step_rank": 4}
    return MambaForCausalLM(MambaConfig(vocab_size=FAMILY_VOCAB, **sizes))


def rwkv() -> nn.Module:
    sizes = {"hidden_size": 32, "attention_hidden_size": 32, "intermediate_size": 48}
    return RwkvForCausalLM(RwkvConfig(vocab_size=FAMILY_VOCAB, num_hidden_layers=2, **sizes))


def gpt1() -> nn.Module:
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=FAMILY_VOCAB, **sizes, **none))


def xlnet() -> nn.Module:
    sizes = {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "dropout": 0.0}
    return XLNetLMHeadModel(XLNetConfig(vocab_size=FAMILY_VOCAB, **sizes))


@pytest.mark.parametrize(
    ("build", "sliced", "planned"),
    [
        (bart, False, True),
        (bert, False, False),
        (llama4, True, True),
        (mamba, True, False),
        (rwkv, True, False),
        (gpt1, True, False),
        (xlnet, False, False),
    ],
)
def test_other_losses_equal_in_memory_training(build, sliced, planned, tmp_path):
    """Losses of many kinds have the results of plain PyTorch.

    Bart's labels are not shifted. BERT has layers between its decoder and its head. Llama 4
    asks an offloaded parameter for its device. The outputs of Mamba, RWKV, GPT-1 and XLNet have
    no cache of keys, and XLNet's labels are not shifted.
    """
    torch.manual_seed(0)
    model, data = build().train(), text()
    assert (find_decoder(model) is not None) is sliced
    expected_losses, expected = plain_run(model, data)
    losses, weights = lohan_run(model, data, tmp_path, **({"batch": data[0]} if planned else {}))
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    quiet = {
        name: w for name, w in weights.items() if not name.endswith(("k_proj.bias", "key.bias"))
    }
    assert_close(quiet, {name: expected[name] for name in quiet})


@pytest.mark.parametrize("given", ["labels", "decoder_input_ids"])
def test_text_to_text_with_labels_or_decoder_inputs(given, tmp_path):
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=FAMILY_VOCAB,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )
    data = [{**batch, "labels": batch["labels"][:, :6].contiguous()} for batch in text()]
    if given == "decoder_input_ids":
        data = [{**batch, given: batch["input_ids"][:, 2:8].contiguous()} for batch in data]
    expected_losses, expected = plain_run(model, data)
    losses, weights = lohan_run(model, data, tmp_path, batch=data[0])
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert_close(weights, expected)


def doubled(logits, labels, vocab_size, **_):
    return 2 * nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, vocab_size).float(), labels[:, 1:].reshape(-1)
    )


def test_a_loss_function_of_the_users_own_is_used(tmp_path):
    model = small_model("llama")
    assert find_decoder(model) is not None
    model.loss_function = doubled
    assert find_decoder(model) is None
    (batch,) = text(1)
    expected = loss_of(copy.deepcopy(model), batch).item()
    with attached(model, tmp_path) as session:
        assert loss_of(model, batch).item() == pytest.approx(expected, rel=1e-5)
        assert session.head is None


def test_finding_the_decoder_leaves_model_and_random_state_unchanged():
    model = small_model("gpt2")
    before = torch.random.get_rng_state()
    assert find_decoder(model) is model.transformer
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert "forward" not in vars(model.lm_head) and "forward" not in vars(model.transformer)
    assert "_loss_function" not in vars(model)
