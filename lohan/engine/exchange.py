"""Gradients of all ranks, summed: every rank has the sum of its own piece.

A message has a row for each rank: the rank's piece of the group, fp32, then a flag for each tensor
that has a gradient here. So a tensor has no gradient in the sum only if it has none on any rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from lohan.device.ranks import Team
from lohan.model.layout import Group
from lohan.model.shards import Ranks
from lohan.util.units import align_up

FLAGS_ALIGN = 16


class Exchange:
    """For groups by number, as whole ones."""

    def __init__(self, team: Team, groups: Sequence[Group]) -> None:
        self._team, self._groups = team, groups

    def over_net(
        self, number: int, grads: dict[int, torch.Tensor], place: torch.device
    ) -> dict[int, torch.Tensor]:
        """On the net lane, where compute is. Takes the gradients."""
        return self._summed(number, grads, place, self._team.sum_rows)

    def here(self, number: int, grads: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """By the caller, in host memory."""
        own = {index: grad.cpu() for index, grad in grads.items()}
        return self._summed(number, own, torch.device("cpu"), self._team.sum_rows_here)

    def _summed(
        self, number: int, grads: dict[int, torch.Tensor], place: torch.device,
        total_of: Callable[[torch.Tensor], torch.Tensor],
    ) -> dict[int, torch.Tensor]:  # fmt: skip
        group, ranks = self._groups[number], self._team.ranks
        rows = pack(group, grads, ranks, place)
        grads.clear()  # packed: they go before the sums of others come
        total = total_of(rows)
        own = ranks.shard(group)
        flags = total[own.numel :].tolist()
        return {
            index: total[spec.offset : spec.offset + spec.numel]
            for index, spec in enumerate(own.tensors)
            if flags[index] and spec.numel
        }


def pack(
    group: Group, grads: Mapping[int, torch.Tensor], ranks: Ranks, place: torch.device
) -> torch.Tensor:
    """The message of one rank: a row for each."""
    count = ranks.shard_numel(group)
    flags = align_up(len(group.tensors), FLAGS_ALIGN)
    rows = torch.zeros(ranks.world, count + flags, dtype=torch.float32, device=place)
    for row, other in zip(rows, ranks.all(), strict=True):
        tensors = other.shard(group).tensors
        for index, grad in grads.items():
            spec = tensors[index]
            row[count + index] = 1.0
            if spec.numel:
                piece = grad.reshape(-1)[spec.begin : spec.begin + spec.numel]
                row[spec.offset : spec.offset + spec.numel] = piece
    return rows
