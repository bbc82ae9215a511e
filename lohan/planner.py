"""From blocks, footprint and budget to a plan, or to a message that says what would fit.

Host memory goes first to what a step cannot do without, at the smallest sizes; then to overlap
(prefetch, gradients that may wait, state buffers, larger chunks); what is still left keeps weights
and then optimizer state in memory instead of on SSD: weights first, since every byte of them saves
two reads a step. The state is used in a fixed cyclic order, so a fixed share is kept; the least
recently used would always be the next needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lohan.blocks import RESIDENT, Blocks, Group
from lohan.errors import BudgetError
from lohan.footprint import Footprint
from lohan.plan import LedgerEntry, Plan
from lohan.state import FLOAT, HALF, MODES, chunks
from lohan.units import MiB, format_bytes

SMALLEST_CHUNK, LARGEST_CHUNK = 2**17, 2**26  # parameters
SMALLEST_HEAD = 16  # tokens
HEAD_BYTES = 128 * MiB  # logits of one slice, when the budget allows
LOGIT_COPIES = 4  # logits, their fp32 copy, log-softmax, gradient
SPARE_SHARE = 0.03  # of the budget, left to the allocator's rounding
MOST_DEFERRED = 0.25  # of the parameters, with `balanced`


@dataclass(frozen=True)
class Load:
    """What one batch asks for: its shape and the footprint of each micro-batch size."""

    batch: int
    seq: int
    measure: Callable[[int], Footprint]  # micro-batch -> footprint
    hidden: int = 0
    vocabulary: int = 0  # 0: the head is an ordinary site
    head_group: str | None = None


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the user has decided."""

    mode: str
    micro_batch: int | None = None
    overlap: bool = True
    grad_offload: str = "balanced"
    clip: float = 0.0
    chunk_params: int | None = None  # a store's chunks are fixed when it is made
    gradients_on_ssd: bool = True  # the store has room for held gradients
    durability: str = "step"


