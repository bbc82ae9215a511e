"""Kernels that torch does not dispatch: planning names them, recomputation runs what they read."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import nn

from lohan.errors import ModelError
from tests.support.small_models import attached

WIDTH = 8


class Raw(torch.autograd.Function):
    """Doubles its input with code that torch does not see, and saves nothing for backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        _copy_doubled(out.data_ptr(), x.data_ptr(), x.numel())
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


class FromC(torch.autograd.Function):
    """The same with a kernel that takes the addresses in C++, where Python does not see it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        with torch._C.DisableTorchFunction():
            _copy_doubled(out.data_ptr(), x.data_ptr(), x.numel())
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


def _copy_doubled(into: int, source: int, count: int) -> None:
    kind = ctypes.c_float * count
    target = kind.from_address(into)
    for position, value in enumerate(kind.from_address(source)):
        target[position] = 2 * value


class Block(nn.Module):
    def __init__(self, kernel: Any) -> None:
        super().__init__()
        self.norm, self.kernel = nn.LayerNorm(WIDTH), kernel
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.kernel(self.first(self.norm(x))))


class Model(nn.Module):
    def __init__(self, kernel: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(kernel) for _ in range(2))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(x, target)


def batch() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    return {name: torch.randn(4, 3, WIDTH, generator=made) for name in ("x", "target")}


def losses(kernel: Any, tmp_path: Any) -> list[float]:
    found = []
    with attached(Model(kernel), tmp_path) as session:
        for _ in range(4):
            loss = session.model(**batch())
            loss.backward()
            found.append(loss.item())
    return found


@pytest.mark.parametrize("kernel", [Raw, FromC])
def test_recomputation_runs_what_an_unseen_kernel_reads(kernel, tmp_path):
    """Nothing but the kernel reads the first projection, and autograd does not save it."""
    wanted = losses(lambda x: x + x, tmp_path / "operators")
    assert losses(kernel.apply, tmp_path / "kernel") == wanted


def test_planning_names_the_module_of_a_kernel(tmp_path):
    with (
        pytest.raises(ModelError, match=r"blocks\.0 \(Block\).*torch\.library.*`batch`"),
        attached(Model(Raw.apply), tmp_path, batch=batch()),
    ):
        pass
