"""Reads and writes from submission to completion.

Bookkeeping happens under one lock; I/O, checksums and waits run outside it, so any number of
threads may be moving chunks at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from lohan.errors import ChecksumError, StorageIOError, StoreError
from lohan.store.engine import ALIGN, Buffer, Engine, open_engine
from lohan.store.extents import Extent, Layout
from lohan.store.files import FIXED, SCRATCH, SLOTS, sync_directory
from lohan.store.manifest import checksum
from lohan.util.atomic import sync_in_time

# -- The data files of a store: bytes at (slot, extent), through one engine ------------------------


SCRATCH_SLOT, FIXED_SLOT = 2, 3
_SMALL_FILES = 2**20  # room for the manifest and the identity besides the data and checksums


class DeadlineError(StorageIOError):
    """The I/O is still in flight: its ticket can be waited for again."""


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
        power before its first commit: then it is recreated."""
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

    def read(self, slot: int, extent: Extent, buffer: Buffer, *, skip: int = 0) -> int:
        """Submits a read of len(buffer) bytes, `skip` bytes into the chunk; an engine ticket."""
        return self._engine.read(self._files[slot, extent.directory], extent.offset + skip, buffer)

    def write(self, slot: int, extent: Extent, buffer: Buffer) -> int:
        return self._engine.write(self._files[slot, extent.directory], extent.offset, buffer)

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


# -- Outstanding I/O, and what the step in flight has written so far ------------------------------
#
# Note [who may touch a chunk] Every chunk of a slot is idle, being written once, or being read any
# number of times; what would break that raises instead of racing. The store calls all of this
# under its lock.


Kind = Literal["read", "write"]


@dataclass(frozen=True, eq=False)
class Ticket:
    """A read or write in flight; wait for it once. Keeps the buffer alive."""

    kind: Kind
    extent: Extent
    slot: int
    buffer: Buffer
    crc: int | None  # of what is written; of what must be read, None when no check is due
    attempt: int
    engine_ticket: int


class InFlight:
    """Outstanding reads and writes; chunks written for the next generation, with checksums."""

    def __init__(self, layout: Layout) -> None:
        self._layout, self._renewed = layout, layout.renewed
        self._busy: dict[tuple[int, int], int] = {}  # (slot, index) -> reads in flight, -1: write
        self._tickets: set[Ticket] = set()
        self._written = np.zeros(len(layout.state), dtype=bool)
        self._scratch_written = np.zeros(len(layout.scratch), dtype=bool)
        self.sums = np.zeros(len(layout.state), dtype=np.uint32)
        self.touched = False  # the step has submitted a write
        self.attempt = 0  # counts discards: a write of an earlier attempt counts for nothing

    def found(self, sums: npt.NDArray[np.uint32]) -> None:
        """The store is a whole one: its fixed chunks are there."""
        self.sums[:] = sums
        self._written[self._renewed :] = True

    def reserve(self, kind: Kind, slot: int, extent: Extent) -> int:
        """Makes the chunk the caller's until `release`; returns the attempt that it belongs to.
        See Note [who may touch a chunk]."""
        users = self._busy.get((slot, extent.index), 0)
        if users < 0 or (kind == "write" and users):
            busy = "a write" if users < 0 else f"{users} read(s)"
            raise StoreError(
                f"{kind} of {chunk_name(extent)} while {busy} of it in flight; wait for that first"
            )
        self._busy[slot, extent.index] = -1 if kind == "write" else users + 1
        if kind == "write":
            if extent.scratch:
                self._scratch_written[extent.index] = False
            else:
                self._written[extent.index] = False
                self.touched = True
        return self.attempt

    def release(self, kind: Kind, slot: int, extent: Extent) -> None:
        users = self._busy.pop((slot, extent.index))
        if kind == "read" and users > 1:
            self._busy[slot, extent.index] = users - 1

    def add(self, ticket: Ticket) -> None:
        self._tickets.add(ticket)

    def claim(self, ticket: Ticket) -> None:
        """The caller will wait for it; nobody else may."""
        if ticket not in self._tickets:
            raise StoreError(
                f"{ticket.kind} of {chunk_name(ticket.extent)} has already been waited for"
            )
        self._tickets.discard(ticket)

    def claim_all(self) -> list[Ticket]:
        """Outstanding tickets that no other thread waits for."""
        claimed = list(self._tickets)
        self._tickets.clear()
        return claimed

    def is_written(self, extent: Extent) -> bool:
        """Written and waited for: in the step in flight, or for scratch in this process."""
        flags = self._scratch_written if extent.scratch else self._written
        return bool(flags[extent.index])

    def mark_written(self, ticket: Ticket) -> None:
        if ticket.extent.scratch:
            self._scratch_written[ticket.extent.index] = True
        elif ticket.attempt == self.attempt and ticket.crc is not None:
            self.sums[ticket.extent.index] = ticket.crc
            self._written[ticket.extent.index] = True

    def forget(self) -> None:
        """The next step starts: nothing is written but what is fixed."""
        self._written[: self._renewed] = False
        self.touched = False
        self.attempt += 1

    def check_idle(self) -> None:
        """No write is in flight. Reads may be: they keep the slot they were submitted for."""
        for (slot, index), users in self._busy.items():
            if slot != SCRATCH_SLOT and users < 0:
                raise StoreError(
                    f"commit while a write of {chunk_name(self._layout.state[index])} is in"
                    " flight; wait for it first"
                )

    def check_complete(self, generation: int) -> None:
        """Every chunk of the next generation is there."""
        written, total = int(np.count_nonzero(self._written)), len(self._layout.state)
        if written < total:
            missing = self._layout.state[int(np.argmin(self._written))]
            raise StoreError(
                f"commit of generation {generation}: {chunk_name(missing)} was not written"
                f" ({written} of {total} chunks are there); write it, or discard the step"
            )

    def keep_unwritten(self, sums: npt.NDArray[np.uint32]) -> None:
        """Chunks that were not written in place are what they were."""
        self.sums[:] = np.where(self._written, self.sums, sums)

    def check_untouched(self, generation: int) -> None:
        if self.touched:
            raise StoreError(
                f"commit of meta alone, but {np.count_nonzero(self._written[: self._renewed])} of"
                f" {self._renewed} chunks of generation {generation} are written;"
                " discard them or commit the generation"
            )


