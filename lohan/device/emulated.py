"""A device that is not there: a memory of a given size, a link of a given speed, threads for lanes.

Everything runs through the code of the accelerator backend; only what torch would provide is made
here. Host memory plays the device's part, so results have the bits of the cpu, if every wait is in
its place. What is not there yet is NaN:

* a copy overwrites its destination with NaN when it begins, and with the values when it ends;
* a source on the device that was given up before the copy came to it leaves the NaN in place;
* compute and a copy that meet in the same memory are an error.
"""

from __future__ import annotations

import errno
import os
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

from lohan.device.accelerator import LINK, AcceleratorDevice
from lohan.device.base import HostMemory, pages, sum_squares_on_host
from lohan.errors import LohanError
from lohan.util.units import format_bytes

# -- Streams and events of the emulated device -----------------------------------------------------
#
# Work that is given now and done later, in order.
#
# They answer to the names that torch.Stream and torch.Event have.


STALL_S = 600.0  # as on the lanes


class EmulatedEvent:
    """Comes when its stream gets there, with the error that the stream met, if any."""

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
                f"an event of the emulated device has not come for {STALL_S:.0f} s; a stream "
                "hangs: stop the run and resume it"
            )
        if self._error is not None:
            raise self._error


class EmulatedStream:
    """A thread that does what it is given, one after the other. After an error the next event
    comes with that error, so that no wait is for ever."""

    def __init__(self, name: str) -> None:
        self._given: deque[Callable[[], None]] = deque()
        self._change = threading.Condition()
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"emulated-{name}", daemon=True)
        self._thread.start()

    def give(self, work: Callable[[], None]) -> None:
        with self._change:
            self._given.append(work)
            self._change.notify()

    def record_event(self, event: EmulatedEvent | None = None) -> EmulatedEvent:
        made = event or EmulatedEvent()
        self.give(lambda: self._pass(made))
        return made

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
                self._change.wait_for(lambda: self._given or self._closed)
                if not self._given:
                    return
                work = self._given.popleft()
            try:
                work()
            except BaseException as error:
                self._error = self._error or error


class Link:
    """One direction: so many bytes a second, or as fast as memory goes."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._free_s = 0.0

    def pass_through(self, count: int) -> None:
        """Returns when so many bytes have gone through. Time that sleeping takes too long is made
        up for by the next bytes."""
        if self._rate is None:
            return
        now = time.perf_counter()
        self._free_s = max(self._free_s, now - 0.002) + count / self._rate
        if self._free_s > now:
            time.sleep(self._free_s - now)


# -- Every operation of an emulated device is seen here --------------------------------------------
#
# How much memory lives, and whether compute and copies meet in the same memory.
#
# Compute of the emulated device is done by the time it is given, its event comes later. So a copy
# that does not wait for that event would find right values; a real device would not have made them
# yet. Each storage therefore knows the last span of compute that read or wrote it, and a copy
# that comes before the event of that span is an error. So is compute on what a copy is still
# in flight to, or that changes what a copy is still to read.


@dataclass
class ComputeSpan:
    """Compute between two marks."""

    event: EmulatedEvent = field(default_factory=EmulatedEvent)
    flops: float = 0.0
    begun_s: float = 0.0


@dataclass
class _Tracked:
    size: int
    read: ComputeSpan | None = None
    written: ComputeSpan | None = None
    coming: int = 0  # copies to it that were given and are not done
    leaving: int = 0  # and copies of it


class Memory:
    """The storages of one device: their bytes, and who used them last."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.live = self.peak = 0
        self.span = ComputeSpan()
        self._known: dict[int, _Tracked] = {}
        self._lock = threading.RLock()  # a storage may die while another is added

    def add(self, storage: torch.UntypedStorage, *, made: bool) -> None:
        """A storage has come to life, `made` by compute; it counts until it dies."""
        key, size = storage._cdata, storage.nbytes()
        with self._lock:
            if key in self._known:
                return
            if self.live + size > self.budget:
                raise torch.OutOfMemoryError(
                    f"emulated device out of memory: tried to allocate {format_bytes(size)}, "
                    f"{format_bytes(self.live)} of {format_bytes(self.budget)} are in use"
                )
            self.live += size
            self.peak = max(self.peak, self.live)
            self._known[key] = _Tracked(size, written=self.span if made else None)
        weakref.finalize(storage, self._dead, key)

    def _dead(self, key: int) -> None:
        with self._lock:
            self.live -= self._known.pop(key).size

    def touched(self, key: int, *, write: bool) -> None:
        """Compute uses a storage."""
        found = self._known.get(key)
        if found is None:
            return
        if found.coming or (write and found.leaving):
            raise _race("compute", "overwrites" if write else "reads", found.size, "a copy")
        if write:
            found.written = self.span
        else:
            found.read = self.span

    def given(self, key: int, *, write: bool, more: int = 1) -> None:
        """A copy to or from a storage was given to a lane; with -1, it is done."""
        with self._lock:
            found = self._known.get(key)
            if found is not None and write:
                found.coming += more
            elif found is not None:
                found.leaving += more

    def check_copy(self, key: int, *, write: bool) -> None:
        """Raises if compute may still write what is copied, or use what is overwritten."""
        found = self._known.get(key)
        if found is None:
            return
        spans = (found.written, found.read) if write else (found.written,)
        if any(span is not None and not span.event.passed for span in spans):
            raise _race("a copy", "overwrites" if write else "reads", found.size, "compute")


