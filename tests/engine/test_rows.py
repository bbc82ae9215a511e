"""Blocks that are called with more rows than the batch has samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import lohan
from lohan.errors import BudgetError
from tests.support.models import attached, plain_run

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(torch.tanh(self.linear(x)))


class MultipleChoice(nn.Module):
    """A model that scores the choices of each sample, with inputs [batch, choices, length]."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = x.flatten(0, 1)
        for block in self.blocks:
            hidden = block(hidden)
        scores = self.score(hidden.mean(1)).view(x.shape[:2])
        return nn.functional.cross_entropy(scores, labels)


def data(steps: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [
        {
            "x": torch.randn(2, 3, 5, WIDTH, generator=generator),
            "labels": torch.randint(3, (2,), generator=generator),
        }
        for _ in range(steps)
    ]


def model() -> MultipleChoice:
    torch.manual_seed(3)
    return MultipleChoice().train()


def test_multiple_choice_draws_the_random_numbers_of_pytorch(tmp_path: Path) -> None:
    batches, result = data(3), model()
    torch.manual_seed(7)
    expected, _ = plain_run(result, batches)
    losses = []
    with attached(result, tmp_path, batch=batches[0]) as session:
        torch.manual_seed(7)
        for batch in batches:
            loss = result(**batch)
            loss.backward()
            losses.append(loss.item())
        assert session.plan.micro_batch == 6  # rows: 2 samples of 3 choices
        assert session.context.workload.seq == 5
    assert losses == pytest.approx(expected, rel=1e-5)


def test_a_refusal_names_the_batch_of_the_user(tmp_path: Path) -> None:
    budget = lohan.Budget(host="4KiB", ssd=[tmp_path])
    with pytest.raises(BudgetError, match=r"--batch \(now 2\)"):
        attached(model(), tmp_path, batch=data(1)[0], budget=budget)
