"""bf16=True over models that take float inputs, which autocast would cast layer by layer."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import (
    ConvNextConfig,
    ConvNextForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
    TrainingArguments,
)

pytest.importorskip("accelerate", reason="Trainer needs the extra: pip install 'lohan[hf]'")

import lohan.hf
from tests.support.trainer_scripts import TRAINER_SETTINGS, logged_values


class OwnLinear(nn.Module):
    """A residual network whose fp32 buffer turns the hidden state back to fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.out = nn.Linear(8, 1)
        self.register_buffer("scale", torch.full((8,), 0.5))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.body:
            x = x * self.scale + block(x)
        actual = self.out(x).squeeze(-1)
        return {"loss": nn.functional.mse_loss(actual, labels), "logits": actual}


def resnet() -> nn.Module:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
    return ResNetForImageClassification(ResNetConfig(layer_type="basic", num_labels=3, **sizes))


def convnext() -> nn.Module:
    sizes = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}
    return ConvNextForImageClassification(ConvNextConfig(num_labels=3, **sizes))


def rows(make: Any) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    if make is OwnLinear:
        drawn = [torch.randn(9, generator=generator) for _ in range(16)]
        return [{"x": row[:8], "labels": row[8]} for row in drawn]
    images = [torch.randn(3, 32, 32, generator=generator) for _ in range(16)]
    return [{"pixel_values": image, "labels": n % 3} for n, image in enumerate(images)]


def trained(kind: type, make: Any, out: Path) -> Any:
    torch.manual_seed(0)
    changes = {"bf16": True, "max_steps": 3, "learning_rate": 1e-2}
    args = TrainingArguments(str(out), **{**TRAINER_SETTINGS, **changes})
    trainer = kind(model=make(), args=args, train_dataset=rows(make), eval_dataset=rows(make))
    trainer.train()
    trainer.evaluate()
    return trainer


@pytest.mark.parametrize("make", [resnet, convnext, OwnLinear])
def test_bf16_training_with_float_inputs(make, tmp_path):
    actual = trained(lohan.hf.Trainer, make, tmp_path / "ours")
    expected = trained(transformers.Trainer, make, tmp_path / "theirs")
    assert actual.session.plan.dtype == "bf16"
    assert logged_values(actual, "loss") == pytest.approx(logged_values(expected, "loss"), rel=0.02)
    assert logged_values(actual, "eval_loss") == pytest.approx(
        logged_values(expected, "eval_loss"), rel=0.02
    )
    learnt = copy.deepcopy(actual.model)
    assert {m.__class__ for m in pickle.loads(pickle.dumps(learnt)).modules()} == {
        type(m) for m in make().modules()
    }
