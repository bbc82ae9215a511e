"""Compute weights in slots of host memory and of the device. Which group lies in which slot when is
the schedule's business."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lohan.device.base import Device
from lohan.layout import Group
from lohan.runtime.pool import HostBuffer, HostPool
from lohan.state import Mode, chunks, weight_key
from lohan.storage.flight import Ticket
from lohan.storage.store import Store
from lohan.tensors import dtype_of


class WeightSlots:
    """Owner of the slots: `slots` that any group may pass through, then one per pinned group."""

    def __init__(
        self, store: Store, pool: HostPool, *, moving: list[Group], pinned: list[Group],
        slots: int, mode: Mode, chunk_params: int,
    ) -> None:  # fmt: skip
        self._store, self._mode, self._chunk_params = store, mode, chunk_params
        size = max((group.numel for group in moving), default=0) * mode.weight_bytes
        self._buffers = [pool.allocate("weight slots", size, travels=True) for _ in range(slots)]
        self._buffers += [
            pool.allocate("pinned weights", group.numel * mode.weight_bytes, travels=True)
            for group in pinned
        ]

    def flat(self, group: Group, slot: int) -> torch.Tensor:
        return self._part(slot, 0, group.numel).tensor(dtype_of(self._mode))

    def read(self, group: Group, slot: int) -> Iterator[Ticket]:
        """Submits reads of the group's newest weights into a slot, one by one."""
        for c in chunks(group, self._chunk_params):
            part = self._part(slot, c.start, c.stop)
            yield self._store.read(weight_key(group), c.index, part.bytes, fresh=None)

    def write(self, group: Group, chunk: int, slot: int) -> Ticket:
        cut = chunks(group, self._chunk_params)[chunk]
        return self._store.write(
            weight_key(group), chunk, self._part(slot, cut.start, cut.stop).bytes
        )

    def _part(self, slot: int, start: int, stop: int) -> HostBuffer:
        width = self._mode.weight_bytes
        return self._buffers[slot].part(start * width, stop * width)


class DeviceSlots:
    """Slots on the device, each as large as the largest group that passes through."""

    def __init__(self, device: Device, *, groups: list[Group], slots: int, mode: Mode) -> None:
        self._device, self._dtype = device, dtype_of(mode)
        size = max((group.numel for group in groups), default=0) * mode.weight_bytes
        self._slots = [device.allocate(size) for _ in range(slots)]

    def flat(self, group: Group, place: int) -> torch.Tensor:
        return self._slots[place].view(self._dtype)[: group.numel]

    def load(self, group: Group, place: int, weights: torch.Tensor) -> None:
        """They are there when it returns."""
        self._device.copy("h2d", [(self.flat(group, place), weights)]).synchronize()
