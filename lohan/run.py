"""The run folder: what lies where, and its log of steps.

RUN/run.toml        the resolved config
RUN/metrics.jsonl   one object per committed step
RUN/data/           the tokenised data
RUN/store/          the training state, unless --ssd names other places
RUN/model/          the fine-tuned Hugging Face folder
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lohan.config import Config, load_config
from lohan.errors import ConfigError


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
    def trace(self) -> Path:
        return self.path / "trace.json"

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def model(self) -> Path:
        return self.path / "model"

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


def append_metrics(folder: RunFolder, row: dict[str, Any]) -> None:
    with folder.metrics_file.open("a") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_metrics(folder: RunFolder) -> Iterator[dict[str, Any]]:
    """Whole lines only: a crash may have cut the last one."""
    if folder.metrics_file.exists():
        for line in folder.metrics_file.read_text().splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                return


def settle_metrics(folder: RunFolder, *, step: int, last: dict[str, Any] | None) -> None:
    """After a crash: the log holds each committed step once and nothing else.

    The manifest carries the last step's row, since a crash can come between commit and log.
    """
    rows = {row["step"]: row for row in read_metrics(folder) if row["step"] <= step}
    if last is not None and last["step"] == step:
        rows.setdefault(step, last)
    temporary = folder.metrics_file.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(rows[k]) + "\n" for k in sorted(rows)))
    temporary.replace(folder.metrics_file)
