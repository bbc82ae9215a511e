"""Python, packages, device, memory and system."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from lohan.tools.findings import OK, PROBLEM, WARNING, Finding
from lohan.util.drive_facts import PROC
from lohan.util.system import cgroup_memory_limit, host_memory_bytes, total_memory_bytes
from lohan.util.units import GiB, MiB, counted, format_bytes

LEAST = {"torch": (2, 6), "transformers": (5, 22), "numpy": (1, 26), "safetensors": (0, 4)}
LITTLE_MEMORY, LITTLE_LOCKED = 4 * GiB, 64 * MiB
WSL_CONFIG = "%UserProfile%\\.wslconfig"


def check_machine() -> Iterator[Finding]:
    """All of it, in the order in which it matters."""
    for check in (
        check_python, check_packages, check_core, check_device, check_memory, check_locked,
        check_system,
    ):  # fmt: skip
        yield from check()


def check_python() -> Iterator[Finding]:
    here = f"{platform.python_version()} in {sys.prefix}"
    if sys.maxsize < 2**32:
        yield Finding("python", PROBLEM, f"{here}, 32 bits", "install a 64-bit Python")
    else:
        yield Finding("python", OK, here)


def check_packages() -> Iterator[Finding]:
    for name, least in LEAST.items():
        wanted = ".".join(map(str, least))
        try:
            found = version(name)
        except PackageNotFoundError:
            yield Finding(name, PROBLEM, "not installed", f"pip install '{name}>={wanted}'")
            continue
        if numbers(found) < least:
            yield Finding(
                name, PROBLEM, f"{found}, older than {wanted}", f"pip install '{name}>={wanted}'"
            )
        else:
            yield Finding(name, OK, found)


def numbers(text: str) -> tuple[int, ...]:
    """2.13.0+cpu -> (2, 13)."""
    parts = text.split("+")[0].split(".")[:2]
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts)


def check_core() -> Iterator[Finding]:
    try:
        from lohan import _core
    except ImportError as error:
        advice = "reinstall LoHan with a C++ compiler at hand: pip install -e ."
        yield Finding("native core", PROBLEM, f"cannot be loaded: {error}", advice)
        return
    kernel = f"AdamW with {_core.isa()}, {counted(_core.threads(), 'thread')}"
    if _core.isa() == "plain" and platform.machine() in ("x86_64", "AMD64"):
        yield Finding(
            "native core", WARNING, kernel, "a CPU with AVX2 updates several times faster"
        )
    else:
        yield Finding("native core", OK, kernel)


def check_device() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding("device", PROBLEM, f"torch cannot be loaded: {error}", "reinstall torch")
        return
    yield device_finding(torch, nvidia=(PROC / "driver/nvidia/version").exists())


def device_finding(torch: Any, *, nvidia: bool) -> Finding:
    """What torch has to compute with."""
    cpu = f"{len(os.sched_getaffinity(0))} CPU cores"
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is not None and accelerator.is_available():
        kind = accelerator.current_accelerator().type
        count = accelerator.device_count()
        name = torch.cuda.get_device_name(0) if kind == "cuda" else kind
        return Finding("device", OK, f"{count} x {name} ({kind}), {cpu}")
    if nvidia:
        return Finding(
            "device", WARNING,
            f"the NVIDIA driver is there, but torch {torch.__version__} does not use it; "
            f"compute runs on {cpu}",
            "install a CUDA build of torch whose version the driver knows (nvidia-smi)",
        )  # fmt: skip
    return Finding(
        "device", WARNING, f"no accelerator found; compute runs on {cpu}",
        "right but slow: good for small models and tests; `lohan plan --machine` tells what a GPU "
        "would do",
    )  # fmt: skip


# -- memory and system ----------------------------------------------------------------------------


def check_memory() -> Iterator[Finding]:
    total, free = total_memory_bytes(), host_memory_bytes()
    text = f"{format_bytes(free)} of {format_bytes(total)} can be had"
    if free < LITTLE_MEMORY:
        yield Finding("memory", WARNING, text, "close other programs, or set --host below that")
    else:
        yield Finding("memory", OK, text)
    limit = cgroup_memory_limit()
    if limit is None:
        yield Finding("memory limit", OK, "no cgroup limit")
    else:
        yield Finding(
            "memory limit", WARNING if limit < total // 2 else OK,
            f"the cgroup (container or service) allows {format_bytes(limit)}",
            "keep --host about 1 GiB below it; file caches of the process count too",
        )  # fmt: skip


def check_locked(*, accelerator: bool | None = None) -> Iterator[Finding]:
    """Memory that may be pinned for transfers to a device; without one it does not matter."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield Finding("locked memory", OK, "no limit")
        return
    text = f"limit {format_bytes(soft)}"
    text += "" if hard == soft else f", can be raised to {_limit(hard)}"
    if has_accelerator() if accelerator is None else accelerator:
        state = WARNING if soft < LITTLE_LOCKED else OK
    else:
        state, text = OK, f"{text}; only a device would need more"
    yield Finding(
        "locked memory", state, text,
        "ulimit -l unlimited, or memlock in /etc/security/limits.conf; CUDA pins memory without "
        "this limit, other devices may not",
    )  # fmt: skip


def has_accelerator() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(getattr(torch, "accelerator", None) and torch.accelerator.is_available())


def _limit(value: int) -> str:
    return "any size" if value == resource.RLIM_INFINITY else format_bytes(value)


def check_system() -> Iterator[Finding]:
    release = platform.release()
    if platform.system() != "Linux":
        yield Finding("system", PROBLEM, f"{platform.system()} {release}", "LoHan needs Linux")
    elif "microsoft" in release.lower():
        yield Finding(
            "system", WARNING, f"Linux {release} under WSL2",
            f"WSL2 gets half of the memory unless {WSL_CONFIG} says otherwise, and folders below "
            "/mnt/c go through the network file system 9p: keep --ssd inside the Linux disk",
        )  # fmt: skip
    else:
        yield Finding("system", OK, f"Linux {release}")
