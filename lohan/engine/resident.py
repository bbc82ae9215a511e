"""Small parameters that stay in memory for the whole run, as ordinary leaves of the user's graph.

Norms and loose vectors. Their groups have pinned weight slots. The one that is trained is updated
like any other; its leaves are a copy of it, renewed when the next forward begins. Frozen ones are
views of their slot. Of several ranks each has a piece in its slot, and the caller gathers them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from lohan.capture.tensors import views
from lohan.device.ranks import Team
from lohan.model.layout import RESIDENT, Group, Slot


class Resident:
    """Owner of the parameters of the resident groups, each given with its pinned slot."""

    def __init__(
        self, model: nn.Module, *, groups: Sequence[tuple[Group, torch.Tensor]],
        slots: tuple[Slot, ...], place: torch.device, team: Team | None = None,
    ) -> None:  # fmt: skip
        self._team = team
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # of a slot that is updated
        made: dict[str, list[nn.Parameter]] = {RESIDENT: []}
        for group, flat in groups:
            if group.frozen:
                current = self._whole(flat, group.numel).to(place)
            else:
                current = flat.new_empty(group.numel, device=place)
                self._copies.append((current, flat))
            made[group.key] = [
                nn.Parameter(view, requires_grad=spec.trainable)
                for view, spec in zip(views(group, current), group.tensors, strict=True)
            ]
        self.parameters = made[RESIDENT]
        for slot in slots:
            module = model.get_submodule(slot.module)
            module._parameters[slot.attribute] = made[slot.group][slot.tensor]
        self.publish()

    def publish(self) -> None:
        with torch.no_grad():
            for current, flat in self._copies:
                current.copy_(self._whole(flat, current.numel()))

    def _whole(self, flat: torch.Tensor, count: int) -> torch.Tensor:
        return flat if self._team is None else self._team.gather(flat)[:count]

    def take_gradients(self) -> dict[int, torch.Tensor]:
        """In host memory. They are small: where compute is elsewhere, this waits for it."""
        grads = {
            index: parameter.grad.contiguous().cpu()
            for index, parameter in enumerate(self.parameters)
            if parameter.grad is not None
        }
        self.drop_gradients()
        return grads

    def drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
