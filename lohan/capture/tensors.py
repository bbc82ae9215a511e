"""Flat bytes of weights and state as torch tensors."""

from __future__ import annotations

import torch

from lohan.model.layout import Group
from lohan.model.state import Mode


def dtype_of(mode: Mode) -> torch.dtype:
    """The dtype a mode computes in."""
    return _torch(mode.dtype)


def split(mode: Mode, flat: torch.Tensor, parameters: int) -> dict[str, torch.Tensor]:
    """Named arrays inside the state chunk of so many parameters, given as uint8."""
    offset, parts = 0, {}
    for array in mode.arrays:
        size = array.size(parameters)
        parts[array.name] = flat[offset : offset + size].view(_torch(array.dtype))
        offset += size
    return parts


def _torch(dtype: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, dtype)
    return found


def views(group: Group, flat: torch.Tensor) -> list[torch.Tensor]:
    """The group's parameters as views of its flat buffer."""
    return [flat[t.offset : t.offset + t.numel].view(t.shape) for t in group.tensors]
