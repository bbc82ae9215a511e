"""The SSD store: keys and bytes in generations; knows nothing of models, devices or plans.

A step reads the newest bytes of a chunk and writes the generation that is not committed; `commit`
makes it current with one small atomic manifest replacement. docs/storage-format.md is the format.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Self
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from lohan.errors import ChecksumError, LohanError, StorageIOError, StoreError
from lohan.store import files
from lohan.store.extents import Extent, Layout, Region, plan_layout
from lohan.store.files import CHECKSUM_FILES, MANIFEST, PREPARED, StoreLock, rename_durably
from lohan.store.io_engine import (
    FIXED_DISK_SLOT,
    SCRATCH_DISK_SLOT,
    Buffer,
    DeadlineError,
    IOEngine,
    Volume,
    chunk_name,
    needed_bytes,
)
from lohan.store.manifest import (
    COMMITS,
    Checksums,
    Manifest,
    check_finished,
    check_members,
    checksum,
    commit_number,
    disk_slot_count,
    locate,
    plain_json,
    read_committed,
    write_checksums,
    write_identities,
    write_manifest,
)
from lohan.util.units import PAGE

Barrier = Callable[[], None]
Dirs = str | Path | Sequence[str | Path]
Verify = Literal["first-read", "always", "never"]


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
    disk_slot: int
    buffer: Buffer
    crc: int | None  # of what is written; of what must be read, None when no check is due
    attempt: int
    engine_ticket: int


_NOTHING = np.empty(0, dtype=np.uint8)


class ChunkTracker:
    """Which chunks are being read or written, and which are written for the next generation, with
    their checksums."""

    def __init__(self, layout: Layout) -> None:
        self._layout, self._per_generation = layout, layout.per_generation
        self._busy: dict[
            tuple[int, int], int
        ] = {}  # (disk_slot, index) -> reads in flight, -1: write
        self._tickets: set[Ticket] = set()
        self._written = np.zeros(len(layout.durable), dtype=bool)
        self._scratch_bytes = np.zeros(len(layout.scratch), dtype=np.int64)  # that are written
        self.checksums = np.zeros(len(layout.durable), dtype=np.uint32)
        self.touched = False  # a write was submitted since the last commit
        self.attempt = 0  # counts discards: a write of an earlier attempt counts for nothing

    def mark_fixed(self, checksums: npt.NDArray[np.uint32]) -> None:
        """The store is a whole one: its fixed chunks are written."""
        self.checksums[:] = checksums
        self._written[self._per_generation :] = True

    def reserve(self, kind: Kind, disk_slot: int, extent: Extent) -> int:
        """Makes the chunk the caller's until `release`; returns the attempt that it belongs to.
        See Note [who may touch a chunk]."""
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
        """The caller will wait for it, and no other thread."""
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
        """Written and waited for: since the last commit, or for scratch in this process."""
        if extent.scratch:
            return self.scratch_bytes(extent) > 0
        return bool(self._written[extent.index])

    def scratch_bytes(self, extent: Extent) -> int:
        """Of a scratch chunk, that were written and waited for: what can be read of it."""
        return int(self._scratch_bytes[extent.index])

    def mark_written(self, ticket: Ticket) -> None:
        if ticket.extent.scratch:
            self._scratch_bytes[ticket.extent.index] = ticket.buffer.nbytes
        elif ticket.attempt == self.attempt and ticket.crc is not None:
            self.checksums[ticket.extent.index] = ticket.crc
            self._written[ticket.extent.index] = True

    def begin_generation(self) -> None:
        """After a commit: nothing is written but what is fixed."""
        self._written[: self._per_generation] = False
        self.touched = False
        self.attempt += 1

    def check_no_writes(self) -> None:
        """No write is in flight. Reads may be: they keep the slot they were submitted for."""
        for (disk_slot, index), users in self._busy.items():
            if disk_slot != SCRATCH_DISK_SLOT and users < 0:
                raise StoreError(
                    f"commit while a write of {chunk_name(self._layout.durable[index])} is in"
                    " flight; wait for it first"
                )

    def check_complete(self, generation: int) -> None:
        """Every chunk of the next generation is there."""
        written, total = int(np.count_nonzero(self._written)), len(self._layout.durable)
        if written < total:
            missing = self._layout.durable[int(np.argmin(self._written))]
            raise StoreError(
                f"commit of generation {generation}: {chunk_name(missing)} was not written"
                f" ({written} of {total} chunks are there); write it, or discard the step"
            )

    def keep_unwritten(self, checksums: npt.NDArray[np.uint32]) -> None:
        """Chunks that were not written in place are what they were."""
        self.checksums[:] = np.where(self._written, self.checksums, checksums)

    def check_untouched(self, generation: int) -> None:
        if self.touched:
            written = np.count_nonzero(self._written[: self._per_generation])
            raise StoreError(
                f"commit of meta alone, but {written} of"
                f" {self._per_generation} chunks of generation {generation} are written;"
                " discard them or commit the generation"
            )


# -- Store -----------------------------------------------------------------------------------------


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


class Status(Enum):
    CREATING = "being created"  # no manifest yet
    CLEAN = "clean"  # the committed generation is on disk
    DIRTY = "written in place"  # durability "checkpoint": the disk is ahead of the manifest
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(frozen=True)
class Counters:
    """Bytes that completed since the store was opened."""

    bytes_read: int
    bytes_written: int


class Store:
    """Use `Store.create` or `Store.open`; one process at a time, any number of threads."""

    def __init__(
        self, volume: Volume, manifest: Manifest, checksums: Checksums, lock: StoreLock, *,
        status: Status,
        verify: Verify, timeout_s: float, barrier: Barrier | None, created: Sequence[Path] = (),
    ) -> None:  # fmt: skip
        """`manifest` and `checksums` describe the committed generation as this process knows it.
        `created` are directories that were not there before."""
        self.dirs, self.layout = volume.dirs, volume.layout
        self.uuid, self.durability = manifest.uuid, manifest.durability
        self.barrier = barrier
        self._volume, self._manifest, self._checksums = volume, manifest, checksums
        self._store_lock, self._created = lock, created
        self._status, self._cause, self._closed = status, "", False
        self._verify = verify
        # Bookkeeping happens under the lock; transfers, checksums and waits run outside it, so any
        # number of threads may be moving chunks at once. A commit holds it while it syncs.
        self._lock, self._tracker = threading.RLock(), ChunkTracker(volume.layout)
        self._timeout_s, self._bytes_read, self._bytes_written = timeout_s, 0, 0
        self._unverified = np.full(len(self.layout.durable), status is Status.CLEAN)
        self._is_new, self._committed = status is Status.CREATING, status is Status.CLEAN
        if self._committed:
            self._tracker.mark_fixed(checksums)

    @classmethod
    @files.storage_errors("creating a store")
    def create(
        cls, dirs: Dirs, regions: Iterable[Region], *, meta: Mapping[str, Any] | None = None,
        durability: str = "step", weights: Sequence[float] | None = None,
        engine: str | IOEngine = "auto", verify: Verify = "first-read", timeout_s: float = 60.0,
        first_generation: int = 0, with_scratch: bool = True, barrier: Barrier | None = None,
        final_dirs: Sequence[Path] | None = None,
    ) -> Self:  # fmt: skip
        """A store being created: its first commit makes it a store; `close` before that removes
        it. Nothing is written if the space is not there, nothing stays if it fails. `barrier`: if
        other ranks have stores of the same run, returns when all have prepared a commit.
        `final_dirs`: where the caller will move the directories when the store is whole."""
        paths, disk_slots = files.store_dirs(dirs), disk_slot_count(durability)
        layout = plan_layout(regions, directories=len(paths), weights=weights)
        manifest = Manifest(  # not on disk before the first commit
            uuid=str(uuid4()), generation=first_generation - 1, durability=durability, clean=False,
            count=len(paths), layout_sha256=layout.digest(), sums_crc32c=0,
            meta=plain_json(meta or {}),
        )  # fmt: skip
        for path in paths:
            files.check_vacant(path)
        needed = needed_bytes(paths, layout, disk_slots=disk_slots, with_scratch=with_scratch)
        files.check_free_space(needed, disk_slots=disk_slots)
        volume = Volume(paths, layout, disk_slots=disk_slots, engine=engine)
        created: list[Path] = []
        try:
            created = files.make_directories(paths)
            lock = StoreLock(paths, vacant=True)
        except BaseException:
            volume.close()
            files.remove_empty(created)
            raise
        checksums = np.zeros(len(layout.durable), dtype=np.uint32)
        store = cls(
            volume, manifest, checksums, lock, status=Status.CREATING, verify=verify,
            timeout_s=timeout_s, barrier=barrier, created=created,
        )  # fmt: skip
        try:
            write_identities(paths, final_dirs or paths, uuid=manifest.uuid, layout=layout)
            volume.create_files(with_scratch=with_scratch)
            for disk_slot in (
                *range(disk_slots),
                FIXED_DISK_SLOT,
            ):  # size and place of files, also of the slot
                volume.sync(disk_slot)  # that the first commit does not write
            for path in paths:
                files.sync_directory(path)
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    @files.storage_errors("opening a store")
    def open(
        cls, dirs: Dirs, *, engine: str | IOEngine = "auto", verify: Verify = "first-read",
        timeout_s: float = 60.0, with_scratch: bool = True, barrier: Barrier | None = None,
    ) -> Self:  # fmt: skip
        """The committed generation of a whole store. The first directory finds the others."""
        paths, primary = locate(dirs)
        check_finished(paths[0])
        check_members(paths, primary)
        lock = StoreLock(paths)
        volume: Volume | None = None
        try:
            layout, manifest, checksums = read_committed(paths, primary)
            disk_slots = disk_slot_count(manifest.durability)
            volume = Volume(paths, layout, disk_slots=disk_slots, engine=engine)
            volume.open_files(committed=manifest.generation % disk_slots, with_scratch=with_scratch)
        except BaseException:
            if volume is not None:
                volume.close()
            lock.release()
            raise
        return cls(
            volume, manifest, checksums, lock, status=Status.CLEAN, verify=verify,
            timeout_s=timeout_s,
            barrier=barrier,
        )  # fmt: skip

    @files.storage_errors("closing a store")
    def close(self) -> None:
        """Waits for outstanding I/O. What was not committed is forgotten; a store
        that was never committed is removed. I/O that does not come back keeps the lock. If it is
        interrupted, it can be called again."""
        with self._lock:
            if self._closed:
                return
            abandoned = self._tracker.claim_all()
        self._drain(abandoned)
        self._status = Status.CLOSED
        self._volume.close()
        # A prepared manifest stays: another rank may have seen it and committed.
        begun = any((self.dirs[0] / n).exists() for n in (files.MANIFEST, files.PREPARED))
        try:
            if self._is_new and not begun:
                for path in self.dirs:
                    files.delete_files(path)
                files.remove_empty(self._created)
        finally:  # what is left is an unfinished store, which others may remove
            self._store_lock.release()
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def generation(self) -> int:
        """The committed generation; one below the first while the store is being created."""
        return self._manifest.generation

    @property
    def meta(self) -> dict[str, Any]:
        return plain_json(self._manifest.meta)

    @property
    def status(self) -> Status:
        return self._status

    @property
    def cause(self) -> str:
        """Why the store has failed, if it has."""
        return self._cause

    @property
    def regions(self) -> tuple[Region, ...]:
        return self.layout.regions

    @property
    def counters(self) -> Counters:
        with self._lock:
            return Counters(self._bytes_read, self._bytes_written)

    def checksum(self, key: str, chunk: int) -> int:
        """CRC-32C of a chunk of the committed generation."""
        extent = self.layout.find(key, chunk)
        if extent.scratch:
            raise StoreError(f"{chunk_name(extent)} is scratch; it has no checksum")
        return int(self._checksums[extent.index])

    def read(
        self, key: str, chunk: int, buffer: Buffer, *, uncommitted: bool | None = False
    ) -> Ticket:
        """Submits a read of the committed generation, or with `uncommitted` of what was
        written since and waited for; None: of the newest of the two. Of a scratch chunk the
        first bytes may be written and read, where the buffer has fewer."""
        extent = self.layout.find(key, chunk)
        check_buffer(extent, buffer)
        with self._lock:
            disk_slot, crc = self._readable(extent, uncommitted=uncommitted)
            if extent.scratch and buffer.nbytes > (there := self._tracker.scratch_bytes(extent)):
                raise StoreError(
                    f"{chunk_name(extent)}: {there} bytes were written, a read asks for"
                    f" {buffer.nbytes}; read what was written"
                )
            attempt = self._tracker.reserve("read", disk_slot, extent)
        return self._submit("read", disk_slot, extent, buffer, crc=crc, attempt=attempt)

    def write(self, key: str, chunk: int, buffer: Buffer, *, crc: int | None = None) -> Ticket:
        """Submits a write to the next generation. The buffer must hold its final bytes, and keep
        them until the ticket has been waited for. `crc`: their CRC-32C, where the caller took it
        when it made them; else it is taken here."""
        extent = self.layout.find(key, chunk)
        check_buffer(extent, buffer)
        with self._lock:
            disk_slot = self._writable(extent)
            attempt = self._tracker.reserve("write", disk_slot, extent)
        if extent.scratch:
            crc = None
        elif crc is None:
            crc = checksum(buffer)
        return self._submit("write", disk_slot, extent, buffer, crc=crc, attempt=attempt)

    def share(self, source: Store, extent: Extent) -> bool:
        """Takes a chunk of another store's committed generation for the next one of this, with its
        checksum and without moving its bytes: the two share blocks until one of them is written.
        False: the file system cannot, and the chunk is to be copied."""
        own = self.layout.find(extent.key, extent.chunk)
        with source._lock:
            from_disk_slot, _ = source._readable(extent, uncommitted=False)
            source._tracker.reserve("read", from_disk_slot, extent)
        try:
            with self._lock:
                disk_slot = self._writable(own)
                attempt = self._tracker.reserve("write", disk_slot, own)
            try:
                if not self._volume.share(disk_slot, own, source._volume, from_disk_slot, extent):
                    return False
                crc = source.checksum(extent.key, extent.chunk)
                with self._lock:
                    self._tracker.mark_written(
                        Ticket("write", own, disk_slot, _NOTHING, crc, attempt, -1)
                    )
            finally:
                self._release("write", disk_slot, own)
        finally:
            source._release("read", from_disk_slot, extent)
        return True

    def _submit(
        self, kind: Kind, disk_slot: int, extent: Extent, buffer: Buffer, *, crc: int | None,
        attempt: int,
    ) -> Ticket:  # fmt: skip
        """The chunk is reserved already; it is released if the engine refuses."""
        submit = self._volume.read if kind == "read" else self._volume.write
        try:
            number = submit(disk_slot, extent, buffer)
        except BaseException as error:
            self._release(kind, disk_slot, extent)
            if isinstance(error, StorageIOError):
                raise self._volume.io_error(kind, disk_slot, extent, error) from error
            raise
        ticket = Ticket(kind, extent, disk_slot, buffer, crc, attempt, number)
        self._put_back(ticket)
        return ticket

    def wait(self, ticket: Ticket, timeout_s: float | None = None) -> None:
        """Completes a read or write, and checks what was read where a check is due. After a
        DeadlineError or an interrupt the I/O is still in flight; wait again, discard or close."""
        with self._lock:
            self._tracker.claim(ticket)
        kind, disk_slot, extent = ticket.kind, ticket.disk_slot, ticket.extent
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            self._volume.wait(ticket.engine_ticket, limit_s)
        except DeadlineError as error:
            self._put_back(ticket)
            raise self._volume.io_error(kind, disk_slot, extent, error) from error
        except StorageIOError as error:
            self._release(kind, disk_slot, extent)
            raise self._volume.io_error(kind, disk_slot, extent, error) from error
        except BaseException:
            self._put_back(ticket)
            raise
        try:
            checked = kind == "read" and ticket.crc is not None
            if checked:
                self._compare(disk_slot, extent, checksum(ticket.buffer), expected=ticket.crc)
            with self._lock:
                if kind == "write":
                    self._bytes_written += ticket.buffer.nbytes
                    self._tracker.mark_written(ticket)
                    return
                self._bytes_read += ticket.buffer.nbytes
                current = self._disk_slot_of(self.generation), FIXED_DISK_SLOT
                if checked and disk_slot in current:
                    self._unverified[extent.index] = False
        finally:
            self._release(kind, disk_slot, extent)

    def wait_all(self, tickets: Iterable[Ticket]) -> None:
        """Completes every ticket, also behind one that failed: their buffers will be used again."""
        failed: LohanError | None = None
        for ticket in tickets:
            try:
                self.wait(ticket)
            except LohanError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _compare(self, disk_slot: int, extent: Extent, found: int, *, expected: int | None) -> None:
        if found != expected:
            raise ChecksumError(
                f"{chunk_name(extent)}: CRC-32C of {extent.nbytes} bytes at offset {extent.offset}"
                f" of {self._volume.path(disk_slot, extent)} is {found:#010x}, {expected:#010x}"
                " expected: the drive gave back other bytes than were written; check the drive,"
                " then restore a snapshot or start the run again"
            )

    def _release(self, kind: Kind, disk_slot: int, extent: Extent) -> None:
        with self._lock:
            self._tracker.release(kind, disk_slot, extent)

    def _put_back(self, ticket: Ticket) -> None:
        with self._lock:
            self._tracker.add(ticket)

    def discard(self) -> None:
        """Forgets what was written since the last commit; that generation stays. Outstanding
        I/O, reads too, is waited for: its buffers will be used again. If it does not come
        back, the store is failed. A slot written in place has nothing to go back to: then too."""
        with self._lock:
            self._check_usable()
            stale = self._tracker.claim_all()
        late = self._drain(stale)
        with self._lock:
            if late is not None:
                self._fail(f"I/O did not come back ({late})")
            elif self._tracker.touched and self._status is Status.DIRTY:
                self._fail("a step that was written in place did not finish")
            self._tracker.begin_generation()

    def _drain(self, tickets: Iterable[Ticket]) -> DeadlineError | None:
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
                self._release(ticket.kind, ticket.disk_slot, ticket.extent)
        finally:
            for ticket in rest:
                self._put_back(ticket)
        return late

    def commit(
        self, meta: Mapping[str, Any] | None = None, *, advance: bool = True, clean: bool = False
    ) -> None:
        """Makes what the step has written the committed generation, with the caller's `meta`
        (None keeps the present one). `advance=False` commits new meta only.

        durability "step": durable when it returns. durability "checkpoint": a step counts in
        memory only; `clean=True` makes the state durable and whole on disk. There chunks
        that were not written keep their old bytes; the caller writes its newer ones before that.
        """
        with self._lock:
            self._check_usable()
            new_meta = self._manifest.meta if meta is None else plain_json(meta)
            self._tracker.check_no_writes()
            in_place = self._volume.disk_slots == 1 and self._status is not Status.CREATING
            if advance and not in_place:
                self._tracker.check_complete(self.generation + 1)
            elif advance:
                self._tracker.keep_unwritten(self._checksums)
            elif self._status is Status.CREATING:
                raise StoreError("commit of meta alone, but the store is still being created")
            else:
                self._tracker.check_untouched(self.generation + 1)
            generation = self.generation + 1 if advance else self.generation
            checksums = self._tracker.checksums.copy() if advance else self._checksums
            if self._volume.disk_slots == 2 or clean or self._status is Status.CREATING:
                data_changed = advance or self._status is Status.DIRTY
                self._commit_durably(generation, new_meta, checksums if data_changed else None)
            else:
                self._manifest = replace(self._manifest, generation=generation, meta=new_meta)
            self._checksums = checksums
            if advance:
                self._tracker.begin_generation()
                self._unverified[: self.layout.per_generation] = False

    def check(self, extent: Extent, buffer: Buffer) -> tuple[Path, str | None]:
        """Reads a chunk of the committed generation through a small buffer: where it lies, and
        what is wrong with it, if anything is."""
        with self._lock:
            disk_slot, _ = self._readable(extent, uncommitted=False)
            self._tracker.reserve("read", disk_slot, extent)
        found, problem = 0, None
        try:
            for skip in range(0, extent.nbytes, len(buffer)):
                part = buffer[: min(len(buffer), extent.nbytes - skip)]
                number = self._volume.read(disk_slot, extent, part, skip=skip)
                self._volume.wait(number, self._timeout_s)
                found = checksum(part, found)
            self._compare(disk_slot, extent, found, expected=int(self._checksums[extent.index]))
        except DeadlineError as error:  # the buffer is still the kernel's
            raise self._volume.io_error("read", disk_slot, extent, error) from error
        except StorageIOError as error:
            problem = str(self._volume.io_error("read", disk_slot, extent, error))
        except StoreError as error:
            problem = str(error)
        finally:
            self._release("read", disk_slot, extent)
        return self._volume.path(disk_slot, extent), problem

    def _readable(self, extent: Extent, *, uncommitted: bool | None) -> tuple[int, int | None]:
        """Slot to read, and the checksum that it must have if a check is due."""
        self._check_usable(reading=True)
        written = self._tracker.is_written(extent)
        uncommitted = written if uncommitted is None else uncommitted
        if (uncommitted or extent.scratch) and not written:
            raise StoreError(
                f"{chunk_name(extent)} has not been written and waited for"
                f" {'by this process' if extent.scratch else 'in the step in flight'};"
                " wait for its write before reading it"
            )
        if extent.scratch:
            return SCRATCH_DISK_SLOT, None
        if not uncommitted and not self._committed:
            raise StoreError(
                f"{chunk_name(extent)}: nothing is committed yet; commit first or read the "
                "uncommitted one"
            )
        if extent.fixed:
            return FIXED_DISK_SLOT, self._due(extent)
        if uncommitted:
            crc = int(self._tracker.checksums[extent.index]) if self._verify == "always" else None
            return self._disk_slot_of(self.generation + 1), crc
        if written and self._volume.disk_slots == 1:
            raise StoreError(
                f"{chunk_name(extent)} was overwritten in place by the step in flight;"
                " read the uncommitted one"
            )
        return self._disk_slot_of(self.generation), self._due(extent)

    def _due(self, extent: Extent) -> int | None:
        """The checksum of a committed chunk, if it must be compared with what is read."""
        first = self._verify == "first-read" and bool(self._unverified[extent.index])
        due = self._committed and (first or self._verify == "always")
        return int(self._checksums[extent.index]) if due else None

    def _writable(self, extent: Extent) -> int:
        self._check_usable()
        if extent.scratch:
            return SCRATCH_DISK_SLOT
        if extent.fixed:
            if self._status is not Status.CREATING:
                raise StoreError(
                    f"{chunk_name(extent)} is fixed: it is written while the store is made and not"
                    " after its first commit"
                )
            return FIXED_DISK_SLOT
        if self._volume.disk_slots == 1 and self._status is Status.CLEAN:
            try:
                dirty = replace(self._manifest, clean=False)
                write_manifest(self.dirs[0], dirty)  # durable before the first byte in place
                self._manifest = dirty
            except BaseException as error:
                self._fail(f"it could not be marked as written in place ({error})")
                raise
            self._status = Status.DIRTY
        return self._disk_slot_of(self.generation + 1)

    def _commit_durably(
        self, generation: int, meta: dict[str, Any], checksums: Checksums | None
    ) -> None:
        """Data, then checksums, then the manifest; each durable before the next begins. Without
        `checksums` those on disk and the data are already right. A failed sync does not say what
        reached the drive, and a failed rename or folder sync leaves open which manifest is current:
        after either, only a fresh open can tell."""
        primary, crc = self.dirs[0], self._manifest.sums_crc32c
        try:
            if self._status is Status.CREATING:
                self._volume.sync(FIXED_DISK_SLOT)
            if checksums is not None:
                disk_slot = self._disk_slot_of(generation)
                self._volume.sync(disk_slot)
                crc = write_checksums(primary / CHECKSUM_FILES[disk_slot], checksums)
            manifest = replace(
                self._manifest, generation=generation, meta=meta, clean=True, sums_crc32c=crc
            )
            if self.barrier is None:
                write_manifest(primary, manifest)
            else:  # in two phases: see manifest.py
                number = commit_number(self._manifest) + 1
                manifest = replace(manifest, meta={**meta, COMMITS: number})
                write_manifest(primary, manifest, name=PREPARED)
                self.barrier()
                rename_durably(primary / PREPARED, primary / MANIFEST)
        except BaseException as error:
            self._fail(f"the commit of generation {generation} failed ({error})")
            raise
        self._manifest, self._status, self._committed = manifest, Status.CLEAN, True

    def _disk_slot_of(self, generation: int) -> int:
        return generation % self._volume.disk_slots

    def _fail(self, cause: str) -> None:
        self._status, self._cause = Status.FAILED, cause

    def _check_usable(self, *, reading: bool = False) -> None:
        if self._status is Status.CLOSED:
            raise StoreError(f"the store in {self.dirs[0]} is closed; open it again")
        if self._status is Status.FAILED and not (reading and self._volume.disk_slots == 2):
            go_on = (
                "resume from the last snapshot" if self._volume.disk_slots == 1 else "open it again"
            )
            raise StoreError(
                f"the store in {self.dirs[0]} cannot go on: {self._cause}; close it and {go_on}"
            )
