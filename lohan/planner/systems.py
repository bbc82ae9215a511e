"""Other systems, and the paper as published: each a short description, run by one simulator."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lohan.errors import ConfigError
from lohan.model.machine import Profile
from lohan.model.plan import LedgerEntry
from lohan.model.shapes import BlockShape, ModelShape
from lohan.planner.activations import (
    HOST_ONLY,
    INPUT_COPIES,
    WIDTH,
    PolicyChoice,
    Step,
    at_most,
    choose_by_policy,
    input_bytes,
)
from lohan.schedule.actions import Action, Op, Schedule, ScheduleSpec
from lohan.schedule.simulate import (
    TOUCHED,
    ActionCosts,
    BytesPerParameter,
    SiteWork,
    StepWork,
    Timeline,
    simulate,
)
from lohan.schedule.steps import ExecutionOrder, steps
from lohan.util.units import format_bytes

# -- The noun: what lives where, what overlaps with what, and what that asks of memory -------------


FP16 = BytesPerParameter(weight=2.0, state=12.0, gradient=2.0)  # state: master, m and v in fp32


@dataclass(frozen=True, kw_only=True)
class MemoryFormula:
    """Bytes that a policy takes in one tier: per parameter of the model, per parameter of its
    largest block, and fixed."""

    per_parameter: float = 0.0
    per_block: float = 0.0
    fixed: float = 0.0

    def bytes(self, parameters: float, block: float) -> float:
        return self.per_parameter * parameters + self.per_block * block + self.fixed


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How one system trains. Tiers are device, host or ssd.

    `host` and `device` are what it takes in memory besides activations and logits; the rest are
    facts about its software, the same on every machine and for every model."""

    name: str
    about: str
    weights: str  # where compute weights wait for their block
    state: str  # where master weights, m and v wait for their update
    gradients: str = "host"  # where gradients wait for it
    inputs: str = "host"  # where block inputs wait for backward
    optimizer: str = "cpu"  # or gpu
    activations: str = "static"  # the activation policy
    update_mode: str = "serial"
    free: bool = False  # both are the user's choice, these are the defaults
    prefetch: int = 1  # blocks whose weights are prefetched; 0: compute waits for them
    ring: int = 3  # tensors of state in flight through host memory; 1: nothing overlaps
    model_parallel: bool = False  # several GPUs share each block, not the batch
    sum_rate: float = 0.0  # bytes/s at which the CPU adds up what several GPUs made; 0: GPUs do it
    whole_recompute: bool = True  # recomputation runs to the block's end
    layout: BytesPerParameter = FP16
    host: MemoryFormula = field(default_factory=MemoryFormula)
    device: MemoryFormula = field(default_factory=MemoryFormula)
    peers: float = 0.0  # device bytes per parameter of a block more, where there are several GPUs
    logit_bytes: float = 0.0  # per token and word of the vocabulary; 0: the head runs in slices
    compute_share: float = 1.0  # of the device's speed that its kernels reach
    touched: float = (
        1.0  # of the passes over activations in device memory: fused kernels need fewer
    )
    stall: float = 0.0  # of the time that activations take over the link, in which compute waits
    op_s: float = 0.0  # software cost of moving one tensor to or from SSD
    io_rate: float = 0.0  # bytes/s that its file access reaches; 0: what the drives give
    largest_tensor: float = 0.0  # bytes in fp32 that it can move as one; 0: any


# -- What a policy asks of every tier, by owner, and whether a machine has it ----------------------


TIERS = ("device", "host", "ssd")
HEAD_TOKENS = 1024  # of one slice, where the head runs in slices


@dataclass(frozen=True)
class Needs:
    """Bytes by tier and owner, and what of them does not fit."""

    ledger: tuple[LedgerEntry, ...]
    reason: str = ""  # empty: it fits

    def peak(self, tier: str) -> int:
        return sum(entry.bytes for entry in self.ledger if entry.tier == tier)

    @property
    def peaks(self) -> dict[str, int]:
        return {tier: self.peak(tier) for tier in TIERS}


def tokens_of(policy: Policy, model: ModelShape, profile: Profile, batch: int, seq: int) -> float:
    """Tokens that one GPU sees."""
    share = 1 if policy.model_parallel else profile.gpus
    return batch * (model.sample_tokens or seq) / share


