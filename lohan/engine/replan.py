"""Replanning: a run measures its own steps, lane by lane, and makes a new plan where a lane, or the
device's memory, is not what its plan was made for.

Only the plan changes. Micro-batch, head slices and chunks stay as they are, so the numbers are the
same, bit for bit, whenever a run replans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch

from lohan.engine.session import Session
from lohan.errors import BudgetError, LohanError
from lohan.model.machine import Profile
from lohan.model.plan import Plan
from lohan.planner.forecast import Forecast, forecast, profile_of_step, step_work
from lohan.planner.memory import KEPT
from lohan.planner.planner import closed_form_plan, or_less, plan_for_budget
from lohan.util.trace import Span, busy_s, lane_label
from lohan.util.units import counted, format_bytes

FIRST_LOOK = 3  # steps: the first runs on demand, the second is the first by a known order
WORTH = 1.05  # times as fast a new plan must promise to be
TOLERANCE = 0.2  # between predicted and measured seconds of a lane
LEAST_SHARE = 0.1  # of a step, that a lane must be busy for to count
MOST_PLANS = 3


class Replanner:
    """Told of every step; at rest again when the lanes do what the plan was made for."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._since = 0  # steps with the current plan
        self._plans = 1
        chosen = session.context.options.activations != "holistic"  # by the user
        self._done = chosen or session.context.workload is None or not session.plan.overlap
        self._done |= session.process_group.several  # ranks would have to find the same
        known = session.context.profile
        self._promised: Forecast | None = None  # on a machine that is not known
        if known is not None and not self._done:
            self._promised = self._forecast(known, session.plan)

    def after_step(self, spans: list[Span], *, moved_bytes: int, step_s: float) -> str | None:
        """What was found and what was changed, in words, or None."""
        self._since += 1
        if self._done or self._since != FIRST_LOOK:
            return None
        why = "measured the first steps"
        if self._promised is not None:
            measured = busy_s(spans, float("-inf"), float("inf"))
            why = surprises(self._promised.busy_s, measured, step_s=step_s)
        found = self._learned(spans, moved_bytes) if why else None
        self._done = found is None or self._plans >= MOST_PLANS
        changed = None if found is None or self._done else self._consider(found)
        if changed is not None:
            return f"{why}; {changed}"
        return f"{why}; the plan stays as it is" if why and self._promised is not None else None

    def _learned(self, spans: list[Span], moved_bytes: int) -> Profile | None:
        context = self._session.context
        assert context.workload is not None
        has_own_memory = context.device.has_own_memory
        work = step_work(
            context.blocks, context.workload, self._session.plan, has_own_memory=has_own_memory
        )
        return profile_of_step(
            spans, work, moved_bytes=moved_bytes, host_bytes=context.host_bytes,
            device=context.device.name, device_bytes=context.device_bytes or 0,
        )  # fmt: skip

    def _consider(self, measured: Profile) -> str | None:
        """Goes on by a plan for the machine as measured, if that is worth it; says so."""
        plan, other = self._session.plan, self._better(measured)
        self._done = True
        if other is None:
            return None
        now, then = self._forecast(measured, plan), self._forecast(measured, other)
        if now.step_s < WORTH * then.step_s or other == plan:
            return None
        try:
            self._session.follow(other)
        except LohanError as error:
            return f"a new plan could not be followed, the old one goes on: {error}"
        self._done, self._since, self._promised = False, 0, then
        self._plans += 1
        faster = f"{now.step_s / then.step_s:.2f}x as fast"
        return f"a new plan should make steps {faster}: {_difference(plan, other)}"

    def _better(self, measured: Profile) -> Plan | None:
        context, plan = self._session.context, self._session.plan
        options = replace(
            context.options, micro_batch=plan.micro_batch, tiles=plan.tiles or "off",
            head_tokens=plan.head_tokens, chunk_params=plan.chunk_params,
        )  # fmt: skip
        try:
            return plan_for_budget(
                context.blocks, options, host_bytes=context.host_bytes, workload=context.workload,
                profile=measured,
            )  # fmt: skip
        except BudgetError:
            return None

    def _forecast(self, profile: Profile, plan: Plan) -> Forecast:
        context = self._session.context
        assert context.workload is not None
        durable = self._session.store.durability == "step"
        return forecast(profile, context.blocks, context.workload, plan, durable=durable)


