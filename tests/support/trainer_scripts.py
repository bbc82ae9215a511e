"""The standard Trainer script, which differs only in the Trainer that it imports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, TrainingArguments

pytest.importorskip("accelerate", reason="Trainer needs the extra: pip install 'lohan[hf]'")
import transformers

from tests.support.small_models import small_model

SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "learning_rate": 3e-3,
    "weight_decay": 0.1,
    "warmup_steps": 3,
    "lr_scheduler_type": "cosine",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
}


def examples(count: int, *, vocab: int = 131, seed: int = 1) -> list[dict[str, list[int]]]:
    """Token lists of different lengths, so that batches are padded."""
    generator = torch.Generator().manual_seed(seed)
    created = []
    for number in range(count):
        length = 6 + (5 * number) % 9
        created.append(
            {"input_ids": torch.randint(3, vocab, (length,), generator=generator).tolist()}
        )
    return created


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
        mask[number, : len(row["input_ids"])] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def script(kind: type, out: Path, *, model: nn.Module | None = None, **changes: Any) -> Any:
    """Run the standard causal-LM script; only the imported Trainer differs."""
    options = {
        key: changes.pop(key)
        for key in ("callbacks", "compute_metrics", "resume")
        if key in changes
    }
    resume = options.pop("resume", None)
    args = TrainingArguments(str(out), **{**SETTINGS, "max_steps": 6, **changes})
    trainer = kind(
        model=model or small_model("llama"),
        args=args,
        train_dataset=examples(20),
        eval_dataset=examples(10, seed=2),
        data_collator=collate,
        **options,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def logged(trainer: Any, name: str) -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def assert_alike(actual: Any, expected: Any, *, limit: float = 1e-4) -> None:
    for name in ("loss", "grad_norm", "eval_loss", "learning_rate"):
        assert logged(actual, name) == pytest.approx(logged(expected, name), rel=limit), name
    assert [row["step"] for row in actual.state.log_history] == [
        row["step"] for row in expected.state.log_history
    ]


def new_trainer(kind: type, out: Path, *, model: nn.Module | None = None, **changes: Any) -> Any:
    """Return a Trainer that has not trained."""
    names = ("eval_dataset", "compute_metrics", "compute_loss_func", "model_init", "lohan")
    options = {name: changes.pop(name) for name in names if name in changes}
    options.setdefault("eval_dataset", examples(10, seed=2))
    if kind is transformers.Trainer:
        options.pop("lohan", None)
    if "model_init" not in options:
        options["model"] = model or small_model("llama")
    args = TrainingArguments(str(out), **{**SETTINGS, "max_steps": 3, **changes})
    return kind(args=args, train_dataset=examples(20), data_collator=collate, **options)
