"""A Trainer script with another import has the same losses, logs and checkpoints."""

from __future__ import annotations

import gc
import logging
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, TrainerCallback, TrainingArguments

pytest.importorskip("accelerate", reason="Trainer needs the extra: pip install 'lohan[hf]'")

import lohan
import lohan.hf
from lohan.engine import replanning
from lohan.errors import StoreError
from lohan.hf.arguments import REFUSED
from lohan.hf.mixin import merged, shapes_for
from lohan.hf.stores import stored_world_size
from lohan.store.files import IDENTITY
from tests.support import process_hooks
from tests.support.delayed_runs import PlanTuning, tune_plans
from tests.support.generated_cases import thinned
from tests.support.models import FAMILY_CONFIGS, FAMILY_VOCAB, save_model, small_model
from tests.support.trainer_scripts import (
    TRAINER_SETTINGS,
    assert_same_log,
    collate_padded,
    logged_values,
    run_trainer,
    saved_weights,
    token_examples,
)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"eval_strategy": "steps", "eval_steps": 3}, id="evaluation"),
        pytest.param(
            {
                "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": 3,
                "max_grad_norm": 0.5,
                "num_train_epochs": 2,
                "max_steps": -1,
            },
            id="accumulation",
        ),
        pytest.param(
            {
                "gradient_checkpointing": True,
                "lr_scheduler_type": "reduce_lr_on_plateau",
                "eval_strategy": "steps",
                "eval_steps": 2,
            },
            id="plateau",
            marks=pytest.mark.slow,
        ),
        pytest.param({"label_smoothing_factor": 0.1}, id="smoothing", marks=pytest.mark.slow),
    ],
)
def test_the_same_losses_with_another_import(changes, tmp_path):
    reference = run_trainer(transformers.Trainer, tmp_path / "theirs", **changes)
    actual = run_trainer(lohan.hf.Trainer, tmp_path / "ours", **changes)
    assert actual.session.step == actual.state.global_step == reference.state.global_step
    assert len(logged_values(actual, "loss")) >= 6
    assert_same_log(actual, reference)
    reference.save_model()
    actual.save_model()
    expected, result = saved_weights(tmp_path / "theirs"), saved_weights(tmp_path / "ours")
    assert expected.keys() == result.keys()
    assert max((expected[n] - result[n]).abs().max().item() for n in expected) < 2e-5


def test_a_training_plans_again_as_a_run_does(tmp_path, monkeypatch, caplog):
    """A Trainer replans as `lohan train` does, with the bits of a run without overlap.

    It replans after its third step, which follows an evaluation.
    """
    limit = {"max_grad_norm": 1.0, "max_steps": 8}
    plainly = partial(lohan.hf.Trainer, lohan=lohan.hf.LohanArguments(overlap=False))
    plain = run_trainer(plainly, tmp_path / "plain", **limit)
    for name in ("make_plan", "REPLAN_SPEEDUP"):  # put back at the end
        monkeypatch.setattr(replanning, name, getattr(replanning, name))
    process_hooks.replan_at_once()
    with caplog.at_level(logging.INFO, logger="lohan.hf.mixin"):
        actual = run_trainer(
            lohan.hf.Trainer, tmp_path / "ours", eval_strategy="steps", eval_steps=2, **limit
        )
    assert "after step 3: measured the first" in caplog.text
    assert actual.session.plan.kept and not plain.session.plan.kept
    for name in ("loss", "grad_norm"):
        assert logged_values(actual, name) == logged_values(plain, name)


@pytest.mark.parametrize(("store", "world"), [("lohan-store-rank0of2", 2), ("lohan-store", 1)])
def test_stores_of_other_processes_are_found(store, world, tmp_path):
    """Resuming with another number of processes names this as the reason."""
    (tmp_path / store).mkdir()
    (tmp_path / store / IDENTITY).write_text("")
    (tmp_path / "lohan-store-rank0of3-activations").mkdir()  # left by a kill
    (tmp_path / "lohan-store-rank0of3-activations" / IDENTITY).write_text("")
    for name in ("lohan-store", "lohan-store-rank1of3"):
        assert stored_world_size(tmp_path / name) == world
    if world == 2:
        (tmp_path / "checkpoint-2").mkdir()
        transformers.TrainerState(global_step=2).save_to_json(
            str(tmp_path / "checkpoint-2" / "trainer_state.json")
        )
        with pytest.raises(StoreError, match="with 2 processes, and this one has 1; resume"):
            run_trainer(lohan.hf.Trainer, tmp_path, resume=str(tmp_path / "checkpoint-2"))


