"""Held gradients on SSD: put away chunk by chunk after backward, fetched before their update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lohan.engine.pool import HostPool
from lohan.model.layout import Group
from lohan.model.state import chunks, gradient_key
from lohan.store.engine import ALIGN, Buffer
from lohan.store.flight import Ticket
from lohan.store.store import Store
from lohan.util.units import align_up

WIDTH = 4  # room for fp32; gradients keep their own dtype


class Spill:
    """Owner of the staging buffers."""

    def __init__(
        self, store: Store, pool: HostPool, groups: Sequence[Group], *, buffers: int,
        chunk_params: int,
    ) -> None:  # fmt: skip
        self._store, self._groups = store, groups
        self._chunks = [chunks(group, chunk_params) for group in groups]
        largest = min(chunk_params, max(group.numel for group in groups))
        self._buffers = [pool.allocate("gradient staging", largest * WIDTH) for _ in range(buffers)]
        self._kept: dict[int, tuple[torch.dtype, frozenset[int]]] = {}

    def put(
        self, number: int, chunk: int, buffer: int, grads: Mapping[int, torch.Tensor]
    ) -> Ticket:
        """Packs one chunk of a group's gradients and submits its write."""
        dtype = next(iter(grads.values())).dtype if grads else torch.float32
        self._kept[number] = (dtype, frozenset(grads))
        cut = self._chunks[number][chunk]
        flat = self._buffers[buffer].tensor(dtype)
        for piece in cut.pieces:
            grad = grads.get(piece.tensor)
            if grad is not None:
                part = grad.view(-1)[piece.start : piece.stop]
                flat[piece.at : piece.at + len(part)] = part
        place = self._place(number, chunk, buffer)
        return self._store.write(gradient_key(self._groups[number]), chunk, place)

    def get(self, number: int, chunk: int, buffer: int) -> Ticket:
        place = self._place(number, chunk, buffer)
        return self._store.read(gradient_key(self._groups[number]), chunk, place)

    def grad(
        self, number: int, buffer: int, tensor: int, at: int, count: int
    ) -> torch.Tensor | None:
        """A piece of a fetched chunk, None if the tensor had no gradient."""
        dtype, present = self._kept[number]
        return self._buffers[buffer].tensor(dtype)[at : at + count] if tensor in present else None

    def _place(self, number: int, chunk: int, buffer: int) -> Buffer:
        cut = self._chunks[number][chunk]
        return self._buffers[buffer].bytes[: align_up((cut.stop - cut.start) * WIDTH, ALIGN)]
