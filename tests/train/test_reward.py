"""Reward models against TRL's RewardTrainer in memory: losses, rewards and weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lohan.config import load_config
from lohan.data.dataset import order
from lohan.errors import ConfigError, DataError, ModelError
from lohan.train import reward
from lohan.train.run_folder import RunFolder
from lohan.train.trainer import resume, train
from lohan.util.display import Display
from tests.train.test_preference import PAIRS, RATED, ROWS, model, rows_of

STEPS, BATCH = 5, 4
assert model  # a fixture


def settings(model: Path, out: Path, **more: Any) -> Any:
    data = out.with_suffix(".jsonl")
    data.write_text("\n".join(map(json.dumps, PAIRS)))
    overrides = {
        "model": str(model), "data": [str(data)], "out": str(out), "task": "reward",
        "budget.host": "4MiB", "train.steps": STEPS, "train.batch": BATCH, "train.seq": 48,
        "train.lr": 1e-3, "train.schedule": "constant", "train.clip": 0.0, "train.eps": 1e-3,
        "train.weight_decay": 0.0, "train.beta2": 0.999, **more,
    }  # fmt: skip
    return load_config(None, overrides=overrides)


def in_memory(model: Path, config: Any, folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    trl = pytest.importorskip("trl", reason="compared with TRL: pip install 'lohan[trl]'")
    from datasets import Dataset as Table

    own = AutoModelForSequenceClassification.from_pretrained(
        model, num_labels=1, dtype=torch.float32
    )
    own.score.weight.data = reward.load(config, dtype="fp32").score.weight.data.clone()  # type: ignore[union-attr]
    args = trl.RewardConfig(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=BATCH,
        learning_rate=1e-3, lr_scheduler_type="constant", adam_epsilon=1e-3, max_grad_norm=0.0,
        logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, bf16=False,
        gradient_checkpointing=False, train_sampling_strategy="sequential", max_length=48,
    )  # fmt: skip
    trainer = trl.RewardTrainer(
        model=own, args=args, processing_class=AutoTokenizer.from_pretrained(model),
        train_dataset=Table.from_list([PAIRS[i] for i in order(0, 0, ROWS)]),
    )  # fmt: skip
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return rows, {name: p.detach() for name, p in own.named_parameters()}


def test_equal_to_trl_in_memory(model: Path, tmp_path: Path) -> None:
    config = settings(model, tmp_path / "run")
    train(config, Display())
    ours, (theirs, weights) = rows_of(tmp_path / "run"), in_memory(model, config, tmp_path / "trl")
    for name, their in (
        ("loss", "loss"), ("reward_margin", "margin"), ("reward_accuracy", "accuracy"),
    ):  # fmt: skip
        found = [row[name] for row in ours]
        np.testing.assert_allclose(found, [row[their] for row in theirs], rtol=2e-5, atol=2e-6)
    exported = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert exported.keys() == weights.keys()
    for name, value in exported.items():
        torch.testing.assert_close(value, weights[name], rtol=1e-4, atol=1e-5)
    # What was exported is a reward model, and goes on as one.
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model")
    assert type(again).__name__ == "LlamaForSequenceClassification" and again.num_labels == 1
    torch.testing.assert_close(again.score.weight.data, exported["score.weight"])
    second = settings(tmp_path / "run" / "model", tmp_path / "second", **{"train.steps": 1})
    train(second, Display())
    assert rows_of(tmp_path / "second")[0]["loss"] < ours[0]["loss"]


def test_a_resumed_run_and_pairs_held_back(model: Path, tmp_path: Path) -> None:
    more = {"eval.split": 0.2, "eval.every": 2}
    train(settings(model, tmp_path / "whole", **more, **{"train.steps": 4}), Display())
    train(settings(model, tmp_path / "parts", **more, **{"train.steps": 2}), Display())
    resume(RunFolder(tmp_path / "parts"), Display(), steps=4)
    ours, whole = rows_of(tmp_path / "parts"), rows_of(tmp_path / "whole")
    losses = [[row["loss"] for row in rows if "loss" in row] for rows in (ours, whole)]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    assert sum("eval_loss" in row for row in ours) == 2


def test_what_cannot_be_had_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--lora with --task reward: the new head must learn"):
        train(settings(model, tmp_path / "a", **{"train.lora": 4}), Display())
    other = tmp_path / "rated.jsonl"
    other.write_text("\n".join(map(json.dumps, RATED)))
    with pytest.raises(DataError, match=r"has prompt\+completion\+label, --task reward wants"):
        train(settings(model, tmp_path / "b", data=[str(other)]), Display())
    three = tmp_path / "three"
    three.mkdir()
    raw = json.loads((model / "config.json").read_text())
    raw |= {"architectures": ["LlamaForSequenceClassification"], "num_labels": 3}
    (three / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match="with 3 labels is no reward model"):
        reward.load(settings(three, tmp_path / "c"), dtype="fp32")