class Speculated(TrainerCallback):
    def __init__(self) -> None:
        self.trainer: Any = None
        self.counts: list[tuple[int, int]] = []

    def on_step_begin(self, args, state, control, **_):
        """However many steps were clipped."""
        if self.trainer.session is None:
            return  # the first one attaches
        speculation = self.trainer.session.executor.clipping
        speculation._plan = replace(speculation._plan, most_clipped=1.0)

    def on_step_end(self, args, state, control, **_):
        actual = self.trainer.session.executor.clipping.counts
        self.counts.append((actual.get("speculated", 0), actual.get("rolled_back", 0)))


class Counting(lohan.hf.Trainer):
    """Records for every step whether it was clipped and run again."""

    def __init__(self, **named: Any) -> None:
        self.way = Speculated()
        super().__init__(**named, callbacks=[self.way])
        self.way.trainer = self


class WithOwnLoss(Counting):
    def compute_loss(self, *given, **named):
        return super().compute_loss(*given, **named)


def test_a_clipped_step_is_run_again(tmp_path, monkeypatch):
    """A clipped step runs again and has the bits of a step that waits for the norm.

    Held gradients would go to SSD, so updates do not wait. A user-defined loss may have other
    effects, so it runs once.
    """
    tune_plans(monkeypatch, PlanTuning(cached=0.4))
    monkeypatch.setenv("LOHAN_COMMIT_EVERY", "step")

    def run(name: str, limit: float, *, overlap: bool = True, kind: type = Counting) -> Any:
        model = small_model("llama")
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.2
        arguments = lohan.hf.LohanArguments(overlap=overlap, activations="recompute")  # one plan
        result, out = partial(kind, lohan=arguments), tmp_path / name
        trainer = run_trainer(result, out, model=model, max_steps=9, max_grad_norm=limit)
        trainer.save_model(out)
        return trainer

    norms = logged_values(run("norms", 1e9, overlap=False), "grad_norm")
    limit = (max(norms[3:-1]) + norms[-1]) / 2  # the last step is clipped, some before are not
    assert max(norms[3:-1]) < 0.97 * norms[-1]
    waits, actual = run("waits", limit, overlap=False), run("ours", limit)
    assert actual.way.counts[-2:] == [(1, 0), (1, 1)]
    for name in ("loss", "grad_norm"):
        assert logged_values(actual, name) == logged_values(waits, name)
    expected, result = saved_weights(tmp_path / "waits"), saved_weights(tmp_path / "ours")
    assert all(torch.equal(expected[name], result[name]) for name in expected)
    assert run("own", limit, kind=WithOwnLoss).way.counts[-1] == (0, 0)


