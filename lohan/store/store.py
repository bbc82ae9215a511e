"""The SSD store: chunks of bytes, addressed by region key and chunk number, in generations.

A step reads the newest bytes of a chunk and writes to the generation that is not committed.
`commit` makes that generation current by atomically replacing one small manifest.
docs/storage-format.md specifies the format. The store does not depend on models, devices or plans.
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
from lohan.store.files import (
    CHECKSUM_FILES,
    LOG_PREPARED,
    MANIFEST,
    PREPARED,
    StoreLock,
    rename_durably,
)
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
from lohan.store.log import GradientLog, LogManifest, live_log, remove_log
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
from lohan.util.units import PAGE, counted

Barrier = Callable[[], None]
Dirs = str | Path | Sequence[str | Path]
Verify = Literal["first-read", "always", "never"]
PRESENCE_INTERVAL_S = 2.0  # The shortest time between two checks for missing files.


# -- Outstanding I/O, and the chunks written since the last commit ---------------------------------
#
# Note [who may touch a chunk] Each chunk of a slot is either idle, being written by one write, or
# being read by any number of reads. An operation that would violate this raises StoreError instead
# of racing. The store calls all methods of ChunkTracker while it holds its lock.


Kind = Literal["read", "write"]


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


_NOTHING = np.empty(0, dtype=np.uint8)


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
        """Reserve the chunk until `release` and return the current attempt.

        See Note [who may touch a chunk].
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

        After a step that writes in place, their bytes on disk are unchanged.
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
    CREATING = "being created"  # There is no manifest yet.
    CLEAN = "clean"  # The committed generation is on disk.
    DIRTY = "written in place"  # Durability "checkpoint": the disk is ahead of the manifest.
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(frozen=True)
class Counters:
    """The numbers of bytes read and written since the store was opened."""

    bytes_read: int
    bytes_written: int


