"""Host buffers of a step under one budget: weights, optimizer state, gradients, spill."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lohan import _core
from lohan.capture.blocks import dtype_of, split
from lohan.device.base import CpuDevice, Device
from lohan.device.ranks import ProcessGroup
from lohan.errors import BudgetError
from lohan.model.layout import Group, Ranks, TensorSpec
from lohan.model.state import (
    EMA,
    FLOAT,
    Chunk,
    Piece,
    StateFormat,
    chunks,
    gradient_key,
    scale_of,
    state_key,
    weight_key,
)
from lohan.optim import Optimizer
from lohan.store.engine import ALIGN, Buffer
from lohan.store.store import Store
from lohan.store.transfers import Ticket
from lohan.util.units import align_up, format_bytes

# -- Gradients between the block that makes them and the optimizer that consumes them --------------
#
# They never exist for the whole model unless something needs them all (clipping, loss scaling): a
# group's gradients are taken as soon as its last use in backward is done. Tied weights wait from
# their first use in backward to their last.


class GradientSink:
    """Collects gradients by (group, tensor); uses are counted so that the last one is known."""

    def __init__(self) -> None:
        self._grads: dict[str, dict[int, torch.Tensor]] = {}
        self._uses: dict[str, int] = {}

    def expect(self, group: str) -> None:
        self._uses[group] = self._uses.get(group, 0) + 1

    def withdraw(self, group: str) -> bool:
        """One use is over; true if it was the last."""
        self._uses[group] -= 1
        return self._uses[group] == 0

    def add(self, group: str, tensor: int, grad: torch.Tensor, *, wide: bool) -> None:
        """Adds a gradient. `wide` sums in fp32: several 16-bit parts would lose bits."""
        grads = self._grads.setdefault(group, {})
        if tensor in grads:
            grads[tensor].add_(grad)
        else:
            grads[tensor] = grad.float() if wide else grad.contiguous()

    def take(self, group: str) -> dict[int, torch.Tensor]:
        return self._grads.pop(group, {})

    def put(self, group: str, made: dict[int, torch.Tensor], *, factor: float) -> None:
        """Adds gradients that were made ahead of backward, in forward, times `factor`."""
        grads = self._grads.setdefault(group, {})
        for tensor, grad in made.items():
            if factor != 1.0:
                grad.mul_(factor)
            grads[tensor] = grads[tensor].float().add_(grad) if tensor in grads else grad

    def waiting(self) -> list[str]:
        return list(self._grads)

    def uses(self, group: str) -> int:
        return self._uses.get(group, 0)

    def clear(self) -> None:
        self._grads.clear()


class Landing:
    """Host memory for gradients that come from the device: buffers that are used again. `limit`: in
    bytes, what they may take before those at rest are given up for new ones."""

    def __init__(self, device: Device, limit: int) -> None:
        self._device, self._limit = device, limit
        self._resting: list[torch.Tensor] = []
        self._used: dict[int, torch.Tensor] = {}  # by number of group
        self._early: dict[int, torch.Tensor] = {}  # for gradients that get more later, by group
        self._aside: dict[int, dict[int, torch.Tensor]] = {}  # what lies there, by group and tensor

    def set_aside(self, number: int, group: Group, grads: Mapping[int, torch.Tensor]) -> None:
        """Gradients to which another block of this backward adds wait in host memory: the device is
        rid of them when it returns."""
        if not grads:
            return
        if number not in self._early:
            self._early[number] = torch.from_numpy(self._device.host_memory(group.numel * FLOAT))
        there = self._aside[number] = {}
        for index, grad in grads.items():
            start, count = group.tensors[index].offset * FLOAT, grad.numel() * FLOAT
            own = self._early[number][start : start + count].view(torch.float32).view(grad.shape)
            pairs = [(own, grad.float().contiguous())]
            self._device.copy("d2h", pairs, after=self._device.mark()).synchronize()
            there[index] = own

    def take_back(self, number: int) -> dict[int, torch.Tensor]:
        """What was set aside, on the device again: sums go on in the order of the blocks."""
        made = {}
        for index, own in self._aside.pop(number, {}).items():
            flat = self._device.allocate(own.numel() * FLOAT)
            made[index] = flat.view(torch.float32).view(own.shape)
            pairs = [(made[index], own)]
            self._device.copy("h2d", pairs).synchronize()  # Note [long-lived slots]
        return made

    def aside(self) -> dict[int, dict[int, torch.Tensor]]:
        """What waits for a block that adds to it, by group and tensor."""
        return self._aside

    def land(
        self, number: int, group: Group, grads: Mapping[int, torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Copies a group's gradients; they are there when it returns."""
        width = max((grad.itemsize for grad in grads.values()), default=0)
        flat = self._take(number, group.numel * width)
        made = {}
        for index, grad in grads.items():
            start, count = group.tensors[index].offset * width, grad.numel() * grad.itemsize
            made[index] = flat[start : start + count].view(grad.dtype).view(grad.shape)
        pairs = [(made[index], grad.contiguous()) for index, grad in grads.items()]
        self._device.copy("d2h", pairs).synchronize()
        return made

    def _take(self, number: int, size: int) -> torch.Tensor:
        self.give_back(number)
        fitting = [i for i, buffer in enumerate(self._resting) if len(buffer) >= size]
        if fitting:
            best = min(fitting, key=lambda i: len(self._resting[i]))
            self._used[number] = self._resting.pop(best)
        else:
            there = sum(map(len, (*self._resting, *self._used.values())))
            if there + size > self._limit:
                self._resting.clear()
            self._used[number] = torch.from_numpy(self._device.host_memory(max(size, 1)))
        return self._used[number]

    def give_back(self, number: int) -> None:
        """Nobody needs the gradients of a group any more."""
        buffer = self._used.pop(number, None)
        if buffer is not None:
            self._resting.append(buffer)

    def clear(self) -> None:
        self._aside.clear()
        for number in list(self._used):
            self.give_back(number)


