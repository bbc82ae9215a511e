"""Host memory: free bytes within the limits of cgroups, and the bytes that this process uses."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_UNLIMITED = 2**60


def host_memory_bytes() -> int:
    """Return the memory that a new run can use: free memory, or less if the cgroup limits it."""
    import psutil  # Imported here because the import is slow and not always needed.

    free = psutil.virtual_memory().available
    limits = [limit - used for limit, used in _cgroup_limits() if limit < _UNLIMITED]
    return max(0, min([int(free), *limits]))


def total_memory_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().total)


def cgroup_memory_limit() -> int | None:
    """Return the tightest limit of the memory cgroups of this process, or None."""
    limits = [limit for limit, _ in _cgroup_limits() if limit < _UNLIMITED]
    return min(limits, default=None)


def _cgroup_limits() -> list[tuple[int, int]]:
    """Return (limit, usage) of every memory cgroup of this process, v1 or v2, up to the root."""
    limits = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = root / path.lstrip("/")
        for group in (folder, *folder.parents):
            if not group.is_relative_to(root):
                break
            limit, used = _number(group / names[0]), _number(group / names[1])
            if limit is not None and used is not None:
                limits.append((limit, used))
    return limits


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def rss_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # From malloc.h.


def return_freed_memory() -> None:
    """Release malloc's free memory to the system, and configure malloc to do so from then on.

    Allocations of 8 MiB and more get a mapping of their own. By default, glibc raises this
    threshold to up to 32 MiB when such an allocation is freed. Holes between tensors then stay
    resident: 250 MiB after forty steps of a 135M model. A threshold that the user has set in the
    environment is kept, and other allocators are not changed.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim") and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        libc.mallopt(_M_MMAP_THRESHOLD, 8 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 32 << 20)
        libc.malloc_trim(0)
