"""The buffers of a step within one host budget: weight slots, and a ring of optimizer state.

Updates process the state in the ring chunk by chunk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lohan import _core
from lohan.capture.blocks import dtype_of, split
from lohan.checkpoint.packed import dequantise
from lohan.device.base import CpuDevice, Device
from lohan.device.ranks import ALONE, ProcessGroup
from lohan.errors import BudgetError
from lohan.model.layout import TENSOR_ALIGN, Blocks, FlatGroup, TensorSpec
from lohan.model.plan import CACHED_STATE, CACHED_WEIGHTS
from lohan.model.state import (
    DEQUANTISED,
    EMA,
    Chunk,
    StateFormat,
    TensorRange,
    chunks,
    dequantised_bytes,
    scale_of,
    state_key,
    weight_key,
)
from lohan.optim import Optimizer
from lohan.param_groups import GroupValues
from lohan.schedule.actions import ScheduleSpec
from lohan.store.io_engine import Buffer
from lohan.store.store import Store
from lohan.store.transfers import Ticket
from lohan.util.units import PAGE, align_up, format_bytes, format_bytes_up

# -- Host memory under one hard budget, with a ledger of owners ------------------------------------
#
# Large buffers are page-aligned anonymous mappings of exactly the requested size. Memory that torch
# allocates itself (gradients, activations inside a block) is reserved here by name, so that the
# ledger holds everything that counts against the budget.


@dataclass(frozen=True)
class HostBuffer:
    """Aligned host memory, as `bytes` for the store and as `tensor(dtype)` for torch."""

    owner: str
    bytes: Buffer

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(self.bytes).view(dtype)

    def part(self, start: int, stop: int) -> HostBuffer:
        return HostBuffer(self.owner, self.bytes[start:stop])


class HostPool:
    """The host memory of the budget, from which buffers are allocated. Exceeding it is an error."""

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
        """Count memory that is allocated elsewhere against the budget."""
        with self._lock:
            used = self.used_bytes
            if used + count > self.budget_bytes:
                raise BudgetError(
                    f"host memory: {owner} needs {format_bytes(count)} more, but "
                    f"{format_bytes(used)} of the {format_bytes(self.budget_bytes)} budget are "
                    f"taken; raise --host to at least {format_bytes_up(used + count)} or lower "
                    "--batch"
                )
            self._used[owner] = self._used.get(owner, 0) + count
            self.peak_bytes = max(self.peak_bytes, used + count)

    def unreserve(self, owner: str, count: int) -> None:
        with self._lock:
            remaining = self._used[owner] - count
            if remaining:
                self._used[owner] = remaining
            else:
                del self._used[owner]

    def allocate(self, owner: str, count: int, *, for_device: bool = False) -> HostBuffer:
        """Allocate a buffer for `owner` of the ledger, and return it.

        `for_device` states that it will be copied to or from the device.
        """
        if count == 0:
            return HostBuffer(owner, np.empty(0, dtype=np.uint8))
        size = align_up(count, PAGE)
        self.reserve(owner, size)
        return HostBuffer(owner, (self._device if for_device else self._plain).host_memory(size))

    def compute_view(self, host: torch.Tensor) -> torch.Tensor:
        """Return a view of memory allocated with `for_device` on which blocks can compute."""
        return self._device.compute_view(host)


# -- Compute weights in slots of host memory and of the device -------------------------------------
#
# The schedule determines which slot holds which group.


class WeightSlots:
    """The weight slots in host memory: `slots` shared slots, and one slot for each cached group."""

    def __init__(
        self,
        store: Store,
        pool: HostPool,
        *,
        moving: list[FlatGroup],
        cached: list[FlatGroup],
        slots: int,
        state_format: StateFormat,
        chunk_params: int,
    ) -> None:
        self._store, self._state_format, self._chunk_params = store, state_format, chunk_params
        size = max((group.numel for group in moving), default=0) * state_format.weight_bytes
        self._buffers = [pool.allocate("weight slots", size, for_device=True) for _ in range(slots)]
        self._buffers += [
            pool.allocate(CACHED_WEIGHTS, group.numel * state_format.weight_bytes, for_device=True)
            for group in cached
        ]

    def flat(self, group: FlatGroup, slot: int) -> torch.Tensor:
        return self._part(slot, 0, group.numel).tensor(dtype_of(self._state_format))

    def read(self, group: FlatGroup, slot: int) -> Iterator[Ticket]:
        """Submit reads of the group's newest weights into a slot, and yield their tickets."""
        for c in chunks(group, self._chunk_params):
            part = self._part(slot, c.start, c.stop)
            yield self._store.read(weight_key(group), c.index, part.bytes, uncommitted=None)

    def read_base(self, group: FlatGroup, chunk: int, slot: int) -> Ticket:
        """Submit a read of one chunk's committed weights into a slot, and return its ticket."""
        cut = chunks(group, self._chunk_params)[chunk]
        part = self._part(slot, cut.start, cut.stop).bytes
        return self._store.read(weight_key(group), chunk, part)

    def write(self, group: FlatGroup, chunk: int, slot: int, *, crc: int | None = None) -> Ticket:
        cut = chunks(group, self._chunk_params)[chunk]
        part = self._part(slot, cut.start, cut.stop).bytes
        return self._store.write(weight_key(group), chunk, part, crc=crc)

    def _part(self, slot: int, start: int, stop: int) -> HostBuffer:
        width = self._state_format.weight_bytes
        return self._buffers[slot].part(start * width, stop * width)


