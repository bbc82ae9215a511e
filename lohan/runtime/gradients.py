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


def sum_of_squares(grads: Mapping[int, torch.Tensor]) -> float:
    """In double precision and a fixed order: the same on every lane and in every mode."""
    return math.fsum(_core.sum_squares(grads[index].view(-1)) for index in sorted(grads))
