"""Facts about this machine: memory, drives, library settings, and models in the hub's cache."""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lohan.errors import ModelError

# -- Free host memory, including cgroup limits, and the memory of this process ---------------------


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
    """Configure malloc to return freed memory to the system, and return what is free.

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


# -- The drive below a folder: file system, model and wear -----------------------------------------
#
# Nothing here writes.


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
UNIT = 512_000  # In bytes: the unit in which NVMe counts written data.
_ADMIN_COMMAND, _GET_LOG, _HEALTH, _LOG_BYTES = 0xC0484E41, 0x02, 0x02, 512


@dataclass(frozen=True)
class Mount:
    kind: str  # Such as ext4.
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
    """One physical drive; a value is None if it is not known or not permitted to read."""

    name: str  # Such as nvme0n1.
    model: str | None
    rotating: bool | None
    health: Health | None
    bytes: int = 0  # 0: not known.


def mount_of(path: Path) -> Mount | None:
    """Return the file system that holds a path: the last one mounted on its nearest ancestor."""
    with suppress(OSError):
        lines = (PROC / "self/mountinfo").read_text().splitlines()
        return nearest_mount(path.resolve(), lines)
    return None


def nearest_mount(path: Path, lines: list[str]) -> Mount | None:
    best: Mount | None = None
    for line in lines:
        left, _, right = line.partition(" - ")
        fields, rest = left.split(), right.split()
        if len(fields) < 5 or len(rest) < 2:
            continue
        point = _unescaped(fields[4])
        inside = path == Path(point) or Path(point) in path.parents
        if inside and (best is None or len(point) >= len(best.point)):
            best = Mount(rest[0], _unescaped(rest[1]), point)
    return best


def _unescaped(text: str) -> str:
    """Replace the octal escapes that mountinfo uses for whitespace and backslashes."""
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
    """Return the health of an NVMe drive, or None if it cannot be read or is not permitted."""
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


# -- Settings that libraries read from the environment when they are imported ----------------------
#
# Variables that the user has set are kept.


def set_up_libraries() -> None:
    return_freed_memory()
    # The threads of the optimizer and of I/O share the cores with torch's threads, which by default
    # spin at OpenMP barriers. Without spinning, a prototype of this design was 17 % faster at 256
    # tokens on two cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Let torch reuse device memory for allocations of other sizes. torch reads the variable when it
    # is imported, and ignores it if the system does not support it (WSL2).
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    # Suppress the warnings of transformers; errors are still shown.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@contextmanager
def offline() -> Iterator[None]:
    """Prevent downloads from the hub in the body, so that a model is read from its folder only.

    This also works if the hub's libraries are already imported and have read the environment.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


# -- Models of the Hugging Face hub by name: from the local cache, or downloaded into it -----------


# The files of a model. Code, and other formats of the same weights, are not downloaded.
FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def cached_folder(name: str) -> Path | None:
    """Return the folder of a model named ORG/NAME if it is completely cached, else None."""
    if not _NAME.fullmatch(name) or ".." in name:
        return None
    from huggingface_hub import snapshot_download

    try:
        return _check_complete(
            Path(snapshot_download(name, local_files_only=True, allow_patterns=FILES))
        )
    except Exception:  # It is not in the cache, or not completely.
        return None


def fetch(name: str) -> Path | None:
    """Return the folder of a model named ORG/NAME, and download it if it is not cached.

    `HF_HUB_OFFLINE=1` forbids the download. Return None if the name is not of this form, or if a
    download would be needed but is forbidden.
    """
    cached = cached_folder(name)
    offline = os.environ.get("HF_HUB_OFFLINE", "0") != "0"
    if cached is not None or offline or not _NAME.fullmatch(name) or ".." in name:
        return cached
    from huggingface_hub import constants, snapshot_download

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, False
    try:
        return _check_complete(Path(snapshot_download(name, etag_timeout=5, allow_patterns=FILES)))
    except Exception as error:  # No network, no such model, or no permission.
        reason = str(error).strip().split("\n")[0] or "no reason given"
        raise ModelError(
            f"--model {name}: no such folder here, and it cannot be downloaded from the Hugging "
            f"Face hub ({type(error).__name__}: {reason}); check the name, the network and "
            "`hf auth login`, or give a local folder"
        ) from None
    finally:
        constants.HF_HUB_OFFLINE = before


def _check_complete(folder: Path) -> Path:
    """Return the folder if all files of its model are present, else raise FileNotFoundError.

    The content of the weight files is not examined.
    """
    index = folder / "model.safetensors.index.json"
    if not (folder / "config.json").is_file() and not (folder / "model_index.json").is_file():
        raise FileNotFoundError(folder / "config.json")
    if not index.is_file() and not any(folder.rglob("*.safetensors")):
        raise FileNotFoundError(folder / "model.safetensors")
    if index.is_file():
        from lohan.util.files import load_json

        for shard in set(load_json(index)["weight_map"].values()):
            if not (folder / shard).is_file():
                raise FileNotFoundError(folder / shard)
    return folder
