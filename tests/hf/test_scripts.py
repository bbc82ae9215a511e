"""Trainer scripts beyond a single training behave as with transformers in memory."""

from __future__ import annotations

import copy
import ctypes
import gc
import json
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForSequenceClassification, TrainingArguments

pytest.importorskip("accelerate", reason="Trainer needs the extra: pip install 'lohan[hf]'")

import lohan
import lohan.hf
from tests.support import HANG_S
from tests.support.models import SMALL_CONFIGS, small_model
from tests.support.trainer_scripts import (
    TRAINER_SETTINGS,
    collate_padded,
    logged_values,
    new_trainer,
    run_trainer,
    saved_weights,
    token_examples,
)

BOTH = (transformers.Trainer, lohan.hf.Trainer)


def same_weights(ours: Path, theirs: Path, *, limit: float = 2e-5) -> None:
    actual, expected = saved_weights(ours), saved_weights(theirs)
    assert actual.keys() == expected.keys()
    assert max((actual[n] - expected[n]).abs().max().item() for n in expected) < limit


# -- what evaluation computes ---------------------------------------------------------------------


def scaled(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs.logits[:, :-1].flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return 3.0 * loss / (num_items_in_batch or 1)


def of_ones_own(kind: type) -> type:
    class Own(kind):  # type: ignore[misc,valid-type]
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            logits = outputs.logits[:, :-1].flatten(0, 1)
            loss = nn.functional.cross_entropy(
                logits, inputs["labels"][:, 1:].flatten(), label_smoothing=0.2
            )
            return (loss, outputs) if return_outputs else loss

    return Own


OWN = (of_ones_own, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2})
FUNCTION = (lambda kind: kind, {"compute_loss_func": scaled})
SMOOTHED = (lambda kind: kind, {"label_smoothing_factor": 0.2})


@pytest.mark.parametrize(
    ("change", "changes", "metrics"),
    [
        pytest.param(*OWN, True, id="compute_loss"),
        pytest.param(*FUNCTION, True, id="compute_loss_func"),
        pytest.param(*SMOOTHED, False, id="label smoothing"),
        pytest.param(*OWN, False, id="compute_loss alone", marks=pytest.mark.slow),
        pytest.param(*FUNCTION, False, id="compute_loss_func alone", marks=pytest.mark.slow),
        pytest.param(*SMOOTHED, True, id="label smoothing with metrics", marks=pytest.mark.slow),
    ],
)
def test_evaluation_has_the_loss_of_training(change, changes, metrics, tmp_path):
    changes = {**changes, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
    if metrics:
        changes["compute_metrics"] = lambda found: {"mean": float(found.predictions.mean())}
    runs = []
    for kind in BOTH:
        runs.append(new_trainer(change(kind), tmp_path / kind.__module__, **changes))
        runs[-1].train()
    for name in ("loss", "eval_loss", *(["eval_mean"] if metrics else [])):
        assert len(logged_values(runs[1], name)) == 2
        assert logged_values(runs[1], name) == pytest.approx(
            logged_values(runs[0], name), rel=1e-4
        ), name


@pytest.mark.parametrize("label_smoothing_factor", [0.0, 0.1])
def test_losses_of_ones_own_see_fp32_logits_with_bf16(label_smoothing_factor, tmp_path):
    """Accelerate provides fp32 logits too; a loss of bf16 logits is rounded by up to 0.2 %."""
    seen, runs = [], []

    def noted(kind: type) -> type:
        class Own(kind):  # type: ignore[misc,valid-type]
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                outputs = model(**inputs)
                seen.append(outputs.logits.dtype)
                labels = inputs["labels"][:, 1:].flatten()
                loss = nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels)
                return (loss, outputs) if return_outputs else loss

        return kind if label_smoothing_factor else Own

    for kind in BOTH:
        changes = {"bf16": True, "label_smoothing_factor": label_smoothing_factor, "max_steps": 2}
        runs.append(new_trainer(noted(kind), tmp_path / kind.__module__, **changes))
        runs[-1].train()
    assert set(seen) <= {torch.float32} and runs[1].session.plan.dtype == "bf16"
    for name, limit in (("loss", 1e-3), ("grad_norm", 2e-2)):
        assert logged_values(runs[1], name) == pytest.approx(
            logged_values(runs[0], name), rel=limit
        ), name
    for item in runs[1].evaluate()["eval_loss"], *logged_values(runs[1], "loss"):
        assert item != torch.tensor(item).bfloat16().item()  # it is of fp32


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def test_the_mean_over_a_stream_whose_last_batch_is_short(tmp_path):
    collected = []
    for kind in BOTH:
        data = Stream(token_examples(10, seed=2))
        trainer = new_trainer(
            kind,
            tmp_path / kind.__module__,
            eval_dataset=data,
            per_device_eval_batch_size=4,
            max_steps=1,
        )
        trainer.train()
        collected.append(trainer.evaluate()["eval_loss"])
    assert collected[1] == pytest.approx(collected[0], rel=1e-5)


