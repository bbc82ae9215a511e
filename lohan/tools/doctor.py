"""The checks of `lohan doctor`: what a machine offers, what is missing, and the remedies."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lohan.errors import LohanError, StorageIOError
from lohan.model.state import STATE_FORMATS
from lohan.store.io_engine import IOEngine, aligned_buffer, open_engine
from lohan.util.drives import COPY_ON_WRITE, MEMORY, NETWORK, PROC, DriveFacts, drives_of, mount_of
from lohan.util.memory import cgroup_memory_limit, host_memory_bytes, total_memory_bytes
from lohan.util.units import GiB, MiB, counted, format_bytes

# -- Findings and how they are printed -------------------------------------------------------------


OK, WARNING, PROBLEM = "ok", "warning", "problem"


@dataclass(frozen=True)
class Finding:
    subject: str
    state: str  # ok | warning | problem
    text: str
    advice: str = ""


def describe(findings: Sequence[Finding]) -> list[str]:
    width = max(len(finding.subject) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.state:8} {finding.subject:{width}}  {finding.text}")
        if finding.advice and finding.state != OK:
            lines.append(f"{'':8} {'':{width}}  -> {finding.advice}")
    counts = {state: sum(f.state == state for f in findings) for state in (PROBLEM, WARNING)}
    lines.append("")
    lines.append(
        f"{_count(counts[PROBLEM], 'problem')}, {_count(counts[WARNING], 'warning')}"
        + ("" if counts[PROBLEM] else "; a run can start here")
    )
    return lines


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"


def passed(findings: Sequence[Finding]) -> bool:
    return all(finding.state != PROBLEM for finding in findings)


# -- Python, packages, device, memory and system ---------------------------------------------------


LEAST_VERSIONS = {"torch": (2, 6), "transformers": (5, 22), "numpy": (1, 26), "safetensors": (0, 4)}
LITTLE_MEMORY, LITTLE_LOCKED = 4 * GiB, 64 * MiB
WSL_CONFIG = "%UserProfile%\\.wslconfig"


def check_machine() -> Iterator[Finding]:
    """Yield all findings about this machine, ordered by importance."""
    for check in (
        check_python,
        check_packages,
        check_core,
        check_device,
        check_memory,
        check_locked,
        check_system,
    ):
        yield from check()


def check_python() -> Iterator[Finding]:
    version = f"{platform.python_version()} in {sys.prefix}"
    if sys.maxsize < 2**32:
        yield Finding("python", PROBLEM, f"{version}, 32 bits", "install a 64-bit Python")
    else:
        yield Finding("python", OK, version)


def check_packages() -> Iterator[Finding]:
    for name, least in LEAST_VERSIONS.items():
        wanted = ".".join(map(str, least))
        try:
            installed = version(name)
        except PackageNotFoundError:
            yield Finding(name, PROBLEM, "not installed", f"pip install '{name}>={wanted}'")
            continue
        if numbers(installed) < least:
            yield Finding(
                name,
                PROBLEM,
                f"{installed}, older than {wanted}",
                f"pip install '{name}>={wanted}'",
            )
        else:
            yield Finding(name, OK, installed)


def numbers(text: str) -> tuple[int, ...]:
    """Return the major and minor version: 2.13.0+cpu -> (2, 13)."""
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
    """Return a finding about the devices that torch can compute on."""
    cpu = f"{len(os.sched_getaffinity(0))} CPU cores"
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is not None and accelerator.is_available():
        kind = accelerator.current_accelerator().type
        count = accelerator.device_count()
        name = torch.cuda.get_device_name(0) if kind == "cuda" else kind
        if kind == "cuda" and (architectures := _foreign_architectures(torch)):
            major, minor = torch.cuda.get_device_capability(0)
            return Finding(
                "device",
                PROBLEM,
                f"torch {torch.__version__} has no kernels for {name}, whose compute capability is "
                f"{major}.{minor}, but for {', '.join(architectures)}",
                "install a build of torch for this GPU: https://pytorch.org/get-started",
            )
        return Finding("device", OK, f"{count} x {name} ({kind}), {cpu}")
    if nvidia:
        return Finding(
            "device",
            WARNING,
            f"the NVIDIA driver is installed, but torch {torch.__version__} does not use it; "
            f"compute runs on {cpu}",
            "install a CUDA build of torch whose version the driver supports (nvidia-smi)",
        )
    return Finding(
        "device",
        WARNING,
        f"no accelerator found; compute runs on {cpu}",
        "correct but slow: suitable for small models and tests; `lohan plan --machine` forecasts "
        "a GPU",
    )


def _foreign_architectures(torch: Any) -> list[str]:
    """Return the architectures that torch was built for, if the first GPU runs none of them.

    A GPU runs kernels of its own major version and of a minor version up to its own. The driver
    compiles `compute_` entries for every later GPU.
    """
    capability = torch.cuda.get_device_capability(0)
    architectures = [str(name) for name in torch.cuda.get_arch_list()]
    for name in architectures:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", name)
        if match is None:  # an architecture of AMD
            return []
        version = int(match[2]), int(match[3])
        if version <= capability and (match[1] == "compute" or version[0] == capability[0]):
            return []
    return architectures


# -- Memory and system -----------------------------------------------------------------------------


def check_memory() -> Iterator[Finding]:
    total, free = total_memory_bytes(), host_memory_bytes()
    text = f"{format_bytes(free)} of {format_bytes(total)} is available"
    if free < LITTLE_MEMORY:
        yield Finding("memory", WARNING, text, "close other programs, or set --host below that")
    else:
        yield Finding("memory", OK, text)
    limit = cgroup_memory_limit()
    if limit is None:
        yield Finding("memory limit", OK, "no cgroup limit")
    else:
        yield Finding(
            "memory limit",
            WARNING if limit < total // 2 else OK,
            f"the cgroup (container or service) allows {format_bytes(limit)}",
            "keep --host about 1 GiB below it; file caches of the process count too",
        )


def check_locked(*, accelerator: bool | None = None) -> Iterator[Finding]:
    """Check how much memory may be pinned for transfers to a device.

    The limit does not matter on a machine without an accelerator.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield Finding("locked memory", OK, "no limit")
        return
    text = f"limit {format_bytes(soft)}"
    most = "any size" if hard == resource.RLIM_INFINITY else format_bytes(hard)
    text += "" if hard == soft else f", can be raised to {most}"
    if has_accelerator() if accelerator is None else accelerator:
        state = WARNING if soft < LITTLE_LOCKED else OK
    else:
        state, text = OK, f"{text}; only a device would need more"
    yield Finding(
        "locked memory",
        state,
        text,
        "ulimit -l unlimited, or memlock in /etc/security/limits.conf; CUDA pins memory without "
        "this limit, other devices may not",
    )


