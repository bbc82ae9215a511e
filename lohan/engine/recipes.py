"""Which results each call keeps, found when a block runs for the first time.

A plan names classes of activations; which operations make them is known only with the real inputs,
since models choose their operations by them (a mask or none, say).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lohan.capture.call import SavedCall
from lohan.capture.inventory import Inventories
from lohan.capture.kept import Recipe
from lohan.engine.sites import SiteRunner


class Recipes:
    """`kept`: classes by number of site."""

    def __init__(self, kept: Mapping[int, frozenset[str]]) -> None:
        self._kept = kept
        self._inventories = Inventories()
        self._made: dict[tuple[Any, ...], Recipe | None] = {}

    def recipe(self, runner: SiteRunner, call: SavedCall, part: slice) -> Recipe | None:
        """For one slice of a call; None: nothing is kept."""
        classes = self._kept.get(runner.number)
        if not classes:
            return None
        key = (runner.number, part.stop - part.start, *(tuple(t.shape) for t in call.tensors))
        if key not in self._made:
            self._made[key] = self._make(runner, call, part, classes)
        return self._made[key]

    def _make(
        self, runner: SiteRunner, call: SavedCall, part: slice, classes: frozenset[str]
    ) -> Recipe | None:
        _, args, kwargs = call.restore(part, grad=True)
        found = self._inventories.of(runner.module, args, kwargs, forward=runner.original)
        names = classes & found.keys.keys()
        return found.recipe(names) if names else None
