"""One process per store: flock on a file in every directory.

The kernel drops the lock when its holder dies, however it dies. The descriptor is closed on exec
and in forked children, so only the process that opened the store holds it. A symbolic link at the
lock's name is not followed, and a file that is not a lock is not written to.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lohan.errors import StoreError
from lohan.store.files import LOCK, check_vacant

RETRIES, PAUSE_S = 5, 0.01  # `is_locked` of another process has the lock for an instant
_held: set[int] = set()
_registered = False


class StoreLock:
    """The locks of a store's directories, taken together and released together."""

    def __init__(self, dirs: Sequence[Path], *, vacant: bool = False, name: str = LOCK) -> None:
        """With `vacant`, a directory that another process has filled meanwhile is refused."""
        self._fds: list[int] = []
        try:
            for directory in dirs:
                self._fds.append(_acquire(directory / name))
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


def is_locked(directory: Path, *, name: str = LOCK) -> bool:
    """Whether some process has the store open. The lock itself is tried, shared and for an instant:
    the number in the file may by now be another process's."""
    try:
        fd = os.open(directory / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def lock_holder(directory: Path, *, name: str = LOCK) -> int | None:
    """The process that has the store open; None: no process has. 0: one that cannot be told."""
    if not is_locked(directory, name=name):
        return None
    try:
        text = (directory / name).read_bytes()[:32].strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() else 0


def _acquire(path: Path) -> int:
    global _registered
    if not _registered:
        os.register_at_fork(after_in_child=_close_in_child)
        _registered = True
    while True:
        fd = _open(path)
        try:
            _check_lock_file(path, fd)
            _flock(path, fd)
            there = path.exists() and os.fstat(fd).st_ino == path.stat().st_ino
        except BaseException:
            os.close(fd)
            raise
        if there:
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


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise StoreError(
                f"{path}: is a symbolic link, and a lock file is expected there; remove the link"
            ) from error
        raise StoreError(
            f"{path}: cannot open the lock file: {error.strerror};"
            " check that the directory exists and that you may write to it"
        ) from error


def _check_lock_file(path: Path, fd: int) -> None:
    """A lock holds nothing, or the number of a process."""
    text = os.pread(fd, 64, 0).strip()
    if text and not text.isdigit():
        raise StoreError(f"{path}: is not a lock file, it is left as it is; move it away")


def _flock(path: Path, fd: int) -> None:
    for attempt in range(RETRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if attempt + 1 < RETRIES:
                time.sleep(PAUSE_S)
                continue
            holder = lock_holder(path.parent, name=path.name)
            raise StoreError(
                f"{path.parent} is in use by process {holder or 'unknown'};"
                " wait for it to finish or stop it"
            ) from error


def _close_in_child() -> None:
    for fd in _held:
        os.close(fd)
    _held.clear()
