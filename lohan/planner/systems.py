"""Other systems and the paper's LoHan, described as policies that one simulator runs."""

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
from lohan.schedule.actions import Action, Schedule, ScheduleSpec
from lohan.schedule.ops import Op, Subject, parse_name
from lohan.schedule.placement import UpdateOptions
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

# -- Policies: placement of tensors, overlap, and memory requirements ------------------------------


# Comments abbreviate the parts of the state as in the paper: P32 are master weights in fp32, P16
# their 16-bit copy for compute, G16 and G32 the gradients in either type, m and v AdamW's moments.

# The state consists of P32, m and v.
FP16 = BytesPerParameter(weight=2.0, state=12.0, gradient=2.0)


@dataclass(frozen=True, kw_only=True)
class MemoryFormula:
    """The bytes that a policy needs in one tier."""

    per_parameter: float = 0.0  # bytes per parameter of the model
    per_block: float = 0.0  # bytes per parameter of the largest block
    fixed: float = 0.0  # bytes

    def bytes(self, parameters: float, block: float) -> float:
        return self.per_parameter * parameters + self.per_block * block + self.fixed


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A description of how one system trains.

    A tier is "device", "host" or "ssd". The values describe the software and are the same on every
    machine and for every model.
    """

    name: str
    about: str
    weights: str  # tier of the compute weights while they are not used
    state: str  # tier of master weights, m and v between updates
    gradients: str = "host"  # tier of gradients that wait for their update
    inputs: str = "host"  # tier of block inputs until backward
    optimizer: str = "cpu"  # cpu | gpu
    activations: str = "static"  # the activation policy
    update_mode: str = "serial"
    free: bool = False  # whether the user may choose `activations` and `update_mode`
    prefetch: int = 1  # number of blocks whose weights are prefetched; 0 if compute waits for them
    ring: int = 3  # number of state tensors in flight through host memory; 1 means no overlap
    model_parallel: bool = False  # whether GPUs share each block instead of the batch
    # Bytes/s at which the CPU sums the gradients of several GPUs; 0 if the GPUs sum them.
    sum_rate: float = 0.0
    # Whether recomputation also runs the last operations of a block, whose results backward does
    # not need.
    whole_recompute: bool = True
    layout: BytesPerParameter = FP16
    # Memory requirements without activations and logits.
    host: MemoryFormula = field(default_factory=MemoryFormula)
    device: MemoryFormula = field(default_factory=MemoryFormula)
    peers: float = 0.0  # additional device bytes per parameter of a block with several GPUs
    # Bytes per token and vocabulary entry; 0 if the head runs in slices.
    logit_bytes: float = 0.0
    compute_share: float = 1.0  # share of the device's speed that the kernels reach
    # Passes over activations in device memory, relative to unfused kernels; below 1 if kernels are
    # fused.
    touched: float = 1.0
    # Share of the transfer time of activations over the link during which compute waits.
    stall: float = 0.0
    op_s: float = 0.0  # seconds of software overhead to move one tensor to or from SSD
    io_rate: float = 0.0  # bytes/s of file access; 0 if only the drives limit it
    largest_tensor: float = 0.0  # bytes in fp32 of the largest tensor it can move; 0 if unlimited


# -- The memory requirements of a policy by tier and owner, compared with a machine ----------------


TIERS = ("device", "host", "ssd")
HEAD_TOKENS = 1024  # tokens of one slice, if the head runs in slices


@dataclass(frozen=True)
class Needs:
    """The memory requirements of a policy, and the reason if they do not fit."""

    ledger: tuple[LedgerEntry, ...]
    reason: str = ""  # empty if everything fits

    def peak(self, tier: str) -> int:
        return sum(entry.bytes for entry in self.ledger if entry.tier == tier)

    @property
    def peaks(self) -> dict[str, int]:
        return {tier: self.peak(tier) for tier in TIERS}


def tokens_of(policy: Policy, model: ModelShape, profile: Profile, batch: int, seq: int) -> float:
    """Return the number of tokens that one GPU processes."""
    share = 1 if policy.model_parallel else profile.gpus
    return batch * (model.sample_tokens or seq) / share


def room_for_kept(policy: Policy, model: ModelShape, profile: Profile) -> float:
    """Return the bytes of host memory for activations of all GPUs, the paper's MEM_avail."""
    return profile.host_bytes - policy.host.bytes(model.parameters, _block(model))


