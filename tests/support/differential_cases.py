"""The cases of the short form of benchmarks/differential.py, one of each kind."""

from __future__ import annotations

import json
import os
from pathlib import Path

from benchmarks import differential
from benchmarks.differential import SIMPLEST

LEAST_ON_DEVICE = {"known_batch": True, "device": "emulated", "device_memory": 1.0}

# One of each kind; together they have a device, an error, an evaluation, a resume and a kill.
SHORT = [
    {"model": "net-tied", "dtype": "bf16", "clip": 1.0, "delays": 1, "known_batch": True},
    {"model": "gpt2", "events": [[1, "forward_error"], [1, "eval"], [2, "resume"]]},
    {"model": "lstm", "device": "emulated", "optimizer": "lion"},
    {"model": "llama", "lora": 2, "base": "nf4", "accumulate": 2},
    {"kind": "ranks", "model": "net-shared", "events": [[1, "commit"]]},
    {"kind": "train", "model": "tied", "kill": 20},
    # With the least memory that a refusal recommends.
    {"model": "net", "accumulate": 2, "update_mode": "optimized", "activations": "all"}
    | LEAST_ON_DEVICE,
    {"model": "net-shared", "dtype": "bf16", "micro_batch": 2, "cast": "attach"} | LEAST_ON_DEVICE,
    {"model": "experts", "dtype": "bf16", "activations": "holistic", "events": [[1, "replan"]]}
    | LEAST_ON_DEVICE,
    {"model": "lstm", "tiles": 3, "events": [[1, "replan"]]} | LEAST_ON_DEVICE,
    {"model": "experts", "dtype": "bf16", "dropout": 0.2, "optimizer": "lion", "moments": "int8"}
    | {"ema": 0.5, "accumulate": 2, "events": [[2, "replan"]]}
    | {**LEAST_ON_DEVICE, "device_memory": 1.02},
    {"kind": "ranks", "model": "centred", "known_batch": True, "host": 1.0, "device": "emulated"},
]


def run_short_form() -> None:
    """Run in a fork of the forge, which has no threads."""
    folder = Path(os.environ["LOHAN_CASE"])
    outcomes = [differential.run_case({**SIMPLEST, **case}, folder) for case in SHORT]
    ended = [[outcome.status, outcome.detail] for outcome in outcomes]
    (folder / "outcomes.json").write_text(json.dumps(ended))
