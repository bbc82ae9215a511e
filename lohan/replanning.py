"""The loop closed: a run measures its own first steps, plans with what it found, and looks again
whether the plan does what it promised.

Only the plan changes. Micro-batch, head slices and chunks stay as they are, so the numbers are the
same, bit for bit, whenever a run plans anew.
"""

from __future__ import annotations

from dataclasses import replace

from lohan.errors import BudgetError, LohanError
from lohan.learning import profile_of_step
from lohan.plan import Plan
from lohan.planning.forecast import Forecast, forecast, workload
from lohan.planning.planner import make_plan
from lohan.profile import Profile
from lohan.session import Session
from lohan.trace import Span
from lohan.units import format_bytes

FIRST_LOOK = 3  # steps: the first runs on demand, the second finds its rhythm
WORTH = 1.05  # times as fast a new plan must promise to be
TOLERANCE = 0.2  # between what was promised and what came
MOST_PLANS = 3


class Replanner:
    """Told of every step; at rest again when the plan keeps its promise."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._since = 0  # steps with the plan under way
        self._plans = 1
        self._promised: Forecast | None = None
        chosen = session.demand.wishes.activations != "holistic"  # by the user
        self._done = chosen or session.demand.load is None or not session.plan.overlap

    def after_step(self, spans: list[Span], *, moved_bytes: int, step_s: float) -> str | None:
        """What was changed, in words, or None."""
        self._since += 1
        if self._done or self._since != FIRST_LOOK:
            return None
        promised = self._promised
        if promised is not None and abs(step_s - promised.step_s) <= TOLERANCE * promised.step_s:
            self._done = True
            return None
        demand, plan = self._session.demand, self._session.plan
        assert demand.load is not None
        work = workload(demand.blocks, demand.load, plan, linked=False)
        measured = profile_of_step(
            spans, work, moved_bytes=moved_bytes, host_bytes=demand.host_bytes
        )
        self._done = measured is None or self._plans >= MOST_PLANS
        return None if measured is None or self._done else self._consider(measured, plan)

    def _consider(self, measured: Profile, plan: Plan) -> str | None:
        demand = self._session.demand
        assert demand.load is not None
        wishes = replace(
            demand.wishes, micro_batch=plan.micro_batch, head_tokens=plan.head_tokens,
            chunk_params=plan.chunk_params,
        )  # fmt: skip
        try:
            other = make_plan(
                demand.blocks, wishes, host_bytes=demand.host_bytes, load=demand.load,
                profile=measured,
            )  # fmt: skip
        except BudgetError:
            self._done = True
            return None
        durable = self._session.store.durability == "step"
        now = forecast(measured, demand.blocks, demand.load, plan, write_pinned=durable)
        then = forecast(measured, demand.blocks, demand.load, other, write_pinned=durable)
        if now.step_s < WORTH * then.step_s or other == plan:
            self._done = True
            return None
        try:
            self._session.follow(other)
        except LohanError as error:
            self._done = True
            return f"a new plan could not be followed, the old one goes on: {error}"
        again = self._promised is not None
        self._since, self._promised = 0, then
        self._plans += 1
        return (
            ("steps were not as fast as planned; " if again else "measured the first steps; ")
            + f"a new plan should make them {now.step_s / then.step_s:.2f}x as fast: "
            + _difference(plan, other)
        )


def _difference(old: Plan, new: Plan) -> str:
    parts = []
    kept = {plan: _bytes(plan, "kept activations") for plan in (old, new)}
    if kept[old] != kept[new]:
        parts.append(f"{format_bytes(kept[new])} of activations kept instead of recomputed")
    if len(old.moved_out) != len(new.moved_out):
        parts.append(f"those of {len(new.moved_out)} blocks on SSD")
    if len(old.deferred) != len(new.deferred):
        parts.append(f"{len(new.deferred)} groups updated in the next forward")
    pinned = _bytes(new, "pinned optimizer state")
    if pinned != _bytes(old, "pinned optimizer state"):
        parts.append(f"{format_bytes(pinned)} of optimizer state in memory")
    return ", ".join(parts) or "other buffers"


def _bytes(plan: Plan, owner: str) -> int:
    return sum(entry.bytes for entry in plan.ledger if entry.owner == owner)