def sum_of_squares(grads: Mapping[int, torch.Tensor]) -> float:
    """In double precision and a fixed order: the same on every lane and in every mode."""
    return math.fsum(_core.sum_squares(grads[index].view(-1)) for index in sorted(grads))


# -- Host memory under one hard budget, with a ledger of owners ------------------------------------
#
# Large buffers are page-aligned anonymous mappings of exactly the size asked for. Memory that
# torch allocates itself (gradients, activations inside a block) is reserved here by name, so that
# the ledger holds everything that counts against the budget.


@dataclass(frozen=True)
class HostBuffer:
    """Aligned host memory; `bytes` for the store, `tensor(dtype)` for torch, one memory."""

    owner: str
    bytes: Buffer

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(self.bytes).view(dtype)

    def part(self, start: int, stop: int) -> HostBuffer:
        return HostBuffer(self.owner, self.bytes[start:stop])


class HostPool:
    """Hands out host memory until the budget is used up, then refuses with both numbers."""

    def __init__(self, budget_bytes: int, device: Device | None = None) -> None:
        self.budget_bytes = budget_bytes
        self._device, self._plain = device or CpuDevice(), CpuDevice()
        self.peak_bytes = 0
        self._used: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        return sum(self._used.values())

    def ledger(self) -> dict[str, int]:
        with self._lock:
            return dict(self._used)

    def reserve(self, owner: str, count: int) -> None:
        """Counts memory that somebody else allocates against the budget."""
        with self._lock:
            used = self.used_bytes
            if used + count > self.budget_bytes:
                raise BudgetError(
                    f"host memory: {owner} needs {format_bytes(count)} more, but "
                    f"{format_bytes(used)} of the {format_bytes(self.budget_bytes)} budget are "
                    f"taken; raise --host to at least {format_bytes(used + count)} or lower "
                    "--batch"
                )
            self._used[owner] = self._used.get(owner, 0) + count
            self.peak_bytes = max(self.peak_bytes, used + count)

    def unreserve(self, owner: str, count: int) -> None:
        with self._lock:
            left = self._used[owner] - count
            if left:
                self._used[owner] = left
            else:
                del self._used[owner]

    def allocate(self, owner: str, count: int, *, for_device: bool = False) -> HostBuffer:
        """`for_device`: it is copied to or from the device."""
        if count == 0:
            return HostBuffer(owner, np.empty(0, dtype=np.uint8))
        size = align_up(count, ALIGN)
        self.reserve(owner, size)
        return HostBuffer(owner, (self._device if for_device else self._plain).host_memory(size))

    def free(self, buffer: HostBuffer) -> None:
        """Gives the bytes back to the budget; the mapping goes with its last reference."""
        self.unreserve(buffer.owner, len(buffer.bytes))


