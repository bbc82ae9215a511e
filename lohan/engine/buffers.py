"""Compute weights in slots of host memory and of the device. Which group lies in which slot when is
the schedule's business."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lohan.capture.tensors import dtype_of
from lohan.device.base import Device
from lohan.device.ranks import Team
from lohan.engine.pool import HostBuffer, HostPool
from lohan.model.layout import Group
from lohan.model.shards import Ranks
from lohan.model.state import Mode, chunks, weight_key
from lohan.store.flight import Ticket
from lohan.store.store import Store


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
    """Slots on the device, each as large as the largest group that passes through. Of several
    ranks, each loads its own piece of a group, and all of them gather the rest."""

    def __init__(
        self, device: Device, *, groups: list[Group], slots: int, mode: Mode,
        team: Team | None = None,
    ) -> None:  # fmt: skip
        self._device, self._dtype, self._team = device, dtype_of(mode), team
        self._ranks = team.ranks if team is not None else Ranks()
        size = max(map(self._ranks.padded, groups), default=0) * mode.weight_bytes
        self._slots = [device.allocate(size) for _ in range(slots)]

    def flat(self, group: Group, place: int) -> torch.Tensor:
        """A whole group."""
        return self._slots[place].view(self._dtype)[: group.numel]

    def load(self, place: int, piece: torch.Tensor) -> None:
        """This rank's piece of a group is there when it returns."""
        self._device.copy("h2d", [(self._own(place, piece.numel()), piece)]).synchronize()

    def gather(self, place: int, count: int) -> None:
        """The pieces of all ranks, of so many elements each, are there when it returns."""
        assert self._team is not None
        whole = self._slots[place].view(self._dtype)[: count * self._ranks.world]
        self._team.gather_into(whole, self._own(place, count))

    def _own(self, place: int, count: int) -> torch.Tensor:
        start = self._ranks.rank * count
        return self._slots[place].view(self._dtype)[start : start + count]
