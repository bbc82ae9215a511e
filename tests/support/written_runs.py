"""Run folders with a log and without a store, and a text that attacks a page."""

from __future__ import annotations

import json
from pathlib import Path

from lohan.train.run_folder import RunFolder

EVIL = "</script><img src=x onerror=alert(1)>\u202e"

TOML = """model = "models/m"
data = "d.jsonl"
out = "."

[train]
steps = 3
"""
STEP = {
    "step": 1,
    "loss": 2.0,
    "lr": 1e-5,
    "tokens_per_s": 10.0,
    "step_s": 0.5,
    "rss_bytes": 10**9,
    "ssd_read_bytes": 10,
    "ssd_written_bytes": 10,
    "busy": {"compute": 0.5},
    "binding": "compute",
    "grad_norm": 1.0,
}


def write_run(folder: Path, *steps: int, loss: float = 2.0) -> RunFolder:
    """Write a run folder with a log and without a store."""
    folder.mkdir(parents=True)
    run = RunFolder(folder)
    run.config_file.write_text(TOML)
    rows = [{**STEP, "step": step, "loss": loss / step} for step in steps]
    run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run
