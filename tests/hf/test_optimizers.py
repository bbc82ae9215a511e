"""The optimizer of a Trainer script: groups, values written by callbacks, and refusals."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import TrainerCallback, TrainingArguments

pytest.importorskip("accelerate", reason="Trainer needs the extra: pip install 'lohan[hf]'")

import lohan
import lohan.hf
from lohan.hf.optimizers import CLASSES, TorchGroups
from tests.support.models import small_model
from tests.support.trainer_scripts import (
    TRAINER_SETTINGS,
    assert_same_log,
    collate_padded,
    run_trainer,
    saved_weights,
    token_examples,
)

LAYER_WISE = {"embed_tokens": 1e-4, "layers.0": 1e-3, "layers.1": 2e-3}


def layer_wise(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    """Return an optimizer with rates by layer, no decay on some parameters, and other betas."""
    groups = []
    for name, parameter in model.named_parameters():
        rate = next((rate for part, rate in LAYER_WISE.items() if part in name), 3e-3)
        decay = 0.0 if parameter.ndim < 2 or "embed_tokens" in name else 0.2
        group = {"params": [parameter], "lr": rate, "weight_decay": decay}
        groups.append(group | ({"betas": (0.8, 0.9), "eps": 1e-6} if "lm_head" in name else {}))
    return torch.optim.AdamW(groups, **options)


def with_optimizer(base: type, *, by: str) -> type:
    """Return a Trainer class that uses the script's optimizer."""

    class OwnOptimizer(base):
        if by == "create_optimizer":

            def create_optimizer(self, *_):
                self.optimizer = layer_wise(self.model)
                return self.optimizer

        elif by == "get_optimizer_cls_and_kwargs":

            @staticmethod
            def get_optimizer_cls_and_kwargs(args, model=None):
                groups = layer_wise(model).param_groups
                return torch.optim.AdamW, {"params": groups, "lr": 1e-3}

    return OwnOptimizer


