"""Plans, the memory footprint of a batch, and the options that a plan is made for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from lohan.config import Config
from lohan.errors import ConfigError
from lohan.model.shapes import BlockShape
from lohan.optim import DEFAULT_KIND, StateKind
from lohan.util.files import from_json, load_json
from lohan.util.units import EVERY_STEP, Interval, format_bytes, parse_interval

# -- The plan: made by the planner, followed by the executor, convertible to and from JSON ---------


# Owners in the host ledger.
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


MOST_CLIPPED = 0.25  # The value for a machine that was not measured.


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The user's decisions that a plan takes over as they are.

    A setting that the engine reads from the plan is declared here, once.
    """

    dtype: str  # fp32 | bf16 | fp16
    overlap: bool = True
    # When updates run: serial | naive | optimized | balanced.
    update_mode: str = "balanced"
    clip: float = 0.0  # Largest norm of the gradients. 0: no clipping.
    can_rerun: bool = False  # True if the training loop can rerun a clipped step.
    kind: StateKind = DEFAULT_KIND
    # Ranks that share the state. All other numbers in a plan are per rank.
    world: int = 1

    def taken_over(self) -> dict[str, Any]:
        """Return these decisions by name, to make a plan that takes them over."""
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
    act_buffers: int = 2  # Host buffers, each large enough for the largest such site.
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


def activation_policy_of(asked: str) -> str | Kept:
    """Return the policy, or the kept activations of the plan file that it names."""
    if not asked.endswith(".json"):
        return asked
    try:
        # The file holds a plan, or the output of `lohan plan --json`.
        data = load_json(Path(asked))
        whole = isinstance(data, dict) and "plan" in data
        return Plan.from_json(data["plan"] if whole else data).kept
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"[train] activations: {asked} is not a plan ({error}); `lohan plan --json` writes one"
        ) from None


# -- The memory footprint of a batch: measured by `footprint`, used by the planner -----------------


@dataclass
class SiteFootprint:
    """The memory, in bytes, of one call of a site.

    * `input_bytes` are kept until backward.
    * `peak_bytes` is the additional peak in backward: recomputation, and gradients of inputs and
      weights.
    * `forward_bytes` is the peak in forward.
    * `offload_bytes` are the inputs that take a gradient. If the device has a memory of its own,
      they are moved to the host between forward and backward.
    """

    input_bytes: int
    peak_bytes: int
    forward_bytes: int = 0
    offload_bytes: int = 0


@dataclass
class Footprint:
    sites: dict[str, SiteFootprint] = field(default_factory=dict)
    no_backward: set[str] = field(default_factory=set)  # Sites that no gradient reaches.
    outside: int = 0  # Bytes held outside the sites when the last of them begins.
    # The largest first dimension of a block's call that can run in slices.
    rows: int = 0

    @property
    def input_bytes(self) -> int:
        return sum(site.input_bytes for site in self.sites.values())

    @property
    def peak_bytes(self) -> int:
        return max((site.peak_bytes for site in self.sites.values()), default=0)


@dataclass(frozen=True)
class BatchWorkload:
    """The shape of one batch, and its footprint for each micro-batch size."""

    batch: int  # Rows that blocks are called with; micro-batches are slices of these.
    seq: int
    measure: Callable[[int], Footprint]  # Maps a micro-batch size to the footprint.
    # Samples in the batch that the model is called with, if blocks process more rows.
    samples: int = 0
    hidden: int = 0
    vocabulary: int = 0  # 0: the head is an ordinary site.
    head_group: str | None = None
    text: bool = True  # True if `seq` is the value of --seq, not the size of images or latents.
    # The block of each site, with the work that keeping activations saves.
    shapes: Mapping[str, BlockShape] = field(default_factory=dict)
    tiles: int = 0  # Tokens per tile, as in Plan.
    # Returns the same batch for another tile size.
    tiled: Callable[[int], BatchWorkload] | None = None
    # Returns the bytes that a site keeps for a set of classes, if that is less than the sum over
    # the classes.
    stored: Callable[[str, frozenset[str]], int] | None = None
    # Cache of planning results, reused by later plans of the same batch.
    known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def in_tiles(self, tokens: int) -> BatchWorkload:
        """Return the same batch with blocks that run in tiles of `tokens` tokens."""
        if tokens == self.tiles or self.tiled is None:
            return self
        key = "tiles", tokens
        if key not in self.known:
            self.known[key] = self.tiled(tokens)
        tiled: BatchWorkload = self.known[key]
        return tiled

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    @property
    def head_flops(self) -> float:
        """The FLOPs of the head's forward for the whole batch."""
        return 2.0 * self.hidden * self.vocabulary * self.tokens


# -- The options of a plan, besides the model and the machine --------------------------------------


# Properties of a step that a plan can minimise; cost includes the machine's time and drive wear.
MINIMISE = ("time", "writes", "cost")


@dataclass(frozen=True, kw_only=True)
class PlanOptions(RunOptions):
    """The decisions of the user that a plan must respect.

    The planner decides what is left open here. The plan then contains its decision.
    """

    micro_batch: int | None = None
    # Tokens per tile, "off" or "auto". "auto" uses tiles if the batch does not fit without them, or
    # if they are faster.
    tiles: int | str = "auto"
    chunk_params: int | None = None  # The chunk size of an existing store, which cannot change.
    head_tokens: int | None = None  # The slice size of the head, if the run must not change it.
    # Whether the store has space for held gradients. None: the store does not exist yet and will be
    # created with the space that the plan needs.
    gradients_on_ssd: bool | None = None
    commit: Interval | None = EVERY_STEP  # None: the planner chooses an interval of low cost.
    minimise: str = "time"  # One of MINIMISE.
    activations: str | Kept = "holistic"  # One of ACTIVATIONS, or an explicit choice.
    # Device memory, by owner, that is used besides the blocks and the schedule.
    device_overhead: tuple[tuple[str, int], ...] = ()

    def fixed_by(self, plan: Plan) -> PlanOptions:
        """Return the options for another plan of the same run.

        Micro-batch, tiles, head slices and chunks are fixed to those of `plan`.
        """
        return replace(
            self,
            micro_batch=plan.micro_batch,
            tiles=plan.tiles or "off",
            head_tokens=plan.head_tokens,
            chunk_params=plan.chunk_params,
        )


def options_of(
    config: Config, *, dtype: str, minimise: str = "time", world: int = 1
) -> PlanOptions:
    """Return the plan options of a run with these settings."""
    train, budget = config.train, config.budget
    return PlanOptions(
        dtype=dtype,
        micro_batch=train.micro_batch,
        tiles=train.tiles,
        overlap=train.overlap,
        update_mode=train.update_mode,
        activations=activation_policy_of(train.activations),
        clip=train.clip,
        kind=train.kind,
        minimise=minimise,
        world=world,
        can_rerun=True,
        commit=parse_interval(budget.commit_every, name="commit_every"),
    )
