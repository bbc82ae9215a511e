"""Flat bytes of weights and state as torch tensors."""

from __future__ import annotations

import torch

from lohan.layout import Group
from lohan.state import Mode


def dtype_of(mode: Mode) -> torch.dtype:
    """The dtype a mode computes in."""
    return _torch(mode.dtype)


def split(mode: Mode, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """Named arrays inside one state chunk, given as uint8."""
    count, offset, parts = flat.numel() // mode.state_bytes, 0, {}
    for name, dtype in mode.arrays:
        kind = _torch(dtype)
        size = count * kind.itemsize
        parts[name] = flat[offset : offset + size].view(kind)
        offset += size
    return parts


def _torch(dtype: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, dtype)
    return found


def views(group: Group, flat: torch.Tensor) -> list[torch.Tensor]:
    """The group's parameters as views of its flat buffer."""
    return [flat[t.offset : t.offset + t.numel].view(t.shape) for t in group.tensors]