class SharedSlots:
    """The weight slots in host memory, for compute on a device without its own memory."""

    def __init__(self, slots: WeightSlots, pool: HostPool) -> None:
        self._slots, self._pool = slots, pool

    def flat(self, group: FlatGroup, slot: int) -> torch.Tensor:
        return self._pool.compute_view(self._slots.flat(group, slot))


class DeviceSlots:
    """Weight slots on the device. Each slot has the size of the largest group that is loaded there.

    With several ranks, each rank loads its own shard of a group, and all ranks gather all shards.
    """

    def __init__(
        self,
        device: Device,
        *,
        groups: list[FlatGroup],
        slots: int,
        state_format: StateFormat,
        process_group: ProcessGroup = ALONE,
    ) -> None:
        self._device, self._dtype = device, dtype_of(state_format)
        self._process_group, self._ranks = process_group, process_group.ranks
        size = max(map(self._ranks.padded, groups), default=0) * state_format.weight_bytes
        self._slots = [device.allocate(size) for _ in range(slots)]

    def flat(self, group: FlatGroup, slot: int) -> torch.Tensor:
        """Return the weights of a whole group as one flat tensor."""
        return self._slots[slot].view(self._dtype)[: group.numel]

    def load(self, slot: int, shard: torch.Tensor) -> None:
        """Copy this rank's shard of a group into the slot, and wait for the copy."""
        self._device.copy("h2d", [(self._own_shard(slot, shard.numel()), shard)]).synchronize()

    def gather(self, slot: int, count: int) -> None:
        """Gather the shards of all ranks, of `count` elements each, and wait for them."""
        whole = self._slots[slot].view(self._dtype)[: count * self._ranks.world]
        self._process_group.all_gather_into(whole, self._own_shard(slot, count))

    def _own_shard(self, slot: int, count: int) -> torch.Tensor:
        start = self._ranks.rank * count
        return self._slots[slot].view(self._dtype)[start : start + count]


class Dequantised:
    """Memory for the tensors that a call uses instead of packed weights.

    Packed weights are frozen, so the tensors of the previous call are reused if the next call needs
    the same groups.
    """

    def __init__(self, blocks: Blocks, pool: HostPool, device: Device, dtype: torch.dtype) -> None:
        size = dequantised_bytes(blocks, dtype.itemsize)
        self._flat = torch.empty(0, dtype=dtype)
        if size and device.has_own_memory:
            self._flat = device.allocate(size).view(dtype)
        elif size:
            memory = pool.allocate(DEQUANTISED, size, for_device=True).tensor(dtype)
            self._flat = pool.compute_view(memory)
        # keys of the groups whose dequantised values `_flat` holds
        self._filled_for: list[str] = []

    def views(
        self, flats: Sequence[tuple[FlatGroup, torch.Tensor]], *, nested: bool
    ) -> dict[str, list[torch.Tensor]]:
        """Return the parameters of packed groups, given the slots that hold them.

        With `nested`, a temporary buffer is used, because an outer call still uses the memory.
        """
        if nested:
            return self._tensors(torch.empty_like(self._flat), flats, fill=True)
        keys = [group.key for group, _ in flats]
        fill = keys != self._filled_for
        self._filled_for = []  # This stays empty if dequantising fails half-way.
        tensors = self._tensors(self._flat, flats, fill=fill)
        self._filled_for = keys
        return tensors

    @staticmethod
    def _tensors(
        memory: torch.Tensor, flats: Sequence[tuple[FlatGroup, torch.Tensor]], *, fill: bool
    ) -> dict[str, list[torch.Tensor]]:
        """Return views of `memory` for packed tensors, and views of the slot for all others.

        With `fill`, the packed tensors are dequantised into `memory`. The views are not cached,
        because a group may be in another slot in each call.
        """
        at, tensors = 0, dict[str, list[torch.Tensor]]()
        for group, flat in flats:
            tensors[group.key] = []
            for spec in group.tensors:
                values = flat[spec.offset : spec.offset + spec.numel]
                if spec.packing:
                    out = memory[at : at + spec.parameters]
                    if fill:
                        dequantise(values, spec.packing, spec.shape, out)
                    values, at = out, align_up(at + spec.parameters, TENSOR_ALIGN)
                tensors[group.key].append(values.view(spec.shape))
        return tensors


