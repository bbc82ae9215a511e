"""The data files of a store: bytes at (slot, extent), through one engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from lohan.errors import StorageIOError, StoreError
from lohan.store.deadline import sync_in_time
from lohan.store.engine import ALIGN, Buffer, Engine, open_engine
from lohan.store.extents import Extent, Layout
from lohan.store.files import FIXED, SCRATCH, SLOTS, sync_directory

SCRATCH_SLOT, FIXED_SLOT = 2, 3
_SMALL_FILES = 2**20  # room for the manifest and the identity besides the data and checksums


class DeadlineError(StorageIOError):
    """The I/O is still under way: its ticket can be waited for again."""


def chunk_name(extent: Extent) -> str:
    return f"region {extent.key!r} chunk {extent.chunk}"


def check_buffer(extent: Extent, buffer: Buffer) -> None:
    if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous:
        raise StoreError(f"{chunk_name(extent)}: the buffer must be a contiguous uint8 array")
    if buffer.nbytes != extent.nbytes:
        raise StoreError(
            f"{chunk_name(extent)} has {extent.nbytes} bytes, the buffer has {buffer.nbytes}"
        )
    if buffer.ctypes.data % ALIGN:
        raise StoreError(f"{chunk_name(extent)}: the buffer's address is no multiple of {ALIGN}")


def needed_bytes(
    dirs: Sequence[Path], layout: Layout, *, slots: int, with_scratch: bool
) -> dict[Path, int]:
    """Bytes that a new store takes in each directory, small files included."""
    small = _SMALL_FILES + 4 * (slots + 1) * len(layout.state)
    return {
        path: slots * layout.slot_bytes(number)
        + layout.fixed_bytes(number)
        + (layout.scratch_bytes(number) if with_scratch else 0)
        + small
        for number, path in enumerate(dirs)
    }


class Volume:
    """Owns the engine if it was given by name; an engine given as an object stays the caller's."""

    def __init__(
        self, dirs: tuple[Path, ...], layout: Layout, *, slots: int, engine: str | Engine
    ) -> None:
        self.dirs, self.layout, self.slots = dirs, layout, slots
        self._owned = isinstance(engine, str)
        self._engine = open_engine(engine) if isinstance(engine, str) else engine
        self._files: dict[tuple[int, int], int] = {}  # (slot, directory) -> engine file

    def create_files(self, *, with_scratch: bool) -> None:
        for directory in range(len(self.dirs)):
            for slot in (*range(self.slots), FIXED_SLOT):
                self._attach(slot, directory, create=True)
            if with_scratch:
                self._attach(SCRATCH_SLOT, directory, create=True)

    def open_files(self, *, committed: int, with_scratch: bool) -> None:
        """The other slot than the committed one may hold anything, and may have been lost with
        power before its first commit: then it is made anew."""
        for directory, path in enumerate(self.dirs):
            for slot in (*range(self.slots), FIXED_SLOT):
                try:
                    self._attach(slot, directory, create=False)
                except StoreError:
                    if slot in (committed, FIXED_SLOT):
                        raise
                    self._attach(slot, directory, create=True)
                    sync_directory(path)
            if with_scratch:  # its old content is worth nothing, and a snapshot has none
                (path / SCRATCH).unlink(missing_ok=True)
                self._attach(SCRATCH_SLOT, directory, create=True)

    def path(self, slot: int, extent: Extent) -> Path:
        return self._file_path(slot, extent.directory)

    def bytes_in(self, directory: int) -> int:
        layout = self.layout
        once = layout.fixed_bytes(directory) + layout.scratch_bytes(directory)
        return self.slots * layout.slot_bytes(directory) + once

    def read(self, slot: int, extent: Extent, buffer: Buffer, *, skip: int = 0) -> int:
        """Submits a read of len(buffer) bytes, `skip` bytes into the chunk; an engine ticket."""
        return self._engine.read(self._files[slot, extent.directory], extent.offset + skip, buffer)

    def write(self, slot: int, extent: Extent, buffer: Buffer) -> int:
        return self._engine.write(self._files[slot, extent.directory], extent.offset, buffer)

    def wait(self, engine_ticket: int, timeout_s: float) -> None:
        """StorageIOError: the I/O is over and failed. DeadlineError: it is still under way."""
        start = time.monotonic()
        try:
            self._engine.wait(engine_ticket, timeout_s)
        except ValueError as error:  # an earlier wait met the deadline and the failure at once
            raise StorageIOError(str(error)) from error
        except StorageIOError as error:
            if time.monotonic() - start >= timeout_s:
                raise DeadlineError(str(error)) from error
            raise

    def sync(self, slot: int) -> None:
        """Everything written to the slot and waited for is durable when it returns."""
        for (file_slot, directory), file in self._files.items():
            if file_slot == slot:
                path = self._file_path(slot, directory)
                sync_in_time(partial(self._engine.sync, file), path)

    def io_error(
        self, kind: str, slot: int, extent: Extent, cause: StorageIOError
    ) -> StorageIOError:
        return type(cause)(
            f"{kind} of {chunk_name(extent)}, {extent.nbytes} bytes at offset {extent.offset} of"
            f" {self.path(slot, extent)}, failed: {cause}"
        )

    def close(self) -> None:
        if self._owned:
            self._engine.close()

    def _attach(self, slot: int, directory: int, *, create: bool) -> None:
        size = self._size(slot, directory)
        if size == 0:  # fewer chunks than directories
            return
        path = self._file_path(slot, directory)
        if not create and path.exists() and path.stat().st_size != size:
            raise StoreError(
                f"{path}: has {path.stat().st_size} bytes, {size} expected; it was cut or altered;"
                " restore the store from a snapshot or start the run again"
            )
        self._files[slot, directory] = self._engine.open(str(path), size=size, create=create)

    def _size(self, slot: int, directory: int) -> int:
        layout = self.layout
        sizes = {SCRATCH_SLOT: layout.scratch_bytes, FIXED_SLOT: layout.fixed_bytes}
        return sizes.get(slot, layout.slot_bytes)(directory)

    def _file_path(self, slot: int, directory: int) -> Path:
        return self.dirs[directory] / (*SLOTS, SCRATCH, FIXED)[slot]
