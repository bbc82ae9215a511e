"""Weights and optimizer state that stay in host memory for the whole run."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lohan.engine.buffers import StateRing, WeightSlots
from lohan.model.layout import FlatGroup
from lohan.schedule.actions import ScheduleSpec
from lohan.store.store import Store, Ticket


class HostCache:
    """The cached slots and buffers of a plan, which are numbered after the shared ones."""

    def __init__(
        self,
        spec: ScheduleSpec,
        groups: Sequence[FlatGroup],
        *,
        store: Store,
        slots: WeightSlots,
        ring: StateRing,
    ) -> None:
        self._spec, self._groups, self._store = spec, groups, store
        self._slots, self._ring = slots, ring

    def resident(self) -> list[tuple[int, torch.Tensor]]:
        """Return the resident groups by number, with their slots, which hold this rank's shards."""
        return [
            (number, self._slots.flat(self._groups[number], self._spec.slots + i))
            for i, number in enumerate(self._spec.host_cached_weights)
            if self._groups[number].resident
        ]

    def load(self, *, trained: bool = False) -> None:
        """Fill the cache from the committed generation; with `trained`, only trained groups."""
        tickets: list[Ticket] = []
        for i, number in enumerate(self._spec.host_cached_weights):
            if trained and not self._spec.chunks[number]:
                continue
            tickets += self._slots.read(self._groups[number], self._spec.slots + i)
        for i, (number, chunk) in enumerate(self._spec.host_cached_state):
            tickets.append(self._ring.read(self._groups[number], chunk, self._spec.ring + i))
        self._store.wait_all(tickets)

    def write_back(self) -> None:
        """Write the chunks to SSD that steps between two commits have changed in memory only."""
        tickets: list[Ticket] = []
        for i, number in enumerate(self._spec.host_cached_weights):
            slot = self._spec.slots + i
            for chunk in range(self._spec.chunks[number]):  # Frozen groups have no chunks.
                tickets.append(self._slots.write(self._groups[number], chunk, slot))
        for i, (number, chunk) in enumerate(self._spec.host_cached_state):
            tickets.append(self._ring.write(self._groups[number], chunk, self._spec.ring + i))
        self._store.wait_all(tickets)
