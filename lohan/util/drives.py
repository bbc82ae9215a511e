"""The drive below a folder: file system, model and wear. Nothing here writes."""

from __future__ import annotations

import ctypes
import fcntl
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SYS, PROC = Path("/sys"), Path("/proc")
MEMORY = frozenset({"tmpfs", "ramfs"})
NETWORK = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "ceph",
        "glusterfs",
        "lustre",
        "beegfs",
        "afs",
        "9p",
        "fuse.sshfs",
        "fuse.s3fs",
        "fuse.gcsfuse",
        "fuse.glusterfs",
        "fuse.rclone",
        "fuse.mount-s3",
        "virtiofs",
        "drvfs",
        "gpfs",
        "ocfs2",
    }
)
COPY_ON_WRITE = frozenset({"btrfs", "zfs", "bcachefs"})
UNIT = 512_000  # The unit, in bytes, in which NVMe counts written data.
_ADMIN_COMMAND, _GET_LOG, _HEALTH, _LOG_BYTES = 0xC0484E41, 0x02, 0x02, 512


@dataclass(frozen=True)
class Mount:
    kind: str  # The file system, such as ext4.
    source: str
    point: str


@dataclass(frozen=True)
class Health:
    """The wear of a drive, from its own log.

    `used_percent` is the used part of its rated endurance and may exceed 100.
    """

    used_percent: int
    written_bytes: int


@dataclass(frozen=True)
class DriveFacts:
    """One physical drive; a value is None if it is not known or reading it is not permitted."""

    name: str  # Such as nvme0n1.
    model: str | None
    rotating: bool | None
    health: Health | None
    bytes: int = 0  # 0 if it is not known.


def mount_of(path: Path) -> Mount | None:
    """Return the file system that holds a path: the last one mounted on its nearest ancestor."""
    with suppress(OSError):
        lines = (PROC / "self/mountinfo").read_text().splitlines()
        return nearest_mount(path.resolve(), lines)
    return None


def nearest_mount(path: Path, lines: list[str]) -> Mount | None:
    best: Mount | None = None
    for line in lines:
        mount_part, _, source_part = line.partition(" - ")
        fields, rest = mount_part.split(), source_part.split()
        if len(fields) < 5 or len(rest) < 2:
            continue
        point = _unescaped(fields[4])
        inside = path == Path(point) or Path(point) in path.parents
        if inside and (best is None or len(point) >= len(best.point)):
            best = Mount(rest[0], _unescaped(rest[1]), point)
    return best


def _unescaped(text: str) -> str:
    """Return a path in which the octal escapes of mountinfo are replaced by their characters."""
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, char)
    return text


def drives_of(path: Path) -> list[DriveFacts]:
    """Return the drives below a folder, through partitions, LVM and RAID.

    The list is empty if none are visible (tmpfs, network, container).
    """
    with suppress(OSError):
        device = path.stat().st_dev
        node = SYS / "dev/block" / f"{os.major(device)}:{os.minor(device)}"
        if node.exists():
            return [facts_of(disk) for disk in sorted(_disks(node.resolve()))]
    return []


def _disks(node: Path) -> set[Path]:
    if (node / "partition").exists():
        node = node.parent
    below = list((node / "slaves").glob("*")) if (node / "slaves").is_dir() else []
    if not below:
        return {node}
    return {disk for part in below for disk in _disks(part.resolve())}


def facts_of(disk: Path) -> DriveFacts:
    rotating = _text(disk / "queue/rotational")
    return DriveFacts(
        name=disk.name,
        model=_text(disk / "device/model"),
        rotating=None if rotating is None else rotating == "1",
        health=health_of(Path("/dev") / disk.name) if disk.name.startswith("nvme") else None,
        bytes=512 * int(_text(disk / "size") or 0),
    )


def _text(file: Path) -> str | None:
    with suppress(OSError):
        return file.read_text().strip() or None
    return None


# -- Wear ------------------------------------------------------------------------------------------


class _Command(ctypes.Structure):
    """The struct nvme_passthru_cmd of linux/nvme_ioctl.h."""

    _fields_ = (
        ("opcode", ctypes.c_uint8),
        ("flags", ctypes.c_uint8),
        ("reserved", ctypes.c_uint16),
        ("nsid", ctypes.c_uint32),
        ("cdw2", ctypes.c_uint32),
        ("cdw3", ctypes.c_uint32),
        ("metadata", ctypes.c_uint64),
        ("addr", ctypes.c_uint64),
        ("metadata_len", ctypes.c_uint32),
        ("data_len", ctypes.c_uint32),
        ("cdw10", ctypes.c_uint32),
        ("cdw11", ctypes.c_uint32),
        ("cdw12", ctypes.c_uint32),
        ("cdw13", ctypes.c_uint32),
        ("cdw14", ctypes.c_uint32),
        ("cdw15", ctypes.c_uint32),
        ("timeout_ms", ctypes.c_uint32),
        ("result", ctypes.c_uint32),
    )


def health_of(device: Path) -> Health | None:
    """Return the health of an NVMe drive, or None if reading it fails or is not permitted."""
    log = ctypes.create_string_buffer(_LOG_BYTES)
    command = _Command(
        opcode=_GET_LOG,
        nsid=0xFFFFFFFF,
        addr=ctypes.addressof(log),
        data_len=_LOG_BYTES,
        cdw10=(_LOG_BYTES // 4 - 1) << 16 | _HEALTH,
        timeout_ms=1000,
    )
    try:
        fd = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if fcntl.ioctl(fd, _ADMIN_COMMAND, command):
            return None
    except OSError:
        return None
    finally:
        os.close(fd)
    return read_health(log.raw)


def read_health(log: bytes) -> Health:
    """Parse the SMART / Health Information log of the NVMe specification."""
    written = int.from_bytes(log[48:64], "little") * UNIT
    return Health(used_percent=log[5], written_bytes=written)
