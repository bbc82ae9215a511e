"""A TRL SFTTrainer script with another import: the same losses, with and without an adapter."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

EXTRA = "SFTTrainer needs the extra: pip install 'lohan[trl]'"
trl = pytest.importorskip("trl", reason=EXTRA)
datasets = pytest.importorskip("datasets", reason=EXTRA)

import lohan  # noqa: E402
import lohan.hf  # noqa: E402
from tests.support.trainer_scripts import (  # noqa: E402
    logged_values,
    run_sft_trainer,
    script_experts,
    script_model,
)


@pytest.mark.parametrize(
    ("rows", "changes"),
    [
        ("text", {}),
        ("pairs", {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}),
        ("text", {"packing": True, "packing_strategy": "wrapped", "max_length": 16}),
    ],
    ids=["text", "prompt and completion", "packed"],
)
def test_the_same_losses_with_another_import(rows, changes, tmp_path):
    expected = run_sft_trainer(trl.SFTTrainer, tmp_path / "theirs", rows=rows, **changes)
    actual = run_sft_trainer(lohan.hf.SFTTrainer, tmp_path / "ours", rows=rows, **changes)
    names = ["loss", "eval_loss", "grad_norm", "learning_rate", "num_tokens", "entropy"]
    names += ["mean_token_accuracy", "eval_entropy", "eval_mean_token_accuracy"]
    if changes.get("gradient_accumulation_steps"):  # theirs are means of means over batches
        names = [name for name in names if "entropy" not in name and "accuracy" not in name]
    for name in names:
        assert logged_values(actual, name) == pytest.approx(
            logged_values(expected, name), rel=1e-4
        ), name
    assert len(logged_values(actual, "loss")) == 6


def test_with_an_adapter(tmp_path):
    peft = pytest.importorskip("peft", reason="adapters need the extra: pip install 'lohan[peft]'")
    runs = []
    for kind, name in ((trl.SFTTrainer, "theirs"), (lohan.hf.SFTTrainer, "ours")):
        lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        runs.append(run_sft_trainer(kind, tmp_path / name, peft=lora))
        runs[-1].save_model()
    reference, actual = runs
    assert logged_values(actual, "loss") == pytest.approx(
        logged_values(reference, "loss"), rel=1e-4
    )
    ours_loaded = peft.PeftModel.from_pretrained(script_model(), tmp_path / "ours")
    theirs_loaded = peft.PeftModel.from_pretrained(script_model(), tmp_path / "theirs")
    expected = dict(theirs_loaded.named_parameters())
    for name, parameter in ours_loaded.named_parameters():
        assert torch.allclose(parameter, expected[name], atol=2e-5), name


def test_resumed_beside_the_first_trainer_which_goes_with_its_last_name(tmp_path):
    """As in a notebook, the first trainer still exists; nothing else keeps it alive."""
    changes = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3, "eval_strategy": "no"}
    first = run_sft_trainer(lohan.hf.SFTTrainer, tmp_path, **changes)
    losses = logged_values(first, "loss")
    again = run_sft_trainer(
        lohan.hf.SFTTrainer, tmp_path, resume=tmp_path / "checkpoint-1", **changes
    )
    assert logged_values(again, "loss") == losses and first.session.closed
    reference = weakref.ref(again)
    del again
    gc.collect()
    assert reference() is None
    assert (
        logged_values(run_sft_trainer(lohan.hf.SFTTrainer, tmp_path, **changes), "loss") == losses
    )


def test_the_auxiliary_loss_of_experts_is_in_the_log(tmp_path, monkeypatch):
    """Over accumulated batches too, and with ours in the place of trl's."""
    expected = trl.SFTTrainer
    changes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3}
    runs = []
    for kind in (expected, lohan.hf.SFTTrainer):
        monkeypatch.setattr(trl, "SFTTrainer", kind)
        runs.append(
            run_sft_trainer(
                trl.SFTTrainer, tmp_path / kind.__module__, start=script_experts, **changes
            )
        )
    for name in ("loss", "aux_loss", "eval_aux_loss", "eval_loss", "grad_norm", "entropy"):
        assert logged_values(runs[1], name) == pytest.approx(
            logged_values(runs[0], name), rel=1e-4
        ), name
    assert len(logged_values(runs[1], "aux_loss")) == 3


def test_metrics_and_a_smoothed_loss(tmp_path):
    def mean(prediction: Any) -> dict[str, float]:
        return {"mean": float(prediction.predictions.mean())}

    names = ["loss", "eval_loss", "eval_mean", "entropy", "eval_entropy", "mean_token_accuracy"]
    runs = [
        run_sft_trainer(
            kind, tmp_path / kind.__module__, metrics=mean, label_smoothing_factor=0.1, max_steps=3
        )
        for kind in (trl.SFTTrainer, lohan.hf.SFTTrainer)
    ]
    for name in names:
        assert logged_values(runs[1], name) == pytest.approx(
            logged_values(runs[0], name), rel=1e-4
        ), name


def test_dft_loss_matches_trl(tmp_path):
    """This also holds after the best model was loaded, which restarts the executor."""
    best = {"load_best_model_at_end": True, "save_strategy": "steps", "save_steps": 3}
    runs = [
        run_sft_trainer(kind, tmp_path / kind.__module__, loss_type="dft", max_steps=3, **best)
        for kind in (trl.SFTTrainer, lohan.hf.SFTTrainer)
    ]
    after = [run.evaluate() for run in runs]
    for name in ("eval_loss", "eval_entropy"):
        assert after[1][name] == pytest.approx(after[0][name], rel=1e-4), name
    for name in ("loss", "eval_loss", "grad_norm", "entropy"):
        assert logged_values(runs[1], name) == pytest.approx(
            logged_values(runs[0], name), rel=1e-4
        ), name


def test_a_change_of_plan_leaves_the_loss_as_it_is(tmp_path):
    """The settings of head and executor are kept when other activations are kept."""
    settings = {"loss_type": "dft", "max_steps": 2, "eval_strategy": "no"}
    trainer = run_sft_trainer(lohan.hf.SFTTrainer, tmp_path, **settings)
    session, before = trainer.session, trainer.evaluate()["eval_loss"]
    session.head.ranks_apart, session.executor.record.mean_over = True, 3
    session.follow(session.plan)
    assert session.head.ranks_apart and session.executor.record.mean_over == 3
    session.executor.record.mean_over = 1
    result = trainer.evaluate()
    assert result["eval_loss"] == before and "eval_entropy" in result
