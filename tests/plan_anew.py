"""For processes of their own (`Forge.start(before=...)`): a run that plans anew as soon as it may,
by another plan than its first, whatever the clock says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lohan import replanning
from lohan.plan import Plan


def always() -> None:
    made = replanning.best_plan

    def other(blocks: Any, wishes: Any, **given: Any) -> Plan:
        return made(blocks, replace(wishes, activations="all"), **given)

    replanning.best_plan = other  # type: ignore[assignment]
    replanning.WORTH = 0.0
