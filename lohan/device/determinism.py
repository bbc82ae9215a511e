"""Bitwise repeatable runs on a GPU, by kernels with a fixed order of summation.

On CUDA, the backward of attention, embeddings and scatters add with atomics, in no fixed order, and
cuBLAS may split a product differently if several streams share its workspace. With `deterministic`,
torch selects kernels with a fixed order, or raises an error if there is none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lohan.errors import ConfigError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # read by cuBLAS when it creates its first handle
FIXED = (":4096:8", ":16:8")  # values with which torch considers cuBLAS deterministic


def fix_cublas_workspace() -> None:
    """Give cuBLAS workspaces of a fixed size, which makes its results repeatable.

    Raise ConfigError if the variable has another value, or if it is not set and the process has
    already used CUDA: cuBLAS reads it only once.
    """
    setting = os.environ.get(WORKSPACE)
    if setting in FIXED:
        return
    if setting or torch.cuda.is_initialized():
        raise ConfigError(
            f"deterministic: {WORKSPACE} is {setting or 'not set'} and must be {FIXED[0]} before "
            f"this process uses CUDA; start it with {WORKSPACE}={FIXED[0]}"
        )
    os.environ[WORKSPACE] = FIXED[0]


@contextmanager
def deterministic_algorithms(torch_device: torch.device) -> Iterator[None]:
    """Temporarily restrict torch to kernels that sum in a fixed order.

    cuDNN then does not choose algorithms by timing them. On the CPU, nothing changes, because every
    kernel of a run sums in a fixed order.
    """
    if torch_device.type == "cpu":
        yield
        return
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    # A run never reads uninitialised memory, and filling it would cost a pass over all of it.
    filling: Any = torch.utils.deterministic
    fills, benchmark = filling.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    filling.fill_uninitialized_memory = torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        filling.fill_uninitialized_memory, torch.backends.cudnn.benchmark = fills, benchmark