class Store:
    """A store on one or several drives, open in one process and usable from any number of threads.

    Use `Store.create` or `Store.open` to obtain one.
    """

    def __init__(
        self,
        volume: Volume,
        manifest: Manifest,
        checksums: Checksums,
        lock: StoreLock,
        *,
        status: Status,
        verify: Verify,
        timeout_s: float,
        barrier: Barrier | None,
        created: Sequence[Path] = (),
        log: LogManifest | None = None,
    ) -> None:
        """Initialise a store whose files are open and locked.

        `manifest` and `checksums` describe the committed generation, `log` the steps after it.
        `created` lists the directories that did not exist before this store.
        """
        self.dirs, self.layout = volume.dirs, volume.layout
        self.uuid, self.durability = manifest.uuid, manifest.durability
        self.barrier = barrier
        self._volume, self._manifest, self._checksums = volume, manifest, checksums
        self._store_lock, self._created = lock, created
        self._status, self._cause, self._closed = status, "", False
        self._verify = verify
        # The lock protects bookkeeping only. Transfers, checksums and waits run without it, so any
        # number of threads can transfer chunks at the same time. A commit holds the lock while it
        # syncs.
        self._lock, self._tracker = threading.RLock(), ChunkTracker(volume.layout)
        # The time on the monotonic clock at which all files were last seen in their directories.
        self._seen_s = time.monotonic()
        self._timeout_s, self._bytes_read, self._bytes_written = timeout_s, 0, 0
        self._unverified = np.full(len(self.layout.durable), status is Status.CLEAN)
        self._is_new, self._committed = status is Status.CREATING, status is Status.CLEAN
        if self._committed:
            self._tracker.mark_fixed(checksums)
        self._log: GradientLog | None = None
        self._earlier_logs = Counters(0, 0)  # bytes of logs that have been closed
        if log is not None:
            self._log = GradientLog.open(volume, log, timeout_s=timeout_s, barrier=barrier)

    @classmethod
    @files.storage_errors("creating a store")
    def create(
        cls,
        dirs: Dirs,
        regions: Iterable[Region],
        *,
        meta: Mapping[str, Any] | None = None,
        durability: str = "step",
        weights: Sequence[float] | None = None,
        engine: str | IOEngine = "auto",
        verify: Verify = "first-read",
        timeout_s: float = 60.0,
        first_generation: int = 0,
        with_scratch: bool = True,
        barrier: Barrier | None = None,
        final_dirs: Sequence[Path] | None = None,
        reserved_bytes: int = 0,
    ) -> Self:
        """Create the files of a new store, which becomes valid with its first commit.

        `close` removes a store that was never committed. If there is too little space, nothing is
        written; if creation fails, everything it created is removed. If other ranks have stores of
        the same run, `barrier` is called to wait until all of them have prepared a commit.
        `final_dirs` are the directories to which the caller will move the store once it is
        complete. `reserved_bytes` are needed by the caller in addition to the store, and count as a
        part of the needed space.
        """
        paths, disk_slots = files.store_dirs(dirs), disk_slot_count(durability)
        layout = plan_layout(regions, directories=len(paths), weights=weights)
        manifest = Manifest(  # Written to disk by the first commit.
            uuid=str(uuid4()),
            generation=first_generation - 1,
            durability=durability,
            clean=False,
            count=len(paths),
            layout_sha256=layout.digest(),
            sums_crc32c=0,
            meta=plain_json(meta or {}),
        )
        for path in paths:
            files.check_vacant(path)
        needed = needed_bytes(paths, layout, disk_slots=disk_slots, with_scratch=with_scratch)
        share = reserved_bytes // len(paths)
        files.check_free_space({path: count + share for path, count in needed.items()})
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
            volume,
            manifest,
            checksums,
            lock,
            status=Status.CREATING,
            verify=verify,
            timeout_s=timeout_s,
            barrier=barrier,
            created=created,
        )
        try:
            write_identities(paths, final_dirs or paths, uuid=manifest.uuid, layout=layout)
            volume.create_files(with_scratch=with_scratch)
            for disk_slot in (
                *range(disk_slots),
                FIXED_DISK_SLOT,
            ):  # Make the size of every file durable, including the slot
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
        cls,
        dirs: Dirs,
        *,
        engine: str | IOEngine = "auto",
        verify: Verify = "first-read",
        timeout_s: float = 60.0,
        with_scratch: bool = True,
        barrier: Barrier | None = None,
        replays: bool = False,
    ) -> Self:
        """Open the committed generation of a store.

        The first directory is enough to find the others, unless it was moved. Raise StoreError if
        the store has logged steps and `replays` is False, because its chunks are older than these
        steps.
        """
        paths, primary = locate(dirs)
        check_finished(paths[0])
        check_members(paths, primary)
        lock = StoreLock(paths)
        volume: Volume | None = None
        try:
            layout, manifest, checksums = read_committed(paths, primary)
            log = live_log(paths[0], uuid=manifest.uuid, generation=manifest.generation)
            if log is not None and not replays:
                raise StoreError(
                    f"{paths[0]}: not all steps are in the weights, because the run was killed: "
                    f"{counted(len(log.entries), 'step')} in the log of gradients; `lohan store "
                    f"fold {paths[0]}` applies them, and so does resuming the run"
                )
            # A prepared entry may be the newest commit of the ranks.
            if log is None and with_scratch and not (paths[0] / LOG_PREPARED).exists():
                remove_log(paths)
            disk_slots = disk_slot_count(manifest.durability)
            volume = Volume(paths, layout, disk_slots=disk_slots, engine=engine)
            volume.open_files(committed=manifest.generation % disk_slots, with_scratch=with_scratch)
        except BaseException:
            if volume is not None:
                volume.close()
            lock.release()
            raise
        return cls(
            volume,
            manifest,
            checksums,
            lock,
            status=Status.CLEAN,
            verify=verify,
            timeout_s=timeout_s,
            barrier=barrier,
            log=log,
        )

    @files.storage_errors("closing a store")
    def close(self) -> None:
        """Wait for outstanding I/O and close the store.

        Uncommitted writes are lost, and a store that was never committed is removed. The lock is
        kept while I/O that missed its deadline is still in flight. If `close` is interrupted, it
        can be called again.
        """
        with self._lock:
            if self._closed:
                return
            abandoned = self._tracker.claim_all()
        self._drain(abandoned)
        self._status = Status.CLOSED
        self._volume.close()
        if self._log is not None and not self._log.live:
            remove_log(self.dirs)
        # Keep a prepared manifest: another rank may have seen it and committed.
        begun = any((self.dirs[0] / n).exists() for n in (files.MANIFEST, files.PREPARED))
        try:
            if self._is_new and not begun:
                for path in self.dirs:
                    files.delete_files(path)
                files.remove_empty(self._created)
        # If the removal fails, the remaining files are an unfinished store, which others may
        # remove.
        finally:
            self._store_lock.release()
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def generation(self) -> int:
        """The committed generation; while the store is being created, one less than the first."""
        return self._manifest.generation

    @property
    def meta(self) -> dict[str, Any]:
        """The caller's meta of the last committed step, which may be a logged one."""
        if self._log is not None and self._log.live:
            return self._log.meta
        return plain_json(self._manifest.meta)

    # -- the log of gradients ---------------------------------------------------------------------

    @property
    def log(self) -> GradientLog | None:
        return self._log

    def start_log(self, regions: Sequence[tuple[str, tuple[int, ...]]], *, segments: int) -> None:
        """Preallocate a log with space for `segments` steps, given the bytes of each chunk."""
        with self._lock:
            self._check_usable()
            if self._volume.disk_slots == 1:
                raise StoreError("a log of gradients needs a store that keeps two generations")
            self._end_log()
            self._log = GradientLog.create(
                self._volume,
                uuid=self.uuid,
                generation=self.generation,
                regions=regions,
                segments=segments,
                timeout_s=self._timeout_s,
                barrier=self.barrier,
            )

    def stop_log(self) -> None:
        """Remove the log. Raise StoreError if some of its steps have not been folded."""
        with self._lock:
            self._end_log()
            remove_log(self.dirs)

    def _end_log(self) -> None:
        if self._log is None:
            return
        if self._log.live:
            raise StoreError("the log of gradients has steps that are not folded; fold them first")
        before, log = self._earlier_logs, self._log
        self._earlier_logs = Counters(
            before.bytes_read + log.bytes_read, before.bytes_written + log.bytes_written
        )
        log.close()
        self._log = None

    def commit_logged(self, meta: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        """Commit a step whose gradients were appended to the log.

        It is durable when this returns. `record` contains what a replay needs besides gradients.
        """
        with self._lock:
            self._check_usable()
            assert self._log is not None
            try:
                self._log.commit(self.generation, self._numbered(meta), record)
            except BaseException as error:
                self._fail(f"the commit of a logged step failed ({error})")
                raise

    def commit_logged_meta(self, meta: Mapping[str, Any]) -> None:
        """Commit the meta of a step without an update that follows logged steps."""
        with self._lock:
            self._check_usable()
            assert self._log is not None
            try:
                self._log.commit_meta(self._numbered(meta))
            except BaseException as error:
                self._fail(f"the commit of a logged step failed ({error})")
                raise

    def _numbered(self, meta: Mapping[str, Any], add: int = 1) -> dict[str, Any]:
        """Return the meta of a commit, to which its number is added if there are other ranks."""
        if self.barrier is None:
            return dict(meta)
        last = commit_number(replace(self._manifest, meta=self.meta))
        return {**meta, COMMITS: last + add}

    @property
    def status(self) -> Status:
        return self._status

    @property
    def cause(self) -> str:
        """The reason why the store has failed; empty if it has not."""
        return self._cause

    @property
    def regions(self) -> tuple[Region, ...]:
        return self.layout.regions

    @property
    def counters(self) -> Counters:
        with self._lock:
            earlier, log = self._earlier_logs, self._log
            return Counters(
                self._bytes_read + earlier.bytes_read + (log.bytes_read if log else 0),
                self._bytes_written + earlier.bytes_written + (log.bytes_written if log else 0),
            )

    def checksum(self, key: str, chunk: int) -> int:
        """Return the CRC-32C of a chunk of the committed generation."""
        extent = self.layout.find(key, chunk)
        if extent.scratch:
            raise StoreError(f"{chunk_name(extent)} is scratch; it has no checksum")
        return int(self._checksums[extent.index])

    def read(
        self, key: str, chunk: int, buffer: Buffer, *, uncommitted: bool | None = False
    ) -> Ticket:
        """Submit a read of a chunk and return a ticket.

        By default the committed generation is read. `uncommitted=True` reads what has been written
        since the last commit and waited for, and `uncommitted=None` reads the newer of the two. For
        a scratch chunk, the buffer may be smaller than the chunk; then only the first bytes are
        read.
        """
        extent = self.layout.find(key, chunk)
        check_buffer(extent, buffer)
        with self._lock:
            disk_slot, crc = self._readable(extent, uncommitted=uncommitted)
            if extent.scratch and buffer.nbytes > (written := self._tracker.scratch_bytes(extent)):
                raise StoreError(
                    f"{chunk_name(extent)}: {written} bytes were written, a read asks for"
                    f" {buffer.nbytes}; read what was written"
                )
            attempt = self._tracker.reserve("read", disk_slot, extent)
        return self._submit("read", disk_slot, extent, buffer, crc=crc, attempt=attempt)

    def write(self, key: str, chunk: int, buffer: Buffer, *, crc: int | None = None) -> Ticket:
        """Submit a write of a chunk to the next generation and return a ticket.

        The buffer must hold its final bytes and must not change until the ticket has been waited
        for. `crc` is the CRC-32C of the buffer if the caller has already computed it. For a scratch
        chunk, the buffer may be smaller than the chunk; then only the first bytes are written.
        """
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
        """Clone a committed chunk of another store into this store's next generation by reflink.

        The checksum is copied, and the two chunks share their blocks until one of them is
        overwritten. Return False if the file system does not support this; the caller must then
        copy the chunk.
        """
        target = self.layout.find(extent.key, extent.chunk)
        with source._lock:
            from_disk_slot, _ = source._readable(extent, uncommitted=False)
            source._tracker.reserve("read", from_disk_slot, extent)
        try:
            with self._lock:
                disk_slot = self._writable(target)
                attempt = self._tracker.reserve("write", disk_slot, target)
            try:
                if not self._volume.share(
                    disk_slot, target, source._volume, from_disk_slot, extent
                ):
                    return False
                crc = source.checksum(extent.key, extent.chunk)
                with self._lock:
                    self._tracker.mark_written(
                        Ticket("write", target, disk_slot, _NOTHING, crc, attempt, -1)
                    )
            finally:
                self._release("write", disk_slot, target)
        finally:
            source._release("read", from_disk_slot, extent)
        return True

    def _submit(
        self,
        kind: Kind,
        disk_slot: int,
        extent: Extent,
        buffer: Buffer,
        *,
        crc: int | None,
        attempt: int,
    ) -> Ticket:
        """Submit I/O for a reserved chunk, and release the chunk if the engine refuses it."""
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
        """Wait until a read or write is complete, and verify the data of a read if a check is due.

        After a DeadlineError or an interrupt the I/O is still in flight; wait again, discard or
        close.
        """
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
        """Wait for all tickets, then raise the first error.

        Tickets after a failed one are waited for as well, because their buffers will be reused.
        """
        failed: LohanError | None = None
        for ticket in tickets:
            try:
                self.wait(ticket)
            except LohanError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _compare(
        self, disk_slot: int, extent: Extent, actual: int, *, expected: int | None
    ) -> None:
        if actual != expected:
            raise ChecksumError(
                f"{chunk_name(extent)}: CRC-32C of {extent.nbytes} bytes at offset {extent.offset}"
                f" of {self._volume.path(disk_slot, extent)} is {actual:#010x}, {expected:#010x}"
                " expected: the drive returned other bytes than were written; check the drive,"
                " then restore a snapshot or start the run again"
            )

    def _release(self, kind: Kind, disk_slot: int, extent: Extent) -> None:
        with self._lock:
            self._tracker.release(kind, disk_slot, extent)

    def _put_back(self, ticket: Ticket) -> None:
        with self._lock:
            self._tracker.add(ticket)

    def discard(self) -> None:
        """Discard everything written since the last commit; the committed generation is unchanged.

        This waits for all outstanding I/O, including reads, because the buffers will be reused. If
        the I/O does not complete in time, the store fails. The store also fails if chunks were
        written in place, because no other copy exists.
        """
        with self._lock:
            self._check_usable()
            stale = self._tracker.claim_all()
        late = self._drain(stale)
        if self._log is not None:
            try:
                self._log.discard()
            except DeadlineError as error:
                late = late or error
        with self._lock:
            if late is not None:
                self._fail(f"I/O did not come back ({late})")
            elif self._tracker.touched and self._status is Status.DIRTY:
                self._fail("a step that was written in place did not finish")
            self._tracker.begin_generation()

    def _drain(self, tickets: Iterable[Ticket]) -> DeadlineError | None:
        """Wait for I/O whose result is not needed, so that its buffers and chunks become free.

        One deadline applies to all tickets. Return the last DeadlineError if the deadline was
        missed. Tickets that are still in flight then, or when an interrupt arrives, remain
        outstanding.
        """
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
        """Make the written chunks the committed generation, with the caller's `meta`.

        If `meta` is None, the current one is kept. `advance=False` commits new meta only.

        With durability "step", the commit is durable when this returns, and every chunk must have
        been written. The same holds for the first commit of any store. With durability
        "checkpoint", later commits are recorded in memory only, unless `clean=True` makes the state
        durable and consistent on disk. Chunks that were not written keep their old bytes there;
        before a clean commit the caller must write the chunks of which it holds newer versions.
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
                if self._log is not None and self._log.live:
                    raise StoreError("commit of meta alone, but steps are logged after it")
            generation = self.generation + 1 if advance else self.generation
            checksums = self._tracker.checksums.copy() if advance else self._checksums
            if self._volume.disk_slots == 2 or clean or self._status is Status.CREATING:
                data_changed = advance or self._status is Status.DIRTY
                folds = self._log is not None and self._log.live
                self._commit_durably(
                    generation, new_meta, checksums if data_changed else None, folds=folds
                )
            else:
                self._manifest = replace(self._manifest, generation=generation, meta=new_meta)
            self._checksums = checksums
            if advance:
                # A chunk that a commit in place did not write still has to be verified.
                self._unverified[self._tracker.written_chunks()] = False
                self._tracker.begin_generation()
                if self._log is not None:
                    self._log.folded(self.generation)

    def check(self, extent: Extent, buffer: Buffer) -> tuple[Path, str | None]:
        """Verify a chunk of the committed generation by reading it through a small buffer.

        Return the path of the chunk's file, and a description of the problem. The description is
        None if the chunk is intact.
        """
        with self._lock:
            disk_slot, _ = self._readable(extent, uncommitted=False)
            self._tracker.reserve("read", disk_slot, extent)
        digest, problem = 0, None
        try:
            for skip in range(0, extent.nbytes, len(buffer)):
                part = buffer[: min(len(buffer), extent.nbytes - skip)]
                number = self._volume.read(disk_slot, extent, part, skip=skip)
                self._volume.wait(number, self._timeout_s)
                digest = checksum(part, digest)
            self._compare(disk_slot, extent, digest, expected=int(self._checksums[extent.index]))
        except DeadlineError as error:  # The kernel may still write to the buffer.
            raise self._volume.io_error("read", disk_slot, extent, error) from error
        except StorageIOError as error:
            problem = str(self._volume.io_error("read", disk_slot, extent, error))
        except StoreError as error:
            problem = str(error)
        finally:
            self._release("read", disk_slot, extent)
        return self._volume.path(disk_slot, extent), problem

    def _readable(self, extent: Extent, *, uncommitted: bool | None) -> tuple[int, int | None]:
        """Return the slot to read, and the expected checksum or None if no check is due."""
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
        """Return the checksum of a committed chunk if a read has to be verified, else None."""
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
                # This is durable before the first write in place.
                write_manifest(self.dirs[0], dirty)
                self._manifest = dirty
            except BaseException as error:
                self._fail(f"it could not be marked as written in place ({error})")
                raise
            self._status = Status.DIRTY
        return self._disk_slot_of(self.generation + 1)

    def _commit_durably(
        self,
        generation: int,
        meta: dict[str, Any],
        checksums: Checksums | None,
        *,
        folds: bool,
    ) -> None:
        """Write data, then checksums, then the manifest; make each durable before writing the next.

        `folds` states that the generation is that of the last logged step, so other ranks need not
        commit it at the same time. If `checksums` is None, the data and the checksums on disk are
        already correct. After a failed sync it is unknown which data reached the drive, and after a
        failed rename or directory sync it is unknown which manifest is current. The store then
        fails, and only reopening it shows which generation is committed.
        """
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
            if self.barrier is None or folds:
                manifest = replace(manifest, meta=self._numbered(meta, add=0) if folds else meta)
                write_manifest(primary, manifest)
            else:  # This is a two-phase commit; see recovery.py.
                manifest = replace(manifest, meta=self._numbered(meta))
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

    def check_present(self) -> None:
        """Raise StoreError if a file of the open store was removed.

        Reads and writes of removed files succeed, but the data is lost when the process ends. The
        files are looked up at most once in PRESENCE_INTERVAL_S, so this may be called often.
        """
        with self._lock:
            self._check_usable()

    def _check_usable(self, *, reading: bool = False) -> None:
        if self._status is Status.CLOSED:
            raise StoreError(f"the store in {self.dirs[0]} is closed; make a new session")
        if self._status is Status.FAILED and not (reading and self._volume.disk_slots == 2):
            snapshot = " from the last snapshot" if self._volume.disk_slots == 1 else ""
            raise StoreError(
                f"the store in {self.dirs[0]} cannot go on: {self._cause}; resume the run{snapshot}"
            )
        now_s = time.monotonic()
        if now_s - self._seen_s < PRESENCE_INTERVAL_S or self._status is Status.CREATING:
            return
        self._seen_s = now_s
        if (lost := self._volume.missing_file()) is not None:
            self._fail(f"{lost} was removed while the store was in use")
            raise StoreError(
                f"{lost}: was removed while the run used it, and what the run writes would be "
                "lost; find out what removed it, then restore the store from a copy and resume, or "
                "start the run again"
            )
