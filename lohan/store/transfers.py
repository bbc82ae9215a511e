"""Reads and writes from submission to completion.

Bookkeeping happens under one lock; I/O, checksums and waits run outside it, so any number of
threads may be moving chunks at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from lohan.errors import ChecksumError, StorageIOError
from lohan.store.engine import Buffer
from lohan.store.extents import Extent
from lohan.store.flight import Flight, Kind, Ticket
from lohan.store.manifest import checksum
from lohan.store.volume import DeadlineError, Volume, chunk_name


class Transfers:
    """Moves chunks between buffers and a volume; `flight` is what it knows about them."""

    def __init__(self, volume: Volume, *, timeout_s: float) -> None:
        self._volume, self._timeout_s = volume, timeout_s
        self.lock = threading.RLock()
        self.flight = Flight(volume.layout)
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
        or an interrupt the I/O is still under way, and the ticket good for another wait."""
        with self.lock:
            self.flight.claim(ticket)
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

    def settle(self, tickets: Iterable[Ticket]) -> DeadlineError | None:
        """Waits for I/O whose outcome no longer matters, so that its buffers and chunks come
        free; returns why that failed, if it did. One deadline is for all of them. Those that are
        still under way then, or when an interrupt comes, stay outstanding."""
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
            self.flight.release(kind, slot, extent)

    def _put_back(self, ticket: Ticket) -> None:
        with self.lock:
            self.flight.add(ticket)

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
                self.flight.mark_written(ticket)

    def _compare(self, slot: int, extent: Extent, *, found: int, expected: int) -> None:
        if found != expected:
            raise ChecksumError(
                f"{chunk_name(extent)}: CRC-32C of {extent.nbytes} bytes at offset {extent.offset}"
                f" of {self._volume.path(slot, extent)} is {found:#010x}, {expected:#010x}"
                " expected: the drive gave back other bytes than were written; check the drive,"
                " then restore a snapshot or start the run again"
            )
