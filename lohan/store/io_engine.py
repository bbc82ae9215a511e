"""I/O engines (submit, get a ticket, wait with a deadline), and the data files of a store.

A buffer is a C-contiguous uint8 numpy array whose address, length and file offset are multiples
of PAGE. The caller keeps it alive and untouched until the ticket has been waited for.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from lohan.errors import ConfigError, StorageIOError, StoreError
from lohan.store.files import FIXED, SCRATCH, SLOTS, sync_directory
from lohan.util.files import sync_in_time
from lohan.util.units import PAGE

if TYPE_CHECKING:
    from lohan.store.extents import Extent, Layout

Buffer = npt.NDArray[np.uint8]


class IOEngine(Protocol):
    """Moves bytes between aligned buffers and files; every completion is checked."""

    @property
    def name(self) -> str: ...

    def open(self, path: str, *, size: int, create: bool) -> int:
        """File number of `path`. With `create`, preallocates exactly `size` bytes; without, the
        file must exist and have exactly `size` bytes."""

    def read(self, file: int, offset: int, buffer: Buffer) -> int:
        """Submits a read of len(buffer) bytes; returns a ticket."""

    def write(self, file: int, offset: int, buffer: Buffer) -> int:
        """Submits a write of len(buffer) bytes; returns a ticket."""

    def wait(self, ticket: int, timeout_s: float) -> None:
        """Returns when the ticket's I/O is complete; raises StorageIOError naming path, offset,
        length and cause if it failed, came back short or missed the deadline. Each ticket is
        waited for exactly once; after a missed deadline it may be waited for again."""

    def sync(self, file: int) -> None:
        """fdatasync: everything written and waited for is durable when it returns."""

    def close(self) -> None:
        """Waits for what is in flight and closes all files."""


def aligned_buffer(size: int) -> Buffer:
    """An uninitialised buffer whose address is a multiple of PAGE; `size` stays as given."""
    raw = np.empty(size + PAGE, np.uint8)
    start = -raw.ctypes.data % PAGE
    return raw[start : start + size]


def open_engine(kind: str = "auto", **options: Any) -> IOEngine:
    """The engine named `kind`: "uring", "threads", or "auto": io_uring where the kernel allows it,
    else threads. Options: uring depth=32, threads threads=4, both piece_bytes."""
    from lohan import _core

    if kind == "uring":
        return _core.UringEngine(**options)
    if kind == "threads":
        return _core.ThreadEngine(**options)
    if kind != "auto":
        raise ConfigError(f"engine {kind!r} is unknown; choose auto, uring or threads")
    try:
        return _core.UringEngine(**options)
    except StorageIOError:
        options.pop("depth", None)
        return _core.ThreadEngine(**options)


# -- The data files of a store: bytes at (slot on disk, extent), through one engine ----------------


SCRATCH_DISK_SLOT, FIXED_DISK_SLOT = 2, 3
_SMALL_FILES = 2**20  # room for the manifest and the identity besides the data and checksums


class DeadlineError(StorageIOError):
    """The I/O is still in flight: its ticket can be waited for again."""


def chunk_name(extent: Extent) -> str:
    return f"region {extent.key!r} chunk {extent.chunk}"


def needed_bytes(
    dirs: Sequence[Path], layout: Layout, *, disk_slots: int, with_scratch: bool
) -> dict[Path, int]:
    """Bytes that a new store takes in each directory, small files included."""
    small = _SMALL_FILES + 4 * (disk_slots + 1) * len(layout.durable)
    return {
        path: disk_slots * layout.disk_slot_bytes(number)
        + layout.fixed_bytes(number)
        + (layout.scratch_bytes(number) if with_scratch else 0)
        + small
        for number, path in enumerate(dirs)
    }


FICLONERANGE = 0x4020940D  # of linux/fs.h, with a struct file_clone_range
NO_REFLINK = (
    *(errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS, errno.EPERM),  # not on this file system
    *(errno.EXDEV, errno.EINVAL),  # not between these two, or not at such offsets
    errno.ENOENT,  # an engine without files
)


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)


class Volume:
    """Owns the engine if it was given by name; an engine given as an object stays the caller's."""

    def __init__(
        self, dirs: tuple[Path, ...], layout: Layout, *, disk_slots: int, engine: str | IOEngine
    ) -> None:
        self.dirs, self.layout, self.disk_slots = dirs, layout, disk_slots
        self._owned = isinstance(engine, str)
        self._engine = open_engine(engine) if isinstance(engine, str) else engine
        self._files: dict[tuple[int, int], int] = {}  # (disk_slot, directory) -> engine file

    def create_files(self, *, with_scratch: bool) -> None:
        for directory in range(len(self.dirs)):
            for disk_slot in (*range(self.disk_slots), FIXED_DISK_SLOT):
                self._attach(disk_slot, directory, create=True)
            if with_scratch:
                self._attach(SCRATCH_DISK_SLOT, directory, create=True)

    def open_files(self, *, committed: int, with_scratch: bool) -> None:
        """The other slot than the committed one may hold anything, and may have been lost with
        power before its first commit: then it is recreated."""
        for directory, path in enumerate(self.dirs):
            for disk_slot in (*range(self.disk_slots), FIXED_DISK_SLOT):
                try:
                    self._attach(disk_slot, directory, create=False)
                except StoreError:
                    if disk_slot in (committed, FIXED_DISK_SLOT):
                        raise
                    self._attach(disk_slot, directory, create=True)
                    sync_directory(path)
            if with_scratch:  # its old content is worth nothing, and a snapshot has none
                (path / SCRATCH).unlink(missing_ok=True)
                self._attach(SCRATCH_DISK_SLOT, directory, create=True)

    def path(self, disk_slot: int, extent: Extent) -> Path:
        return self._file_path(disk_slot, extent.directory)

    def read(self, disk_slot: int, extent: Extent, buffer: Buffer, *, skip: int = 0) -> int:
        """Submits a read of len(buffer) bytes, `skip` bytes into the chunk; an engine ticket."""
        return self._engine.read(
            self._files[disk_slot, extent.directory], extent.offset + skip, buffer
        )

    def write(self, disk_slot: int, extent: Extent, buffer: Buffer) -> int:
        return self._engine.write(self._files[disk_slot, extent.directory], extent.offset, buffer)

    def share(
        self, disk_slot: int, extent: Extent, source: Volume, from_disk_slot: int,
        from_extent: Extent,
    ) -> bool:  # fmt: skip
        """A chunk of another volume without moving its bytes (reflink): the two share blocks until
        one of them is written. False: this file system cannot, and nothing has changed."""
        try:
            with (
                _opened(source.path(from_disk_slot, from_extent), os.O_RDONLY) as there,
                _opened(self.path(disk_slot, extent), os.O_WRONLY) as here,
            ):
                asked = (there, from_extent.offset, from_extent.nbytes, extent.offset)
                fcntl.ioctl(here, FICLONERANGE, struct.pack("qQQQ", *asked))
        except OSError as error:
            if error.errno in NO_REFLINK:
                return False
            raise
        return True

    def wait(self, engine_ticket: int, timeout_s: float) -> None:
        """StorageIOError: the I/O is over and failed. DeadlineError: it is still in flight."""
        start = time.monotonic()
        try:
            self._engine.wait(engine_ticket, timeout_s)
        except ValueError as error:  # an earlier wait met the deadline and the failure at once
            raise StorageIOError(str(error)) from error
        except StorageIOError as error:
            if time.monotonic() - start >= timeout_s:
                raise DeadlineError(str(error)) from error
            raise

    def sync(self, disk_slot: int) -> None:
        """Everything written to the slot and waited for is durable when it returns."""
        for (its_disk_slot, directory), file in self._files.items():
            if its_disk_slot == disk_slot:
                path = self._file_path(disk_slot, directory)
                sync_in_time(partial(self._engine.sync, file), path)

    def io_error(
        self, kind: str, disk_slot: int, extent: Extent, cause: StorageIOError
    ) -> StorageIOError:
        return type(cause)(
            f"{kind} of {chunk_name(extent)}, {extent.nbytes} bytes at offset {extent.offset} of"
            f" {self.path(disk_slot, extent)}, failed: {cause}"
        )

    def close(self) -> None:
        if self._owned:
            self._engine.close()

    def _attach(self, disk_slot: int, directory: int, *, create: bool) -> None:
        size = self._size(disk_slot, directory)
        if size == 0:  # fewer chunks than directories
            return
        path = self._file_path(disk_slot, directory)
        if not create and path.exists() and path.stat().st_size != size:
            raise StoreError(
                f"{path}: has {path.stat().st_size} bytes, {size} expected; it was cut or altered;"
                " restore the store from a snapshot or start the run again"
            )
        self._files[disk_slot, directory] = self._engine.open(str(path), size=size, create=create)

    def _size(self, disk_slot: int, directory: int) -> int:
        layout = self.layout
        sizes = {SCRATCH_DISK_SLOT: layout.scratch_bytes, FIXED_DISK_SLOT: layout.fixed_bytes}
        return sizes.get(disk_slot, layout.disk_slot_bytes)(directory)

    def _file_path(self, disk_slot: int, directory: int) -> Path:
        return self.dirs[directory] / (*SLOTS, SCRATCH, FIXED)[disk_slot]