# -- what is saved --------------------------------------------------------------------------------


def test_the_type_of_the_model_is_what_is_saved(tmp_path):
    trainer = new_trainer(lohan.hf.Trainer, tmp_path, bf16=True, max_steps=2)
    trainer.train()
    assert trainer.session.plan.dtype == "bf16"
    trainer.save_model()
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == "float32"
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        values = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
    assert {value.dtype for value in values} == {torch.float32}
    assert any((value != value.bfloat16().float()).any() for value in values)  # the masters


def test_the_model_saves_and_copies_itself_after_training(tmp_path):
    trainer = new_trainer(lohan.hf.Trainer, tmp_path / "out")
    trainer.train()
    trainer.model.save_pretrained(tmp_path / "model")
    trainer.save_model(str(tmp_path / "trainer"))
    same_weights(tmp_path / "model", tmp_path / "trainer", limit=1e-12)
    copied = copy.deepcopy(trainer.model)
    expected = saved_weights(tmp_path / "model")
    assert all(torch.equal(p, expected[name]) for name, p in copied.named_parameters())


def test_saved_weights_are_replaced_by_later_ones(tmp_path):
    """The number of files changes, as with transformers; other files in the folder are kept."""
    trainer = new_trainer(lohan.hf.Trainer, tmp_path / "out", max_steps=1)
    trainer.train()
    place = tmp_path / "model"
    place.mkdir()
    (place / "notes.txt").write_text("mine")
    for size, count in (("20KB", None), ("5GB", 1), (30_000, None)):
        trainer.model.save_pretrained(place, max_shard_size=size)
        names = sorted(path.name for path in place.glob("*.safetensors*"))
        if count == 1:
            assert names == ["model.safetensors"]
        else:
            assert names[-1] == "model.safetensors.index.json" and len(names) > 2
            assert all(f"-of-{len(names) - 1:05d}." in name for name in names[:-1]), names
        same = transformers.AutoModelForCausalLM.from_pretrained(place)
        held = trainer.model.state_dict()
        assert all(torch.equal(p, held[name]) for name, p in same.named_parameters())
    assert (place / "notes.txt").read_text() == "mine"


def test_evaluation_in_a_smaller_type_is_that_of_training(tmp_path):
    runs = [
        new_trainer(lohan.hf.Trainer, tmp_path / str(x), bf16_full_eval=x) for x in (True, False)
    ]
    first, second = (run.evaluate()["eval_loss"] for run in runs)
    assert first == second


# -- several trainings ----------------------------------------------------------------------------


def test_a_second_trainer_goes_on_with_what_the_first_has_learnt(tmp_path):
    runs = []
    for kind in BOTH:
        model = small_model("llama")
        first = new_trainer(kind, tmp_path / f"{kind.__module__}-1", model=model)
        first.train()
        second = new_trainer(
            kind, tmp_path / f"{kind.__module__}-2", model=model, learning_rate=1e-3
        )
        second.train()
        second.save_model()
        runs.append(second)
    assert logged_values(runs[1], "loss") == pytest.approx(logged_values(runs[0], "loss"), rel=1e-4)
    same_weights(*(tmp_path / f"{kind.__module__}-2" for kind in reversed(BOTH)))


LAST = """
import sys
import transformers
import lohan.hf
from tests.support.models import small_model
from tests.support.trainer_scripts import new_trainer
from pathlib import Path

model, out = small_model("llama"), Path(sys.argv[1])
first = new_trainer(lohan.hf.Trainer, out / "1", model=model)
first.train()
second = new_trainer(lohan.hf.Trainer, out / "2", model=model)
second.train()
print("trained", second.state.global_step)
"""


