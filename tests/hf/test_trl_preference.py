"""TRL scripts for preferences and reward models work with another import.

Losses, weights and metrics are the same, and there is no second model.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    T5Config,
    T5ForConditionalGeneration,
)

from tests.support.generated_cases import thinned
from tests.support.trainer_scripts import (
    PAIR_ROWS,
    logged_values,
    run_preference_trainer,
    script_experts,
    script_model,
    script_tokenizer,
)

EXTRA = "trainers of preferences need the extra: pip install 'lohan[trl]'"
trl = pytest.importorskip("trl", reason=EXTRA)
datasets = pytest.importorskip("datasets", reason=EXTRA)

import lohan  # noqa: E402
import lohan.hf  # noqa: E402
from lohan.errors import ConfigError, DataError, ModelError  # noqa: E402
from lohan.hf import trl as ours_of_trl  # noqa: E402


def weights(trainer: Any, folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    trainer.save_model(str(folder))
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


NAMES = {
    "dpo": (
        "rewards/chosen",
        "rewards/rejected",
        "rewards/margins",
        "rewards/accuracies",
        "entropy",
        "logps/chosen",
        "logits/chosen",
        "logits/rejected",
        "mean_token_accuracy",
        "num_tokens",
    ),
    "kto": ("rewards/chosen", "rewards/rejected", "rewards/margins", "kl", "entropy"),
    "orpo": ("rewards/chosen", "rewards/margins", "rewards/accuracies", "nll_loss"),
    "cpo": ("rewards/chosen", "rewards/margins", "rewards/accuracies", "nll_loss", "logps/chosen"),
    "reward": ("accuracy", "margin", "mean_reward", "min_reward", "max_reward"),
}


def same(name: str, tmp_path: Path, **changes: Any) -> Any:
    reference, actual = (
        run_preference_trainer(name, tmp_path / str(ours), ours=ours, **changes)
        for ours in (False, True)
    )
    if changes.get("load_best_model_at_end"):  # once more, as the best one was
        reference.evaluate(), actual.evaluate()
    for key in ("loss", "eval_loss", "grad_norm", *NAMES[name]):
        first = int(key == "rewards/accuracies")  # before the first step both are equal, or nearly
        expected = logged_values(reference, key)[first:]
        assert logged_values(actual, key)[first:] == pytest.approx(expected, rel=2e-4, abs=2e-5), (
            key
        )
        assert expected, key
    after = weights(reference, tmp_path / "their-weights")
    result = weights(actual, tmp_path / "our-weights")
    if "peft" not in changes:  # the class that learnt, whatever its checkpoint was of
        configs = [tmp_path / f"{whose}-weights" / "config.json" for whose in ("their", "our")]
        named = [json.loads(file.read_text())["architectures"] for file in configs]
        assert named[0] == named[1]
    for key, value in result.items():
        torch.testing.assert_close(value, after[key], rtol=1e-3, atol=2e-5)
    return actual


CASES = {
    "dpo": ("dpo", {"load_best_model_at_end": True, "save_strategy": "steps", "save_steps": 2}),
    "kto": ("kto", {}),
    "orpo": ("orpo", {}),
    "reward": ("reward", {}),
}
MORE = {
    "several losses": (
        "dpo",
        {"loss_type": ["sigmoid", "ipo", "sft"], "loss_weights": [1, 0.1, 1]},
    ),
    "desensitised to length, weighted": ("dpo", {"ld_alpha": 0.5, "use_weighting": True}),
    "accumulated": ("dpo", {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}),
    "kto without distance": ("kto", {"loss_type": "apo_zero_unpaired"}),
    "cpo": ("cpo", {"cpo_alpha": 0.0}),
    "simpo": ("cpo", {"loss_type": "simpo", "cpo_alpha": 0.5}),
}


@pytest.mark.parametrize("case", [*CASES])
def test_the_same_numbers_with_another_import(case: str, tmp_path: Path) -> None:
    name, changes = CASES[case]
    same(name, tmp_path, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*MORE])
def test_other_losses_too(case: str, tmp_path: Path) -> None:
    name, changes = MORE[case]
    same(name, tmp_path, **changes)


@pytest.mark.parametrize("name", ["dpo", pytest.param("kto", marks=pytest.mark.slow)])
def test_an_adapter_is_switched_off_for_the_reference(name: str, tmp_path: Path) -> None:
    """The adapter is not zero at the start, but the reference is the base."""
    peft = pytest.importorskip("peft", reason="adapters need the extra: pip install 'lohan[peft]'")
    lora = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    actual = same(name, tmp_path, peft=lora)
    assert abs(logged_values(actual, "rewards/chosen")[0]) > 1e-3


@pytest.mark.parametrize("name", ["dpo", pytest.param("kto", marks=pytest.mark.slow)])
def test_a_resumed_training_keeps_its_reference(name: str, tmp_path: Path) -> None:
    settings: Any = {
        "eval_strategy": "no",
        "save_strategy": "steps",
        "save_steps": 2,
        "lr_scheduler_type": "constant",
    }
    whole = run_preference_trainer(name, tmp_path / "whole", ours=True, **settings, max_steps=4)
    first = run_preference_trainer(name, tmp_path / "parts", ours=True, **settings, max_steps=2)
    first.session.close()
    files = sorted((tmp_path / "parts").glob("lohan-reference-*.npy"))
    before = [file.read_bytes() for file in files]
    second = run_preference_trainer(
        name, tmp_path / "parts", ours=True, **settings, max_steps=4, resume=True
    )
    assert [file.read_bytes() for file in files] == before
    assert len(files) == 2
    assert logged_values(second, "loss")[2:] == logged_values(whole, "loss")[2:]
    second.session.close()
    files[0].unlink()
    with pytest.raises(DataError, match="log-probabilities are missing, and the model has"):
        run_preference_trainer(
            name, tmp_path / "parts", ours=True, **settings, max_steps=5, resume=True
        )


def test_evaluated_before_training_and_streamed_from_a_folder(tmp_path: Path) -> None:
    """`lohan.load` has no weights in memory; a reference that is the model: log 2."""
    script_model().save_pretrained(tmp_path / "model")
    trainer = run_preference_trainer(
        "dpo",
        tmp_path / "out",
        ours=True,
        train=False,
        start=lambda: lohan.load(tmp_path / "model"),
    )
    result = trainer.evaluate()
    assert result["eval_loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert result["eval_rewards/margins"] == pytest.approx(0, abs=1e-6)
    trainer.train()
    expected = run_preference_trainer("dpo", tmp_path / "theirs", ours=False)
    assert logged_values(trainer, "loss") == pytest.approx(
        logged_values(expected, "loss"), rel=1e-4
    )


@pytest.mark.slow
def test_metrics_of_logits_and_a_reference_of_ones_own(tmp_path: Path) -> None:
    def mean(prediction: Any) -> dict[str, float]:
        return {"mean": float(prediction.predictions.mean())}

    def other() -> Any:
        torch.manual_seed(7)
        result = script_model()
        for parameter in result.parameters():
            parameter.data += 0.02 * torch.randn_like(parameter)
        return result

    runs = [
        run_preference_trainer(
            "dpo",
            tmp_path / str(actual),
            ours=actual,
            max_steps=2,
            more={"compute_metrics": mean, "ref_model": other()},
        )
        for actual in (False, True)
    ]
    for name in ("loss", "eval_mean", "eval_loss", "rewards/chosen"):
        assert logged_values(runs[1], name) == pytest.approx(
            logged_values(runs[0], name), rel=2e-4
        ), name


@pytest.mark.slow
def test_the_auxiliary_loss_of_experts(tmp_path: Path) -> None:
    """The weight is that of the trainer's config."""
    changes: Any = {"router_aux_loss_coef": 0.2, "eval_strategy": "no", "max_steps": 2}
    runs = [
        run_preference_trainer(
            "kto", tmp_path / str(actual), ours=actual, start=script_experts, **changes
        )
        for actual in (False, True)
    ]
    for name in ("loss", "aux_loss", "grad_norm", "rewards/chosen"):
        assert logged_values(runs[1], name) == pytest.approx(
            logged_values(runs[0], name), rel=2e-4, abs=2e-5
        ), name


