"""Conversion of seconds to FLOP/s: backward counts as twice the work, the head as three parts."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.flop_counter import FlopCounterMode

from lohan.device.base import CpuDevice
from lohan.engine.probes import BlockPoint, Sizes, head_figure, head_flops


class Known:
    """A block that takes a second, and two for its backward."""

    def flops(self, tokens: int) -> float:
        return 10.0 * tokens

    def forward_s(self, tokens: int) -> float:
        return 1.0

    def backward_s(self, tokens: int) -> float:
        return 2.0


def test_block_point_measures_forward_and_backward_rates():
    probe: Any = Known()
    point = BlockPoint(probe, 4)
    point.measure(0.0)
    assert point.forward == point.backward == (4.0, 40.0)


def test_flops_of_the_probe_head_equal_those_executed():
    sizes = Sizes(hidden=64, vocabulary=96)
    figure = head_figure(sizes, 8, CpuDevice())
    with FlopCounterMode(display=False) as counted:
        figure.run()
    assert counted.get_total_flops() == pytest.approx(head_flops(sizes, 8))
