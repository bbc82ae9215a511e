"""Preference tuning against TRL's own trainers in memory, losses and weights, over 20 steps."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset as Table
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lohan.cli.tools import report as report_command
from lohan.config import load_config
from lohan.data.dataset import order
from lohan.errors import ConfigError, DataError, ModelError
from lohan.store.admin import remove
from lohan.tools.verify import verify
from lohan.train.run_folder import RunFolder
from lohan.train.task import mean_stats
from lohan.train.trainer import resume, train
from lohan.util.display import Display
from tests.support import ranks
from tests.support.forked_commands import Forge, metrics_rows
from tests.support.model_folders import save_tokenizer
from tests.support.training_runs import (
    PREFERENCE_PAIRS,
    PREFERENCE_ROWS,
    RATED_ANSWERS,
    PageElements,
    preference_model_fixture,  # noqa: F401 - a fixture
)

STEPS, BATCH = 20, 2


def with_start_token(model: Path, loss: str) -> Path:
    """Return the model with a start token, which TRL's older trainers always add."""
    if loss not in ("orpo", "simpo"):
        return model
    other = model.parent / "start-token"
    if not other.exists():
        shutil.copytree(model, other)
        save_tokenizer(other, bos=True)
    return other


def run(model: Path, out: Path, loss: str, **more: Any) -> list[dict[str, Any]]:
    data = out.with_suffix(".jsonl")
    data.write_text(
        "\n".join(map(json.dumps, RATED_ANSWERS if loss == "kto" else PREFERENCE_PAIRS))
    )
    overrides = {
        "model": str(model),
        "data": [str(data)],
        "out": str(out),
        "task": "preference",
        "preference.loss": loss,
        "budget.host": "2MiB",
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
    train(load_config(None, overrides=overrides), Display())
    return metrics_rows(out)


def in_memory(model: Path, loss: str, folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train on the same rows in the same order with TRL."""
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    rows = RATED_ANSWERS if loss == "kto" else PREFERENCE_PAIRS
    mixed = Table.from_list([rows[i] for i in order(0, 0, PREFERENCE_ROWS)])
    kinds: dict[str, Any] = {
        "dpo": (DPOConfig, DPOTrainer, {}),
        "ipo": (DPOConfig, DPOTrainer, {"loss_type": ["ipo"]}),
        "kto": (KTOConfig, KTOTrainer, {}),
        "orpo": (ORPOConfig, ORPOTrainer, {}),
        "simpo": (CPOConfig, CPOTrainer, {"loss_type": "simpo", "cpo_alpha": 0.0}),
    }
    config, trainer, more = kinds[loss]
    args = config(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-3,
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
        **more,
    )
    plain_model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model)
    result = trainer(model=plain_model, args=args, train_dataset=mixed, processing_class=tokenizer)
    result.train()
    losses = [row["loss"] for row in result.state.log_history if "loss" in row]
    return losses, {name: p.detach() for name, p in plain_model.named_parameters()}


LOSSES = [
    "dpo",
    *(pytest.param(x, marks=pytest.mark.slow) for x in ("ipo", "orpo", "simpo", "kto")),
]


@pytest.mark.parametrize("loss", LOSSES)
def test_equal_to_trl_in_memory(model: Path, tmp_path: Path, loss: str) -> None:
    model = with_start_token(model, loss)
    rows = run(model, tmp_path / "run", loss)
    losses, weights = in_memory(model, loss, tmp_path / "trl")
    np.testing.assert_allclose([row["loss"] for row in rows], losses, rtol=2e-5, atol=2e-6)
    exported = load_file(tmp_path / "run" / "model" / "model.safetensors")
    for name, value in exported.items():
        torch.testing.assert_close(value, weights[name], rtol=1e-4, atol=1e-5)
    assert {"reward_chosen", "reward_rejected"} <= rows[-1].keys()


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_resumed_runs_keep_their_reference(model: Path, tmp_path: Path, loss: str) -> None:
    """Made once, by the model before its first step; a second pass has it too."""
    more = {"train.steps": 6, "train.batch": 8}
    whole = run(model, tmp_path / "whole", loss, **more)
    run(model, tmp_path / "parts", loss, **{**more, "train.steps": 2})
    (result,) = (tmp_path / "parts" / "data").glob("reference-*.npy")
    before = result.read_bytes()
    resume(RunFolder(tmp_path / "parts"), Display(), steps=6)
    assert result.read_bytes() == before
    actual = [(row["step"], row["loss"]) for row in metrics_rows(tmp_path / "parts")]
    assert actual == [(row["step"], row["loss"]) for row in whole]
    result.unlink()
    with pytest.raises(DataError, match="log-probabilities are missing, and the model has"):
        resume(RunFolder(tmp_path / "parts"), Display(), steps=7)


def test_a_reference_of_another_start_is_not_taken_up(model: Path, tmp_path: Path) -> None:
    """A reference file that was left by a start with another model is not used.

    A damaged one is refused with a message.
    """
    more = {"train.steps": 1}
    wanted = run(model, tmp_path / "wanted", "dpo", **more)
    (result,) = (tmp_path / "wanted" / "data").glob("reference-*.npy")
    values = np.load(result)
    begun = tmp_path / "begun"
    shutil.copytree(tmp_path / "wanted", begun)
    remove(begun / "store")
    for path in ("metrics.jsonl", "journal.jsonl"):
        (begun / path).unlink()
    shutil.rmtree(begun / "model")
    np.save(begun / "data" / result.name, values + 1)
    outcome = run(model, begun, "dpo", **more)
    assert [row["loss"] for row in outcome] == [row["loss"] for row in wanted]
    assert np.array_equal(np.load(begun / "data" / result.name), values)
    for damaged in (b"", result.read_bytes()[:-4], b"PK"):
        result.write_bytes(damaged)
        with pytest.raises(DataError, match=r"reference-.*: damaged: .*restore it"):
            resume(RunFolder(tmp_path / "wanted"), Display(), steps=2)


def test_without_a_step_the_model_is_its_reference(model: Path, tmp_path: Path) -> None:
    rows = run(model, tmp_path / "run", "dpo", **{"train.steps": 1, "train.lora": 4})
    assert rows[0]["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert rows[0]["reward_margin"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_held_back_rows_are_evaluated_and_rewards_reported(
    model: Path, tmp_path: Path, loss: str
) -> None:
    more = {"train.steps": 3, "eval.split": 0.2, "eval.every": 1, "train.batch": 3}
    rows = run(model, tmp_path / "run", loss, **more)
    steps, held = [r for r in rows if "loss" in r], [r for r in rows if "eval_loss" in r]
    assert len(steps) == len(held) == 3
    assert len(list((tmp_path / "run" / "data").glob("reference-*.npy"))) == 2
    report_command([tmp_path / "run"], tmp_path / "report.html")
    page = PageElements((tmp_path / "report.html").read_text())
    charts = page.data["charts"]
    shown = {name: charts[name] for name in ("rewards", "margins", "accuracy") if name in charts}
    assert [line["name"] for line in shown["rewards"]] == [
        "chosen",
        "chosen, evaluation",
        "rejected",
        "rejected, evaluation",
    ]
    assert shown.keys() == ({"rewards"} if loss == "kto" else {"rewards", "margins", "accuracy"})
    for lines in shown.values():
        for line in lines:
            key = line["name"].removesuffix(", evaluation")
            prefix, of = ("eval_", held) if "evaluation" in line["name"] else ("", steps)
            reward_rows = [row for row in of if f"{prefix}reward_{key}" in row]
            assert line["x"] == [row["step"] for row in reward_rows]
            assert line["y"] == [row[f"{prefix}reward_{key}"] for row in reward_rows]
    if loss == "dpo":
        assert "of pairs right, last 3 steps" in page.shown
        last = held[-1]
        difference = last["eval_reward_chosen"] - last["eval_reward_rejected"]
        assert last["eval_reward_margin"] == pytest.approx(difference, abs=1e-6)
        assert last["eval_reward_accuracy"] * 8 == pytest.approx(
            round(last["eval_reward_accuracy"] * 8)
        )  # of all eight that were held back, in batches of three and two


def test_means_over_parts_count_the_rows_that_have_a_value() -> None:
    parts = [({"a": (1.0, 1.0)}, 3), ({"a": (5.0, 0.5), "b": (2.0, 0.25)}, 4), ({}, 1)]
    assert mean_stats(parts) == {"a": (13 / 5, 5 / 8), "b": (2.0, 1 / 8)}


def test_slices_of_the_head_do_not_matter(model: Path, tmp_path: Path) -> None:
    wide = run(model, tmp_path / "wide", "dpo", **{"train.steps": 3, "budget.host": "8MiB"})
    tight = run(model, tmp_path / "tight", "dpo", **{"train.steps": 3, "budget.host": "900KiB"})
    assert [r["loss"] for r in wide] == pytest.approx([r["loss"] for r in tight], rel=1e-6)


def test_data_of_the_other_kind_is_refused(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text("\n".join(map(json.dumps, RATED_ANSWERS)))
    with pytest.raises(DataError, match=r"--data has prompt\+completion\+label, --loss dpo wants"):
        run(model, tmp_path / "x", "dpo", data=[str(data)])


def test_a_model_with_a_loss_of_its_own_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its forward would ignore the loss it is given, and train on another one."""
    for module in ("attach", "context"):
        monkeypatch.setattr(f"lohan.engine.{module}.find_decoder", lambda model: None)
    with pytest.raises(ModelError, match="LlamaForCausalLM has a loss of its own"):
        run(model, tmp_path / "run", "dpo")


def test_verify_has_nothing_to_compare_with(model: Path) -> None:
    overrides = {"model": str(model), "data": ["d"], "out": "o", "task": "preference"}
    with pytest.raises(ConfigError, match="--task preference: plain transformers has no such loss"):
        verify(load_config(None, overrides=overrides), Display())


@pytest.mark.parametrize(
    "loss", ["kto", *(pytest.param(x, marks=pytest.mark.slow) for x in ("dpo", "orpo", "reward"))]
)
def test_two_ranks_learn_what_one_does(
    model: Path, forge: Forge, tmp_path: Path, loss: str
) -> None:
    """Also a mean over the whole batch that is part of a loss, and with unequal shares of it."""
    more = {"train.steps": 3, "budget.host": "6MiB", "train.batch": 3}
    task = ["reward"] if loss == "reward" else ["preference", "--loss", loss]
    of = {"task": "reward", "preference.loss": "dpo"} if loss == "reward" else {}
    alone = run(model, tmp_path / "one", loss, **more, **of)
    words = [
        "train",
        "--task",
        *task,
        "--model",
        model,
        "--data",
        tmp_path / "one.jsonl",
        "--out",
        tmp_path / "two",
        "--host",
        "6MiB",
        "--steps",
        3,
        "--batch",
        3,
        "--seq",
        48,
        "--lr",
        1e-3,
        "--schedule",
        "constant",
        "--clip",
        0,
        "--weight-decay",
        0,
        "--set",
        "train.eps=1e-3",
        "--set",
        "train.beta2=0.999",
    ]
    ended = ranks.run_ranks(forge, 2, *words)
    assert [e.code for e in ended] == [0, 0], ranks.errors_of_ranks(ended)
    both = metrics_rows(tmp_path / "two")
    names = [name for name in alone[0] if name == "loss" or name.startswith("reward")]
    assert {"reward_chosen", "reward_rejected"} & set(names)
    for name in names:
        expected = [row.get(name) for row in alone]
        assert [row.get(name) for row in both] == pytest.approx(expected, rel=1e-4, abs=1e-6), name
    one, two = (load_file(tmp_path / n / "model" / "model.safetensors") for n in ("one", "two"))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-5)