# -- Transfers ------------------------------------------------------------------------------------


class Transfers:
    """Moves chunks between buffers and a volume; `in_flight` is what it knows about them."""

    def __init__(self, volume: Volume, *, timeout_s: float) -> None:
        self._volume, self._timeout_s = volume, timeout_s
        self.lock = threading.RLock()
        self.in_flight = InFlight(volume.layout)
        self.bytes_read = self.bytes_written = 0

    def submit(
        self,
        kind: Kind,
        slot: int,
        extent: Extent,
        buffer: Buffer,
        *,
        crc: int | None,
        attempt: int,
    ) -> Ticket:
        """The chunk is reserved already; it is released if the engine refuses."""
        submit = self._volume.read if kind == "read" else self._volume.write
        try:
            number = submit(slot, extent, buffer)
        except BaseException as error:
            self.release(kind, slot, extent)
            if isinstance(error, StorageIOError):
                raise self._volume.io_error(kind, slot, extent, error) from error
            raise
        ticket = Ticket(kind, extent, slot, buffer, crc, attempt, number)
        self._put_back(ticket)
        return ticket

    def wait(self, ticket: Ticket, timeout_s: float | None) -> None:
        """Completes it and compares the checksum that the ticket carries. After a DeadlineError
        or an interrupt the I/O is still in flight, and the ticket good for another wait."""
        with self.lock:
            self.in_flight.claim(ticket)
        kind, slot, extent = ticket.kind, ticket.slot, ticket.extent
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            self._volume.wait(ticket.engine_ticket, limit_s)
        except DeadlineError as error:
            self._put_back(ticket)
            raise self._volume.io_error(kind, slot, extent, error) from error
        except StorageIOError as error:
            self.release(kind, slot, extent)
            raise self._volume.io_error(kind, slot, extent, error) from error
        except BaseException:
            self._put_back(ticket)
            raise
        try:
            self._accept(ticket)
        finally:
            self.release(kind, slot, extent)

    def drain(self, tickets: Iterable[Ticket]) -> DeadlineError | None:
        """Waits for I/O whose outcome no longer matters, so that its buffers and chunks come
        free; returns why that failed, if it did. One deadline is for all of them. Those that are
        still in flight then, or when an interrupt comes, stay outstanding."""
        late: DeadlineError | None = None
        deadline = time.monotonic() + self._timeout_s
        rest = list(tickets)
        try:
            while rest:
                ticket = rest[-1]
                try:
                    limit_s = max(0.01, deadline - time.monotonic())
                    self._volume.wait(ticket.engine_ticket, limit_s)
                except DeadlineError as error:
                    late = error
                    self._put_back(rest.pop())
                    continue
                except StorageIOError:
                    pass
                rest.pop()
                self.release(ticket.kind, ticket.slot, ticket.extent)
        finally:
            for ticket in rest:
                self._put_back(ticket)
        return late

    def verify_chunk(self, slot: int, extent: Extent, buffer: Buffer, *, expected: int) -> None:
        """Reads a reserved chunk through a buffer that may be smaller than it, and releases it."""
        found = 0
        try:
            for skip in range(0, extent.nbytes, len(buffer)):
                piece = buffer[: min(len(buffer), extent.nbytes - skip)]
                number = self._volume.read(slot, extent, piece, skip=skip)
                self._volume.wait(number, self._timeout_s)
                found = checksum(piece, found)
        except StorageIOError as error:
            raise self._volume.io_error("read", slot, extent, error) from error
        finally:
            self.release("read", slot, extent)
        self._compare(slot, extent, found=found, expected=expected)

    def release(self, kind: Kind, slot: int, extent: Extent) -> None:
        with self.lock:
            self.in_flight.release(kind, slot, extent)

    def _put_back(self, ticket: Ticket) -> None:
        with self.lock:
            self.in_flight.add(ticket)

    def _accept(self, ticket: Ticket) -> None:
        """The I/O came back whole."""
        if ticket.kind == "read" and ticket.crc is not None:
            found = checksum(ticket.buffer)
            self._compare(ticket.slot, ticket.extent, found=found, expected=ticket.crc)
        with self.lock:
            if ticket.kind == "read":
                self.bytes_read += ticket.extent.nbytes
            else:
                self.bytes_written += ticket.extent.nbytes
                self.in_flight.mark_written(ticket)

    def _compare(self, slot: int, extent: Extent, *, found: int, expected: int) -> None:
        if found != expected:
            raise ChecksumError(
                f"{chunk_name(extent)}: CRC-32C of {extent.nbytes} bytes at offset {extent.offset}"
                f" of {self._volume.path(slot, extent)} is {found:#010x}, {expected:#010x}"
                " expected: the drive gave back other bytes than were written; check the drive,"
                " then restore a snapshot or start the run again"
            )
