"""Random initial weights follow the model's own initialisation, block by block, reproducibly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from lohan.capture.blocks import site_names
from lohan.checkpoint.hf_folder import build_from_config
from lohan.checkpoint.sources import InitialValues, seed_of
from lohan.errors import LohanError

SMALL = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS: dict[str, Any] = {
    "llama": hf.LlamaConfig(**SMALL, attention_bias=True, pad_token_id=3),
    "tied": hf.LlamaConfig(**SMALL, tie_word_embeddings=True, pad_token_id=3),
    "gpt2": hf.GPT2Config(vocab_size=264, n_embd=64, n_layer=2, n_head=4, n_positions=64),
    "mamba": hf.MambaConfig(vocab_size=264, hidden_size=64, state_size=4, num_hidden_layers=2),
    "mixtral": hf.MixtralConfig(**SMALL, num_local_experts=4),
    "t5": hf.T5Config(
        vocab_size=264,
        d_model=64,
        d_kv=16,
        d_ff=96,
        num_layers=2,
        num_heads=4,
        architectures=["T5ForConditionalGeneration"],
    ),
}


def values_of(model: nn.Module, seed: int = 1) -> dict[str, torch.Tensor]:
    source = InitialValues(model, seed)
    return {
        name: source.read_flat(name, 0, parameter.numel()).view(parameter.shape)
        for name, parameter in model.named_parameters()
    }


def own_values(name: str, seed: int = 1) -> dict[str, torch.Tensor]:
    """Draw the whole model in memory: every block by its class, with the block's seed."""
    config = CONFIGS[name]
    empty = build_from_config(config, dtype=torch.float32)
    model: Any = type(empty)(config)
    blocks = site_names(model)
    outside = {n.rpartition(".")[0] for n, _ in model.named_parameters()}
    blocks += [n for n in sorted(outside) if not any(f"{n}.".startswith(f"{b}.") for b in blocks)]
    drawn: dict[str, torch.Tensor] = {}
    for block in blocks:
        for module in model.modules():
            module.__dict__.pop("_is_hf_initialized", None)
        torch.manual_seed(seed_of(seed, block))
        for _, child in _children_first(model.get_submodule(block)):
            model._init_weights(child)
        for parameter, value in model.named_parameters():
            if f"{parameter}.".startswith(f"{block}."):
                drawn.setdefault(parameter, value.detach().clone())
    return drawn


def _children_first(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [pair for name, child in module.named_children() for pair in _children_first(child)] + [
        ("", module)
    ]


@pytest.mark.parametrize("name", ["llama", "tied", "mixtral"])
def test_bits_are_those_of_the_class_with_the_seeds_of_its_blocks(name):
    drawn, expected = (
        values_of(build_from_config(CONFIGS[name], dtype=torch.float32)),
        own_values(name),
    )
    assert drawn.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(drawn[key], expected[key])] == []


@pytest.mark.parametrize("name", CONFIGS)
def test_initial_values_have_the_distribution_of_the_class(name):
    """Mean and spread of every tensor, and all that is not random, are those of the class."""
    empty = build_from_config(CONFIGS[name], dtype=torch.float32)
    drawn = values_of(empty)
    torch.manual_seed(0)
    own_values = dict(type(empty)(CONFIGS[name]).named_parameters())
    assert drawn.keys() == own_values.keys()
    for key, value in drawn.items():
        expected = own_values[key].detach()
        if expected.numel() > 1 and expected.std() > 0 and value.numel() >= 1000:
            assert float(value.std()) == pytest.approx(float(expected.std()), rel=0.15), key
            assert abs(value.mean() - expected.mean()) < 0.2 * expected.std(), key
        elif expected.std() == 0 or expected.numel() == 1:
            assert torch.equal(value, expected), key
    if name in ("llama", "tied"):
        assert (drawn["model.embed_tokens.weight"][3] == 0).all()
        assert (drawn["model.norm.weight"] == 1).all()
    if name == "llama":
        assert (drawn["model.layers.0.self_attn.q_proj.bias"] == 0).all()


def test_the_seed_decides_and_the_order_of_reading_does_not():
    model = build_from_config(CONFIGS["llama"], dtype=torch.float32)
    state = torch.random.get_rng_state()
    first, again, other = values_of(model), values_of(model), values_of(model, seed=2)
    assert torch.equal(state, torch.random.get_rng_state())
    name, last = "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first[name], other[name])
    layers = [first[f"model.layers.{n}.mlp.up_proj.weight"] for n in (0, 1)]
    assert not torch.equal(*layers)
    source = InitialValues(model, 1)
    for key in (name, last, name):
        assert torch.equal(source.read_flat(key, 5, 9), first[key].reshape(-1)[5:9])


def test_holds_initial_values_of_one_block_at_a_time():
    model = build_from_config(CONFIGS["llama"], dtype=torch.float32)
    source = InitialValues(model, 1)
    for name, _ in model.named_parameters():
        source.read_flat(name, 0, 1)
        held = sum(values.numel() for values in source._values.values())
        assert held <= max(264 * 64, sum(p.numel() for p in model.model.layers[0].parameters()))
        assert all(parameter.is_meta for parameter in model.parameters())


def test_rejects_class_that_does_not_initialise_a_parameter(monkeypatch):
    model = build_from_config(CONFIGS["llama"], dtype=torch.float32)
    monkeypatch.setattr(type(model), "initialize_weights", lambda self: None)
    with pytest.raises(LohanError, match="does not initialise parameter model"):
        InitialValues(model, 1).read_flat("model.embed_tokens.weight", 0, 1)
