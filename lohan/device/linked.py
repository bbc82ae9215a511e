"""The cpu as a device with a memory of its own, for one of several ranks.

A rank's host memory holds its piece of the weights, compute needs whole blocks. So ranks have
weight slots for compute beside those for pieces, and everything runs through the code of devices
with a link. Both memories are host memory here: copies are copies of memory, done by the lane that
asks for them, and both count against the rank's host budget.
"""

from __future__ import annotations

import torch

from lohan.device.base import CpuDevice, Event, Pairs, Passed


class LinkedCpuDevice(CpuDevice):
    """`memory`: the bytes of the host budget that are compute's."""

    linked = True

    def __init__(self, memory: int = 0) -> None:
        self.memory = memory

    def memory_bytes(self) -> int:
        return self.memory

    def allocate(self, count: int) -> torch.Tensor:
        return torch.from_numpy(self.host_memory(count))

    def copy(self, lane: str, pairs: Pairs, *, after: Event | None = None) -> Event:
        """`after` has come: compute is done by the time it is given."""
        for dst, src in pairs:
            dst.copy_(src)
        return Passed()