def test_two_trainers_of_a_model_end_cleanly_at_exit(tmp_path):
    """Their finalizers run at its exit: nothing is raised, and both stores are whole."""
    ended = subprocess.run(
        [sys.executable, "-c", LAST, str(tmp_path)],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert ended.returncode == 0 and "trained 3" in ended.stdout, ended.stderr
    for sign in ("Traceback", "Exception ignored", "was not closed", "Error"):
        assert sign not in ended.stderr, ended.stderr
    for name in ("1", "2"):
        store = tmp_path / name / "lohan-store"
        assert json.loads((store / "manifest.json").read_text())["clean"], name


def test_the_training_state_is_never_uploaded(tmp_path, monkeypatch):
    """Trainer uploads its output folder, which contains the store by default."""
    with pytest.raises(lohan.LohanError, match=r"push_to_hub would upload the training state, whi"):
        new_trainer(lohan.hf.Trainer, tmp_path / "a", push_to_hub=True)
    trainer = new_trainer(lohan.hf.Trainer, tmp_path / "a")
    with pytest.raises(lohan.LohanError, match="put it elsewhere with LOHAN_SSD"):
        trainer.push_to_hub()
    (tmp_path / "ssd").mkdir()
    apart = lohan.hf.LohanArguments(ssd=(str(tmp_path / "ssd"),))
    with pytest.raises(lohan.LohanError, match=r"'checkpoint' would upload .* in every checkpoint"):
        new_trainer(
            lohan.hf.Trainer,
            tmp_path / "b",
            push_to_hub=True,
            hub_strategy="checkpoint",
            lohan=apart,
        )
    pushed: list[Any] = []
    monkeypatch.setattr(transformers.Trainer, "push_to_hub", lambda *a, **k: pushed.append(a))
    new_trainer(lohan.hf.Trainer, tmp_path / "b", lohan=apart).push_to_hub()
    assert len(pushed) == 1


def test_missing_trainer_is_named_with_the_reason():
    with pytest.raises(ImportError, match=r"lohan.hf has no GRPOTrainer; it has .*DPOTrainer"):
        from lohan.hf import GRPOTrainer  # noqa: F401
    assert not hasattr(lohan.hf, "nothing_of_this_name")


def test_second_trainer_in_folder_continues_training_and_replaces_store(tmp_path):
    model = small_model("llama")
    new_trainer(lohan.hf.Trainer, tmp_path, model=model).train()
    again = new_trainer(lohan.hf.Trainer, tmp_path, model=model)
    again.train()
    plain = small_model("llama")
    for name in ("a", "b"):
        expected = new_trainer(transformers.Trainer, tmp_path / name, model=plain)
        expected.train()
    assert logged_values(again, "loss") == pytest.approx(logged_values(expected, "loss"), rel=1e-4)
    stores = [path for path in tmp_path.iterdir() if path.name.startswith("lohan-")]
    assert stores == list(again.session.store.dirs)


def test_train_twice(tmp_path):
    runs = [new_trainer(kind, tmp_path / kind.__module__) for kind in BOTH]
    for trainer in runs:
        trainer.train()
        trainer.train()
        trainer.save_model()
    assert runs[1].session.step == 6 and runs[1].state.global_step == 3
    assert logged_values(runs[1], "loss") == pytest.approx(logged_values(runs[0], "loss"), rel=1e-4)
    same_weights(*(tmp_path / kind.__module__ for kind in reversed(BOTH)))


def test_model_init_makes_new_model_for_each_training(tmp_path):
    def init() -> nn.Module:
        return AutoModelForCausalLM.from_config(SMALL_CONFIGS["llama"]())

    runs = [new_trainer(kind, tmp_path / kind.__module__, model_init=init) for kind in BOTH]
    for trainer in runs:
        trainer.train()
        first = logged_values(trainer, "loss")
        trainer.train()
        assert logged_values(trainer, "loss") == first  # a new model, the same start
    assert logged_values(runs[1], "loss") == pytest.approx(logged_values(runs[0], "loss"), rel=1e-4)
    assert runs[1].session.step == 3


# -- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("only_model", [False, True])
def test_the_best_model_is_loaded_at_the_end(only_model, tmp_path):
    changes = {
        "save_only_model": only_model,
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "max_steps": 4,
        "learning_rate": 0.3,
        "save_total_limit": 2,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
    }
    runs = []
    for kind in BOTH:
        model = small_model("llama")
        for parameter in model.parameters():  # a start that a large rate makes worse
            nn.init.normal_(parameter, std=0.02)
        runs.append(new_trainer(kind, tmp_path / kind.__module__, model=model, **changes))
        runs[-1].train()
        runs[-1].save_model(str(tmp_path / f"{kind.__module__}-best"))
    expected, actual = runs
    best = Path(actual.state.best_model_checkpoint)
    assert best.name == Path(expected.state.best_model_checkpoint).name != "checkpoint-4"
    same_weights(tmp_path / f"{BOTH[1].__module__}-best", best, limit=1e-12)
    assert actual.evaluate()["eval_loss"] == pytest.approx(
        min(logged_values(actual, "eval_loss")), rel=1e-6
    )
    assert expected.evaluate()["eval_loss"] == pytest.approx(
        actual.evaluate()["eval_loss"], rel=1e-3
    )
    out = tmp_path / BOTH[1].__module__
    assert len(list(out.glob("checkpoint-*"))) == 2
    assert len(list(out.rglob("lohan-state"))) == (0 if only_model else 2)


@pytest.mark.parametrize("frozen", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_resume_from_an_earlier_checkpoint(frozen, tmp_path):
    """Bit for bit what the uninterrupted run did from there."""

    def start() -> nn.Module:
        model = small_model("llama")
        if frozen:
            model.model.layers[0].requires_grad_(False)
        return model

    changes = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    whole = run_trainer(lohan.hf.Trainer, tmp_path, model=start(), **changes)
    whole.save_model(str(tmp_path / "whole"))
    losses = logged_values(whole, "loss")
    del whole
    gc.collect()
    checkpoint = tmp_path / "checkpoint-2"
    rest = run_trainer(lohan.hf.Trainer, tmp_path, model=start(), resume=str(checkpoint), **changes)
    assert logged_values(rest, "loss")[2:] == losses[2:] and rest.session.step == 6
    rest.save_model(str(tmp_path / "rest"))
    same_weights(tmp_path / "rest", tmp_path / "whole", limit=1e-12)
    fixed = checkpoint / "lohan-state" / "fixed.bin"
    assert not fixed.exists()  # what is not trained is not copied


# -- models and arguments -------------------------------------------------------------------------


def labelled(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    result = collate_padded(rows)
    return {**result, "labels": result["input_ids"][:, 0] % 3}


def classified(place: Path, **settings: Any) -> list[Any]:
    """Train a classifier of three classes with the library's Trainer and with LoHan's."""
    runs = []
    for kind in BOTH:
        torch.manual_seed(0)
        config = SMALL_CONFIGS["llama"]()
        config.num_labels, config.pad_token_id = 3, 0
        trainer = kind(
            model=LlamaForSequenceClassification(config),
            train_dataset=token_examples(20),
            args=TrainingArguments(
                str(place / kind.__module__), **{**TRAINER_SETTINGS, **settings}
            ),
            eval_dataset=token_examples(10, seed=2),
            data_collator=labelled,
        )
        trainer.train()
        runs.append(trainer)
    return runs


def test_accumulates_gradients_of_mean_loss_as_transformers(tmp_path):
    """Batches cannot be joined: their gradients are added."""
    runs = classified(
        tmp_path, per_device_train_batch_size=3, gradient_accumulation_steps=2, num_train_epochs=1
    )
    assert len(logged_values(runs[1], "loss")) == 4
    for name in ("loss", "grad_norm"):
        assert logged_values(runs[1], name) == pytest.approx(
            logged_values(runs[0], name), rel=1e-4
        ), name


def test_classes_have_a_loss_in_fp32_with_bf16(tmp_path):
    """As under autocast: a loss of 1.0937 for 1.0969 would select another best model."""
    runs = classified(tmp_path, bf16=True, max_steps=2)
    for trainer in runs:
        trainer.evaluate()
    for name in ("loss", "eval_loss"):
        actual = logged_values(runs[1], name)
        assert actual == pytest.approx(logged_values(runs[0], name), rel=2e-3), name
        assert actual != torch.tensor(actual).bfloat16().tolist()


class Line(nn.Module):
    """A model without blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(0.5))
        self.config = None

    def forward(self, x, labels=None):
        y = self.a * x + self.b
        return (y,) if labels is None else (nn.functional.mse_loss(y, labels), y)


def test_trains_model_with_parameters_on_its_root(tmp_path):
    data = [{"x": float(n), "labels": 2.0 * n + 3} for n in range(8)]
    runs = []
    for kind in BOTH:
        args = TrainingArguments(
            str(tmp_path / kind.__module__),
            **{**TRAINER_SETTINGS, "max_steps": 4, "learning_rate": 0.1},
        )
        runs.append(kind(model=Line(), args=args, train_dataset=data))
        runs[-1].train()
    assert logged_values(runs[1], "loss") == pytest.approx(logged_values(runs[0], "loss"), rel=1e-4)
    assert runs[1].session.step == 4
    expected, actual = runs[0].model.state_dict(), runs[1].model.state_dict()
    assert all(torch.allclose(actual[name], expected[name], atol=1e-6) for name in expected)


def test_refuses_model_without_trained_parameters(tmp_path):
    class Still(Line):
        def forward(self, x, labels=None):
            free = torch.zeros((), requires_grad=True)
            return (nn.functional.mse_loss(x * free, torch.ones_like(x)), x)

    args = TrainingArguments(str(tmp_path), **{**TRAINER_SETTINGS, "max_steps": 2})
    data = [{"x": float(n), "labels": 1.0} for n in range(8)]
    trainer = lohan.hf.Trainer(model=Still(), args=args, train_dataset=data)
    with pytest.raises(lohan.LohanError, match="reached no parameter that learns"):
        trainer.train()


@pytest.mark.slow  # a minute: every batch size is planned
def test_a_batch_size_that_fits_is_found(tmp_path):
    small = lohan.hf.LohanArguments(host="1100KiB")  # 20 rows would need 1.29 MiB
    changes = {"auto_find_batch_size": True, "per_device_train_batch_size": 64, "max_steps": 2}
    trainer = new_trainer(lohan.hf.Trainer, tmp_path / "a", lohan=small, **changes)
    trainer.train()
    assert trainer.state.global_step == 2 and trainer.state.train_batch_size < 20
    none = lohan.hf.LohanArguments(host="100KiB")
    with pytest.raises(lohan.LohanError, match="host budget too small"):
        new_trainer(lohan.hf.Trainer, tmp_path / "b", lohan=none, **changes).train()


class _Address(torch.autograd.Function):
    """A kernel that torch does not dispatch: it copies from one address to another."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        ctypes.memmove(out.data_ptr(), x.data_ptr(), x.numel() * x.itemsize)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def test_liger_kernels_replace_modules_and_leave_the_head(tmp_path, monkeypatch):
    """Liger kernels replace modules but not the head.

    A stand-in package has two kernels that torch does not dispatch. Planning uses the plain
    forward of the norm and the plain rotary embedding, and training runs the kernels.
    """
    from transformers.models.llama import modeling_llama

    calls: list[str] = []
    plain_rotary = modeling_llama.apply_rotary_pos_emb

    def liger_rotary_pos_emb(q: torch.Tensor, k: torch.Tensor, *more: Any) -> Any:
        calls.append("rotary")
        return plain_rotary(_Address.apply(q), _Address.apply(k), *more)

    def apply(*, model: nn.Module, **config: Any) -> None:
        assert config == {"rope": True, "fused_linear_cross_entropy": False, "cross_entropy": False}
        liger_rotary_pos_emb.__module__ = "liger_kernel.transformers.rope"
        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", liger_rotary_pos_emb)
        for module in model.modules():
            if type(module).__name__ == "LlamaRMSNorm":
                kind = type(module)

                def forward(self: Any, hidden: torch.Tensor, kind: type = kind) -> torch.Tensor:
                    calls.append("norm")
                    return kind.forward(self, _Address.apply(hidden))

                forward.__module__ = "liger_kernel.transformers.rms_norm"
                module.forward = types.MethodType(forward, module)

    package = types.ModuleType("liger_kernel.transformers")
    package._apply_liger_kernel_to_instance = apply  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", package)
    monkeypatch.setattr("transformers.integrations.liger.is_liger_kernel_available", lambda: True)
    monkeypatch.setattr(
        "transformers.training_args.is_liger_kernel_available", lambda: True, raising=False
    )
    changes = {
        "use_liger_kernel": True,
        "liger_kernel_config": {"rope": True},
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    actual = new_trainer(lohan.hf.Trainer, tmp_path / "ours", **changes)
    actual.train()
    assert {*calls} == {"norm", "rotary"}
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", plain_rotary)
    plain = new_trainer(lohan.hf.Trainer, tmp_path / "plain", eval_strategy="steps", eval_steps=2)
    plain.train()
    assert logged_values(actual, "loss") == logged_values(plain, "loss")
    assert logged_values(actual, "eval_loss") == logged_values(plain, "eval_loss")
    shutil.rmtree(tmp_path / "plain")
