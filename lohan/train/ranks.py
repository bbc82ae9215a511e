"""A run as one of several ranks: whose turn it is, which rows it has, what is said once. A process
that is alone is the first and only one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch

from lohan.config import Config
from lohan.device.ranks import ProcessGroup, join
from lohan.engine.attach import check_durability
from lohan.engine.session import Session
from lohan.errors import ConfigError
from lohan.train.task import Batch, Task, mean_stats

Found = TypeVar("Found")


def in_turn(group: ProcessGroup, act: Callable[[bool], Found]) -> Found:
    """The first rank, then the first of every other machine, then the rest; each is told whether it
    is the first on its machine. So files are made once, and found by the others."""
    here, found = group.is_local_first, list[Found]()
    for turn in (group.ranks.first, here and not group.ranks.first, not here):
        with group.all_or_none():
            if turn:
                found.append(act(here))
    return found[0]


def check_settings(group: ProcessGroup, config: Config) -> None:
    """Every rank has a row of every batch, commits with the others, and has read the same settings:
    on several machines each from its own file."""
    check_durability(config.budget.durability, config.budget.commit_every, group)
    if config.train.batch < group.world:
        raise ConfigError(
            f"--batch {config.train.batch} is less than one row for each of {group.world} ranks; "
            f"raise it to {group.world}, or start fewer ranks"
        )
    own = {name: str(value) for name, value in asdict(config.train).items()}
    said = group.all_gather_object({**own, "seed": str(config.seed)})
    for rank, other in enumerate(said):
        for name, value in other.items():
            if value != said[0][name]:
                raise ConfigError(
                    f"{name} is {said[0][name]} for rank 0 and {value} for rank {rank}; give "
                    "all ranks the same settings"
                )


@contextmanager
def run_ranks() -> Iterator[ProcessGroup]:
    """Around a whole run. If it fails here, this process ends, and the others notice."""
    group = join(os.environ)
    try:
        yield group
    except BaseException:
        group.abort()
        raise
    group.close()


@dataclass(frozen=True)
class Share:
    """A rank's rows of every batch, and the loss of all ranks."""

    session: Session
    task: Task[Any]

    @property
    def reads_late(self) -> bool:
        """The loss is read when backward has ended: reading it before would make an accelerator
        wait for the host. A loss that is no number is then found when updates have run, so there
        must be a committed step right before to go back to."""
        executor = self.session.executor
        return (
            not self.session.process_group.several and executor.device.torch_device.type != "cpu"
            and executor.spec.write_through and not executor.plan.commits_by_interval
        )  # fmt: skip

    def loss(self, batch: Batch) -> tuple[torch.Tensor, Callable[[], float]]:
        """To call backward on, and what reads that of the whole batch: without its graph, which
        would hold the session that calls it."""
        model, process_group = self.session.model, self.session.process_group
        if not process_group.several:
            loss = self.task.loss(model, batch)
            return loss, loss.detach().item
        start, stop = process_group.ranks.rows(self.task.rows(batch))
        # Without rows a loss of the model's own is that of another's, without weight.
        empty = stop == start and self.session.head is None
        part = self.task.part(batch, 0, 1) if empty else self.task.part(batch, start, stop)
        loss = self.task.loss(model, part)
        if self.session.head is not None:  # is that of all ranks
            return loss, loss.detach().item
        own = self.task.weight(model, part) if stop > start else 0
        total = self.task.weight(model, batch)
        said = process_group.all_gather_object((loss.item() * own, part.get("stats", {}), own))
        if "stats" in batch:
            batch["stats"].update(mean_stats((stats, rows) for _, stats, rows in said if rows))
        whole = sum(each for each, _, _ in said) / total
        return loss * (own * process_group.world / total), lambda: whole
