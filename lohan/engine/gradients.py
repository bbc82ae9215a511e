"""Gradients between the block that makes them and the optimizer that consumes them.

They never exist for the whole model unless something needs them all (clipping, loss scaling): a
group's gradients are taken as soon as its last use in backward is done. Tied weights wait from
their first use in backward to their last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from lohan import _core
from lohan.device.base import Device
from lohan.model.layout import Group
from lohan.model.state import FLOAT


class GradientSink:
    """Collects gradients by (group, tensor); uses are counted so that the last one is known."""

    def __init__(self) -> None:
        self._grads: dict[str, dict[int, torch.Tensor]] = {}
        self._uses: dict[str, int] = {}

    def expect(self, group: str) -> None:
        self._uses[group] = self._uses.get(group, 0) + 1

    def withdraw(self, group: str) -> bool:
        """One use is over; true if it was the last."""
        self._uses[group] -= 1
        return self._uses[group] == 0

    def add(self, group: str, tensor: int, grad: torch.Tensor, *, wide: bool) -> None:
        """Adds a gradient. `wide` sums in fp32: several 16-bit parts would lose bits."""
        grads = self._grads.setdefault(group, {})
        if tensor in grads:
            grads[tensor].add_(grad)
        else:
            grads[tensor] = grad.float() if wide else grad.contiguous()

    def take(self, group: str) -> dict[int, torch.Tensor]:
        return self._grads.pop(group, {})

    def put(self, group: str, made: dict[int, torch.Tensor], *, factor: float) -> None:
        """Adds gradients that were made ahead of backward, in forward, times `factor`."""
        grads = self._grads.setdefault(group, {})
        for tensor, grad in made.items():
            if factor != 1.0:
                grad.mul_(factor)
            grads[tensor] = grads[tensor].float().add_(grad) if tensor in grads else grad

    def waiting(self) -> list[str]:
        return list(self._grads)

    def uses(self, group: str) -> int:
        return self._uses.get(group, 0)

    def clear(self) -> None:
        self._grads.clear()


class Landing:
    """Host memory for gradients that come from the device: buffers that are used again. `limit`: in
    bytes, what they may take before those at rest are given up for new ones."""

    def __init__(self, device: Device, limit: int) -> None:
        self._device, self._limit = device, limit
        self._resting: list[torch.Tensor] = []
        self._used: dict[int, torch.Tensor] = {}  # by number of group
        self._early: dict[int, torch.Tensor] = {}  # for gradients that get more later, by group
        self._aside: dict[int, dict[int, torch.Tensor]] = {}  # what lies there, by group and tensor

    def set_aside(self, number: int, group: Group, grads: Mapping[int, torch.Tensor]) -> None:
        """Gradients to which another block of this backward adds wait in host memory: the device is
        rid of them when it returns."""
        if not grads:
            return
        if number not in self._early:
            self._early[number] = torch.from_numpy(self._device.host_memory(group.numel * FLOAT))
        there = self._aside[number] = {}
        for index, grad in grads.items():
            start, count = group.tensors[index].offset * FLOAT, grad.numel() * FLOAT
            own = self._early[number][start : start + count].view(torch.float32).view(grad.shape)
            pairs = [(own, grad.float().contiguous())]
            self._device.copy("d2h", pairs, after=self._device.mark()).synchronize()
            there[index] = own

    def take_back(self, number: int) -> dict[int, torch.Tensor]:
        """What was set aside, on the device again: sums go on in the order of the blocks."""
        made = {}
        for index, own in self._aside.pop(number, {}).items():
            flat = self._device.allocate(own.numel() * FLOAT)
            made[index] = flat.view(torch.float32).view(own.shape)
            pairs = [(made[index], own)]
            self._device.copy("h2d", pairs).synchronize()  # Note [long-lived slots]
        return made

    def aside(self) -> dict[int, dict[int, torch.Tensor]]:
        """What waits for a block that adds to it, by group and tensor."""
        return self._aside

    def land(
        self, number: int, group: Group, grads: Mapping[int, torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Copies a group's gradients; they are there when it returns."""
        width = max((grad.itemsize for grad in grads.values()), default=0)
        flat = self._take(number, group.numel * width)
        made = {}
        for index, grad in grads.items():
            start, count = group.tensors[index].offset * width, grad.numel() * grad.itemsize
            made[index] = flat[start : start + count].view(grad.dtype).view(grad.shape)
        pairs = [(made[index], grad.contiguous()) for index, grad in grads.items()]
        self._device.copy("d2h", pairs).synchronize()
        return made

    def _take(self, number: int, size: int) -> torch.Tensor:
        self.give_back(number)
        fitting = [i for i, buffer in enumerate(self._resting) if len(buffer) >= size]
        if fitting:
            best = min(fitting, key=lambda i: len(self._resting[i]))
            self._used[number] = self._resting.pop(best)
        else:
            there = sum(map(len, (*self._resting, *self._used.values())))
            if there + size > self._limit:
                self._resting.clear()
            self._used[number] = torch.from_numpy(self._device.host_memory(max(size, 1)))
        return self._used[number]

    def give_back(self, number: int) -> None:
        """Nobody needs the gradients of a group any more."""
        buffer = self._used.pop(number, None)
        if buffer is not None:
            self._resting.append(buffer)

    def clear(self) -> None:
        self._aside.clear()
        for number in list(self._used):
            self.give_back(number)


def sum_of_squares(grads: Mapping[int, torch.Tensor]) -> float:
    """In double precision and a fixed order: the same on every lane and in every mode."""
    return math.fsum(_core.sum_squares(grads[index].view(-1)) for index in sorted(grads))
