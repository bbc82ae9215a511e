"""Shapes made from a config.json count what transformers builds from it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from lohan.capture.tracing import inventory
from lohan.errors import ConfigError
from lohan.model.shapes import known_types, shape_from_config
from lohan.planner import presets
from tests.support.architectures import block_call, second_block
from tests.support.models import FAMILY_CONFIGS, FAMILY_IDS, FAMILY_SIZES, GPT_SIZES, GROUPED_SIZES

OPT = {**FAMILY_SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32}
VARIANTS: dict[str, PreTrainedConfig] = {
    **FAMILY_CONFIGS,
    "phi3": Phi3Config(**GROUPED_SIZES),
    "llama, biases": LlamaConfig(**GROUPED_SIZES, attention_bias=True, mlp_bias=True),
    "llama, tied, all heads": LlamaConfig(**FAMILY_SIZES, tie_word_embeddings=True),
    "llama, wide heads": LlamaConfig(**{**GROUPED_SIZES, "head_dim": 24}),
    "qwen3, tied, biases": Qwen3Config(
        **GROUPED_SIZES, attention_bias=True, tie_word_embeddings=True
    ),
    "gpt2, own inner size": GPT2Config(**GPT_SIZES, **FAMILY_IDS, n_inner=80, resid_pdrop=0.0),
    "gpt2, untied": GPT2Config(**GPT_SIZES, **FAMILY_IDS, tie_word_embeddings=False),
    "neox, one after the other": GPTNeoXConfig(
        **FAMILY_SIZES, use_parallel_residual=False, attention_bias=False
    ),
    "opt, narrow words, norms behind": OPTConfig(
        **{**OPT, "word_embed_proj_dim": 16}, do_layer_norm_before=False
    ),
    "opt, no biases": OPTConfig(**OPT, enable_bias=False, layer_norm_elementwise_affine=False),
    # what files leave out has the default of its model type
    "mistral 7b": MistralConfig(num_hidden_layers=1),
    "qwen2 7b": Qwen2Config(
        hidden_size=3584,
        intermediate_size=18944,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
        num_hidden_layers=1,
    ),
    "neox 20b": GPTNeoXConfig(num_hidden_layers=1),
    "gpt2": GPT2Config(n_layer=1),
    "mixtral": MixtralConfig(**GROUPED_SIZES, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(**GROUPED_SIZES, moe_intermediate_size=24, num_experts=8),
    "gpt_oss": GptOssConfig(**GROUPED_SIZES, num_local_experts=4),
    "gpt_oss, no biases": GptOssConfig(**GROUPED_SIZES, num_local_experts=4, attention_bias=False),
    "gpt_oss 120b": GptOssConfig(num_hidden_layers=1),
}


OWN = ("gpt2", "DiTTransformer2DModel")  # tested apart


def counts(config: PreTrainedConfig) -> tuple[int, int, int]:
    """Return the parameters of the whole model, of one block, and outside the blocks."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    total = sum(parameter.numel() for parameter in model.parameters())
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    block = sum(parameter.numel() for parameter in layers[0].parameters())
    return total, block, total - len(layers) * block


@pytest.mark.parametrize("name", VARIANTS)
def test_parameters_are_those_of_transformers(name, tmp_path):
    config = VARIANTS[name]
    config.save_pretrained(tmp_path)
    total, block, outside = counts(config)
    for data in (config.to_dict(), json.loads((tmp_path / "config.json").read_text())):
        shape = shape_from_config(data, name)
        assert shape.parameters == total
        assert {each.parameters for each in shape.blocks} == {block}
        assert len(shape.blocks) == config.num_hidden_layers
        head = shape.embedding_parameters + shape.head_parameters + shape.resident_parameters
        assert head == outside
        assert shape.tied == config.tie_word_embeddings
        assert (shape.hidden, shape.vocabulary) == (config.hidden_size, config.vocab_size)


