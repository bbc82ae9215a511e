"""The loss scale of fp16: doubled after many clean updates, halved by an overflow, with bounds."""

from __future__ import annotations

from dataclasses import replace

from lohan.checkpoint.train_state import GROWTH_INTERVAL, LARGEST_SCALE, SMALLEST_SCALE, TrainState


def test_the_loss_scale_grows_after_clean_updates():
    result = replace(TrainState.start("fp16"), clean_updates=GROWTH_INTERVAL - 2)
    scale = result.loss_scale
    result = result.updated(scaled=True, absent=())
    assert result.loss_scale == scale
    result = result.updated(scaled=True, absent=())
    assert (result.loss_scale, result.clean_updates) == (2 * scale, 0)
    result = result.overflowed()
    assert (result.loss_scale, result.clean_updates, result.skipped_steps) == (scale, 0, 1)


def test_the_loss_scale_has_bounds():
    largest = TrainState(loss_scale=LARGEST_SCALE, clean_updates=GROWTH_INTERVAL - 1)
    assert largest.updated(scaled=True, absent=()).loss_scale == LARGEST_SCALE
    assert TrainState(loss_scale=SMALLEST_SCALE).overflowed().loss_scale == SMALLEST_SCALE
    unscaled = TrainState(clean_updates=GROWTH_INTERVAL - 1).updated(scaled=False, absent=())
    assert unscaled.loss_scale == 1.0
