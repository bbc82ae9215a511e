"""Gradients of one parameter from several slices or uses add up in fp32, whatever type they have;
none is made of what is frozen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lohan
from lohan.engine.gradients import GradientSink
from tests.models import attached, master_weights

WIDTH, RATE = 8, 2.0**-10
ROWS = (256.0, 1.0, 1.0, 1.0)  # bf16 has no number between 256 and 258


class Twice(nn.Module):
    """Blocks that begin as the identity; the first runs once more if it is `tied`."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.tied = tied
        with torch.no_grad():
            for block in self.blocks:
                block.weight.copy_(torch.eye(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return (self.blocks[0](x) if self.tied else x).float().sum()


@pytest.mark.parametrize(
    "tied, micro_batch, expected",
    [(False, 1, sum(ROWS)), (True, 1, 2 * sum(ROWS)), (False, None, 260.0)],
)
def test_sums_are_fp32(tied, micro_batch, expected, tmp_path):
    """Without slices one product has all rows, and rounds once: 259 to 260."""
    model = Twice(tied).to(torch.bfloat16)
    sgd = lohan.SGD(lr=RATE, momentum=0.0)
    batch = {"x": torch.tensor(ROWS, dtype=torch.bfloat16)[:, None].expand(-1, WIDTH).contiguous()}
    options = {"optimizer": sgd, "micro_batch": micro_batch, "batch": batch}
    with attached(model, tmp_path, **options) as session:
        model(**batch).backward()
        moved = torch.eye(WIDTH) - master_weights(session)["blocks.0.weight"]
    assert (moved / RATE).unique().tolist() == [expected]


def test_no_gradient_is_made_of_what_is_frozen(tmp_path, monkeypatch):
    made: list[str] = []
    add = GradientSink.add

    def noted(sink: GradientSink, group: str, *args: Any, **named: Any) -> None:
        made.append(group)
        add(sink, group, *args, **named)

    monkeypatch.setattr(GradientSink, "add", noted)
    model = Twice(tied=False)
    model.blocks[1].requires_grad_(False)
    with attached(model, tmp_path) as session:
        model(torch.ones(2, WIDTH)).backward()
        trained = {group.key for group in session.executor.blocks.trained}
    assert len(trained) == 1 and set(made) == trained
