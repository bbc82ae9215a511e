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
from tests.support.kept_files import assert_kept, tree
from tests.support.numbered_faults import Error, Faults
from tests.support.recording_display import Watch
from tests.support.tiny_run import result, write_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


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


def start_fails(config: Config, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> BaseException:
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
            trainer.train(config, Watch())
    return caught.value


def campaign(
    inputs: Path,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    error: Error,
    at: int,
    stride: int,
) -> int:
    config = config_of(inputs, place / "whole")
    trainer.train(config, Watch())
    whole, hits = result(place / "whole"), 0
    while True:
        out = place / f"run{at}"
        out.mkdir()
        (out / "mine.txt").write_text("mine")
        before, config = tree(out), config_of(inputs, out)
        faults = Faults(at=at, error=error)
        met = start_fails(config, faults, monkeypatch)
        assert_kept(before, out, at)
        if not faults.reached:
            assert tree(out) == before, "all of it is taken back"
            return hits
        assert isinstance(met, KeyboardInterrupt if error is KeyboardInterrupt else Failed)
        try:
            trainer.train(config, Watch())
        except LohanError as refusal:  # of a store that is still whole
            assert f"continue it with `lohan resume {out}`" in str(refusal)
            trainer.resume(RunFolder(out), Watch())
        assert result(out) == whole
        assert_kept(before, out, at)
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