def room_for_kept(policy: Policy, model: ModelShape, profile: Profile) -> float:
    """Host memory that is left for activations of all GPUs (MEM_avail)."""
    return profile.host_bytes - policy.host.bytes(model.parameters, _block(model))


def twins(policy: Policy, model: ModelShape, profile: Profile, tokens: float) -> float:
    """Bytes of second copies of the block inputs, for all GPUs."""
    copies = INPUT_COPIES.get(policy.activations, 1) - 1
    return profile.gpus * copies * input_bytes(model, tokens)


def holds_on_ssd(policy: Policy, model: ModelShape, profile: Profile, tokens: float) -> bool:
    """Gradients that wait for the end of backward go to SSD: always, or for want of room."""
    if policy.update_mode != "serial" or policy.gradients == "device":
        return False
    if policy.gradients == "ssd":
        return True
    room = room_for_kept(policy, model, profile) - profile.gpus * input_bytes(model, tokens)
    return policy.state == "ssd" and policy.layout.gradient * model.parameters > room


def waiting(policy: Policy, model: ModelShape, profile: Profile, tokens: float) -> float:
    """Bytes of gradients that wait in host memory, where the policy's own demand has not got
    them."""
    held = policy.free and policy.update_mode == "serial"
    if not held or holds_on_ssd(policy, model, profile, tokens):
        return 0.0
    return policy.layout.gradient * model.parameters


def needs(
    policy: Policy, model: ModelShape, profile: Profile, *, batch: int, seq: int,
    kept: float = 0.0, spilled: float = 0.0,
) -> Needs:  # fmt: skip
    """`kept`: bytes that leave each device, beyond which it may choose; `spilled`: what of all
    GPUs' goes on to SSD."""
    tokens = tokens_of(policy, model, profile, batch, seq)
    rows = [
        *_device(policy, model, profile, tokens),
        *_host(policy, model, profile, tokens, kept, spilled),
        *_ssd(policy, model, profile, tokens, spilled),
    ]
    ledger = tuple(LedgerEntry(tier, owner, int(size)) for tier, owner, size in rows if size)
    refusal = _too_large(policy, model)
    if not refusal and (tier := _short_tier(profile, ledger)):
        least = 1 if policy.model_parallel else profile.gpus
        helps = batch > least and not needs(policy, model, profile, batch=least, seq=seq).reason
        lower = f"lower --batch (now {batch}) or " if helps else ""
        refusal = f"{policy.name}: {_shortage(profile, ledger, tier)}; {lower}{MOVES[tier]}"
    return Needs(ledger, refusal)


Row = tuple[str, str, float]


def _block(model: ModelShape) -> int:
    return max(block.parameters for block in model.blocks)


def _device(policy: Policy, model: ModelShape, profile: Profile, tokens: float) -> Iterable[Row]:
    share = profile.gpus if policy.model_parallel else 1
    own = policy.device.bytes(model.parameters, _block(model)) / share
    peers = policy.peers * _block(model) if profile.gpus > 1 else 0.0
    yield "device", "weights, gradients and state", own + peers
    if policy.inputs == "device":
        yield "device", "block inputs", input_bytes(model, tokens) / share
    largest = max(block.elements for block in model.blocks)
    elements = largest * (1 + policy.touched * model.temporaries)
    work = WIDTH * tokens * elements / share
    words = model.vocabulary * (policy.logit_bytes or 12.0)
    head = words * (tokens if policy.logit_bytes else min(tokens, HEAD_TOKENS)) / share
    yield "device", "logits" if head > work else "work of one block", max(work, head)


def _host(
    policy: Policy, model: ModelShape, profile: Profile, tokens: float, kept: float, spilled: float
) -> Iterable[Row]:
    yield "host", "weights, gradients and state", policy.host.bytes(model.parameters, _block(model))
    if policy.inputs != "host":
        return
    held = profile.gpus * max(kept, input_bytes(model, tokens)) - spilled
    yield "host", "kept activations", held + twins(policy, model, profile, tokens)
    yield "host", "waiting gradients", waiting(policy, model, profile, tokens)


