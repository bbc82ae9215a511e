"""Make a run apply all deferred updates twice and keep nothing in memory.

This runs in other processes (`Forge.start(before=...)`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lohan.engine import attach
from lohan.model.plan import Plan


def everywhere() -> None:
    made = attach.plan_for_budget

    def twice(blocks: Any, options: Any, **given: Any) -> Plan:
        plan = made(blocks, options, **given)
        keys = tuple(group.key for group in blocks.trained if not group.resident)
        twice = keys if plan.overlap else ()
        return replace(plan, host_cached_weights=(), host_cached_state=(), updated_twice=twice)

    attach.plan_for_budget = twice  # type: ignore[assignment]
