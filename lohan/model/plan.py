"""What the planner decides and the executor follows; what a batch asks of memory; plan options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lohan.config import Config
from lohan.errors import ConfigError
from lohan.model.shapes import BlockShape
from lohan.optim import DEFAULT_KIND, StateKind
from lohan.util.files import from_json, json_key, json_object, load_json
from lohan.util.units import AUTO, EVERY_STEP, Interval, format_bytes, parse_interval

# -- What the planner decides and the executor follows: frozen, printable, to JSON and back --------


CACHED_WEIGHTS, CACHED_STATE = "cached weights", "cached optimizer state"  # owners of host memory


@dataclass(frozen=True)
class LedgerEntry:
    """Bytes of one owner in one tier."""

    tier: str
    owner: str
    bytes: int


# Which blocks keep a class of activations: so many of them, spread evenly, or exactly these.
Which = int | tuple[int, ...]
Kept = tuple[tuple[str, Which], ...]


MOST_CLIPPED = 0.25  # on an unknown machine
# In files of earlier versions: there `pinned` was not page-locked.
OLD_KEYS = {"pinned_weights": "host_cached_weights", "pinned_state": "host_cached_state"}


@dataclass(frozen=True, kw_only=True)
class Plan:
    dtype: str = field(metadata=json_key("mode"))  # fp32 | bf16 | fp16
    micro_batch: int | None  # None: the whole batch at once
    tiles: int = 0  # tokens at a time in position-wise parts of a block; 0: all
    chunk_params: int
    head_tokens: int
    weight_slots: int
    window: int = 1  # blocks whose weights are read ahead
    ring: int = 3  # state chunks in host memory at a time
    grad_groups: int = 1  # blocks whose gradients may wait for their update
    overlap: bool = True
    # When updates run: serial | naive | optimized | balanced.
    update_mode: str = field(default="optimized", metadata=json_key("grad_offload"))
    clip: float = 0.0  # largest norm of gradients; 0: no clipping
    clip_by: str = "global"  # norm of all gradients | block: of each group
    grad_dtype: str = "fp32"  # in which sums of slices wait for their update: bf16 rounds them
    deferred: tuple[str, ...] = ()  # groups that `balanced` updates in the next forward
    # Groups whose held gradients wait on SSD.
    spilled_gradients: tuple[str, ...] = field(default=(), metadata=json_key("spilled"))
    host_cached_weights: tuple[str, ...] = ()  # groups whose weights stay in host memory
    host_cached_state: tuple[tuple[str, int], ...] = ()  # (group, chunk) whose state does
    kept: Kept = ()  # saved activations, by class
    # Sites whose kept activations go to SSD, and room there for each of them.
    spilled_sites: tuple[str, ...] = field(default=(), metadata=json_key("moved_out"))
    spilled_site_bytes: tuple[int, ...] = field(default=(), metadata=json_key("moved_bytes"))
    act_buffers: int = 2  # of the largest such site, in host memory
    staying: tuple[str, ...] = ()  # sites whose activations stay on the device until backward
    device_slots: int = 0  # weight slots on the device; 0: compute works in host memory
    device_grads: int = 2  # groups whose gradients are on the device at a time
    head_alone: bool = False  # those of the first group of backward leave before others are made
    # Groups whose updates, where they wait, are made twice: for weights, then to be written.
    updated_twice: tuple[str, ...] = field(default=(), metadata=json_key("made_again"))
    # The training loop can run a clipped step once more.
    can_rerun: bool = field(default=False, metadata=json_key("run_again"))
    most_clipped: float = MOST_CLIPPED  # speculation is off above this clip rate of the last steps
    commit: Interval = EVERY_STEP  # between two commits
    kind: StateKind = DEFAULT_KIND
    world: int = 1  # ranks that share the state; what the plan says is of each of them
    ledger: tuple[LedgerEntry, ...] = ()

    @property
    def needs_all_gradients(self) -> bool:
        """An update counts only when all gradients are known, or backward has ended. It may run
        earlier where the plan `may_speculate`."""
        return self.clip > self.block_clip or self.dtype == "fp16" or self.update_mode == "serial"

    @property
    def block_clip(self) -> float:
        """Largest norm of the gradients of each group; 0: groups are not clipped one by one."""
        return self.clip if self.clip_by == "block" else 0.0

    @property
    def needs_norm(self) -> bool:
        """Of all gradients, or of each group's."""
        return self.needs_all_gradients or self.block_clip > 0

    def may_speculate(self, *, two_generations: bool) -> bool:
        """Updates run in backward as if no step were clipped, and are rolled back if it is, with
        the gradients, where those are all in memory, or by running the step again.
        `two_generations`: there is a committed one to go back to. It is that of the step before if
        every step is committed; otherwise updates wait."""
        every_step = self.updates_in_next_forward and not self.commits_by_interval
        return every_step and two_generations and (self.can_rerun or not self.spilled_gradients)

    @property
    def updates_in_next_forward(self) -> bool:
        """All updates run in the next forward, unless they are made by speculation."""
        return self.needs_all_gradients and self.overlap and self.update_mode != "serial"

    def always_waits(self, *, two_generations: bool, every_clipped: bool = False) -> bool:
        """All updates of every step run in the next forward: between two commits, or if every step
        is clipped."""
        return (
            self.updates_in_next_forward
            and two_generations
            and (self.commits_by_interval or every_clipped)
        )

    @property
    def commits_by_interval(self) -> bool:
        """Not every step is committed."""
        return self.commit != EVERY_STEP

    @property
    def kept_counts(self) -> dict[str, int]:
        """How many blocks keep each class."""
        return {name: w if isinstance(w, int) else len(w) for name, w in self.kept}

    def tier_bytes(self, tier: str) -> int:
        return sum(entry.bytes for entry in self.ledger if entry.tier == tier)

    def owner_bytes(self, *owners: str) -> int:
        return sum(entry.bytes for entry in self.ledger if entry.owner in owners)

    def to_json(self) -> dict[str, Any]:
        return json_object(self)

    @classmethod
    def from_json(cls, data: object) -> Plan:
        if isinstance(data, dict):
            data = {OLD_KEYS.get(key, key): value for key, value in data.items()}
        return from_json(cls, data)

    def describe(
        self, *, host_bytes: int | None = None, device_bytes: int | None = None
    ) -> list[str]:
        """The ledger as a table: per tier the owners, their bytes and share of the budget, and the
        total against it."""
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
    """The policy, or what is kept by the plan file that it names."""
    if not asked.endswith(".json"):
        return asked
    try:
        data = load_json(Path(asked))  # a plan itself, or what `lohan plan --json` prints
        whole = isinstance(data, dict) and "plan" in data
        return Plan.from_json(data["plan"] if whole else data).kept
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"[train] activations: {asked} is not a plan ({error}); `lohan plan --json` writes one"
        ) from None