def _ssd(
    policy: Policy, model: ModelShape, profile: Profile, tokens: float, spilled: float
) -> Iterable[Row]:
    layout, count = policy.layout, model.parameters
    yield "ssd", "weights", layout.weight * count if policy.weights == "ssd" else 0.0
    yield "ssd", "optimizer state", layout.state * count if policy.state == "ssd" else 0.0
    if holds_on_ssd(policy, model, profile, tokens):
        yield "ssd", "gradients", layout.gradient * count
    yield "ssd", "activations", spilled


def _too_large(policy: Policy, model: ModelShape) -> str:
    largest = 4.0 * max(MATRICES) * _block(model)
    if not policy.largest_tensor or largest < policy.largest_tensor:
        return ""
    return (
        f"{policy.name}: a matrix of {model.name} has {format_bytes(int(largest))} in fp32, and it "
        f"moves less than {format_bytes(int(policy.largest_tensor))} at once; take a smaller model"
    )


MOVES = {"device": "take a GPU with more memory", "host": "raise --host", "ssd": "raise --ssds"}


def _have(profile: Profile, tier: str) -> int:
    ssd = sum(drive.bytes for drive in profile.drives)
    return {"device": profile.device_bytes, "host": profile.host_bytes, "ssd": ssd}[tier]


def _short_tier(profile: Profile, ledger: tuple[LedgerEntry, ...]) -> str | None:
    """The first tier that is too small."""
    needed = {tier: sum(e.bytes for e in ledger if e.tier == tier) for tier in TIERS}
    return next((tier for tier in TIERS if needed[tier] > _have(profile, tier)), None)


def _shortage(profile: Profile, ledger: tuple[LedgerEntry, ...], tier: str) -> str:
    rows = sorted((e for e in ledger if e.tier == tier), key=lambda e: -e.bytes)
    largest = ", ".join(f"{e.owner} {format_bytes(e.bytes)}" for e in rows[:2])
    return (
        f"{tier} memory too small, {format_bytes(sum(e.bytes for e in rows))} needed, "
        f"{format_bytes(_have(profile, tier))} there (largest: {largest})"
    )


# -- The systems that are compared, each in a few lines --------------------------------------------
#
# The numbers are of their software, found once from what the paper publishes of each on one
# machine; docs/paper.md says from what. Rates of hardware are in the machine presets.


GB = 1e9

# Weights of two blocks and gradients of two, in 16 bit.
_TWO_BLOCKS = MemoryFormula(per_block=8.0)
# Logits in 16 bit and in fp32, and a gradient of each.
_LOGITS = 12.0
# Of all passes over a gated block's activations those that are left when norms, rotary embedding,
# the MLP's product and the sums are one kernel each: counted, not fitted.
_FUSED = 0.41

_LOHAN = Policy(
    name="lohan",
    about="the paper as published: everything on SSD, updates while backward runs, activations by"
    " Algorithm 1",
    weights="ssd", state="ssd", inputs="host", activations="holistic", update_mode="optimized",
    free=True, prefetch=2, sum_rate=17 * GB, whole_recompute=False, stall=1 / 3,
    # Host: four blocks of P32, m, v, P16 and G16 (16 each), G32 of four (4 each), weights of four.
    host=MemoryFormula(per_block=88.0, fixed=20 * GB),
    # Weights of two blocks, gradients of one and of the next one's first quarter; CUDA's context.
    device=MemoryFormula(per_block=6.5, fixed=0.5 * GB), peers=2.0, op_s=0.005,
    largest_tensor=2.0**32,
)  # fmt: skip

_SLIDEFORMER = Policy(
    name="slideformer",
    about="states in host memory, block inputs too, all else recomputed by fused kernels; updates"
    " while backward runs",
    weights="host", state="host", inputs="host", update_mode="optimized", prefetch=2,
    whole_recompute=False, touched=_FUSED,
    # Host: P32, m and v; buffers of P16 and gradients that the layers share.
    host=MemoryFormula(per_parameter=13.4), device=_TWO_BLOCKS,
)  # fmt: skip

_ZERO_INFINITY = Policy(
    name="zero-infinity",
    about="states and gradients on SSD, block inputs in host memory, all else recomputed; updates"
    " after backward, one tensor at a time",
    weights="ssd", state="ssd", gradients="ssd", inputs="host", prefetch=0, ring=1,
    # Host: pinned 16-bit weights and gradients, rounded up, and the buffers of its swapper.
    host=MemoryFormula(per_parameter=5.0, fixed=70 * GB), device=_TWO_BLOCKS, logit_bytes=_LOGITS,
    compute_share=0.67, op_s=0.005,
)  # fmt: skip