class Writes(TrainerCallback):
    """A callback that changes values of every third group after the second step."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def on_step_end(self, args, state, control, optimizer=None, **_):
        for number, group in enumerate(optimizer.param_groups):
            if state.global_step == 2 and number % 3 == 0:
                group.update(self.values)


def finished(trainer: Any, folder: Path) -> dict[str, torch.Tensor]:
    trainer.save_model(folder)
    return saved_weights(folder)


def assert_equal_weights(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> None:
    assert actual.keys() == expected.keys()
    assert max((actual[n] - expected[n]).abs().max().item() for n in expected) < 2e-5


@pytest.mark.parametrize("by", ["create_optimizer", "get_optimizer_cls_and_kwargs"])
def test_groups_of_an_overridden_method(by, tmp_path):
    """The groups have a schedule, clipping, and a callback that writes to them."""
    collected, changes = {}, {"max_grad_norm": 0.5, "max_steps": 4}
    for base in (transformers.Trainer, lohan.hf.Trainer):
        write = Writes(weight_decay=0.9, betas=(0.6, 0.7))
        out = tmp_path / base.__module__
        result = run_trainer(with_optimizer(base, by=by), out, callbacks=[write], **changes)
        collected[base] = result, finished(result, out / "end")
    (reference, expected), (actual, got) = (
        collected[transformers.Trainer],
        collected[lohan.hf.Trainer],
    )
    assert_same_log(actual, reference)
    assert_equal_weights(got, expected)
    held = [p for group in actual.optimizer.param_groups for p in group["params"]]
    assert all(p.is_meta for p in held)  # or it would hold the whole model in memory
    if by == "create_optimizer":
        serial = partial(type(actual), lohan=lohan.hf.LohanArguments(overlap=False))
        write = Writes(weight_decay=0.9, betas=(0.6, 0.7))
        plain = run_trainer(serial, tmp_path / "serial", callbacks=[write], **changes)
        same = finished(plain, tmp_path / "serial" / "end")
        assert [name for name in got if not torch.equal(got[name], same[name])] == []


def own_optimizers(kind: type, out: Path, **changes: Any) -> Any:
    """Run a script that passes optimizer and scheduler; some parameters are in no group."""
    model = small_model("llama")
    parts = dict(model.model.layers[2].named_parameters())
    optimizer = torch.optim.SGD(
        [
            {"params": parts.values(), "lr": 0.05, "weight_decay": 0.1},
            {"params": [model.lm_head.weight, model.model.norm.weight], "name": "the head"},
        ],
        lr=0.02,
        momentum=0.8,
        nesterov=True,
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.05, 0.02], total_steps=8)
    args = TrainingArguments(str(out), **{**TRAINER_SETTINGS, "max_steps": 5, **changes})
    trainer = kind(
        model=model,
        args=args,
        train_dataset=token_examples(20),
        data_collator=collate_padded,
        optimizers=(optimizer, scheduler),
    )
    trainer.train()
    return trainer


def test_passed_optimizer_and_scheduler_train_as_with_torch(tmp_path, caplog):
    """Momentum is cycled too. Parameters in no group keep their values, as with torch."""
    expected = own_optimizers(transformers.Trainer, tmp_path / "theirs")
    with caplog.at_level("WARNING"):
        actual = own_optimizers(lohan.hf.Trainer, tmp_path / "ours")
    assert_same_log(actual, expected)
    got = finished(actual, tmp_path / "ours" / "end")
    assert_equal_weights(got, finished(expected, tmp_path / "theirs" / "end"))
    start = dict(small_model("llama").named_parameters())
    assert torch.equal(got["model.embed_tokens.weight"], start["model.embed_tokens.weight"])
    assert "of LlamaForCausalLM are in no group of the optimizer and do not learn" in caplog.text


def test_values_that_a_callback_wrote_are_there_after_a_resume(tmp_path):
    """Written after the step of the checkpoint: as torch's own optimizer.pt has them."""
    kind = with_optimizer(lohan.hf.Trainer, by="create_optimizer")
    changes = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole = run_trainer(kind, tmp_path / "whole", callbacks=[Writes(weight_decay=0.9)], **changes)
    expected = finished(whole, tmp_path / "whole" / "end")
    run_trainer(kind, tmp_path / "cut", callbacks=[Writes(weight_decay=0.9)], **changes)
    gc.collect()
    resumed = run_trainer(
        kind, tmp_path / "cut", resume=str(tmp_path / "cut" / "checkpoint-2"), **changes
    )
    assert resumed.optimizer.param_groups[0]["weight_decay"] == 0.9
    actual = finished(resumed, tmp_path / "cut" / "end")
    assert [name for name in expected if not torch.equal(expected[name], actual[name])] == []
    resumed.session.close()
    with pytest.raises(lohan.LohanError, match="other parameter groups than in the last step"):
        run_trainer(lohan.hf.Trainer, tmp_path / "cut", resume=True, **changes)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"weight_deacy": 0.0}, r"param_groups\[0\]: 'weight_deacy' was added during training"),
        ({"betas": (0.9, 1.5)}, r"param_groups\[0\]: AdamW betas\[1\] is 1.5"),
        ({"amsgrad": True}, r"param_groups\[0\]: amsgrad is True, and LoHan's kernels have False"),
    ],
)
def test_refuses_what_a_callback_writes(values, message, tmp_path):
    kind = with_optimizer(lohan.hf.Trainer, by="create_optimizer")
    with pytest.raises(lohan.LohanError, match=message):
        run_trainer(kind, tmp_path, callbacks=[Writes(**values)], max_steps=4)


def test_refuses_other_classes_by_name(tmp_path):
    class OwnAdam(lohan.hf.Trainer):
        def create_optimizer(self, *_):
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
            return self.optimizer

    class Changed(torch.optim.AdamW):
        pass

    model = small_model("llama")
    args = TrainingArguments(str(tmp_path / "none"), **TRAINER_SETTINGS, max_steps=1)
    message = r"a Adam cannot be used with lohan.hf.*torch.optim.AdamW, torch.optim.SGD and Lion"
    with pytest.raises(lohan.LohanError, match=message):
        run_trainer(OwnAdam, tmp_path, max_steps=1)
    for kind in (Changed, torch.optim.Adagrad):
        with pytest.raises(lohan.LohanError, match=f"a {kind.__name__} cannot be used"):
            lohan.hf.Trainer(model, args, optimizers=(kind(model.parameters()), None))
        with pytest.raises(lohan.LohanError, match=f"a {kind.__name__} cannot be used"):
            lohan.hf.Trainer(model, args, optimizer_cls_and_kwargs=(kind, {}))
    assert {kind.__name__ for kind in CLASSES} == {"AdamW", "SGD", "LionGroups"}


def test_refuses_parameters_of_another_model():
    stranger = torch.optim.AdamW([nn.Parameter(torch.ones(2, 3))])
    with pytest.raises(lohan.LohanError, match=r"shape \[2, 3\] that is not in LlamaForCausalLM"):
        TorchGroups("fp32").take_over(stranger, small_model("llama"))
