"""The operations of a device that has its own memory: copies over its links, and collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from lohan.device.accelerator import read_back
from lohan.device.out_of_memory import is_out_of_memory
from lohan.engine.buffers import DeviceSlots, WeightSlots
from lohan.engine.collectives import StepCollectives
from lohan.engine.gradient_transport import GradientOffload, GroupGrads, PendingGradients
from lohan.engine.gradients import sum_of_squares
from lohan.engine.offload import ActivationSpill, DeviceActivationOffload
from lohan.errors import BudgetError
from lohan.model.layout import FlatGroup
from lohan.model.plan import Plan
from lohan.model.state import STATE_FORMATS
from lohan.planner.memory import WAITING
from lohan.schedule.actions import DEVICE_BUFFERS, Action, ScheduleSpec
from lohan.schedule.ops import Op
from lohan.schedule.placement import Gate, gate_of
from lohan.util.units import format_bytes

if TYPE_CHECKING:
    from lohan.engine.context import PlanContext


class DeviceOperations:
    """The owner of weight slots on the device, and of transfers of gradients and activations."""

    def __init__(
        self,
        context: PlanContext,
        plan: Plan,
        spec: ScheduleSpec,
        *,
        groups: Sequence[FlatGroup],
        host_slots: WeightSlots,
        pending: PendingGradients,
        collectives: StepCollectives,
        activation_spill: ActivationSpill | None,
    ) -> None:
        device = context.device
        self._groups, self._host_slots, self._pending = groups, host_slots, pending
        self._collectives, self._device = collectives, device
        self._needs_norm = gate_of(plan) is Gate.NORM
        self.slots = _device_slots(context, plan, spec)
        self.activation_offload = DeviceActivationOffload(
            device, sites=spec.offloaded, device_buffers=DEVICE_BUFFERS, spill=activation_spill
        )
        waiting = sum(e.bytes for e in plan.ledger if e.owner == WAITING)
        self.gradient_offload = pending.offload = GradientOffload(
            device, waiting, groups=len(context.blocks.groups)
        )

    def run(self, action: Action) -> None:
        """Run a copy over a link, or a collective, from start to end."""
        self._RUN[action.kind](self, action)

    def _load_weights(self, action: Action) -> None:
        weights = self._host_slots.flat(self._groups[action.index], action.at[0])
        self.slots.load(action.at[1], weights)

    def _all_gather(self, action: Action) -> None:
        self.slots.gather(action.at[0], self._groups[action.index].numel)

    def _reduce_scatter(self, action: Action) -> None:
        number, pending = action.index, self._pending
        # It is empty for ranks without a gradient, which also take part.
        whole = dict(pending.on_device.pop(number, {}))
        shard = self._collectives.reduce_scatter(number, whole, self._device)
        if self._needs_norm:
            pending.squares[number] = self._squares_of(shard)
        if shard:
            pending.on_device[number] = shard

    def _squares_of(self, shard: GroupGrads) -> float:
        """Return the sum of squares of this rank's shard, computed on the net lane."""
        squares = self.gradient_offload.sum_squares(shard)
        if squares is not None:
            return float(read_back(squares))
        return sum_of_squares({index: grad.cpu() for index, grad in shard.items()})

    def _offload_gradients(self, action: Action) -> None:
        number, pending = action.index, self._pending
        grads = pending.on_device.get(number)
        if grads is not None:  # Keep the gradients alive until their copies have arrived.
            squares = pending.squares_on_device.pop(number, None)
            pending.on_host[number] = self.gradient_offload.offload(
                number, self._groups[number], grads, squares=squares
            )
            del pending.on_device[number]

    def _offload_activations(self, action: Action) -> None:
        self.activation_offload.evict(action.index)

    def _restore_activations(self, action: Action) -> None:
        self.activation_offload.bring_back(action.index, action.at)

    _RUN: ClassVar[dict[str, Callable[[DeviceOperations, Action], None]]] = {
        Op.LOAD_WEIGHTS: _load_weights,
        Op.ALL_GATHER: _all_gather,
        Op.REDUCE_SCATTER: _reduce_scatter,
        Op.OFFLOAD_GRADIENTS: _offload_gradients,
        Op.OFFLOAD_ACTIVATIONS: _offload_activations,
        Op.RESTORE_ACTIVATIONS: _restore_activations,
    }


def _device_slots(context: PlanContext, plan: Plan, spec: ScheduleSpec) -> DeviceSlots:
    device = context.device
    try:
        return DeviceSlots(
            device,
            groups=[group for group in context.blocks.groups if not group.resident],
            slots=spec.device_slots,
            state_format=STATE_FORMATS[plan.dtype],
            process_group=context.process_group,
        )
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise BudgetError(
            f"{device.name}: no room for {spec.device_slots} weight slots, though the plan is for "
            f"{format_bytes(plan.tier_bytes('device'))} ({str(error).splitlines()[0]}); end what "
            "else uses it, or lower --device-memory"
        ) from None
