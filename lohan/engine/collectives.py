"""What the ranks of a run agree on in the course of a step, by the caller's thread. A process that
is alone agrees with itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from lohan.device.ranks import Team
from lohan.engine.exchange import Exchange
from lohan.errors import RankError
from lohan.model.layout import Group


class Together:
    def __init__(self, team: Team | None, groups: Sequence[Group]) -> None:
        self.team = team
        self._exchange = None if team is None else Exchange(team, groups)

    def late(self, way: int, numbers: list[int]) -> list[int]:
        """Groups that have gradients on some rank which no schedule exchanges; `way` is that of
        this rank through the model, which must be the same for all."""
        if self.team is None:
            return numbers
        said = self.team.exchange([way, numbers])
        if any(other != way for other, _ in said):
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
        return number if self.team is None else math.fsum(self.team.exchange(number))

    @property
    def world(self) -> int:
        return 1 if self.team is None else self.team.world

    def loss(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' parts of a loss."""
        return part if self.team is None else torch.full_like(part, self.added(part.item()))

    def absent(self, names: list[str]) -> list[str]:
        """Those that all ranks name."""
        if self.team is None:
            return names
        common = set(names).intersection(*self.team.exchange(names))
        return [name for name in names if name in common]
