"""The interface of a training task: its model, its examples, its batches and its loss.

Each task is a class. `TASKS` in inputs.py names all of them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from torch import nn

from lohan.checkpoint.adapters import add_lora
from lohan.checkpoint.hf_folder import KINDS, kind_of, load_config
from lohan.config import Config
from lohan.data.dataset import Fields, Row, open_fields, write_fields
from lohan.data.reading import data_files, is_saved
from lohan.engine.attach import load
from lohan.errors import ConfigError, DataError, ModelError
from lohan.util.libraries import offline
from lohan.util.units import counted

if TYPE_CHECKING:
    import torch

    from lohan.engine.session import Session
    from lohan.util.settings import Source

Batch = dict[str, Any]
# Maps the name of a value to its mean over those rows of a batch that have the value, and to the
# share of such rows.
Stats = dict[str, tuple[float, float]]
# Called with the name of the activity, the amount done and the total.
OnProgress = Callable[[str, int, int], None]


def mean_stats(parts: Iterable[tuple[Stats, int]]) -> Stats:
    """Combine the statistics of several batches, or of parts of a batch, each with its row count.

    Return, for each name, the mean over all rows that have the value, and the share of such rows.
    """
    sums: Stats = {}
    total = 0
    for stats, rows in parts:
        total += rows
        for name, (mean, share) in stats.items():
            value, weight = sums.get(name, (0.0, 0.0))
            sums[name] = value + mean * share * rows, weight + share * rows
    return {name: (value / weight, weight / total) for name, (value, weight) in sums.items()}


class Examples(Protocol):
    """Training data; the batch of a step is a pure function of the step."""

    def __len__(self) -> int: ...

    def batch(self, step: int, batch_size: int) -> Batch: ...

    def passes(self, batch_size: int) -> Iterator[Batch]:
        """Yield batches that contain every example once; every call yields the same batches."""

    def split(self, share: float) -> tuple[Self, Self]:
        """Return the training examples and the held-out examples."""

    def steps_for(self, epochs: float, batch_size: int) -> int: ...


Kind = TypeVar("Kind", bound=Examples)


@dataclass(frozen=True, kw_only=True)
class DataRequest:
    """Data files, and the cache folder in which a resumed run finds the examples of these files."""

    sources: Sequence[Source]
    cache: Path
    config: Config
    option: str  # the option that named the files
    resume: bool
    progress: OnProgress

    def fields(
        self,
        examples: Callable[[Path], Iterable[Row]],
        *,
        about: Callable[[], Mapping[str, Any]],
        show: Callable[[Row], Mapping[str, str]],
        **how: Any,
    ) -> Fields | None:
        """Return the examples of all files, converted and cached, or None if there are none.

        `examples` is called for each file and returns its examples. `about` and `show` are passed
        on to `write_fields`, `how` to `open_fields`. A resumed run uses the cache.
        """
        opened = partial(open_fields, self.cache, seed=self.config.seed, **how)
        ready = opened() if self.resume else None
        if ready is None:
            parts = ((source, examples(source.path)) for source in self.sources)
            write_fields(self.cache, parts, about=about, show=show)
            ready = opened()
        return ready


def check_dropped(data: DataRequest, dropped: int, kept: int) -> None:
    """Raise DataError if too large a share of the examples was dropped for their length."""
    allowed, total = data.config.train.max_dropped, dropped + kept
    if dropped > allowed * total:
        share = math.ceil(100 * dropped / total) / 100
        raise DataError(
            f"{data.option}: {dropped:,} of {counted(total, 'example')} would be dropped, more "
            f"than {allowed:.0%}: their first {data.config.train.seq} tokens hold no answer; raise "
            f"--seq, or train on the rest with --max-dropped {share:g}"
        )


class Task(ABC, Generic[Kind]):
    """A task, with defaults for models that compute their own loss from `input_ids`."""

    PERPLEXITY = False  # whether the perplexity of the loss is meaningful
    # The library that loads an exported model, and what the model does; both in the terms of the
    # hub, for the model card. An empty PIPELINE is left out.
    LIBRARY, PIPELINE = "transformers", ""

    @abstractmethod
    def check(self, config: Config) -> None:
        """Raise an error if a setting does not apply to this task."""

    def load(self, config: Config, *, dtype: str) -> nn.Module:
        """Return the model without weights, which `attach` loads."""
        return load_trained(config, dtype=dtype)

    @abstractmethod
    def prepare(self, data: DataRequest) -> Kind:
        """Return the examples of the data files."""

    @abstractmethod
    def describe(self, examples: Kind, config: Config) -> str:
        """Return a description of the examples for the user."""

    def arrange(self, examples: Kind, config: Config) -> Kind:
        """Return the examples in the form from which batches are made, for example packed."""
        return examples

    @abstractmethod
    def shapes(self, config: Config, examples: list[Kind], *, dtype: str) -> Batch:
        """Return the largest inputs that the model is called with, without allocating them.

        Without examples, the settings determine the shapes.
        """

    def before_training(
        self, session: Session, examples: Kind, config: Config, progress: OnProgress
    ) -> None:
        """Compute what the task needs from the examples before the first step."""

    def rows(self, batch: Batch) -> int:
        """Return the number of samples in a batch."""
        return len(batch["input_ids"])

    def part(self, batch: Batch, start: int, stop: int) -> Batch:
        """Return the rows of a batch from `start` up to `stop`.

        If there are none, return one row, because a model cannot be called with an empty batch.
        """
        low, high = (start, stop) if start < stop else (0, 1)
        return {name: tensor[low:high] for name, tensor in batch.items()}

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = model(**batch).loss
        return loss

    def tokens(self, model: nn.Module, batch: Batch) -> int:
        """Return the number of tokens, the unit in which speed is measured."""
        return int(batch["input_ids"].numel())

    def weight(self, model: nn.Module, batch: Batch) -> int:
        """Return the number of terms over which the loss of the batch is averaged."""
        return self.rows(batch)


# -- The model of a run and its frozen parts -------------------------------------------------------


NOTHING = ("none",)


def load_trained(
    config: Config, *, dtype: str, freeze: Callable[[nn.Module], Sequence[str]] | None = None
) -> nn.Module:
    """Return the model without weights.

    `freeze` returns the parts that stay frozen by default and that never get adapters. Settings may
    name other parts to freeze instead.
    """
    model, frozen = load(config.model, dtype=dtype), config.train.freeze
    if frozen and config.train.lora:
        raise ConfigError("--freeze with --lora: an adapter leaves all of the model; leave one out")
    frozen_parts = freeze(model) if freeze is not None else ()
    if config.train.adapter is not None:
        with offline():
            return add_lora(model, config.train.adapter, leave=frozen_parts)
    for name in () if frozen == NOTHING else frozen or frozen_parts:
        freeze_part(model, name)
    return model


def freeze_part(model: nn.Module, part: str) -> None:
    """Freeze all parameters whose dotted name contains the component or components `part`."""
    parameters = [p for name, p in model.named_parameters() if f".{part}." in f".{name}."]
    if not parameters:
        parts = sorted({name.split(".")[0] for name, _ in model.named_parameters()})
        inner = [name for name, _ in model.named_modules() if name.count(".") == 1]
        raise ConfigError(
            f"--freeze {part}: {type(model).__name__} has no part of that name; it has "
            f"{', '.join([*parts, *inner][:12])}"
        )
    for parameter in parameters:
        parameter.requires_grad_(False)


# -- Checks and messages that several tasks share --------------------------------------------------


def kind_in(config: Config, task: str, kinds: Mapping[str, object]) -> tuple[str, Any]:
    """Return the auto class that builds the run's model, and the config of the model.

    Raise ModelError if the auto class is not in `kinds`.
    """
    loaded = load_config(config.model)
    kind = kind_of(loaded, config.model)
    if kind not in kinds:
        names = ", ".join(loaded.architectures or []) or loaded.model_type
        raise ModelError(
            f"{config.model}: {names} is a model for {KINDS[kind]}, --task {task} trains those for "
            f"{' and '.join(KINDS[one] for one in kinds)}; give the folder of one, or leave --task "
            "out"
        )
    return kind, loaded


def folder_files(config: Config) -> list[str]:
    """Return, for each data folder, a line that lists the files read from it."""
    lines = []
    for path in (source.path for source in config.data):
        if path.is_dir() and not is_saved(path):
            with suppress(DataError):  # the folder has changed since the run began
                files = [str(file.relative_to(path)) for file in data_files(path)]
                last = f" to {files[-1]}" if len(files) > 1 else ""
                lines.append(f"{path}: {counted(len(files), 'file')}, {files[0]}{last}")
    return lines


def few_warning(count: int, what: str, config: Config) -> list[str]:
    """Return a warning if a batch has more rows than there are examples.

    `what` is the number of examples with its noun, such as "3 pairs".
    """
    if count >= config.train.batch:
        return []
    return [
        f"warning: {what} and a batch of {config.train.batch}: a step sees some of them more than "
        "once; lower --batch"
    ]


def refuse_text_settings(config: Config, task: str) -> None:
    """Raise ConfigError for settings that only apply to causal language models."""
    requested = {"--pack": config.train.pack, "--sample-prompts": bool(config.sample.prompts)}
    for name, wanted in requested.items():
        if wanted:
            raise ConfigError(f"{name}: is for causal language models, not --task {task}; leave it")


@dataclass(frozen=True)
class Share:
    """A rank's share of every batch, from which it computes the loss over all ranks."""

    session: Session
    task: Task[Any]

    @property
    def reads_late(self) -> bool:
        """True if the loss is read only after backward.

        Reading it earlier would make an accelerator wait for the host. When it is read late, a
        NaN loss is detected after the updates have run, so the previous step must be on disk: this
        is True only for a single rank, on an accelerator, with a plan that commits every step.
        """
        executor = self.session.executor
        return (
            not self.session.process_group.several
            and executor.device.torch_device.type != "cpu"
            and executor.plan.commit.every_step
        )

    def loss(self, batch: Batch) -> tuple[torch.Tensor, Callable[[], float]]:
        """Return the loss for backward, and a function that reads the loss of the whole batch.

        The function does not keep the graph, which would keep the session alive.
        """
        model, process_group = self.session.model, self.session.process_group
        if not process_group.several:
            loss = self.task.loss(model, batch)
            return loss, loss.detach().item
        start, stop = process_group.ranks.rows(self.task.rows(batch))
        # A rank without rows computes the loss of the first row, with weight 0.
        empty = stop == start and self.session.head is None
        part = self.task.part(batch, 0, 1) if empty else self.task.part(batch, start, stop)
        loss = self.task.loss(model, part)
        if self.session.head is not None:  # the sliced head returns the loss over all ranks
            return loss, loss.detach().item
        weight = self.task.weight(model, part) if stop > start else 0
        total = self.task.weight(model, batch)
        gathered = process_group.all_gather_object(
            (loss.item() * weight, part.get("stats", {}), weight)
        )
        if "stats" in batch:
            batch["stats"].update(mean_stats((stats, rows) for _, stats, rows in gathered if rows))
        whole = sum(each for each, _, _ in gathered) / total
        return loss * (weight * process_group.world / total), lambda: whole
