"""Ranks with unequal numbers of rows compute the loss of the whole batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lohan.model.layout import RankInfo
from lohan.train.task import Share

ROWS = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])


class Means:
    """A model that returns the mean of its rows, times a trained weight."""

    @staticmethod
    def rows(batch: Any) -> int:
        return len(batch["x"])

    @staticmethod
    def weight(model: torch.Tensor, batch: Any) -> int:
        return len(batch["x"])

    @staticmethod
    def part(batch: Any, start: int, stop: int) -> Any:
        return {"x": batch["x"][start:stop]}

    @staticmethod
    def loss(model: torch.Tensor, batch: Any) -> torch.Tensor:
        return (model * batch["x"]).mean()


def test_gradients_of_all_ranks_have_the_mean_of_the_batch():
    parts = [ROWS[slice(*RankInfo(rank, 2).rows(len(ROWS)))] for rank in range(2)]
    assert [len(part) for part in parts] == [3, 2]
    texts = [(float(part.sum()), {}, len(part)) for part in parts]  # of a mean, so many times
    gradients = []
    for rank in range(2):
        weight = torch.ones((), requires_grad=True)
        process_group = SimpleNamespace(
            ranks=RankInfo(rank, 2),
            world=2,
            several=True,
            all_gather_object=lambda rank_loss, rank=rank: _checked(rank_loss, texts, rank),
        )
        session: Any = SimpleNamespace(model=weight, process_group=process_group, head=None)
        task: Any = Means
        rank_loss, whole = Share(session, task).loss({"x": ROWS})
        rank_loss.backward()
        assert whole() == pytest.approx(float(ROWS.mean()))
        gradients.append(float(weight.grad))
    assert sum(gradients) / 2 == pytest.approx(float(ROWS.mean()))  # ranks take the mean


def _checked(rank_part: Any, parts: list[Any], rank: int) -> list[Any]:
    assert rank_part[0] == pytest.approx(parts[rank][0]) and rank_part[1:] == parts[rank][1:]
    return parts
