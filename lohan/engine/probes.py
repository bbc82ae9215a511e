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
from lohan.engine.compute import (
    BlockPoint,
    BlockProbe,
    Point,
    Sizes,
    adam_figure,
    head_figure,
    head_flops,
    repeated,
)
from lohan.engine.drives import Rates, opened, rates
from lohan.engine.links import link_rates
from lohan.model.machine import Drive, Profile
from lohan.util.system import host_memory_bytes
from lohan.util.units import MiB

Progress = Callable[[str, int, int], None]  # what is measured, done, of how many
GOES = 3  # at every figure of compute, apart in time
LIMITED = 0.95  # drives that together reach less than this share of their sum have a limit


def silent(task: str, done: int, total: int) -> None:
    pass


@dataclass(frozen=True)
class Effort:
    """How long and on how much is measured; the default takes under a minute for one drive."""

    sizes: Sizes = field(default_factory=Sizes)
    tokens: tuple[int, ...] = (16, 64, 256, 1024, 4096)
    head_tokens: int = 256
    # Where compute and drives are measured together: few, since with many there is little I/O
    # for the time of compute.
    shared_tokens: int = 64
    shared_seconds: float = 1.0
    shared_bytes: int = 64 * MiB  # of each of the store's two slots
    seconds: float = 0.4  # at least, for each other figure of compute
    compute_seconds: float = 25.0  # in all; a point that would take longer is left out
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
    computed = _compute(probe, effort, device, progress)
    shared = bool(ssd) and not device.linked  # compute and I/O have the cores in common
    beside = _beside(ssd, probe, effort, progress) if shared else (0.0, 0.0)
    return Profile(
        name=platform.node() or "this machine", device=device.name, device_bytes=device_bytes,
        compute=computed.forward, backward=computed.backward, head_flops=computed.head_flops,
        h2d=h2d, d2h=d2h, host_bytes=host_bytes, adam=computed.adam,
        cores=float(_core.threads()), drives=drives,
        ssd_limit=joint,
        io_share=beside[0], compute_share=beside[1],
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


@dataclass(frozen=True)
class _Computed:
    forward: tuple[Point, ...]
    backward: tuple[Point, ...]
    head_flops: float
    adam: float


def _compute(probe: BlockProbe, effort: Effort, device: Device, progress: Progress) -> _Computed:
    """All figures in every go, as far as there is time: points that take long are measured once."""
    sizes, tokens = effort.sizes, effort.tokens
    stop = time.perf_counter() + effort.compute_seconds
    points = [BlockPoint(probe, count) for count in tokens]
    head = head_figure(sizes, effort.head_tokens, device)
    update = adam_figure(sizes, device.mode)
    measured: list[BlockPoint] = []
    task, total = "blocks, head and optimizer", GOES * len(points)
    for number, point in enumerate(GOES * points):
        progress(task, number, total)
        if point is points[0]:
            head.measure(effort.seconds)
            update.measure(effort.seconds)
        elif time.perf_counter() + point.least_s(measured[-1].backward[1]) > stop:
            continue
        point.measure(effort.seconds)
        if point not in measured:
            measured.append(point)
    progress(task, total, total)
    return _Computed(
        forward=tuple(point.forward for point in measured),
        backward=tuple(point.backward for point in measured),
        head_flops=head_flops(sizes, effort.head_tokens) / head.median_s,
        adam=sizes.chunk_params / update.median_s,
    )


def _beside(
    ssd: Sequence[Path], probe: BlockProbe, effort: Effort, progress: Progress
) -> tuple[float, float]:
    """Shares of their speed that compute loses beside busy drives, in forward and backward
    together, and that drives lose beside compute. Each alone before and after, against drift."""
    task, tokens = "compute and drives together", effort.shared_tokens
    progress(task, 0, 1)

    def taken_s() -> float:
        def block_s() -> float:
            return probe.forward_s(tokens) + probe.backward_s(tokens)

        return repeated(block_s, seconds=effort.shared_seconds)

    with opened(ssd, total_bytes=effort.shared_bytes, chunk_bytes=effort.chunk_bytes) as drives:

        def alone() -> tuple[float, float]:
            return taken_s(), drives.rate("mixed", seconds=effort.shared_seconds)

        before = alone()
        with drives.busy("mixed") as rates:
            beside_s = taken_s()
            seen = rates[1:]  # it began alone
        after = alone()
    progress(task, 1, 1)
    alone_s, alone_rate = ((x + y) / 2 for x, y in zip(before, after, strict=True))
    rate = median(seen) if seen else alone_rate  # drives that slow lose nothing to compute
    return max(0.0, 1.0 - alone_s / beside_s), max(0.0, 1.0 - rate / alone_rate)
