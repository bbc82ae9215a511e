"""Facts about this machine: memory, drives, how libraries are set up, models in the hub's cache."""

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

# -- What this machine has: free host memory (cgroup included) and this process's own use ----------


_UNLIMITED = 2**60


def host_memory_bytes() -> int:
    """Memory that a new run can count on: what is free, or what the cgroup leaves, if less."""
    import psutil  # not where nothing is asked of this machine: it takes a while

    free = psutil.virtual_memory().available
    limits = [limit - used for limit, used in _cgroup_limits() if limit < _UNLIMITED]
    return max(0, min([int(free), *limits]))


def total_memory_bytes() -> int:
    import psutil

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
        for group in (folder, *folder.parents):
            if not group.is_relative_to(root):
                break
            limit, used = _number(group / names[0]), _number(group / names[1])
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
    import psutil

    return int(psutil.Process().memory_info().rss)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def return_freed_memory() -> None:
    """What was freed goes back to the system, now and from now on: tensors of 8 MiB and more have a
    mapping of their own. glibc by itself raises that size to 32 MiB as soon as one is freed; holes
    between tensors then stay resident, 250 MiB of them after forty steps of a 135M model. The
    user's choice in the environment stays, and so do other allocators."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim") and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        libc.mallopt(_M_MMAP_THRESHOLD, 8 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 32 << 20)
        libc.malloc_trim(0)


# -- What the system says about the drive below a folder: file system, model, wear -----------------
#
# Reads only.


SYS, PROC = Path("/sys"), Path("/proc")
MEMORY = frozenset({"tmpfs", "ramfs"})
NETWORK = frozenset({
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "glusterfs", "lustre", "beegfs", "afs", "9p",
    "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.glusterfs", "fuse.rclone", "fuse.mount-s3",
    "virtiofs", "drvfs", "gpfs", "ocfs2",
})  # fmt: skip
COPY_ON_WRITE = frozenset({"btrfs", "zfs", "bcachefs"})
UNIT = 512_000  # bytes, in which NVMe counts what was written
_ADMIN_COMMAND, _GET_LOG, _HEALTH, _LOG_BYTES = 0xC0484E41, 0x02, 0x02, 512


@dataclass(frozen=True)
class Mount:
    kind: str  # such as ext4
    source: str
    point: str


@dataclass(frozen=True)
class Health:
    """From the drive's own log. `used_percent`: of its rated endurance; may exceed 100."""

    used_percent: int
    written_bytes: int


@dataclass(frozen=True)
class DriveFacts:
    """One physical drive; None: not known or not permitted."""

    name: str  # such as nvme0n1
    model: str | None
    rotating: bool | None
    health: Health | None
    bytes: int = 0  # 0: not known


def mount_of(path: Path) -> Mount | None:
    """The file system that holds a path: the last one mounted on the nearest folder above."""
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
    """mountinfo writes spaces and the like as octal."""
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, char)
    return text


def drives_of(path: Path) -> list[DriveFacts]:
    """The drives below a folder, through partitions, LVM and RAID; empty if there are none to be
    seen (tmpfs, network, container)."""
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
        name=disk.name, model=_text(disk / "device/model"),
        rotating=None if rotating is None else rotating == "1",
        health=health_of(Path("/dev") / disk.name) if disk.name.startswith("nvme") else None,
        bytes=512 * int(_text(disk / "size") or 0),
    )  # fmt: skip


def _text(file: Path) -> str | None:
    with suppress(OSError):
        return file.read_text().strip() or None
    return None


# -- wear -----------------------------------------------------------------------------------------


class _Command(ctypes.Structure):
    """struct nvme_passthru_cmd of linux/nvme_ioctl.h."""

    _fields_ = (
        ("opcode", ctypes.c_uint8), ("flags", ctypes.c_uint8), ("reserved", ctypes.c_uint16),
        ("nsid", ctypes.c_uint32), ("cdw2", ctypes.c_uint32), ("cdw3", ctypes.c_uint32),
        ("metadata", ctypes.c_uint64), ("addr", ctypes.c_uint64),
        ("metadata_len", ctypes.c_uint32), ("data_len", ctypes.c_uint32),
        ("cdw10", ctypes.c_uint32), ("cdw11", ctypes.c_uint32), ("cdw12", ctypes.c_uint32),
        ("cdw13", ctypes.c_uint32), ("cdw14", ctypes.c_uint32), ("cdw15", ctypes.c_uint32),
        ("timeout_ms", ctypes.c_uint32), ("result", ctypes.c_uint32),
    )  # fmt: skip


def health_of(device: Path) -> Health | None:
    """The health log of an NVMe drive; None without the right to ask for it."""
    log = ctypes.create_string_buffer(_LOG_BYTES)
    command = _Command(
        opcode=_GET_LOG, nsid=0xFFFFFFFF, addr=ctypes.addressof(log), data_len=_LOG_BYTES,
        cdw10=(_LOG_BYTES // 4 - 1) << 16 | _HEALTH, timeout_ms=1000,
    )  # fmt: skip
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
    """SMART / Health Information of the NVMe specification: what of it counts here."""
    written = int.from_bytes(log[48:64], "little") * UNIT
    return Health(used_percent=log[5], written_bytes=written)


# -- What libraries read from the environment when they are imported -------------------------------
#
# The user's choice stays.


def set_up_libraries() -> None:
    return_freed_memory()
    # Threads of the optimizer and of I/O share the cores with torch's. Those would spin at OpenMP
    # barriers and take the time from them: without it a sketch of this design was 17 % faster at
    # 256 tokens on two cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Memory of a device that was used in one size serves for others then. torch reads it when it is
    # imported, and does without it where the system cannot (WSL2).
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    # transformers tells newcomers about matters of its own; errors still come through.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@contextmanager
def offline() -> Iterator[None]:
    """Nothing is fetched from the hub meanwhile, also where its libraries were imported before and
    have read the environment: a folder is all that a model comes from."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


# -- Models of the Hugging Face hub by name: from its cache here, or fetched into it ---------------


# What a model is made of; other formats of the same weights, and code, stay where they are.
FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def cached_folder(name: str) -> Path | None:
    """The folder of a model that is named as ORG/NAME, if the whole of it is cached."""
    if not _NAME.fullmatch(name) or ".." in name:
        return None
    from huggingface_hub import snapshot_download

    try:
        return _check_complete(
            Path(snapshot_download(name, local_files_only=True, allow_patterns=FILES))
        )
    except Exception:  # not in the cache, or only a part of it
        return None


def fetch(name: str) -> Path | None:
    """As `cached_folder`; what is missing is fetched where the hub can be reached, which
    `HF_HUB_OFFLINE=1` forbids."""
    found = cached_folder(name)
    offline = os.environ.get("HF_HUB_OFFLINE", "0") != "0"
    if found is not None or offline or not _NAME.fullmatch(name) or ".." in name:
        return found
    from huggingface_hub import constants, snapshot_download

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, False
    try:
        return _check_complete(Path(snapshot_download(name, etag_timeout=5, allow_patterns=FILES)))
    except Exception as error:  # no network, no such model, no permission
        reason = str(error).strip().split("\n")[0] or "no reason given"
        raise ModelError(
            f"--model {name}: no such folder here, and it cannot be had from the Hugging Face hub "
            f"({type(error).__name__}: {reason}); check the name, the network and "
            "`hf auth login`, or give a local folder"
        ) from None
    finally:
        constants.HF_HUB_OFFLINE = before


def _check_complete(folder: Path) -> Path:
    """As far as a look at its files tells."""
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
