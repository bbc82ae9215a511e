"""`lohan` as several ranks, each a fork of the forge, as torchrun would start them."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from tests.support import forked_ranks
from tests.support.forked_commands import Ended, Forge, Run
from tests.support.random_checkpoint import write_random_checkpoint


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return int(place.getsockname()[1])


def start(forge: Forge, world: int, *args: object, **options: dict[int, Any]) -> list[Run]:
    """`options`: of the forge, by rank."""
    port = free_port()
    return [
        forge.start(
            *args,
            env=environment(rank, world, port) if world > 1 else None,
            **{name: by_rank[rank] for name, by_rank in options.items() if rank in by_rank},
        )
        for rank in range(world)
    ]


def run(forge: Forge, world: int, *args: object, **options: dict[int, Any]) -> list[Ended]:
    return [process.wait() for process in start(forge, world, *args, **options)]


def errors_of(ended: list[Ended]) -> str:
    """Return all error output, for an assertion."""
    return "\n".join(f"rank {n} ended with {e.code}: {e.err}" for n, e in enumerate(ended))


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def case(forge: Forge, world: int, name: str, folder: Path) -> list[Ended]:
    """Run a function of team_cases.py on every rank, or without ranks if there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    port, given = free_port(), {"LOHAN_CASE": str(folder)}
    processes = [
        forge.start(
            "--help",
            before=f"team_cases:{name}",
            env=given | (environment(rank, world, port) if world > 1 else {}),
        )
        for rank in range(world)
    ]
    return [process.wait() for process in processes]


def results_of(folder: Path, world: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(world)]


def assembled(parts: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Parameters from the shards of all ranks."""
    whole: dict[str, list[float]] = {}
    for rank in parts:
        for name, (begin, values) in rank["shards"].items():
            assert not values or len(whole.get(name, [])) == begin
            whole[name] = whole.get(name, []) + values
    return whole


STEPS = 10


@pytest.fixture(name="inputs", scope="module")
def inputs_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny Llama, and rows of different lengths: ranks have different target counts."""
    folder = tmp_path_factory.mktemp("inputs")
    config = LlamaConfig(
        vocab_size=80,
        hidden_size=32,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    write_random_checkpoint(folder / "model", config)
    dropping = LlamaConfig(**{**config.to_dict(), "attention_dropout": 0.1})
    write_random_checkpoint(folder / "dropping", dropping)
    rows = [{"input_ids": [(i * j) % 79 for j in range(1, 6 + i % 11)]} for i in range(24)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "held.jsonl").write_text("\n".join(map(json.dumps, rows[:7])))
    return folder


def arguments(
    inputs: Path, out: Path, *more: object, model: str = "model", steps: int = STEPS
) -> list[object]:
    return [
        "train",
        "--model",
        inputs / model,
        "--data",
        inputs / "data.jsonl",
        "--out",
        out,
        "--host",
        "3MiB",
        "--steps",
        steps,
        "--batch",
        5,
        "--micro-batch",
        1,
        "--seq",
        16,
        "--lr",
        "2e-3",
        "--weight-decay",
        "0.1",
        "--activations",
        "recompute",
        *more,
    ]


def weights(out: Path, folder: str = "model") -> dict[str, torch.Tensor]:
    return load_file(out / folder / "model.safetensors")


def assert_equal_runs(out: Path, other: Path, *, within: float = 2e-6) -> None:
    """Losses and norms of every step, and the weights at the end."""
    actual, wanted = forked_ranks.rows(out), forked_ranks.rows(other)
    keys = ("loss", "grad_norm") if "grad_norm" in wanted[0] else ("loss",)
    for key in keys:
        values = [row[key] for row in wanted]
        assert [row[key] for row in actual] == pytest.approx(values, rel=10 * within)
    lohan_result, expected = weights(out), weights(other)
    assert lohan_result.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(lohan_result[name], tensor, rtol=within, atol=within), name
