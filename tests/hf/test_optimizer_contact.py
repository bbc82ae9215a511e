"""Uses of a Trainer's optimizer, which holds no values, are honoured or refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import TrainerCallback, TrainingArguments

pytest.importorskip("accelerate", reason="Trainer needs the extra: pip install 'lohan[hf]'")

import lohan.hf
from lohan.errors import ConfigError, ModelError
from tests.support.models import small_model


class Rows(Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(8) * (index + 3)) % 50
        return {"input_ids": ids, "labels": ids.clone()}


class Event(TrainerCallback):
    """Calls a function with the optimizer and the model in one event of step 2."""

    def __init__(self, name: str, act: Any) -> None:
        setattr(self, name, self.call)
        self._act = act

    def call(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == 1:
            self._act(given["optimizer"], given["model"])


def train(folder: Any, *callbacks: TrainerCallback) -> lohan.hf.Trainer:
    args = TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=2, report_to=[], use_cpu=True
    )
    trainer = lohan.hf.Trainer(
        small_model("llama"), args, train_dataset=Rows(), callbacks=list(callbacks)
    )
    trainer.train()
    return trainer


def parameters(optimizer: Any) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def zero_first_moments(optimizer: Any, _: Any) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].zero_()


@pytest.mark.parametrize(
    ("event", "act", "message"),
    [
        ("on_step_begin", lambda o, _: o.state.clear(), "optimizer.state is read or changed"),
        ("on_step_end", zero_first_moments, "optimizer.state is read or changed"),
        (
            "on_step_begin",
            lambda o, _: o.load_state_dict(copy.deepcopy(o.state_dict())),
            "load_state_dict would restore no moments",
        ),
        (
            "on_pre_optimizer_step",
            lambda o, _: nn.utils.clip_grad_norm_(parameters(o), 0.1),
            "gradient of a parameter in optimizer.param_groups is read after backward",
        ),
        (
            "on_pre_optimizer_step",
            lambda o, _: [p.grad for p in parameters(o)],
            "gradient of a parameter in optimizer.param_groups is read after backward",
        ),
        (
            "on_pre_optimizer_step",
            lambda o, _: setattr(parameters(o)[0], "grad", torch.zeros(2)),
            "gradient of a parameter in optimizer.param_groups is set",
        ),
        ("on_pre_optimizer_step", lambda o, _: o.zero_grad(), "gradients were set to zero between"),
        ("on_pre_optimizer_step", lambda _, m: m.zero_grad(), "gradients were set to zero between"),
        ("on_step_end", lambda o, _: parameters(o)[0].data.mul_(0.9), "optimizer holds no values"),
        ("on_step_end", lambda o, _: parameters(o)[0].norm(), "optimizer holds no values"),
        ("on_step_end", lambda o, _: parameters(o)[0].tolist(), "optimizer holds no values"),
    ],
)
def test_refuses_optimizer_changes_without_effect(event, act, message, tmp_path):
    with pytest.raises(ModelError, match=message):
        train(tmp_path, Event(event, act))


def test_step_hooks_that_change_values_are_refused(tmp_path):
    def shrink(optimizer: Any, *_: Any) -> None:
        torch._foreach_mul_([p.detach() for p in parameters(optimizer)], 0.9)

    def register(optimizer: Any, _: Any) -> None:
        getattr(optimizer, "optimizer", optimizer).register_step_post_hook(shrink)

    with pytest.raises(ModelError, match="optimizer holds no values"):
        train(tmp_path, Event("on_step_begin", register))


def test_stand_ins_answer_questions_about_shape_and_type(tmp_path):
    sizes: list[int] = []

    def ask(optimizer: Any, _: Any) -> None:
        optimizer.zero_grad()  # at the beginning of a step, as usual
        assert all(p.grad is None and p.requires_grad for p in parameters(optimizer))
        sizes.append(sum(p.numel() for p in parameters(optimizer)))

    trainer = train(tmp_path, Event("on_step_begin", ask))
    assert sizes == [sum(p.numel() for p in trainer.model.parameters())]
    trainer.train()  # accelerate reads and loads the state of an optimizer that it wraps again
    with pytest.raises(ModelError, match=r"optimizer\.state"):
        trainer.optimizer.state.clear()


def test_state_dict_without_moments_warns_once_and_has_the_groups(tmp_path, caplog):
    saved: list[Any] = []

    def save(optimizer: Any, _: Any) -> None:
        assert not warned()  # accelerate has read the state itself
        saved.extend(optimizer.state_dict() for _ in range(2))

    def warned() -> list[str]:
        return [row for row in caplog.messages if "state_dict() has the parameter groups" in row]

    with caplog.at_level("WARNING"):
        train(tmp_path, Event("on_step_end", save))
    assert len(warned()) == 1
    assert "checkpoint of the Trainer" in warned()[0]
    assert saved[0]["state"] == {}
    assert saved[0]["param_groups"][0]["weight_decay"] == 0.0


def test_refuses_optimizer_that_has_moments(tmp_path):
    """Moments of earlier steps, or of a state that the script has loaded, would be lost."""
    model = small_model("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(**{key: value[None] for key, value in Rows()[0].items()}).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    args = TrainingArguments(str(tmp_path), max_steps=1, report_to=[], use_cpu=True)
    trainer = lohan.hf.Trainer(model, args, train_dataset=Rows(), optimizers=(optimizer, None))
    with pytest.raises(ConfigError, match=r"AdamW has moments of \d+ parameters"):
        trainer.train()


def move(optimizer: Any, _: Any) -> None:
    first, second = (group["params"] for group in optimizer.param_groups)
    second.append(first.pop())


@pytest.mark.parametrize(
    "act", [move, lambda o, _: o.param_groups[1]["params"].pop(), lambda o, _: swap(o.param_groups)]
)
def test_refuses_other_parameters_in_the_groups_during_training(act, tmp_path):
    with pytest.raises(ConfigError, match=r"parameters of optimizer\.param_groups\[\d\] were"):
        train(tmp_path, Event("on_step_end", act))


def swap(groups: list[Any]) -> None:
    groups[0]["params"], groups[1]["params"] = groups[1]["params"], groups[0]["params"]


def test_refuses_a_new_optimizer_for_a_second_training(tmp_path):
    """With torch, the second training would begin with new moments."""
    trainer = train(tmp_path)
    trainer.optimizer = trainer.lr_scheduler = None
    with pytest.raises(ConfigError, match=r"optimizer of the Trainer was replaced.*make a new Tra"):
        trainer.train()