def make_plan(blocks: Blocks, wishes: Wishes, *, host_bytes: int, load: Load | None = None) -> Plan:
    """The plan that uses `host_bytes` best, or a BudgetError with the numbers."""
    if load is None or wishes.micro_batch is not None:
        candidates: list[int | None] = [wishes.micro_batch]
    else:
        candidates = [m for i in range(12) if (m := -(-load.batch // 2**i)) > 1] + [1]
    refused: Plan | None = None
    for micro_batch in dict.fromkeys(candidates):
        sizer = _Sizer(blocks, wishes, load, micro_batch)
        plan = sizer.smallest(host_bytes)
        if plan.tier_bytes("host") <= host_bytes:
            return sizer.grown(plan, int(host_bytes * (1 - SPARE_SHARE)))
        refused = plan
    assert refused is not None
    raise BudgetError(_refusal(refused, host_bytes, load))


class _Sizer:
    """Plans of one micro-batch size, from the smallest upwards."""

    def __init__(
        self, blocks: Blocks, wishes: Wishes, load: Load | None, micro_batch: int | None
    ) -> None:
        self.blocks, self.wishes, self.load = blocks, wishes, load
        self.mode = MODES[wishes.mode]
        self.micro_batch = micro_batch
        self.footprint = None if load is None else load.measure(micro_batch or load.batch)
        self.moving = [group for group in blocks.groups if group.key != RESIDENT]

    def smallest(self, host_bytes: int) -> Plan:
        """One block at a time and small buffers; the head slice as large as it may be."""
        wishes = self.wishes
        widest = max((len(site.groups) for site in self.blocks.sites), default=1)
        plan = Plan(
            mode=wishes.mode, micro_batch=self.micro_batch, overlap=wishes.overlap,
            grad_offload=wishes.grad_offload, clip=wishes.clip,
            chunk_params=wishes.chunk_params or self._first_chunk(host_bytes),
            head_tokens=_head_tokens(self.load), weight_slots=widest, window=0, ring=1,
            grad_groups=1,
        )  # fmt: skip
        if plan.holds_all:
            plan = replace(plan, spilled=tuple(group.key for group in self.moving))
            if not wishes.gradients_on_ssd:
                plan = replace(plan, spilled=())
        plan = self._with_ledger(plan)
        while plan.tier_bytes("host") > host_bytes:
            if wishes.chunk_params is None and plan.chunk_params > SMALLEST_CHUNK:
                plan = self._with_ledger(replace(plan, chunk_params=plan.chunk_params // 2))
            elif plan.head_tokens > SMALLEST_HEAD:
                plan = self._with_ledger(replace(plan, head_tokens=plan.head_tokens // 2))
            else:
                break
        return plan

    def grown(self, plan: Plan, limit: int) -> Plan:
        """Spends what is left, in the order of what it is worth."""
        if plan.overlap:
            for change in (
                {"ring": 2}, {"weight_slots": plan.weight_slots + 1, "window": 1}, {"ring": 3},
                {"weight_slots": plan.weight_slots + 2, "window": 1}, {"grad_groups": 2},
                {"ring": 4}, {"weight_slots": plan.weight_slots + 3, "window": 2},
            ):  # fmt: skip
                plan = self._if_fits(plan, limit, **change)
        if plan.holds_all:
            plan = self._unspill(plan, limit)
        elif plan.grad_offload == "balanced" and plan.overlap:
            plan = self._defer(plan, limit)
        plan = self._pin_weights(plan, limit)
        return self._pin_state(plan, limit)

    def _if_fits(self, plan: Plan, limit: int, **change: object) -> Plan:
        grown = self._with_ledger(replace(plan, **change))  # type: ignore[arg-type]
        return grown if grown.tier_bytes("host") <= limit else plan

    def _unspill(self, plan: Plan, limit: int) -> Plan:
        """Held gradients stay in memory, the first blocks' first: they are held for the least
        time and needed the soonest."""
        spilled = list(plan.spilled)
        for group in self.moving:
            if group.key in spilled:
                left = tuple(key for key in spilled if key != group.key)
                grown = self._if_fits(plan, limit, spilled=left)
                if grown is plan:
                    break
                plan, spilled = grown, list(left)
        return plan

    def _defer(self, plan: Plan, limit: int) -> Plan:
        """The last blocks' updates wait for the next forward, which reaches them last."""
        allowed = MOST_DEFERRED * sum(group.numel for group in self.moving)
        deferred: list[str] = []
        for group in reversed(self.moving):
            allowed -= group.numel
            if allowed < 0:
                break
            grown = self._if_fits(plan, limit, deferred=(*deferred, group.key))
            if grown is plan:
                break
            plan = grown
            deferred.append(group.key)
        return plan

    def _pin_weights(self, plan: Plan, limit: int) -> Plan:
        pinned: list[str] = []
        for group in self._by_size():
            grown = self._if_fits(plan, limit, pinned_weights=(*pinned, group.key))
            if grown is not plan:
                plan = grown
                pinned.append(group.key)
        return plan

    def _pin_state(self, plan: Plan, limit: int) -> Plan:
        left = limit - plan.tier_bytes("host")
        pinned: list[tuple[str, int]] = []
        for group in self.blocks.groups:
            for chunk in chunks(group, plan.chunk_params):
                size = (chunk.stop - chunk.start) * self.mode.state_bytes
                if size <= left:
                    left -= size
                    pinned.append((group.key, chunk.index))
        return self._with_ledger(replace(plan, pinned_state=tuple(pinned)))

    def _by_size(self) -> list[Group]:
        return sorted(self.moving, key=lambda group: -group.numel)

    def _first_chunk(self, host_bytes: int) -> int:
        """4 Mi parameters at 1 GiB, in proportion, and no larger than the largest group needs."""
        cap = min(LARGEST_CHUNK, max(SMALLEST_CHUNK, host_bytes // 256))
        largest = max(group.numel for group in self.blocks.groups)
        size = SMALLEST_CHUNK
        while size * 2 <= cap and size < largest:
            size *= 2
        return min(size, largest)

    # -- the ledger -------------------------------------------------------------------------------

    def _with_ledger(self, plan: Plan) -> Plan:
        host = {**self._state_entries(plan), **self._compute_entries(plan)}
        entries = [LedgerEntry("host", owner, count) for owner, count in host.items() if count]
        total = sum(group.numel for group in self.blocks.groups)
        slots = 2 if self.wishes.durability == "step" else 1
        per_parameter = self.mode.weight_bytes + self.mode.state_bytes
        entries.append(
            LedgerEntry("ssd", f"weights and state x{slots}", slots * total * per_parameter)
        )
        if plan.holds_all and self.wishes.gradients_on_ssd:
            entries.append(LedgerEntry("ssd", "held gradients", total * FLOAT))
        return replace(plan, ledger=tuple(entries))

    def _state_entries(self, plan: Plan) -> dict[str, int]:
        mode, by_key = self.mode, self.blocks.by_key
        pinned = set(plan.pinned_weights)
        largest = max((g.numel for g in self.moving if g.key not in pinned), default=0)
        biggest = max(group.numel for group in self.blocks.groups)
        chunk = min(plan.chunk_params, biggest)
        resident = by_key[RESIDENT].numel if RESIDENT in by_key else 0
        state = sum(
            (cut.stop - cut.start) * mode.state_bytes
            for key, index in plan.pinned_state
            for cut in (chunks(by_key[key], plan.chunk_params)[index],)
        )
        return {
            "weight slots": plan.weight_slots * largest * mode.weight_bytes,
            "optimizer state ring": plan.ring * chunk * mode.state_bytes,
            "gradient staging": plan.ring * chunk * FLOAT if plan.spilled else 0,
            "resident parameters": resident * (mode.weight_bytes + FLOAT),
            "waiting gradients": self._gradient_bytes(plan),
            "pinned weights": mode.weight_bytes
            * (resident + sum(by_key[key].numel for key in pinned)),
            "pinned optimizer state": state,
        }

    def _gradient_bytes(self, plan: Plan) -> int:
        """Gradients that outlive their block's backward: of tied weights, of blocks whose update
        is under way, and those that are held."""
        width = FLOAT if self._several_slices() or self.mode.name == "fp32" else HALF
        uses: dict[str, int] = {}
        for site in self.blocks.sites:
            for key in site.groups:
                uses[key] = uses.get(key, 0) + 1
        held = set(plan.deferred)
        if plan.holds_all:
            held = {group.key for group in self.moving} - set(plan.spilled)
        passing = sorted((g.numel for g in self.moving if g.key not in held), reverse=True)
        tied = sum(g.numel for g in self.moving if uses.get(g.key, 0) > 1 and g.key not in held)
        kept = sum(group.numel for group in self.moving if group.key in held)
        return width * (kept + sum(passing[: plan.grad_groups])) + FLOAT * tied

    def _several_slices(self) -> bool:
        return self.load is not None and (self.micro_batch or self.load.batch) < self.load.batch

    def _compute_entries(self, plan: Plan) -> dict[str, int]:
        load, footprint = self.load, self.footprint
        if load is None or footprint is None:
            return {}
        stream = load.batch * load.seq * load.hidden * self.mode.weight_bytes
        work = max(footprint.peak_bytes, self._head_work(plan, load, stream))
        return {
            "block inputs": footprint.input_bytes,
            "hidden state and its gradient": 3 * stream,
            "work of one block or the head": work,
        }

    def _head_work(self, plan: Plan, load: Load, stream: int) -> int:
        if load.head_group is None or not load.vocabulary:
            return 0
        weight = self.blocks.by_key[load.head_group].numel
        slices = -(-load.batch * load.seq // plan.head_tokens)
        grads = weight * (FLOAT + self.mode.weight_bytes if slices > 1 else self.mode.weight_bytes)
        per_token = load.vocabulary * FLOAT * LOGIT_COPIES + load.hidden * 2 * FLOAT
        return grads + plan.head_tokens * per_token + 2 * stream


def _head_tokens(load: Load | None) -> int:
    if load is None or not load.vocabulary:
        return 256
    wanted = HEAD_BYTES // (LOGIT_COPIES * FLOAT * load.vocabulary)
    return max(SMALLEST_HEAD, min(wanted, load.batch * load.seq))


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