def test_no_full_logits_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lohan.engine.head import SlicedHead

    rows: list[int] = []
    result = SlicedHead._logits

    def watched(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        rows.append(hidden.shape[1])
        return result(self, hidden)

    monkeypatch.setattr(SlicedHead, "_logits", watched)
    trainer = run_preference_trainer(
        "dpo", tmp_path / "out", ours=True, max_steps=1, eval_strategy="no"
    )
    assert rows and max(rows) <= trainer.session.executor.plan.head_tokens


def test_rejects_unsupported_arguments(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sync_ref_model cannot be used"):
        run_preference_trainer("dpo", tmp_path / "a", ours=True, sync_ref_model=True)
    stream = datasets.Dataset.from_list(PAIR_ROWS).to_iterable_dataset()
    args = trl.DPOConfig(str(tmp_path / "b"), max_steps=1, use_cpu=True, bf16=False)
    with pytest.raises(ConfigError, match=r"needs a dataset with rows \(no IterableDataset"):
        lohan.hf.DPOTrainer(
            model=script_model().to("meta"),
            args=args,
            train_dataset=stream,
            processing_class=script_tokenizer(),
        )


@pytest.mark.parametrize("name", thinned(["dpo", "kto", "reward"], 0))
def test_streamed_data_without_an_adapter(name: str, tmp_path: Path) -> None:
    same(name, tmp_path, stream=True)


@pytest.mark.parametrize("name", ["orpo", "cpo"])
def test_rejects_preferences_of_an_encoder_decoder_model(name: str, tmp_path: Path) -> None:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    config = T5Config(vocab_size=len(script_tokenizer()), decoder_start_token_id=0, **sizes)
    with pytest.raises(ModelError, match="T5ForConditionalGeneration is an encoder-decoder model"):
        run_preference_trainer(
            name, tmp_path, ours=True, start=lambda: T5ForConditionalGeneration(config)
        )


@pytest.mark.slow
def test_a_stream_of_data_with_an_adapter(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="adapters need the extra: pip install 'lohan[peft]'")
    losses = []
    for actual in (False, True):
        kind = lohan.hf.DPOTrainer if actual else ours_of_trl.TheirDPO
        args = trl.DPOConfig(
            str(tmp_path / str(actual)),
            max_steps=2,
            use_cpu=True,
            bf16=False,
            report_to=[],
            logging_steps=1,
            per_device_train_batch_size=4,
            disable_tqdm=True,
            max_length=32,
            save_strategy="no",
            adam_epsilon=1e-4,
            learning_rate=3e-3,
        )
        trainer = kind(
            model=script_model(),
            args=args,
            processing_class=script_tokenizer(),
            train_dataset=datasets.Dataset.from_list(PAIR_ROWS).to_iterable_dataset(),
            peft_config=peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"),
        )
        trainer.train()
        losses.append(logged_values(trainer, "loss"))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_without_arguments_those_of_the_library_are_checked_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL's own would switch activation checkpointing on."""
    monkeypatch.chdir(tmp_path)
    make_config = partial(trl.DPOConfig, use_cpu=True, bf16=False)  # theirs are for a GPU
    monkeypatch.setattr("trl.trainer.dpo_trainer.DPOConfig", make_config)
    trainer = lohan.hf.DPOTrainer(
        model=script_model(),
        train_dataset=datasets.Dataset.from_list(PAIR_ROWS[:4]),
        processing_class=script_tokenizer(),
    )
    assert trainer.args.gradient_checkpointing is False and trainer.ref_model is None
