"""Loggers get every row once, and are asked for by name only where they are installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from lohan.config import load_config
from lohan.errors import ConfigError
from lohan.train import logs, trainer
from lohan.train.run_folder import RunFolder, eval_rows, step_rows
from tests.support.recording_display import Watch
from tests.test_evaluation import given, inputs  # noqa: F401 - a fixture


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_named(name, inputs, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = load_config(None, overrides=given(inputs, tmp_path / "run", output__log=[name]))
    with pytest.raises(
        ConfigError, match=rf"{name} is not installed; pip install 'lohan\[{name}\]"
    ):
        trainer.train(config, Watch())
    assert list(tmp_path.iterdir()) == []


def test_numbers_of_a_row() -> None:
    row = {"step": 3, "loss": 1.5, "busy": {"ssd": 0.5}, "binding": "ssd", "tokens": 4}
    assert dict(logs.scalars(row)) == {"train/loss": 1.5, "busy/ssd": 0.5, "train/tokens": 4.0}
    assert dict(logs.scalars({"step": 3, "eval_loss": 2.0})) == {"eval/loss": 2.0}


def test_tensorboard(inputs, tmp_path):  # noqa: F811
    """Stopped and resumed, each step is there once."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "run"
    asked = given(
        inputs,
        out,
        output__log=["tensorboard"],
        eval__data=inputs / "held.jsonl",
        eval__every=2,
        train__steps=2,
    )
    trainer.train(load_config(None, overrides=asked), Watch())
    trainer.resume(RunFolder(out), Watch(), steps=4)
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("train/loss")]
    rows = step_rows(RunFolder(out))
    assert found == [(row["step"], pytest.approx(row["loss"], rel=1e-6)) for row in rows]
    found = [(event.step, event.value) for event in events.Scalars("eval/loss")]
    rows = eval_rows(RunFolder(out))
    assert found == [(row["step"], pytest.approx(row["eval_loss"], rel=1e-6)) for row in rows]
    assert len(rows) == 2


def test_weights_and_biases(inputs, tmp_path, monkeypatch):  # noqa: F811
    """Offline: what would be sent lies in the run folder."""
    pytest.importorskip("wandb")
    for name, value in (("MODE", "offline"), ("SILENT", "true"), ("DIR", str(tmp_path))):
        monkeypatch.setenv(f"WANDB_{name}", value)
    out = tmp_path / "run"
    asked = given(inputs, out, output__log=["wandb"], train__steps=2, output__export=False)
    trainer.train(load_config(None, overrides=asked), Watch())
    written = list(Path(out).rglob("*.wandb"))
    assert len(written) == 1 and b"train/loss" in written[0].read_bytes()
