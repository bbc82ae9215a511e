"""Host memory that copies to and from a device can reach."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any

import numpy as np

from lohan.util.units import MiB

HUGE = 4 * MiB  # buffers from here on ask for huge pages: fewer address look-ups for the kernels

HostMemory = np.ndarray[Any, np.dtype[np.uint8]]


def pages(count: int) -> HostMemory:
    """An anonymous mapping of exactly so many bytes; it goes with its last reference."""
    memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if count >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages: it works as well, a bit slower
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)
