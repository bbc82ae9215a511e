"""The plan of a model that only runs forward: no state, no gradients; the rest keeps weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lohan.errors import BudgetError
from lohan.model.layout import Blocks
from lohan.model.plan import LedgerEntry, Plan
from lohan.model.state import MODES
from lohan.planner.planner import SPARE_SHARE
from lohan.planner.sizer import DEVICE_SLOTS
from lohan.util.units import format_bytes


def forward_plan(
    blocks: Blocks, mode: str, *, chunk_params: int, micro_batch: int | None, head_tokens: int,
    host_bytes: int, device_bytes: int | None, needs: Mapping[str, int],
) -> Plan:  # fmt: skip
    """The plan that uses `host_bytes` best, or a BudgetError with the numbers. `needs` is what
    compute takes beside the weights, by owner: in host memory, or on a device with a memory of its
    own, `device_bytes`."""
    widest = max((len(site.groups) for site in blocks.sites), default=1)
    plan = Plan(
        mode=mode, micro_batch=micro_batch, chunk_params=chunk_params, head_tokens=head_tokens,
        weight_slots=widest, window=0, ring=0, grad_groups=0,
        device_slots=min(2 * widest, DEVICE_SLOTS) if device_bytes is not None else 0,
    )  # fmt: skip
    plan = _with_ledger(plan, blocks, needs)
    for tier, limit in (("device", device_bytes or 0), ("host", host_bytes)):
        if plan.tier_bytes(tier) > limit:
            raise BudgetError(_refusal(plan, tier, limit))
    limit = int(host_bytes * (1 - SPARE_SHARE))
    for slots, window in ((widest + 1, 1), (widest + 2, 1), (widest + 3, 2)):
        grown = _with_ledger(replace(plan, weight_slots=slots, window=window), blocks, needs)
        plan = grown if grown.tier_bytes("host") <= limit else plan
    moving = [group for group in blocks.groups if not group.resident]
    for group in sorted(moving, key=lambda group: -group.numel):
        pinned = (*plan.pinned_weights, group.key)
        grown = _with_ledger(replace(plan, pinned_weights=pinned), blocks, needs)
        plan = grown if grown.tier_bytes("host") <= limit else plan
    return plan


def _with_ledger(plan: Plan, blocks: Blocks, needs: Mapping[str, int]) -> Plan:
    width, pinned = MODES[plan.mode].weight_bytes, set(plan.pinned_weights)
    resident = sum(group.numel for group in blocks.groups if group.resident)
    moving = {g.key: g.numel for g in blocks.groups if not g.resident}
    passing = max((numel for key, numel in moving.items() if key not in pinned), default=0)
    host = {
        "weight slots": plan.weight_slots * passing * width,
        "pinned weights": (resident + sum(moving[key] for key in pinned)) * width,
    }
    compute = {"resident parameters": resident * width, **needs}
    if plan.device_slots:
        device = {"weights": plan.device_slots * max(moving.values(), default=0) * width, **compute}
    else:
        host, device = {**host, **compute}, {}
    entries = [LedgerEntry("device", owner, count) for owner, count in device.items() if count]
    entries += [LedgerEntry("host", owner, count) for owner, count in host.items() if count]
    return replace(plan, ledger=tuple(entries))


def _refusal(plan: Plan, tier: str, limit: int) -> str:
    needed, option = plan.tier_bytes(tier), {"device": "--device-memory", "host": "--host"}[tier]
    rows = sorted((e for e in plan.ledger if e.tier == tier), key=lambda entry: -entry.bytes)
    largest = ", ".join(f"{entry.owner} {format_bytes(entry.bytes)}" for entry in rows[:3])
    return (
        f"{tier} budget too small: this needs {format_bytes(needed)}, {option} allows "
        f"{format_bytes(limit)} (largest: {largest}); raise {option} to {format_bytes(needed)}, "
        "or ask for less at a time"
    )
