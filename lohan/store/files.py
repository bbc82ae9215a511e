"""The files of a store directory: names, durable replacement, free space, removal and locks."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from lohan.errors import StorageIOError, StoreError
from lohan.util.files import sync_folder
from lohan.util.units import format_bytes

IDENTITY, MANIFEST, LOCK = "store.json", "manifest.json", "lock"
# The manifest of a commit that not all ranks have prepared yet.
PREPARED = "manifest.prepared"
FIXED, SCRATCH = "fixed.bin", "scratch.bin"
SLOTS = ("slot-a.bin", "slot-b.bin")
CHECKSUM_FILES = ("slot-a.crc", "slot-b.crc")
TEMPORARY = ".tmp"
# The log of gradients: its manifest, and its data in each directory.
LOG, LOG_DATA = "log.json", "log.bin"
LOG_PREPARED = "log.prepared"  # the log manifest of a step that not all ranks have prepared yet
# Suffix of the sibling directory in which a session stores activations.
ACTIVATIONS = "-activations"
# All files of a store, in the order in which they are removed. Without a manifest, the remaining
# files are an unfinished store; without an identity, they are not a store.
_OWNED = (
    MANIFEST,
    PREPARED,
    *(
        name + TEMPORARY
        for name in (MANIFEST, PREPARED, *CHECKSUM_FILES, IDENTITY, LOG, LOG_PREPARED)
    ),
    LOG,
    LOG_PREPARED,
    *CHECKSUM_FILES,
    *SLOTS,
    FIXED,
    SCRATCH,
    LOG_DATA,
    IDENTITY,
    LOCK,
)
_LEFTOVERS = frozenset({LOCK, IDENTITY + TEMPORARY})


class NoRoomError(StoreError):
    """Raised if a file system has too little free space for a store; nothing has been written."""


def store_dirs(dirs: str | Path | Sequence[str | Path]) -> tuple[Path, ...]:
    """Return the absolute paths of one or several directories, which must all be different."""
    listed = [dirs] if isinstance(dirs, (str, Path)) else list(dirs)
    paths = tuple(Path(d).absolute() for d in listed)
    if not paths:
        raise StoreError("a store needs at least one directory; none was given")
    if len({path.resolve() for path in paths}) != len(paths):
        raise StoreError(f"store directories {', '.join(map(str, paths))} are not all different")
    return paths


@contextmanager
def storage_errors(what: str) -> Iterator[None]:
    """Convert an OSError of the `with` body to a StorageIOError that names the operation `what`."""
    try:
        yield
    except OSError as error:
        prefix = f"{error.filename}: " if error.filename else ""
        raise StorageIOError(
            f"{prefix}{what} failed: {error.strerror or error}; check the drive, its space and your"
            " permissions, then repeat the command"
        ) from error


def rename_durably(source: Path, target: Path) -> None:
    """Rename a file or directory atomically, and make the new name durable before returning.

    After a crash during the call, either the old or the new content is at `target`.
    """
    try:
        source.replace(target)
    except OSError as error:
        raise StorageIOError(
            f"{source}: cannot be renamed to {target}: {error.strerror or error}; check the drive"
            " and your permissions, then repeat the command"
        ) from error
    sync_directory(target.parent)


def sync_directory(path: Path) -> None:
    try:
        sync_folder(path)
    except OSError as error:
        raise StorageIOError(
            f"{path}: the names in it cannot be made durable: {error.strerror or error}; check the"
            " drive, then repeat the command"
        ) from error


def make_directories(dirs: Iterable[Path]) -> list[Path]:
    """Create the missing directories with their parents; return the created ones, parents first."""
    created: list[Path] = []
    for directory in dirs:
        missing = [p for p in (directory, *directory.parents) if not p.exists()]
        for path in reversed(missing):
            try:
                path.mkdir(mode=0o700)
                created.append(path)
                sync_directory(path.parent)
            except FileExistsError:  # Another rank created it first.
                if path.is_dir():
                    continue
                remove_empty(created)
                raise StoreError(
                    f"{path}: a file is where the store directory should be; choose another"
                ) from None
            except OSError as error:
                remove_empty(created)
                raise StoreError(
                    f"{path}: cannot create the store directory: {error.strerror};"
                    " choose a directory that you may write to"
                ) from error
            except StorageIOError:
                remove_empty(created)
                raise
    return created


def remove_empty(created: Sequence[Path]) -> None:
    """Undo `make_directories`: remove the directories that are still empty, children first."""
    for path in reversed(created):
        try:
            path.rmdir()
        except OSError:
            continue


def check_vacant(directory: Path) -> None:
    """Raise StoreError unless a new store can be created in the directory.

    The directory must be missing, or empty except for leftovers of an interrupted creation.
    """
    if not directory.exists():
        return
    if not directory.is_dir():
        raise StoreError(f"{directory} is a file; a store needs a directory")
    names = sorted(p.name for p in directory.iterdir() if p.name not in _LEFTOVERS)
    if IDENTITY in names:
        raise StoreError(
            f"{directory} already holds a store; continue it (`lohan resume`, or "
            f"attach(..., resume=True)), or remove it with `lohan store rm {directory}`"
        )
    if names:
        raise StoreError(
            f"{directory} is not empty (it holds {names[0]!r}); choose an empty directory"
        )


def check_free_space(needed: Mapping[Path, int]) -> None:
    """Raise NoRoomError if a file system has less free space than the store needs.

    Requirements of directories on the same file system are added up.
    """
    filesystems: dict[int, tuple[int, int, list[Path]]] = {}
    for directory, nbytes in needed.items():
        existing = next(p for p in (directory, *directory.parents) if p.exists())
        status = os.statvfs(existing)
        # A pseudo file system cannot hold files; creating the directory reports the error.
        if status.f_blocks == 0:
            continue
        free = status.f_bavail * status.f_frsize
        device = existing.stat().st_dev
        _, total, members = filesystems.get(device, (free, 0, []))
        filesystems[device] = (free, total + nbytes, [*members, directory])
    for free, total, members in filesystems.values():
        if total > free:
            raise NoRoomError(
                f"the store needs {format_bytes(total)} in {', '.join(map(str, members))}, but"
                f" {format_bytes(free)} are free there; free some space or add a drive"
            )


def free_bytes(dirs: Sequence[Path]) -> int:
    """Return the largest total size of files that fit, one file of equal size per directory."""
    rooms: list[float] = []
    existing = [next(p for p in (path, *path.parents) if p.exists()) for path in dirs]
    devices = [path.stat().st_dev for path in existing]
    for path, device in zip(existing, devices, strict=True):
        status = os.statvfs(path)
        if status.f_blocks:
            rooms.append(status.f_bavail * status.f_frsize / devices.count(device))
    return int(len(dirs) * min(rooms, default=0.0))


def delete_files(directory: Path) -> None:
    """Delete the files of a store in a directory, and no others."""
    for name in _OWNED:
        (directory / name).unlink(missing_ok=True)


def check_replaceable(directory: Path) -> None:
    """Raise StoreError if the directory contains anything but files of a store."""
    foreign = sorted({p.name for p in directory.iterdir()}.difference(_OWNED))
    if foreign:
        raise StoreError(
            f"{directory} holds {foreign[0]!r}, no file of a store, so it is not replaced;"
            " move that elsewhere"
        )


def activation_dirs(dirs: Iterable[Path]) -> list[Path]:
    """Return the directories for a session's activations: a sibling of each store directory."""
    return [path.with_name(path.name + ACTIVATIONS) for path in dirs]


