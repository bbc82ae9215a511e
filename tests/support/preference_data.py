"""Rows of preferences, and a tiny model with a tokenizer for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from tests.support.random_checkpoint import write_random_checkpoint
from tests.support.tokenizer_folders import save_tokenizer

STEPS, BATCH, ROWS = 20, 2, 40
PAIRS = [
    {"prompt": f"ask {i}: ", "chosen": "yes " * (1 + i % 3), "rejected": "no" * (1 + i % 4)}
    for i in range(ROWS)
]
RATED = [
    {"prompt": f"ask {i}: ", "completion": f"{i % 7} " * (1 + i % 3), "label": i % 3 != 0}
    for i in range(ROWS)
]


@pytest.fixture(name="model", scope="module")
def model_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preference") / "model"
    config = LlamaConfig(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    write_random_checkpoint(folder, config)
    return save_tokenizer(folder)


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
