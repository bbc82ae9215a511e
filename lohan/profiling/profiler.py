"""Measures this machine: a profile made through the store, device and optimizer that a run uses.

On the CPU there is no link to measure, and device memory is host memory.
"""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from lohan import _core
from lohan.device.base import CpuDevice, Device
from lohan.machine import host_memory_bytes
from lohan.profile import Drive, Profile
from lohan.profiling.compute import (
    BlockProbe,
    Sizes,
    adam_rate,
    block_point,
    head_flops,
    point_s,
    repeated,
)
from lohan.profiling.drives import Rates, opened, rates
from lohan.profiling.links import link_rates
from lohan.units import MiB

Progress = Callable[[str, int, int], None]  # what is measured, done, of how many
LIMITED = 0.95  # drives that together reach less than this share of their sum have a limit


def silent(task: str, done: int, total: int) -> None:
    pass


@dataclass(frozen=True)
class Effort:
    """How long and on how much is measured; the default takes half a minute for one drive."""

    sizes: Sizes = field(default_factory=Sizes)
    tokens: tuple[int, ...] = (16, 64, 256, 1024, 4096)
    head_tokens: int = 256
    shared_tokens: int = 256  # where compute and drives are measured together
    seconds: float = 0.4  # at least, for each figure of compute
    compute_seconds: float = 25.0  # for the blocks; a point that would take longer is left out
    drive_seconds: float = 2.0  # for each figure of a drive; less where there are many drives
    all_drives_seconds: float = 24.0
    drive_bytes: int = 512 * MiB  # of each of the store's two slots
    chunk_bytes: int = 16 * MiB
    link_bytes: int = 256 * MiB  # of one copy; less where the device has little memory


def profile(
    ssd: Sequence[Path], *, progress: Progress = silent, effort: Effort | None = None,
    device: Device | None = None,
) -> Profile:  # fmt: skip
    """What this machine does with these folders as its drives and compute on this device; under a
    minute."""
    effort, device = effort or Effort(), device or CpuDevice()
    host_bytes, device_bytes = host_memory_bytes(), device.memory_bytes()
    drives, joint, found = _drives(ssd, effort, progress)
    h2d, d2h = _links(device, effort, progress) if device.linked else (0.0, 0.0)
    probe = BlockProbe(effort.sizes, device)
    forward, backward = _compute(probe, effort, progress)
    progress("head and optimizer", 0, 2)
    head = head_flops(
        effort.sizes, tokens=effort.head_tokens, seconds=effort.seconds, device=device
    )
    progress("head and optimizer", 1, 2)
    adam = adam_rate(effort.sizes, seconds=effort.seconds, mode_name=device.mode)
    progress("head and optimizer", 2, 2)
    shared = bool(ssd) and not device.linked  # compute and I/O have the cores in common
    return Profile(
        name=platform.node() or "this machine", device=device.name, device_bytes=device_bytes,
        compute=forward, backward=backward, head_flops=head, h2d=h2d, d2h=d2h,
        host_bytes=host_bytes, adam=adam, cores=float(_core.threads()), drives=drives,
        ssd_limit=joint,
        io_share=_io_share(ssd, probe, effort, progress) if shared else 0.0,
        action_s=max((each.action_s for each in found), default=0.0),
        commit_s=max((each.commit_s for each in found), default=0.0),
    )  # fmt: skip


def free_bytes(path: Path) -> int:
    return shutil.disk_usage(path).free


def _drives(
    ssd: Sequence[Path], effort: Effort, progress: Progress
) -> tuple[tuple[Drive, ...], float, list[Rates]]:
    """The drives one by one, then what they reach together: 0 if that is their sum."""
    seconds = min(effort.drive_seconds, effort.all_drives_seconds / (3 * max(1, len(ssd))))
    sizes = {"total_bytes": effort.drive_bytes, "chunk_bytes": effort.chunk_bytes}
    total = len(ssd) + (len(ssd) > 1)
    found: list[Rates] = []
    for number, path in enumerate(ssd):
        progress("drives", number, total)
        with opened([path], **sizes) as probe:
            found.append(rates(probe, seconds=seconds))
    drives = tuple(
        Drive(
            name=str(path), read=each.read, write=each.write, mixed=each.mixed,
            bytes=free_bytes(path),
        )
        for path, each in zip(ssd, found, strict=True)
    )  # fmt: skip
    joint = 0.0
    if len(ssd) > 1:
        progress("drives", len(ssd), total)
        with opened(ssd, **sizes) as probe:
            joint = probe.rate("mixed", seconds=seconds)
        if joint >= LIMITED * sum(each.mixed for each in found):
            joint = 0.0
    if total:
        progress("drives", total, total)
    return drives, joint, found


def _links(device: Device, effort: Effort, progress: Progress) -> tuple[float, float]:
    progress("links", 0, 1)
    size = min(effort.link_bytes, device.memory_bytes() // 4)
    found = link_rates(device, size=size, seconds=effort.seconds)
    progress("links", 1, 1)
    return found


def _compute(
    probe: BlockProbe, effort: Effort, progress: Progress
) -> tuple[tuple[tuple[float, float], ...], tuple[tuple[float, float], ...]]:
    stop = time.perf_counter() + effort.compute_seconds
    points: list[tuple[tuple[float, float], tuple[float, float]]] = []
    for number, tokens in enumerate(effort.tokens):
        progress("blocks", number, len(effort.tokens))
        if points and time.perf_counter() + point_s(probe, tokens, points[-1][1][1]) > stop:
            break
        points.append(block_point(probe, tokens, seconds=effort.seconds))
    progress("blocks", len(effort.tokens), len(effort.tokens))
    forward, backward = zip(*points, strict=True)
    return forward, backward


def _io_share(ssd: Sequence[Path], probe: BlockProbe, effort: Effort, progress: Progress) -> float:
    """Share of compute speed lost beside busy drives; alone before and after, against drift."""
    task, tokens = "compute beside busy drives", effort.shared_tokens
    progress(task, 0, 1)

    def taken_s() -> float:
        return repeated(lambda: probe.forward_s(tokens), seconds=effort.seconds)

    sizes = {"total_bytes": effort.drive_bytes, "chunk_bytes": effort.chunk_bytes}
    with opened(ssd, **sizes) as drives:
        alone = [taken_s()]
        with drives.busy("mixed"):
            beside = taken_s()
        alone.append(taken_s())
    progress(task, 1, 1)
    return max(0.0, 1.0 - median(alone) / beside)