_ZERO_OFFLOAD = Policy(
    name="zero-offload",
    about="states in host memory, block inputs on the device, all else recomputed; updates after"
    " backward",
    weights="host",
    state="host",
    inputs="device",
    # Host: P32, m, v and G32 (16), P16 and G16 (4), pinned buffers rounded up.
    host=MemoryFormula(per_parameter=21.6),
    device=_TWO_BLOCKS,
    logit_bytes=_LOGITS,
    compute_share=0.67,
)

_COLOSSAL_AI = Policy(
    name="colossal-ai",
    about="weights in chunks in host memory, optimizer state in one file on SSD, read and written"
    " by one thread after backward",
    weights="host", state="ssd", inputs="device", ring=1,
    host=MemoryFormula(per_parameter=8.0, fixed=10 * GB),
    # Two chunks of weights, gradients and their fp32 copies with state: 16 each, and padding.
    device=MemoryFormula(per_block=34.0), logit_bytes=6.0, io_rate=4.9 * GB,
)  # fmt: skip

_FLASHNEURON = Policy(
    name="flashneuron",
    about="states on the device, all activations on SSD",
    weights="device", state="device", gradients="device", inputs="ssd", optimizer="gpu",
    activations="g10", device=MemoryFormula(per_parameter=16.0), whole_recompute=False,
)  # fmt: skip

_G10 = Policy(
    name="g10",
    about="states and all activations on SSD by GPUDirect, updates on the GPU after backward",
    weights="ssd", state="ssd", inputs="ssd", optimizer="gpu", activations="g10", prefetch=2,
    ring=8, whole_recompute=False, device=_TWO_BLOCKS,
)  # fmt: skip

_MEGATRON = Policy(
    name="megatron",
    about="everything in the memories of several GPUs, which share each block",
    weights="device", state="device", gradients="device", inputs="device", optimizer="gpu",
    model_parallel=True, device=MemoryFormula(per_parameter=16.0), compute_share=0.68,
)  # fmt: skip

_FAST_DIT = Policy(
    name="fast-dit",
    about="everything on the device, block inputs kept, all else recomputed",
    weights="device", state="device", gradients="device", inputs="device", optimizer="gpu",
    # fp32 weights, gradients, m and v, and 16-bit weights to compute with; the CUDA context.
    device=MemoryFormula(per_parameter=18.0, fixed=0.7 * GB), compute_share=0.88,
)  # fmt: skip

_ALL = (
    _LOHAN, _SLIDEFORMER, _ZERO_INFINITY, _ZERO_OFFLOAD, _COLOSSAL_AI, _FLASHNEURON, _G10,
    _MEGATRON, _FAST_DIT,
)  # fmt: skip
POLICIES = {policy.name: policy for policy in _ALL}
AUTO = "auto"  # LoHan as it is built here; compare.py


def policy_names() -> list[str]:
    return [AUTO, *POLICIES]


def policy(name: str) -> Policy:
    if name in POLICIES:
        return POLICIES[name]
    near = difflib.get_close_matches(name, policy_names(), n=1)
    hint = f"did you mean {near[0]}?" if near else f"they are {', '.join(policy_names())}"
    raise ConfigError(f"{name!r} is not a policy; {hint}")


def with_choices(
    chosen: Policy, *, update_mode: str | None = None, activations: str | None = None
) -> Policy:
    """The policy with the user's own choices, where it leaves them free."""
    wanted = replace(
        chosen, update_mode=update_mode or chosen.update_mode,
        activations=activations or chosen.activations,
    )  # fmt: skip
    settings = {
        "update_mode": (chosen.update_mode, wanted.update_mode),
        "activations": (chosen.activations, wanted.activations),
    }
    for key, (own, value) in settings.items():
        if not chosen.free and value != own:
            raise ConfigError(
                f"{chosen.name} has {key} {own}, not {value}; leave --{key.replace('_', '-')} out "
                "or use --policy lohan"
            )
    return wanted


# -- A policy's step as the schedule's nouns -------------------------------------------------------
#
# Sites, tensors, spec, order, and a clock for them.


