"""Schedules against transformers where they must agree, and by hand where they must not."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lohan.errors import ConfigError
from lohan.optim import SCHEDULES, lr_at


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_same_as_transformers_without_warmup(schedule: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=3e-4)
    expected = transformers.get_scheduler(
        schedule, optimizer, num_warmup_steps=0, num_training_steps=17
    )
    for step in range(25 if schedule == "linear" else 17):
        actual = lr_at(step, total_steps=17, peak_lr=3e-4, schedule=schedule)
        assert actual == pytest.approx(expected.get_last_lr()[0], rel=1e-12, abs=1e-18)
        optimizer.step()
        expected.step()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_after_warmup_same_as_transformers(schedule: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    name = "constant_with_warmup" if schedule == "constant" else schedule
    expected = transformers.get_scheduler(
        name, optimizer, num_warmup_steps=5, num_training_steps=20
    )
    for step in range(20):
        actual = lr_at(step, total_steps=20, peak_lr=1.0, schedule=schedule, warmup_steps=5)
        if step < 5:
            assert actual == pytest.approx(expected.get_last_lr()[0] + 1 / 5)
        else:
            assert actual == pytest.approx(expected.get_last_lr()[0], abs=1e-15)
        optimizer.step()
        expected.step()


def test_warmup_starts_above_zero_and_reaches_the_peak() -> None:
    rates = [lr_at(s, total_steps=10, peak_lr=8.0, warmup_steps=4) for s in range(6)]
    assert rates == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_decay_ends_at_the_floor() -> None:
    for schedule in ("linear", "cosine"):
        for step in (10, 1000):
            end = lr_at(step, total_steps=10, peak_lr=2.0, schedule=schedule, min_lr_ratio=0.1)
            assert end == pytest.approx(0.2)


def test_unknown_schedule_is_refused() -> None:
    with pytest.raises(ConfigError, match="'cosin'; choose constant, linear, cosine"):
        lr_at(0, total_steps=1, peak_lr=1.0, schedule="cosin")


@given(
    st.sampled_from(SCHEDULES),
    st.integers(1, 500),
    st.integers(0, 600),
    st.floats(0, 1),
)
def test_between_zero_and_peak_and_never_rising_after_warmup(
    schedule: str, total: int, warmup: int, floor: float
) -> None:
    rates = [
        lr_at(
            step,
            total_steps=total,
            peak_lr=1e-3,
            schedule=schedule,
            warmup_steps=warmup,
            min_lr_ratio=floor,
        )
        for step in range(total)
    ]
    assert all(0 < rate <= 1e-3 * (1 + 1e-12) for rate in rates)
    decay = rates[max(0, warmup - 1) :]
    assert all(a >= b for a, b in itertools.pairwise(decay))