def twins(policy: Policy, model: ModelShape, profile: Profile, tokens: float) -> float:
    """Return the bytes of the additional copies of block inputs that a policy keeps.

    The result is the total of all GPUs.
    """
    copies = INPUT_COPIES.get(policy.activations, 1) - 1
    return profile.gpus * copies * input_bytes(model, tokens)


def holds_on_ssd(policy: Policy, model: ModelShape, profile: Profile, tokens: float) -> bool:
    """Return whether gradients wait on SSD for the end of backward.

    They do if the policy always stores them there, or if host memory has no room for them.
    """
    if policy.update_mode != "serial" or policy.gradients == "device":
        return False
    if policy.gradients == "ssd":
        return True
    room = room_for_kept(policy, model, profile) - profile.gpus * input_bytes(model, tokens)
    return policy.state == "ssd" and policy.layout.gradient * model.parameters > room


def waiting(policy: Policy, model: ModelShape, profile: Profile, tokens: float) -> float:
    """Return the bytes of waiting gradients in host memory, which the policy's formula omits."""
    held = policy.free and policy.update_mode == "serial"
    if not held or holds_on_ssd(policy, model, profile, tokens):
        return 0.0
    return policy.layout.gradient * model.parameters


def needs(
    policy: Policy,
    model: ModelShape,
    profile: Profile,
    *,
    batch: int,
    seq: int,
    kept: float = 0.0,
    spilled: float = 0.0,
) -> Needs:
    """Return the memory requirements of a policy.

    `kept` are the bytes of activations that leave each device, at least those of the block inputs.
    `spilled` are the bytes of all GPUs that are spilled to SSD.
    """
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
    share_of_model = policy.device.bytes(model.parameters, _block(model)) / share
    peers = policy.peers * _block(model) if profile.gpus > 1 else 0.0
    yield "device", "weights, gradients and state", share_of_model + peers
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
    """Return the first tier that is smaller than the sum of its ledger entries, or None."""
    needed = {tier: sum(e.bytes for e in ledger if e.tier == tier) for tier in TIERS}
    return next((tier for tier in TIERS if needed[tier] > _have(profile, tier)), None)


def _shortage(profile: Profile, ledger: tuple[LedgerEntry, ...], tier: str) -> str:
    rows = sorted((e for e in ledger if e.tier == tier), key=lambda e: -e.bytes)
    largest = ", ".join(f"{e.owner} {format_bytes(e.bytes)}" for e in rows[:2])
    return (
        f"{tier} memory too small, {format_bytes(sum(e.bytes for e in rows))} needed, "
        f"{format_bytes(_have(profile, tier))} available (largest: {largest})"
    )


# -- The systems that are compared -----------------------------------------------------------------
#
# The numbers describe the software of each system. They were derived from results that the paper
# publishes for one machine; docs/paper.md names the results. The rates of hardware are in the
# machine presets.


GB = 1e9

# The weights of two blocks and the gradients of two blocks, in 16 bits.
_TWO_BLOCKS = MemoryFormula(per_block=8.0)
# Logits in 16 bits and in fp32, and a gradient of each.
_LOGITS = 12.0
# The share of passes over the activations of a gated block that remains if norms, rotary embedding,
# the product in the MLP and the sums are one kernel each. It is counted, not fitted.
_FUSED = 0.41

_LOHAN = Policy(
    name="lohan",
    about="the paper as published: everything on SSD, updates while backward runs, activations by"
    " Algorithm 1",
    weights="ssd",
    state="ssd",
    inputs="host",
    activations="holistic",
    update_mode="optimized",
    free=True,
    prefetch=2,
    sum_rate=17 * GB,
    whole_recompute=False,
    stall=1 / 3,
    # Host bytes per parameter of a block: for four blocks, 16 each for P32, m, v, P16 and G16, 4
    # each for G32, and 2 each for weights.
    host=MemoryFormula(per_block=88.0, fixed=20 * GB),
    # Device: the weights of two blocks, the gradients of one block and of a quarter of the next,
    # and the CUDA context.
    device=MemoryFormula(per_block=6.5, fixed=0.5 * GB),
    peers=2.0,
    op_s=0.005,
    largest_tensor=2.0**32,
)

