"""Puts the parts of a step together from a plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lohan.layout import RESIDENT, Blocks
from lohan.optim import AdamW
from lohan.plan import Plan
from lohan.runtime.acts import ActivationSpill
from lohan.runtime.lanes import Lanes
from lohan.runtime.optimizer import StateRing
from lohan.runtime.pipeline import Pipeline
from lohan.runtime.pool import HostPool
from lohan.runtime.spill import Spill
from lohan.runtime.waiting import wait_all
from lohan.runtime.weights import WeightSlots
from lohan.runtime.work import StepWork
from lohan.schedule.builder import Shape
from lohan.schedule.steady import later_of, shape_of
from lohan.state import MODES
from lohan.storage.flight import Ticket
from lohan.storage.store import Store
from lohan.trace import Trace


@dataclass(frozen=True)
class Parts:
    blocks: Blocks
    shape: Shape
    slots: WeightSlots
    ring: StateRing
    work: StepWork
    lanes: Lanes
    pipeline: Pipeline
    store: Store

    def resident_flat(self) -> torch.Tensor:
        number = next(i for i, g in enumerate(self.blocks.groups) if g.key == RESIDENT)
        slot = self.shape.slots + self.shape.pinned_weights.index(number)
        return self.slots.flat(self.blocks.groups[number], slot)

    def load_pinned(self) -> None:
        """Fills the pinned slots and buffers from the committed generation."""
        groups = self.blocks.groups
        tickets: list[Ticket] = []
        for i, number in enumerate(self.shape.pinned_weights):
            tickets += self.slots.read(groups[number], self.shape.slots + i)
        for i, (number, chunk) in enumerate(self.shape.pinned_state):
            tickets.append(self.ring.read(groups[number], chunk, self.shape.ring + i))
        wait_all(self.store, tickets)

    def write_pinned(self) -> None:
        """Brings what lives in host memory to the SSD, where steps do not."""
        groups = self.blocks.groups
        tickets: list[Ticket] = []
        weights, state = self.shape.pinned_weights, self.shape.pinned_state
        for i, number in enumerate(weights):
            for chunk in range(self.shape.chunks[number]):
                tickets.append(self.slots.write(groups[number], chunk, self.shape.slots + i))
        for i, (number, chunk) in enumerate(state):
            tickets.append(self.ring.write(groups[number], chunk, self.shape.ring + i))
        wait_all(self.store, tickets)


def build_parts(
    blocks: Blocks, plan: Plan, *, store: Store, pool: HostPool, adamw: AdamW, trace: Trace
) -> Parts:
    mode = MODES[plan.mode]
    shape = shape_of(blocks, plan, write_pinned=store.durability == "step")
    groups = blocks.groups
    pinned = [groups[number] for number in shape.pinned_weights]
    slots = WeightSlots(
        store, pool, moving=[g for g in groups if g not in pinned], pinned=pinned,
        slots=shape.slots, mode=mode, chunk_params=plan.chunk_params,
    )  # fmt: skip
    ring = StateRing(
        store, pool, ring=shape.ring, largest=max(g.numel for g in groups), mode=mode,
        pinned=[(groups[n], chunk) for n, chunk in shape.pinned_state],
        chunk_params=plan.chunk_params,
    )  # fmt: skip
    spill = None
    if plan.spilled:
        spill = Spill(store, pool, groups, buffers=shape.ring, chunk_params=plan.chunk_params)
    work = StepWork(
        groups, store=store, slots=slots, ring=ring, spill=spill,
        acts=_activations(blocks, plan, store, pool), adamw=adamw, mode=mode,
        chunk_params=plan.chunk_params,
    )  # fmt: skip
    lanes = Lanes(work, overlap=plan.overlap, trace=trace, updates_on_caller=True)
    pipeline = Pipeline(
        groups=groups, shape=shape, slots=slots, work=work, lanes=lanes, overlap=plan.overlap,
        mode=plan.grad_offload, later=later_of(blocks, plan),
    )  # fmt: skip
    parts = Parts(blocks, shape, slots, ring, work, lanes, pipeline, store)
    parts.load_pinned()
    return parts


def _activations(
    blocks: Blocks, plan: Plan, store: Store, pool: HostPool
) -> ActivationSpill | None:
    if not plan.moved_out:
        return None
    numbers = {site.name: number for number, site in enumerate(blocks.sites)}
    sizes = {
        numbers[name]: size for name, size in zip(plan.moved_out, plan.moved_bytes, strict=True)
    }
    dirs = [path.with_name(path.name + "-activations") for path in store.dirs]
    return ActivationSpill(dirs, pool, sizes, buffers=plan.act_buffers, engine="auto")