ELEMENT_BYTES = 2  # bytes of a 16-bit element
# Shares of a block's matrices in the order in which backward finishes them (both of the MLP, the
# attention's output, its inputs); behind each come the vectors that belong to it.
MATRICES = (4 / 12, 4 / 12, 1 / 12, 3 / 12)
VECTORS = 1e-4  # of the block's parameters
SLOTS, DEVICE_SLOTS = 4, 2  # blocks whose weights are in host memory, and on the device
ACT_BUFFERS = 4  # blocks whose activations are in flight from or to SSD
GRADS = 2  # blocks whose gradients may wait for their update
SUM_BYTES = 8  # of a gradient's fp32 sum: its cache line is fetched before it is written
DEVICE_UPDATE_BYTES = 32  # through device memory per parameter that is updated there


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The share of one GPU, and what of it leaves the device and the host."""

    tokens: float
    seq: int
    kept: tuple[frozenset[str], ...]  # classes of activations, by block
    spilled: float = 0.0  # share of the kept bytes that goes on to SSD


def block_work(
    block: BlockShape, *, tokens: float, seq: int, kept: Collection[str] = (), whole: bool = False,
    touched: float = 1.0,
) -> SiteWork:  # fmt: skip
    """Compute of one block. `whole`: unless all is kept, recomputation runs to the block's end."""
    again = [part for part in block.activations if part.name not in kept]
    flops = sum(part.flops_at(seq) for part in again)
    if whole and again:
        flops = block.flops_at(seq) - sum(
            part.flops_at(seq) for part in block.activations if part.name in kept
        )
    return SiteWork(
        forward_flops=tokens * block.flops_at(seq),
        recompute_flops=tokens * flops,
        tokens=tokens,
        forward_bytes=touched * TOUCHED * tokens * block.elements,
        recompute_bytes=touched * TOUCHED * tokens * sum(part.elements for part in again),
    )


def sites_of(policy: Policy, model: ModelShape, batch: Batch, gpus: int) -> tuple[SiteWork, ...]:
    """Embedding, blocks and head. The embedding computes nothing to speak of."""
    idle = SiteWork(forward_flops=0.0, recompute_flops=0.0, tokens=batch.tokens)
    made = [
        _block_site(policy, block, names, batch, gpus)
        for block, names in zip(model.blocks, batch.kept, strict=True)
    ]
    cut = gpus if policy.model_parallel else 1
    head = replace(idle, forward_flops=batch.tokens * model.head_flops / cut, head=True)
    return idle, *made, head


def _block_site(
    policy: Policy, block: BlockShape, names: Collection[str], batch: Batch, gpus: int
) -> SiteWork:
    site = block_work(
        block, tokens=batch.tokens, seq=batch.seq, kept=names, whole=policy.whole_recompute,
        touched=policy.touched,
    )  # fmt: skip
    kept = sum(part.elements for part in block.activations if part.name in names)
    kept += block.input_elements
    size = 0.0 if policy.inputs == "device" else ELEMENT_BYTES * batch.tokens * kept
    cut = gpus if policy.model_parallel else 1
    return replace(
        site, kept_bytes=size, out_bytes=size * batch.spilled * gpus,
        forward_flops=site.forward_flops / cut, recompute_flops=site.recompute_flops / cut,
        forward_bytes=site.forward_bytes / cut, recompute_bytes=site.recompute_bytes / cut,
    )  # fmt: skip


ChunkSizes = tuple[tuple[int, ...], ...]


def chunk_sizes_of(model: ModelShape) -> ChunkSizes:
    """Parameters of every tensor of every group: embedding, blocks, and the head if it has its
    own."""
    made: list[tuple[int, ...]] = [(model.embedding_parameters + model.resident_parameters,)]
    made += [_cut(block.parameters) for block in model.blocks]
    return tuple(made + ([(model.head_parameters,)] if model.head_parameters else []))


def _cut(parameters: int) -> tuple[int, ...]:
    vectors = max(1, round(parameters * VECTORS))
    return tuple(
        size for share in MATRICES for size in (round(parameters * share) - vectors, vectors)
    )


