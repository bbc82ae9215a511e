"""Parameters of a run while its ranks have their stores open: the first asks, all answer.

Each rank reads from its own store alone, so it does not matter on which machine that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch

from lohan.checkpoint.store_io import StoreReader
from lohan.device.ranks import Team
from lohan.model.layout import Group, TensorSpec
from lohan.model.shards import Ranks


class TeamReader:
    """The first rank's side; the others are in `serve` until it is closed. `own` reads this rank's
    pieces of `groups`."""

    def __init__(self, team: Team, groups: Sequence[Group], own: StoreReader) -> None:
        self._team, self._own = team, own
        self._pieces = [_specs(ranks, groups) for ranks in team.ranks.all()]

    def read_flat(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a parameter as fp32: the master where it has one."""
        self._team.exchange([name, start, stop])
        out = torch.empty(stop - start, dtype=torch.float32)
        for rank, specs in enumerate(self._pieces):
            low, high = _overlap(specs[name], start, stop)
            if low < high and rank == self._team.rank:
                begin = specs[name].begin
                out[low - start : high - start] = self._own.read_flat(
                    name, low - begin, high - begin
                )
            elif low < high:
                self._team.receive(out[low - start : high - start], rank)
        return out

    def __enter__(self) -> TeamReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._team.exchange(None)


def serve(team: Team, groups: Sequence[Group], own: StoreReader) -> None:
    """Sends the first rank what it asks for, until it asks no more."""
    specs = _specs(team.ranks, groups)
    while (asked := team.exchange(None)[0]) is not None:
        name, start, stop = asked
        low, high = _overlap(specs[name], start, stop)
        if low < high:
            begin = specs[name].begin
            team.send_first(own.read_flat(name, low - begin, high - begin).contiguous())


def _specs(ranks: Ranks, groups: Sequence[Group]) -> dict[str, TensorSpec]:
    return {tensor.name: tensor for group in groups for tensor in ranks.shard(group).tensors}


def _overlap(spec: TensorSpec, start: int, stop: int) -> tuple[int, int]:
    return max(start, spec.begin), min(stop, spec.begin + spec.numel)