# -- What a batch asks of memory: the nouns that `footprint` measures and the planner spends -------


@dataclass
class SiteFootprint:
    """Bytes of one call of a site: what it keeps until backward, its peak in backward beyond that
    (recomputation, gradients of inputs and weights), its peak in forward, and those of its inputs
    that take a gradient: where the device has a memory of its own, these leave it meanwhile."""

    input_bytes: int
    peak_bytes: int
    forward_bytes: int = 0
    offload_bytes: int = 0


@dataclass
class Footprint:
    sites: dict[str, SiteFootprint] = field(default_factory=dict)
    no_backward: set[str] = field(default_factory=set)  # sites that no gradient comes to
    outside: int = 0  # bytes held between the sites when the last of them begins

    @property
    def input_bytes(self) -> int:
        return sum(site.input_bytes for site in self.sites.values())

    @property
    def peak_bytes(self) -> int:
        return max((site.peak_bytes for site in self.sites.values()), default=0)


@dataclass(frozen=True)
class BatchWorkload:
    """What one batch asks for: its shape and the footprint of each micro-batch size."""

    batch: int
    seq: int
    measure: Callable[[int], Footprint]  # micro-batch -> footprint
    hidden: int = 0
    vocabulary: int = 0  # 0: the head is an ordinary site
    head_group: str | None = None
    text: bool = True  # `seq` is what --seq says, not the size of images or latents
    shapes: Mapping[str, BlockShape] = field(default_factory=dict)  # by site; what keeping saves
    tiles: int = 0  # tokens of the tiles that blocks run in, as in Plan
    tiled: Callable[[int], BatchWorkload] | None = None  # the same batch in other tiles
    # Bytes that a site keeps of these classes, where that is less than their sum.
    stored: Callable[[str, frozenset[str]], int] | None = None
    # What planning found out about it, for the next plan of the same batch.
    known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def in_tiles(self, tokens: int) -> BatchWorkload:
        """The same batch, if blocks run in such tiles."""
        if tokens == self.tiles or self.tiled is None:
            return self
        key = "tiles", tokens
        if key not in self.known:
            self.known[key] = self.tiled(tokens)
        made: BatchWorkload = self.known[key]
        return made

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    @property
    def head_flops(self) -> float:
        """Of the head's forward, for the whole batch."""
        return 2.0 * self.hidden * self.vocabulary * self.tokens


