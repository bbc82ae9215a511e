"""The first step compares blocks with plain calls and refuses those that cannot be recomputed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lohan.engine.context import is_tested
from lohan.errors import ModelError
from tests.support.architectures import Plain, StepOutput
from tests.support.models import assert_same, attached, loss_of, master_weights, small_model


class Remembers(StepOutput):
    """A block that appends to a list, which cannot be restored."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(1.0)
        return super().forward(x) * (1 + 0.1 * len(self.seen))


class WrongBackward(torch.autograd.Function):
    """A block whose every second backward gives another gradient."""

    calls = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        WrongBackward.calls += 1
        return grad * (1 + WrongBackward.calls % 2)


class Unsteady(StepOutput):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return WrongBackward.apply(super().forward(x))


def stack_of(block: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return Plain(block)


@pytest.mark.parametrize("options", [{}, {"micro_batch": 2}, {"planned": True}])
def test_refuses_block_with_state_between_calls(options, tmp_path):
    model, data = stack_of(Remembers), Plain.data(1)
    options = {"batch": data[0]} if options.pop("planned", False) else options
    with (
        attached(model, tmp_path, **options) as session,
        pytest.raises(ModelError, match=r"block blocks\.0: in its first call result 0 is .* from"),
    ):
        loss_of(model, data[0]).backward()
    assert session.step == 0


def test_refuses_block_whose_gradient_differs(tmp_path):
    model, data = stack_of(Unsteady), Plain.data(1)
    with attached(model, tmp_path) as session:
        loss = loss_of(model, data[0])
        with pytest.raises(
            ModelError, match=r"block blocks\.\d: in its first call the gradient of input 0"
        ):
            loss.backward()
        assert session.step == 0


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_comparison_of_first_calls_changes_no_bit(micro_batch, tmp_path):
    """Dropout included."""
    data, runs = Plain.data(2), []
    for check in (False, True):
        torch.manual_seed(9)
        model = Plain(Dropping)
        with attached(model, tmp_path / str(check), check=check, micro_batch=micro_batch) as s:
            losses = [loss_of(model, data[0]).item()]  # dropped: the next one is the first step
            for batch in data:
                loss = loss_of(model, batch)
                loss.backward()
                losses.append(loss.item())
            runs.append((losses, master_weights(s)))
            compared = {"entry", "blocks.0", "blocks.1", "blocks.2", "exit"} if check else set()
            assert set(s.executor.block_runner.first_calls.checked) == compared
    assert runs[0][0] == runs[1][0]
    assert_same(runs[0][1], runs[1][1])


class Dropping(StepOutput):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.3, self.training)


def test_models_of_the_table_are_not_checked_again(tmp_path):
    model = small_model("llama")
    assert is_tested(model)
    assert not is_tested(stack_of(StepOutput))
    with attached(model, tmp_path) as session:
        assert session.context.check is False
