"""An emulated device: memory of a given size, a link of a given speed, and threads for lanes.

It uses the code of the accelerator backend and replaces only what torch would provide. Device
memory is host memory, so results have the CPU's bits if no wait is missing. Missing waits show as
NaN or as errors:

* A copy fills its destination with NaN when it starts, and with the values when it ends.
* If a source on the device was freed before the copy reached it, the NaN stays.
* Compute and a copy that use the same memory at the same time raise an error.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lohan.device.accelerator import AcceleratorDevice
from lohan.device.base import Event, HostMemory, Pairs, pages, sum_squares_on_host
from lohan.errors import LohanError
from lohan.util.units import format_bytes

# -- Streams and events of the emulated device -----------------------------------------------------
#
# A stream executes the work enqueued on it later, in order. The classes have the method names of
# torch.Stream and torch.Event.


STALL_S = 600.0  # longest wait for an event, the same as for lanes


class EmulatedEvent:
    """An event that completes when its stream reaches it, with the stream's error if any."""

    def __init__(self) -> None:
        self._come = threading.Event()
        self._error: BaseException | None = None

    def come(self, error: BaseException | None = None) -> None:
        self._error = error
        self._come.set()

    @property
    def passed(self) -> bool:
        return self._come.is_set()

    def synchronize(self) -> None:
        if not self._come.wait(STALL_S):
            raise LohanError(
                f"an event of the emulated device has not completed for {STALL_S:.0f} s; a "
                "stream hangs: stop the run and resume it"
            )
        if self._error is not None:
            raise self._error


class EmulatedStream:
    """A thread that executes enqueued work in order.

    After an error, the next event completes with that error, so that no wait lasts forever.
    """

    def __init__(self, name: str) -> None:
        self._queued: deque[Callable[[], None]] = deque()
        self._change = threading.Condition()
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"emulated-{name}", daemon=True)
        self._thread.start()

    def give(self, work: Callable[[], None]) -> None:
        with self._change:
            self._queued.append(work)
            self._change.notify()

    def record_event(self, event: EmulatedEvent | None = None) -> EmulatedEvent:
        recorded = event or EmulatedEvent()
        self.give(lambda: self._pass(recorded))
        return recorded

    def wait_event(self, event: EmulatedEvent) -> None:
        self.give(event.synchronize)

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._change.notify()
        self._thread.join(STALL_S)

    def _pass(self, event: EmulatedEvent) -> None:
        error, self._error = self._error, None
        event.come(error)

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._queued or self._closed)
                if not self._queued:
                    return
                work = self._queued.popleft()
            try:
                work()
            except BaseException as error:
                self._error = self._error or error


class Link:
    """One direction of the link, with a rate in bytes/s, or None for no limit."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._free_s = 0.0
        self._lock = threading.Lock()  # two streams share the direction to the device

    def pass_through(self, count: int) -> None:
        """Sleep until `count` bytes have been transferred, after the bytes of other streams.

        Time lost by sleeping too long, up to 2 ms, is credited to the following bytes.
        """
        if self._rate is None:
            return
        with self._lock:
            now = time.perf_counter()
            self._free_s = max(self._free_s, now - 0.002) + count / self._rate
            until_s = self._free_s
        if until_s > now:
            time.sleep(until_s - now)


# -- Memory accounting and race detection, for every operation of an emulated device ---------------
#
# Compute of the emulated device is complete when its call returns, but its event completes later. A
# copy that does not wait for that event would find correct values here, while a real device would
# not have computed them yet. Therefore each storage records the last span of compute that read or
# wrote it, and a copy before the event of that span is an error. It is also an error if compute
# uses the destination of a pending copy, or changes the source of a pending copy.


@dataclass
class ComputeSpan:
    """The compute between two marks."""

    event: EmulatedEvent = field(default_factory=EmulatedEvent)
    flops: float = 0.0
    begun_s: float = 0.0


@dataclass
class _Tracked:
    size: int
    read: ComputeSpan | None = None
    written: ComputeSpan | None = None
    coming: int = 0  # number of pending copies to this storage
    leaving: int = 0  # number of pending copies from this storage


class Memory:
    """The storages of a device: their bytes, and the compute and copies that use them."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.live = self.peak = 0
        self.span = ComputeSpan()
        self._storages: dict[int, _Tracked] = {}
        # reentrant, because a storage may be freed while another is added
        self._lock = threading.RLock()

    def add(self, storage: torch.UntypedStorage, *, by_compute: bool) -> None:
        """Count a new storage until it is freed.

        `by_compute` is True if compute created it.
        """
        key, size = storage._cdata, storage.nbytes()
        with self._lock:
            if key in self._storages:
                return
            if self.live + size > self.budget:
                raise torch.OutOfMemoryError(
                    f"emulated device out of memory: tried to allocate {format_bytes(size)}, "
                    f"{format_bytes(self.live)} of {format_bytes(self.budget)} are in use"
                )
            self.live += size
            self.peak = max(self.peak, self.live)
            self._storages[key] = _Tracked(size, written=self.span if by_compute else None)
        weakref.finalize(storage, self._dead, key)

    def add_host(self, memory: HostMemory) -> None:
        """Count host memory until it is freed, for a device that computes there."""
        with self._lock:
            self.live += memory.nbytes
            self.peak = max(self.peak, self.live)
        weakref.finalize(memory, self._host_freed, memory.nbytes)

    def _host_freed(self, count: int) -> None:
        with self._lock:
            self.live -= count

    def _dead(self, key: int) -> None:
        with self._lock:
            self.live -= self._storages.pop(key).size

    def touched(self, key: int, *, write: bool) -> None:
        """Record that compute uses a storage, or raise an error if a copy is pending."""
        storage = self._storages.get(key)
        if storage is None:
            return
        if storage.coming or (write and storage.leaving):
            raise _race("compute", "overwrites" if write else "reads", storage.size, "a copy")
        if write:
            storage.written = self.span
        else:
            storage.read = self.span

    def count_copy(self, key: int, *, write: bool, more: int = 1) -> None:
        """Count a pending copy to or from a storage; with `more=-1`, count it as done.

        `write` is True if the storage is the destination of the copy.
        """
        with self._lock:
            block = self._storages.get(key)
            if block is not None and write:
                block.coming += more
            elif block is not None:
                block.leaving += more

    def check_copy(self, key: int, *, write: bool) -> None:
        """Raise an error if compute may still write the storage that a copy reads.

        If the copy writes the storage, compute must not use it at all.
        """
        block = self._storages.get(key)
        if block is None:
            return
        spans = (block.written, block.read) if write else (block.written,)
        if any(span is not None and not span.event.passed for span in spans):
            raise _race("a copy", "overwrites" if write else "reads", block.size, "compute")


