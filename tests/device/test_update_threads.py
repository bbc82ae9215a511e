"""Ranks of one machine divide its cores among their updates."""

from __future__ import annotations

import os

from lohan import _core
from lohan.device.ranks import update_threads


def test_ranks_divide_cores(monkeypatch):
    before = _core.threads()
    try:
        _core.set_threads(8)
        for cores, ranks, expected in ((8, 1, 8), (8, 2, 4), (32, 2, 8), (2, 4, 1)):
            monkeypatch.setattr(os, "sched_getaffinity", lambda _, count=cores: set(range(count)))
            assert update_threads(ranks) == expected
    finally:
        _core.set_threads(before)
