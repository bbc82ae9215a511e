"""Collectives of a step: gradients summed over ranks, and what ranks agree on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from lohan.device.ranks import ProcessGroup
from lohan.errors import RankError
from lohan.model.layout import Group, Ranks
from lohan.util.units import align_up

# -- Gradients of all ranks, summed: every rank has the sum of its own piece -----------------------
#
# A message has a row for each rank: the rank's piece of the group, fp32, then a flag for each
# tensor that has a gradient here. So a tensor has no gradient in the sum only if it has none on
# any rank.


FLAGS_ALIGN = 16


class GradientReducer:
    """For groups by number, as whole ones."""

    def __init__(self, process_group: ProcessGroup, groups: Sequence[Group]) -> None:
        self._process_group, self._groups = process_group, groups

    def reduce_scatter(
        self, number: int, grads: dict[int, torch.Tensor], place: torch.device
    ) -> dict[int, torch.Tensor]:
        """On the net lane, where compute is. Takes the gradients."""
        return self._summed(number, grads, place, self._process_group.reduce_scatter)

    def here(self, number: int, grads: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """By the caller, in host memory."""
        own = {index: grad.cpu() for index, grad in grads.items()}
        return self._summed(
            number, own, torch.device("cpu"), self._process_group.reduce_scatter_host
        )

    def _summed(
        self, number: int, grads: dict[int, torch.Tensor], place: torch.device,
        total_of: Callable[[torch.Tensor], torch.Tensor],
    ) -> dict[int, torch.Tensor]:  # fmt: skip
        group, ranks = self._groups[number], self._process_group.ranks
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


# -- What the ranks of a run agree on in the course of a step, by the caller's thread --------------
#
# A process that is alone agrees with itself.


class StepCollectives:
    def __init__(self, process_group: ProcessGroup | None, groups: Sequence[Group]) -> None:
        self.process_group = process_group
        self._exchange = None if process_group is None else GradientReducer(process_group, groups)

    def late(self, collectives_checksum: int, numbers: list[int]) -> list[int]:
        """Groups that have gradients on some rank which no schedule exchanges.
        `collectives_checksum`, of the collectives that this rank has called, must be the same for
        all."""
        if self.process_group is None:
            return numbers
        said = self.process_group.all_gather_object([collectives_checksum, numbers])
        if any(other != collectives_checksum for other, _ in said):
            odd = next(rank for rank, (other, _) in enumerate(said) if other != said[0][0])
            raise RankError(
                f"rank {odd} called the blocks of the model in another order than rank 0, which "
                "several ranks cannot do: they gather every block together; switch off what "
                "decides by chance or by data which blocks run, or train on one rank"
            )
        return sorted({number for _, own in said for number in own})

    def summed(self, number: int, grads: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Gradients in host memory, of this rank's piece, added up over the ranks."""
        if self._exchange is None:
            return grads
        return self._exchange.here(number, grads)

    def added(self, number: float) -> float:
        """The same bits on every rank."""
        return (
            number
            if self.process_group is None
            else math.fsum(self.process_group.all_gather_object(number))
        )

    @property
    def world(self) -> int:
        return 1 if self.process_group is None else self.process_group.world

    def loss(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' parts of a loss."""
        return (
            part if self.process_group is None else torch.full_like(part, self.added(part.item()))
        )

    def absent(self, names: list[str]) -> list[str]:
        """Those that all ranks name."""
        if self.process_group is None:
            return names
        common = set(names).intersection(*self.process_group.all_gather_object(names))
        return [name for name in names if name in common]
