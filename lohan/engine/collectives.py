"""Collectives of a step: sums of gradients over the ranks, and agreement on common decisions.

In a process group with one rank, all of them are the identity.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import torch

from lohan.device.accelerator import read_back
from lohan.device.base import Device
from lohan.device.ranks import ProcessGroup
from lohan.errors import RankError
from lohan.model.layout import FlatGroup, RankInfo
from lohan.util.units import align_up

FLAGS_ALIGN = 16


class StepCollectives:
    """Reductions over the ranks of one step.

    Groups are given by number. The net lane calls `reduce_scatter`, and the calling thread calls
    all other methods.
    """

    def __init__(self, process_group: ProcessGroup, groups: Sequence[FlatGroup]) -> None:
        self.process_group, self._groups = process_group, groups

    # -- gradients: every rank gets the sum of its own shard --------------------------------------

    def reduce_scatter(
        self, number: int, grads: dict[int, torch.Tensor], device: Device
    ) -> dict[int, torch.Tensor]:
        """Return the sum over all ranks of this rank's shard, and clear `grads`.

        Called on the net lane. The memory of `grads` belongs to compute's stream, which may reuse
        it as soon as it is free, while the net stream still has to read it.
        """
        rows = pack(self._groups[number], grads, self.process_group.ranks, device.torch_device)
        device.record_stream("net", list(grads.values()))
        grads.clear()  # The sum takes as much memory, so free this first.
        return self._shard_of(number, self.process_group.reduce_scatter(rows))

    def reduce_scatter_host(
        self, number: int, grads: Mapping[int, torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Return the sum of this rank's shard, in host memory, on the calling thread."""
        host_grads = {index: grad.cpu() for index, grad in grads.items()}
        if not self.process_group.several:
            return host_grads
        rows = pack(self._groups[number], host_grads, self.process_group.ranks, torch.device("cpu"))
        host_grads.clear()
        return self._shard_of(number, self.process_group.reduce_scatter_host(rows))

    def _shard_of(self, number: int, total: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return the gradients in a summed row by tensor, if any rank has one."""
        shard = self.process_group.ranks.shard(self._groups[number])
        flags = read_back(total[shard.numel :]).tolist()
        return {
            index: total[spec.offset : spec.offset + spec.numel]
            for index, spec in enumerate(shard.tensors)
            if flags[index] and spec.numel
        }

    # -- agreement of the ranks --------------------------------------------------------------------

    def late_groups(self, collectives_checksum: int, numbers: list[int]) -> list[int]:
        """Return the groups with gradients on some rank that no schedule reduces.

        `collectives_checksum` covers the collectives that this rank has called, and must be equal
        on all ranks.
        """
        gathered = self.process_group.all_gather_object([collectives_checksum, numbers])
        for rank, (checksum, _) in enumerate(gathered):
            if checksum != gathered[0][0]:
                raise RankError(
                    f"rank {rank} called the blocks of the model in another order than rank 0, "
                    "which several ranks cannot do: they gather every block together; switch off "
                    "random or data-dependent choices of blocks, or train on one rank"
                )
        return sorted({number for _, numbers_of_rank in gathered for number in numbers_of_rank})

    def all_reduce_sum(self, number: float) -> float:
        """Return the sum over all ranks, with the same bits on every rank."""
        return math.fsum(self.process_group.all_gather_object(number))

    def loss(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum of the loss over all ranks.

        With one rank, this does not wait for compute.
        """
        if not self.process_group.several:
            return part
        return torch.full_like(part, self.all_reduce_sum(part.item()))

    def absent(self, names: list[str]) -> list[str]:
        """Return the gradients that are absent on all ranks."""
        common = set(names).intersection(*self.process_group.all_gather_object(names))
        return [name for name in names if name in common]


def pack(
    group: FlatGroup, grads: Mapping[int, torch.Tensor], ranks: RankInfo, torch_device: torch.device
) -> torch.Tensor:
    """Return the message of one rank, with a row for each rank.

    A row holds that rank's shard of the group in fp32, then a flag for each tensor that has a
    gradient here. A tensor has no gradient in the sum only if it has none on any rank. Nothing here
    waits for the device.
    """
    count = ranks.shard_numel(group)
    flags = align_up(len(group.tensors), FLAGS_ALIGN)
    rows = torch.zeros(ranks.world, count + flags, dtype=torch.float32, device=torch_device)
    for first, last in _runs(sorted(grads)):
        # Assigning a number to a tensor would wait for the device.
        rows[:, count + first : count + last].fill_(1.0)
    for row, other in zip(rows, ranks.all(), strict=True):
        tensors = other.shard(group).tensors
        for index, grad in grads.items():
            spec = tensors[index]
            if spec.numel:
                shard = grad.reshape(-1)[spec.begin : spec.begin + spec.numel]
                row[spec.offset : spec.offset + spec.numel] = shard
    return rows


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the ranges (first, last + 1) of consecutive numbers in a sorted sequence."""
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run_numbers = [number for _, number in run]
        yield run_numbers[0], run_numbers[-1] + 1
