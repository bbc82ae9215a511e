"""What a kind of training must say: its model, its examples, what a batch is and what its loss is.

A task is a module with these functions; `table` names all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from torch import nn

from lohan.checkpoint.adapters import add_lora
from lohan.config import Config
from lohan.engine.attach import load
from lohan.errors import ConfigError
from lohan.util.system import offline

if TYPE_CHECKING:
    import torch

    from lohan.config import Source
    from lohan.engine.session import Session

Batch = dict[str, Any]
Stats = dict[str, tuple[float, float]]  # of a batch: a mean, and the share of rows it is of
OnProgress = Callable[[str, int, int], None]  # what is done, how much of it, of how much


def mean_stats(parts: Iterable[tuple[Stats, int]]) -> Stats:
    """Those of several batches, or of parts of one, each with so many rows: means over all rows
    that have them, and their share."""
    sums: Stats = {}
    total = 0
    for stats, rows in parts:
        total += rows
        for name, (mean, share) in stats.items():
            value, weight = sums.get(name, (0.0, 0.0))
            sums[name] = value + mean * share * rows, weight + share * rows
    return {name: (value / weight, weight / total) for name, (value, weight) in sums.items()}


class Examples(Protocol):
    """Training data: the batch of any step is a pure function of the step."""

    def __len__(self) -> int: ...

    def batch(self, step: int, batch_size: int) -> Batch: ...

    def passes(self, batch_size: int) -> Iterator[Batch]:
        """Every example once, the same in every evaluation."""

    def split(self, share: float) -> tuple[Self, Self]:
        """What is trained on, and what is held back."""

    def steps_for(self, epochs: float, batch_size: int) -> int: ...


Kind = TypeVar("Kind", bound=Examples)


class Task(Protocol[Kind]):
    PERPLEXITY: bool  # whether that of its loss says something

    def check(self, config: Config) -> None:
        """Refuses settings that have no meaning here."""

    def load(self, config: Config, *, dtype: str) -> nn.Module:
        """The model without weights, which come with `attach`."""

    def prepare(
        self, sources: Sequence[Source], cache: Path, config: Config, *, option: str, resume: bool,
        progress: OnProgress,
    ) -> Kind:  # fmt: skip
        """The examples of data files, made ready in `cache` or found there; `option` named them."""

    def describe(self, examples: Kind, config: Config) -> str:
        """What was found, in words."""

    def arrange(self, examples: Kind, config: Config) -> Kind:
        """As batches take them."""

    def shapes(self, config: Config, examples: list[Kind], *, dtype: str) -> Batch:
        """What the model is called with at most, without its memory. Without examples: as the
        settings say."""

    def before_training(
        self, session: Session, examples: Kind, config: Config, progress: OnProgress
    ) -> None:
        """What is to be known of the examples before the first step."""
        ...

    def rows(self, batch: Batch) -> int:
        """Samples in a batch."""

    def part(self, batch: Batch, start: int, stop: int) -> Batch:
        """Some of them; of none, a batch that can be called and has no weight."""

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor: ...

    def tokens(self, model: nn.Module, batch: Batch) -> int:
        """What speed is counted in."""

    def weight(self, model: nn.Module, batch: Batch) -> int:
        """How many losses that of the batch is the mean of."""


# -- A run's model, with the parts that stay as they are -------------------------------------------


NOTHING = ("none",)


def load_trained(
    config: Config, *, dtype: str, freeze: Callable[[nn.Module], Sequence[str]] | None = None
) -> nn.Module:
    """The model without weights; `freeze` says what does not learn where the settings do not, and
    gets no adapters."""
    model, given = load(config.model, dtype=dtype), config.train.freeze
    if given and config.train.lora:
        raise ConfigError("--freeze with --lora: an adapter leaves all of the model; leave one out")
    usual = freeze(model) if freeze is not None else ()
    if config.train.adapter is not None:
        with offline():
            return add_lora(model, config.train.adapter, leave=usual)
    for name in () if given == NOTHING else given or usual:
        freeze_part(model, name)
    return model


def freeze_part(model: nn.Module, part: str) -> None:
    """All parameters below modules of that name, which may be the end of a longer one."""
    found = [p for name, p in model.named_parameters() if f".{part}." in f".{name}."]
    if not found:
        known = sorted({name.split(".")[0] for name, _ in model.named_parameters()})
        inner = [name for name, _ in model.named_modules() if name.count(".") == 1]
        raise ConfigError(
            f"--freeze {part}: {type(model).__name__} has no part of that name; it has "
            f"{', '.join([*known, *inner][:12])}"
        )
    for parameter in found:
        parameter.requires_grad_(False)
