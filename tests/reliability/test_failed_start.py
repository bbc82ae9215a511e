"""A start that fails removes what it has created.

A fault during that clean-up loses nothing, and the same command works afterwards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lohan.config import Config, load_config
from lohan.errors import LohanError
from lohan.train import trainer
from lohan.train.run_folder import RunFolder
from tests.support.faults import InjectedError, NumberedFaults
from tests.support.forked_commands import tiny_result, write_tiny_inputs
from tests.support.stores import assert_files_kept, file_digests
from tests.support.training_runs import RecordingDisplay


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_inputs(tmp_path_factory.mktemp("inputs"))


def config_of(inputs: Path, out: Path) -> Config:
    return load_config(
        None,
        overrides={
            "init": inputs / "model" / "config.json",
            "data": inputs / "data.jsonl",
            "out": out,
            "eval.data": inputs / "data.jsonl",
            "budget.host": "400KiB",
            "train.steps": 1,
            "train.batch": 2,
            "train.seq": 16,
            "train.activations": "recompute",
        },
    )


class Failed(LohanError):
    """Raised by a start after its store was created."""


def start_fails(
    config: Config, faults: NumberedFaults, monkeypatch: pytest.MonkeyPatch
) -> BaseException:
    """Run a start that fails, with faults during its undo."""
    result, undo = trainer.open_session, trainer.undo_start

    def opened(*given: Any, **named: Any) -> Any:
        result(*given, **named).close()
        raise Failed("no")

    def undone(*given: Any) -> None:
        with faults.armed(monkeypatch):
            undo(*given)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "open_session", opened)
        patch.setattr(trainer, "undo_start", undone)
        with pytest.raises((Failed, KeyboardInterrupt)) as caught:
            trainer.train(config, RecordingDisplay())
    return caught.value


def campaign(
    inputs: Path,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    error: InjectedError,
    at: int,
    stride: int,
) -> int:
    config = config_of(inputs, place / "whole")
    trainer.train(config, RecordingDisplay())
    whole, hits = tiny_result(place / "whole"), 0
    while True:
        out = place / f"run{at}"
        out.mkdir()
        (out / "mine.txt").write_text("mine")
        before, config = file_digests(out), config_of(inputs, out)
        faults = NumberedFaults(at=at, error=error)
        met = start_fails(config, faults, monkeypatch)
        assert_files_kept(before, out, at)
        if not faults.reached:
            assert file_digests(out) == before, "all of it is taken back"
            return hits
        assert isinstance(met, KeyboardInterrupt if error is KeyboardInterrupt else Failed)
        try:
            trainer.train(config, RecordingDisplay())
        except LohanError as refusal:  # of a store that is still whole
            assert f"continue it with `lohan resume {out}`" in str(refusal)
            trainer.resume(RunFolder(out), RecordingDisplay())
        assert tiny_result(out) == whole
        assert_files_kept(before, out, at)
        hits, at = hits + 1, at + stride


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_fault_during_the_undo_of_a_start(error, inputs, tmp_path, monkeypatch):
    assert campaign(inputs, tmp_path, monkeypatch, error=error, at=3, stride=15) > 1


@pytest.mark.slow
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_fault_at_every_call_of_the_undo_of_a_start(error, inputs, tmp_path, monkeypatch):
    hits = campaign(inputs, tmp_path, monkeypatch, error=error, at=1, stride=1)
    print(f"{error.__name__} at each of {hits} calls")
    assert hits > 20