def has_accelerator() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(getattr(torch, "accelerator", None) and torch.accelerator.is_available())


def check_system() -> Iterator[Finding]:
    release = platform.release()
    if platform.system() != "Linux":
        yield Finding("system", PROBLEM, f"{platform.system()} {release}", "LoHan needs Linux")
    elif "microsoft" in release.lower():
        yield Finding(
            "system",
            WARNING,
            f"Linux {release} under WSL2",
            f"WSL2 gets half of the memory unless {WSL_CONFIG} says otherwise, and folders below "
            "/mnt/c go through the network file system 9p: keep --ssd inside the Linux disk",
        )
    else:
        yield Finding("system", OK, f"Linux {release}")


# -- The --ssd folders: whether and how they can be written, and their drives ----------------------


PROBE_BYTES = MiB
WAIT_S = 10.0
LITTLE_SPACE = 20 * GiB
WORN_PERCENT, NEARLY_WORN_PERCENT = 100, 80
DEFAULT = STATE_FORMATS["bf16"]  # bf16 needs as many bytes per parameter as fp32.
STATE_BYTES = int(
    2 * (DEFAULT.weight_bytes + DEFAULT.state_bytes)
)  # bytes per parameter, for both slots


def check_drives(ssd: Sequence[Path]) -> Iterator[Finding]:
    for path in ssd:
        yield from check_ssd(path)
    yield from check_shared(ssd)


def check_ssd(path: Path) -> list[Finding]:
    """Check whether and how one --ssd folder can be written, and its file system and drives."""
    subject = str(path)
    if not path.is_dir():
        return [Finding(subject, PROBLEM, "no such folder", "create it, or choose another --ssd")]
    drives = [drive_finding(subject, drive) for drive in drives_of(path)]
    findings = [_kind(path), *drives, _space(path)]
    try:
        with tempfile.TemporaryDirectory(prefix="lohan-doctor-", dir=path) as folder:
            findings += _tried(subject, Path(folder))
    except OSError as error:
        text = f"cannot be written to: {error.strerror}"
        findings.append(Finding(subject, PROBLEM, text, "choose a folder that you may write to"))
    return findings


def _kind(path: Path) -> Finding:
    mount = mount_of(path)
    if mount is None:
        return Finding(str(path), WARNING, "file system not known", "check /proc/self/mountinfo")
    text = f"file system {mount.kind} on {mount.source}"
    for kinds, what, advice in _SLOW_FILE_SYSTEMS:
        if mount.kind in kinds:
            return Finding(str(path), WARNING, f"{text}: {what}", advice)
    return Finding(str(path), OK, text)


