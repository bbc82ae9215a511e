"""A device that turns out smaller than planned: one more try with a smaller plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from lohan.engine.session import Session
from lohan.errors import BudgetError
from lohan.planner.planner import make_plan, or_less
from lohan.util.units import format_bytes

LEFT = 3 / 4  # of the device's memory, for the second plan

Made = TypeVar("Made")


def first_step(session: Session, step: Callable[[], Made], say: Callable[[str], None]) -> Made:
    """Runs the first step of a process. If the device has too little memory for it (other programs
    use it, or its kernels need more than was measured), the run goes on with a plan for less. A
    smaller micro-batch changes results by rounding, so this is said, and done once."""
    device = session.demand.device
    drawn = device.random_state()
    try:
        return step()
    except torch.OutOfMemoryError as error:
        if not device.linked:
            raise
        problem = str(error).splitlines()[0]
    before, after = session.plan, _shrunk(session)
    say(
        f"the device ran out of memory in the first step ({problem}); once more with a plan for "
        f"{format_bytes(session.demand.device_bytes or 0)}: micro-batch {after} instead of "
        f"{before.micro_batch or 'all'}"
    )
    device.set_random_state(drawn)
    try:
        return step()
    except torch.OutOfMemoryError as error:
        raise BudgetError(_refusal(session, error)) from None


def _shrunk(session: Session) -> int | str:
    demand = session.demand
    room = int((demand.device_bytes or 0) * LEFT)
    profile = None if demand.profile is None else replace(demand.profile, device_bytes=room)
    wishes = replace(demand.wishes, chunk_params=session.plan.chunk_params)
    session.follow(
        lambda: make_plan(
            demand.blocks,
            wishes,
            host_bytes=demand.host_bytes,
            load=demand.load,
            profile=profile,
            device_bytes=room,
        )
    )
    session.demand = replace(demand, device_bytes=room, profile=profile)
    return session.plan.micro_batch or "all"


def _refusal(session: Session, error: Exception) -> str:
    demand = session.demand
    room = format_bytes(demand.device_bytes or 0)
    return (
        f"device out of memory with a plan for {room} too ({str(error).splitlines()[0]}); give a "
        f"--device-memory that is free{or_less(demand.load, demand.wishes)}"
    )