# -- Optimizer state in a ring of host buffers, and its updates, chunk by chunk --------------------
#
# An update in backward uses the weights in the slot that backward used; a later update may have to
# read the weights again. A tensor without a gradient in this step keeps its weights and state, as
# in PyTorch. Its moving average still changes.


AVERAGED_PARAMETERS = 2**16  # The moving average is computed for this many parameters at a time.
# The arrays that, together with the weights, contain the master weights.
MASTER_ARRAYS = {"fp32": (), "bf16": ("remainder",), "fp16": ("master",)}


@dataclass(frozen=True)
class ChunkChecksums:
    """The CRC-32C of a chunk's weights and of its state after an update."""

    weights: int
    state: int


@dataclass(frozen=True)
class StepScalars:
    """The numbers that the updates of one step need, even if they run during a later step."""

    groups: GroupValues  # learning rate and other hyper-parameters, by parameter group
    update: int  # counted from 1
    grad_multiplier: float
    # the number of updates in which each parameter had no gradient
    missed_updates: Mapping[str, int]


class StateRing:
    """The state buffers: a ring that chunks pass through, and one buffer for each cached chunk."""

    def __init__(
        self,
        store: Store,
        pool: HostPool,
        *,
        ring: int,
        cached: list[tuple[FlatGroup, int]],
        largest: int,
        state_format: StateFormat,
        chunk_params: int,
    ) -> None:
        self._store, self._state_format, self._chunk_params = store, state_format, chunk_params
        size = state_format.state_size(min(chunk_params, largest))
        self._buffers = [pool.allocate("optimizer state ring", size) for _ in range(ring)]
        self._buffers += [
            pool.allocate(CACHED_STATE, self._size(group, chunk)) for group, chunk in cached
        ]

    def _size(self, group: FlatGroup, chunk: int) -> int:
        cut = chunks(group, self._chunk_params)[chunk]
        return self._state_format.state_size(cut.stop - cut.start)

    def part(self, group: FlatGroup, chunk: int, buffer: int) -> HostBuffer:
        return self._buffers[buffer].part(0, self._size(group, chunk))

    def read(self, group: FlatGroup, chunk: int, buffer: int) -> Ticket:
        data = self.part(group, chunk, buffer).bytes
        return self._store.read(state_key(group), chunk, data, uncommitted=None)

    def write(self, group: FlatGroup, chunk: int, buffer: int, *, crc: int | None = None) -> Ticket:
        part = self.part(group, chunk, buffer).bytes
        return self._store.write(state_key(group), chunk, part, crc=crc)


