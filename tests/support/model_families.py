"""Small configs of every supported family, and model folders made from them."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCAB = 96
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    **IDS,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
GPT_SIZES = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}


class Configs(dict[str, PreTrainedConfig]):
    """Every look gives a copy: models change theirs, and all tests share these."""

    def __getitem__(self, name: str) -> PreTrainedConfig:
        return copy.deepcopy(super().__getitem__(name))


CONFIGS = Configs(
    {
        "llama": LlamaConfig(**GROUPED),
        "llama3-rope": LlamaConfig(**GROUPED, rope_parameters=LLAMA3_ROPE),
        "yarn-rope": LlamaConfig(**GROUPED, rope_parameters=YARN_ROPE),
        "qwen2-tied": Qwen2Config(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
        "qwen3": Qwen3Config(**GROUPED),
        "mistral": MistralConfig(**GROUPED),
        "gpt2": GPT2Config(**GPT_SIZES, **IDS),
        "opt": OPTConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            word_embed_proj_dim=32,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            **IDS,
        ),
        "gemma": GemmaConfig(**GROUPED),
        "gemma2": Gemma2Config(**GROUPED),
        "gemma3": Gemma3TextConfig(**GROUPED),
        "gptj": GPTJConfig(**GPT_SIZES, **IDS, rotary_dim=4),
        "neox": GPTNeoXConfig(**SIZES),
    }
)


def save_model(folder: Path, config: PreTrainedConfig, *, seed: int = 0) -> PreTrainedModel:
    """Save a random model with save_pretrained and return it in evaluation mode."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    return model


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(24).view(2, 12) * 3 % VOCAB).logits
