"""Settings that a run may change when it is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lohan.config import fields_of
from lohan.errors import ConfigError

# None of these settings determines which examples a step uses or what the store contains.
RESUMABLE = frozenset(
    {
        *(
            f"train.{name}"
            for name in (
                "micro_batch",
                "tiles",
                "lr",
                "schedule",
                "schedule_steps",
                "warmup",
                "min_lr_ratio",
                "weight_decay",
                "beta1",
                "beta2",
                "eps",
                "momentum",
                "clip",
                "update_mode",
                "activations",
                "overlap",
                "compile",
            )
        ),
        *(
            f"budget.{name}"
            for name in (
                "host",
                "device",
                "device_memory",
                "link",
                "ssd",
                "commit_every",
                "log_gradients",
                "snapshot_every",
                "snapshot_dir",
            )
        ),
        "eval.every",
        "eval.early_stop",
        "sample.every",
        "sample.tokens",
        "output.export",
        "output.export_dtype",
        "output.export_best",
        "output.trace",
        "output.log",
    }
)
ADVICE = {  # advice for settings that a resumed run cannot change
    "train.steps": "use --steps",
    "train.epochs": "use --steps",
    "budget.gpus": "use --gpus",
    "train.batch": "the batch decides which examples each step has; to go on with another, start a "
    "new run from the exported model: lohan export RUN --out DIR, then lohan train --model DIR",
}


def check_changes(changes: Mapping[str, Any]) -> None:
    """Raise ConfigError if a resumed run cannot change one of these settings."""
    for name in changes:
        exists = name in {info.dotted for info in fields_of()}  # load_config refuses unknown names
        if exists and name not in RESUMABLE:
            other = ADVICE.get(name) or (
                "the data, the model and the store were made with it; start a new run"
            )
            raise ConfigError(f"{name}: cannot change when a run is resumed: {other}")
