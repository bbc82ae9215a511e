"""A pass over a block lasts at least as long as its kernels take to launch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lohan.planner import presets
from lohan.schedule.simulate import SiteWork

MACHINE = replace(presets.machine("rtx4090"), block_width=4096)
WORK = SiteWork(forward_flops=1e9, recompute_flops=1e9, tokens=16, slices=8)


def test_launches_bind_where_the_device_is_faster() -> None:
    slow = replace(MACHINE, forward_launch_s=0.01, backward_launch_s=0.03)
    assert WORK.forward_s(slow) == pytest.approx(8 * 0.01)
    assert WORK.backward_s(slow) == pytest.approx(8 * 0.03)


def test_launches_are_hidden_behind_longer_compute() -> None:
    quick = replace(MACHINE, forward_launch_s=1e-9, backward_launch_s=1e-9)
    assert WORK.forward_s(quick) == WORK.forward_s(MACHINE)
    assert WORK.backward_s(quick) == WORK.backward_s(MACHINE)


def test_site_without_compute_launches_nothing() -> None:
    idle = replace(WORK, forward_flops=0.0, recompute_flops=0.0)
    assert idle.forward_s(replace(MACHINE, forward_launch_s=0.01)) == 0.0
