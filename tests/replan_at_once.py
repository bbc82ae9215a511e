"""For processes of their own (`Forge.start(before=...)`): a run that replans as soon as it may,
by another plan than its first, whatever the clock says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lohan.engine import session as replan
from lohan.model.plan import Plan


def always() -> None:
    made = replan.plan_for_budget

    def other(blocks: Any, options: Any, **given: Any) -> Plan:
        return made(blocks, replace(options, activations="all"), **given)

    replan.plan_for_budget = other  # type: ignore[assignment]
    replan.WORTH = 0.0
