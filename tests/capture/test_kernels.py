"""Planning names kernels that torch does not dispatch, and recomputation runs what they read."""

from __future__ import annotations

import ctypes
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama

from lohan.errors import ModelError
from tests.support.models import attached, batches, small_model

WIDTH = 8


class Raw(torch.autograd.Function):
    """A block that doubles its input with code that torch does not see, and saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        _copy_doubled(out.data_ptr(), x.data_ptr(), x.numel())
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


class FromC(torch.autograd.Function):
    """The same with a kernel that takes the addresses in C++, where Python cannot see it."""

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
    result = torch.Generator().manual_seed(1)
    return {name: torch.randn(4, 3, WIDTH, generator=result) for name in ("x", "target")}


def losses(kernel: Any, tmp_path: Any) -> list[float]:
    collected = []
    with attached(Model(kernel), tmp_path) as session:
        for _ in range(4):
            loss = session.model(**batch())
            loss.backward()
            collected.append(loss.item())
    return collected


@pytest.mark.parametrize("kernel", [Raw, FromC])
def test_recomputation_runs_what_an_unseen_kernel_reads(kernel, tmp_path):
    """Nothing but the kernel reads the first projection, and autograd does not save it."""
    wanted = losses(lambda x: x + x, tmp_path / "operators")
    assert losses(kernel.apply, tmp_path / "kernel") == wanted


def refused(kernel: Any, tmp_path: Path) -> str:
    """Return the message with which planning refuses a kernel."""
    with (
        pytest.raises(ModelError) as error,
        attached(Model(kernel), tmp_path / "run", batch=batch()),
    ):
        pass
    return str(error.value)


def test_planning_names_the_module_of_a_kernel(tmp_path):
    message = refused(Raw.apply, tmp_path)
    assert message.startswith("module blocks.0 (Block) calls a kernel that torch does not dispatch")
    assert "torch.library" in message and "`batch`" in message and "uninstall" not in message


PACKAGE = """
from torch import nn

def kernel(x):
    return x * x.data_ptr()

class Norm(nn.Module):
    forward = staticmethod(kernel)
"""


def package_with_kernel(name: str, folder: Path, monkeypatch: Any) -> ModuleType:
    """Return the module NAME.ops of a package that launches a kernel."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").touch()
    (folder / name / "ops.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(folder)
    for module in (name, f"{name}.ops"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return importlib.import_module(f"{name}.ops")


def test_planning_names_the_package_of_a_kernel(tmp_path, monkeypatch):
    """Models use fla, mamba-ssm and causal-conv1d if they are installed."""
    message = refused(package_with_kernel("scans", tmp_path, monkeypatch).kernel, tmp_path)
    assert "module blocks.0 (Block) calls a kernel" in message
    assert "(scans.ops)" in message and "uninstall scans, if the model also runs" in message


def test_planning_says_how_to_apply_liger(tmp_path, monkeypatch):
    """A class of Liger has no forward without kernels, unlike a class that Liger has changed."""
    message = refused(package_with_kernel("liger_kernel", tmp_path, monkeypatch).Norm(), tmp_path)
    assert "module blocks.0.kernel (Norm)" in message
    assert "apply Liger to the model after it has been created" in message


def test_replaced_rotary_embedding_is_planned_plain_and_then_runs(tmp_path, monkeypatch):
    """A block with such a kernel keeps no results, since the kernel cannot be recorded."""
    rows, plain, calls, collected = batches(2, batch=2, seq=8), modeling_llama, [], []
    rotary = plain.apply_rotary_pos_emb

    def liger_rotary_pos_emb(q: torch.Tensor, k: torch.Tensor, *angles: Any, **options: Any) -> Any:
        calls.append(q.data_ptr())
        return rotary(q, k, *angles, **options)

    liger_rotary_pos_emb.__module__ = "liger_kernel.transformers.rope"
    for function in (rotary, liger_rotary_pos_emb):
        monkeypatch.setattr(plain, "apply_rotary_pos_emb", function)
        place = tmp_path / function.__name__
        with attached(small_model("llama"), place, batch=rows[0], activations="all") as session:
            for row in rows:
                loss = session.model(**row).loss
                loss.backward()
                collected.append((bool(session.plan.kept), loss.item()))
    assert calls and plain.apply_rotary_pos_emb is liger_rotary_pos_emb
    assert [kept for kept, _ in collected] == [True, True, False, False]
    assert collected[0][1] == collected[2][1] and collected[1][1] == collected[3][1]