# -- Compute weights in slots of host memory and of the device -------------------------------------
#
# Which group lies in which slot when is the schedule's business.


class WeightSlots:
    """Owner of the slots: `slots` that any group may pass through, then one per pinned group."""

    def __init__(
        self, store: Store, pool: HostPool, *, moving: list[Group], pinned: list[Group],
        slots: int, state_format: StateFormat, chunk_params: int,
    ) -> None:  # fmt: skip
        self._store, self._state_format, self._chunk_params = store, state_format, chunk_params
        size = max((group.numel for group in moving), default=0) * state_format.weight_bytes
        self._buffers = [pool.allocate("weight slots", size, for_device=True) for _ in range(slots)]
        self._buffers += [
            pool.allocate(
                "pinned weights", group.numel * state_format.weight_bytes, for_device=True
            )
            for group in pinned
        ]

    def flat(self, group: Group, slot: int) -> torch.Tensor:
        return self._part(slot, 0, group.numel).tensor(dtype_of(self._state_format))

    def read(self, group: Group, slot: int) -> Iterator[Ticket]:
        """Submits reads of the group's newest weights into a slot, one by one."""
        for c in chunks(group, self._chunk_params):
            part = self._part(slot, c.start, c.stop)
            yield self._store.read(weight_key(group), c.index, part.bytes, fresh=None)

    def write(self, group: Group, chunk: int, slot: int) -> Ticket:
        cut = chunks(group, self._chunk_params)[chunk]
        return self._store.write(
            weight_key(group), chunk, self._part(slot, cut.start, cut.stop).bytes
        )

    def _part(self, slot: int, start: int, stop: int) -> HostBuffer:
        width = self._state_format.weight_bytes
        return self._buffers[slot].part(start * width, stop * width)


