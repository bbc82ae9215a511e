"""The device interface: memory, copies, events, random state.

A device with a memory of its own says `has_own_memory`: weights, gradients and activations are
copied over the lanes `h2d` and `d2h`. The cpu is not: compute reads host memory in place.

Note [who owns a buffer]
A buffer belongs to one lane at a time and changes lanes only through an event. Lane threads wait
for events on the host: what the schedule calls done has happened, on every lane. Only inside a
block do streams wait for each other, for slices of it that come and go while it runs.

Note [long-lived buffers]
A caching allocator gives memory back to the stream that asked for it, whatever other streams still
do with it. So what another lane reads or writes lies in buffers that live as long as the run, or is
held by its owner until the event has come.
A new buffer may lie where compute still has work on what was there before, so the lanes' streams
wait for what was enqueued on the compute stream by then.

Note [per thread]
Current device and current stream belong to a thread. A lane's thread sets both when it begins;
compute runs on the caller's own current stream, in backward on autograd's device thread, which
takes the stream from forward.

Note [copies never end by themselves]
A non-blocking copy to the host may still run when it returns, to pageable memory too. Nothing
is read before its event.
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


HUGE = 4 * MiB  # buffers from here on ask for huge pages: fewer address look-ups for the kernels

HostMemory = np.ndarray[Any, np.dtype[np.uint8]]


def pages(count: int) -> HostMemory:
    """An anonymous mapping of exactly so many bytes; it goes with its last reference."""
    memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if count >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages: it works as well, a bit slower
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)


# -- Base -----------------------------------------------------------------------------------------


Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]  # (destination, source) of equal size


class Event(Protocol):
    """A point on a lane."""

    def synchronize(self) -> None:
        """Returns when the lane has passed it."""


class Device(Protocol):
    name: str
    has_own_memory: bool
    torch_device: torch.device
    default_dtype: str  # how parameters are kept unless the user says otherwise
    compiles: bool  # blocks may be compiled: results need not have the cpu's bits

    def memory_bytes(self) -> int:
        """What a run may use."""

    def allocate(self, count: int) -> torch.Tensor:
        """A buffer of bytes that lives as long as the tensor."""

    def host_memory(self, count: int) -> HostMemory:
        """Page-aligned, and pinned where that can be had, so that copies go at full speed."""

    def enter(self, lane: str) -> None:
        """The calling thread is this lane's from now on."""

    def copy(self, lane: str, pairs: Pairs, *, after: Event | None = None) -> Event:
        """Copies on a lane behind what it has been given, and behind `after`."""

    def record_stream(self, lane: str, tensors: Sequence[torch.Tensor], event: Event) -> None:
        """Memory of compute that a lane reads until `event`: it is not reused before then, as
        after `torch.Tensor.record_stream`."""

    def mark(self) -> Event:
        """Comes when compute has done what was launched so far."""

    def stamp(self) -> Event | None:
        """A mark that knows when compute passed it; None: this device keeps no time."""

    def elapsed_s(self, first: Any, last: Any) -> float:
        """Between two stamps that have come."""

    def wait(self, event: Event) -> None:
        """Compute that is given from now on runs after the event."""

    def sum_squares(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """One number for all of them, made in its memory on the stream of the calling thread; None:
        only the host has double precision."""

    def computing(self) -> AbstractContextManager[Any]:
        """Around everything that compute does with such buffers."""

    def overhead(self, host_bytes: int) -> dict[str, int]:
        """Bytes of its memory that no buffer accounts for, by owner, in a run that uses so much
        of the host's."""

    def release_cached_memory(self) -> None:
        """Returns unused memory of an allocator."""

    def random_state(self) -> Any: ...
    def set_random_state(self, state: Any) -> None: ...
    def close(self) -> None: ...


class CpuDevice:
    """Compute in host memory: nothing is copied."""

    name, has_own_memory, default_dtype, compiles = "cpu", False, "fp32", False
    torch_device = torch.device("cpu")

    def memory_bytes(self) -> int:
        return 0

    def allocate(self, count: int) -> torch.Tensor:
        raise LohanError("the cpu has no memory of its own")

    def host_memory(self, count: int) -> HostMemory:
        return pages(count)

    def enter(self, lane: str) -> None:
        """Its lanes are threads and nothing else."""

    def copy(self, lane: str, pairs: Pairs, *, after: Event | None = None) -> Event:
        raise LohanError(f"the cpu has no lane {lane}")

    def record_stream(self, lane: str, tensors: Sequence[torch.Tensor], event: Event) -> None:
        """A copy is done by the time it is given."""

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
        """Host memory has no such allocator."""

    def random_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def close(self) -> None:
        """Nothing was opened."""


def sum_squares_on_host(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """In double precision and a fixed order: the same bits for any number of threads."""
    sums = (_core.sum_squares(tensor.contiguous().view(-1)) for tensor in tensors)
    return torch.tensor([math.fsum(sums)], dtype=torch.float64)


class Passed:
    """An event that has come."""

    def synchronize(self) -> None:
        return


def to_device(device: Device, tree: Any) -> Any:
    """Tensors of a batch, wherever they lie, on the device. CUDA reads pageable memory before it
    returns, and holds pinned memory until it has read it: nobody need wait."""
    torch_device, later = device.torch_device, device.torch_device.type == "cuda"
    return torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda t: t.to(torch_device, non_blocking=later), tree
    )


def move_buffers(model: nn.Module, torch_device: torch.device) -> None:
    """Buffers are small and shared by blocks: they stay where compute is."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != torch_device:
                module._buffers[name] = buffer.to(torch_device)


# -- The cpu as a device with a memory of its own, for one of several ranks ------------------------
#
# A rank's host memory holds its shard of the weights, compute needs whole blocks. So ranks have
# weight slots for compute and others for shards, and everything runs through the code of devices
# with a link. Both memories are host memory here: copies are copies of memory, done by the lane
# that asks for them, and both count against the rank's host budget.


class LinkedCpuDevice(CpuDevice):
    """`memory`: the bytes of the host budget that are compute's."""

    has_own_memory = True

    def __init__(self, memory: int = 0) -> None:
        self.memory = memory

    def memory_bytes(self) -> int:
        return self.memory

    def allocate(self, count: int) -> torch.Tensor:
        return torch.from_numpy(self.host_memory(count))

    def copy(self, lane: str, pairs: Pairs, *, after: Event | None = None) -> Event:
        """`after` has come: compute is done by the time it is given."""
        for dst, src in pairs:
            dst.copy_(src)
        return Passed()