_SLIDEFORMER = Policy(
    name="slideformer",
    about="states in host memory, block inputs too, all else recomputed by fused kernels; updates"
    " while backward runs",
    weights="host",
    state="host",
    inputs="host",
    update_mode="optimized",
    prefetch=2,
    whole_recompute=False,
    touched=_FUSED,
    # Host bytes per parameter: 12 for P32, m and v. The other 1.4 are buffers for P16 and
    # gradients, which all layers share.
    host=MemoryFormula(per_parameter=13.4),
    device=_TWO_BLOCKS,
)

_ZERO_INFINITY = Policy(
    name="zero-infinity",
    about="states and gradients on SSD, block inputs in host memory, all else recomputed; updates"
    " after backward, one tensor at a time",
    weights="ssd",
    state="ssd",
    gradients="ssd",
    inputs="host",
    prefetch=0,
    ring=1,
    # Host: 16-bit weights and gradients in pinned buffers, which are rounded up, and the fixed
    # buffers of the swapper.
    host=MemoryFormula(per_parameter=5.0, fixed=70 * GB),
    device=_TWO_BLOCKS,
    logit_bytes=_LOGITS,
    compute_share=0.67,
    op_s=0.005,
)

_ZERO_OFFLOAD = Policy(
    name="zero-offload",
    about="states in host memory, block inputs on the device, all else recomputed; updates after"
    " backward",
    weights="host",
    state="host",
    inputs="device",
    # Host bytes per parameter: 16 for P32, m, v and G32; 4 for P16 and G16; the rest is the
    # rounding of pinned buffers.
    host=MemoryFormula(per_parameter=21.6),
    device=_TWO_BLOCKS,
    logit_bytes=_LOGITS,
    compute_share=0.67,
)

_COLOSSAL_AI = Policy(
    name="colossal-ai",
    about="weights in chunks in host memory, optimizer state in one file on SSD, read and written"
    " by one thread after backward",
    weights="host",
    state="ssd",
    inputs="device",
    ring=1,
    host=MemoryFormula(per_parameter=8.0, fixed=10 * GB),
    # Device: two chunks with weights, gradients, fp32 copies and state (16 bytes per parameter
    # each), and padding.
    device=MemoryFormula(per_block=34.0),
    logit_bytes=6.0,
    io_rate=4.9 * GB,
)

_FLASHNEURON = Policy(
    name="flashneuron",
    about="states on the device, all activations on SSD",
    weights="device",
    state="device",
    gradients="device",
    inputs="ssd",
    optimizer="gpu",
    activations="g10",
    device=MemoryFormula(per_parameter=16.0),
    whole_recompute=False,
)

_G10 = Policy(
    name="g10",
    about="states and all activations on SSD by GPUDirect, updates on the GPU after backward",
    weights="ssd",
    state="ssd",
    inputs="ssd",
    optimizer="gpu",
    activations="g10",
    prefetch=2,
    ring=8,
    whole_recompute=False,
    device=_TWO_BLOCKS,
)

_MEGATRON = Policy(
    name="megatron",
    about="everything in the memories of several GPUs, which share each block",
    weights="device",
    state="device",
    gradients="device",
    inputs="device",
    optimizer="gpu",
    model_parallel=True,
    device=MemoryFormula(per_parameter=16.0),
    compute_share=0.68,
)

_FAST_DIT = Policy(
    name="fast-dit",
    about="everything on the device, block inputs kept, all else recomputed",
    weights="device",
    state="device",
    gradients="device",
    inputs="device",
    optimizer="gpu",
    # Device: weights, gradients, m and v in fp32, 16-bit weights for compute, and the CUDA context.
    device=MemoryFormula(per_parameter=18.0, fixed=0.7 * GB),
    compute_share=0.88,
)