def _race(who: str, does: str, size: int, other: str) -> LohanError:
    return LohanError(
        f"race on the emulated device: {who} {does} {format_bytes(size)} that {other} has not "
        "finished with; an event was not waited for"
    )


class RaceDetector(TorchDispatchMode):
    """Tells the memory of every operation."""

    supports_higher_order_operators = True

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, memory = kwargs or {}, self._memory
        memory.span.begun_s = memory.span.begun_s or time.perf_counter()
        out = func(*args, **kwargs)
        changed = _changed(func, args)
        given = set()
        for tensor in _real(args, kwargs):
            key = tensor.untyped_storage()._cdata
            given.add(key)
            memory.touched(key, write=tensor is changed)
        for tensor in _real(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:  # no view of host memory
                memory.add(storage, made=True)
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
    """In-place operations change their first argument."""
    schema = getattr(func, "_schema", None)
    return args[0] if schema is not None and schema.is_mutable and args else None


# -- Emulated -------------------------------------------------------------------------------------


POISON = 0xFF  # every float dtype reads NaN


class EmulatedDevice(AcceleratorDevice):
    """`memory` in bytes; `h2d` and `d2h` in bytes/s, `flops` in FLOP/s, None: as fast as it goes.
    `pinnable` is how much host memory can be pinned."""

    compiles = False

    def __init__(
        self, memory: int, *, h2d: float | None = None, d2h: float | None = None,
        flops: float | None = None, pinnable: int | None = None,
    ) -> None:  # fmt: skip
        self.name, self.default_dtype = "emulated", "fp32"
        self.torch_device = torch.device("cpu")
        self.memory = Memory(memory)
        self.rates = {"h2d": h2d, "d2h": d2h, "flops": flops}
        self._pinnable, self._said = pinnable, False
        self._links = {"h2d": Link(h2d), "d2h": Link(d2h)}
        self._streams = {lane: EmulatedStream(lane) for lane in LINK}
        self._own = _ComputeStream(self)
        self.delay: Callable[[str], None] = lambda lane: None  # tests make streams late at random

    def memory_bytes(self) -> int:
        return self.memory.budget

    def allocate(self, count: int) -> torch.Tensor:
        made = torch.full((count,), POISON, dtype=torch.uint8)
        self.memory.add(made.untyped_storage(), made=False)
        return made

    def enter(self, lane: str) -> None:
        """Its streams are threads of their own."""

    def sum_squares(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """With the bits of the cpu."""
        return sum_squares_on_host(tensors)

    def computing(self) -> AbstractContextManager[Any]:
        return RaceDetector(self.memory)

    def overhead(self, host_bytes: int) -> dict[str, int]:
        """Its memory is counted by the byte."""
        return {}

    def release_cached_memory(self) -> None:
        """Its memory is given back at once."""

    def _compute(self) -> Any:
        return self._own

    def _current(self, stream: Any) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()

    def _copy_one(self, lane: str, dst: torch.Tensor, src: torch.Tensor) -> None:
        """One copy, which keeps no memory of the device alive."""
        there, host = (dst, src) if lane == "h2d" else (src, dst)
        weak = StorageWeakRef(there.untyped_storage())
        start, count = there.storage_offset() * there.itemsize, there.numel() * there.itemsize
        host_bytes = host.view(-1).view(torch.uint8)

        def work() -> None:
            self.delay(lane)
            try:
                self.memory.check_copy(weak.cdata, write=lane == "h2d")
                move()
            finally:
                self.memory.given(weak.cdata, write=lane == "h2d", more=-1)

        def move() -> None:
            storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
            here = None
            if storage is not None:
                here = torch.empty(0, dtype=torch.uint8).set_(storage, start, (count,), (1,))
            into, out_of = (here, host_bytes) if lane == "h2d" else (host_bytes, here)
            if into is not None:
                into.fill_(POISON)
            self._links[lane].pass_through(count)
            if into is not None and out_of is not None:
                into.copy_(out_of)

        self.memory.given(weak.cdata, write=lane == "h2d")
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
        for stream in (*self._streams.values(), self._own.stream):
            stream.close()


class _ComputeStream:
    """Compute is done by the time it is given, so giving it waits; its events come late."""

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
