"""What a schedule must know of model and plan, and what lies in slots and buffers."""

from __future__ import annotations

from dataclasses import dataclass

DEVICE_BUFFERS = 2  # sites whose kept activations are on their way from or to the device


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a schedule must know of model and plan. Slots and ring buffers from `slots` and `ring`
    upwards are pinned: one group, one chunk each, for the whole run."""

    sites: tuple[tuple[int, ...], ...]  # groups of each site
    chunks: tuple[int, ...]  # state chunks of each group; 0: frozen, its weights are only read
    slots: int
    ring: int
    window: int  # sites whose weights are read ahead
    grads: int  # groups whose gradients may wait for their update
    pinned_weights: tuple[int, ...] = ()  # group of each pinned slot
    pinned_state: tuple[tuple[int, int], ...] = ()  # (group, chunk) of each pinned buffer
    write_pinned: bool = True  # pinned chunks are written through every step
    spilled: frozenset[int] = frozenset()  # groups whose held gradients go to SSD
    moved_out: frozenset[int] = frozenset()  # sites whose kept activations go to SSD
    act_buffers: int = 2  # host buffers for activations on their way from or to SSD
    device_slots: int = 0  # 0: compute reads host memory, there is no link
    device_grads: int = 2  # groups whose gradients are on the device at a time
    kept: frozenset[int] = frozenset()  # sites whose activations travel over the link
    net: bool = False  # ranks gather weights on the device and exchange gradients there


@dataclass(frozen=True)
class Table:
    """What slots and buffers hold, and after which actions each may be overwritten."""

    slots: tuple[int | None, ...]
    slot_free: Free
    ring_free: Free
    stage_free: Free
    act_free: Free
    device: tuple[int | None, ...]
    device_free: Free
    travel_free: Free
    ring_next: int = 0
    stage_next: int = 0
    act_next: int = 0
    travel_next: int = 0


Free = tuple[tuple[str, ...], ...]


def empty_table(shape: Shape) -> Table:
    ring: Free = ((),) * shape.ring
    slots, device = shape.slots, shape.device_slots
    return Table(
        (None,) * slots, ((),) * slots, ring, ring, ((),) * shape.act_buffers,
        (None,) * device, ((),) * device, ((),) * DEVICE_BUFFERS,
    )  # fmt: skip
