"""One process per store: flock on a file in every directory.

The kernel drops the lock when its holder dies, however it dies. The descriptor is closed on exec
and in forked children, so only the process that opened the store holds it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

from lohan.errors import StoreError
from lohan.storage.files import LOCK, check_vacant

_held: set[int] = set()
_registered = False


class StoreLock:
    """The locks of a store's directories, taken together and released together."""

    def __init__(self, dirs: Sequence[Path], *, vacant: bool = False) -> None:
        """With `vacant`, a directory that another process has filled meanwhile is refused."""
        self._fds: list[int] = []
        try:
            for directory in dirs:
                self._fds.append(_acquire(directory))
                if vacant:
                    check_vacant(directory)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        for fd in self._fds:
            if fd in _held:  # not in a forked child, where it is already closed
                _held.discard(fd)
                os.ftruncate(fd, 0)
                os.close(fd)
        self._fds = []


def lock_holder(directory: Path) -> int | None:
    """The process that has the store open, as far as its lock file tells; takes no lock."""
    try:
        pid = int((directory / LOCK).read_text())
        os.kill(pid, 0)
    except PermissionError:
        return pid
    except (OSError, ValueError, OverflowError):  # a number that no process can have
        return None
    return pid


def _acquire(directory: Path) -> int:
    global _registered
    if not _registered:
        os.register_at_fork(after_in_child=_close_in_child)
        _registered = True
    path = directory / LOCK
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(
                f"{path}: cannot open the lock file: {error.strerror};"
                " check that the directory exists and that you may write to it"
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            holder = lock_holder(directory)
            raise StoreError(
                f"{directory} is in use by process {holder if holder is not None else 'unknown'};"
                " wait for it to finish or stop it"
            ) from error
        if path.exists() and os.fstat(fd).st_ino == path.stat().st_ino:
            break
        os.close(fd)  # the store was removed between open and flock: this inode guards nothing
    _held.add(fd)
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _close_in_child() -> None:
    for fd in _held:
        os.close(fd)
    _held.clear()
