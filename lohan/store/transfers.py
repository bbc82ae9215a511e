"""Reads and writes of chunks in flight, and the chunks written since the last commit.

Note [who may touch a chunk] Each chunk of a slot is either idle, being written by one write, or
being read by any number of reads. An operation that would violate this raises StoreError instead
of racing. All methods of ChunkTracker are called under the lock of the store.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from lohan.errors import ChecksumError, LohanError, StorageIOError, StoreError
from lohan.store.extents import Extent, Layout
from lohan.store.io_engine import (
    SCRATCH_DISK_SLOT,
    Buffer,
    DeadlineError,
    Volume,
    chunk_name,
)
from lohan.store.manifest import checksum
from lohan.util.units import PAGE

Kind = Literal["read", "write"]
AnyTicket = TypeVar("AnyTicket")


@dataclass(frozen=True, eq=False)
class Ticket:
    """A read or write in flight, which must be waited for once. It keeps the buffer alive."""

    kind: Kind
    extent: Extent
    disk_slot: int
    buffer: Buffer
    # For a write, the CRC-32C of the data, None for scratch. For a read, the expected CRC-32C, None
    # if the data is not to be checked.
    crc: int | None
    attempt: int
    engine_ticket: int


class ChunkTracker:
    """The chunks being read or written, and those written since the last commit."""

    def __init__(self, layout: Layout) -> None:
        self._layout, self._per_generation = layout, layout.per_generation
        # Maps (disk_slot, index) to the number of reads in flight, or to -1 for a write.
        self._busy: dict[tuple[int, int], int] = {}
        self._tickets: set[Ticket] = set()
        self._written = np.zeros(len(layout.durable), dtype=bool)
        # Bytes of each scratch chunk that have been written and waited for.
        self._scratch_bytes = np.zeros(len(layout.scratch), dtype=np.int64)
        self.checksums = np.zeros(len(layout.durable), dtype=np.uint32)
        self.touched = False  # True if a write was submitted since the last commit or discard.
        # Increases with every commit and discard. A write of an earlier attempt is not marked as
        # written.
        self.attempt = 0

    def mark_fixed(self, checksums: npt.NDArray[np.uint32]) -> None:
        """Set the checksums of an opened store and mark its fixed chunks as written."""
        self.checksums[:] = checksums
        self._written[self._per_generation :] = True

    def reserve(self, kind: Kind, disk_slot: int, extent: Extent) -> int:
        """Reserve the chunk until `release`, and return the number of the current attempt.

        The number increases with every commit and discard. See Note [who may touch a chunk].
        """
        users = self._busy.get((disk_slot, extent.index), 0)
        if users < 0 or (kind == "write" and users):
            busy = "a write" if users < 0 else f"{users} read(s)"
            raise StoreError(
                f"{kind} of {chunk_name(extent)} while {busy} of it in flight; wait for that first"
            )
        self._busy[disk_slot, extent.index] = -1 if kind == "write" else users + 1
        if kind == "write":
            if extent.scratch:
                self._scratch_bytes[extent.index] = 0
            else:
                self._written[extent.index] = False
                self.touched = True
        return self.attempt

    def release(self, kind: Kind, disk_slot: int, extent: Extent) -> None:
        users = self._busy.pop((disk_slot, extent.index))
        if kind == "read" and users > 1:
            self._busy[disk_slot, extent.index] = users - 1

    def add(self, ticket: Ticket) -> None:
        self._tickets.add(ticket)

    def claim(self, ticket: Ticket) -> None:
        """Remove a ticket from the outstanding tickets, so that only the caller waits for it."""
        if ticket not in self._tickets:
            raise StoreError(
                f"{ticket.kind} of {chunk_name(ticket.extent)} has already been waited for"
            )
        self._tickets.discard(ticket)

    def claim_all(self) -> list[Ticket]:
        """Claim and return all outstanding tickets that no other thread waits for."""
        claimed = list(self._tickets)
        self._tickets.clear()
        return claimed

    def is_written(self, extent: Extent) -> bool:
        """Return whether the chunk was written and waited for since the last commit.

        A scratch chunk counts as written from its first write by this process.
        """
        if extent.scratch:
            return self.scratch_bytes(extent) > 0
        return bool(self._written[extent.index])

    def scratch_bytes(self, extent: Extent) -> int:
        """Return how many bytes of a scratch chunk were written and waited for.

        Only these bytes can be read.
        """
        return int(self._scratch_bytes[extent.index])

    def written_chunks(self) -> npt.NDArray[np.intp]:
        """Return the indices of the chunks written since the last commit, without fixed ones."""
        return np.flatnonzero(self._written[: self._per_generation])

    def mark_written(self, ticket: Ticket) -> None:
        if ticket.extent.scratch:
            self._scratch_bytes[ticket.extent.index] = ticket.buffer.nbytes
        elif ticket.attempt == self.attempt and ticket.crc is not None:
            self.checksums[ticket.extent.index] = ticket.crc
            self._written[ticket.extent.index] = True

    def begin_generation(self) -> None:
        """Mark all chunks but the fixed ones as not written, and begin a new attempt."""
        self._written[: self._per_generation] = False
        self.touched = False
        self.attempt += 1

    def check_no_writes(self) -> None:
        """Raise StoreError if a write is in flight.

        Reads may be in flight, because they continue to use the slot that they were submitted for.
        """
        for (disk_slot, index), users in self._busy.items():
            if disk_slot != SCRATCH_DISK_SLOT and users < 0:
                raise StoreError(
                    f"commit while a write of {chunk_name(self._layout.durable[index])} is in"
                    " flight; wait for it first"
                )

    def check_complete(self, generation: int) -> None:
        """Raise StoreError unless every chunk of the next generation has been written."""
        written, total = int(np.count_nonzero(self._written)), len(self._layout.durable)
        if written < total:
            missing = self._layout.durable[int(np.argmin(self._written))]
            raise StoreError(
                f"commit of generation {generation}: {chunk_name(missing)} was not written"
                f" ({written} of {total} chunks are there); write it, or discard the step"
            )

    def keep_unwritten(self, checksums: npt.NDArray[np.uint32]) -> None:
        """Use `checksums` for the chunks that were not written.

        After a step that writes in place, the bytes of these chunks on disk are unchanged.
        """
        self.checksums[:] = np.where(self._written, self.checksums, checksums)

    def check_untouched(self, generation: int) -> None:
        if self.touched:
            written = np.count_nonzero(self._written[: self._per_generation])
            raise StoreError(
                f"commit of meta alone, but {written} of"
                f" {self._per_generation} chunks of generation {generation} are written;"
                " discard them or commit the generation"
            )


def check_buffer(extent: Extent, buffer: Buffer) -> None:
    if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous:
        raise StoreError(f"{chunk_name(extent)}: the buffer must be a contiguous uint8 array")
    part = extent.scratch and 0 < buffer.nbytes <= extent.nbytes and not buffer.nbytes % PAGE
    if buffer.nbytes != extent.nbytes and not part:
        pages = f"; the first of a multiple of {PAGE} will do" if extent.scratch else ""
        raise StoreError(
            f"{chunk_name(extent)} has {extent.nbytes} bytes, the buffer has {buffer.nbytes}{pages}"
        )
    if buffer.ctypes.data % PAGE:
        raise StoreError(f"{chunk_name(extent)}: the buffer's address is no multiple of {PAGE}")


def compare_checksums(
    volume: Volume, disk_slot: int, extent: Extent, actual: int, *, expected: int | None
) -> None:
    """Raise ChecksumError if the bytes of a chunk are not those that were written."""
    if actual != expected:
        raise ChecksumError(
            f"{chunk_name(extent)}: CRC-32C of {extent.nbytes} bytes at offset {extent.offset}"
            f" of {volume.path(disk_slot, extent)} is {actual:#010x}, {expected:#010x}"
            " expected: the drive returned other bytes than were written; check the drive,"
            " then restore a snapshot or start the run again"
        )


def wait_for_all(wait: Callable[[AnyTicket], None], tickets: Iterable[AnyTicket]) -> None:
    """Wait for all tickets, then raise the first error.

    Tickets after a failed one are waited for as well, because their buffers will be reused.
    """
    failed: LohanError | None = None
    for ticket in tickets:
        try:
            wait(ticket)
        except LohanError as error:
            failed = failed or error
    if failed is not None:
        raise failed


@dataclass(frozen=True)
class Counters:
    """Numbers of bytes that were read and written."""

    bytes_read: int
    bytes_written: int

    def __add__(self, other: Counters) -> Counters:
        return Counters(
            self.bytes_read + other.bytes_read, self.bytes_written + other.bytes_written
        )


class Transfers:
    """The reads and writes of a store, from their submission to the end of their wait.

    The lock protects bookkeeping only. Transfers, checksums and waits run without it, so any number
    of threads can transfer chunks at the same time.
    """

    def __init__(self, volume: Volume, *, timeout_s: float) -> None:
        self._volume, self.timeout_s = volume, timeout_s
        self.lock, self.tracker = threading.RLock(), ChunkTracker(volume.layout)
        self._bytes_read = self._bytes_written = 0

    @property
    def counters(self) -> Counters:
        return Counters(self._bytes_read, self._bytes_written)

    def submit(
        self,
        kind: Kind,
        disk_slot: int,
        extent: Extent,
        buffer: Buffer,
        *,
        crc: int | None,
        attempt: int,
    ) -> Ticket:
        """Submit I/O for a reserved chunk.

        Release the chunk if the engine refuses the request.
        """
        submit = self._volume.read if kind == "read" else self._volume.write
        try:
            number = submit(disk_slot, extent, buffer)
        except BaseException as error:
            self.release(kind, disk_slot, extent)
            if isinstance(error, StorageIOError):
                raise self._volume.io_error(kind, disk_slot, extent, error) from error
            raise
        ticket = Ticket(kind, extent, disk_slot, buffer, crc, attempt, number)
        self._put_back(ticket)
        return ticket

    def wait(self, ticket: Ticket, timeout_s: float | None) -> bool:
        """Wait for a transfer, release its chunk, and return whether its data was verified.

        After a DeadlineError or an interrupt, the transfer is still in flight and outstanding.
        """
        with self.lock:
            self.tracker.claim(ticket)
        kind, disk_slot, extent = ticket.kind, ticket.disk_slot, ticket.extent
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            self._volume.wait(ticket.engine_ticket, limit_s)
        except DeadlineError as error:
            self._put_back(ticket)
            raise self._volume.io_error(kind, disk_slot, extent, error) from error
        except StorageIOError as error:
            self.release(kind, disk_slot, extent)
            raise self._volume.io_error(kind, disk_slot, extent, error) from error
        except BaseException:
            self._put_back(ticket)
            raise
        try:
            due = kind == "read" and ticket.crc is not None
            if due:
                actual = checksum(ticket.buffer)
                compare_checksums(self._volume, disk_slot, extent, actual, expected=ticket.crc)
            with self.lock:
                if kind == "write":
                    self._bytes_written += ticket.buffer.nbytes
                    self.tracker.mark_written(ticket)
                else:
                    self._bytes_read += ticket.buffer.nbytes
        finally:
            self.release(kind, disk_slot, extent)
        return due

    def release(self, kind: Kind, disk_slot: int, extent: Extent) -> None:
        with self.lock:
            self.tracker.release(kind, disk_slot, extent)

    def _put_back(self, ticket: Ticket) -> None:
        with self.lock:
            self.tracker.add(ticket)

    def drain(self, tickets: Iterable[Ticket]) -> DeadlineError | None:
        """Wait for I/O whose result is not needed, so that its buffers and chunks become free.

        One deadline applies to all tickets. Return the last DeadlineError if the deadline was
        missed. Tickets that are still in flight then, or when an interrupt arrives, remain
        outstanding.
        """
        late: DeadlineError | None = None
        deadline = time.monotonic() + self.timeout_s
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
                self.release(ticket.kind, ticket.disk_slot, ticket.extent)
        finally:
            for ticket in rest:
                self._put_back(ticket)
        return late
