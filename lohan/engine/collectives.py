"""Collectives of a step: gradients summed over the ranks, and what the ranks agree on. In a group
of one process all of them are identities."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from lohan.device.ranks import ProcessGroup
from lohan.errors import RankError
from lohan.model.layout import Group, Ranks
from lohan.util.units import align_up

FLAGS_ALIGN = 16


class StepCollectives:
    """For groups by number, as whole ones. The net lane calls `reduce_scatter`, the caller all
    others."""

    def __init__(self, process_group: ProcessGroup, groups: Sequence[Group]) -> None:
        self.process_group, self._groups = process_group, groups

    # -- gradients: every rank gets the sum of its own piece --------------------------------------

    def reduce_scatter(
        self, number: int, grads: dict[int, torch.Tensor], place: torch.device
    ) -> dict[int, torch.Tensor]:
        """On the net lane, where compute is. Takes the gradients."""
        return self._reduced(number, grads, place, self.process_group.reduce_scatter)

    def reduce_scatter_host(
        self, number: int, grads: Mapping[int, torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """By the caller, in host memory."""
        own = {index: grad.cpu() for index, grad in grads.items()}
        if not self.process_group.several:
            return own
        host = torch.device("cpu")
        return self._reduced(number, own, host, self.process_group.reduce_scatter_host)

    def _reduced(
        self, number: int, grads: dict[int, torch.Tensor], place: torch.device,
        reduce_scatter: Callable[[torch.Tensor], torch.Tensor],
    ) -> dict[int, torch.Tensor]:  # fmt: skip
        group, ranks = self._groups[number], self.process_group.ranks
        rows = pack(group, grads, ranks, place)
        grads.clear()  # packed: they go before the sums of others come
        total = reduce_scatter(rows)
        own = ranks.shard(group)
        flags = total[own.numel :].tolist()
        return {
            index: total[spec.offset : spec.offset + spec.numel]
            for index, spec in enumerate(own.tensors)
            if flags[index] and spec.numel
        }

    # -- what the ranks agree on ------------------------------------------------------------------

    def late_groups(self, collectives_checksum: int, numbers: list[int]) -> list[int]:
        """Groups that have gradients on some rank which no schedule exchanges.
        `collectives_checksum`, of the collectives that this rank has called, must be the same for
        all."""
        said = self.process_group.all_gather_object([collectives_checksum, numbers])
        for rank, (checksum, _) in enumerate(said):
            if checksum != said[0][0]:
                raise RankError(
                    f"rank {rank} called the blocks of the model in another order than rank 0, "
                    "which several ranks cannot do: they gather every block together; switch off "
                    "what decides by chance or by data which blocks run, or train on one rank"
                )
        return sorted({number for _, own in said for number in own})

    def added(self, number: float) -> float:
        """The same bits on every rank."""
        return math.fsum(self.process_group.all_gather_object(number))

    def loss(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' parts of a loss. Alone, compute is not waited for."""
        if not self.process_group.several:
            return part
        return torch.full_like(part, self.added(part.item()))

    def absent(self, names: list[str]) -> list[str]:
        """Those that all ranks name."""
        common = set(names).intersection(*self.process_group.all_gather_object(names))
        return [name for name in names if name in common]


def pack(
    group: Group, grads: Mapping[int, torch.Tensor], ranks: Ranks, place: torch.device
) -> torch.Tensor:
    """The message of one rank, a row for each: the rank's piece of the group, fp32, then a flag for
    each tensor that has a gradient here. So a tensor has no gradient in the sum only if it has none
    on any rank."""
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
