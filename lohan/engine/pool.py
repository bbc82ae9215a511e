"""Host memory under one hard budget, with a ledger of owners.

Large buffers are page-aligned anonymous mappings of exactly the size asked for. Memory that torch
allocates itself (gradients, activations inside a block) is reserved here by name, so that the
ledger holds everything that counts against the budget.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import torch

from lohan.device.base import CpuDevice, Device
from lohan.errors import BudgetError
from lohan.store.engine import ALIGN, Buffer
from lohan.util.units import align_up, format_bytes


@dataclass(frozen=True)
class HostBuffer:
    """Aligned host memory; `bytes` for the store, `tensor(dtype)` for torch, one memory."""

    owner: str
    bytes: Buffer

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(self.bytes).view(dtype)

    def part(self, start: int, stop: int) -> HostBuffer:
        return HostBuffer(self.owner, self.bytes[start:stop])


class HostPool:
    """Hands out host memory until the budget is used up, then refuses with both numbers."""

    def __init__(self, budget_bytes: int, device: Device | None = None) -> None:
        self.budget_bytes = budget_bytes
        self._device, self._plain = device or CpuDevice(), CpuDevice()
        self.peak_bytes = 0
        self._used: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        return sum(self._used.values())

    def ledger(self) -> dict[str, int]:
        with self._lock:
            return dict(self._used)

    def reserve(self, owner: str, count: int) -> None:
        """Counts memory that somebody else allocates against the budget."""
        with self._lock:
            used = self.used_bytes
            if used + count > self.budget_bytes:
                raise BudgetError(
                    f"host memory: {owner} needs {format_bytes(count)} more, but "
                    f"{format_bytes(used)} of the {format_bytes(self.budget_bytes)} budget are "
                    f"taken; raise --host to at least {format_bytes(used + count)} or lower "
                    "--batch"
                )
            self._used[owner] = self._used.get(owner, 0) + count
            self.peak_bytes = max(self.peak_bytes, used + count)

    def unreserve(self, owner: str, count: int) -> None:
        with self._lock:
            left = self._used[owner] - count
            if left:
                self._used[owner] = left
            else:
                del self._used[owner]

    def allocate(self, owner: str, count: int, *, travels: bool = False) -> HostBuffer:
        """`travels`: it is copied to or from the device."""
        if count == 0:
            return HostBuffer(owner, np.empty(0, dtype=np.uint8))
        size = align_up(count, ALIGN)
        self.reserve(owner, size)
        return HostBuffer(owner, (self._device if travels else self._plain).host_memory(size))

    def free(self, buffer: HostBuffer) -> None:
        """Gives the bytes back to the budget; the mapping goes with its last reference."""
        self.unreserve(buffer.owner, len(buffer.bytes))
