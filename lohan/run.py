"""The run folder: what lies where, and its logs.

RUN/run.toml        the resolved config
RUN/metrics.jsonl   one object per committed step, and one per evaluation (with eval_loss)
RUN/journal.jsonl   versions, plans and what was predicted and measured, for `lohan report`
RUN/samples.jsonl   what the model said to the sample prompts, one object each time
RUN/data/           the tokenised data; RUN/eval-data/ that of evaluation
RUN/store/          the training state, unless --ssd names other places; of several ranks
                    RUN/store-rank0of2/ and so on
RUN/model/          the fine-tuned Hugging Face folder; RUN/best/ that of the best evaluation,
                    RUN/ema/ that of the averaged weights
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lohan.config import Config, load_config
from lohan.config_parse import HOST, RANK
from lohan.errors import ConfigError, StorageIOError
from lohan.ranks.shards import Ranks
from lohan.util.json_file import BadJson, parse_json
from lohan.util.typed import WrongType, checked


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def config_file(self) -> Path:
        return self.path / "run.toml"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def samples_file(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def trace(self) -> Path:
        return self.path / "trace.json"

    def trace_of(self, ranks: Ranks) -> Path:
        """Every rank writes down its own lanes."""
        return self.trace if ranks.first else self.path / f"trace-rank{ranks.rank}.json"

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def eval_data(self) -> Path:
        return self.path / "eval-data"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def ema(self) -> Path:
        return self.path / "ema"

    @property
    def best(self) -> Path:
        return self.path / "best"

    def config(self) -> Config:
        if not self.config_file.is_file():
            raise ConfigError(
                f"{self.path} is not a run folder (no run.toml in it); give the folder that "
                "`lohan train --out` wrote"
            )
        return load_config(self.config_file)

    def snapshots(self, config: Config, ranks: Ranks | None = None) -> Path:
        name = (ranks or Ranks()).store_name(self.tag())
        return (config.budget.snapshot_dir or self.path / "snapshots") / name

    def tag(self) -> str:
        """A name that tells this run's folders on a shared drive from those of others."""
        return f"lohan-{self.path.name}-{hashlib.sha256(bytes(self.path)).hexdigest()[:8]}"

    def places(self, config: Config, rank: int = 0) -> list[Path]:
        """Directories that the store of a rank is spread over. In --ssd, {rank} stands for its
        number and {host} for the name of the machine."""
        if not config.budget.ssd:
            return [self.path]
        names = {RANK: str(rank), HOST: platform.node()}
        return [_filled_in(place, names) for place in config.budget.ssd]

    def store_name(self, config: Config) -> str:
        """The folder of the store in each of them, of a run with one rank."""
        return self.tag() if config.budget.ssd else "store"

    def store_dirs(self, config: Config, ranks: Ranks | None = None) -> list[Path]:
        """Where a rank has its store."""
        ranks = ranks or Ranks()
        name = ranks.store_name(self.store_name(config))
        return [place / name for place in self.places(config, ranks.rank)]


def _filled_in(place: Path, names: Mapping[str, str]) -> Path:
    text = str(place)
    for name, value in names.items():
        text = text.replace(name, value)
    return Path(text)


@contextmanager
def owner_only() -> Iterator[None]:
    """Files and folders that are made meanwhile can be read by their owner only."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def append_row(file: Path, row: dict[str, Any]) -> None:
    """One more line of a log, durable when it returns."""
    try:
        with file.open("a") as log:
            log.write(json.dumps(row) + "\n")
            log.flush()
            os.fsync(log.fileno())
    except OSError as error:
        raise StorageIOError(
            f"{file}: cannot be written to: {error.strerror}; free some space, then "
            f"`lohan resume {file.parent}`"
        ) from None


def read_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Whole lines only: a crash may have cut the last one. Each has a step."""
    if not file.exists():
        return
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            row = parse_json(line)
        except BadJson:
            return
        try:
            checked(row, dict[str, Any], "it")
            if checked(row.get("step"), int, "step") < 0:
                raise WrongType("step is negative")
        except WrongType as error:
            raise ConfigError(
                f"{file}, line {number}: not a row of a run's log: {error}; remove that line"
            ) from None
        yield row


def step_rows(folder: RunFolder) -> list[dict[str, Any]]:
    return [row for row in read_rows(folder.metrics_file) if "eval_loss" not in row]


def eval_rows(folder: RunFolder) -> list[dict[str, Any]]:
    return [row for row in read_rows(folder.metrics_file) if "eval_loss" in row]


def settle_logs(folder: RunFolder, *, step: int, last: dict[str, Any] | None) -> None:
    """After a crash: the logs hold each committed step and its evaluation once and nothing else.

    The manifest carries the last step's row, since a crash can come between commit and log.
    """
    steps = {row["step"]: row for row in step_rows(folder)}
    if last is not None and last["step"] == step:
        steps.setdefault(step, last)
    evaluations = {row["step"]: row for row in eval_rows(folder)}
    rows = sorted([*steps.values(), *evaluations.values()], key=lambda row: row["step"])
    _rewrite(folder.metrics_file, [row for row in rows if row["step"] <= step])
    if folder.samples_file.exists():
        samples = {row["step"]: row for row in read_rows(folder.samples_file)}
        _rewrite(folder.samples_file, [row for row in samples.values() if row["step"] <= step])


def _rewrite(file: Path, rows: list[dict[str, Any]]) -> None:
    temporary = file.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
    temporary.replace(file)
