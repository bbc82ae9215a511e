"""I/O engines (submit, get a ticket, wait with a deadline), and the data files of a store.

A buffer is a C-contiguous uint8 numpy array whose address, length and file offset are multiples of
PAGE. The caller must keep it alive and unmodified until the ticket has been waited for.
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
from lohan.store.files import FIXED, IDENTITY, SCRATCH, SLOTS, sync_directory
from lohan.util.files import sync_in_time
from lohan.util.units import PAGE

if TYPE_CHECKING:
    from lohan.store.extents import Extent, Layout

Buffer = npt.NDArray[np.uint8]


class IOEngine(Protocol):
    """An engine that transfers bytes between aligned buffers and files.

    It checks the result of every completed transfer.
    """

    @property
    def name(self) -> str: ...

    def open(self, path: str, *, size: int, create: bool) -> int:
        """Open a file and return its number.

        With `create`, exactly `size` bytes are preallocated. Without it, an error is raised unless
        the file exists and has exactly `size` bytes.
        """

    def read(self, file: int, offset: int, buffer: Buffer) -> int:
        """Submit a read of len(buffer) bytes at an offset of a file, and return a ticket."""

    def write(self, file: int, offset: int, buffer: Buffer) -> int:
        """Submit a write of len(buffer) bytes at an offset of a file, and return a ticket."""

    def wait(self, ticket: int, timeout_s: float) -> None:
        """Wait until the ticket's I/O is complete.

        Raise StorageIOError, with path, offset, length and cause, if the I/O failed, was short or
        missed the deadline. Each ticket must be waited for exactly once; after a missed deadline it
        may be waited for again.
        """

    def sync(self, file: int) -> None:
        """Make all completed writes to the file durable (fdatasync)."""

    def close(self) -> None:
        """Wait for outstanding I/O and close all files."""


def aligned_buffer(size: int) -> Buffer:
    """Return an uninitialised buffer of `size` bytes whose address is a multiple of PAGE."""
    raw = np.empty(size + PAGE, np.uint8)
    start = -raw.ctypes.data % PAGE
    return raw[start : start + size]


def open_engine(kind: str = "auto", **options: Any) -> IOEngine:
    """Return the I/O engine named `kind`: "uring", "threads" or "auto".

    "auto" uses io_uring if the kernel allows it, and threads otherwise. Options are `depth`
    (default 32) for uring, `threads` (default 4) for threads, and `piece_bytes` for both.
    """
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


# -- The data files of a store: bytes addressed by (disk slot, extent), through one engine ---------


SCRATCH_DISK_SLOT, FIXED_DISK_SLOT = 2, 3
_SMALL_FILES = 2**20  # Space for the manifest and the identity.


class DeadlineError(StorageIOError):
    """Raised if the I/O is still in flight at the deadline; its ticket can be waited for again."""


def chunk_name(extent: Extent) -> str:
    return f"region {extent.key!r} chunk {extent.chunk}"


def needed_bytes(
    dirs: Sequence[Path], layout: Layout, *, disk_slots: int, with_scratch: bool
) -> dict[Path, int]:
    """Return the bytes that a new store needs in each directory, including its small files."""
    small = _SMALL_FILES + 4 * (disk_slots + 1) * len(layout.durable)
    return {
        path: disk_slots * layout.disk_slot_bytes(number)
        + layout.fixed_bytes(number)
        + (layout.scratch_bytes(number) if with_scratch else 0)
        + small
        for number, path in enumerate(dirs)
    }


FICLONERANGE = 0x4020940D  # From linux/fs.h; the argument is a struct file_clone_range.
NO_REFLINK = (
    # The file system does not support reflinks.
    *(errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS, errno.EPERM),
    *(errno.EXDEV, errno.EINVAL),  # Not between these files, or not at these offsets.
    errno.ENOENT,  # The engine does not keep its data in files.
)


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)


class Volume:
    """The data files of a store, accessed through one I/O engine.

    The volume owns an engine that was given by name and closes it. An engine that was given as an
    object remains the property of the caller.
    """

    def __init__(
        self, dirs: tuple[Path, ...], layout: Layout, *, disk_slots: int, engine: str | IOEngine
    ) -> None:
        self.dirs, self.layout, self.disk_slots = dirs, layout, disk_slots
        self._owned = isinstance(engine, str)
        self._engine = open_engine(engine) if isinstance(engine, str) else engine
        # Maps (disk_slot, directory) to a file number of the engine.
        self._files: dict[tuple[int, int], int] = {}
        self._further: dict[int, Path] = {}  # files of `open_file`, by number

    def disk_slot_of(self, generation: int) -> int:
        return generation % self.disk_slots

    def create_files(self, *, with_scratch: bool) -> None:
        for directory in range(len(self.dirs)):
            for disk_slot in (*range(self.disk_slots), FIXED_DISK_SLOT):
                self._attach(disk_slot, directory, create=True)
            if with_scratch:
                self._attach(SCRATCH_DISK_SLOT, directory, create=True)

    def open_files(self, *, committed: int, with_scratch: bool) -> None:
        """Open the data files of a committed store.

        The content of the slot that is not committed is arbitrary. Its file may also be missing or
        have the wrong size after a power failure before its first commit; in that case it is
        created again.
        """
        for directory, path in enumerate(self.dirs):
            for disk_slot in (*range(self.disk_slots), FIXED_DISK_SLOT):
                try:
                    self._attach(disk_slot, directory, create=False)
                except StoreError:
                    if disk_slot in (committed, FIXED_DISK_SLOT):
                        raise
                    self._attach(disk_slot, directory, create=True)
                    sync_directory(path)
            # Scratch content does not outlive a process, and a snapshot has no scratch file.
            if with_scratch:
                (path / SCRATCH).unlink(missing_ok=True)
                self._attach(SCRATCH_DISK_SLOT, directory, create=True)

    def path(self, disk_slot: int, extent: Extent) -> Path:
        return self._file_path(disk_slot, extent.directory)

    def read(self, disk_slot: int, extent: Extent, buffer: Buffer, *, skip: int = 0) -> int:
        """Submit a read of len(buffer) bytes at offset `skip` in a chunk, and return its ticket."""
        return self._engine.read(
            self._files[disk_slot, extent.directory], extent.offset + skip, buffer
        )

    def write(self, disk_slot: int, extent: Extent, buffer: Buffer) -> int:
        return self._engine.write(self._files[disk_slot, extent.directory], extent.offset, buffer)

    def share(
        self,
        disk_slot: int,
        extent: Extent,
        source: Volume,
        from_disk_slot: int,
        from_extent: Extent,
    ) -> bool:
        """Clone a chunk of another volume by reflink; return False if that is not supported.

        The two chunks share their blocks until one of them is overwritten. If the result is False,
        nothing has changed.
        """
        try:
            with (
                _opened(source.path(from_disk_slot, from_extent), os.O_RDONLY) as source_fd,
                _opened(self.path(disk_slot, extent), os.O_WRONLY) as target_fd,
            ):
                arguments = (source_fd, from_extent.offset, from_extent.nbytes, extent.offset)
                fcntl.ioctl(target_fd, FICLONERANGE, struct.pack("qQQQ", *arguments))
        except OSError as error:
            if error.errno in NO_REFLINK:
                return False
            raise
        return True

    def wait(self, engine_ticket: int, timeout_s: float) -> None:
        """Wait for an engine ticket.

        Raise StorageIOError if the I/O has ended and failed, and DeadlineError if it is still in
        flight.
        """
        start = time.monotonic()
        try:
            self._engine.wait(engine_ticket, timeout_s)
        # The engine does not know the ticket: an earlier wait met the deadline and the failure of
        # the I/O at the same time.
        except ValueError as error:
            raise StorageIOError(str(error)) from error
        except StorageIOError as error:
            if time.monotonic() - start >= timeout_s:
                raise DeadlineError(str(error)) from error
            raise

    def sync(self, disk_slot: int) -> None:
        """Make all completed writes to the slot durable."""
        for (slot, directory), file in self._files.items():
            if slot == disk_slot:
                path = self._file_path(disk_slot, directory)
                sync_in_time(partial(self._engine.sync, file), path)

    # -- further files, addressed by offset: the log of gradients ---------------------------------

    def open_file(self, path: Path, *, size: int, create: bool) -> int:
        """Open a file outside the layout and return its number; `close` closes all files."""
        if not create and (actual := path.stat().st_size if path.exists() else 0) != size:
            raise StoreError(
                f"{path}: has {actual} bytes, {size} expected; it was cut or altered;"
                " restore the store from a snapshot or start the run again"
            )
        number = self._engine.open(str(path), size=size, create=create)
        self._further[number] = path
        return number

    def forget_file(self, file: int) -> None:
        """Stop checking that a file of `open_file` exists; call this before the file is removed."""
        del self._further[file]

    def read_file(self, file: int, offset: int, buffer: Buffer) -> int:
        return self._engine.read(file, offset, buffer)

    def write_file(self, file: int, offset: int, buffer: Buffer) -> int:
        return self._engine.write(file, offset, buffer)

    def sync_file(self, file: int, path: Path) -> None:
        sync_in_time(partial(self._engine.sync, file), path)

    def io_error(
        self, kind: str, disk_slot: int, extent: Extent, cause: StorageIOError
    ) -> StorageIOError:
        return type(cause)(
            f"{kind} of {chunk_name(extent)}, {extent.nbytes} bytes at offset {extent.offset} of"
            f" {self.path(disk_slot, extent)}, failed: {cause}"
        )

    def missing_file(self) -> Path | None:
        """Return a file of the volume that is missing from its directory, or None.

        The data files of an engine that was given as an object need not be on disk.
        """
        paths = [path / IDENTITY for path in self.dirs]
        if self._owned:
            paths += [self._file_path(*place) for place in self._files]
            paths += self._further.values()
        return next((path for path in paths if not path.exists()), None)

    def close(self) -> None:
        if self._owned:
            self._engine.close()

    def _attach(self, disk_slot: int, directory: int, *, create: bool) -> None:
        size = self._size(disk_slot, directory)
        if size == 0:  # There are fewer chunks than directories.
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
