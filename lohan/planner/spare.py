"""What memory that is left over is spent on, each as far as the budgets go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from lohan.model.plan import Plan
from lohan.model.state import chunks
from lohan.planner.memory import Books


class Spare:
    """Grows plans of one ledger within a host `limit`; `fits` knows all budgets."""

    def __init__(self, books: Books, limit: int, fits: Callable[[Plan], bool]) -> None:
        self._books, self._limit, self._fits = books, limit, fits

    def if_fits(self, plan: Plan, **change: object) -> Plan:
        grown = self._books.with_ledger(replace(plan, **change))  # type: ignore[arg-type]
        return grown if self._fits(grown) else plan

    def unspill(self, plan: Plan) -> Plan:
        """Held gradients stay in memory, the first blocks' first: they are held for the least
        time and needed the soonest."""
        spilled = set(plan.spilled)
        first = [group.key for group in self._books.trained if group.key in spilled]
        return self._most(
            plan, len(first), lambda count: {"spilled": _without(plan.spilled, first[:count])}
        )

    def defer(self, plan: Plan, share: float) -> Plan:
        """The last blocks' updates wait for the next forward, which reaches them last."""
        allowed = share * sum(group.numel for group in self._books.trained)
        deferred: list[str] = []
        for group in reversed(self._books.trained):
            allowed -= group.numel
            if allowed < 0:
                break
            deferred.append(group.key)
        return self._most(plan, len(deferred), lambda count: {"deferred": tuple(deferred[:count])})

    def _most(self, plan: Plan, limit: int, change: Callable[[int], dict[str, object]]) -> Plan:
        """The plan with as much of a change as fits; half of it takes less than all of it."""
        best, low, high = plan, 0, limit + 1
        tried = limit  # often all of it fits
        while low + 1 < high:
            grown = self.if_fits(plan, **change(tried))
            best, low, high = (best, low, tried) if grown is plan else (grown, tried, high)
            tried = (low + high) // 2
        return best

    def cache_on_device(self, plan: Plan) -> Plan:
        """More weight slots on the device: the last blocks of forward need not be loaded again.
        What compute needs must be known, or they would take its room."""
        while (
            self._books.linked
            and self._books.load is not None
            and plan.device_slots < len(self._books.moving)
        ):
            grown = self.if_fits(plan, device_slots=plan.device_slots + 1)
            if grown is plan:
                break
            plan = grown
        return plan

    def pin_weights(self, plan: Plan) -> Plan:
        """Large groups first. Of groups of one size as many as fit."""
        pinned = plan.pinned_weights
        by_size: dict[int, list[str]] = {}
        for group in sorted(self._books.moving, key=lambda group: -group.numel):
            if group.key not in pinned:
                by_size.setdefault(group.numel, []).append(group.key)
        for keys in by_size.values():
            plan = self._pin_some(plan, keys)
        return plan

    def _pin_some(self, plan: Plan, keys: Sequence[str]) -> Plan:
        before = plan.pinned_weights
        return self._most(
            plan, len(keys), lambda count: {"pinned_weights": (*before, *keys[:count])}
        )

    def pin_state(self, plan: Plan) -> Plan:
        left = self._limit - plan.tier_bytes("host")
        pinned: list[tuple[str, int]] = []
        for group in self._books.blocks.trained:
            for chunk in chunks(group, plan.chunk_params):
                size = self._books.mode.state_size(chunk.stop - chunk.start)
                if size <= left:
                    left -= size
                    pinned.append((group.key, chunk.index))
        return self._books.with_ledger(replace(plan, pinned_state=tuple(pinned)))


def _without(keys: Sequence[str], these: Sequence[str]) -> tuple[str, ...]:
    gone = set(these)
    return tuple(key for key in keys if key not in gone)
