"""Gradients that are summed over several backward calls and consumed by one step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from lohan.engine.buffers import HostPool
from lohan.model.layout import FlatGroup
from lohan.model.state import FLOAT

OWNER = "accumulated gradients"


def bytes_of_sums(groups: Iterable[FlatGroup]) -> int:
    """Return the bytes of the sums of all trained groups, which are fp32."""
    return sum(group.numel for group in groups if not group.frozen) * FLOAT


class Accumulated:
    """Sums of gradients in host memory, by number of group and index of tensor."""

    def __init__(self, groups: Sequence[FlatGroup], pool: HostPool) -> None:
        self._sums: dict[int, dict[int, torch.Tensor]] = {}
        self._pool, self._reserved = pool, bytes_of_sums(groups)
        pool.reserve(OWNER, self._reserved)

    def add(self, number: int, grads: Mapping[int, torch.Tensor]) -> None:
        sums = self._sums.setdefault(number, {})
        for index, grad in grads.items():
            if index in sums:
                sums[index].add_(grad.to("cpu", torch.float32))
            else:
                sums[index] = grad.to("cpu", torch.float32).contiguous()

    def numbers(self) -> list[int]:
        return sorted(self._sums)

    def take(self, number: int) -> dict[int, torch.Tensor]:
        return self._sums.pop(number)

    def close(self) -> None:
        """Release the sums."""
        self._sums.clear()
        self._pool.unreserve(OWNER, self._reserved)
