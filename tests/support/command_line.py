"""The inputs and options of a tiny training by command line, and what a refusal looks like."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import LlamaConfig

from tests.support.forked_commands import Ended
from tests.support.random_checkpoint import write_random_checkpoint

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
)


@pytest.fixture(name="model", scope="module")
def model_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs") / "model"
    write_random_checkpoint(folder, CONFIG)
    return folder


@pytest.fixture(name="data", scope="module")
def data_fixture(model: Path) -> Path:
    file = model.parent / "data.jsonl"
    rows = [{"input_ids": [(i * j) % 64 for j in range(1, 12)]} for i in range(20)]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def arguments(model: Path, data: Path, out: Path, *more: object) -> list[object]:
    given = ["train", "--model", model, "--data", data, "--out", out, "--host", "64MiB"]
    return [*given, "--steps", 2, "--batch", 2, "--seq", 16, *more]


def snapshot(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


def refused(ended: Ended, *patterns: str) -> None:
    """One message, which holds every pattern."""
    assert ended.code == 2, ended
    assert "Traceback" not in ended.err + ended.out
    assert ended.err.startswith("lohan: ") and ended.err.count("lohan: ") == 1
    assert ended.err.rstrip().count("\n") == 0, ended.err
    for pattern in patterns:
        assert re.search(pattern, ended.err), (pattern, ended.err)


@pytest.fixture(name="place")
def place_fixture(tmp_path: Path):
    """Create a folder in which a refused command must leave nothing new."""
    folder = tmp_path / "place"
    folder.mkdir()
    return folder
