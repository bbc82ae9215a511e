"""Loggers get every row once; a missing package is reported by name."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from lohan.config import load_config
from lohan.errors import ConfigError
from lohan.train import logs, trainer
from lohan.train.run_folder import RunFolder, eval_rows, step_rows
from tests.support.training_runs import (
    RecordingDisplay,
    evaluated_inputs_fixture,  # noqa: F401 - a fixture
    evaluated_settings,
)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio", "mlflow"])
def test_a_missing_package_is_named(name, inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = load_config(
        None, overrides=evaluated_settings(inputs, tmp_path / "run", output__log=[name])
    )
    with pytest.raises(
        ConfigError, match=rf"{name} is not installed; pip install 'lohan\[{name}\]"
    ):
        trainer.train(config, RecordingDisplay())
    assert list(tmp_path.iterdir()) == []


def test_numbers_of_a_row() -> None:
    row = {"step": 3, "loss": 1.5, "busy": {"ssd": 0.5}, "binding": "ssd", "tokens": 4}
    assert dict(logs.scalars(row)) == {"train/loss": 1.5, "busy/ssd": 0.5, "train/tokens": 4.0}
    assert dict(logs.scalars({"step": 3, "eval_loss": 2.0})) == {"eval/loss": 2.0}


def test_tensorboard(inputs, tmp_path):
    """Stopped and resumed, each step is there once."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "run"
    config = evaluated_settings(
        inputs,
        out,
        output__log=["tensorboard"],
        eval__data=inputs / "held.jsonl",
        eval__every=2,
        train__steps=2,
    )
    trainer.train(load_config(None, overrides=config), RecordingDisplay())
    trainer.resume(RunFolder(out), RecordingDisplay(), steps=4)
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    actual = [(event.step, event.value) for event in events.Scalars("train/loss")]
    rows = step_rows(RunFolder(out))
    assert actual == [(row["step"], pytest.approx(row["loss"], rel=1e-6)) for row in rows]
    actual = [(event.step, event.value) for event in events.Scalars("eval/loss")]
    rows = eval_rows(RunFolder(out))
    assert actual == [(row["step"], pytest.approx(row["eval_loss"], rel=1e-6)) for row in rows]
    assert len(rows) == 2


def test_weights_and_biases(inputs, tmp_path, monkeypatch):
    """In offline mode, the data is in the run folder."""
    pytest.importorskip("wandb")
    for name, value in (("MODE", "offline"), ("SILENT", "true"), ("DIR", str(tmp_path))):
        monkeypatch.setenv(f"WANDB_{name}", value)
    out = tmp_path / "run"
    config = evaluated_settings(
        inputs, out, output__log=["wandb"], train__steps=2, output__export=False
    )
    trainer.train(load_config(None, overrides=config), RecordingDisplay())
    written = list(Path(out).rglob("*.wandb"))
    assert len(written) == 1 and b"train/loss" in written[0].read_bytes()


def train_then_resume(inputs, out, name):
    """Train two steps, resume to four, and return the rows of steps and of evaluations."""
    config = evaluated_settings(
        inputs,
        out,
        output__log=[name],
        eval__data=inputs / "held.jsonl",
        eval__every=2,
        train__steps=2,
        output__export=False,
    )
    trainer.train(load_config(None, overrides=config), RecordingDisplay())
    trainer.resume(RunFolder(out), RecordingDisplay(), steps=4)
    return step_rows(RunFolder(out)), eval_rows(RunFolder(out))


def test_trackio_holds_each_row_once_after_resume(inputs, tmp_path, monkeypatch):
    pytest.importorskip("trackio", reason="trackio is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "trackio"
    # Trackio reads its folder when it is imported, perhaps by an earlier test.
    for module in ("utils", "sqlite_storage"):
        loaded = pytest.importorskip(f"trackio.{module}")
        monkeypatch.setattr(loaded, "TRACKIO_DIR", folder)
    from trackio.sqlite_storage import SQLiteStorage

    out = tmp_path / "run"
    steps, evaluations = train_then_resume(inputs, out, "trackio")
    logged = SQLiteStorage.get_logs("lohan", RunFolder(out).tag(RunFolder(out).config()))
    for name, key, rows in (
        ("train/loss", "loss", steps),
        ("eval/loss", "eval_loss", evaluations),
    ):
        actual = [(entry["step"], entry[name]) for entry in logged if name in entry]
        assert actual == [(row["step"], pytest.approx(row[key])) for row in rows]
    assert (len(steps), len(evaluations)) == (4, 2)


def test_mlflow_holds_each_row_once_after_resume(inputs, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    pytest.importorskip("alembic", reason="mlflow writes SQLite with alembic")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    out = tmp_path / "run"
    steps, evaluations = train_then_resume(inputs, out, "mlflow")
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{out}/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("lohan")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["train.steps"] == "2"
    for name, key, rows in (
        ("train/loss", "loss", steps),
        ("eval/loss", "eval_loss", evaluations),
    ):
        actual = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]
        assert actual == [(row["step"], pytest.approx(row[key])) for row in rows]
    assert (len(steps), len(evaluations)) == (4, 2)
