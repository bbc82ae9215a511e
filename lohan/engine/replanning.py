"""Replanning: a run measures its steps and plans again if a lane or memory is not as planned.

Only the plan changes. Micro-batch, head slices and chunks stay as they are, so the results are the
same, bit for bit, whenever a run replans.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from lohan.device.out_of_memory import is_out_of_memory
from lohan.errors import BudgetError, LohanError
from lohan.model.machine import Profile
from lohan.model.plan import CACHED_STATE, Plan
from lohan.planner.forecast import (
    Forecast,
)
from lohan.planner.memory import KEPT
from lohan.planner.planner import (
    REPLAN_SPEEDUP,
    closed_form_plan,
    lower_hint,
    make_plan,
)
from lohan.util.trace import Span, busy_s
from lohan.util.units import counted, format_bytes

if TYPE_CHECKING:
    from lohan.engine.session import Session


COMPARED_STEP = 3  # The first step runs on demand, and the second is the first with a known order.


# The accepted relative difference between predicted and measured seconds of a lane.
FORECAST_TOLERANCE = 0.2


LEAST_BUSY_SHARE = 0.1  # A lane counts if it is busy for at least this share of a step.


MOST_PLANS = 3


@dataclass(frozen=True)
class ReplanDecision:
    """A decision after a step: the reason, the plan to follow if any, and its gain as text."""

    why: str | None = None
    plan: Plan | None = None
    faster: str = ""

    def to_json(self) -> list[Any]:
        return [self.why, None if self.plan is None else self.plan.to_json(), self.faster]

    @classmethod
    def from_json(cls, data: list[Any]) -> ReplanDecision:
        why, plan, faster = data
        return cls(why, None if plan is None else Plan.from_json(plan), faster)


class Replanner:
    """A comparison of an early step of each plan with its forecast, and changes of the plan.

    The step is the third or, if not every step commits, the fourth. The plan changes at most
    twice. With several ranks, all of them call `after_step` after the same steps; the first
    measures, plans and decides.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._plan_steps = 0  # steps with the current plan
        self._plans = 1
        context = session.context
        # whether the user has chosen the activations
        chosen = context.options.activations != "holistic"
        measurable = context.workload is not None and session.plan.overlap
        self._done = chosen or context.plan_is_given or not measurable
        self._last_s = time.perf_counter()  # the time of the last call of `after_own_step`
        # The forecast of the plan. It is None if the machine is not known, and on all ranks but the
        # first.
        self._promised: Forecast | None = None
        if context.profile is not None and not self._done and session.process_group.ranks.first:
            self._promised = context.forecast(context.profile, session.plan)

    def after_step(self, spans: list[Span], *, step_s: float) -> str | None:
        """Compare a step of each plan with its forecast, and change the plan if that pays.

        Return a description of what was measured and changed, or None if nothing was measured.
        """
        self._plan_steps += 1
        # The first two steps of a plan are always committed. Some writes of the second are done
        # during the third, which is therefore not typical for a step between two commits.
        first_look = COMPARED_STEP + (not self._session.plan.commit.every_step)
        if self._done or self._plan_steps != first_look:
            return None
        decision = self._decided(partial(self._look, spans, step_s=step_s))
        self._done = True  # The comparison is repeated only if another plan is followed.
        if decision.plan is None:
            return decision.why
        note, followed = self._follow(decision.plan, decision.faster)
        if followed:
            self._done, self._plan_steps = False, 0
            self._plans += 1
        return f"{decision.why}; {note}"

    def after_own_step(self) -> str | None:
        """Call `after_step` with the spans and the time since the previous call of this method."""
        then_s, self._last_s = self._last_s, time.perf_counter()
        spans = self._session.executor.trace.take_step()
        return self.after_step(spans, step_s=self._last_s - then_s)

    def _look(self, spans: list[Span], *, step_s: float) -> ReplanDecision:
        """Measure the machine by one step, and decide whether a better plan is followed.

        Only compute from the start of the last forward to the start of a call without gradients
        counts. Other compute was an evaluation, a run of the step that was repeated, or a call
        whose gradients are accumulated.
        """
        trace = self._session.executor.trace
        began_s, stop_s = trace.forward_began_s, trace.inference_began_s
        spans = [s for s in spans if s.lane != "compute" or began_s <= s.start_s < stop_s]
        why = "measured the first steps"
        stays = ReplanDecision()
        if self._promised is not None:
            measured = busy_s(spans, float("-inf"), float("inf"))
            promised = dict(self._promised.busy_s)
            if self._session.plan.log_gradients:
                del promised["ssd"]  # It depends on the number of steps since the last full state.
            why = surprises(promised, measured, step_s=step_s)
            stays = ReplanDecision(why=f"{why}; the plan stays as it is" if why else None)
        context, plan = self._session.context, self._session.plan
        measured_profile = context.measured(spans, plan) if why else None
        if measured_profile is None or self._plans >= MOST_PLANS:
            return stays
        if plan.log_gradients and context.profile is not None:
            # A logged step hardly writes, so it does not measure the rate of writes.
            measured_profile = replace(measured_profile, drives=context.profile.drives)
        other = self._better(measured_profile)
        if other is None:
            return stays
        current, new = (context.forecast(measured_profile, each) for each in (plan, other))
        if current.step_s < REPLAN_SPEEDUP * new.step_s or other == plan:
            return stays
        self._promised = new
        return ReplanDecision(why, other, _faster(current, new))

    def _decided(self, decide: Callable[[], ReplanDecision]) -> ReplanDecision:
        """Make the decision on the first rank, and return it on every rank."""
        group = self._session.process_group
        try:
            return ReplanDecision.from_json(group.broadcast_made(lambda: decide().to_json()))
        except BaseException:
            group.abort()  # Note [an error on one rank]: others may be waiting in the collective.
            raise

    def _follow(self, plan: Plan, faster: str) -> tuple[str, bool]:
        """Follow a plan, and return a description of the result and whether it succeeded."""
        old = self._session.plan
        try:
            self._session.follow(plan)
        except LohanError as error:
            if self._session.execution.planless:
                raise
            return f"a new plan could not be followed, the old one goes on: {error}", False
        return f"a new plan should make steps {faster}: {_difference(old, plan)}", True

    def _better(self, measured: Profile) -> Plan | None:
        context, plan = self._session.context, self._session.plan
        options = replace(context.options.fixed_by(plan), world=plan.world)
        try:
            return make_plan(context.problem(options, profile=measured)).plan
        except BudgetError:
            return None


