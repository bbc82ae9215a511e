"""A run with evaluations, its inputs and its results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from lohan.config import load_config
from lohan.train import trainer
from lohan.train.run_folder import RunFolder, eval_rows, step_rows
from tests.support.random_checkpoint import write_random_checkpoint
from tests.support.recording_display import Watch
from tests.support.word_model import write_rows

STEPS = 6


@pytest.fixture(name="inputs", scope="module")
def inputs_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def write_inputs(folder: Path) -> Path:
    """Write a tiny Llama with dropout, training data, and other data for evaluation."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attention_dropout=0.2,
        bos_token_id=1,
        eos_token_id=2,
    )
    write_random_checkpoint(folder / "model", config)
    for name, shift in (("data", 0), ("held", 3)):
        rows = [
            {"input_ids": [(i * j + shift) % 64 for j in range(1, 6 + i % 9)]} for i in range(9)
        ]
        write_rows(folder / f"{name}.jsonl", rows)
    return folder


def settings_for(inputs: Path, out: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": inputs / "model",
        "data": inputs / "data.jsonl",
        "out": out,
        "budget.host": "400KiB",
        "train.steps": STEPS,
        "train.batch": 2,
        "train.micro_batch": 1,
        "train.seq": 16,
        "train.lr": 1e-3,
        "train.activations": "recompute",
        **{name.replace("__", "."): value for name, value in more.items()},
    }


def run(inputs: Path, out: Path, **more: Any) -> Watch:
    shown = Watch()
    trainer.train(load_config(None, overrides=settings_for(inputs, out, **more)), shown)
    return shown


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def climbing(inputs: Path, out: Path, **more: Any) -> dict[str, Any]:
    """Return a run whose evaluation gets worse, since it learns other answers than expected."""
    return settings_for(
        inputs,
        out,
        train__steps=12,
        train__lr=2e-2,
        train__schedule="constant",
        eval__data=inputs / "held.jsonl",
        eval__every=1,
        eval__early_stop=3,
        output__export_best=True,
        **more,
    )


def everything(out: Path) -> dict[str, Any]:
    """Return everything that must not depend on interruptions."""
    folder = RunFolder(out)
    samples = out / "samples.jsonl"
    return {
        "steps": [(row["step"], row["loss"]) for row in step_rows(folder)],
        "evaluations": [(row["step"], row["eval_loss"]) for row in eval_rows(folder)],
        "model": weights(folder.model),
        "best": weights(folder.best),
        "samples": samples.read_text() if samples.exists() else "",
    }


def options(settings: dict[str, Any]) -> list[str]:
    named = {"model", "data", "out"}
    created: list[str] = []
    for key, value in settings.items():
        if key in named:
            created += [f"--{key}", str(value)]
        else:
            text = value if not isinstance(value, (bool, Path)) else json.dumps(value, default=str)
            created += ["--set", f"{key}={text}"]
    return created