_ALL = (
    _LOHAN,
    _SLIDEFORMER,
    _ZERO_INFINITY,
    _ZERO_OFFLOAD,
    _COLOSSAL_AI,
    _FLASHNEURON,
    _G10,
    _MEGATRON,
    _FAST_DIT,
)
POLICIES = {policy.name: policy for policy in _ALL}
AUTO = "auto"  # LoHan as implemented by this package; see compare.py


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
    """Return the policy `chosen` with the user's choices.

    Raise a ConfigError if the policy fixes another value.
    """
    wanted = replace(
        chosen,
        update_mode=update_mode or chosen.update_mode,
        activations=activations or chosen.activations,
    )
    settings = {
        "update_mode": (chosen.update_mode, wanted.update_mode),
        "activations": (chosen.activations, wanted.activations),
    }
    for key, (fixed, value) in settings.items():
        if not chosen.free and value != fixed:
            raise ConfigError(
                f"{chosen.name} has {key} {fixed}, not {value}; leave --{key.replace('_', '-')} "
                "out or use --policy lohan"
            )
    return wanted


# -- A step of a policy as a schedule --------------------------------------------------------------
#
# Sites, tensors, spec, order, and the costs of the actions.


ELEMENT_BYTES = 2  # bytes of a 16-bit element
# Shares of the matrices in the parameters of a block, in the order in which backward finishes them:
# two of the MLP, the output of attention, its inputs. Each is followed by the vectors of its layer.
MATRICES = (4 / 12, 4 / 12, 1 / 12, 3 / 12)
VECTORS = 1e-4  # share of the vectors of one layer in the parameters of a block
SLOTS, DEVICE_SLOTS = 4, 2  # number of blocks with weights in host memory, and on the device
ACT_BUFFERS = 4  # number of blocks whose activations are in flight from or to SSD
GRADS = 2  # number of blocks whose gradients may wait for their update
# Bytes to write an element of the fp32 sum of gradients: its cache line is fetched first.
SUM_BYTES = 8
DEVICE_UPDATE_BYTES = 32  # bytes through device memory per parameter that is updated there


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The share of one GPU in a batch, and its activations that leave the device and the host."""

    tokens: float
    seq: int
    kept: tuple[frozenset[str], ...]  # classes of kept activations of each block
    spilled: float = 0.0  # share of the kept bytes that is spilled to SSD


def block_work(
    block: BlockShape,
    *,
    tokens: float,
    seq: int,
    kept: Collection[str] = (),
    whole: bool = False,
    touched: float = 1.0,
) -> SiteWork:
    """Return the work of one block.

    With `whole`, recomputation runs to the end of the block unless all activations are kept.
    `touched` is as in Policy.
    """
    recomputed = [part for part in block.activations if part.name not in kept]
    flops = sum(part.flops_at(seq) for part in recomputed)
    if whole and recomputed:
        flops = block.flops_at(seq) - sum(
            part.flops_at(seq) for part in block.activations if part.name in kept
        )
    return SiteWork(
        forward_flops=tokens * block.flops_at(seq),
        recompute_flops=tokens * flops,
        tokens=tokens,
        forward_bytes=touched * TOUCHED * tokens * block.elements,
        recompute_bytes=touched * TOUCHED * tokens * sum(part.elements for part in recomputed),
    )


def sites_of(policy: Policy, model: ModelShape, batch: Batch, gpus: int) -> tuple[SiteWork, ...]:
    """Return the work of embedding, blocks and head. The compute of the embedding is neglected."""
    idle = SiteWork(forward_flops=0.0, recompute_flops=0.0, tokens=batch.tokens)
    blocks = [
        _block_site(policy, block, names, batch, gpus)
        for block, names in zip(model.blocks, batch.kept, strict=True)
    ]
    cut = gpus if policy.model_parallel else 1
    head = replace(idle, forward_flops=batch.tokens * model.head_flops / cut, head=True)
    return idle, *blocks, head


def _block_site(
    policy: Policy, block: BlockShape, names: Collection[str], batch: Batch, gpus: int
) -> SiteWork:
    site = block_work(
        block,
        tokens=batch.tokens,
        seq=batch.seq,
        kept=names,
        whole=policy.whole_recompute,
        touched=policy.touched,
    )
    kept = sum(part.elements for part in block.activations if part.name in names)
    kept += block.input_elements
    size = 0.0 if policy.inputs == "device" else ELEMENT_BYTES * batch.tokens * kept
    cut = gpus if policy.model_parallel else 1
    return replace(
        site,
        kept_bytes=size,
        out_bytes=size * batch.spilled * gpus,
        forward_flops=site.forward_flops / cut,
        recompute_flops=site.recompute_flops / cut,
        forward_bytes=site.forward_bytes / cut,
        recompute_bytes=site.recompute_bytes / cut,
    )


ChunkSizes = tuple[tuple[int, ...], ...]


def chunk_sizes_of(model: ModelShape) -> ChunkSizes:
    """Return the size of each tensor in parameters, by group: embedding, blocks, untied head."""
    sizes: list[tuple[int, ...]] = [(model.embedding_parameters + model.resident_parameters,)]
    sizes += [_cut(block.parameters) for block in model.blocks]
    return tuple(sizes + ([(model.head_parameters,)] if model.head_parameters else []))


def _cut(parameters: int) -> tuple[int, ...]:
    vectors = max(1, round(parameters * VECTORS))
    return tuple(
        size for share in MATRICES for size in (round(parameters * share) - vectors, vectors)
    )


def spec_of(
    policy: Policy,
    model: ModelShape,
    chunk_sizes: ChunkSizes,
    sites: Sequence[SiteWork],
    *,
    gpus: int,
    spill_gradients: bool,
) -> ScheduleSpec:
    groups = range(len(chunk_sizes))
    blocks = range(1, len(model.blocks) + 1)
    head = groups[-1] if model.head_parameters else 0
    state = tuple((group, chunk) for group in groups for chunk in range(len(chunk_sizes[group])))
    return ScheduleSpec(
        sites=((0,), *((group,) for group in blocks), (head,)),
        chunks=tuple(map(len, chunk_sizes)),
        slots=SLOTS if policy.prefetch else 1,
        # With several ranks, one rank reads and writes while another computes its updates.
        ring=max(policy.ring, 2) if gpus > 1 else policy.ring,
        window=policy.prefetch,
        grads=1 if policy.update_mode == "naive" else GRADS,
        host_cached_weights=() if policy.weights == "ssd" else tuple(groups),
        host_cached_state=() if policy.state == "ssd" else state,
        spilled_gradients=frozenset(groups if spill_gradients else ()),
        spilled_sites=frozenset(n for n, site in enumerate(sites) if site.out_bytes),
        act_buffers=ACT_BUFFERS,
        device_slots=DEVICE_SLOTS if policy.prefetch else 1,
        offloaded=frozenset(n for n, site in enumerate(sites) if site.kept_bytes),
    )


def order_of(spec: ScheduleSpec, update_mode: str) -> ExecutionOrder:
    """Return the order of all sites, for steps that never write state in host memory to SSD."""
    sites = tuple(range(len(spec.sites)))
    updates = UpdateOptions(mode=update_mode, every_step_commits=not spec.host_cached_state)
    return ExecutionOrder(forward=sites, backward=sites[::-1], updates=updates)


# -- Transformations of the updates after backward ------------------------------------------------


def on_device(phase: Schedule) -> Schedule:
    """Return the phase with its updates on the GPU.

    Each U is replaced by a copy of the state to the device (L with a chunk) and back (D with a
    chunk).
    """

    def moved(name: str) -> str:
        kind, *what = parse_name(name) or (None,)
        return Op.OFFLOAD_GRADIENTS.of(*what) if kind == Op.UPDATE else name

    actions: list[Action] = []
    for action in phase:
        waits = tuple(map(moved, action.waits))
        if action.kind == Op.UPDATE:
            what = (action.index, action.chunk, action.at)
            load = Action(Op.LOAD_WEIGHTS, *what, waits)
            actions += [load, Action(Op.OFFLOAD_GRADIENTS, *what, (load.name,))]
        else:
            actions.append(action.waiting_for(waits))
    return tuple(actions)


# Actions that cost nothing if weights stay on the device.
ON_DEVICE = (Op.LOAD_WEIGHTS, Op.OFFLOAD_GRADIENTS, Op.UPDATE)


class PolicyCosts(ActionCosts):
    """The seconds of each action, including the software overhead of a policy."""

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
        # Chunks are single tensors.
        tensors = int(kind.lane == "ssd" and kind.subject is Subject.CHUNK)
        if kind == Op.READ_WEIGHTS:
            tensors = len(self.work.chunk_sizes[action.index])
        return super().seconds(action) + tensors * policy.op_s

    def _stalled_s(self, action: Action) -> float:
        """Return the seconds for which compute waits for its own activations on the link."""
        rate = self.profile.d2h if action.kind == Op.FORWARD else self.profile.h2d
        return self._policy.stall * self.work.sites[action.index].kept_bytes / rate

    def _held_up_s(self, site: int) -> float:
        """Return the seconds for which the update of a site blocks backward in mode `naive`.

        The update runs on the thread that launches the GPU kernels.
        """
        if self._policy.update_mode != "naive" or site >= len(self.work.groups):
            return 0.0
        return self._update_s(self.work.groups[site])

    def _update_s(self, numel: float) -> float:
        rate, gpus = self._policy.sum_rate, self.profile.gpus
        summed = ELEMENT_BYTES * gpus + SUM_BYTES if rate and gpus > 1 else 0
        return numel / self.profile.adam + (summed * numel / rate if summed else 0.0)

    def _device_update_s(self) -> float:
        share = self.profile.gpus if self._policy.model_parallel else 1
        size = sum(self.work.groups) / share * DEVICE_UPDATE_BYTES
        return size / self.profile.device_rate if self.profile.device_rate else 0.0

    def _moving_s(self, action: Action) -> float:
        work, layout, profile = self.work, self.work.per_parameter, self.profile
        if action.chunk >= 0:
            numel = work.chunk(action.index, action.chunk)
            if action.kind == Op.UPDATE:
                return self._update_s(numel)
            if action.kind == Op.LOAD_WEIGHTS:  # A load with a chunk moves state; see `on_device`.
                return numel * layout.state / profile.h2d
            if action.kind == Op.OFFLOAD_GRADIENTS:
                return numel * (layout.state + layout.weight) / profile.d2h
        return super()._moving_s(action)


# -- The simulation of a policy on a machine -------------------------------------------------------


STEPS = 2  # number of simulated steps; the result describes the second


@dataclass(frozen=True, kw_only=True)
class PolicyResult:
    """The simulated performance of a policy on a machine, or the reason why it does not fit."""

    feasible: bool
    reason: str = ""
    step_s: float = 0.0
    tokens_per_s: float = 0.0
    lane_busy_s: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    kept_bytes: float = 0.0  # bytes of activations that leave each device
    timeline: Timeline | None = field(default=None, repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return the result without the timeline; if it is not feasible, its numbers are None."""
        result: dict[str, Any] = {"feasible": self.feasible, "reason": self.reason}
        numbers: dict[str, Any] = {
            "step_s": self.step_s,
            "tokens_per_s": self.tokens_per_s,
            "lane_busy_s": self.lane_busy_s,
            "kept_bytes": self.kept_bytes,
        }
        result |= {name: value if self.feasible else None for name, value in numbers.items()}
        return {**result, "peak_bytes": self.peak_bytes}