def update_chunk(
    group: FlatGroup,
    chunk: Chunk,
    *,
    weights: torch.Tensor,
    state: torch.Tensor,
    grad_of: Callable[[TensorRange], torch.Tensor | None],
    state_format: StateFormat,
    scalars: StepScalars,
) -> ChunkChecksums:
    """Update a chunk in place, given its weights and the bytes of its state.

    Each tensor takes one kernel call with the hyper-parameters of its group. The kernel also
    computes the checksums of what it writes. The checksums of padding and of tensors without a
    gradient are computed afterwards.
    """
    arrays = split(state_format, state, chunk.stop - chunk.start)
    # All groups have the same update rule and kind of state.
    optimizer = scalars.groups.optimizers[0]
    kernel: Callable[..., list[int]] = getattr(_core, f"{optimizer.name}_{state_format.name}")
    moments = [moment.name for moment in optimizer.moment_specs]
    scales = [scale_of(m) for m in optimizer.moment_specs] if optimizer.moments == "int8" else []
    masters, checksums = MASTER_ARRAYS[state_format.name], list[tuple[torch.Tensor, int]]()
    for own_range in chunk.ranges:
        grad = grad_of(own_range)
        if grad is None:
            continue
        spec, span = group.tensors[own_range.tensor], _span(own_range)
        step = scalars.update - scalars.missed_updates.get(spec.name, 0)
        parts = {a.name: arrays[a.name][_span(own_range, a.per)] for a in state_format.arrays}
        written = [weights[span], *(parts[name] for name in (*masters, *moments))]
        lr, hyper = scalars.groups.of(spec.name)
        new_checksums = kernel(
            *written,
            grad,
            lr=lr,
            weight_decay=hyper.weight_decay,
            grad_scale=scalars.grad_multiplier,
            checksums=True,
            **hyper.numbers(step),
            **_rounding(spec, own_range, step, [parts[name] for name in scales], optimizer),
        )
        written += [parts[name] for name in scales]
        checksums += zip(written, new_checksums, strict=True)
    if optimizer.ema:
        checksums.append((arrays[EMA], _average(weights, arrays, state_format, optimizer.ema)))
    return ChunkChecksums(_checksum(weights, checksums), _checksum(state, checksums))


@dataclass(frozen=True)
class Update:
    """One of several updates of a chunk: the numbers of its step, and its gradients."""

    scalars: StepScalars
    grad_of: Callable[[TensorRange], torch.Tensor | None]


def replay_chunk(
    group: FlatGroup,
    chunk: Chunk,
    *,
    weights: torch.Tensor,
    state: torch.Tensor,
    updates: Sequence[Update],
    state_format: StateFormat,
) -> ChunkChecksums:
    """Apply the updates of consecutive steps to a chunk, in place and in one pass over memory.

    The result is the same, bit for bit, as that of one call of `update_chunk` for each step. A
    moving average depends on the weights after every step, so with one, every step is a separate
    pass.
    """
    if len(updates) == 1 or state_format.kind.ema:
        for update in updates:
            chunk_checksums = update_chunk(
                group,
                chunk,
                weights=weights,
                state=state,
                grad_of=update.grad_of,
                state_format=state_format,
                scalars=update.scalars,
            )
        return chunk_checksums
    arrays = split(state_format, state, chunk.stop - chunk.start)
    optimizer = updates[0].scalars.groups.optimizers[0]
    name = f"{optimizer.name}_{state_format.name}_updates"
    kernel: Callable[..., list[int]] = getattr(_core, name)
    moments = [moment.name for moment in optimizer.moment_specs]
    scales = [scale_of(m) for m in optimizer.moment_specs] if optimizer.moments == "int8" else []
    masters, checksums = MASTER_ARRAYS[state_format.name], list[tuple[torch.Tensor, int]]()
    for own_range in chunk.ranges:
        spec, span = group.tensors[own_range.tensor], _span(own_range)
        gradients, numbers, first = list[torch.Tensor](), list[dict[str, Any]](), 0
        for update in updates:
            grad, scalars = update.grad_of(own_range), update.scalars
            if grad is None:
                continue
            step = scalars.update - scalars.missed_updates.get(spec.name, 0)
            lr, hyper = scalars.groups.of(spec.name)
            rounding = _rounding(spec, own_range, step, [], hyper)
            first = rounding.get("first", 0)
            gradients.append(grad)
            numbers.append(
                hyper.numbers(step)
                | {"lr": lr, "weight_decay": hyper.weight_decay, "seed": rounding.get("seed", 0)}
                | {"grad_scale": scalars.grad_multiplier}
            )
        if not gradients:
            continue
        parts = {a.name: arrays[a.name][_span(own_range, a.per)] for a in state_format.arrays}
        written = [weights[span], *(parts[name] for name in (*masters, *moments))]
        new_checksums = kernel(
            *written,
            gradients,
            updates=numbers,
            scales=[parts[name] for name in scales],
            first=first,
            checksums=True,
        )
        written += [parts[name] for name in scales]
        checksums += zip(written, new_checksums, strict=True)
    return ChunkChecksums(_checksum(weights, checksums), _checksum(state, checksums))


