"""`lohan profile`, and the cached profiles that runs reuse."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lohan.errors import ConfigError, LohanError, StorageIOError
from lohan.model.machine import Profile
from lohan.model.shapes import ModelShape
from lohan.util.files import OutputFile, write_atomic
from lohan.util.memory import host_memory_bytes
from lohan.util.units import format_bytes

FORMAT = 3  # The version of the measurements. Cached files with another version are ignored.
PREFIX = f"machine-{FORMAT}-"
WRITTEN_BY = "# Written by `lohan profile -o`, which replaces a file with this line."
Measure = Callable[[Sequence[Path]], Profile]


@dataclass(frozen=True)
class ComputePlace:
    """The device on which blocks compute, by its settings, with `auto` resolved."""

    device: str = "cpu"
    memory: int | None = None
    link: float | None = None


CPU = ComputePlace()


def run_profile(
    ssd: Sequence[Path],
    *,
    place: ComputePlace = CPU,
    out: Path | None = None,
    as_json: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
    measure: Measure | None = None,
    model: ModelShape | None = None,
) -> str:
    """Measure this machine, cache the result, write it to `out`, and return what to print.

    With `model`, the measured blocks are as wide as those of the model.
    """
    target = None
    if out is not None:
        target = OutputFile(out, "choose another -o", "a profile", WRITTEN_BY.encode())
        target.check()
    measure = measure or _measure(progress, place, model)
    profile = cached_profile(ssd, place=place, fresh=True, measure=measure)
    if target is not None:
        target.write(f"{WRITTEN_BY}\n{profile.to_toml()}".encode())
    if as_json:
        return json.dumps(asdict(profile), indent=1)
    return "\n".join(describe(profile))


def cached_profile(
    ssd: Sequence[Path],
    *,
    place: ComputePlace = CPU,
    progress: Callable[[str, int, int], None] | None = None,
    fresh: bool = False,
    measure: Measure | None = None,
) -> Profile:
    """Return the profile of this machine with these folders and this device.

    It is read from the cache; with `fresh`, or if none is cached, it is measured. Free memory and
    space are always current.
    """
    folders = [Path(path).absolute() for path in ssd]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"--ssd {folder}: no such folder; create it or choose another")
    file = cache_file(folders, place)
    if not fresh and file.is_file():
        with suppress(LohanError):  # It is not a profile, or has another version, so measure again.
            return _refreshed(Profile.read(file), folders)
    profile = (measure or _measure(progress, place))(folders)
    _keep(file, profile)
    return profile


def cache_file(ssd: Sequence[Path], place: ComputePlace = CPU) -> Path:
    """Return the cache file for this machine, these drives and this device."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    text = json.dumps(_identity(ssd, place), sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Path(root).expanduser() / "lohan" / f"{PREFIX}{name}.toml"


def latest_profile() -> Profile | None:
    """Return the latest profile of this machine, with any folders, or None."""
    folder = cache_file([]).parent
    files = sorted(folder.glob(f"{PREFIX}*.toml"), key=lambda file: -file.stat().st_mtime)
    for file in files:
        with suppress(LohanError):
            return replace(Profile.read(file), host_bytes=host_memory_bytes())
    return None


def describe(profile: Profile) -> list[str]:
    """Return the profile as lines of text."""
    lines = [f"{profile.name}: {profile.device}, {format_bytes(profile.host_bytes)} of host memory"]
    if profile.block_width:
        lines.append(f"a block of {profile.block_width:,} features:")
    lines += [
        f"block, {tokens:6,.0f} tokens   {forward / 1e9:8,.1f} GFLOP/s forward, "
        f"{profile.backward_flops_at(tokens) / 1e9:,.1f} backward"
        for tokens, forward in profile.compute
    ]
    if profile.has_link:
        lines.append(f"link to the device    {profile.h2d / 1e9:8.2f} GB/s")
        lines.append(f"link from the device  {profile.d2h / 1e9:8.2f} GB/s")
        lines.append(f"main memory           {profile.host_rate / 1e9:8.2f} GB/s under load")
        lines.append(f"memory of the device  {format_bytes(profile.device_bytes):>8}")
    if profile.backward_launch_s:
        lines.append(
            f"launches of a slice   {profile.forward_launch_s * 1e3:8.2f} ms forward, "
            f"{profile.backward_launch_s * 1e3:.2f} backward"
        )
    if profile.device_rate:
        lines.append(f"memory of compute     {profile.device_rate / 1e9:8.2f} GB/s")
    lines.append(f"head                  {profile.head_flops / 1e9:8,.1f} GFLOP/s")
    lines.append(f"AdamW                 {profile.adam / 1e6:8,.0f} M parameters/s")
    for drive in profile.drives:
        lines.append(
            f"{drive.name}: read {drive.read / 1e9:.2f}, write {drive.write / 1e9:.2f}, "
            f"mixed {drive.mixed / 1e9:.2f} GB/s; {format_bytes(drive.bytes)} free"
        )
    if profile.ssd_limit:
        lines.append(f"all drives together   {profile.ssd_limit / 1e9:8.2f} GB/s at most")
    if profile.drives:
        lines.append(f"compute lost to I/O   {100 * profile.io_share:8.0f} %")
        lines.append(f"I/O lost to compute   {100 * profile.compute_share:8.0f} %")
        lines.append(f"one transfer          {profile.action_s * 1e3:8.2f} ms at least")
        lines.append(f"one commit            {profile.commit_s * 1e3:8.2f} ms")
    return lines


def _measure(
    progress: Callable[[str, int, int], None] | None,
    place: ComputePlace,
    model: ModelShape | None = None,
) -> Measure:
    from lohan.device.choose import open_device
    from lohan.engine.probes import profile, silent

    def measure(folders: Sequence[Path]) -> Profile:
        device = open_device(place.device, memory=place.memory, link=place.link)
        try:
            return profile(folders, progress=progress or silent, device=device, model=model)
        finally:
            device.close()

    return measure


def _refreshed(profile: Profile, folders: Sequence[Path]) -> Profile:
    """Return the profile with the requested folder names and the current free bytes."""
    if len(profile.drives) != len(folders):
        raise ConfigError(f"the profile has {len(profile.drives)} drives, not {len(folders)}")
    drives = tuple(
        replace(drive, name=str(folder), bytes=shutil.disk_usage(folder).free)
        for drive, folder in zip(profile.drives, folders, strict=True)
    )
    return replace(profile, drives=drives, host_bytes=host_memory_bytes())


def _keep(file: Path, profile: Profile) -> None:
    """Write the profile to the cache. A cache that cannot be written is ignored."""
    with suppress(OSError, StorageIOError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, profile.to_toml().encode())


def _identity(ssd: Sequence[Path], place: ComputePlace) -> dict[str, Any]:
    """Return the values that identify the measured hardware."""
    return {
        **({} if place == CPU else {"device": place.device, "link": place.link}),
        "host": platform.node(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": os.environ.get("OMP_NUM_THREADS", ""),
        "torch": _version("torch"),
        "lohan": _version("lohan"),
        "drives": [f"{path.stat().st_dev}-{os.statvfs(path).f_fsid}" for path in ssd],
    }


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
