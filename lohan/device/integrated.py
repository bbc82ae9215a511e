"""A GPU that shares the memory of the host, such as the one of a DGX Spark or of an APU."""

from __future__ import annotations

from typing import Any

import torch

from lohan.device.accelerator import AcceleratorDevice, set_device
from lohan.device.base import Event, HostMemory, Pairs
from lohan.errors import ConfigError, LohanError
from lohan.planner.memory import card_overhead
from lohan.util.units import format_bytes


class IntegratedDevice(AcceleratorDevice):
    """A GPU that computes in host memory, so that weights and kept activations exist only once.

    Host buffers are registered with the driver, which gives the GPU their addresses. Memory that
    compute itself allocates comes from torch's allocator, in the same physical memory. Gradients
    are copied from it for the update, because the CPU cannot read the driver's own allocations.
    """

    has_own_memory = False

    def memory_bytes(self) -> int:
        """Return 0, because the device has no memory besides the host's."""
        return 0

    def overhead(self, host_bytes: int) -> dict[str, int]:
        """Return the bytes that no buffer accounts for, by owner, as part of the host budget."""
        return card_overhead(host_bytes, host_bytes)

    def allocate(self, count: int) -> torch.Tensor:
        raise LohanError(f"{self.name} has no memory of its own")

    def copy(self, lane: str, pairs: Pairs, *, after: Event | None = None) -> Event:
        raise LohanError(f"{self.name} has no lane {lane}")

    def compute_view(self, host: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the GPU over registered host memory.

        The tensor keeps the memory alive.
        """
        raw = host.view(-1).view(torch.uint8)
        view: torch.Tensor = torch.as_tensor(_Registered(raw), device=self.torch_device)
        return view.view(host.dtype).view(host.shape)

    def enter(self, lane: str) -> None:
        """Give the lane that packs activations for the SSD a stream of its own."""
        set_device(self.torch_device)
        if lane == "ssd":
            torch.accelerator.set_stream(self._streams["d2h"])

    def host_memory(self, count: int) -> HostMemory:
        """Return registered memory. The GPU cannot access other host memory."""
        try:
            return self._pinned(count)
        except (RuntimeError, OSError) as error:
            raise ConfigError(
                f"{self.name}: cannot register {format_bytes(count)} of host memory ({error}), and "
                "a GPU that computes in host memory needs it; lower --host, raise the limit on "
                "locked memory (ulimit -l), or give --device-memory for a run with copies"
            ) from error


class _Registered:
    """Registered host memory, as an array that CUDA can read."""

    def __init__(self, raw: torch.Tensor) -> None:
        self._raw = raw  # alive as long as the view
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": tuple(raw.shape),
            "typestr": "|u1",
            "data": (raw.data_ptr(), False),
            "version": 3,
        }
