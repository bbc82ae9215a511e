"""A run as one of several ranks: whose turn it is, which rows it has, what is said once. A process
that is alone is the first and only one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch

from lohan.config import Config
from lohan.device.ranks import ProcessGroup, join
from lohan.engine.attach import check_durability
from lohan.engine.session import Session
from lohan.errors import ConfigError
from lohan.model.layout import Ranks
from lohan.train.task import Batch, Task

Found = TypeVar("Found")


@dataclass(frozen=True)
class RunRanks:
    """The ranks of a run, as `lohan train` sees them."""

    process_group: ProcessGroup

    @property
    def ranks(self) -> Ranks:
        return self.process_group.ranks

    @property
    def first(self) -> bool:
        """Writes the run folder and speaks."""
        return self.ranks.first

    @property
    def is_local_first(self) -> bool:
        """On its machine."""
        return self.process_group.is_local_first

    def once(self, make: Callable[[], Found]) -> Found:
        """What the first makes, for all of them; plain JSON."""
        return self.process_group.broadcast_made(make)

    def any(self, mine: bool) -> bool:
        return self.process_group.any_rank(mine)

    def added(self, numbers: dict[str, int]) -> dict[str, int]:
        """Over all ranks."""
        said = self.process_group.all_gather_object(numbers)
        return {name: sum(other[name] for other in said) for name in numbers}

    def agreed(self) -> AbstractContextManager[None]:
        """Around what every rank does: the error of one stops all."""
        return self.process_group.all_or_none()

    def in_turn(self, act: Callable[[bool], Found]) -> Found:
        """The first rank, then the first of every other machine, then the rest; each is told
        whether it is the first on its machine. So files are made once, and found by the others."""
        here = self.is_local_first
        found: list[Found] = []
        for turn in (self.first, here and not self.first, not here):
            with self.agreed():
                if turn:
                    found.append(act(here))
        return found[0]

    def check(self, config: Config) -> None:
        """Every rank has a row of every batch, and commits with the others."""
        check_durability(config.budget.durability, self.process_group)
        world = self.ranks.world
        if config.train.batch < world:
            raise ConfigError(
                f"--batch {config.train.batch} is less than one row for each of {world} ranks; "
                f"raise it to {world}, or start fewer ranks"
            )
        self._check_same(config)

    def _check_same(self, config: Config) -> None:
        """On several machines each rank has read its own file."""
        own = {name: str(value) for name, value in asdict(config.train).items()}
        said = self.process_group.all_gather_object({**own, "seed": str(config.seed)})
        for rank, other in enumerate(said):
            for name, value in other.items():
                if value != said[0][name]:
                    raise ConfigError(
                        f"{name} is {said[0][name]} for rank 0 and {value} for rank {rank}; give "
                        "all ranks the same settings"
                    )


ALONE = RunRanks(ProcessGroup())


@contextmanager
def run_ranks() -> Iterator[RunRanks]:
    """Around a whole run. If it fails here, this process ends, and the others notice."""
    process_group = join(os.environ)
    try:
        yield RunRanks(process_group)
    except BaseException:
        process_group.abort()
        raise
    process_group.close()


@dataclass(frozen=True)
class Share:
    """A rank's rows of every batch, and the loss of all ranks."""

    session: Session
    task: Task[Any]

    def loss(self, batch: Batch) -> tuple[torch.Tensor, float]:
        """To call backward on, and of the whole batch."""
        model, process_group = self.session.model, self.session.process_group
        if not process_group.several:
            loss = self.task.loss(model, batch)
            return loss, loss.item()
        start, stop = process_group.ranks.rows(self.task.rows(batch))
        part = self.task.part(batch, start, stop)
        loss = self.task.loss(model, part)
        if self.session.head is not None:  # is that of all ranks
            return loss, loss.item()
        own = self.task.weight(part) if stop > start else 0
        total = self.task.weight(batch)
        said = process_group.all_gather_object(loss.item() * own)
        return loss * (own * process_group.world / total), sum(said) / total
