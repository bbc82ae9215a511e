"""Anything behind `torch.accelerator`: CUDA, ROCm, XPU, and backends registered as PrivateUse1.

Streams and events are torch's generic ones. What torch has no generic call for comes first.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, cast

import torch

from lohan.device.base import Event, HostMemory, Pairs, pages
from lohan.errors import ConfigError
from lohan.model.layout import local_rank
from lohan.util.units import format_bytes

# -- The one place for calls that torch has under a backend's own name only ------------------------
#
# Each has an answer for backends that do not offer it.


PAGE = 4096


def has_bf16(device: torch.device) -> bool:
    """Whether bf16 is native. Backends that cannot say are taken to have it."""
    module: Any = torch.get_device_module(device)
    asked = getattr(module, "is_bf16_supported", None)
    if asked is None:
        return True
    try:
        return bool(asked(including_emulation=False))
    except TypeError:  # a backend that knows nothing of emulation
        return bool(asked())


def free_memory(device: torch.device) -> int | None:
    """None: the backend does not say."""
    module: Any = torch.get_device_module(device)
    for owner, name in ((torch.accelerator, "get_memory_info"), (module, "mem_get_info")):
        asked = getattr(owner, name, None)
        if asked is not None:
            with suppress(RuntimeError):  # its allocator does not keep count
                return int(asked(device.index or 0)[0])
    return None


def set_device(device: torch.device) -> None:
    asked = getattr(torch.accelerator, "set_device_index", None)  # its name since torch 2.8
    (asked or torch.accelerator.set_device_idx)(device.index or 0)


def random_state(device: torch.device) -> torch.Tensor | None:
    """Of the device's own generator; None: it has none."""
    asked = getattr(torch.get_device_module(device), "get_rng_state", None)
    return None if asked is None else asked(device)


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    torch.get_device_module(device).set_rng_state(state, device)


def limit_memory(device: torch.device, count: int | None) -> None:
    """The caching allocator itself refuses to go beyond, where it can; None: as far as it goes."""
    module: Any = torch.get_device_module(device)
    limit = getattr(module, "set_per_process_memory_fraction", None)
    info = getattr(module, "mem_get_info", None)
    if limit is not None and info is not None:
        whole = info(device.index or 0)[1]
        limit(1.0 if count is None else min(1.0, count / whole), device.index or 0)


def can_register(device: torch.device) -> bool:
    return device.type == "cuda"  # ROCm goes by this name too


def register(memory: HostMemory) -> None:
    """Pins memory in place for as long as it lives; raises what the driver says."""
    runtime: Any = torch.cuda.cudart()
    pointer = memory.ctypes.data
    torch.cuda.check_error(int(runtime.cudaHostRegister(pointer, memory.nbytes, 0)))
    weakref.finalize(memory, runtime.cudaHostUnregister, pointer)


def pinned_by_torch(count: int) -> HostMemory:
    """From the backend's host allocator, which may round up; with a page to spare, since drives
    want pages."""
    tensor = torch.empty(count + PAGE, dtype=torch.uint8, pin_memory=True)
    skip = -tensor.data_ptr() % PAGE
    return cast(HostMemory, tensor.numpy()[skip : skip + count])


# -- Accelerator ----------------------------------------------------------------------------------


LINK = ("h2d", "d2h")
STREAMS = (*LINK, "net")  # lanes with a stream of their own; compute has the caller's


