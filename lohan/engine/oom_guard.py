"""A second attempt with a smaller plan if device memory runs out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from lohan.device.out_of_memory import is_out_of_memory
from lohan.errors import BudgetError
from lohan.model.plan import Plan
from lohan.planner.planner import (
    closed_form_plan,
    lower_hint,
)
from lohan.util.units import format_bytes

if TYPE_CHECKING:
    from lohan.engine.session import Session


OOM_SHRINK_FACTOR = 3 / 4  # The second plan gets this share of the device's memory.


# Steps of a plan in which running out of memory leads to a retry. The second step is the first that
# overlaps with an earlier one.
OOM_RETRY_STEPS = 2


Result = TypeVar("Result")


class OomGuard:
    """Runs the steps of a session, and reduces the plan if device memory runs out.

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
            if self._shrunk or not young or session.process_group.world > 1 or session.lost:
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
    # Otherwise, the plan would be the same.
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
