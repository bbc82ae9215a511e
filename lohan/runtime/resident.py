"""Small parameters that stay in memory for the whole run, as ordinary leaves of the user's graph.

Norms and loose vectors. Their group has a pinned weight slot, which is updated like any other; the
leaves are a copy of it, renewed when the next forward begins.
"""

from __future__ import annotations

import torch
from torch import nn

from lohan.layout import Group, Slot
from lohan.tensors import views


class Resident:
    """Owner of the resident group's parameters. `flat` is the pinned slot."""

    def __init__(
        self, model: nn.Module, *, group: Group, slots: tuple[Slot, ...], flat: torch.Tensor
    ) -> None:
        self._flat = flat
        self._current = torch.empty_like(flat)
        self.parameters = [
            nn.Parameter(view, requires_grad=spec.trainable)
            for view, spec in zip(views(group, self._current), group.tensors, strict=True)
        ]
        for slot in slots:
            module = model.get_submodule(slot.module)
            module._parameters[slot.attribute] = self.parameters[slot.tensor]
        self.publish()

    def publish(self) -> None:
        with torch.no_grad():
            self._current.copy_(self._flat)

    def take_gradients(self) -> dict[int, torch.Tensor]:
        grads = {
            index: parameter.grad.contiguous()
            for index, parameter in enumerate(self.parameters)
            if parameter.grad is not None
        }
        self.drop_gradients()
        return grads

    def drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