def spec_of(
    policy: Policy, model: ModelShape, chunk_sizes: ChunkSizes, sites: Sequence[SiteWork], *,
    gpus: int, spill_gradients: bool,
) -> ScheduleSpec:  # fmt: skip
    groups = range(len(chunk_sizes))
    blocks = range(1, len(model.blocks) + 1)
    head = groups[-1] if model.head_parameters else 0
    state = tuple((group, chunk) for group in groups for chunk in range(len(chunk_sizes[group])))
    return ScheduleSpec(
        sites=((0,), *((group,) for group in blocks), (head,)),
        chunks=tuple(map(len, chunk_sizes)),
        slots=SLOTS if policy.prefetch else 1,
        # One rank of several reads and writes while another computes its updates.
        ring=max(policy.ring, 2) if gpus > 1 else policy.ring,
        window=policy.prefetch,
        grads=1 if policy.update_mode == "naive" else GRADS,
        host_cached_weights=() if policy.weights == "ssd" else tuple(groups),
        host_cached_state=() if policy.state == "ssd" else state,
        write_through=policy.state == "ssd",
        spilled_gradients=frozenset(groups if spill_gradients else ()),
        spilled_sites=frozenset(n for n, site in enumerate(sites) if site.out_bytes),
        act_buffers=ACT_BUFFERS,
        device_slots=DEVICE_SLOTS if policy.prefetch else 1,
        offloaded=frozenset(n for n, site in enumerate(sites) if site.kept_bytes),
    )


def order_of(spec: ScheduleSpec, update_mode: str) -> ExecutionOrder:
    deferred = tuple(range(len(spec.chunks))) if update_mode == "serial" else ()
    sites = tuple(range(len(spec.sites)))
    return ExecutionOrder(
        forward=sites, backward=sites[::-1], update_mode=update_mode, deferred=deferred
    )


# -- passes over the updates after backward -------------------------------------------------------


def on_device(phase: Schedule) -> Schedule:
    """Updates on the GPU: in place of U the state goes there (L with a chunk) and comes back (D
    with a chunk)."""
    made: list[Action] = []
    for action in phase:
        waits = tuple(f"D{name[1:]}" if name[0] == "U" else name for name in action.waits)
        if action.kind == Op.UPDATE:
            what = (action.index, action.chunk, action.at)
            load = Action(Op.LOAD_WEIGHTS, *what, waits)
            made += [load, Action(Op.OFFLOAD_GRADIENTS, *what, (load.name,))]
        else:
            made.append(action.waiting_for(waits))
    return tuple(made)


ON_DEVICE = (Op.LOAD_WEIGHTS, Op.OFFLOAD_GRADIENTS, Op.UPDATE)  # free where weights never leave it
ONE_TENSOR = (Op.READ_STATE, Op.WRITE, Op.SPILL_GRADIENTS, Op.FETCH_GRADIENTS)


class PolicyCosts(ActionCosts):
    """Seconds of actions with the policy's own costs."""

    def __init__(self, policy: Policy, profile: Profile, work: StepWork) -> None:
        if policy.io_rate:
            limit = min(policy.io_rate, profile.ssd_limit or policy.io_rate)
            profile = replace(profile, ssd_limit=limit)
        super().__init__(profile, work)
        self._policy = policy

    def seconds(self, action: Action) -> float:
        kind, policy = action.kind, self._policy
        if kind == Op.BACKWARD_DONE:
            return self._device_update_s() if policy.state == "device" else 0.0
        if policy.weights == "device" and kind in ON_DEVICE:
            return 0.0
        if kind in (Op.FORWARD, Op.BACKWARD):
            compute_s = super().seconds(action) / policy.compute_share + self._stalled_s(action)
            return compute_s + (self._held_up_s(action.index) if kind == Op.BACKWARD else 0.0)
        tensors = int(kind in ONE_TENSOR)
        if kind == Op.READ_WEIGHTS:
            tensors = len(self._work.chunk_sizes[action.index])
        return super().seconds(action) + tensors * policy.op_s

    def _stalled_s(self, action: Action) -> float:
        """Compute waits for a share of what its own activations take over the link."""
        rate = self._profile.d2h if action.kind == Op.FORWARD else self._profile.h2d
        return self._policy.stall * self._work.sites[action.index].kept_bytes / rate

    def _held_up_s(self, site: int) -> float:
        """The naive handler runs on the thread that drives the GPU, which waits for its Adam."""
        if self._policy.update_mode != "naive" or site >= len(self._work.groups):
            return 0.0
        return self._update_s(self._work.groups[site])

    def _update_s(self, numel: float) -> float:
        rate, gpus = self._policy.sum_rate, self._profile.gpus
        summed = ELEMENT_BYTES * gpus + SUM_BYTES if rate and gpus > 1 else 0
        return numel / self._profile.adam + (summed * numel / rate if summed else 0.0)

    def _device_update_s(self) -> float:
        share = self._profile.gpus if self._policy.model_parallel else 1
        size = sum(self._work.groups) / share * DEVICE_UPDATE_BYTES
        return size / self._profile.device_rate if self._profile.device_rate else 0.0

    def _moving_s(self, action: Action) -> float:
        work, layout, profile = self._work, self._work.per_parameter, self._profile
        if action.chunk >= 0:
            numel = work.chunk(action.index, action.chunk)
            if action.kind == Op.UPDATE:
                return self._update_s(numel)
            if action.kind == Op.LOAD_WEIGHTS:  # the state, to be updated on the device
                return numel * layout.state / profile.h2d
            if action.kind == Op.OFFLOAD_GRADIENTS:
                return numel * (layout.state + layout.weight) / profile.d2h
        return super()._moving_s(action)