def test_a_log_of_gradients_changes_no_bit_and_its_checkpoints_resume(tmp_path):
    """Checkpoints are saved at steps 3 and 6, between two writes of the full state."""
    saves = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}

    def run(log: str | int, **changes: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
        arguments = lohan.hf.LohanArguments(log_gradients=log, activations="recompute")
        kind, out = partial(lohan.hf.Trainer, lohan=arguments), tmp_path / str(log)
        trainer = run_trainer(kind, out, **saves, **changes)
        assert trainer.session.plan.log_gradients == (0 if log == "off" else log)
        trainer.save_model(tmp_path / "saved")
        return logged_values(trainer, "loss"), saved_weights(tmp_path / "saved")

    losses, expected = run("off")
    for changes in ({}, {"resume": str(tmp_path / "4" / "checkpoint-3")}):
        actual, result = run(4, **changes)
        assert actual == losses
        assert all(torch.equal(expected[name], result[name]) for name in expected)


class Count(TrainerCallback):
    def __init__(self) -> None:
        self.steps, self.rates = 0, []

    def on_optimizer_step(self, args, state, control, optimizer=None, **_):
        self.steps += 1
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == 4


def test_callbacks_and_an_early_stop(tmp_path):
    count, expected = Count(), Count()
    actual = run_trainer(lohan.hf.Trainer, tmp_path / "ours", callbacks=[count])
    run_trainer(transformers.Trainer, tmp_path / "theirs", callbacks=[expected])
    assert (count.steps, actual.session.step) == (4, 4)
    assert count.rates == expected.rates


def test_metrics_of_predictions(tmp_path):
    def accuracy(prediction):
        hits = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
        return {"hits": float(hits[prediction.label_ids[:, 1:] != -100].mean())}

    runs = [
        run_trainer(
            kind,
            tmp_path / kind.__module__,
            compute_metrics=accuracy,
            max_steps=3,
            eval_strategy="steps",
            eval_steps=3,
        )
        for kind in (lohan.hf.Trainer, transformers.Trainer)
    ]
    assert logged_values(runs[0], "eval_hits") == logged_values(runs[1], "eval_hits")
    assert logged_values(runs[0], "eval_loss") == pytest.approx(
        logged_values(runs[1], "eval_loss"), rel=1e-4
    )


class Stop(Exception):
    pass


class Ends(TrainerCallback):
    """A callback that stops after step 2, or ends the process after step 3."""

    def __init__(self, *, dies: bool) -> None:
        self.dies = dies

    def on_step_end(self, args, state, control, **_):
        if self.dies and state.global_step == 3:
            raise Stop
        control.should_training_stop = not self.dies and state.global_step == 2


@pytest.mark.parametrize("dies", [False, True])
def test_resumes_after_a_stop_and_after_a_crash(dies, tmp_path):
    """No step is repeated after a stop at a checkpoint or a crash beyond it."""
    changes = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    whole = run_trainer(lohan.hf.Trainer, tmp_path / "whole", **changes)
    with pytest.raises(Stop) if dies else nullcontext():
        run_trainer(lohan.hf.Trainer, tmp_path / "parts", callbacks=[Ends(dies=dies)], **changes)
    gc.collect()  # the first Trainer lets the store go
    rest = run_trainer(lohan.hf.Trainer, tmp_path / "parts", resume=True, **changes)
    assert rest.session.step == rest.state.global_step == 6
    steps = [row["step"] for row in rest.state.log_history if "loss" in row]
    assert steps == ([1, 2, 4, 5, 6] if dies else [1, 2, 3, 4, 5, 6])
    for name in ("loss", "learning_rate", "grad_norm"):
        expected = dict(enumerate(logged_values(whole, name), 1))
        assert logged_values(rest, name) == [expected[step] for step in steps], name
    whole.save_model()
    rest.save_model()
    expected = saved_weights(tmp_path / "whole")
    actual = saved_weights(tmp_path / "parts")
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_checkpoint_folder_holds_model_weights_without_optimizer(tmp_path):
    trainer = run_trainer(lohan.hf.Trainer, tmp_path, save_strategy="steps", save_steps=3)
    actual = saved_weights(tmp_path / "checkpoint-6")
    trainer.save_model(str(tmp_path / "last"))
    last = saved_weights(tmp_path / "last")
    assert all(torch.equal(actual[name], last[name]) for name in last)
    assert (tmp_path / "checkpoint-3" / "trainer_state.json").is_file()
    assert not (tmp_path / "checkpoint-3" / "optimizer.pt").exists()


def test_trains_model_of_lohan_load_with_budget_from_environment(tmp_path, monkeypatch):
    """Built by lohan.load, budget and drives from the environment."""
    save_model(tmp_path / "base", FAMILY_CONFIGS["llama"])
    monkeypatch.setenv("LOHAN_HOST", "64MiB")
    monkeypatch.setenv("LOHAN_SSD", str(tmp_path / "drive"))
    model = lohan.load(tmp_path / "base")
    args = TrainingArguments(str(tmp_path / "out"), **{**TRAINER_SETTINGS, "max_steps": 3})
    trainer = lohan.hf.Trainer(
        model=model,
        args=args,
        train_dataset=token_examples(12, vocab=FAMILY_VOCAB),
        data_collator=collate_padded,
    )
    trainer.train()
    assert trainer.session.store.dirs[0].parent == tmp_path / "drive"
    assert trainer.session.context.host_bytes == 64 * 2**20
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    expected = transformers.Trainer(
        model=plain,
        args=TrainingArguments(str(tmp_path / "t"), **{**TRAINER_SETTINGS, "max_steps": 3}),
        train_dataset=token_examples(12, vocab=FAMILY_VOCAB),
        data_collator=collate_padded,
    )
    expected.train()
    assert logged_values(trainer, "loss") == pytest.approx(
        logged_values(expected, "loss"), rel=1e-4
    )


def test_bf16_is_a_type_of_weights_with_fp32_masters(tmp_path):
    actual = run_trainer(lohan.hf.Trainer, tmp_path / "ours", bf16=True, max_steps=4)
    expected = run_trainer(transformers.Trainer, tmp_path / "theirs", max_steps=4)
    assert actual.session.plan.dtype == "bf16"
    assert logged_values(actual, "loss") == pytest.approx(logged_values(expected, "loss"), rel=0.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim": "adafactor"}, "optim='adafactor' cannot be used"),
        ({"optim": "adamw_8bit"}, "optim='adamw_8bit' cannot be used"),
        ({"optim": "sgd", "optim_args": "dampening=0.1"}, "'dampening=0.1' cannot be used"),
        ({"torch_compile": True}, "blocks are compiled on accelerators only"),
    ],
)
def test_rejects_unsupported_arguments(changes, message, tmp_path):
    with pytest.raises(lohan.LohanError, match=message):
        run_trainer(lohan.hf.Trainer, tmp_path, **changes)


