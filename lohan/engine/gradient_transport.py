"""Gradients between backward and update: copied from a device, held in host memory, or spilled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from lohan.device.base import Device, Event
from lohan.engine.buffers import HostPool
from lohan.model.layout import FlatGroup
from lohan.model.state import FLOAT, Chunk, chunks, gradient_key
from lohan.store.io_engine import Buffer
from lohan.store.store import Store
from lohan.store.transfers import Ticket
from lohan.util.units import PAGE, align_up

GroupGrads = Mapping[int, torch.Tensor]  # index of the tensor in its group -> gradient


DOUBLE = 8  # bytes of a number in double precision


class OffloadedGradients(Mapping[int, torch.Tensor]):
    """Gradients in host memory, filled by an asynchronous copy from the device.

    Reading a gradient waits for the copy, on a lane or, for the norm at the end of backward, on the
    caller's thread. `squares` is the sum of the squares of all gradients. The device computes it,
    and it is copied with the gradients.
    """

    def __init__(
        self, grads: GroupGrads, event: Event, squares: torch.Tensor | None = None
    ) -> None:
        self._grads, self.event, self._squares, self._arrived = grads, event, squares, False

    def __getitem__(self, index: int) -> torch.Tensor:
        self.wait()
        return self._grads[index]

    def wait(self) -> None:
        if not self._arrived:
            self.event.synchronize()
            self._arrived = True

    def sum_of_squares(self) -> float | None:
        """Return the sum of squares in double precision, in a fixed order.

        The result is the same on every lane and in every mode. If a device has already computed it,
        its result is returned, so no lane has to read the gradients.
        """
        if self._squares is None:
            return None
        self.wait()
        return float(self._squares)

    def destinations(self) -> Iterable[tuple[int, torch.Tensor]]:
        """Return (index, host tensor) pairs; `wait` until the copy has filled the tensors."""
        return self._grads.items()

    def __iter__(self) -> Iterator[int]:
        return iter(self._grads)

    def __len__(self) -> int:
        return len(self._grads)


class GradientOffload:
    """The copying of gradients from the device into reusable buffers in host memory.

    If the buffers take more than `limit` bytes, unused buffers are freed before a new one is
    allocated. `groups` is the number of groups whose sum of squares is copied with the gradients.
    """

    def __init__(self, device: Device, limit: int, *, groups: int = 0) -> None:
        self._device, self._limit = device, limit
        memory = device.host_memory(max(1, groups) * DOUBLE)
        self._squares = torch.from_numpy(memory).view(torch.float64)
        self._free_buffers: list[torch.Tensor] = []
        self._used_buffers: dict[int, torch.Tensor] = {}  # buffers in use, by number of group
        # buffers for copies that the caller requests, by number of group
        self._caller_buffers: dict[int, torch.Tensor] = {}
        self.aside: dict[
            int, OffloadedGradients
        ] = {}  # gradients that wait for another block to add to them, by number of group

    def sum_squares(self, grads: GroupGrads) -> torch.Tensor | None:
        """Sum the squares of a group's gradients on the device, after the work that computes them.

        Return None if there are no gradients, or if the host must compute the sum.
        """
        return self._device.sum_squares([grads[i] for i in sorted(grads)]) if grads else None

    def offload_async(
        self,
        number: int,
        group: FlatGroup,
        grads: GroupGrads,
        *,
        squares: torch.Tensor | None = None,
    ) -> OffloadedGradients:
        """Copy gradients to the host without blocking, after compute has produced them.

        The copy overwrites the gradients that were copied earlier for this group, so call this only
        after they were used.
        """
        width = max((grad.itemsize for grad in grads.values()), default=0)
        if number not in self._caller_buffers:
            self._caller_buffers[number] = torch.from_numpy(
                self._device.host_memory(group.numel * FLOAT)
            )
        targets = self._placed(self._caller_buffers[number], group, grads, width)
        pairs, summed = self._pairs(number, targets, grads, squares)
        event = self._device.copy("d2h", pairs, after=self._device.mark())
        self._device.record_stream("d2h", [source for _, source in pairs])
        return OffloadedGradients(targets, event, summed)

    def _pairs(
        self, number: int, targets: GroupGrads, grads: GroupGrads, squares: torch.Tensor | None
    ) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor | None]:
        """Return (target, source) pairs to copy, and the target of the sum of squares, if any."""
        pairs = [(targets[index], grad.contiguous()) for index, grad in grads.items()]
        if squares is None:
            return pairs, None
        summed = self._squares[number : number + 1]
        return [*pairs, (summed, squares)], summed

    def set_aside(
        self,
        number: int,
        group: FlatGroup,
        grads: Mapping[int, torch.Tensor],
        *,
        wait: bool = False,
    ) -> None:
        """Copy gradients to host memory in fp32, for a later block that adds to them.

        With `wait`, the call returns when the copies are complete.
        """
        if grads:
            wide = {index: grad.float() for index, grad in grads.items()}
            self.aside[number] = self.offload_async(number, group, wide)
            if wait:
                self.aside[number].wait()

    def fetch_aside(self, number: int) -> dict[int, torch.Tensor]:
        """Return the gradients that were set aside, copied back to the device.

        Sums then continue in the order of the blocks. Compute waits for the copy; the caller does
        not.
        """
        if number not in self.aside:
            return {}
        aside = self.aside.pop(number)
        fetched, pairs = {}, []
        for index, held in aside.destinations():
            flat = self._device.allocate(held.numel() * FLOAT)
            fetched[index] = flat.view(torch.float32).view(held.shape)
            pairs.append((fetched[index], held))
        self._device.wait(self._device.copy("slices", pairs, after=aside.event))
        return fetched

    def offload(
        self,
        number: int,
        group: FlatGroup,
        grads: GroupGrads,
        *,
        squares: torch.Tensor | None = None,
    ) -> OffloadedGradients:
        """Copy a group's gradients to the host, and wait for the copy."""
        width = max((grad.itemsize for grad in grads.values()), default=0)
        targets = self._placed(self._take(number, group.numel * width), group, grads, width)
        pairs, summed = self._pairs(number, targets, grads, squares)
        offloaded = OffloadedGradients(targets, self._device.copy("d2h", pairs), summed)
        offloaded.wait()
        return offloaded

    @staticmethod
    def _placed(
        flat: torch.Tensor, group: FlatGroup, grads: Mapping[int, torch.Tensor], width: int
    ) -> dict[int, torch.Tensor]:
        """Return a view of the buffer for each gradient, with `width` bytes per element."""
        placed = {}
        for index, grad in grads.items():
            start, count = group.tensors[index].offset * width, grad.numel() * grad.itemsize
            placed[index] = flat[start : start + count].view(grad.dtype).view(grad.shape)
        return placed

    def _take(self, number: int, size: int) -> torch.Tensor:
        self.release(number)
        fitting = [i for i, buffer in enumerate(self._free_buffers) if len(buffer) >= size]
        if fitting:
            best = min(fitting, key=lambda i: len(self._free_buffers[i]))
            self._used_buffers[number] = self._free_buffers.pop(best)
        else:
            allocated = sum(map(len, (*self._free_buffers, *self._used_buffers.values())))
            if allocated + size > self._limit:
                self._free_buffers.clear()
            self._used_buffers[number] = torch.from_numpy(self._device.host_memory(max(size, 1)))
        return self._used_buffers[number]

    def release(self, number: int) -> None:
        """Make the buffer of a group's gradients available for other groups."""
        buffer = self._used_buffers.pop(number, None)
        if buffer is not None:
            self._free_buffers.append(buffer)

    def clear(self) -> None:
        self.aside.clear()
        for number in list(self._used_buffers):
            self.release(number)