# -- What a plan is to be made for, besides the model and the machine ------------------------------


def commit_interval(durability: str, commit_every: str | int) -> Interval | None:
    """From one commit to the next, as the user says; None: as often as costs little."""
    wanted = parse_interval(commit_every, name="commit_every")
    if durability == "step":
        return wanted
    if wanted not in (None, EVERY_STEP):
        raise ConfigError(
            f'commit_every = "{commit_every}" needs a second copy of the state to write to, which '
            f"durability = {durability!r} has not: it commits with each snapshot; use durability = "
            f'"step", or leave commit_every at "{AUTO}"'
        )
    return EVERY_STEP


GRAD_DTYPES = ("fp32", "bf16")
MINIMISE = ("time", "writes", "cost")  # of a step; cost: of the machine's time and of its drives


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What the user has decided."""

    dtype: str
    micro_batch: int | None = None
    tiles: int | str = "auto"  # tokens of a tile; auto: where it does not fit without, or is faster
    overlap: bool = True
    update_mode: str = "balanced"
    clip: float = 0.0
    clip_by: str = "global"
    grad_dtype: str = "fp32"  # one of GRAD_DTYPES
    chunk_params: int | None = None  # a store's chunks are fixed when it is made
    head_tokens: int | None = None  # slices of the head, where a run must not change them
    # Whether the store has room for held gradients. None: it is yet to be made, with what it takes.
    gradients_on_ssd: bool | None = None
    can_rerun: bool = False  # the training loop can run a clipped step once more
    every_clipped: bool = False  # every step is expected to be clipped, as the run itself has seen
    spill_all: bool = False  # no held gradient stays in memory, though there may be room
    cache_groups: bool = False  # whole groups stay in memory first, not all weights and then state
    durability: str = "step"
    commit: Interval | None = EVERY_STEP  # None: as often as costs little
    minimise: str = "time"  # one of MINIMISE
    activations: str | Kept = "holistic"  # one of ACTIVATIONS, or exactly these
    kind: StateKind = DEFAULT_KIND
    world: int = 1  # ranks; the blocks to plan for are then one rank's shards
    # Of the device's memory, by owner, apart from what blocks and schedule take.
    device_overhead: tuple[tuple[str, int], ...] = ()

    @property
    def two_generations(self) -> bool:
        """A store with them has a committed one to go back to."""
        return self.durability == "step"

    def fixed_by(self, plan: Plan) -> PlanOptions:
        """For another plan of the same run: with the slices and chunks that it must keep."""
        return replace(
            self, micro_batch=plan.micro_batch, tiles=plan.tiles or "off",
            head_tokens=plan.head_tokens, chunk_params=plan.chunk_params,
        )  # fmt: skip

    def __post_init__(self) -> None:
        if self.grad_dtype == "fp32":
            return
        if self.grad_dtype not in GRAD_DTYPES:
            raise ConfigError(f"grad_dtype: {self.grad_dtype!r}; choose {', '.join(GRAD_DTYPES)}")
        if self.dtype != "bf16" or self.world > 1:
            ranks = f"{self.world} ranks sum them in fp32"
            why = ranks if self.world > 1 else f"dtype {self.dtype}"
            raise ConfigError(
                f"grad_dtype: {self.grad_dtype} is for gradients of bf16 weights on one rank, and "
                f"this run has {why}; leave it out"
            )


def options_of(
    config: Config, *, dtype: str, minimise: str = "time", world: int = 1
) -> PlanOptions:
    """Those of a run with these settings."""
    train, budget = config.train, config.budget
    return PlanOptions(
        dtype=dtype, micro_batch=train.micro_batch, tiles=train.tiles, overlap=train.overlap,
        update_mode=train.update_mode, activations=activation_policy_of(train.activations),
        clip=train.clip, clip_by=train.clip_by, grad_dtype=train.grad_dtype, kind=train.kind,
        durability=budget.durability, minimise=minimise, world=world, can_rerun=True,
        commit=commit_interval(budget.durability, budget.commit_every),
    )  # fmt: skip
