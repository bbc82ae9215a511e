"""A device that is not there: a memory of a given size, a link of a given speed, threads for lanes.

Everything runs through the code of the accelerator backend; only what torch would provide is made
here. Host memory plays the device's part, so results have the bits of the cpu, if every wait is in
its place. What is not there yet is NaN:

* a copy overwrites its destination with NaN when it begins, and with the values when it ends;
* a source on the device that was given up before the copy came to it leaves the NaN in place;
* compute and a copy that meet in the same memory are an error (watch.py).
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lohan.device.accelerator import LINK, AcceleratorDevice
from lohan.device.host import HostMemory, pages
from lohan.device.timeline import EmulatedEvent, EmulatedStream, Link
from lohan.device.watch import Memory, Piece, Watch

POISON = 0xFF  # every float dtype reads NaN


class EmulatedDevice(AcceleratorDevice):
    """`memory` in bytes; `h2d` and `d2h` in bytes/s, `flops` in FLOP/s, None: as fast as it goes.
    `pinnable` is how much host memory can be pinned."""

    compiles = False

    def __init__(
        self, memory: int, *, h2d: float | None = None, d2h: float | None = None,
        flops: float | None = None, pinnable: int | None = None,
    ) -> None:  # fmt: skip
        self.name, self.mode = "emulated", "fp32"
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
        slot = torch.full((count,), POISON, dtype=torch.uint8)
        self.memory.add(slot.untyped_storage(), made=False)
        return slot

    def enter(self, lane: str) -> None:
        """Its streams are threads of their own."""

    def computing(self) -> AbstractContextManager[Any]:
        return Watch(self.memory)

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
        self.stream = EmulatedStream("gpu")
        self._busy_until_s = 0.0

    def record_event(self) -> EmulatedEvent:
        device, memory = self._device, self._device.memory
        piece, memory.piece = memory.piece, Piece()
        done_s = 0.0
        if (rate := device.rates["flops"]) is not None and piece.flops:
            done_s = max(self._busy_until_s, piece.begun_s) + piece.flops / rate
            self._busy_until_s = done_s

        def work() -> None:
            device.delay("gpu")
            if (left_s := done_s - time.perf_counter()) > 0:
                time.sleep(left_s)

        self.stream.give(work)
        return self.stream.record_event(piece.event)

    def wait_event(self, event: EmulatedEvent) -> None:
        event.synchronize()
