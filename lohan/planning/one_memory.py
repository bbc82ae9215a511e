"""The plan of a rank that computes on the CPU: its host budget is also that of compute.

Which part of it compute gets is tried: the first that a plan fits into.
"""

from __future__ import annotations

from lohan.errors import BudgetError
from lohan.layout import Blocks
from lohan.plan import Plan
from lohan.planning.best import best_plan
from lohan.planning.demand import Load
from lohan.planning.planner import Wishes
from lohan.units import format_bytes

SHARES = (0.5, 0.65, 0.35, 0.75, 0.25, 0.85, 0.15)  # of the budget, for compute


def plan_in_one_memory(
    blocks: Blocks, wishes: Wishes, *, host_bytes: int, load: Load | None = None
) -> tuple[Plan, int]:
    """The plan, and the bytes of the budget that are compute's."""
    reasons = []
    for share in SHARES:
        room = int(share * host_bytes)
        try:
            plan = best_plan(
                blocks, wishes, host_bytes=host_bytes - room, load=load, device_bytes=room
            )
        except BudgetError as error:
            reasons.append(str(error))
        else:
            return plan, room
    raise BudgetError(
        f"each of {wishes.world} ranks has {format_bytes(host_bytes)} of host memory (--host), for "
        f"its share of the state and for compute; with half of it for either: {reasons[0]}"
    )