def run(
    policy: Policy,
    model: ModelShape,
    profile: Profile,
    *,
    batch: int,
    seq: int,
    swapped: float | None = None,
) -> PolicyResult:
    """Simulate a policy on a machine, and return the result.

    `batch` is the total of all GPUs. `swapped` are the bytes of activations that leave each device;
    by default the policy chooses them.
    """
    _check(profile, batch, seq)
    tokens = tokens_of(policy, model, profile, batch, seq)
    step = step_of(policy, model, profile, tokens=tokens, seq=seq)
    kept = _kept(policy, step, model, tokens, model.sample_tokens or seq, swapped)
    spilled = _spilled(policy, profile.gpus * kept.bytes, step.spilled(kept.bytes))
    requirements = needs(
        policy, model, profile, batch=batch, seq=seq, kept=kept.bytes, spilled=spilled
    )
    if requirements.reason:
        return PolicyResult(
            feasible=False, reason=requirements.reason, peak_bytes=requirements.peaks
        )
    share = Batch(
        tokens=tokens,
        seq=model.sample_tokens or seq,
        kept=kept.classes,
        spilled=spilled / (profile.gpus * kept.bytes),
    )
    timeline = _simulated(policy, model, profile, share)
    return _outcome(policy, model, profile, batch, seq, kept, requirements, timeline)


