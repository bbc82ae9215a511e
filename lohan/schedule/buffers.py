"""The state of weight slots and buffers between two schedules."""

from __future__ import annotations

from dataclasses import dataclass, field

from lohan.schedule.actions import Action, ScheduleSpec
from lohan.schedule.effects import Uses


@dataclass(frozen=True)
class BufferState:
    """The contents and the last uses of slots and buffers between two schedules."""

    slots: tuple[int | None, ...]  # the group in each weight slot in host memory
    device: tuple[int | None, ...]  # the group in each weight slot on the device
    uses: Uses = field(compare=False)  # last uses of every resource by the actions so far
    # The number of buffers taken so far from each ring.
    ring: int = 0  # optimizer state
    stage: int = 0  # held gradients in flight from or to SSD
    acts: int = 0  # activations in flight from or to SSD
    device_acts: int = 0  # activations in flight from or to the device
    # Writes that a forward leaves to the backward after it, followed by the end of the step.
    behind: tuple[Action, ...] = ()


def empty_buffers(spec: ScheduleSpec) -> BufferState:
    """Return the state in which no slot holds weights and all lanes are idle."""
    return BufferState((None,) * spec.slots, (None,) * spec.device_slots, Uses())
