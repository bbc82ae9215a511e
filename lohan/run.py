"""The run folder: what lies where, and its logs.

RUN/run.toml        the resolved config
RUN/metrics.jsonl   one object per committed step, and one per evaluation (with eval_loss)
RUN/journal.jsonl   versions, plans and what was predicted and measured, for `lohan report`
RUN/samples.jsonl   what the model said to the sample prompts, one object each time
RUN/data/           the tokenised data; RUN/eval-data/ that of evaluation
RUN/store/          the training state, unless --ssd names other places
RUN/model/          the fine-tuned Hugging Face folder; RUN/best/ that of the best evaluation
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lohan.config import Config, load_config
from lohan.errors import ConfigError, StorageIOError


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
    def best(self) -> Path:
        return self.path / "best"

    def config(self) -> Config:
        if not self.config_file.is_file():
            raise ConfigError(
                f"{self.path} is not a run folder (no run.toml in it); give the folder that "
                "`lohan train --out` wrote"
            )
        return load_config(self.config_file)

    def snapshots(self, config: Config) -> Path:
        return (config.budget.snapshot_dir or self.path / "snapshots") / self.tag()

    def tag(self) -> str:
        """A name that tells this run's folders on a shared drive from those of others."""
        return f"lohan-{self.path.name}-{hashlib.sha256(bytes(self.path)).hexdigest()[:8]}"

    def store_place(self, config: Config) -> tuple[list[Path], str]:
        """Directories and folder name of the store."""
        if config.budget.ssd:
            return list(config.budget.ssd), self.tag()
        return [self.path], "store"

    def store_dirs(self, config: Config) -> list[Path]:
        places, name = self.store_place(config)
        return [place / name for place in places]


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
    """Whole lines only: a crash may have cut the last one."""
    if file.exists():
        for line in file.read_text().splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                return


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
