"""What memory that is left over is spent on, each as far as the budgets go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lohan.plan import Plan
from lohan.planning.books import Books
from lohan.state import chunks


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
        spilled = list(plan.spilled)
        for group in self._books.trained:
            if group.key in spilled:
                left = tuple(key for key in spilled if key != group.key)
                grown = self.if_fits(plan, spilled=left)
                if grown is plan:
                    break
                plan, spilled = grown, list(left)
        return plan

    def defer(self, plan: Plan, share: float) -> Plan:
        """The last blocks' updates wait for the next forward, which reaches them last."""
        allowed = share * sum(group.numel for group in self._books.trained)
        deferred: list[str] = []
        for group in reversed(self._books.trained):
            allowed -= group.numel
            if allowed < 0:
                break
            grown = self.if_fits(plan, deferred=(*deferred, group.key))
            if grown is plan:
                break
            plan = grown
            deferred.append(group.key)
        return plan

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
        pinned = list(plan.pinned_weights)
        for group in sorted(self._books.moving, key=lambda group: -group.numel):
            if group.key in pinned:
                continue
            grown = self.if_fits(plan, pinned_weights=(*pinned, group.key))
            if grown is not plan:
                plan = grown
                pinned.append(group.key)
        return plan

    def pin_state(self, plan: Plan) -> Plan:
        left = self._limit - plan.tier_bytes("host")
        pinned: list[tuple[str, int]] = []
        for group in self._books.blocks.trained:
            for chunk in chunks(group, plan.chunk_params):
                size = (chunk.stop - chunk.start) * self._books.mode.state_bytes
                if size <= left:
                    left -= size
                    pinned.append((group.key, chunk.index))
        return self._books.with_ledger(replace(plan, pinned_state=tuple(pinned)))
