"""The files of a store directory: their names, durable replacement, free space, removal."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from lohan.errors import StorageIOError, StoreError
from lohan.store.deadline import sync_in_time
from lohan.util.units import format_bytes

IDENTITY, MANIFEST, LOCK = "store.json", "manifest.json", "lock"
PREPARED = "manifest.prepared"  # of a commit that other ranks have yet to prepare
FIXED, SCRATCH = "fixed.bin", "scratch.bin"
SLOTS = ("slot-a.bin", "slot-b.bin")
SUMS = ("slot-a.crc", "slot-b.crc")
TEMPORARY = ".tmp"
ACTIVATIONS = "-activations"  # behind a directory's name: a session's space for activations
# Removal order: without a manifest the rest is an unfinished store, without an identity nothing.
_OWNED = (
    MANIFEST,
    PREPARED,
    *(name + TEMPORARY for name in (MANIFEST, PREPARED, *SUMS, IDENTITY)),
    *SUMS,
    *SLOTS,
    FIXED,
    SCRATCH,
    IDENTITY,
    LOCK,
)
_LEFTOVERS = frozenset({LOCK, IDENTITY + TEMPORARY})


class NoRoomError(StoreError):
    """A file system has too little free space for a store; nothing was written."""


def store_dirs(dirs: str | Path | Sequence[str | Path]) -> tuple[Path, ...]:
    """Absolute paths of one or several directories, each given once."""
    given = [dirs] if isinstance(dirs, (str, Path)) else list(dirs)
    paths = tuple(Path(d).absolute() for d in given)
    if not paths:
        raise StoreError("a store needs at least one directory; none was given")
    if len({path.resolve() for path in paths}) != len(paths):
        raise StoreError(f"store directories {', '.join(map(str, paths))} are not all different")
    return paths


@contextmanager
def told(what: str) -> Iterator[None]:
    """A call of the system that fails, in an operation on stores that it is the name of."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise StorageIOError(
            f"{where}{what} failed: {error.strerror or error}; check the drive, its space and your"
            " permissions, then repeat the command"
        ) from error


def write_durably(path: Path, data: bytes) -> None:
    """Replaces a file so that after a crash it holds the old bytes or the new ones, whole."""
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(fd, rest) :]
            sync_in_time(lambda: os.fsync(fd), temporary)
        finally:
            os.close(fd)
        temporary.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        raise StorageIOError(
            f"{path}: cannot write {len(data)} bytes: {error.strerror or error};"
            " free some space or check the drive, then open the store again"
        ) from error


def rename_durably(source: Path, target: Path) -> None:
    """After a crash the old or the new file or directory is there, once it returns the new one."""
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
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            sync_in_time(lambda: os.fsync(fd), path)
        finally:
            os.close(fd)
    except OSError as error:
        raise StorageIOError(
            f"{path}: the names in it cannot be made durable: {error.strerror or error}; check the"
            " drive, then repeat the command"
        ) from error


def make_directories(dirs: Iterable[Path]) -> list[Path]:
    """Creates the missing ones with their parents; returns what it created, parents first."""
    created: list[Path] = []
    for directory in dirs:
        missing = [p for p in (directory, *directory.parents) if not p.exists()]
        for path in reversed(missing):
            try:
                path.mkdir(mode=0o700)
                created.append(path)
                sync_directory(path.parent)
            except FileExistsError:  # another rank was faster
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
    """Undoes `make_directories`: removes those that are still empty, children first."""
    for path in reversed(created):
        try:
            path.rmdir()
        except OSError:
            continue


def check_vacant(directory: Path) -> None:
    """A new store takes an empty or missing directory, nothing else."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise StoreError(f"{directory} is a file; a store needs a directory")
    names = sorted(p.name for p in directory.iterdir() if p.name not in _LEFTOVERS)
    if IDENTITY in names:
        raise StoreError(
            f"{directory} already holds a store; open it, or remove it with"
            f" `lohan store rm {directory}`"
        )
    if names:
        raise StoreError(
            f"{directory} is not empty (it holds {names[0]!r}); choose an empty directory"
        )


def check_free_space(needed: Mapping[Path, int], *, slots: int) -> None:
    """Refuses before anything is written. Directories on one file system add up."""
    halve = ', or use durability = "checkpoint", which needs half as much' if slots == 2 else ""
    filesystems: dict[int, tuple[int, int, list[Path]]] = {}
    for directory, nbytes in needed.items():
        existing = next(p for p in (directory, *directory.parents) if p.exists())
        status = os.statvfs(existing)
        if status.f_blocks == 0:  # not a place for files at all: making the folder will tell
            continue
        free = status.f_bavail * status.f_frsize
        device = existing.stat().st_dev
        _, total, members = filesystems.get(device, (free, 0, []))
        filesystems[device] = (free, total + nbytes, [*members, directory])
    for free, total, members in filesystems.values():
        if total > free:
            raise NoRoomError(
                f"the store needs {format_bytes(total)} in {', '.join(map(str, members))}, but"
                f" {format_bytes(free)} are free there; free some space or add a drive{halve}"
            )


def delete_files(directory: Path) -> None:
    """Removes the files of a store and nothing else."""
    for name in _OWNED:
        (directory / name).unlink(missing_ok=True)


def check_replaceable(directory: Path) -> None:
    """Nothing but files of a store lies there."""
    foreign = sorted({p.name for p in directory.iterdir()}.difference(_OWNED))
    if foreign:
        raise StoreError(
            f"{directory} holds {foreign[0]!r} beside a store, which cannot make way for a new one;"
            " move that elsewhere"
        )


def activation_dirs(dirs: Iterable[Path]) -> list[Path]:
    """Where a session that has a store open puts activations: beside each of its directories."""
    return [path.with_name(path.name + ACTIVATIONS) for path in dirs]


def unfinished(directory: Path) -> bool:
    """A store that was never committed, or the first instant of one."""
    if only_leftovers(directory):
        return True
    begun = any((directory / name).exists() for name in (MANIFEST, PREPARED))
    return (directory / IDENTITY).exists() and not begun


def only_leftovers(directory: Path) -> bool:
    """Nothing but what a creation that died in its first instant leaves."""
    names = {p.name for p in directory.iterdir()} if directory.is_dir() else set()
    return bool(names) and names <= _LEFTOVERS
