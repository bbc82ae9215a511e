"""A policy on a machine: its memory, its choice of activations, and its step, simulated."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from lohan.errors import ConfigError
from lohan.model.machine import Profile
from lohan.model.shapes import ModelShape
from lohan.planner.cost import Workload
from lohan.planner.policies_activations_part import (
    HOST_ONLY,
    Kept,
    Step,
    at_most,
    choose,
    input_bytes,
)
from lohan.planner.policies_memory_part import (
    Needs,
    holds_on_ssd,
    needs,
    room_for_kept,
    tokens_of,
    twins,
    waiting,
)
from lohan.planner.policy import Policy
from lohan.planner.work import (
    Batch,
    PolicyClock,
    course_of,
    on_device,
    pieces_of,
    shape_of,
    sites_of,
    without_reads,
)  # fmt: skip
from lohan.schedule.actions import Schedule
from lohan.schedule.simulate import Timeline, simulate
from lohan.schedule.steps import steps

STEPS = 2  # simulated: the second is the one that counts


@dataclass(frozen=True, kw_only=True)
class Outcome:
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
        for name in ("step_s", "tokens_per_s", "lane_busy_s", "kept_bytes"):
            made[name] = getattr(self, name) if self.feasible else None
        return {**made, "peak_bytes": self.peak_bytes}


def run(
    policy: Policy, model: ModelShape, profile: Profile, *, batch: int, seq: int,
    swapped: float | None = None,
) -> Outcome:  # fmt: skip
    """`batch` is that of all GPUs together. `swapped`: bytes of activations that leave each
    device, in place of the policy's own choice."""
    _check(profile, batch, seq)
    tokens = tokens_of(policy, model, profile, batch, seq)
    step = step_of(policy, model, profile, tokens=tokens, seq=seq)
    kept = _kept(policy, step, model, tokens, model.sample_tokens or seq, swapped)
    spilled = _spilled(policy, profile.gpus * kept.bytes, step.spilled(kept.bytes))
    asked = needs(policy, model, profile, batch=batch, seq=seq, kept=kept.bytes, spilled=spilled)
    if asked.reason:
        return Outcome(feasible=False, reason=asked.reason, peak_bytes=asked.peaks)
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
) -> Kept:
    if swapped is not None:
        return at_most(step, model, tokens=tokens, seq=seq, most=swapped)
    return choose(policy.activations, step, model, tokens=tokens, seq=seq)


def _spilled(policy: Policy, kept: float, over: float) -> float:
    """Bytes that go to SSD, of all that is kept and of what host memory has no room for."""
    if policy.inputs == "device" or policy.activations in HOST_ONLY:
        return 0.0
    return kept if policy.activations == "g10" else over  # g10: from the device to the drives


def _simulated(policy: Policy, model: ModelShape, profile: Profile, batch: Batch) -> Timeline:
    if policy.activations == "static":
        policy = replace(policy, whole_recompute=True)
    sites, pieces = sites_of(policy, model, batch, profile.gpus), pieces_of(model)
    on_ssd = holds_on_ssd(policy, model, profile, batch.tokens)
    shape = shape_of(policy, model, pieces, sites, gpus=profile.gpus, spill_gradients=on_ssd)
    work = Workload(
        sites=sites, groups=tuple(map(sum, pieces)), chunk_params=1, layout=policy.layout,
        pieces=pieces,
    )  # fmt: skip
    phases: list[Schedule] = []
    for phase_of in steps(shape, course_of(shape, policy.grad_offload), STEPS):
        for name, phase in phase_of.items():
            phases.append(_updates(policy, phase) if name == "after backward" else phase)
    return simulate(
        [phase for phase in phases if phase], PolicyClock(policy, profile, work).seconds
    )


def _updates(policy: Policy, phase: Schedule) -> Schedule:
    updates = without_reads(phase)
    return on_device(updates) if policy.optimizer == "gpu" else updates


def _outcome(
    policy: Policy, model: ModelShape, profile: Profile, batch: int, seq: int, kept: Kept,
    asked: Needs, timeline: Timeline,
) -> Outcome:  # fmt: skip
    tokens = batch * (model.sample_tokens or seq)
    return Outcome(
        feasible=True, step_s=timeline.step_s, tokens_per_s=tokens / timeline.step_s,
        lane_busy_s=timeline.busy_s(), peak_bytes=asked.peaks, timeline=timeline,
        kept_bytes=0.0 if policy.inputs == "device" else kept.bytes,
    )  # fmt: skip