def fits(policy: Policy, model: ModelShape, profile: Profile, *, batch: int, seq: int) -> Needs:
    """Return the memory needs of a policy that keeps only block inputs, which is the least.

    Inputs for which host memory has no room go to SSD if the policy can spill.
    """
    tokens = tokens_of(policy, model, profile, batch, seq)
    kept = input_bytes(model, tokens)
    over = profile.gpus * kept - _room(policy, model, profile, tokens)
    spilled = _spilled(policy, profile.gpus * kept, max(0.0, over))
    return needs(policy, model, profile, batch=batch, seq=seq, kept=kept, spilled=spilled)


def _room(policy: Policy, model: ModelShape, profile: Profile, tokens: float) -> float:
    used = (twins(policy, model, profile, tokens), waiting(policy, model, profile, tokens))
    return max(0.0, room_for_kept(policy, model, profile) - sum(used))


def step_of(
    policy: Policy, model: ModelShape, profile: Profile, *, tokens: float, seq: int
) -> Step:
    """Return the terms of the paper's T_iter for a policy."""
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
        raise ConfigError(
            f"{profile.name} has no GPU with its own memory; policies are compared on machines "
            "with one"
        )
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
    """Return the bytes of activations that a policy spills to SSD.

    `kept` are all bytes that are kept, `over` those for which host memory has no room.
    """
    if policy.inputs == "device" or policy.activations in HOST_ONLY:
        return 0.0
    return kept if policy.activations == "g10" else over  # G10 moves everything to the drives.


