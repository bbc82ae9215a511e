"""A trial with two samples determines how a call is sliced."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lohan.capture.saved_call import SavedCall
from lohan.capture.slicing import Cut, find_cut

BATCH = 4


class Block(nn.Module):
    """A block that calls a given function."""

    def __init__(self, function) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.function = function

    def forward(self, *args):
        return self.function(self.linear(args[0]), *args[1:])


def cut_of(function, *more: torch.Tensor) -> Cut:
    torch.manual_seed(0)
    block = Block(function)
    call = SavedCall("block", (torch.randn(BATCH, BATCH, 6), *more), {})
    return find_cut(block, call, block, values=True)


@pytest.mark.parametrize(
    ("function", "more", "cut"),
    [
        (lambda x: x, (), Cut((True,), (1,))),
        (lambda x: (x, x.mean((1, 2))), (), Cut((True,), (1, 1))),
        (lambda x: x.flatten(0, 1), (), Cut((True,), (BATCH,))),  # tokens of all samples
        (lambda x, t: (x + t, 2 * t), (torch.randn(BATCH, 6),), Cut((True, False), (1, 0))),
        (lambda x, c: x + c[:, None], (torch.randn(BATCH, 6),), Cut((True, True), (1,))),
        (lambda x, w: x * w[:, None, None], (torch.randn(BATCH),), Cut((True, True), (1,))),
        (lambda x, p: x * p[:, None], (torch.randn(BATCH),), Cut((True, False), (1,))),
        (lambda x: nn.functional.dropout(x, 0.5), (), Cut((True,), (1,))),
        (lambda x: x + (torch.rand(len(x)) < 0.3)[:, None, None], (), Cut((True,), (1,))),
    ],
)
def test_finds_the_dimension_of_samples(function, more, cut):
    assert cut_of(function, *more) == cut


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x - x.mean(0), "mixes|other results"),
        (lambda x: x + 1e-9 * x.sum(), "mixes"),  # far below any tolerance
        (lambda x: (x, x.square().mean()), "depends on all samples"),
        (lambda x: x + x.flip(0), "mixes|other results"),
        (lambda x: x.transpose(0, 1).softmax(1).transpose(0, 1), "mixes|other results"),
    ],
)
def test_refuses_to_slice_functions_that_mix_samples(function, reason):
    cut = cut_of(function)
    assert any(part in cut.obstacle for part in reason.split("|")), cut