def _checksum(flat: torch.Tensor, checksums: Sequence[tuple[torch.Tensor, int]]) -> int:
    """Return the checksum of a flat buffer from the known checksums of its arrays."""
    first, size = flat.data_ptr(), flat.numel() * flat.itemsize
    starts = [
        (array.data_ptr() - first, array.numel() * array.itemsize, crc) for array, crc in checksums
    ]
    parts = sorted((at, at + count, crc) for at, count, crc in starts if 0 <= at < size)
    return _core.crc32c_around(flat.view(torch.uint8), parts)


def _average(
    weights: torch.Tensor,
    arrays: Mapping[str, torch.Tensor],
    state_format: StateFormat,
    decay: float,
) -> int:
    """Update the moving average with the new weights, and return the checksum of the average.

    Every operation rounds once, so the bits of an element do not depend on how chunks are cut.
    """
    crc = 0
    for start in range(0, len(weights), AVERAGED_PARAMETERS):
        span = slice(start, start + AVERAGED_PARAMETERS)
        master = weights[span]
        if state_format.name == "bf16":
            master = torch.empty(len(master))
            _core.join_bf16(weights[span], arrays["remainder"][span], master)
        elif state_format.name == "fp16":
            master = arrays["master"][span]
        moved = arrays[EMA][span].mul_(decay).add_(master * (1.0 - decay))
        crc = _core.crc32c(moved.view(torch.uint8), crc)
    return crc


def _span(own_range: TensorRange, per: int = 1) -> slice:
    """Return the slice that a range of a chunk occupies in an array of the chunk.

    The array has one element per `per` parameters.
    """
    return slice(own_range.at // per, -(-(own_range.at + own_range.stop - own_range.start) // per))


def _rounding(
    spec: TensorSpec,
    own_range: TensorRange,
    step: int,
    scales: list[torch.Tensor],
    optimizer: Optimizer,
) -> dict[str, Any]:
    """Return the kernel's arguments for stochastic rounding of moments.

    The random numbers depend on the element and the step, not on how the tensor is cut.
    """
    if optimizer.moments == "fp32":
        return {}
    seed = _core.crc32c(spec.name.encode(), step % 2**32)
    return {"scales": scales, "seed": seed, "first": (spec.begin + own_range.start) % 2**32}


# -- Weights and optimizer state that stay in host memory ------------------------------------------


class HostCache:
    """The slots and buffers that cache weights and state, numbered after the shared ones."""

    def __init__(
        self,
        spec: ScheduleSpec,
        groups: Sequence[FlatGroup],
        *,
        store: Store,
        slots: WeightSlots,
        ring: StateRing,
    ) -> None:
        self._spec, self._groups, self._store = spec, groups, store
        self._slots, self._ring = slots, ring

    def resident(self) -> list[tuple[int, torch.Tensor]]:
        """Return (number of the group, slot with this rank's shard) for each resident group."""
        return [
            (number, self._slots.flat(self._groups[number], self._spec.slots + i))
            for i, number in enumerate(self._spec.host_cached_weights)
            if self._groups[number].resident
        ]

    def load(self, *, trained: bool = False) -> None:
        """Fill the cache from the committed generation; with `trained`, only trained groups."""
        tickets: list[Ticket] = []
        for i, number in enumerate(self._spec.host_cached_weights):
            if trained and not self._spec.chunks[number]:
                continue
            tickets += self._slots.read(self._groups[number], self._spec.slots + i)
        for i, (number, chunk) in enumerate(self._spec.host_cached_state):
            tickets.append(self._ring.read(self._groups[number], chunk, self._spec.ring + i))
        self._store.wait_all(tickets)

    def write_back(self) -> None:
        """Write all cached chunks to SSD; steps between two commits change them only in memory."""
        tickets: list[Ticket] = []
        for i, number in enumerate(self._spec.host_cached_weights):
            slot = self._spec.slots + i
            for chunk in range(self._spec.chunks[number]):  # Frozen groups have no chunks.
                tickets.append(self._slots.write(self._groups[number], chunk, slot))
        for i, (number, chunk) in enumerate(self._spec.host_cached_state):
            tickets.append(self._ring.write(self._groups[number], chunk, self._spec.ring + i))
        self._store.wait_all(tickets)
