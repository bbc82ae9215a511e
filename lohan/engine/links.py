"""How fast the links to a device are, through the device's own copies and host memory."""

from __future__ import annotations

import time

import torch

from lohan.device.base import Device
from lohan.engine.compute import repeated

SMALLEST = 4096  # bytes


def link_rates(device: Device, *, size: int, seconds: float) -> tuple[float, float]:
    """Bytes per second to the device and from it, each way alone, of blocks of so many bytes."""
    size = max(SMALLEST, size)
    there = device.allocate(size)
    host = torch.from_numpy(device.host_memory(size))
    host.zero_()

    def taken_s(lane: str) -> float:
        pairs = [(there, host)] if lane == "h2d" else [(host, there)]
        start = time.perf_counter()
        device.copy(lane, pairs).synchronize()
        return time.perf_counter() - start

    to_device = size / repeated(lambda: taken_s("h2d"), seconds=seconds)
    return to_device, size / repeated(lambda: taken_s("d2h"), seconds=seconds)
