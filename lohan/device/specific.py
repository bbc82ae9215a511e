"""The one place for calls that torch has under a backend's own name only. Each has an answer for
backends that do not offer it."""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any, cast

import torch

from lohan.device.host import HostMemory

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
