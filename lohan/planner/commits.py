"""How often a run commits its steps, where the user leaves that open.

Every step, if that costs little: of a step's time, and of the drives' life. Otherwise by a plan
whose steps leave what stays in memory unwritten, as often as costs little, at least every quarter
of an hour; unless that plan is slower, since updates wait for the norm between two commits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil

from lohan.model.machine import Profile
from lohan.model.plan import Plan
from lohan.planner.forecast import Forecast
from lohan.util.units import EVERY_STEP, Interval

Planned = tuple[Plan, Forecast | None]

LONGEST_S = 15 * 60.0  # that a crash may cost
SLOWER = 0.02  # of a step, that commits may cost
MORE_BYTES = 0.2  # of what steps write anyway, that they may add
LASTING_S = 5 * 365 * 86400.0  # of training without a pause: what drives survive is no wear
DEFAULT_LIFE = 600.0  # bytes written per byte of capacity that consumer drives are rated for


def often_enough(
    profile: Profile, planned: Callable[[Interval], Planned], foreseen: Callable[[Plan], Forecast]
) -> Planned:
    """`planned` makes the plan for an interval, and what it does if it was simulated."""
    every, now = planned(EVERY_STEP)
    if not any(weights_too(every)):
        return every, now
    now = now or foreseen(every)
    rare, then = planned(Interval(0, LONGEST_S))
    then = then or foreseen(rare)
    added = then.commit
    if added is None or then.step_s > (1 + SLOWER) * now.step_s:
        return every, now
    between_s = then.step_s - added.seconds / added.steps
    between = then.written_bytes - added.written_bytes / added.steps
    if now.step_s <= (1 + SLOWER) * between_s and _little(
        profile, now.written_bytes - between, between, now.step_s
    ):
        return every, now
    most = int(LONGEST_S / between_s)
    if most < 2:
        return every, now
    steps = min(most, max(2, ceil(added.seconds / (SLOWER * between_s))))
    while steps < most and not _little(profile, added.written_bytes / steps, between, between_s):
        steps = min(most, ceil(steps * 1.1))
    return replace(rare, commit=Interval(steps, LONGEST_S)), None


def weights_too(plan: Plan) -> list[bool]:
    """Of the state that stays in memory, whether its weights do: then it need not be written."""
    pinned = set(plan.pinned_weights)
    return [key in pinned for key, _ in plan.pinned_state]


def _little(profile: Profile, added: float, anyway: float, step_s: float) -> bool:
    """Bytes that commits add to what a step writes anyway."""
    life = sum(drive.endurance_bytes or DEFAULT_LIFE * drive.bytes for drive in profile.drives)
    return added <= MORE_BYTES * anyway or (added + anyway) * LASTING_S / step_s <= life
