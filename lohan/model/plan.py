"""The plan of a run: the planner makes it, and the executor follows it.

A plan can be converted to JSON and back.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from lohan.optim import DEFAULT_KIND, StateKind
from lohan.util.files import from_json
from lohan.util.units import EVERY_STEP, Interval, format_bytes

# Owners in the ledger that other modules look up.
LOG = "log of gradients"  # an owner in the ledger of the drives
CACHED_WEIGHTS, CACHED_STATE = "cached weights", "cached optimizer state"


@dataclass(frozen=True)
class LedgerEntry:
    """The number of bytes that one owner uses in one tier."""

    tier: str
    owner: str
    bytes: int


# The blocks that keep a class of activations: a number of blocks, spread evenly, or an explicit
# list of indices.
Which = int | tuple[int, ...]
Kept = tuple[tuple[str, Which], ...]


MOST_CLIPPED = 0.25  # Default of `Plan.most_clipped`, for a machine that was not measured.


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The user's decisions that a plan takes over as they are.

    Every setting of the user that the engine reads from the plan is declared here, once.
    """

    dtype: str  # fp32 | bf16 | fp16
    overlap: bool = True
    # When updates run: serial | naive | optimized | balanced.
    update_mode: str = "balanced"
    clip: float = 0.0  # Largest norm of the gradients. 0: no clipping.
    can_rerun: bool = False  # True if the training loop can rerun a clipped step.
    kind: StateKind = DEFAULT_KIND
    # Steps from one write of the full state to the next, if every step appends its gradients to a
    # log; 0 if there is no log. The commit interval is then the same number of steps.
    log_gradients: int = 0
    # Ranks that share the state. All other numbers in a plan are per rank.
    world: int = 1

    def taken_over(self) -> dict[str, Any]:
        """Return these decisions by name, as keyword arguments for a plan that takes them over."""
        return {field.name: getattr(self, field.name) for field in fields(RunOptions)}


@dataclass(frozen=True, kw_only=True)
class Plan(RunOptions):
    """A plan: the options that it takes over, and the decisions of the planner."""

    micro_batch: int | None  # None: the whole batch at once.
    tiles: int = 0  # Tokens per tile in the position-wise parts of a block. 0: no tiles.
    chunk_params: int
    head_tokens: int
    weight_slots: int
    window: int = 1  # Blocks whose weights are read ahead.
    ring: int = 3  # State chunks in host memory at a time.
    grad_groups: int = 1  # Blocks whose gradients may wait for their update.
    deferred: tuple[str, ...] = ()  # Groups that `balanced` updates in the next forward.
    # Groups whose held gradients are stored on SSD until their update.
    spilled_gradients: tuple[str, ...] = ()
    host_cached_weights: tuple[str, ...] = ()  # Groups whose weights stay in host memory.
    # (group, chunk) whose state stays in host memory.
    host_cached_state: tuple[tuple[str, int], ...] = ()
    kept: Kept = ()  # Activations that are kept until backward, by class.
    # Sites whose kept activations are written to SSD, and the bytes reserved there for each of
    # them.
    spilled_sites: tuple[str, ...] = ()
    spilled_site_bytes: tuple[int, ...] = ()
    act_buffers: int = 2  # Host buffers, each for the kept activations of the largest such site.
    # Sites whose activations stay on the device until backward.
    staying: tuple[str, ...] = ()
    device_slots: int = 0  # Weight slots on the device. 0: compute uses host memory.
    device_grads: int = 2  # Groups whose gradients are on the device at a time.
    # The gradients of the first group in backward leave the device before others are computed.
    head_alone: bool = False
    # Speculation is off if more than this fraction of the last steps was clipped.
    most_clipped: float = MOST_CLIPPED
    commit: Interval = EVERY_STEP  # The interval between two commits.
    ledger: tuple[LedgerEntry, ...] = ()

    @property
    def kept_counts(self) -> dict[str, int]:
        """The number of blocks that keep each class of activations."""
        return {name: w if isinstance(w, int) else len(w) for name, w in self.kept}

    def tier_bytes(self, tier: str) -> int:
        return sum(entry.bytes for entry in self.ledger if entry.tier == tier)

    def owner_bytes(self, *owners: str) -> int:
        return sum(entry.bytes for entry in self.ledger if entry.owner in owners)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> Plan:
        return from_json(cls, data)

    def describe(
        self, *, host_bytes: int | None = None, device_bytes: int | None = None
    ) -> list[str]:
        """Return the ledger as a table.

        Each tier has one line per owner, with its bytes and share of the budget, and a total.
        """
        budgets = {"host": host_bytes, "device": device_bytes}
        lines: list[str] = []
        for tier in dict.fromkeys(entry.tier for entry in self.ledger):
            budget, total = budgets.get(tier), self.tier_bytes(tier)
            lines += [
                _row(tier, entry.owner, entry.bytes, budget)
                for entry in self.ledger
                if entry.tier == tier
            ]
            limit = f"  of {format_bytes(budget)}" if budget else ""
            lines.append(_row(tier, "total", total, budget) + limit)
        return lines


def _row(tier: str, owner: str, count: int, budget: int | None) -> str:
    share = f"{100 * count / budget:6.1f} %" if budget else ""
    return f"{tier:6}  {owner:30} {format_bytes(count):>11} {share}".rstrip()
