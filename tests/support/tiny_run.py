"""A run of one second: its inputs, the options of `lohan train`, and its result.

The result must not depend on how often the run was interrupted.
"""

from __future__ import annotations

import json
from pathlib import Path

STEPS = 6
Result = tuple[bytes, list[tuple[int, float, float]]]


def write_inputs(folder: Path, *, vocab_size: int = 64) -> Path:
    """Write a tiny Llama with dropout, and tokenised data of different lengths."""
    from transformers import LlamaConfig

    from tests.support.random_checkpoint import write_random_checkpoint

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attention_dropout=0.1,
        bos_token_id=1,
        eos_token_id=2,
    )
    write_random_checkpoint(folder / "model", config)
    rows = [{"input_ids": [(i * j) % 64 for j in range(1, 6 + i % 11)]} for i in range(20)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def arguments(inputs: Path, out: Path, *more: object) -> list[object]:
    """Return the command line of the run.

    The activations are given, so that the run does not replan by the clock and its writes come
    in the same order each time.
    """
    return [
        "--model",
        inputs / "model",
        "--data",
        inputs / "data.jsonl",
        "--out",
        out,
        "--host",
        "400KiB",
        "--steps",
        STEPS,
        "--batch",
        2,
        "--micro-batch",
        1,
        "--seq",
        16,
        "--lr",
        "1e-3",
        "--weight-decay",
        "0.1",
        "--activations",
        "recompute",
        *more,
    ]


def result(out: Path) -> Result:
    """Return the exported weights and the rows of all steps, without those of evaluations."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    weights = (out / "model" / "model.safetensors").read_bytes()
    return weights, [(row["step"], row["loss"], row["lr"]) for row in rows if "loss" in row]