# -- A policy on a machine: its memory, its choice of activations, and its step, simulated ---------


STEPS = 2  # simulated: the second is the one that counts


@dataclass(frozen=True, kw_only=True)
class PolicyResult:
    """What a policy does on a machine, or why it cannot."""

    feasible: bool
    reason: str = ""
    step_s: float = 0.0
    tokens_per_s: float = 0.0
    lane_busy_s: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    kept_bytes: float = 0.0  # activations that leave each device
    timeline: Timeline | None = field(default=None, repr=False)

    def to_json(self) -> dict[str, Any]:
        """Without the timeline; numbers of a step that cannot be are None."""
        made: dict[str, Any] = {"feasible": self.feasible, "reason": self.reason}
        numbers: dict[str, Any] = {
            "step_s": self.step_s, "tokens_per_s": self.tokens_per_s,
            "lane_busy_s": self.lane_busy_s, "kept_bytes": self.kept_bytes,
        }  # fmt: skip
        made |= {name: value if self.feasible else None for name, value in numbers.items()}
        return {**made, "peak_bytes": self.peak_bytes}


def run(
    policy: Policy, model: ModelShape, profile: Profile, *, batch: int, seq: int,
    swapped: float | None = None,
) -> PolicyResult:  # fmt: skip
    """`batch` is that of all GPUs together. `swapped`: bytes of activations that leave each
    device, in place of the policy's own choice."""
    _check(profile, batch, seq)
    tokens = tokens_of(policy, model, profile, batch, seq)
    step = step_of(policy, model, profile, tokens=tokens, seq=seq)
    kept = _kept(policy, step, model, tokens, model.sample_tokens or seq, swapped)
    spilled = _spilled(policy, profile.gpus * kept.bytes, step.spilled(kept.bytes))
    asked = needs(policy, model, profile, batch=batch, seq=seq, kept=kept.bytes, spilled=spilled)
    if asked.reason:
        return PolicyResult(feasible=False, reason=asked.reason, peak_bytes=asked.peaks)
    share = Batch(
        tokens=tokens, seq=model.sample_tokens or seq, kept=kept.classes,
        spilled=spilled / (profile.gpus * kept.bytes),
    )  # fmt: skip
    timeline = _simulated(policy, model, profile, share)
    return _outcome(policy, model, profile, batch, seq, kept, asked, timeline)


def fits(policy: Policy, model: ModelShape, profile: Profile, *, batch: int, seq: int) -> Needs:
    """What it needs at the least: block inputs, and those on SSD where they may go there."""
    tokens = tokens_of(policy, model, profile, batch, seq)
    kept = input_bytes(model, tokens)
    over = profile.gpus * kept - _room(policy, model, profile, tokens)
    spilled = _spilled(policy, profile.gpus * kept, max(0.0, over))
    return needs(policy, model, profile, batch=batch, seq=seq, kept=kept, spilled=spilled)


def _room(policy: Policy, model: ModelShape, profile: Profile, tokens: float) -> float:
    taken = (twins(policy, model, profile, tokens), waiting(policy, model, profile, tokens))
    return max(0.0, room_for_kept(policy, model, profile) - sum(taken))


