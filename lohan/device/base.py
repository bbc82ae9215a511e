"""The device interface: memory, copies, events and random state.

A device with its own memory sets `has_own_memory`. Weights, gradients and activations are then
copied over the lanes `h2d` and `d2h`. The CPU and GPUs that share its memory compute in host memory
in place.

Note [who owns a buffer]
A buffer belongs to one lane at a time and changes lanes only through an event. Lane threads wait
for events on the host, so an operation that the schedule calls done has completed, on every lane.
One stream waits for another only during the call of a block, whose slices are copied while others
are computed.

Note [long-lived buffers]
A caching allocator reuses memory on the stream that allocated it, even if other streams still use
it. Therefore memory that another lane reads or writes is either in a buffer that lives as long as
the run, or is kept alive by its owner until the event has completed. A new buffer may reuse memory
on which compute still has pending work, so the streams of the lanes wait for the work that is
enqueued on the compute stream at that time.

Note [per thread]
Current device and current stream are properties of a thread. A lane's thread sets both when it
starts. Compute runs on the caller's current stream; in backward it runs on autograd's device
thread, which uses the stream of forward.

Note [a copy ends at its event]
A non-blocking copy to the host may still be running when the call returns, even to pageable memory.
Therefore the destination is not read before the copy's event has completed.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from lohan import _core
from lohan.errors import LohanError
from lohan.util.units import MiB

# -- Host memory that copies to and from a device can reach ----------------------------------------


# Buffers of at least this size use huge pages, because these save address translations in the
# kernels.
HUGE = 4 * MiB

HostMemory = np.ndarray[Any, np.dtype[np.uint8]]


def pages(count: int) -> HostMemory:
    """Return an anonymous mapping of exactly `count` bytes; its last reference unmaps it."""
    memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if count >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # A kernel without huge pages works too, but is slightly slower.
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)


# -- Base -----------------------------------------------------------------------------------------


Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]  # (destination, source), of equal size


class Event(Protocol):
    """A point in the work of a lane."""

    def synchronize(self) -> None:
        """Wait until the lane has passed this point."""


class Device(Protocol):
    name: str
    has_own_memory: bool
    computes_on_cores: bool  # whether compute takes cores from updates and I/O
    torch_device: torch.device
    default_dtype: str  # type of the parameters unless the user chooses another
    compiles: bool  # whether blocks may be compiled; results then need not match the CPU's bits

    def memory_bytes(self) -> int:
        """Return the number of bytes that a run may use."""

    def allocate(self, count: int) -> torch.Tensor:
        """Return a buffer of `count` bytes that lives as long as the tensor."""

    def host_memory(self, count: int) -> HostMemory:
        """Return page-aligned host memory, pinned if possible for full copy speed."""

    def compute_view(self, host: torch.Tensor) -> torch.Tensor:
        """Return a tensor over the same host memory that compute can use.

        Only devices without their own memory provide such a view.
        """

    def enter(self, lane: str) -> None:
        """Make the calling thread the thread of a lane."""

    def copy(self, lane: str, pairs: Pairs, *, after: Event | None = None) -> Event:
        """Enqueue copies on a lane, and return an event that completes with them.

        The copies run after the lane's earlier work and after the event `after`. `pairs` are
        destinations and sources.
        """

    def record_stream(self, lane: str, tensors: Sequence[torch.Tensor]) -> None:
        """Keep the memory of `tensors` from being reused until the lane's enqueued work is done.

        The effect is that of `torch.Tensor.record_stream`.
        """

    def mark(self) -> Event:
        """Return an event that completes when compute has done all work launched so far."""

    def stamp(self) -> Event | None:
        """Return an event of compute that records its time, or None if the device has no timer."""

    def elapsed_s(self, first: Any, last: Any) -> float:
        """Return the seconds between two completed events of `stamp`."""

    def wait(self, event: Event) -> None:
        """Make compute that is launched from here on wait for the event."""

    def sum_squares(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the sum of squares over all tensors, or None if the device lacks fp64.

        The sum is computed in double precision in the device's memory, on the stream of the calling
        thread. None means that only the host has double precision.
        """

    def computing(self) -> AbstractContextManager[Any]:
        """Return a context manager inside which compute may use device buffers."""

    def overhead(self, host_bytes: int) -> dict[str, int]:
        """Return the device memory that no buffer accounts for, in bytes by owner.

        `host_bytes` is the host memory that the run uses.
        """

    def release_cached_memory(self) -> None:
        """Return unused memory of the allocator to the device."""

    def random_state(self) -> Any: ...
    def set_random_state(self, state: Any) -> None: ...
    def close(self) -> None: ...