class DeviceSlots:
    """Slots on the device, each as large as the largest group that passes through. Of several
    ranks, each loads its own piece of a group, and all of them gather the rest."""

    def __init__(
        self, device: Device, *, groups: list[Group], slots: int, state_format: StateFormat,
        process_group: ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        self._device, self._dtype, self._process_group = (
            device,
            dtype_of(state_format),
            process_group,
        )
        self._ranks = process_group.ranks if process_group is not None else Ranks()
        size = max(map(self._ranks.padded, groups), default=0) * state_format.weight_bytes
        self._slots = [device.allocate(size) for _ in range(slots)]

    def flat(self, group: Group, place: int) -> torch.Tensor:
        """A whole group."""
        return self._slots[place].view(self._dtype)[: group.numel]

    def load(self, place: int, piece: torch.Tensor) -> None:
        """This rank's piece of a group is there when it returns."""
        self._device.copy("h2d", [(self._own(place, piece.numel()), piece)]).synchronize()

    def gather(self, place: int, count: int) -> None:
        """The pieces of all ranks, of so many elements each, are there when it returns."""
        assert self._process_group is not None
        whole = self._slots[place].view(self._dtype)[: count * self._ranks.world]
        self._process_group.all_gather_into(whole, self._own(place, count))

    def _own(self, place: int, count: int) -> torch.Tensor:
        start = self._ranks.rank * count
        return self._slots[place].view(self._dtype)[start : start + count]


# -- Optimizer state in a ring of host buffers, and updates of it, chunk by chunk ------------------
#
# Weights are updated in the slot where backward used them, so they are not read a second time. A
# tensor that got no gradient this step keeps weights and state as they are, as in PyTorch.


Grads = Mapping[int, torch.Tensor]  # index of the tensor in its group -> gradient
AVERAGED = 2**16  # parameters at a time, whose average moves
BESIDE = {"fp32": (), "bf16": ("remainder",), "fp16": ("master",)}  # what the weights lack


@dataclass(frozen=True)
class StepScalars:
    """The numbers of one step that every update shares."""

    lr: float
    update: int  # from 1
    grad_scale: float
    missed: Mapping[str, int]  # updates that single parameters have missed, by name


class StateRing:
    """Owner of the state buffers: a ring that chunks pass through, then one per pinned chunk."""

    def __init__(
        self, store: Store, pool: HostPool, *, ring: int, pinned: list[tuple[Group, int]],
        largest: int, state_format: StateFormat, chunk_params: int,
    ) -> None:  # fmt: skip
        self._store, self._state_format, self._chunk_params = store, state_format, chunk_params
        size = state_format.state_size(min(chunk_params, largest))
        self._buffers = [pool.allocate("optimizer state ring", size) for _ in range(ring)]
        self._buffers += [
            pool.allocate("pinned optimizer state", self._size(group, chunk))
            for group, chunk in pinned
        ]

    def _size(self, group: Group, chunk: int) -> int:
        cut = chunks(group, self._chunk_params)[chunk]
        return self._state_format.state_size(cut.stop - cut.start)

    def part(self, group: Group, chunk: int, buffer: int) -> HostBuffer:
        return self._buffers[buffer].part(0, self._size(group, chunk))

    def read(self, group: Group, chunk: int, buffer: int) -> Ticket:
        place = self.part(group, chunk, buffer).bytes
        return self._store.read(state_key(group), chunk, place, fresh=None)

    def write(self, group: Group, chunk: int, buffer: int) -> Ticket:
        return self._store.write(state_key(group), chunk, self.part(group, chunk, buffer).bytes)


def update_chunk(
    group: Group, chunk: Chunk, *, weights: torch.Tensor, state: torch.Tensor,
    grad_of: Callable[[Piece], torch.Tensor | None],
    optimizer: Optimizer, state_format: StateFormat, scalars: StepScalars,
) -> None:  # fmt: skip
    """One update of a chunk, in place: `weights` are its weights, `state` its bytes."""
    arrays = split(state_format, state, chunk.stop - chunk.start)
    kernel: Callable[..., None] = getattr(_core, f"{optimizer.name}_{state_format.name}")
    for piece in chunk.pieces:
        grad = grad_of(piece)
        if grad is None:
            continue
        spec, span = group.tensors[piece.tensor], _span(piece)
        step = scalars.update - scalars.missed.get(spec.name, 0)
        own = {a.name: arrays[a.name][_span(piece, a.per)] for a in state_format.arrays}
        kernel(
            weights[span], *(own[name] for name in BESIDE[state_format.name]),
            *(own[moment.name] for moment in optimizer.moment_specs), grad, lr=scalars.lr,
            weight_decay=optimizer.weight_decay if spec.decay else 0.0,
            grad_scale=scalars.grad_scale, **optimizer.numbers(step),
            **_rounding(spec, piece, step, own, optimizer),
        )  # fmt: skip
    if optimizer.ema:
        _average(weights, arrays, state_format, optimizer.ema)


def _average(
    weights: torch.Tensor,
    arrays: Mapping[str, torch.Tensor],
    state_format: StateFormat,
    decay: float,
) -> None:
    """Moves the average towards the new weights. Every operation rounds once, so an element gets
    the same bits wherever its chunk is cut."""
    for start in range(0, len(weights), AVERAGED):
        span = slice(start, start + AVERAGED)
        master = weights[span]
        if state_format.name == "bf16":
            master = torch.empty(len(master))
            _core.join_bf16(weights[span], arrays["remainder"][span], master)
        elif state_format.name == "fp16":
            master = arrays["master"][span]
        arrays[EMA][span].mul_(decay).add_(master * (1.0 - decay))


def _span(piece: Piece, per: int = 1) -> slice:
    """Where a piece lies in an array of its chunk, `per` parameters to an element."""
    return slice(piece.at // per, -(-(piece.at + piece.stop - piece.start) // per))


def _rounding(
    spec: TensorSpec, piece: Piece, step: int, own: Mapping[str, torch.Tensor],
    optimizer: Optimizer,
) -> dict[str, Any]:  # fmt: skip
    """What the kernel needs to round moments: by chance, and the same for an element and a step
    however its tensor is cut."""
    if optimizer.moments == "fp32":
        return {}
    scales = (
        [own[scale_of(m)] for m in optimizer.moment_specs] if optimizer.moments == "int8" else []
    )
    seed = _core.crc32c(spec.name.encode(), step % 2**32)
    return {"scales": scales, "seed": seed, "first": (spec.begin + piece.start) % 2**32}


# -- Held gradients on SSD -------------------------------------------------------------------------
#
# Put away chunk by chunk after backward, fetched before their update.


WIDTH = 4  # room for fp32; gradients keep their own dtype


class Spill:
    """Owner of the staging buffers."""

    def __init__(
        self, store: Store, pool: HostPool, groups: Sequence[Group], *, buffers: int,
        chunk_params: int,
    ) -> None:  # fmt: skip
        self._store, self._groups = store, groups
        self._chunks = [chunks(group, chunk_params) for group in groups]
        largest = min(chunk_params, max(group.numel for group in groups))
        self._buffers = [pool.allocate("gradient staging", largest * WIDTH) for _ in range(buffers)]
        self._kept: dict[int, tuple[torch.dtype, frozenset[int]]] = {}

    def put(
        self, number: int, chunk: int, buffer: int, grads: Mapping[int, torch.Tensor]
    ) -> Ticket:
        """Packs one chunk of a group's gradients and submits its write."""
        dtype = next(iter(grads.values())).dtype if grads else torch.float32
        self._kept[number] = (dtype, frozenset(grads))
        cut = self._chunks[number][chunk]
        flat = self._buffers[buffer].tensor(dtype)
        for piece in cut.pieces:
            grad = grads.get(piece.tensor)
            if grad is not None:
                part = grad.view(-1)[piece.start : piece.stop]
                flat[piece.at : piece.at + len(part)] = part
        place = self._place(number, chunk, buffer)
        return self._store.write(gradient_key(self._groups[number]), chunk, place)

    def get(self, number: int, chunk: int, buffer: int) -> Ticket:
        place = self._place(number, chunk, buffer)
        return self._store.read(gradient_key(self._groups[number]), chunk, place)

    def grad(
        self, number: int, buffer: int, tensor: int, at: int, count: int
    ) -> torch.Tensor | None:
        """A piece of a fetched chunk, None if the tensor had no gradient."""
        dtype, present = self._kept[number]
        return self._buffers[buffer].tensor(dtype)[at : at + count] if tensor in present else None

    def _place(self, number: int, chunk: int, buffer: int) -> Buffer:
        cut = self._chunks[number][chunk]
        return self._buffers[buffer].bytes[: align_up((cut.stop - cut.start) * WIDTH, ALIGN)]