def widest_dtype(grads: GroupGrads) -> torch.dtype:
    """Return the dtype of all gradients, or fp32 if they differ or there are none."""
    dtypes = {grad.dtype for grad in grads.values()}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def pack_chunk(flat: torch.Tensor, chunk: Chunk, grads: GroupGrads) -> None:
    """Copy the gradients of one chunk of a group into a flat tensor."""
    for own_range in chunk.ranges:
        grad = grads.get(own_range.tensor)
        if grad is not None:
            part = grad.view(-1)[own_range.start : own_range.stop]
            flat[own_range.at : own_range.at + len(part)] = part


class GradientSpill:
    """Held gradients on SSD, and the staging buffers for their transfers.

    They are written chunk by chunk during backward, and read before their update.
    """

    def __init__(
        self,
        store: Store,
        pool: HostPool,
        groups: Sequence[FlatGroup],
        *,
        buffers: int,
        chunk_params: int,
    ) -> None:
        self._store, self._groups = store, groups
        self._chunks = [chunks(group, chunk_params) for group in groups]
        # Frozen groups have no gradients, so no buffer has to hold a chunk of theirs.
        largest = min(chunk_params, max(group.numel for group in groups if not group.frozen))
        self._buffers = [pool.allocate("gradient staging", largest * FLOAT) for _ in range(buffers)]
        self._spilled: dict[int, tuple[torch.dtype, frozenset[int]]] = {}

    def write(
        self, number: int, chunk: int, buffer: int, grads: Mapping[int, torch.Tensor]
    ) -> Ticket:
        """Submit the write of one chunk of a group's gradients, and return its ticket.

        The gradients are packed in their widest dtype.
        """
        dtype = widest_dtype(grads)
        self._spilled[number] = (dtype, frozenset(grads))
        cut = self._chunks[number][chunk]
        pack_chunk(self._buffers[buffer].tensor(dtype), cut, grads)
        data = self._bytes_of(number, chunk, buffer)
        return self._store.write(gradient_key(self._groups[number]), chunk, data)

    def read(self, number: int, chunk: int, buffer: int) -> Ticket:
        data = self._bytes_of(number, chunk, buffer)
        return self._store.read(gradient_key(self._groups[number]), chunk, data)

    def grad(
        self, number: int, buffer: int, tensor: int, at: int, count: int
    ) -> torch.Tensor | None:
        """Return `count` elements of a fetched chunk, or None if `tensor` had no gradient."""
        dtype, present = self._spilled[number]
        return self._buffers[buffer].tensor(dtype)[at : at + count] if tensor in present else None

    def _bytes_of(self, number: int, chunk: int, buffer: int) -> Buffer:
        cut, (dtype, _) = self._chunks[number][chunk], self._spilled[number]
        size = (cut.stop - cut.start) * dtype.itemsize
        return self._buffers[buffer].bytes[: align_up(size, PAGE)]
