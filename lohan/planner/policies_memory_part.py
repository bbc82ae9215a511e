"""What a policy asks of every tier, by owner, and whether a machine has it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lohan.model.machine import Profile
from lohan.model.plan import LedgerEntry
from lohan.model.shapes import ModelShape
from lohan.planner.policies_activations_part import INPUT_COPIES, WIDTH, input_bytes
from lohan.planner.policy import Policy
from lohan.util.units import format_bytes

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
    if policy.grad_offload != "serial" or policy.gradients == "device":
        return False
    if policy.gradients == "ssd":
        return True
    room = room_for_kept(policy, model, profile) - profile.gpus * input_bytes(model, tokens)
    return policy.state == "ssd" and policy.layout.gradient * model.parameters > room


def waiting(policy: Policy, model: ModelShape, profile: Profile, tokens: float) -> float:
    """Bytes of gradients that wait in host memory, where the policy's own demand has not got
    them."""
    held = policy.free and policy.grad_offload == "serial"
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
    return Needs(ledger, _refusal(policy, profile, ledger, batch))


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
    elements = max(block.elements for block in model.blocks) * (1 + model.temporaries)
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
        yield "ssd", "gradients", layout.held * count
    yield "ssd", "activations", spilled


def _refusal(policy: Policy, profile: Profile, ledger: tuple[LedgerEntry, ...], batch: int) -> str:
    """The first tier that is too small, both numbers, and the next move."""
    have = {
        "device": profile.device_bytes,
        "host": profile.host_bytes,
        "ssd": sum(drive.bytes for drive in profile.drives),
    }
    moves = {
        "device": "take a GPU with more memory", "host": "raise --host", "ssd": "raise --ssds",
    }  # fmt: skip
    for tier in TIERS:
        rows = sorted((e for e in ledger if e.tier == tier), key=lambda e: -e.bytes)
        total = sum(entry.bytes for entry in rows)
        if total > have[tier]:
            largest = ", ".join(f"{e.owner} {format_bytes(e.bytes)}" for e in rows[:2])
            lower = f"lower --batch (now {batch}) or " if batch > 1 and tier != "ssd" else ""
            return (
                f"{policy.name}: {tier} memory too small, {format_bytes(total)} needed, "
                f"{format_bytes(have[tier])} there (largest: {largest}); {lower}{moves[tier]}"
            )
    return ""
