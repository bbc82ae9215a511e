"""Make a run replan as soon as possible, by another plan, whatever the clock says.

These functions run in other processes (`Forge.start(before=...)`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lohan.engine import replanning as replan
from lohan.engine.context import PlanContext
from lohan.engine.plan_execution import PlanExecution
from lohan.errors import StoreError
from lohan.model.machine import Drive, Profile
from lohan.model.plan import Plan
from lohan.planner.planner import Planned, PlanProblem

# A machine that a step could have measured.
MEASURED = Profile(
    name="fixed",
    device="cpu",
    compute=((1.0, 1e10),),
    backward=((1.0, 1e10),),
    head_flops=1e10,
    host_bytes=2**34,
    adam=1e8,
    drives=(Drive(name="fixed", read=1e9, write=1e9, mixed=1e9),),
)


def always() -> None:
    machine_plan = replan.make_plan

    def other(problem: PlanProblem) -> Planned:
        options = replace(problem.options, activations="all")
        return machine_plan(replace(problem, options=options))

    replan.make_plan = other
    replan.REPLAN_SPEEDUP = 0.0


def with_fixed_measurement() -> None:
    """Replace what a step measured by constants.

    A step measures nothing if its updates finish late, as they do on a busy machine; the run then
    keeps its plan. Tests that need a new plan and do not examine the measurement call this.
    """

    def fixed(context: Any, *_: Any) -> Profile:
        if not context.device_bytes:
            return MEASURED
        return replace(MEASURED, device_bytes=context.device_bytes, h2d=1e9, d2h=1e9)

    PlanContext.measured = fixed  # type: ignore[method-assign]


def fails() -> None:
    """As `always`, and this process cannot follow the new plan."""
    always()
    start = PlanExecution.start

    def started(execution: Any, plan: Plan) -> None:
        if execution.planless:  # a change of plan, not the start
            raise StoreError("no space left for kept activations")
        start(execution, plan)

    PlanExecution.start = started  # type: ignore[method-assign]
