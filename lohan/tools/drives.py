"""The folders for the state: can they be written to, how, and onto what."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from lohan.errors import LohanError, StorageIOError
from lohan.model.state import MODES
from lohan.store.engine import Engine, aligned_buffer, open_engine
from lohan.tools.findings import OK, PROBLEM, WARNING, Finding
from lohan.util.drive_facts import (
    COPY_ON_WRITE,
    MEMORY,
    NETWORK,
    PROC,
    DriveFacts,
    drives_of,
    mount_of,
)
from lohan.util.units import GiB, MiB, format_bytes

PROBE_BYTES = MiB
WAIT_S = 10.0
LITTLE_SPACE = 20 * GiB
WORN_PERCENT, NEARLY_WORN_PERCENT = 100, 80
USUAL = MODES["bf16"]  # as many bytes as fp32
STATE_BYTES = int(2 * (USUAL.weight_bytes + USUAL.state_bytes))  # per parameter, both slots


def check_drives(ssd: Sequence[Path]) -> Iterator[Finding]:
    for path in ssd:
        yield from check_ssd(path)
    yield from check_shared(ssd)


def check_ssd(path: Path) -> list[Finding]:
    """One --ssd folder: can it be written to, how, and onto what."""
    subject = str(path)
    if not path.is_dir():
        return [Finding(subject, PROBLEM, "no such folder", "create it, or choose another --ssd")]
    found = [_kind(path), *_drive(path), _space(path)]
    try:
        with tempfile.TemporaryDirectory(prefix="lohan-doctor-", dir=path) as folder:
            found += _tried(subject, Path(folder))
    except OSError as error:
        text = f"cannot be written to: {error.strerror}"
        found.append(Finding(subject, PROBLEM, text, "choose a folder that you may write to"))
    return found


def _kind(path: Path) -> Finding:
    mount = mount_of(path)
    if mount is None:
        return Finding(str(path), WARNING, "file system not known", "check /proc/self/mountinfo")
    text = f"file system {mount.kind} on {mount.source}"
    if mount.kind in MEMORY:
        return Finding(
            str(path), WARNING, f"{text}: it lies in memory",
            "state there takes the memory it should save and is gone after a reboot; choose a "
            "folder on a drive",
        )  # fmt: skip
    if mount.kind in NETWORK:
        return Finding(
            str(path), WARNING, f"{text}: it is reached over a network or another system",
            "every step moves the whole state; choose a local NVMe drive",
        )  # fmt: skip
    if mount.kind == "overlay":
        return Finding(
            str(path), WARNING, f"{text}: the writable layer of a container",
            "mount a folder of the host's NVMe drive into the container (docker run -v)",
        )  # fmt: skip
    if mount.kind in COPY_ON_WRITE:
        return Finding(
            str(path), WARNING, f"{text}: copies on every write",
            "ext4 or XFS is faster; on btrfs, chattr +C for an empty folder turns copying off",
        )  # fmt: skip
    return Finding(str(path), OK, text)


def _space(path: Path) -> Finding:
    free = shutil.disk_usage(path).free
    room = free / STATE_BYTES / 1e9
    text = f"{format_bytes(free)} free, room for {room:.2g}B parameters in fp32 or bf16"
    if free < LITTLE_SPACE:
        return Finding(
            str(path), WARNING, text, f"a run takes {STATE_BYTES} bytes per parameter; free some"
        )
    return Finding(str(path), OK, text)


def _drive(path: Path) -> Iterator[Finding]:
    for drive in drives_of(path):
        yield drive_finding(str(path), drive)


def drive_finding(subject: str, drive: DriveFacts) -> Finding:
    text = f"{drive.name}: {drive.model or 'model not known'}"
    health = drive.health
    if health is not None:
        text += (
            f"; {health.used_percent} % of its endurance used, "
            f"{format_bytes(health.written_bytes)} written so far"
        )
        if health.used_percent >= WORN_PERCENT:
            return Finding(subject, PROBLEM, text, "the drive is worn out by its maker's measure")
        if health.used_percent >= NEARLY_WORN_PERCENT:
            return Finding(subject, WARNING, text, "`lohan plan` tells how much a run will write")
    elif drive.name.startswith("nvme"):
        text += "; wear not readable without root"
    if drive.rotating:
        return Finding(
            subject, WARNING, f"{text}; says that it rotates",
            "a hard disk is far too slow; virtual disks say so too, `lohan profile` measures them",
        )  # fmt: skip
    return Finding(subject, OK, text)


def _tried(subject: str, folder: Path) -> Iterator[Finding]:
    """io_uring and O_DIRECT, by writing and reading."""
    try:
        engine: Any = open_engine("uring")
        uring = None
    except ImportError:  # the native core is a finding of its own
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
                subject, WARNING, f"no io_uring ({uring}); threads take its place", _why()
            )
        if engine.direct:
            yield Finding(subject, OK, "O_DIRECT works")
        else:
            yield Finding(
                subject, WARNING, "the file system refuses O_DIRECT",
                "transfers go through the page cache, which costs memory and speed; use ext4 or "
                "XFS on a local drive",
            )  # fmt: skip


def _why() -> str:
    with suppress(OSError):
        if (PROC / "sys/kernel/io_uring_disabled").read_text().strip() != "0":
            return "sysctl kernel.io_uring_disabled=0 allows it"
    return "containers often forbid it: docker run --security-opt seccomp=unconfined"


def _write_and_read(engine: Engine, file: Path) -> None:
    number = engine.open(str(file), size=PROBE_BYTES, create=True)
    sent, back = aligned_buffer(PROBE_BYTES), aligned_buffer(PROBE_BYTES)
    sent[:] = memoryview(os.urandom(PROBE_BYTES))
    engine.wait(engine.write(number, 0, sent), WAIT_S)
    engine.sync(number)
    back[:] = 0
    engine.wait(engine.read(number, 0, back), WAIT_S)
    if not (sent == back).all():
        raise StorageIOError(f"{file}: other bytes came back than were written")


def check_shared(ssd: Sequence[Path]) -> Iterator[Finding]:
    """Two folders on one drive are no faster than one."""
    seen: dict[int, Path] = {}
    for path in ssd:
        with suppress(OSError):
            other = seen.setdefault(path.stat().st_dev, path)
            if other is not path:
                yield Finding(
                    str(path), WARNING, f"on the same file system as {other}",
                    "one --ssd per drive; two on one drive only take turns",
                )  # fmt: skip
