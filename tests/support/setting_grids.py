"""Grids of settings: the default tier covers every pair of values, the slow tier the whole grid."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(*axes: Sequence[Any]) -> list[Any]:
    """Return all combinations of the axes, as parameters for pytest.mark.parametrize.

    A few of them contain every pair of values of two axes; the others are marked `slow`.
    """
    grid = list(product(*(range(len(axis)) for axis in axes)))
    chosen = _covering(grid)
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(axes, place, strict=True)),
            marks=() if place in chosen else pytest.mark.slow,
        )
        for place in grid
    ]


def _covering(grid: Iterable[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Greedy: always the combination with most pairs that are not covered yet."""
    left = {place: set(combinations(enumerate(place), 2)) for place in grid}
    chosen, missing = set(), set().union(*left.values())
    while missing:
        place = max(left, key=lambda place: len(left[place] & missing))
        chosen.add(place)
        missing -= left[place]
    return chosen


def each_value(*axes: Sequence[Any]) -> list[Any]:
    """Return all combinations of the axes, as parameters for pytest.mark.parametrize.

    As many as the longest axis is long contain every value; the others are marked `slow`.
    """
    longest = max(map(len, axes))
    chosen = {tuple(n % len(axis) for axis in axes) for n in range(longest)}
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(axes, place, strict=True)),
            marks=() if place in chosen else pytest.mark.slow,
        )
        for place in product(*(range(len(axis)) for axis in axes))
    ]


def thinned(cases: Iterable[Any], *quick: int) -> list[Any]:
    """All cases, those marked `slow` that are not among the given numbers."""
    return [
        case
        if number in quick
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for number, case in enumerate(cases)
    ]