def step_of(
    policy: Policy, model: ModelShape, profile: Profile, *, tokens: float, seq: int
) -> Step:
    """The terms of the paper's T_iter."""
    everything = tuple(frozenset(a.name for a in block.activations) for block in model.blocks)
    batch = Batch(tokens=tokens, seq=model.sample_tokens or seq, kept=everything)
    sites = sites_of(policy, model, batch, profile.gpus)
    layout, count = policy.layout, model.parameters
    weights, state = policy.weights == "ssd", policy.state == "ssd"
    return Step(
        profile=profile,
        forward_s=sum(site.forward_s(profile) for site in sites) / policy.compute_share,
        backward_s=sum(site.backward_s(profile) for site in sites) / policy.compute_share,
        weights=layout.weight * count if policy.weights != "device" else 0.0,
        gradients=layout.gradient * count if policy.gradients != "device" else 0.0,
        weights_read=layout.weight * count if weights else 0.0,
        state_read=layout.state * count if state else 0.0,
        state_written=(layout.state + layout.weight) * count if state else 0.0,
        room=_room(policy, model, profile, tokens),
    )


def _check(profile: Profile, batch: int, seq: int) -> None:
    if not profile.has_link:
        raise ConfigError(f"{profile.name} has no GPU; policies are compared on machines with one")
    if batch < 1 or seq < 1:
        raise ConfigError(f"--batch {batch} and --seq {seq} must be positive")
    if batch % profile.gpus:
        raise ConfigError(
            f"--batch {batch} does not divide by {profile.gpus} GPUs; take a multiple"
        )


def _kept(
    policy: Policy, step: Step, model: ModelShape, tokens: float, seq: int, swapped: float | None
) -> PolicyChoice:
    if swapped is not None:
        return at_most(step, model, tokens=tokens, seq=seq, most=swapped)
    return choose_by_policy(policy.activations, step, model, tokens=tokens, seq=seq)


def _spilled(policy: Policy, kept: float, over: float) -> float:
    """Bytes that go to SSD, of all that is kept and of what host memory has no room for."""
    if policy.inputs == "device" or policy.activations in HOST_ONLY:
        return 0.0
    return kept if policy.activations == "g10" else over  # g10: from the device to the drives


def _simulated(policy: Policy, model: ModelShape, profile: Profile, batch: Batch) -> Timeline:
    if policy.free and policy.activations == "static":  # the rival's way
        policy = replace(policy, whole_recompute=True)
    sites, chunk_sizes = sites_of(policy, model, batch, profile.gpus), chunk_sizes_of(model)
    on_ssd = holds_on_ssd(policy, model, profile, batch.tokens)
    spec = spec_of(policy, model, chunk_sizes, sites, gpus=profile.gpus, spill_gradients=on_ssd)
    work = StepWork(
        sites=sites, groups=tuple(map(sum, chunk_sizes)), chunk_params=1,
        per_parameter=policy.layout, chunk_sizes=chunk_sizes,
    )  # fmt: skip
    phases: list[Schedule] = []
    for phase_of in steps(spec, order_of(spec, policy.update_mode), STEPS):
        for name, phase in phase_of.items():
            phases.append(_updates(policy, phase) if name == "after backward" else phase)
    return simulate(
        [phase for phase in phases if phase], PolicyCosts(policy, profile, work).seconds
    )


def _updates(policy: Policy, phase: Schedule) -> Schedule:
    # From a master copy they need not read the compute weights that they replace.
    updates = tuple(action for action in phase if action.kind != Op.READ_WEIGHTS)
    return on_device(updates) if policy.optimizer == "gpu" else updates


def _outcome(
    policy: Policy, model: ModelShape, profile: Profile, batch: int, seq: int, kept: PolicyChoice,
    asked: Needs, timeline: Timeline,
) -> PolicyResult:  # fmt: skip
    tokens = batch * (model.sample_tokens or seq)
    return PolicyResult(
        feasible=True, step_s=timeline.step_s, tokens_per_s=tokens / timeline.step_s,
        lane_busy_s=timeline.busy_s(), peak_bytes=asked.peaks, timeline=timeline,
        kept_bytes=0.0 if policy.inputs == "device" else kept.bytes,
    )  # fmt: skip
