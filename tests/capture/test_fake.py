"""Fake tensors need no memory for weights, and provide values of integers on request."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from lohan.capture.blocks import Outside, used_outside
from lohan.capture.fake import CPU, UNKNOWN, KnownValues, buffers_at, fake_like, faking


def test_integer_inputs_keep_their_values():
    ids = torch.tensor([[3, 1, 3], [0, 3, 2]])
    with faking(KnownValues.NUMBERS):
        fake_ids, weights = fake_like(ids, KnownValues.NUMBERS), torch.empty(5, 2**40)
        hidden = torch.nn.functional.embedding(fake_ids, weights)
        assert isinstance(hidden, FakeTensor) and hidden.shape == (2, 3, 2**40)
        assert (fake_ids == 3).sum().item() == 3
        assert hidden[fake_ids == 3].shape == (3, 2**40)
        assert torch.arange(4).cumsum(0).tolist() == [0, 1, 3, 6]
        with pytest.raises(UNKNOWN):
            weights.sum().item()


def test_fake_inputs_have_no_values_by_default():
    with faking(), pytest.raises(UNKNOWN):
        fake_like(torch.ones(3, dtype=torch.long)).sum().item()


def test_inputs_keep_their_values_if_a_model_reads_them():
    """All inputs keep their values if a model inspects them."""
    images = torch.tensor([[0.0, 0.0], [0.5, 0.0]])
    with faking(KnownValues.INPUTS):
        fake_images, weights = fake_like(images, KnownValues.INPUTS), torch.empty(2, 2**40)
        real = (fake_images == 0.0).sum(-1) != 2
        assert (fake_images[real] @ weights).shape == (1, 2**40)
        assert torch.where(real, torch.zeros(()), -1.0).tolist() == [-1.0, 0.0]
        assert isinstance(torch.zeros(2**40), FakeTensor)
        assert isinstance(fake_like(images.to("meta"), KnownValues.INPUTS), FakeTensor)
        with pytest.raises(UNKNOWN):
            (fake_images @ weights).sum().item()


class _Dropping(nn.Module):
    """A model that drops layers at random, has a part in eval mode, and reads positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.positions = nn.Embedding(3, 4)
        self.layers[1].eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.positions.weight
        for layer in self.layers:
            if not self.training or torch.rand([]) >= 0.5:
                x = layer(x)
        return x


def test_layers_that_are_dropped_at_random_run_in_a_trial():
    """Layers that are dropped at random run in a trial.

    What the first real step would refuse is detected (Audio Flamingo 3), and every part of the
    model returns to its mode.
    """
    model = _Dropping()
    actual = used_outside(model, ["layers.0", "layers.1", "positions"], {"x": torch.ones(2, 3, 4)})
    assert actual == Outside(parameters=("positions.weight",))
    assert model.training and not model.layers[1].training


def test_products_by_groups_have_shapes_in_every_type():
    """Grouped products have shapes in every dtype; the rule in torch is for bf16 only."""
    with faking():
        rows, experts = torch.empty(12, 8, requires_grad=True), torch.empty(3, 8, 5)
        experts.requires_grad_()
        offsets = torch.empty(3, dtype=torch.int32)
        out = torch.nn.functional.grouped_mm(rows, experts, offs=offsets)
        assert out.shape == (12, 5)
        out.backward(torch.empty(12, 5))
        assert rows.grad.shape == (12, 8)
        assert experts.grad.shape == (3, 8, 5)


def test_trial_leaves_no_hooks_and_extends_no_list():
    """Hooks and lists in the module's attributes are restored."""
    module = torch.nn.Linear(2, 2)
    module.seen, module.named, module.kinds = [1], {"a": 1}, {1}
    module.register_buffer("mean", torch.zeros(2))
    first = module.register_forward_hook(print)
    hooks, seen, mean = module._forward_hooks, module.seen, module.mean
    with buffers_at(module, CPU):
        module.register_forward_hook(print)
        module.noted = True
        module.seen.append(2)
        module.named["b"] = 2
        module.kinds.clear()
        assert len(module._forward_hooks) == 2 and module.mean is not mean
    assert module._forward_hooks is hooks and list(hooks) == [first.id]
    assert module.seen is seen and module.mean is mean
    assert (seen, module.named, module.kinds) == ([1], {"a": 1}, {1})
    assert not hasattr(module, "noted")