def surprises(
    predicted: Mapping[str, float], measured: Mapping[str, float], *, step_s: float
) -> str:
    """Lanes that were busy for much longer or shorter than predicted, with both numbers. A lane
    that has little to do decides nothing."""
    lanes = [
        lane
        for lane, seconds in predicted.items()
        if abs(measured[lane] - seconds) > TOLERANCE * seconds
        and max(measured[lane], seconds) > LEAST_SHARE * step_s
    ]
    return "; ".join(
        f"{lane_label(lane)} was busy for {measured[lane]:.3g} s of a step, "
        f"{predicted[lane]:.3g} s were predicted"
        for lane in lanes
    )


def _difference(old: Plan, new: Plan) -> str:
    parts = []
    kept = {plan: _bytes(plan, KEPT) for plan in (old, new)}
    if kept[old] != kept[new]:
        parts.append(f"{format_bytes(kept[new])} of activations kept instead of recomputed")
    if len(old.moved_out) != len(new.moved_out):
        parts.append(f"those of {counted(len(new.moved_out), 'block')} on SSD")
    if len(old.deferred) != len(new.deferred):
        parts.append(f"{counted(len(new.deferred), 'group')} updated in the next forward")
    pinned = _bytes(new, "pinned optimizer state")
    if pinned != _bytes(old, "pinned optimizer state"):
        parts.append(f"{format_bytes(pinned)} of optimizer state in memory")
    return ", ".join(parts) or "other buffers"


def _bytes(plan: Plan, owner: str) -> int:
    return sum(entry.bytes for entry in plan.ledger if entry.owner == owner)


# -- A device that turns out smaller than planned: one more try with a smaller plan ----------------


LEFT = 3 / 4  # of the device's memory, for the second plan
YOUNG = 2  # steps of a plan: the second is the first that overlaps with the one before

Made = TypeVar("Made")


class OomGuard:
    """Runs the steps of a session. If the device has too little memory for a plan (other programs
    use it, or its kernels need more than was measured), that shows in the first steps: the run goes
    on with a plan for less. A smaller micro-batch changes results by rounding, so this is said, and
    done once."""

    def __init__(self, session: Session, say: Callable[[str], None]) -> None:
        self._session, self._say = session, say
        self._plan: Plan | None = None
        self._drawn: dict[int, Any] = {}  # random states before the plan's first steps
        self._shrunk = False

    def run(self, step: Callable[[], Made]) -> Made:
        session, device = self._session, self._session.context.device
        if not device.has_own_memory:
            return step()
        if session.plan is not self._plan:
            self._plan, self._drawn = session.plan, {}
        if young := len(self._drawn) < YOUNG:
            self._drawn[session.step] = device.random_state()
        number = session.step + 1
        try:
            return step()
        except torch.OutOfMemoryError as error:
            problem = str(error).splitlines()[0]
            if self._shrunk or not young or session.process_group.world > 1 or session.lost:
                raise BudgetError(_refusal(session, problem, number)) from None
        self._shrunk = True
        before, after = session.plan, _shrunk(session)
        self._say(
            f"the device ran out of memory in step {number} ({problem}); once more with a plan for "
            f"{format_bytes(session.context.device_bytes or 0)}: micro-batch {after} instead of "
            f"{before.micro_batch or 'all'}"
        )
        # Steps that were not committed are done again.
        device.set_random_state(self._drawn[session.step])
        self._plan = None
        return self.run(step)


def _shrunk(session: Session) -> str:
    context = session.context
    room = int((context.device_bytes or 0) * LEFT)
    if (used := session.plan.tier_bytes("device")) <= room:  # it would be the same plan
        room = int(used * LEFT)
    profile = None if context.profile is None else replace(context.profile, device_bytes=room)
    options = replace(context.options, chunk_params=session.plan.chunk_params)
    session.follow(
        lambda: closed_form_plan(
            context.blocks,
            options,
            host_bytes=context.host_bytes,
            workload=context.workload,
            profile=profile,
            device_bytes=room,
        )
    )
    session.context = replace(context, device_bytes=room, profile=profile)
    tiles = f" in tiles of {session.plan.tiles} tokens" if session.plan.tiles else ""
    return f"{session.plan.micro_batch or 'all'}{tiles}"


def _refusal(session: Session, problem: str, number: int) -> str:
    context = session.context
    room = format_bytes(context.device_bytes or 0)
    return (
        f"device out of memory in step {number} with a plan for {room} ({problem}); end what else "
        f"uses the device, or lower --device-memory below {room}"
        f"{or_less(context.workload, context.options)}; what was committed is safe: resume the run"
    )
