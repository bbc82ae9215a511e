"""Operations on parameters outside their block's call work as in memory, or are refused."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from lohan.capture.placeholders import ParameterView, lacks_values
from lohan.capture.saved_call import SavedCall
from lohan.errors import ModelError
from tests.support.architectures import MODULE_WIDTH, StepOutput
from tests.support.models import assert_close, attached, lohan_run, loss_of, plain_run


class Idioms(nn.Module):
    """A model that queries its offloaded parameters in common ways and uses every answer."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(MODULE_WIDTH, MODULE_WIDTH)
        self.blocks = nn.ModuleList(StepOutput() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, first = self.entry.weight, next(self.blocks.parameters())
        assert first.requires_grad and first.is_leaf and not first.is_meta
        x = self.entry(x.to(weight.device, weight.dtype))
        x = x + torch.ones(x.shape, device=weight.device, dtype=weight.dtype)
        x = (
            x * weight.new_full((MODULE_WIDTH,), 1.5)
            + torch.ones_like(first)[0]
            + weight.new_zeros(())
        )
        x = x.to(weight).type_as(first) * (first.shape[0] / first.numel())
        for block in self.blocks:
            parameter = next(block.parameters())
            x = block(x.to(parameter.device if not parameter.is_cuda else "cuda"))
        return x.square().mean()

    @staticmethod
    def data(steps: int) -> list[dict[str, torch.Tensor]]:
        g = torch.Generator().manual_seed(2)
        return [{"x": torch.randn(4, 3, MODULE_WIDTH, generator=g)} for _ in range(steps)]


class Gained(Idioms):
    """A model with a parameter in memory, a view of which is passed to the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((2 * MODULE_WIDTH,), 1.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](self.gain[:MODULE_WIDTH]).sum() * self.entry(x).square().mean()


class Measured(Gained):
    """A model that queries the sizes of a resident parameter and of a view of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for tensor in (self.gain, self.gain[1:], self.gain.data):
            assert type(tensor.shape) is torch.Size and type(tensor.size()) is torch.Size
            assert tensor.shape.numel() == tensor.numel()
        return super().forward(x)


@pytest.fixture
def model():
    torch.manual_seed(3)
    return Idioms()


@pytest.mark.parametrize("planned", [False, True])
def test_properties_of_placeholders_equal_those_of_parameters(planned, model, tmp_path):
    data = Idioms.data(3)
    expected_losses, expected = plain_run(model, data)
    options = {"batch": data[0]} if planned else {}
    losses, weights = lohan_run(model, data, tmp_path, **options)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert_close(weights, expected)


def test_sizes_of_a_parameter_in_memory_are_sizes(tmp_path):
    torch.manual_seed(3)
    model, data = Measured(), Idioms.data(2)
    expected, _ = plain_run(model, data)
    losses, _ = lohan_run(model, data, tmp_path)
    assert losses == pytest.approx(expected, rel=1e-5)


def test_a_placeholder_is_like_its_parameter(model, tmp_path):
    before = copy.deepcopy(model)
    before.blocks[1].linear.bias.requires_grad_(False)
    model.blocks[1].linear.bias.requires_grad_(False)
    with attached(model, tmp_path):
        for (name, one), (other, plain) in zip(
            model.named_parameters(), before.named_parameters(), strict=True
        ):
            assert lacks_values(one) or "bias" in name
            for requested in (
                "device",
                "dtype",
                "shape",
                "requires_grad",
                "ndim",
                "is_cpu",
                "is_meta",
            ):
                assert (name, getattr(one, requested)) == (other, getattr(plain, requested))
            assert (one.size(), one.numel(), one.get_device()) == (plain.size(), plain.numel(), -1)
        assert next(model.parameters()).device == torch.device("cpu")
        assert copy.deepcopy(model.entry.weight).device == torch.device("cpu")


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.add_(1),
        lambda w: w.data.clamp_(-1, 1),
        lambda w: nn.init.zeros_(w),
        lambda w: setattr(w, "data", torch.zeros(w.shape)),
        lambda w: w.detach().copy_(torch.zeros(w.shape)),
        lambda w: w.data.__setitem__(0, 0.0),
        lambda w: torch.add(w.detach(), 1, out=w.data),
        lambda w: torch._foreach_mul_([w], 2.0),
        lambda w: nn.init.constant_(w, 1.0),
        lambda w: nn.init.kaiming_uniform_(tensor=w),
        lambda w: w[0].zero_(),
        lambda w: w.data[0].__setitem__(1, 9.0),
        lambda w: w.view(-1).mul_(2),
        lambda w: w.detach().T[:2].diagonal().zero_(),
        lambda w: w.chunk(2)[1].normal_(),
        lambda w: [row.zero_() for row in w.data],
        lambda w: torch.mul(w, 2, out=w[...]),
        lambda w: w.cpu().clamp_(-1, 1),
    ],
)
def test_writes_outside_a_block_are_refused(write, model, tmp_path):
    """The written values would be lost."""
    with (
        attached(model, tmp_path),
        torch.no_grad(),
        pytest.raises(ModelError, match=r"entry\.weight is changed in memory.*load_state_dict"),
    ):
        write(model.entry.weight)