_SLOW_FILE_SYSTEMS = (
    (
        MEMORY,
        "it lies in memory",
        "state there takes the memory it should save and is gone after a "
        "reboot; choose a folder on a drive",
    ),
    (
        NETWORK,
        "it is reached over a network or another system",
        "every step moves the whole state; choose a local NVMe drive",
    ),
    (
        ("overlay",),
        "the writable layer of a container",
        "mount a folder of the host's NVMe drive into the container (docker run -v)",
    ),
    (
        COPY_ON_WRITE,
        "copies on every write",
        "ext4 or XFS is faster; on btrfs, chattr +C for an empty folder turns copying off",
    ),
)


def _space(path: Path) -> Finding:
    free = shutil.disk_usage(path).free
    room = free / STATE_BYTES / 1e9
    text = f"{format_bytes(free)} free, room for {room:.2g}B parameters in fp32 or bf16"
    if free < LITTLE_SPACE:
        return Finding(
            str(path), WARNING, text, f"a run takes {STATE_BYTES} bytes per parameter; free some"
        )
    return Finding(str(path), OK, text)


def drive_finding(subject: str, drive: DriveFacts) -> Finding:
    text = f"{drive.name}: {drive.model or 'model not known'}"
    health = drive.health
    if health is not None:
        text += (
            f"; {health.used_percent} % of its endurance used, "
            f"{format_bytes(health.written_bytes)} written so far"
        )
        if health.used_percent >= WORN_PERCENT:
            return Finding(subject, PROBLEM, text, "the drive has reached its rated life")
        if health.used_percent >= NEARLY_WORN_PERCENT:
            return Finding(subject, WARNING, text, "`lohan plan` forecasts how much a run writes")
    elif drive.name.startswith("nvme"):
        text += "; wear not readable without root"
    if drive.rotating:
        return Finding(
            subject,
            WARNING,
            f"{text}; reports a rotating disk",
            "a hard disk is far too slow; virtual disks report this too: see `lohan profile`",
        )
    return Finding(subject, OK, text)


def _tried(subject: str, folder: Path) -> Iterator[Finding]:
    """Write and read a probe file with io_uring and O_DIRECT, and report what is not available."""
    try:
        engine: Any = open_engine("uring")
        uring = None
    except ImportError:  # `check_core` reports a missing native core.
        return
    except StorageIOError as error:
        engine, uring = open_engine("threads"), error
    with closing(engine):
        try:
            _write_and_read(engine, folder / "probe.bin")
        except LohanError as error:
            yield Finding(subject, PROBLEM, str(error), "check the drive, or choose another --ssd")
            return
        if uring is None:
            yield Finding(subject, OK, "io_uring works")
        else:
            yield Finding(
                subject, WARNING, f"no io_uring ({uring}); threads are used instead", _why()
            )
        if engine.direct:
            yield Finding(subject, OK, "O_DIRECT works")
        else:
            yield Finding(
                subject,
                WARNING,
                "the file system refuses O_DIRECT",
                "transfers go through the page cache, which costs memory and speed; use ext4 or "
                "XFS on a local drive",
            )


def _why() -> str:
    with suppress(OSError):
        if (PROC / "sys/kernel/io_uring_disabled").read_text().strip() != "0":
            return "sysctl kernel.io_uring_disabled=0 allows it"
    return "containers often forbid it: docker run --security-opt seccomp=unconfined"


def _write_and_read(engine: IOEngine, file: Path) -> None:
    number = engine.open(str(file), size=PROBE_BYTES, create=True)
    sent, received = aligned_buffer(PROBE_BYTES), aligned_buffer(PROBE_BYTES)
    sent[:] = memoryview(os.urandom(PROBE_BYTES))
    engine.wait(engine.write(number, 0, sent), WAIT_S)
    engine.sync(number)
    received[:] = 0
    engine.wait(engine.read(number, 0, received), WAIT_S)
    if not (sent == received).all():
        raise StorageIOError(f"{file}: other bytes came back than were written")


def check_shared(ssd: Sequence[Path]) -> Iterator[Finding]:
    """Warn about folders on the same file system, which are no faster than one folder."""
    seen: dict[int, Path] = {}
    for path in ssd:
        with suppress(OSError):
            other = seen.setdefault(path.stat().st_dev, path)
            if other is not path:
                yield Finding(
                    str(path),
                    WARNING,
                    f"on the same file system as {other}",
                    "use one --ssd per drive; two on one drive are no faster",
                )
