"""One process per store: flock on a file in every directory.

The kernel drops the lock when its holder dies, however it dies. The descriptor is closed on exec
and in forked children, so only the process that opened the store holds it.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lohan.errors import StoreError
from lohan.storage.files import LOCK, check_vacant

TRIES = 5
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
        """All of them, also when it is interrupted at one."""
        while self._fds:
            fd = self._fds.pop()
            if fd not in _held:  # in a forked child, where it is already closed
                continue
            try:
                with suppress(OSError):  # the number in it says nothing without the lock
                    os.ftruncate(fd, 0)
            except BaseException:
                _close(fd)
                self.release()
                raise
            _close(fd)


def _close(fd: int) -> None:
    _held.discard(fd)
    os.close(fd)


def is_locked(directory: Path) -> bool:
    """Whether some process has the store open. The lock itself is tried, shared and for an instant:
    the number in the file may by now be another process's."""
    try:
        fd = os.open(directory / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def lock_holder(directory: Path) -> int | None:
    """The process that has the store open; None: no process has. 0: one that cannot be told."""
    if not is_locked(directory):
        return None
    try:
        return int((directory / LOCK).read_text())
    except (OSError, ValueError):
        return 0


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
            _flock(fd)
        except OSError as error:
            os.close(fd)
            raise StoreError(
                f"{directory} is in use by process {lock_holder(directory) or 'unknown'};"
                " wait for it to finish or stop it"
            ) from error
        if path.exists() and os.fstat(fd).st_ino == path.stat().st_ino:
            break
        os.close(fd)  # the store was removed between open and flock: this inode guards nothing
    _held.add(fd)
    try:
        with suppress(OSError):  # a full drive, say: the lock counts, not the number in it
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BaseException:
        _held.discard(fd)
        os.close(fd)
        raise
    return fd


def _flock(fd: int) -> None:
    """Once more after an instant: another process may just be trying whether it is free."""
    for _ in range(TRIES - 1):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(0.01)
        else:
            return
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _close_in_child() -> None:
    for fd in _held:
        os.close(fd)
    _held.clear()
