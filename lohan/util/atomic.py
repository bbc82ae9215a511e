"""Files that are replaced as a whole: after a crash the old bytes or the new ones are there.

The new bytes go to a hidden file of a fixed name in the same folder, which is synced and renamed
over the target; then the folder is synced. What a killed process left under that name goes first.
A symbolic link at the hidden name is removed, never followed; one at the target is replaced.
"""

from __future__ import annotations

import os
from pathlib import Path

SUFFIX = ".lohan-tmp"


def write_atomic(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Raises OSError, and then leaves the old file as it was. `mode` is narrowed by the umask."""
    temporary = temporary_of(path)
    try:
        temporary.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, mode)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(fd, rest) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def temporary_of(path: Path) -> Path:
    return path.with_name(f".{path.name}{SUFFIX}")


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