class AcceleratorDevice:
    """The current accelerator: its first device or, of several ranks on a machine, the one with the
    rank's number there. `memory`: the most that a run may use."""

    has_own_memory = compiles = True

    def __init__(self, memory: int | None = None) -> None:
        found = torch.accelerator.current_accelerator()
        if found is None:
            raise ConfigError(
                "--device: torch finds no accelerator on this machine; install a build of torch "
                "for it, or use --device cpu"
            )
        self.torch_device = torch.device(found.type, _number())
        self.name = str(self.torch_device)
        self.default_dtype = "bf16" if has_bf16(self.torch_device) else "fp16"
        set_device(self.torch_device)
        self._memory = memory
        if memory is not None:
            limit_memory(self.torch_device, memory)
        self._streams: dict[str, Any] = {
            lane: torch.Stream(device=self.torch_device) for lane in STREAMS
        }
        self._said = False

    def memory_bytes(self) -> int:
        free = free_memory(self.torch_device)
        known = [count for count in (self._memory, free) if count is not None]
        if not known:
            raise ConfigError(
                f"{self.name} does not say how much memory it has; give --device-memory, say 24GiB"
            )
        return min(known)

    def allocate(self, count: int) -> torch.Tensor:
        """Note [long-lived slots]."""
        slot = torch.empty(count, dtype=torch.uint8, device=self.torch_device)
        given = self._compute().record_event()
        for stream in self._streams.values():
            stream.wait_event(given)
        return slot

    def enter(self, lane: str) -> None:
        """Note [per thread]."""
        set_device(self.torch_device)
        if lane in self._streams:
            torch.accelerator.set_stream(self._streams[lane])

    # -- lanes ------------------------------------------------------------------------------------

    def copy(self, lane: str, pairs: Pairs, *, after: Event | None = None) -> Event:
        stream = self._streams[lane]
        if after is not None:
            stream.wait_event(after)
        with self._current(stream):
            for dst, src in pairs:
                self._copy_one(lane, dst, src)
        event: Event = stream.record_event()
        return event

    def mark(self) -> Event:
        event: Event = self._compute().record_event()
        return event

    def wait(self, event: Event) -> None:
        self._compute().wait_event(event)

    def computing(self) -> AbstractContextManager[Any]:
        return nullcontext()

    # -- what a backend provides ------------------------------------------------------------------

    def _compute(self) -> Any:
        """The caller's current stream is the compute lane's."""
        return torch.accelerator.current_stream(self.torch_device)

    @contextmanager
    def _current(self, stream: Any) -> Iterator[None]:
        before = torch.accelerator.current_stream(self.torch_device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    def _copy_one(self, lane: str, dst: torch.Tensor, src: torch.Tensor) -> None:
        dst.copy_(src, non_blocking=True)

    # -- host memory ------------------------------------------------------------------------------

    def host_memory(self, count: int) -> HostMemory:
        """Registered where it lies, without rounding, or else from torch's own allocator. Pageable
        memory works too, since nothing is read before its event."""
        try:
            return self._pinned(count)
        except (RuntimeError, OSError) as error:
            self._say_pageable(count, error)
            return pages(count)

    def _pinned(self, count: int) -> HostMemory:
        if can_register(self.torch_device):
            memory = pages(count)
            register(memory)
            return memory
        return pinned_by_torch(count)

    def _say_pageable(self, count: int, error: Exception) -> None:
        if not self._said:
            self._said = True
            warnings.warn(
                f"{self.name}: cannot pin {format_bytes(count)} of host memory ({error}); copies "
                "go through pageable memory, at about half the speed of the link. Raise the limit "
                "on locked memory (ulimit -l), or under WSL2 its share of pinned memory",
                RuntimeWarning, stacklevel=2,
            )  # fmt: skip

    # -- random numbers ---------------------------------------------------------------------------

    def random_state(self) -> Any:
        """Of the host's generator and the device's own, if it has one."""
        own = random_state(self.torch_device)
        return (torch.get_rng_state(),) if own is None else (torch.get_rng_state(), own)

    def set_random_state(self, state: Any) -> None:
        torch.set_rng_state(state[0])
        for own in state[1:]:
            set_random_state(self.torch_device, own)

    def close(self) -> None:
        """Streams go with their last reference, the limit on memory now."""
        if self._memory is not None:
            limit_memory(self.torch_device, None)


def _number() -> int:
    """Of the device that is this process's own."""
    number = local_rank(os.environ)
    if number and number >= (count := torch.accelerator.device_count()):
        raise ConfigError(
            f"--device accelerator: rank {number} of this machine has no device, there are {count};"
            f" start {count} ranks here, or use --device cpu"
        )
    return number
