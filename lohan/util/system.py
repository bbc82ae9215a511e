"""What this machine has: free host memory (cgroup included) and this process's own use."""

from __future__ import annotations

from pathlib import Path

import psutil

_UNLIMITED = 2**60


def host_memory_bytes() -> int:
    """Memory that a new run can count on: what is free, or what the cgroup leaves, if less."""
    free = psutil.virtual_memory().available
    limits = [limit - used for limit, used in _cgroup_limits() if limit < _UNLIMITED]
    return max(0, min([int(free), *limits]))


def total_memory_bytes() -> int:
    return int(psutil.virtual_memory().total)


def cgroup_memory_limit() -> int | None:
    """The tightest limit of the memory cgroups that this process is in, if any."""
    limits = [limit for limit, _ in _cgroup_limits() if limit < _UNLIMITED]
    return min(limits, default=None)


def _cgroup_limits() -> list[tuple[int, int]]:
    """(limit, use) of every memory cgroup that this process is in, v1 or v2, up to the root."""
    found = []
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
        for place in (folder, *folder.parents):
            if not place.is_relative_to(root):
                break
            limit, used = _number(place / names[0]), _number(place / names[1])
            if limit is not None and used is not None:
                found.append((limit, used))
    return found


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def rss_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def peak_rss_bytes() -> int:
    """VmHWM: the most memory this process has had resident."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return rss_bytes()
