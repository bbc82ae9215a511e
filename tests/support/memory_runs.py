"""A model large enough that its memory can be compared with the plan."""

from __future__ import annotations

from pathlib import Path

from transformers import LlamaConfig

from tests.support.model_families import save_model

WITHIN = 0.05


def model_folder(path: Path, *, hidden: int, layers: int, vocabulary: int) -> Path:
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=11 * hidden // 4,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocabulary,
        use_cache=False,
        tie_word_embeddings=False,
    )
    save_model(path, config, seed=5)
    return path
