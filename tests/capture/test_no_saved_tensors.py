"""A forward runs what its recomputation runs, saves nothing, and leaves no graph behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lohan.capture.recompute import discard_saved_tensors, no_saved_tensors
from lohan.errors import ModelError
from tests.support.models import assert_close, lohan_run, plain_run


class Moody(nn.Module):
    """A block that computes something else if gradients are disabled."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return torch.tanh(x) if torch.is_grad_enabled() else torch.sigmoid(x)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Moody() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("activations", ["recompute", "all"])
def test_a_block_that_asks_for_gradients_is_that_of_pytorch(activations, tmp_path):
    torch.manual_seed(0)
    model, data = Stack(), [{"x": torch.randn(4, 8)} for _ in range(3)]
    expected_losses, expected = plain_run(model, data)
    losses, weights = lohan_run(model, data, tmp_path, batch=data[0], activations=activations)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert_close(weights, expected)


def test_nothing_is_saved_and_no_graph_is_left():
    x, alive = torch.randn(64, requires_grad=True), []

    def run() -> torch.Tensor:
        saved = x.exp()  # which its own backward wants
        reference = StorageWeakRef(saved.untyped_storage())
        out = saved.sin()
        del saved
        alive.append(not reference.expired())
        assert out.requires_grad
        return out

    out = no_saved_tensors(run, "block")
    run()
    assert alive == [False, True]
    assert not out.requires_grad and out.grad_fn is None
    assert torch.equal(out, x.exp().sin())


def test_an_input_that_is_changed_and_a_backward_are_refused():
    x = torch.zeros(2, requires_grad=True)
    with pytest.raises(ModelError, match="block b changes its input in place"):
        no_saved_tensors(lambda: x.add_(1), "b")
    with discard_saved_tensors("b"):
        out = x.exp().sum()
    with pytest.raises(ModelError, match=r"block b computes gradients inside .*resident=\['b'\]"):
        out.backward()
