"""From blocks, footprint and budget to a plan, or to a message that says what would fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lohan.blocks import RESIDENT, Blocks
from lohan.errors import BudgetError
from lohan.footprint import Footprint
from lohan.plan import LedgerEntry, Plan
from lohan.state import MODES, Mode
from lohan.units import MiB, format_bytes

SMALLEST_CHUNK, LARGEST_CHUNK = 2**17, 2**26  # parameters
SMALLEST_HEAD = 16  # tokens
HEAD_BYTES = 128 * MiB  # logits of one slice, when the budget allows
LOGIT_COPIES = 4  # logits, their fp32 copy, log-softmax, gradient


@dataclass(frozen=True)
class Load:
    """What one batch asks for: its shape and the footprint of each micro-batch size."""

    batch: int
    seq: int
    measure: Callable[[int], Footprint]  # micro-batch -> footprint
    hidden: int = 0
    vocabulary: int = 0  # 0: the head is an ordinary site
    head_group: str | None = None


def make_plan(
    blocks: Blocks, *, mode: str, host_bytes: int, load: Load | None = None,
    micro_batch: int | None = None, chunk_params: int | None = None, slots: int = 2,
) -> Plan:  # fmt: skip
    """The largest micro-batch, head slice and chunk that fit `host_bytes`."""
    if load is None:
        candidates: list[int | None] = [micro_batch]
    elif micro_batch is not None:
        candidates = [micro_batch]
    else:
        candidates = [m for i in range(12) if (m := -(-load.batch // 2**i)) > 1] + [1]
    widest = max(slots, *(len(site.groups) for site in blocks.sites))
    refused: Plan | None = None
    for candidate in dict.fromkeys(candidates):
        plan = _fit(blocks, MODES[mode], host_bytes, load, candidate, chunk_params, widest)
        if plan.tier_bytes("host") <= host_bytes:
            return plan
        refused = plan
    assert refused is not None
    raise BudgetError(_refusal(refused, host_bytes, load))


def _fit(
    blocks: Blocks, mode: Mode, host_bytes: int, load: Load | None, micro_batch: int | None,
    chunk_params: int | None, slots: int,
) -> Plan:  # fmt: skip
    """A plan for this micro-batch, shrinking head slice and chunk towards the budget."""
    footprint = None if load is None else load.measure(micro_batch or load.batch)
    chunk = chunk_params or _chunk_cap(host_bytes, blocks)
    head = _head_tokens(load)
    largest = max(group.numel for group in blocks.groups)
    while True:
        plan = Plan(
            mode=mode.name, micro_batch=micro_batch, chunk_params=min(chunk, largest),
            head_tokens=head,
            weight_slots=slots, ledger=_ledger(blocks, mode, load, footprint, chunk, head, slots),
        )  # fmt: skip
        if plan.tier_bytes("host") <= host_bytes:
            return plan
        if chunk_params is None and chunk > SMALLEST_CHUNK:
            chunk //= 2
        elif head > SMALLEST_HEAD:
            head //= 2
        else:
            return plan


def _chunk_cap(host_bytes: int, blocks: Blocks) -> int:
    """4 Mi parameters at 1 GiB, in proportion, and no larger than the largest group needs."""
    cap = min(LARGEST_CHUNK, max(SMALLEST_CHUNK, host_bytes // 256))
    largest = max(group.numel for group in blocks.groups)
    size = SMALLEST_CHUNK
    while size * 2 <= cap and size < largest:
        size *= 2
    return size


def _head_tokens(load: Load | None) -> int:
    if load is None or not load.vocabulary:
        return 256
    wanted = HEAD_BYTES // (LOGIT_COPIES * 4 * load.vocabulary)
    return max(SMALLEST_HEAD, min(wanted, load.batch * load.seq))


def _ledger(
    blocks: Blocks, mode: Mode, load: Load | None, footprint: Footprint | None, chunk: int,
    head: int, slots: int,
) -> tuple[LedgerEntry, ...]:  # fmt: skip
    moving = [group for group in blocks.groups if group.key != RESIDENT]
    largest = max((group.numel for group in moving), default=0)
    resident = sum(group.numel for group in blocks.groups if group.key == RESIDENT)
    uses: dict[str, int] = {}
    for site in blocks.sites:
        for key in site.groups:
            uses[key] = uses.get(key, 0) + 1
    tied = sum(group.numel for group in moving if uses.get(group.key, 0) > 1)
    biggest_chunk = min(chunk, max(group.numel for group in blocks.groups))
    entries: dict[str, int] = {
        f"weights, {slots} slots": slots * largest * mode.weight_bytes,
        "optimizer state": biggest_chunk * mode.state_bytes,
        "resident weights": resident * (2 * mode.weight_bytes + 4),
        "tied gradients": tied * 4,
    }
    if load is not None and footprint is not None:
        entries |= _compute_entries(blocks, mode, load, footprint, head)
    host = tuple(LedgerEntry("host", owner, count) for owner, count in entries.items() if count)
    total = sum(group.numel for group in blocks.groups)
    ssd = LedgerEntry(
        "ssd", "weights and state, 2 slots", 2 * total * (mode.weight_bytes + mode.state_bytes)
    )
    return (*host, ssd)


def _compute_entries(
    blocks: Blocks, mode: Mode, load: Load, footprint: Footprint, head: int
) -> Mapping[str, int]:
    sites = dict(footprint.sites)
    stream = load.batch * load.seq * load.hidden * mode.weight_bytes
    head_work = 0
    if load.head_group is not None and load.vocabulary:
        weight = blocks.by_key[load.head_group].numel
        slices = -(-load.batch * load.seq // head)
        wide = 4 if slices > 1 else mode.weight_bytes
        head_work = weight * (wide + (mode.weight_bytes if slices > 1 else 0))
        head_work += head * (load.vocabulary * 4 * LOGIT_COPIES + load.hidden * 8) + 2 * stream
    work = max((site.peak_bytes for site in sites.values()), default=0)
    return {
        "block inputs": sum(site.input_bytes for site in sites.values()),
        "hidden state and its gradient": 3 * stream,
        "work of one block or the head": max(work, head_work),
    }


def _refusal(plan: Plan, host_bytes: int, load: Load | None) -> str:
    needed = plan.tier_bytes("host")
    rows = sorted((e for e in plan.ledger if e.tier == "host"), key=lambda e: -e.bytes)
    largest = ", ".join(f"{e.owner} {format_bytes(e.bytes)}" for e in rows[:3])
    moves = f"raise --host to {format_bytes(needed)}"
    if load is not None and load.batch > 1:
        moves += f", or lower --batch (now {load.batch}) or --seq (now {load.seq})"
    return (
        f"host budget too small: the run needs {format_bytes(needed)}, --host allows "
        f"{format_bytes(host_bytes)} (largest: {largest}); {moves}"
    )
