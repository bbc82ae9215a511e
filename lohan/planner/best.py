"""The plan that a run follows: the planner's, with its choice of activations looked at again.

The closed form knows no waits. Where a simulation takes little time, other levels of activations
are simulated too, first far apart, then near the best, and so is the plan that leaves no update to
the next forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lohan.model.demand import Load
from lohan.model.layout import Blocks
from lohan.model.machine import Profile
from lohan.model.plan import Kept, Plan
from lohan.planner.activations import levels
from lohan.planner.forecast import forecast
from lohan.planner.memory import Books
from lohan.planner.planner import Wishes, make_plan
from lohan.schedule.steps import shape_of

QUICK = 500  # chunks and sites of a model that is simulated several times
FAR, NEAR = 8, 2  # levels apart
BETTER = 0.999  # of the time of the choice before


def best_plan(
    blocks: Blocks, wishes: Wishes, *, host_bytes: int, load: Load | None = None,
    profile: Profile | None = None, device_bytes: int | None = None,
) -> Plan:  # fmt: skip
    """As `make_plan`, with the same errors."""

    def plan_of(wished: Wishes) -> Plan:
        return make_plan(
            blocks, wished, host_bytes=host_bytes, load=load, profile=profile,
            device_bytes=device_bytes,
        )  # fmt: skip

    plan = plan_of(wishes)
    if load is None or profile is None or wishes.minimise != "time" or not plan.overlap:
        return plan
    durable = wishes.durability == "step"
    books = Books(
        blocks, wishes.mode, load, plan.micro_batch, linked=profile.has_link, kind=wishes.kind
    )
    chunks = sum(shape_of(blocks, plan, write_pinned=durable).chunks)
    if chunks + len(blocks.sites) > QUICK or not books.block_sites:
        return plan

    def seconds(plan: Plan) -> float:
        return forecast(profile, blocks, load, plan, write_pinned=durable).step_s

    wishes = replace(wishes, micro_batch=plan.micro_batch)
    if wishes.activations == "holistic":
        known = list(levels(books, load))
        made = _best_level(plan, known, seconds, lambda kept: plan_of(_keeping(wishes, kept)))
        plan, wishes = made, _keeping(wishes, made.kept)
    if not plan.deferred:
        return plan
    at_once = plan_of(replace(wishes, grad_offload="optimized"))
    return plan if seconds(plan) <= seconds(at_once) else replace(at_once, grad_offload="balanced")


def _best_level(
    plan: Plan, known: list[Kept], seconds: Callable[[Plan], float], plan_of: Callable[[Kept], Plan]
) -> Plan:
    """Other levels of activations than that of the plan, where they are faster."""
    at, best_s = known.index(plan.kept) if plan.kept in known else 0, seconds(plan)
    seen: set[int] = set()
    for apart in (FAR, NEAR):
        near = range(at % apart, len(known), apart) if apart == FAR else _around(at, apart)
        for number in near:
            if number in seen or not 0 <= number < len(known):
                continue
            seen.add(number)
            other = plan_of(known[number])
            step_s = seconds(other)
            if step_s < BETTER * best_s:
                plan, best_s, at = other, step_s, number
    return plan


def _keeping(wishes: Wishes, kept: Kept) -> Wishes:
    return replace(wishes, activations=kept or "recompute")


def _around(at: int, apart: int) -> list[int]:
    return [at + i * apart for i in (-2, -1, 1, 2)]
