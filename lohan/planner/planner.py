"""From blocks, footprint and budgets to a plan, or to a message that says what would fit.

Host memory goes first to what a step cannot do without, at the smallest sizes; then to overlap
(prefetch, gradients that may wait, state buffers); then, as far as it pays on the machine at hand,
to activations and to gradients of updates that run in the next forward; what is still left keeps
weights and then optimizer state in memory instead of on SSD: weights first, since every byte of
them saves two reads a step. The state is used in a fixed cyclic order, so a fixed share is kept;
the least recently used would always be the next needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from lohan.errors import BudgetError
from lohan.model.demand import Load
from lohan.model.layout import Blocks
from lohan.model.machine import Profile
from lohan.model.plan import Plan
from lohan.model.wishes import Wishes
from lohan.planner.activations import Choice
from lohan.planner.sizer import Sizer
from lohan.util.units import format_bytes

__all__ = ["SPARE_SHARE", "Wishes", "check_fits", "make_plan"]

SPARE_SHARE = 0.03  # of the budget, left to the allocator's rounding


def make_plan(
    blocks: Blocks, wishes: Wishes, *, host_bytes: int, load: Load | None = None,
    profile: Profile | None = None, device_bytes: int | None = None,
) -> Plan:  # fmt: skip
    """The plan that uses `host_bytes` best, or a BudgetError with the numbers. A smaller
    micro-batch leaves the device room for activations on their way, so some are tried.
    `device_bytes`: of the device's own memory, where the profile does not say."""
    limit = int(host_bytes * (1 - SPARE_SHARE))
    made: list[tuple[Sizer, Plan, Choice | None]] = []
    for sizer, plan in _fitting(blocks, wishes, host_bytes, load, profile, device_bytes):
        made.append((sizer, *sizer.chosen(plan, limit)))
        if not sizer.device:
            break
    sizer, plan, choice = min(made, key=lambda m: m[2].step_s if m[2] is not None else 0.0)
    return sizer.grown(plan, choice, limit)


def check_fits(
    blocks: Blocks, wishes: Wishes, *, host_bytes: int, load: Load | None = None,
    profile: Profile | None = None,
) -> Plan:  # fmt: skip
    """The smallest plan, or a BudgetError: whether a run is possible, not how it would go."""
    return next(_fitting(blocks, wishes, host_bytes, load, profile))[1]


def _fitting(
    blocks: Blocks, wishes: Wishes, host_bytes: int, load: Load | None, profile: Profile | None,
    device_bytes: int | None = None,
) -> Iterator[tuple[Sizer, Plan]]:  # fmt: skip
    """The smallest plan of every micro-batch that fits, the largest first."""
    device = _device_bytes(profile, device_bytes)
    candidates: Sequence[int | None] = [wishes.micro_batch]
    if load is not None and wishes.micro_batch is None:
        candidates = _micro_batches(load, profile if device else None)
    refused: Plan | None = None
    found = 0

    def over(plan: Plan) -> int:
        return max(device, plan.tier_bytes("device"))

    for micro_batch in candidates:
        if found > 1 and not _fast(micro_batch, load, profile):
            continue
        sizer = Sizer(blocks, wishes, load, micro_batch, profile, device)
        plan = sizer.smallest(host_bytes)
        if plan.tier_bytes("device") <= device and plan.tier_bytes("host") <= host_bytes:
            found += 1
            yield sizer, plan
        refused = min(refused or plan, plan, key=lambda p: (over(p), p.tier_bytes("host")))
    if not found:
        assert refused is not None
        raise BudgetError(_refusal(refused, host_bytes, device, load, wishes))


def _micro_batches(load: Load, profile: Profile | None) -> list[int]:
    """Halves of halves and, with a profile, the smallest with which the device is at its
    fastest; the largest first."""
    sizes = {1, *(-(-load.batch // 2**i) for i in range(12))}
    if profile is not None:
        sizes.add(min(load.batch, math.ceil(profile.compute[-1][0] / load.seq)))
    return sorted(sizes, reverse=True)


def _fast(micro_batch: int | None, load: Load | None, profile: Profile | None) -> bool:
    """Whether a micro-batch is among the smallest with which the device is about at its fastest:
    larger ones only take more of its memory."""
    if load is None or profile is None or micro_batch is None:
        return False
    return 0.5 <= micro_batch * load.seq / profile.compute[-1][0] < 2


def _device_bytes(profile: Profile | None, device_bytes: int | None) -> int:
    if device_bytes is not None:
        return device_bytes
    return profile.device_bytes if profile is not None else 0


def _refusal(
    plan: Plan, host_bytes: int, device_bytes: int, load: Load | None, wishes: Wishes
) -> str:
    tier, limit, option = "host", host_bytes, "--host"
    if plan.tier_bytes("device") > device_bytes:
        tier, limit, option = "device", device_bytes, "--device-memory"
    needed = plan.tier_bytes(tier)
    rows = sorted((e for e in plan.ledger if e.tier == tier), key=lambda e: -e.bytes)
    largest = ", ".join(f"{e.owner} {format_bytes(e.bytes)}" for e in rows[:3])
    return (
        f"{tier} budget too small: the run needs {format_bytes(needed)}, {option} allows "
        f"{format_bytes(limit)} (largest: {largest}); raise {option} to {format_bytes(needed)}"
        f"{or_less(load, wishes)}"
    )


def or_less(load: Load | None, wishes: Wishes) -> str:
    """What else a user can do who has no more memory: the end of a sentence."""
    if load is None:
        return ""
    each, micro = " for each rank" if wishes.world > 1 else "", wishes.micro_batch or 1
    lower = [f"--batch (now {load.batch}{each})"] if load.batch > 1 else []
    lower += [f"--micro-batch (now {micro})"] if micro > 1 else []
    lower += [f"--seq (now {load.seq})"] if load.text else []
    words = f", or lower {' or '.join(lower)}" if lower else ""
    return words if load.text else f"{words}, or train on smaller images or latents"