def _race(who: str, does: str, size: int, other: str) -> LohanError:
    return LohanError(
        f"race on the emulated device: {who} {does} {format_bytes(size)} that {other} has not "
        "finished with; an event was not waited for"
    )


class RaceDetector(TorchDispatchMode):
    """A dispatch mode that reports every operation to the memory."""

    supports_higher_order_operators = True

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, memory = kwargs or {}, self._memory
        memory.span.begun_s = memory.span.begun_s or time.perf_counter()
        out = func(*args, **kwargs)
        changed = _changed(func, args)
        argument_keys = set()
        for tensor in _real(args, kwargs):
            key = tensor.untyped_storage()._cdata
            argument_keys.add(key)
            memory.touched(key, write=tensor is changed)
        for tensor in _real(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in argument_keys:  # skip views of the arguments
                memory.add(storage, by_compute=True)
        count = flop_registry.get(getattr(func, "overloadpacket", None))
        if count is not None:
            memory.span.flops += count(*args, **kwargs, out_val=out)
        return out


def _real(*trees: Any) -> list[torch.Tensor]:
    return [
        leaf
        for leaf in pytree.tree_leaves(trees)
        if isinstance(leaf, torch.Tensor)
        and leaf.device.type == "cpu"
        and not isinstance(leaf, FakeTensor)
    ]


def _changed(func: Any, args: tuple[Any, ...]) -> Any:
    """Return the first argument if the operation changes it in place, otherwise None."""
    schema = getattr(func, "_schema", None)
    return args[0] if schema is not None and schema.is_mutable and args else None


# -- Emulated -------------------------------------------------------------------------------------


POISON = 0xFF  # bytes that are NaN in every float type


class EmulatedDevice(AcceleratorDevice):
    """An emulated accelerator with `memory` bytes.

    `h2d` and `d2h` are in bytes/s and `flops` in FLOP/s; None means no limit. `pinnable` is the
    number of bytes of host memory that can be pinned.
    """

    compiles = False

    def __init__(
        self,
        memory: int,
        *,
        h2d: float | None = None,
        d2h: float | None = None,
        flops: float | None = None,
        pinnable: int | None = None,
    ) -> None:
        self.name, self.default_dtype = "emulated", "fp32"
        self.torch_device = torch.device("cpu")
        self.memory = Memory(memory)
        self.rates = {"h2d": h2d, "d2h": d2h, "flops": flops}
        self._pinnable, self._pins_failed = pinnable, False
        to_device = Link(h2d)
        self._links = {"h2d": to_device, "slices": to_device, "d2h": Link(d2h)}
        self._streams = {lane: EmulatedStream(lane) for lane in self._links}
        self._compute_stream = _ComputeStream(self)
        self.delay: Callable[[str], None] = lambda lane: None  # tests delay streams at random

    def memory_bytes(self) -> int:
        return self.memory.budget

    def allocate(self, count: int) -> torch.Tensor:
        buffer = torch.full((count,), POISON, dtype=torch.uint8)
        self.memory.add(buffer.untyped_storage(), by_compute=False)
        return buffer

    def enter(self, lane: str) -> None:
        """Do nothing, because the streams have their own threads."""

    def record_stream(self, lane: str, tensors: Sequence[torch.Tensor]) -> None:
        """Keep the memory of `tensors` from being reused before the lane has read it.

        The net lane has no stream here: its work is complete when its calls return.
        """
        if lane in self._streams:
            super().record_stream(lane, tensors)

    def sum_squares(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the sum of squares with the bits of the CPU."""
        return sum_squares_on_host(tensors)

    def computing(self) -> AbstractContextManager[Any]:
        return RaceDetector(self.memory)

    def overhead(self, host_bytes: int) -> dict[str, int]:
        """Return an empty mapping, because every byte of the memory is counted."""
        return {}

    def release_cached_memory(self) -> None:
        """Do nothing, because memory is not cached."""

    def _compute(self) -> Any:
        return self._compute_stream

    def _current(self, stream: Any) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()

    def _copy_one(self, lane: str, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Enqueue one copy, without keeping the device's memory alive."""
        to_device = lane != "d2h"
        on_device, host = (dst, src) if to_device else (src, dst)
        weak = StorageWeakRef(on_device.untyped_storage())
        start, count = (
            on_device.storage_offset() * on_device.itemsize,
            on_device.numel() * on_device.itemsize,
        )
        host_bytes = host.view(-1).view(torch.uint8)

        def work() -> None:
            self.delay(lane)
            try:
                self.memory.check_copy(weak.cdata, write=to_device)
                move()
            finally:
                self.memory.count_copy(weak.cdata, write=to_device, more=-1)

        def move() -> None:
            storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
            device_bytes = None
            if storage is not None:
                device_bytes = torch.empty(0, dtype=torch.uint8).set_(
                    storage, start, (count,), (1,)
                )
            target, source = (device_bytes, host_bytes) if to_device else (host_bytes, device_bytes)
            if target is not None:
                target.fill_(POISON)
            self._links[lane].pass_through(count)
            if target is not None and source is not None:
                target.copy_(source)

        self.memory.count_copy(weak.cdata, write=to_device)
        self._streams[lane].give(work)

    def _pinned(self, count: int) -> HostMemory:
        if self._pinnable is not None:
            if count > self._pinnable:
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            self._pinnable -= count
        return pages(count)

    def random_state(self) -> Any:
        return torch.get_rng_state()

    def set_random_state(self, state: Any) -> None:
        torch.set_rng_state(state)

    def close(self) -> None:
        for stream in (*self._streams.values(), self._compute_stream.stream):
            stream.close()


UNIFIED_NAME = "emulated-unified"


class UnifiedDevice(EmulatedDevice):
    """An emulated accelerator that computes in host memory, like the GPU of a DGX Spark.

    It has no link and no weight slots of its own: compute reads the slots of the host. Events of
    compute complete later than its calls return, as on the emulated accelerator. `memory.peak`
    includes the buffers of the host and the memory that compute allocates.
    """

    def __init__(self, *, flops: float | None = None) -> None:
        super().__init__(sys.maxsize, flops=flops)
        self.name, self.has_own_memory = UNIFIED_NAME, False

    def memory_bytes(self) -> int:
        """Return 0, because the device has no memory besides the host's."""
        return 0

    def allocate(self, count: int) -> torch.Tensor:
        raise LohanError(f"{self.name} has no memory of its own")

    def copy(self, lane: str, pairs: Pairs, *, after: Event | None = None) -> Event:
        raise LohanError(f"{self.name} has no lane {lane}")

    def compute_view(self, host: torch.Tensor) -> torch.Tensor:
        return host

    def host_memory(self, count: int) -> HostMemory:
        buffer = super().host_memory(count)
        self.memory.add_host(buffer)
        return buffer


class _ComputeStream:
    """The stream of compute.

    Compute is complete when its call returns, so waiting for an event blocks the caller. Events of
    this stream complete later.
    """

    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device
        self.stream = EmulatedStream("compute")
        self._busy_until_s = 0.0

    def record_event(self) -> EmulatedEvent:
        device, memory = self._device, self._device.memory
        span, memory.span = memory.span, ComputeSpan()
        done_s = 0.0
        if (rate := device.rates["flops"]) is not None and span.flops:
            done_s = max(self._busy_until_s, span.begun_s) + span.flops / rate
            self._busy_until_s = done_s

        def work() -> None:
            device.delay("compute")
            if (left_s := done_s - time.perf_counter()) > 0:
                time.sleep(left_s)

        self.stream.give(work)
        return self.stream.record_event(span.event)

    def wait_event(self, event: EmulatedEvent) -> None:
        event.synchronize()
