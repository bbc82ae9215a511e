"""The comparison of gradient norms; tests/softcuda runs the checks themselves."""

from __future__ import annotations

import pytest

from lohan.tools.gpu_bench import WrongResult
from lohan.tools.gpu_norm_checks import check_norms


def test_accepts_norms_that_differ_by_rounding() -> None:
    check_norms([2.0, 1.0], [2.001, 0.9999], "two runs")


@pytest.mark.parametrize("norms", [[2.0, 1.1], [2.0, float("nan")], [1.0, 0.5]])
def test_rejects_norms_of_other_gradients(norms: list[float]) -> None:
    with pytest.raises(WrongResult, match="two runs: gradient norms"):
        check_norms(norms, [2.0, 1.0], "two runs")
