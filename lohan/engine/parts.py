"""Puts the parts of a step together from a plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lohan.capture.call import ActivationOffload
from lohan.device.base import Device
from lohan.device.ranks import ProcessGroup
from lohan.engine.actions import ActionRunner, DeviceParts
from lohan.engine.buffers import DeviceSlots, HostPool, Landing, Spill, StateRing, WeightSlots
from lohan.engine.collectives import GradientReducer
from lohan.engine.lanes import Lanes, wait_all
from lohan.engine.offload import ActivationSpill, DeviceActivationOffload
from lohan.engine.pipeline import Pipeline
from lohan.errors import BudgetError
from lohan.model.layout import Blocks, Group
from lohan.model.plan import Plan
from lohan.model.state import MODES, mode_with
from lohan.optim import Optimizer
from lohan.schedule.actions import DEVICE_BUFFERS, ScheduleSpec
from lohan.schedule.steps import later_of, spec_of
from lohan.store.admin import remove_unfinished
from lohan.store.files import activation_dirs
from lohan.store.store import Store
from lohan.store.transfers import Ticket
from lohan.util.trace import Trace
from lohan.util.units import format_bytes


@dataclass(frozen=True)
class Parts:
    blocks: Blocks
    own: Blocks  # with this rank's piece of every group
    spec: ScheduleSpec
    slots: WeightSlots
    ring: StateRing
    runner: ActionRunner
    lanes: Lanes
    pipeline: Pipeline
    store: Store

    def resident(self) -> list[tuple[Group, torch.Tensor]]:
        """Resident groups with their pinned slots, which hold this rank's pieces."""
        groups, pinned = self.own.groups, self.spec.pinned_weights
        return [
            (self.blocks.groups[number], self.slots.flat(groups[number], self.spec.slots + i))
            for i, number in enumerate(pinned)
            if groups[number].resident
        ]

    @property
    def activations(self) -> ActivationOffload:
        """What activations go through between forward and backward."""
        if self.runner.device is not None:
            return self.runner.device.activation_offload
        return self.runner.activation_spill or ActivationOffload()

    def load_pinned(self) -> None:
        """Fills the pinned slots and buffers from the committed generation."""
        groups = self.own.groups
        tickets: list[Ticket] = []
        for i, number in enumerate(self.spec.pinned_weights):
            tickets += self.slots.read(groups[number], self.spec.slots + i)
        for i, (number, chunk) in enumerate(self.spec.pinned_state):
            tickets.append(self.ring.read(groups[number], chunk, self.spec.ring + i))
        wait_all(self.store, tickets)

    def write_pinned(self) -> None:
        """Brings what lives in host memory to the SSD, where steps do not."""
        groups = self.own.groups
        tickets: list[Ticket] = []
        weights, state = self.spec.pinned_weights, self.spec.pinned_state
        for i, number in enumerate(weights):  # frozen ones have no chunk that could change
            for chunk in range(self.spec.chunks[number]):
                tickets.append(self.slots.write(groups[number], chunk, self.spec.slots + i))
        for i, (number, chunk) in enumerate(state):
            tickets.append(self.ring.write(groups[number], chunk, self.spec.ring + i))
        wait_all(self.store, tickets)

    def close(self) -> None:
        self.lanes.close()
        if self.runner.activation_spill is not None:
            self.runner.activation_spill.close()


def build_parts(
    blocks: Blocks, plan: Plan, *, store: Store, pool: HostPool, optimizer: Optimizer, trace: Trace,
    device: Device, process_group: ProcessGroup | None = None,
) -> Parts:  # fmt: skip
    state_format = mode_with(plan.mode, plan.kind)
    own = blocks if process_group is None else process_group.ranks.shards(blocks)
    spec = spec_of(own, plan, write_pinned=store.durability == "step")
    groups = own.groups
    pinned = [groups[number] for number in spec.pinned_weights]
    slots = WeightSlots(
        store, pool, moving=[g for g in groups if g not in pinned], pinned=pinned,
        slots=spec.slots, state_format=state_format, chunk_params=plan.chunk_params,
    )  # fmt: skip
    ring = StateRing(
        store, pool, ring=spec.ring, largest=max(g.numel for g in own.trained),
        state_format=state_format, pinned=[(groups[n], chunk) for n, chunk in spec.pinned_state],
        chunk_params=plan.chunk_params,
    )  # fmt: skip
    spill = None
    if plan.spilled:
        spill = Spill(store, pool, groups, buffers=spec.ring, chunk_params=plan.chunk_params)
    activation_spill = _activations(blocks, plan, store, pool)
    try:
        on_device = (
            _on_device(device, blocks, plan, spec, activation_spill, process_group)
            if device.has_own_memory
            else None
        )
        runner = ActionRunner(
            groups, store=store, slots=slots, ring=ring, spill=spill,
            activation_spill=activation_spill, optimizer=optimizer, state_format=state_format,
            chunk_params=plan.chunk_params, device=on_device,
        )  # fmt: skip
        lanes = Lanes(
            runner, overlap=plan.overlap, trace=trace, updates_on_caller=not device.has_own_memory,
            device=device, net=spec.net,
        )  # fmt: skip
        pipeline = Pipeline(
            groups=blocks.groups, spec=spec,
            slots=on_device.slots if on_device is not None else slots, runner=runner, lanes=lanes,
            overlap=plan.overlap, mode=plan.grad_offload, later=later_of(blocks, plan),
        )  # fmt: skip
        parts = Parts(blocks, own, spec, slots, ring, runner, lanes, pipeline, store)
        parts.load_pinned()
    except BaseException:
        if activation_spill is not None:
            activation_spill.close()
        raise
    return parts


def _on_device(
    device: Device, blocks: Blocks, plan: Plan, spec: ScheduleSpec,
    activation_spill: ActivationSpill | None, process_group: ProcessGroup | None,
) -> DeviceParts:  # fmt: skip
    waiting = sum(e.bytes for e in plan.ledger if e.owner == "waiting gradients")
    try:
        slots = DeviceSlots(
            device, groups=[group for group in blocks.groups if not group.resident],
            slots=spec.device_slots, state_format=MODES[plan.mode], process_group=process_group,
        )  # fmt: skip
    except torch.OutOfMemoryError as error:
        raise BudgetError(
            f"{device.name}: no room for {spec.device_slots} weight slots, though the plan is for "
            f"{format_bytes(plan.tier_bytes('device'))} ({str(error).splitlines()[0]}); end what "
            "else uses it, or lower --device-memory"
        ) from None
    return DeviceParts(
        slots=slots,
        landing=Landing(device, waiting),
        activation_offload=DeviceActivationOffload(
            device, sites=spec.kept, places=DEVICE_BUFFERS, spill=activation_spill
        ),
        place=device.torch_device,
        exchange=None if process_group is None else GradientReducer(process_group, blocks.groups),
    )


def _activations(
    blocks: Blocks, plan: Plan, store: Store, pool: HostPool
) -> ActivationSpill | None:
    dirs = activation_dirs(store.dirs)
    remove_unfinished(dirs)  # what a killed session could not give back; the store itself is locked
    if not plan.moved_out:
        return None
    numbers = {site.name: number for number, site in enumerate(blocks.sites)}
    sizes = {
        numbers[name]: size for name, size in zip(plan.moved_out, plan.moved_bytes, strict=True)
    }
    return ActivationSpill(dirs, pool, sizes, buffers=plan.act_buffers, engine="auto")