def _faster(current: Forecast, new: Forecast) -> str:
    return f"{current.step_s / new.step_s:.2f}x as fast"


def surprises(
    predicted: Mapping[str, float], measured: Mapping[str, float], *, step_s: float
) -> str:
    """Describe the lanes whose busy time was much longer or shorter than predicted.

    A lane with little work is ignored.
    """
    lanes = [
        lane
        for lane, seconds in predicted.items()
        if abs(measured[lane] - seconds) > FORECAST_TOLERANCE * seconds
        and max(measured[lane], seconds) > LEAST_BUSY_SHARE * step_s
    ]
    return "; ".join(
        f"{lane} was busy for {measured[lane]:.3g} s of a step, "
        f"{predicted[lane]:.3g} s were predicted"
        for lane in lanes
    )


def _difference(old: Plan, new: Plan) -> str:
    parts = []
    kept = {plan: plan.owner_bytes(KEPT) for plan in (old, new)}
    if kept[old] != kept[new]:
        parts.append(f"{format_bytes(kept[new])} of activations kept instead of recomputed")
    if len(old.spilled_sites) != len(new.spilled_sites):
        parts.append(f"those of {counted(len(new.spilled_sites), 'block')} on SSD")
    if len(old.deferred) != len(new.deferred):
        groups = counted(len(new.deferred), "group") if new.deferred else "no group"
        parts.append(f"{groups} updated in the next forward")
    cached = new.owner_bytes(CACHED_STATE)
    if cached != old.owner_bytes(CACHED_STATE):
        parts.append(f"{format_bytes(cached)} of optimizer state in memory")
    return ", ".join(parts) or "other buffers"


# -- A smaller plan if device memory runs out ------------------------------------------------------


OOM_SHRINK_FACTOR = 3 / 4  # The second plan gets this share of the device's memory.


# Steps of a plan in which running out of memory leads to a retry. The second step is the first that
# overlaps with an earlier one.
OOM_RETRY_STEPS = 2


Result = TypeVar("Result")


class OomGuard:
    """A guard that runs the steps of a session, and reduces the plan if device memory runs out.

    Other programs may use the memory, or kernels may need more than was measured. Both happen in
    the first steps, and the run then continues with a plan for less memory. A smaller micro-batch
    changes the rounding of results, so the change is reported, and made only once.
    """

    def __init__(self, session: Session, say: Callable[[str], None]) -> None:
        self._session, self._say = session, say
        self._plan: Plan | None = None
        # random states before the first steps of the plan, by step
        self._drawn: dict[int, Any] = {}
        self._shrunk = False

    def run(self, step: Callable[[], Result]) -> Result:
        session, device = self._session, self._session.context.device
        if not device.has_own_memory:
            return step()
        if session.plan is not self._plan:
            self._plan, self._drawn = session.plan, {}
        if young := len(self._drawn) < OOM_RETRY_STEPS:
            self._drawn[session.step] = device.random_state()
        number = session.step + 1
        try:
            return step()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            problem = str(error).splitlines()[0]
            alone = session.process_group.world == 1
            if self._shrunk or not young or not alone or session.execution.lost:
                raise BudgetError(_refusal(session, problem, number)) from None
        self._shrunk = True
        before, after = session.plan, _shrunk(session)
        self._say(
            f"the device ran out of memory in step {number} ({problem}); once more with a plan for "
            f"{format_bytes(session.context.device_bytes or 0)}: micro-batch {after} instead of "
            f"{before.micro_batch or 'all'}"
        )
        # Steps that were not committed are repeated.
        device.set_random_state(self._drawn[session.step])
        self._plan = None
        return self.run(step)


def _shrunk(session: Session) -> str:
    context = session.context
    room = int((context.device_bytes or 0) * OOM_SHRINK_FACTOR)
    # If the current plan already fits in `room`, plan for less than it uses; otherwise the new plan
    # would be the same.
    if (used := session.plan.tier_bytes("device")) <= room:
        room = int(used * OOM_SHRINK_FACTOR)
    profile = None if context.profile is None else replace(context.profile, device_bytes=room)
    options = context.options.logging(session.plan.log_gradients)
    options = replace(options, chunk_params=session.plan.chunk_params)
    problem = replace(context.problem(options, profile=profile), device_bytes=room)
    session.follow(lambda: closed_form_plan(problem))
    session.context = replace(context, device_bytes=room, profile=profile)
    tiles = f" in tiles of {session.plan.tiles} tokens" if session.plan.tiles else ""
    return f"{session.plan.micro_batch or 'all'}{tiles}"


def _refusal(session: Session, problem: str, number: int) -> str:
    context = session.context
    room = format_bytes(context.device_bytes or 0)
    lower = lower_hint(context.workload, context.options)
    return (
        f"device out of memory in step {number} with a plan for {room} ({problem}); stop "
        f"other programs that use the device, or lower --device-memory below {room}"
        f"{lower}; what was committed is safe: resume the run"
    )