@pytest.mark.parametrize("momentum", thinned(["", "momentum=0.8,nesterov=True"], 1))
def test_sgd_is_that_of_transformers(momentum, tmp_path):
    changes = {"optim": "sgd", "optim_args": momentum or None, "learning_rate": 0.05}
    expected = run_trainer(transformers.Trainer, tmp_path / "theirs", **changes)
    actual = run_trainer(lohan.hf.Trainer, tmp_path / "ours", **changes)
    assert_same_log(actual, expected)
    assert actual.session.plan.kind.optimizer == "sgd"


def test_accepts_all_names_of_lion(tmp_path):
    collected = {}
    for name in ("lion_32bit", "paged_lion_8bit"):
        result = run_trainer(lohan.hf.Trainer, tmp_path / name, optim=name, learning_rate=1e-3)
        collected[name] = str(result.session.plan.kind), logged_values(result, "loss")
    kinds = [kind for kind, _ in collected.values()]
    assert kinds == ["lion with fp32 moments", "lion with int8 moments"]
    wide, narrow = (losses for _, losses in collected.values())
    assert narrow != wide and narrow == pytest.approx(wide, rel=0.01)
    more = lohan.hf.LohanArguments(moments="bf16")
    args = TrainingArguments(str(tmp_path / "bf16"), **TRAINER_SETTINGS, max_steps=1)
    trainer = lohan.hf.Trainer(
        model=small_model("llama"),
        args=args,
        train_dataset=token_examples(8),
        data_collator=collate_padded,
        lohan=more,
    )
    trainer.train()
    assert str(trainer.session.plan.kind) == "adamw with bf16 moments"


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_every_refusal_names_the_argument_and_a_reason(name, tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    setattr(args, name, "on")
    with pytest.raises(lohan.LohanError, match=f"^{name} cannot be used with lohan.hf: .{{20,}}"):
        lohan.hf.Trainer(small_model("llama"), args)


def test_refuses_resume_from_checkpoint_without_state(tmp_path):
    changes = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "save_only_model": True}
    run_trainer(lohan.hf.Trainer, tmp_path, **changes)
    gc.collect()
    with pytest.raises(lohan.LohanError, match=r"is of step 2, the store is at step 4.*only_model"):
        run_trainer(lohan.hf.Trainer, tmp_path, resume=str(tmp_path / "checkpoint-2"), **changes)


def test_merged_batches_are_filled_on_the_right():
    first = {"input_ids": torch.tensor([[5, 6]]), "labels": torch.tensor([[5, 6]])}
    second = {"input_ids": torch.tensor([[7, 8, 9]]), "labels": torch.tensor([[7, 8, 9]])}
    joined = merged([first, second])
    assert joined["input_ids"].tolist() == [[5, 6, 0], [7, 8, 9]]
    assert joined["labels"].tolist() == [[5, 6, -100], [7, 8, 9]]
    with pytest.raises(lohan.LohanError, match="'pixels' has shapes"):
        merged([{"pixels": torch.zeros(1, 2)}, {"pixels": torch.zeros(1, 3)}])


def test_the_plan_is_for_the_longest_batch():
    """Labels too: a model may need them, and attach leaves them out where its loss is sliced."""
    ids = torch.zeros(2, 5, dtype=torch.long)
    result = shapes_for({"input_ids": ids, "attention_mask": ids, "labels": ids}, 9)
    assert {name: tuple(t.shape) for name, t in result.items()} == {
        "input_ids": (2, 9),
        "attention_mask": (2, 9),
        "labels": (2, 9),
    }
