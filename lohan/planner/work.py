"""A policy's step as the schedule's nouns: sites, tensors, shape, course, and a clock for them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from lohan.model.machine import Profile
from lohan.model.shapes import BlockShape, ModelShape
from lohan.planner.cost import TOUCHED, Clock, SiteWork, Workload
from lohan.planner.policy import Policy
from lohan.schedule.actions import Action, Schedule
from lohan.schedule.places import Shape
from lohan.schedule.steps import Course

WIDTH = 2  # bytes of a 16-bit element
# Shares of a block's matrices in the order in which backward finishes them (both of the MLP, the
# attention's output, its inputs); behind each come the vectors that belong to it.
MATRICES = (4 / 12, 4 / 12, 1 / 12, 3 / 12)
VECTORS = 1e-4  # of the block's parameters
SLOTS, DEVICE_SLOTS = 4, 2  # blocks whose weights are in host memory, and on the device
ACT_BUFFERS = 4  # blocks whose activations are on their way from or to SSD
GRADS = 2  # blocks whose gradients may wait for their update
DEVICE_UPDATE_BYTES = 32  # through device memory per parameter that is updated there


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The share of one GPU, and what of it leaves the device and the host."""

    tokens: float
    seq: int
    kept: tuple[frozenset[str], ...]  # classes of activations, by block
    spilled: float = 0.0  # share of the kept bytes that goes on to SSD


def block_work(
    block: BlockShape, *, tokens: float, seq: int, kept: Collection[str] = (), whole: bool = False
) -> SiteWork:
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
        forward_bytes=TOUCHED * tokens * block.elements,
        recompute_bytes=TOUCHED * tokens * sum(part.elements for part in again),
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
        block, tokens=batch.tokens, seq=batch.seq, kept=names, whole=policy.whole_recompute
    )
    kept = sum(part.elements for part in block.activations if part.name in names)
    kept += block.input_elements
    size = 0.0 if policy.inputs == "device" else WIDTH * batch.tokens * kept
    cut = gpus if policy.model_parallel else 1
    return replace(
        site, kept_bytes=size, out_bytes=size * batch.spilled * gpus,
        forward_flops=site.forward_flops / cut, recompute_flops=site.recompute_flops / cut,
        forward_bytes=site.forward_bytes / cut, recompute_bytes=site.recompute_bytes / cut,
    )  # fmt: skip


Pieces = tuple[tuple[int, ...], ...]


def pieces_of(model: ModelShape) -> Pieces:
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


def shape_of(
    policy: Policy, model: ModelShape, pieces: Pieces, sites: Sequence[SiteWork], *,
    gpus: int, spill_gradients: bool,
) -> Shape:  # fmt: skip
    groups = range(len(pieces))
    blocks = range(1, len(model.blocks) + 1)
    head = groups[-1] if model.head_parameters else 0
    state = tuple((group, chunk) for group in groups for chunk in range(len(pieces[group])))
    return Shape(
        sites=((0,), *((group,) for group in blocks), (head,)),
        chunks=tuple(map(len, pieces)),
        slots=SLOTS if policy.prefetch else 1,
        # One rank of several reads and writes while another computes its updates.
        ring=max(policy.ring, 2) if gpus > 1 else policy.ring,
        window=policy.prefetch,
        grads=1 if policy.grad_offload == "naive" else GRADS,
        pinned_weights=() if policy.weights == "ssd" else tuple(groups),
        pinned_state=() if policy.state == "ssd" else state,
        write_pinned=policy.state == "ssd",
        spilled=frozenset(groups if spill_gradients else ()),
        moved_out=frozenset(n for n, site in enumerate(sites) if site.out_bytes),
        act_buffers=ACT_BUFFERS,
        device_slots=DEVICE_SLOTS if policy.prefetch else 1,
        kept=frozenset(n for n, site in enumerate(sites) if site.kept_bytes),
    )


def course_of(shape: Shape, mode: str) -> Course:
    order = tuple(range(len(shape.sites)))
    later = tuple(range(len(shape.chunks))) if mode == "serial" else ()
    return Course(order=order, back=order[::-1], mode=mode, later=later)


# -- passes over the updates after backward -------------------------------------------------------


def without_reads(phase: Schedule) -> Schedule:
    """Updates from a master copy need not read the compute weights that they replace."""
    return tuple(action for action in phase if action.kind != "R")


def on_device(phase: Schedule) -> Schedule:
    """Updates on the GPU: in place of U the state goes there (L with a chunk) and comes back (D
    with a chunk)."""
    made: list[Action] = []
    for action in phase:
        waits = tuple(f"D{name[1:]}" if name[0] == "U" else name for name in action.waits)
        if action.kind == "U":
            load = replace(action, kind="L", waits=waits)
            made += [load, replace(action, kind="D", waits=(load.name,))]
        else:
            made.append(replace(action, waits=waits))
    return tuple(made)


class PolicyClock(Clock):
    """Seconds of actions with the policy's own costs."""

    def __init__(self, policy: Policy, profile: Profile, work: Workload) -> None:
        if policy.io_rate:
            limit = min(policy.io_rate, profile.ssd_limit or policy.io_rate)
            profile = replace(profile, ssd_limit=limit)
        super().__init__(profile, work)
        self._policy = policy

    def seconds(self, action: Action) -> float:
        kind, policy = action.kind, self._policy
        if kind == "E":
            return self._device_update_s() if policy.state == "device" else 0.0
        if policy.weights == "device" and kind in "LDU":
            return 0.0
        if kind in "FB":
            compute_s = super().seconds(action) / policy.compute_share
            return compute_s + (self._held_up_s(action.index) if kind == "B" else 0.0)
        tensors = len(self._work.pieces[action.index]) if kind == "R" else kind in "SWPG"
        return super().seconds(action) + tensors * policy.op_s

    def _held_up_s(self, site: int) -> float:
        """The naive handler runs on the thread that drives the GPU, which waits for its Adam."""
        if self._policy.grad_offload != "naive" or site >= len(self._work.groups):
            return 0.0
        return self._update_s(self._work.groups[site])

    def _update_s(self, numel: float) -> float:
        rate, others = self._policy.reduce_rate, self._profile.gpus - 1
        return numel / self._profile.adam + (others * numel / rate if rate else 0.0)

    def _device_update_s(self) -> float:
        share = self._profile.gpus if self._policy.model_parallel else 1
        size = sum(self._work.groups) / share * DEVICE_UPDATE_BYTES
        return size / self._profile.device_rate if self._profile.device_rate else 0.0

    def _U(self, action: Action) -> float:
        return self._update_s(self._numel(action))

    def _L(self, action: Action) -> float:
        if action.chunk < 0:
            return super()._L(action)
        return self._numel(action) * self._work.layout.state / self._profile.h2d

    def _D(self, action: Action) -> float:
        if action.chunk < 0:
            return super()._D(action)
        layout = self._work.layout
        return self._numel(action) * (layout.state + layout.weight) / self._profile.d2h