@pytest.mark.parametrize("kind", [kind for kind in known_types() if kind not in OWN])
def test_a_key_left_out_has_the_default_of_transformers(kind):
    """All optional keys are removed, and transformers reads the same shape."""
    needed = {"vocab_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 64}
    needed |= {"hidden_size": 256, "intermediate_size": 320, "num_attention_heads": 32}
    if kind == "opt":
        needed["ffn_dim"] = 320
    if kind == "gptj":
        needed |= {"n_embd": 256, "n_layer": 2, "n_head": 4, "rotary_dim": 8}
    if kind in ("gemma", "phi3"):
        needed |= FAMILY_IDS
    built = AutoConfig.for_model(kind, **needed)
    assert shape_from_config({"model_type": kind, **needed}, kind).parameters == counts(built)[0]


WIDE = {
    "vocab_size": 640,
    "hidden_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "max_position_embeddings": 64,
}
GROUPED_WIDE = {**WIDE, "num_key_value_heads": 4}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**WIDE, intermediate_size=2048, num_key_value_heads=4),
        Qwen3Config(**WIDE, intermediate_size=2048, num_key_value_heads=4, head_dim=128),
        GPT2Config(**WIDE),
        GPTNeoXConfig(**WIDE, intermediate_size=3072),
        OPTConfig(**WIDE, ffn_dim=3072),
        MixtralConfig(**GROUPED_WIDE, intermediate_size=768, num_local_experts=8),
        Qwen3MoeConfig(**GROUPED_WIDE, moe_intermediate_size=192, num_experts=16, head_dim=64),
        GptOssConfig(**GROUPED_WIDE, **FAMILY_IDS, intermediate_size=768, num_local_experts=8),
    ],
    ids=lambda config: config.model_type,
)
def test_flops_are_those_that_torch_counts(config):
    batch, seq = 2, 16
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # torch does not count grouped products
    model = AutoModelForCausalLM.from_config(config).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.zeros((batch, seq), dtype=torch.long), use_cache=False)
    shape = shape_from_config(config.to_dict(), config.model_type)
    # without a flash kernel, the half of attention that a causal mask hides is computed as well
    hidden_half = sum(block.flops_per_context for block in shape.blocks) * seq
    expected = batch * seq * (shape.flops_at(seq) + hidden_half)
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-32b", 32_762_123_264),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("gpt-oss-20b", 20_914_757_184),
    ],
)
def test_real_models_have_their_published_size(name, parameters):
    assert presets.model(name).parameters == parameters


@pytest.mark.parametrize(
    "config",
    [
        MixtralConfig(**GROUPED_SIZES, num_local_experts=4),
        Qwen3MoeConfig(
            **GROUPED_SIZES, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=4
        ),
        GptOssConfig(**GROUPED_SIZES, num_local_experts=4, num_experts_per_tok=2),
    ],
    ids=lambda config: config.model_type,
)
def test_experts_keep_what_autograd_saves(config):
    """All large results of experts are counted, without indices and routing weights."""
    block, call = block_and_call(config)
    _, args, kwargs = call.restore(slice(0, 1), grad=True)
    traced = inventory(block, args, kwargs).shape.activations
    saved = sum(a.elements for a in traced if "experts" in a.name or "act_fn" in a.name)
    shape = shape_from_config(config.to_dict(), config.model_type).blocks[0]
    named = ("routed", "gate and up", "clamped", "activation", "product", "down")
    expected = sum(a.elements for a in shape.activations if a.name in named)
    assert 0 <= saved - expected < 10 * config.num_experts_per_tok * 4


def block_and_call(config):
    model = AutoModelForCausalLM.from_config(config).train()
    block = second_block(model)
    batch = {"input_ids": torch.ones(1, 16, dtype=torch.long), "use_cache": False}
    return block, block_call(model, block, batch)


def test_rejects_layers_with_and_without_experts():
    data = Qwen3MoeConfig(**GROUPED_SIZES, mlp_only_layers=[0]).to_dict()
    with pytest.raises(ConfigError, match="layers with experts and layers without"):
        shape_from_config(data, "x")


def test_a_paper_gpt_is_a_gpt2(tmp_path):
    config = GPT2Config(n_embd=1600, n_layer=48, n_head=25)
    from_config = shape_from_config(config.to_dict(), "gpt-1.55b")
    assert presets.model("gpt-1.55b") == replace(from_config, temporaries=0.0)  # as published


def test_diffusers_dit_config_gives_parameter_counts(tmp_path):
    pytest.importorskip("diffusers")
    from tests.support.model_folders import load_denoiser, save_pipeline

    folder = save_pipeline(tmp_path, "dit") / "transformer"
    actual, model = presets.model(folder), load_denoiser(folder, "dit")
    assert actual.parameters == sum(p.numel() for p in model.parameters())
    assert actual.blocks[0].parameters == sum(
        p.numel() for p in model.transformer_blocks[0].parameters()
    )
    assert actual.sample_tokens == 16 and len(actual.blocks) == 2


def test_an_unknown_model_type_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"'mamba'.*gpt2.*llama.*qwen3"):
        shape_from_config({"model_type": "mamba", "hidden_size": 8}, "x")
    with pytest.raises(ConfigError, match="None"):
        shape_from_config({}, "x")
    with pytest.raises(ConfigError, match=r"model_type \['llama'\] has no shape here"):
        shape_from_config({"model_type": ["llama"]}, "x")
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 8, "n_positions": 8}
    with pytest.raises(ConfigError, match="resid_pdrop is 'some', wants a number"):
        shape_from_config({"model_type": "gpt2", **sizes, "resid_pdrop": "some"}, "x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "does not say hidden_size"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers is '32'"),
    ],
)
def test_rejects_missing_and_wrong_keys(change, message):
    data = {"model_type": "llama", **GROUPED_SIZES, **change}
    with pytest.raises(ConfigError, match=message):
        shape_from_config(data, "x")