class CpuDevice:
    """The CPU, which computes in host memory without copies."""

    name, has_own_memory, default_dtype, compiles = "cpu", False, "fp32", False
    computes_on_cores = True
    torch_device = torch.device("cpu")

    def memory_bytes(self) -> int:
        return 0

    def allocate(self, count: int) -> torch.Tensor:
        raise LohanError("the cpu has no memory of its own")

    def host_memory(self, count: int) -> HostMemory:
        return pages(count)

    def compute_view(self, host: torch.Tensor) -> torch.Tensor:
        return host

    def enter(self, lane: str) -> None:
        """Do nothing, because lanes of the CPU are plain threads."""

    def copy(self, lane: str, pairs: Pairs, *, after: Event | None = None) -> Event:
        raise LohanError(f"the cpu has no lane {lane}")

    def record_stream(self, lane: str, tensors: Sequence[torch.Tensor]) -> None:
        """Do nothing, because copies are complete when they return."""

    def mark(self) -> Event:
        return Passed()

    def stamp(self) -> Event | None:
        return None

    def elapsed_s(self, first: Any, last: Any) -> float:
        raise LohanError("the cpu keeps no time")

    def wait(self, event: Event) -> None:
        event.synchronize()

    def sum_squares(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        return sum_squares_on_host(tensors)

    def computing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def overhead(self, host_bytes: int) -> dict[str, int]:
        return {}

    def release_cached_memory(self) -> None:
        """Do nothing, because host memory has no caching allocator."""

    def random_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def close(self) -> None:
        """Do nothing, because the CPU holds no resources."""


def sum_squares_on_host(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares in double precision and in a fixed order.

    The result has the same bits for any number of threads.
    """
    sums = (_core.sum_squares(tensor.contiguous().view(-1)) for tensor in tensors)
    return torch.tensor([math.fsum(sums)], dtype=torch.float64)


class Passed:
    """An event that has completed."""

    def synchronize(self) -> None:
        return


def to_device(device: Device, tree: Any) -> Any:
    """Copy the tensors of a batch to the device.

    CUDA reads pageable memory before it returns, and keeps pinned memory alive until it has been
    read, so no wait is needed.
    """
    torch_device, later = device.torch_device, device.torch_device.type == "cuda"
    return torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda t: t.to(torch_device, non_blocking=later), tree
    )


def move_buffers(model: nn.Module, torch_device: torch.device) -> None:
    """Move the model's buffers to the compute device for the whole run.

    The buffers are small, and blocks share them.
    """
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != torch_device:
                module._buffers[name] = buffer.to(torch_device)


# -- The CPU as a device with its own memory, for one of several ranks -----------------------------
#
# A rank's host memory holds its shard of the weights, while compute needs whole blocks. Therefore
# ranks have separate weight slots for compute and for shards, and use the same code as devices with
# a link. Both memories are host memory here. Copies are plain memory copies by the lane that
# requests them, and both memories count against the rank's host budget.


class LinkedCpuDevice(CpuDevice):
    """The CPU as one of several ranks; `memory` is compute's part of the host budget."""

    has_own_memory = True

    def __init__(self, memory: int = 0) -> None:
        self.memory = memory

    def memory_bytes(self) -> int:
        return self.memory

    def allocate(self, count: int) -> torch.Tensor:
        return torch.from_numpy(self.host_memory(count))

    def copy(self, lane: str, pairs: Pairs, *, after: Event | None = None) -> Event:
        """Copy synchronously, and return a completed event.

        `after` has already completed, because compute on the CPU is synchronous.
        """
        for dst, src in pairs:
            dst.copy_(src)
        return Passed()
