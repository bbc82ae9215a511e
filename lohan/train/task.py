"""What a kind of training must say: its model, its examples, what a batch is and what its loss is.

Each kind is a class; `TASKS` in inputs.py names all of them.
"""

from __future__ import annotations

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
from lohan.util.system import offline
from lohan.util.units import counted

if TYPE_CHECKING:
    import torch

    from lohan.engine.session import Session
    from lohan.util.settings import Source

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


@dataclass(frozen=True, kw_only=True)
class DataRequest:
    """Data files, and the folder where their examples are made ready or, by a run that resumes,
    found."""

    sources: Sequence[Source]
    cache: Path
    config: Config
    option: str  # that named the files
    resume: bool
    progress: OnProgress

    def fields(
        self, examples: Callable[[Path], Iterable[Row]], *, about: Callable[[], Mapping[str, Any]],
        show: Callable[[Row], Mapping[str, str]], **how: Any,
    ) -> Fields | None:  # fmt: skip
        """`examples` of a file; None if there are none. `how`: as `open_fields` takes them."""
        opened = partial(open_fields, self.cache, seed=self.config.seed, **how)
        ready = opened() if self.resume else None
        if ready is None:
            parts = ((source, examples(source.path)) for source in self.sources)
            write_fields(self.cache, parts, about=about, show=show)
            ready = opened()
        return ready


class Task(ABC, Generic[Kind]):
    """What is usual for models with a loss of their own that are called with `input_ids`."""

    PERPLEXITY = False  # whether that of its loss says something

    @abstractmethod
    def check(self, config: Config) -> None:
        """Refuses settings that have no meaning here."""

    def load(self, config: Config, *, dtype: str) -> nn.Module:
        """The model without weights, which come with `attach`."""
        return load_trained(config, dtype=dtype)

    @abstractmethod
    def prepare(self, data: DataRequest) -> Kind:
        """The examples of data files."""

    @abstractmethod
    def describe(self, examples: Kind, config: Config) -> str:
        """What was found, in words."""

    def arrange(self, examples: Kind, config: Config) -> Kind:
        """As batches take them."""
        return examples

    @abstractmethod
    def shapes(self, config: Config, examples: list[Kind], *, dtype: str) -> Batch:
        """What the model is called with at most, without its memory. Without examples: as the
        settings say."""

    def before_training(
        self, session: Session, examples: Kind, config: Config, progress: OnProgress
    ) -> None:
        """What is to be known of the examples before the first step."""

    def rows(self, batch: Batch) -> int:
        """Samples in a batch."""
        return len(batch["input_ids"])

    def part(self, batch: Batch, start: int, stop: int) -> Batch:
        """Some of them; of none, a batch that can be called and has no weight."""
        low, high = (start, stop) if start < stop else (0, 1)
        return {name: tensor[low:high] for name, tensor in batch.items()}

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        found: torch.Tensor = model(**batch).loss
        return found

    def tokens(self, model: nn.Module, batch: Batch) -> int:
        """What speed is counted in."""
        return int(batch["input_ids"].numel())

    def weight(self, model: nn.Module, batch: Batch) -> int:
        """How many losses that of the batch is the mean of."""
        return self.rows(batch)


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


# -- What several kinds check and show -------------------------------------------------------------


def kind_in(config: Config, task: str, kinds: Mapping[str, object]) -> tuple[str, Any]:
    """The kind of the run's model, which the task must have, and its config."""
    found = load_config(config.model)
    kind = kind_of(found, config.model)
    if kind not in kinds:
        names = ", ".join(found.architectures or []) or found.model_type
        raise ModelError(
            f"{config.model}: {names} is a model for {KINDS[kind]}, --task {task} trains those for "
            f"{' and '.join(KINDS[one] for one in kinds)}; give the folder of one, or leave --task "
            "out"
        )
    return kind, found


def folder_files(config: Config) -> list[str]:
    """What was read of folders of data."""
    lines = []
    for path in (source.path for source in config.data):
        if path.is_dir() and not is_saved(path):
            with suppress(DataError):  # it has changed since a run began with it
                files = [str(file.relative_to(path)) for file in data_files(path)]
                last = f" to {files[-1]}" if len(files) > 1 else ""
                lines.append(f"{path}: {counted(len(files), 'file')}, {files[0]}{last}")
    return lines


def few_warning(count: int, what: str, config: Config) -> list[str]:
    """`what`: the examples in words."""
    if count >= config.train.batch:
        return []
    return [
        f"warning: {what} and a batch of {config.train.batch}: a step sees some of them more than "
        "once; lower --batch"
    ]


def refuse_text_settings(config: Config, task: str) -> None:
    """What only causal language models know."""
    asked = {"--pack": config.train.pack, "--sample-prompts": bool(config.sample.prompts)}
    for name, wanted in asked.items():
        if wanted:
            raise ConfigError(f"{name}: is for causal language models, not --task {task}; leave it")


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
            and executor.store.durability == "step" and not executor.plan.commits_by_interval
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


SHOWN = 1000  # characters of a prompt's end and of an answer's beginning
HEADS = {"template": "chat template", "system": "system prompt", "images": "images"}


def rendered(shown: Mapping[str, str], *, most: int = SHOWN) -> list[str]:
    """The first example as the model sees it, with the template and system prompt of it."""
    if not shown:
        return []
    prompt, answer = shown["prompt"], shown["answer"]
    prompt = prompt if len(prompt) <= most else f"... {prompt[-most:]}"
    told = [f"{name}: {shown[key]}" for key, name in HEADS.items() if key in shown]
    texts = [f"{prompt}>>>{_beginning(answer, most)}"]
    if "rejected" in shown:
        texts.append(f"rejected: >>>{_beginning(shown['rejected'], most)}")
    lines = [f"first example ({'; '.join([*told, 'loss on what follows >>>'])}):"]
    return lines + [f"  {line}" for text in texts for line in text.splitlines()]


def _beginning(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} ..."