def _simulated(policy: Policy, model: ModelShape, profile: Profile, batch: Batch) -> Timeline:
    if policy.free and policy.activations == "static":
        # Static recomputation is simulated as the other systems implement it.
        policy = replace(policy, whole_recompute=True)
    sites, chunk_sizes = sites_of(policy, model, batch, profile.gpus), chunk_sizes_of(model)
    on_ssd = holds_on_ssd(policy, model, profile, batch.tokens)
    spec = spec_of(policy, model, chunk_sizes, sites, gpus=profile.gpus, spill_gradients=on_ssd)
    work = StepWork(
        sites=sites,
        groups=tuple(map(sum, chunk_sizes)),
        chunk_params=1,
        per_parameter=policy.layout,
        chunk_sizes=chunk_sizes,
    )
    phases: list[Schedule] = []
    for phase_of in steps(spec, order_of(spec, policy.update_mode), STEPS):
        for name, phase in phase_of.items():
            phases.append(_updates(policy, phase) if name == "after backward" else phase)
    return simulate(
        [phase for phase in phases if phase], PolicyCosts(policy, profile, work).seconds
    )


def _updates(policy: Policy, phase: Schedule) -> Schedule:
    # Updates start from the master weights and need not read the compute weights they replace.
    updates = tuple(action for action in phase if action.kind != Op.READ_WEIGHTS)
    return on_device(updates) if policy.optimizer == "gpu" else updates


def _outcome(
    policy: Policy,
    model: ModelShape,
    profile: Profile,
    batch: int,
    seq: int,
    kept: PolicyChoice,
    requirements: Needs,
    timeline: Timeline,
) -> PolicyResult:
    tokens = batch * (model.sample_tokens or seq)
    return PolicyResult(
        feasible=True,
        step_s=timeline.step_s,
        tokens_per_s=tokens / timeline.step_s,
        lane_busy_s=timeline.busy_s(),
        peak_bytes=requirements.peaks,
        timeline=timeline,
        kept_bytes=0.0 if policy.inputs == "device" else kept.bytes,
    )
