"""Small parameters that stay in memory for the whole run, as ordinary leaves of the user's graph.

Norms and loose vectors: their gradients gather in `.grad` as usual, are consumed when backward has
ended, and their new values become visible when the step is committed, not before.
"""

from __future__ import annotations

import torch
from torch import nn

from lohan.blocks import Group, Slot, views
from lohan.runtime.optimizer import StepScalars, Updater
from lohan.runtime.pool import HostPool
from lohan.state import Mode, chunks, weight_key
from lohan.storage.store import Store


class Resident:
    """Owner of the resident group's parameters."""

    def __init__(
        self, model: nn.Module, *, group: Group, slots: tuple[Slot, ...], store: Store,
        pool: HostPool, mode: Mode, chunk_params: int,
    ) -> None:  # fmt: skip
        self._group = group
        size = group.numel * mode.weight_bytes
        current, following = (pool.allocate("resident weights", size) for _ in range(2))
        width = mode.weight_bytes
        for chunk in chunks(group, chunk_params):
            part = current.part(chunk.start * width, chunk.stop * width)
            store.wait(store.read(weight_key(group), chunk.index, part.bytes))
        self._current = current.part(0, size).tensor(mode.dtype)
        self._next = following.part(0, size).tensor(mode.dtype)
        self.parameters = [
            nn.Parameter(view, requires_grad=spec.trainable)
            for view, spec in zip(views(group, self._current), group.tensors, strict=True)
        ]
        for slot in slots:
            module = model.get_submodule(slot.module)
            module._parameters[slot.attribute] = self.parameters[slot.tensor]

    def gradients(self) -> dict[int, torch.Tensor]:
        return {
            index: parameter.grad.contiguous()
            for index, parameter in enumerate(self.parameters)
            if parameter.grad is not None
        }

    def update(self, updater: Updater, scalars: StepScalars) -> None:
        self._next.copy_(self._current)
        updater.update(self._group, self._next, self.gradients(), scalars)

    def publish(self) -> None:
        """The step is committed: the new values take the place of the old."""
        self._current.copy_(self._next)
        self.drop_gradients()

    def drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