def unfinished(directory: Path) -> bool:
    """Return whether the directory holds a store that was never committed.

    This includes a directory with only the files of a creation that was interrupted at its start.
    """
    if only_leftovers(directory):
        return True
    begun = any((directory / name).exists() for name in (MANIFEST, PREPARED))
    return (directory / IDENTITY).exists() and not begun


def only_leftovers(directory: Path) -> bool:
    """Return whether the directory holds only the first files of an interrupted creation."""
    names = {p.name for p in directory.iterdir()} if directory.is_dir() else set()
    return bool(names) and names <= _LEFTOVERS


# -- One process per store: flock on a file in every directory -------------------------------------
#
# The kernel releases the lock when its holder dies for any reason. The descriptor is closed on exec
# and in forked children, so only the process that opened the store holds the lock. A symbolic link
# at the name of the lock file is not followed, and a file that is not a lock file is not written
# to.


# Acquiring is retried, because `is_locked` in another process holds the lock for a moment.
RETRIES, PAUSE_S = 5, 0.01
_held: set[int] = set()
_registered = False


class StoreLock:
    """The locks of all directories of a store, acquired together and released together."""

    def __init__(self, dirs: Sequence[Path], *, vacant: bool = False, name: str = LOCK) -> None:
        """Acquire the locks.

        With `vacant`, StoreError is raised if another process has put files into a directory
        meanwhile.
        """
        self._fds: list[int] = []
        try:
            for directory in dirs:
                self._fds.append(_acquire(directory / name))
                if vacant:
                    check_vacant(directory)
        except BaseException:
            self.release()
            raise

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Release all locks, even if an exception interrupts the release of one of them."""
        while self._fds:
            fd = self._fds.pop()
            # In a forked child the descriptor is already closed.
            if fd not in _held:
                continue
            try:
                # A process id that remains in the file is ignored when the lock is not held.
                with suppress(OSError):
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
    """Return whether a process has the store open.

    This tries to acquire the lock itself, shared and only for a moment. The process id in the file
    is not sufficient, because another process may have been given the same id since.
    """
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
    """Return the id of the process that has the store open, or None if no process has.

    The result is 0 if the store is locked but the process id is not known.
    """
    if not is_locked(directory, name=name):
        return None
    try:
        text = (directory / name).read_bytes()[:32].strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() else 0


def _is_at(path: Path, fd: int) -> bool:
    try:
        return os.fstat(fd).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False


def _acquire(path: Path) -> int:
    global _registered
    if not _registered:
        os.register_at_fork(after_in_child=_close_in_child)
        _registered = True
    while True:
        fd, created = _open(path)
        try:
            _check_lock_file(path, fd)
            _flock(path, fd)
            current = _is_at(path, fd)
        except BaseException:
            if created:
                with suppress(OSError):  # If another process has acquired the lock, keep the file.
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
            os.close(fd)
            raise
        if current:
            break
        # The store was removed between open and flock, so this inode guards nothing.
        os.close(fd)
    _held.add(fd)
    try:
        # Writing the process id may fail, for example on a full drive; the lock is valid without
        # it.
        with suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BaseException:
        _held.discard(fd)
        os.close(fd)
        raise
    return fd


def _open(path: Path) -> tuple[int, bool]:
    """Open the lock file, and return its descriptor and whether the file is new."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        try:
            return os.open(path, flags | os.O_EXCL, 0o600), True
        except FileExistsError:
            return os.open(path, flags, 0o600), False
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise StoreError(
                f"{path}: is a symbolic link, and a lock file is expected there; remove the link"
            ) from error
        if error.errno == errno.EROFS:
            raise StoreError(
                f"{path.parent}: its file system is read-only; Linux makes it so after errors of "
                "the drive: look at `dmesg`, repair and remount it, then repeat the command"
            ) from error
        raise StoreError(
            f"{path}: cannot open the lock file: {error.strerror};"
            " check that the directory exists and that you may write to it"
        ) from error


def _check_lock_file(path: Path, fd: int) -> None:
    """Raise StoreError unless the file is empty or contains a process id."""
    try:
        text = os.pread(fd, 64, 0).strip()
    except OSError as error:
        raise StorageIOError(
            f"{path}: the lock file cannot be read: {error.strerror}; check the drive, then repeat"
            " the command"
        ) from error
    if text and not text.isdigit():
        raise StoreError(f"{path}: is not a lock file and was left unchanged; move it away")


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
