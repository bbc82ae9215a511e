"""Compute weights in host slots: acquire before use, release after.

A slot remembers which group and generation its bytes are, so what is still there is not read
again: the last block at the turn from forward to backward, the first block at the next step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lohan.blocks import Group
from lohan.errors import LohanError
from lohan.runtime.pool import HostBuffer, HostPool
from lohan.state import Mode, chunks, weight_key
from lohan.storage.store import Store


@dataclass
class _Slot:
    buffer: HostBuffer
    content: tuple[str, int] | None = None  # (group key, generation) of the bytes
    holders: int = 0
    last_use: int = 0


class Weights:
    """Owner of the weight slots."""

    def __init__(
        self, store: Store, pool: HostPool, *, groups: list[Group], mode: Mode, chunk_params: int,
        slots: int,
    ) -> None:  # fmt: skip
        self._store = store
        self._mode = mode
        self._chunk_params = chunk_params
        self._clock = 0
        size = max((group.numel for group in groups), default=0) * mode.weight_bytes
        self._slots = [_Slot(pool.allocate("weights", size)) for _ in range(slots if size else 0)]

    def acquire(self, group: Group) -> torch.Tensor:
        """The group's flat weights of the committed generation, held until `release`."""
        content = (group.key, self._store.generation)
        slot = next((s for s in self._slots if s.content == content), None)
        if slot is None:
            free = [s for s in self._slots if not s.holders]
            if not free:
                raise LohanError(
                    f"no free weight slot for {group.key}: all {len(self._slots)} are held"
                )
            slot = min(free, key=lambda s: s.last_use)
            slot.content = None
            self._read(group, slot.buffer)
            slot.content = content
        self._clock += 1
        slot.holders += 1
        slot.last_use = self._clock
        return self._flat(group, slot)

    def release(self, group: Group) -> None:
        slot = self._held(group)
        slot.holders -= 1

    def mark_updated(self, group: Group) -> None:
        """The held bytes are the next generation's now, and in the store as such."""
        slot = self._held(group)
        slot.content = (group.key, self._store.generation + 1)

    def mark_torn(self, group: Group) -> None:
        """The held bytes are about to change: nobody else may take them for a generation."""
        slot = self._held(group)
        slot.content = (group.key, -1)

    def forget(self) -> None:
        """After an error: no slot's bytes are trusted, none is held."""
        for slot in self._slots:
            slot.content, slot.holders = None, 0

    def _held(self, group: Group) -> _Slot:
        return next(s for s in self._slots if s.holders and s.content and s.content[0] == group.key)

    def _flat(self, group: Group, slot: _Slot) -> torch.Tensor:
        size = group.numel * self._mode.weight_bytes
        return slot.buffer.part(0, size).tensor(self._mode.dtype)

    def _read(self, group: Group, buffer: HostBuffer) -> None:
        width = self._mode.weight_bytes
        tickets = [
            self._store.read(
                weight_key(group),
                chunk.index,
                buffer.part(chunk.start * width, chunk.stop * width).bytes,
            )
            for chunk in chunks(group, self._chunk_params)
        ]
        for ticket in tickets:
            self._store.wait(ticket)
