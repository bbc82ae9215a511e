"""Metrics to TensorBoard and Weights & Biases, beside the run's own log."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from lohan.config import Config
from lohan.errors import ConfigError
from lohan.train.run_folder import RunFolder


class Logger(Protocol):
    def log(self, row: Mapping[str, Any]) -> None:
        """A row of metrics: of a step, or of an evaluation."""
        ...

    def close(self) -> None: ...


def check_loggers(names: Sequence[str]) -> None:
    """Refuses a logger whose package is not there."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"--log {name}: the package {name} is not installed; pip install 'lohan[{name}]', "
                f"or leave --log {name} out"
            )


def open_loggers(folder: RunFolder, config: Config, *, step: int) -> list[Logger]:
    """The loggers a run wants; rows of steps after `step` are to come, again if need be."""
    check_loggers(config.output.log)
    return [_LOGGERS[name](folder, config, step) for name in config.output.log]


def scalars(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a row with the names that charts are grouped by: train/loss, busy/ssd."""
    for key, value in row.items():
        if key == "busy":
            yield from ((f"busy/{lane}", float(share)) for lane, share in value.items())
        elif key != "step" and isinstance(value, (int, float)):
            name = key.removeprefix("eval_")
            yield f"{'eval' if name != key else 'train'}/{name}", float(value)


class TensorBoard:
    """Event files in RUN/tensorboard."""

    def __init__(self, folder: RunFolder, config: Config, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(
            log_dir=str(folder.path / "tensorboard"), purge_step=step + 1
        )

    def log(self, row: Mapping[str, Any]) -> None:
        for name, value in scalars(row):
            self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """One W&B run per run folder; its own settings (WANDB_PROJECT, WANDB_MODE) apply."""

    def __init__(self, folder: RunFolder, config: Config, step: int) -> None:
        import tomllib

        import wandb

        self._run: Any = wandb.init(
            dir=str(folder.path), name=folder.path.name, id=folder.tag(config), resume="allow",
            config=tomllib.loads(config.to_toml()),
        )  # fmt: skip

    def log(self, row: Mapping[str, Any]) -> None:
        self._run.log(dict(scalars(row)), step=row["step"])

    def close(self) -> None:
        self._run.finish()


_LOGGERS: dict[str, Callable[[RunFolder, Config, int], Logger]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}