def test_rejects_writes_to_views_of_parameters_in_memory(tmp_path):
    model = Gained()
    with attached(model, tmp_path), torch.no_grad():
        for write in (lambda w: w.data[:3].zero_(), lambda w: w.view(-1).mul_(2)):
            with pytest.raises(ModelError, match=r"gain is changed in memory.*load_state_dict"):
                write(model.gain)
        for parameter in (model.gain, model.entry.weight):
            with pytest.raises(ValueError, match="read-only"):
                parameter.numpy()[0] = 0


def test_views_of_parameters_are_read_as_ordinary_tensors(tmp_path):
    """Results of operations can be written, copied and saved, and blocks take views."""
    model, data = Gained(), Idioms.data(1)
    expected = model.entry.weight.detach().clone()
    with torch.no_grad():
        loss = loss_of(model, data[0])
    with attached(model, tmp_path), torch.no_grad():
        assert torch.equal(loss_of(model, data[0]), loss)
        row = model.entry.weight[1]
        average = torch.zeros(MODULE_WIDTH).lerp_(row, 0.5)
        average += row.clone().mul_(0.5)
        assert torch.equal(average, expected[1])
        assert type(copy.deepcopy(row)) is type(row + 1) is type(row.clone()) is torch.Tensor
        assert torch.equal(pickle.loads(pickle.dumps(row)), expected[1])
        assert torch.equal(torch.stack([row, model.entry.weight[1]]).mean(0), expected[1])
        assert torch.equal(row @ model.entry.weight, expected[1] @ expected)
        assert type(model.gain[:MODULE_WIDTH]) is type(row) is ParameterView
        call = SavedCall("block", (row, [row]), {"gain": model.gain[:MODULE_WIDTH]})
        assert [type(tensor) for tensor in call.tensors] == [torch.Tensor] * 3


def test_values_outside_a_block_are_streamed(model, tmp_path):
    reads = [
        lambda w: w.split(2)[1],
        lambda w: torch.max(w, 0).values,
        lambda w: w.sum(),
        lambda w: w.double(),
        lambda w: w.to(torch.float64, copy=True),
        lambda w: w[0, 0].item(),
        lambda w: w.tolist()[1],
        lambda w: w.detach().numpy().copy(),
        lambda w: next(iter(w)),
        lambda w: torch.equal(w, torch.zeros(w.shape)),
        copy.deepcopy,
        lambda w: pickle.loads(pickle.dumps(w)),
        lambda w: w @ w.T,
    ]
    expected = [read(model.entry.weight.detach().clone()) for read in reads]
    with attached(model, tmp_path):
        for read, values in zip(reads, expected, strict=True):
            actual = read(model.entry.weight)
            assert torch.equal(torch.as_tensor(actual), torch.as_tensor(values))


class Astray(Idioms):
    """A model that passes a tensor without values to a block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](self.entry(x).to("meta")).square().mean()


@pytest.mark.parametrize("training", [True, False])
def test_a_block_is_not_called_with_a_tensor_on_meta(training, tmp_path):
    model, data = Astray(), Idioms.data(1)
    with attached(model, tmp_path) as session:
        wrong = r"block blocks\.0 is called with a tensor of shape \[4, 3, 12\] that has no values"
        with torch.set_grad_enabled(training), pytest.raises(ModelError, match=wrong):
            loss_of(model, data[0])
        assert session.step == 0
