"""Numbers of the report, from rows that are known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lohan.ui.traces import NET, Traced, _clock_offset
from lohan.ui.view import MOST_POINTS, _ratio, curve, measured_lanes


def test_lanes_are_busy_for_seconds():
    rows = [{"busy": {"compute": share, "ssd": 0.25}, "step_s": 4.0} for share in (0.25, 0.5, 1.0)]
    story: Any = SimpleNamespace(steady=rows)
    assert measured_lanes(story) == {"compute": 2.0, "ssd": 1.0}


def test_difference_is_relative_to_the_prediction():
    assert _ratio(2.0, 3.0, 4.0) == "+50 %"
    assert _ratio(2.0, 1.0, 4.0) == "-50 %"
    assert _ratio(None, 1.0, 4.0) == "-"


def test_difference_of_a_negligible_time_is_not_shown():
    assert _ratio(1e-6, 4e-4, 4.0) == "-"


def test_points_of_a_curve_are_means():
    rows = [{"step": i, "loss": float(i)} for i in range(1, 2 * MOST_POINTS + 1)]
    result = curve(rows, "loss")
    assert result["x"][:2] == [2, 4] and result["y"][:2] == [1.5, 3.5]


def test_clocks_are_apart_by_what_ranks_do_together():
    def spans(rank: int, late: float) -> list[Traced]:
        common = [(NET, "A1", 10.0), (NET, "X1", 20.0), (NET, "A2", 30.0)]
        rank_spans = [(0, "F0", 7.0 * rank)]
        return [
            Traced(rank, n, 0, name, s + late, s + 1 + late) for n, name, s in common + rank_spans
        ]

    assert _clock_offset(spans(1, 5.0), spans(0, 0.0)) == pytest.approx(5.0)
