"""Losses and norms that no training has stop a run before anything of them is kept."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lohan.checkpoint.train_state import SMALLEST_SCALE, TrainState
from lohan.errors import TrainingError
from lohan.train.periodic import check_loss, check_norm
from tests.support.training_runs import (
    TEXT_ROWS,
    word_model_fixture,  # noqa: F401 - a fixture
    write_rows,
)

LATER = TrainState(step=3, updates=3)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, 1e29])
def test_rejects_implausible_losses(loss):
    for progress in (TrainState(), LATER):
        with pytest.raises(TrainingError, match=rf"step {progress.step + 1}: the loss is"):
            check_loss(loss, progress)


def test_zero_loss_is_rejected_in_the_first_step_only():
    with pytest.raises(TrainingError, match=r"loss is 0\.0"):
        check_loss(0.0, TrainState())
    check_loss(0.0, LATER)
    check_loss(-3.5, TrainState())


@pytest.mark.parametrize("norm", [math.nan, math.inf, 1e29])
def test_rejects_implausible_norms(norm):
    with pytest.raises(TrainingError, match="step 4: the gradient norm is"):
        check_norm(norm, LATER, replace(LATER, step=4))
    with pytest.raises(TrainingError, match=r"step 1: the gradient norm is 0\.0"):
        check_norm(0.0, TrainState(), TrainState(step=1))
    check_norm(0.0, LATER, replace(LATER, step=4))
    check_norm(None, LATER, replace(LATER, step=4))


def test_an_fp16_overflow_is_part_of_training_until_the_scale_is_used_up():
    before = TrainState.start("fp16")
    check_norm(math.inf, before, before.overflowed())
    least = replace(before, loss_scale=SMALLEST_SCALE)
    with pytest.raises(TrainingError, match="loss scale"):
        check_norm(math.inf, least, least.overflowed())


@pytest.mark.parametrize("clip", ["1.0", "0"])
def test_a_run_that_diverges_stops_and_exports_nothing(clip, lohan, model, tmp_path):
    """With clipping by the norm, without it by the next loss; what was committed stays."""
    data, run = write_rows(tmp_path / "data.jsonl", TEXT_ROWS), tmp_path / "run"
    result = lohan(
        "train",
        "--model",
        model,
        "--data",
        data,
        "--out",
        run,
        "--batch",
        4,
        "--steps",
        8,
        "--seq",
        16,
        "--lr",
        "1e38",
        "--clip",
        clip,
        "--host",
        "64MiB",
    )
    assert result.code == 2
    assert "which is not plausible" in result.err
    assert "Traceback" not in result.err
    assert not (run / "model").exists()
