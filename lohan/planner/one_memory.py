"""The plan of a rank that computes on the CPU: its host budget is also that of compute.

Which part of it compute gets is tried: the first that a plan fits into.
"""

from __future__ import annotations

from collections.abc import Callable

from lohan.errors import BudgetError
from lohan.model.demand import Load
from lohan.model.layout import Blocks
from lohan.model.plan import Plan
from lohan.planner.best import best_plan
from lohan.planner.planner import Wishes, or_less
from lohan.util.units import format_bytes

SHARES = (0.5, 0.65, 0.35, 0.75, 0.25, 0.85, 0.15)  # of the budget, for compute
DOUBLED, HALVED = 20, 4  # times, to find out how much would be enough


def plan_in_one_memory(
    blocks: Blocks, wishes: Wishes, *, host_bytes: int, load: Load | None = None
) -> tuple[Plan, int]:
    """The plan, and the bytes of the budget that are compute's."""

    def planned(size: int) -> tuple[Plan, int] | None:
        for share in SHARES:
            room = int(share * size)
            try:
                plan = best_plan(
                    blocks, wishes, host_bytes=size - room, load=load, device_bytes=room
                )
            except BudgetError:
                continue
            return plan, room
        return None

    found = planned(host_bytes)
    if found is not None:
        return found
    enough = _enough(lambda size: planned(size) is not None, host_bytes)
    world, each = wishes.world, format_bytes(enough)
    raise BudgetError(
        f"host budget too small: each of {world} ranks needs {each} for its share of the state and "
        f"for compute, its share of --host is {format_bytes(host_bytes)}; raise --host to "
        f"{format_bytes(world * enough)} for {world} ranks on a machine{or_less(load, wishes)}, or "
        "start fewer ranks"
    )


def _enough(fits: Callable[[int], bool], little: int) -> int:
    """A size that fits and is not much more than it takes."""
    sizes = (little * 2**times for times in range(1, DOUBLED))
    high = next(filter(fits, sizes), little * 2**DOUBLED)
    low = high // 2
    for _ in range(HALVED):
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
