"""Reward models against TRL's RewardTrainer in memory: losses, rewards and weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lohan.checkpoint.adapters import AdapterValues, base_of
from lohan.cli.train import export
from lohan.config import load_config
from lohan.data.dataset import order
from lohan.errors import ConfigError, DataError, ModelError
from lohan.train.preference import Reward
from lohan.train.run_folder import RunFolder
from lohan.train.trainer import resume, train
from lohan.util.display import Display
from tests.support.forked_commands import metrics_rows
from tests.support.training_runs import (
    PREFERENCE_PAIRS,
    PREFERENCE_ROWS,
    RATED_ANSWERS,
    preference_model_fixture,  # noqa: F401 - a fixture
)

peft = pytest.importorskip("peft", reason="adapters need the extra: pip install 'lohan[peft]'")
STEPS, BATCH = 5, 4


def settings(model: Path, out: Path, **more: Any) -> Any:
    data = out.with_suffix(".jsonl")
    data.write_text("\n".join(map(json.dumps, PREFERENCE_PAIRS)))
    overrides = {
        "model": str(model),
        "data": [str(data)],
        "out": str(out),
        "task": "reward",
        "budget.host": "4MiB",
        "train.steps": STEPS,
        "train.batch": BATCH,
        "train.seq": 48,
        "train.lr": 1e-3,
        "train.schedule": "constant",
        "train.clip": 0.0,
        "train.eps": 1e-3,
        "train.weight_decay": 0.0,
        "train.beta2": 0.999,
        **more,
    }
    return load_config(None, overrides=overrides)


def with_adapter(plain_model: Any, source_model: Any, config: Any) -> Any:
    """Return PEFT's adapter of a model, with the initial values of ours."""
    lora = peft.LoraConfig(
        r=config.train.lora,
        lora_alpha=2 * config.train.lora,
        target_modules="all-linear",
        task_type="SEQ_CLS",
    )
    plain_model = peft.get_peft_model(plain_model, lora)
    torch.manual_seed(config.seed)
    values = AdapterValues(source_model)
    for name in values.names():
        parameter = plain_model.get_parameter(name)
        parameter.data = values.read_flat(name, 0, parameter.numel()).view(parameter.shape)
    return plain_model


def in_memory(model: Path, config: Any, folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    trl = pytest.importorskip("trl", reason="compared with TRL: pip install 'lohan[trl]'")
    from datasets import Dataset as Table

    plain_model = AutoModelForSequenceClassification.from_pretrained(
        model, num_labels=1, dtype=torch.float32
    )
    result: Any = Reward().load(config, dtype="fp32")
    head = "score.original_module.weight" if config.train.lora else "score.weight"
    plain_model.score.weight.data = base_of(result).get_parameter(head).data.clone()
    if config.train.lora:
        plain_model = with_adapter(plain_model, result, config)
    args = trl.RewardConfig(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=config.train.lr,
        lr_scheduler_type="constant",
        adam_epsilon=1e-3,
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        train_sampling_strategy="sequential",
        max_length=48,
    )
    trainer = trl.RewardTrainer(
        model=plain_model,
        args=args,
        processing_class=AutoTokenizer.from_pretrained(model),
        train_dataset=Table.from_list([PREFERENCE_PAIRS[i] for i in order(0, 0, PREFERENCE_ROWS)]),
    )
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    if config.train.lora:
        return rows, peft.get_peft_model_state_dict(plain_model)
    return rows, {name: p.detach() for name, p in plain_model.named_parameters()}


def test_equal_to_trl_in_memory(model: Path, tmp_path: Path) -> None:
    config = settings(model, tmp_path / "run")
    train(config, Display())
    actual, (expected, weights) = (
        metrics_rows(tmp_path / "run"),
        in_memory(model, config, tmp_path / "trl"),
    )
    for name, their in (
        ("loss", "loss"),
        ("reward_margin", "margin"),
        ("reward_accuracy", "accuracy"),
    ):
        result = [row[name] for row in actual]
        np.testing.assert_allclose(result, [row[their] for row in expected], rtol=2e-5, atol=2e-6)
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
    assert metrics_rows(tmp_path / "second")[0]["loss"] < actual[0]["loss"]


def test_an_adapter_and_the_head_learn_as_with_peft(model: Path, tmp_path: Path) -> None:
    """The base is only read; what is exported are the adapter and the head, or all of it merged."""
    config = settings(model, tmp_path / "run", **{"train.lora": 4, "train.lr": 1e-2})
    train(config, Display())
    actual, (expected, weights) = (
        metrics_rows(tmp_path / "run"),
        in_memory(model, config, tmp_path / "trl"),
    )
    losses = [row["loss"] for row in actual]
    np.testing.assert_allclose(losses, [row["loss"] for row in expected], rtol=2e-5, atol=2e-6)
    assert losses[-1] < losses[0]
    exported = load_file(tmp_path / "run" / "model" / "adapter_model.safetensors")
    assert exported.keys() == weights.keys() and "base_model.model.score.weight" in exported
    for name, value in exported.items():
        torch.testing.assert_close(value, weights[name], rtol=1e-4, atol=1e-5)
    export(tmp_path / "run", out=tmp_path / "merged", merge=True)
    whole = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    base = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "run" / "model")
    ids = torch.arange(6)[None]
    with torch.no_grad():
        torch.testing.assert_close(whole(ids).logits, adapted(ids).logits, rtol=1e-5, atol=1e-6)
    # A head that has learnt before is not drawn anew: it comes from the folder.
    for name, more in (("plain", {}), ("again", {"train.lora": 4})):
        one = settings(tmp_path / "merged", tmp_path / name, **more, **{"train.steps": 1})
        train(one, Display())
    first = [metrics_rows(tmp_path / name)[0]["loss"] for name in ("plain", "again")]
    assert first[1] == pytest.approx(first[0], rel=1e-5) and first[0] < losses[0]


def test_a_resumed_run_and_pairs_held_back(model: Path, tmp_path: Path) -> None:
    more = {"eval.split": 0.2, "eval.every": 2}
    train(settings(model, tmp_path / "whole", **more, **{"train.steps": 4}), Display())
    train(settings(model, tmp_path / "parts", **more, **{"train.steps": 2}), Display())
    resume(RunFolder(tmp_path / "parts"), Display(), steps=4)
    actual, whole = metrics_rows(tmp_path / "parts"), metrics_rows(tmp_path / "whole")
    losses = [[row["loss"] for row in rows if "loss" in row] for rows in (actual, whole)]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    assert sum("eval_loss" in row for row in actual) == 2


def test_rejects_settings_without_a_meaning_for_rewards(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--sample-prompts: a reward model generates no text"):
        train(settings(model, tmp_path / "a", **{"sample.prompts": "x"}), Display())
    other = tmp_path / "rated.jsonl"
    other.write_text("\n".join(map(json.dumps, RATED_ANSWERS)))
    with pytest.raises(DataError, match=r"has prompt\+completion\+label, --task reward wants"):
        train(settings(model, tmp_path / "b", data=[str(other)]), Display())
    three = tmp_path / "three"
    three.mkdir()
    raw = json.loads((model / "config.json").read_text())
    raw |= {"architectures": ["LlamaForSequenceClassification"], "num_labels": 3}
    (three / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match="with 3 labels is no reward model"):
        Reward().load(settings(three, tmp_path / "c"), dtype="fp32")
