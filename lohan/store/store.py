"""The SSD store: chunks of bytes, addressed by region key and chunk number, in generations.

A step reads the newest bytes of a chunk and writes to the generation that is not committed.
`commit` makes that generation current by atomically replacing one small manifest.
docs/storage-format.md specifies the format. The store does not depend on models, devices or plans.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Self
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from lohan.errors import StorageIOError, StoreError
from lohan.store import files
from lohan.store.extents import Extent, Region, plan_layout
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
from lohan.store.transfers import (
    Counters,
    Ticket,
    Transfers,
    check_buffer,
    compare_checksums,
    wait_for_all,
)
from lohan.util.units import counted

Barrier = Callable[[], None]
Dirs = str | Path | Sequence[str | Path]
Verify = Literal["first-read", "always", "never"]
PRESENCE_INTERVAL_S = 2.0  # The shortest time between two checks for missing files.


class Status(Enum):
    CREATING = "being created"  # There is no manifest yet.
    CLEAN = "clean"  # The committed generation is on disk.
    DIRTY = "written in place"  # Durability "checkpoint": the disk is ahead of the manifest.
    FAILED = "failed"
    CLOSED = "closed"


class StoreHealth:
    """Whether a store can be used: its status, why it failed, and whether its files are present."""

    def __init__(self, volume: Volume, status: Status, lock: threading.RLock) -> None:
        self._volume, self.status, self._lock = volume, status, lock
        self.cause = ""  # the reason why the store has failed; empty if it has not
        # The time on the monotonic clock at which all files were last seen in their directories.
        self._seen_s = time.monotonic()

    def fail(self, cause: str) -> None:
        self.status, self.cause = Status.FAILED, cause

    def check(self, *, reading: bool = False) -> None:
        """Raise StoreError if the store is closed or has failed, or if a file of it was removed.

        Reads and writes of removed files succeed, but the data is lost when the process ends. The
        files are looked up at most once in PRESENCE_INTERVAL_S, so this may be called often.
        """
        with self._lock:
            self._check_status(reading=reading)
            now_s = time.monotonic()
            if now_s - self._seen_s < PRESENCE_INTERVAL_S or self.status is Status.CREATING:
                return
            self._seen_s = now_s
            if (lost := self._volume.missing_file()) is not None:
                self.fail(f"{lost} was removed while the store was in use")
                raise StoreError(
                    f"{lost}: was removed while the run used it, and what the run writes would be "
                    "lost; find out what removed it, then restore the store from a copy and "
                    "resume, or start the run again"
                )

    def _check_status(self, *, reading: bool) -> None:
        primary = self._volume.dirs[0]
        if self.status is Status.CLOSED:
            raise StoreError(f"the store in {primary} is closed; make a new session")
        if self.status is Status.FAILED and not (reading and self._volume.disk_slots == 2):
            snapshot = " from the last snapshot" if self._volume.disk_slots == 1 else ""
            raise StoreError(
                f"the store in {primary} cannot go on: {self.cause}; resume the run{snapshot}"
            )


class Verification:
    """The checksums of the committed generation, and the chunks that are still to be verified."""

    def __init__(self, checksums: Checksums, verify: Verify, *, committed: bool) -> None:
        self.checksums, self.committed = checksums, committed
        self.always, self._at_first_read = verify == "always", verify == "first-read"
        self._unverified = np.full(len(checksums), committed)

    def due(self, extent: Extent) -> int | None:
        """Return the checksum of a committed chunk if a read of it must be verified, or None."""
        first = self._at_first_read and bool(self._unverified[extent.index])
        due = self.committed and (first or self.always)
        return int(self.checksums[extent.index]) if due else None

    def mark_verified(self, indices: int | npt.NDArray[np.intp]) -> None:
        self._unverified[indices] = False


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
        self._volume, self._manifest = volume, manifest
        self._store_lock, self._created, self._closed = lock, created, False
        self._transfers = Transfers(volume, timeout_s=timeout_s)
        # A commit holds the lock while it syncs.
        self._lock, self._tracker = self._transfers.lock, self._transfers.tracker
        self.health = StoreHealth(volume, status, self._lock)
        self._is_new = status is Status.CREATING
        self._verification = Verification(checksums, verify, committed=not self._is_new)
        if not self._is_new:
            self._tracker.mark_fixed(checksums)
        self.log: GradientLog | None = None
        self._earlier_logs = Counters(0, 0)  # bytes of logs that have been closed
        if log is not None:
            self.log = GradientLog.open(volume, log, timeout_s=timeout_s, barrier=barrier)

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
        self._transfers.drain(abandoned)
        self.health.status = Status.CLOSED
        self._volume.close()
        if self.log is not None and not self.log.live:
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
        if self.log is not None and self.log.live:
            return self.log.meta
        return plain_json(self._manifest.meta)

    # -- the log of gradients ---------------------------------------------------------------------

    def start_log(self, regions: Sequence[tuple[str, tuple[int, ...]]], *, segments: int) -> None:
        """Preallocate a log with space for `segments` steps, given the bytes of each chunk."""
        with self._lock:
            self.health.check()
            if self._volume.disk_slots == 1:
                raise StoreError("a log of gradients needs a store that keeps two generations")
            self.stop_log()
            self.log = GradientLog.create(
                self._volume,
                uuid=self.uuid,
                generation=self.generation,
                regions=regions,
                segments=segments,
                timeout_s=self._transfers.timeout_s,
                barrier=self.barrier,
            )

    def stop_log(self) -> None:
        """Remove the log. Raise StoreError if some of its steps have not been folded."""
        with self._lock:
            if self.log is not None:
                if self.log.live:
                    raise StoreError(
                        "the log of gradients has steps that are not folded; fold them first"
                    )
                self._earlier_logs += self.log.counters
                self.log.close()
                self.log = None
            remove_log(self.dirs)

    def commit_logged(self, meta: Mapping[str, Any], record: Mapping[str, Any] | None) -> None:
        """Commit a step whose gradients were appended to the log.

        It is durable when this returns. `record` contains what a replay needs besides gradients. If
        it is None, the step has changed nothing but the meta.
        """
        with self._lock:
            self.health.check()
            assert self.log is not None
            try:
                if record is None:
                    self.log.commit_meta(self._numbered(meta))
                else:
                    self.log.commit(self.generation, self._numbered(meta), record)
            except BaseException as error:
                self.health.fail(f"the commit of a logged step failed ({error})")
                raise

    def _numbered(self, meta: Mapping[str, Any], add: int = 1) -> dict[str, Any]:
        """Return `meta`, with the number of the commit if there are other ranks.

        The number is that of the last commit plus `add`.
        """
        if self.barrier is None:
            return dict(meta)
        last = commit_number(replace(self._manifest, meta=self.meta))
        return {**meta, COMMITS: last + add}

    @property
    def counters(self) -> Counters:
        with self._lock:
            moved = self._transfers.counters + self._earlier_logs
            return moved if self.log is None else moved + self.log.counters

    def checksum(self, key: str, chunk: int) -> int:
        """Return the CRC-32C of a chunk of the committed generation."""
        extent = self.layout.find(key, chunk)
        if extent.scratch:
            raise StoreError(f"{chunk_name(extent)} is scratch; it has no checksum")
        return int(self._verification.checksums[extent.index])

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
        return self._transfers.submit("read", disk_slot, extent, buffer, crc=crc, attempt=attempt)

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
        return self._transfers.submit("write", disk_slot, extent, buffer, crc=crc, attempt=attempt)

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
                nothing = np.empty(0, dtype=np.uint8)
                with self._lock:
                    self._tracker.mark_written(
                        Ticket("write", target, disk_slot, nothing, crc, attempt, -1)
                    )
            finally:
                self._transfers.release("write", disk_slot, target)
        finally:
            source._transfers.release("read", from_disk_slot, extent)
        return True

    def wait(self, ticket: Ticket, timeout_s: float | None = None) -> None:
        """Wait until a read or write is complete, and verify the data of a read if a check is due.

        After a DeadlineError or an interrupt the I/O is still in flight; wait again, discard or
        close.
        """
        if self._transfers.wait(ticket, timeout_s):
            with self._lock:
                current = self._volume.disk_slot_of(self.generation), FIXED_DISK_SLOT
                if ticket.disk_slot in current:
                    self._verification.mark_verified(ticket.extent.index)

    def wait_all(self, tickets: Iterable[Ticket]) -> None:
        """Wait for all tickets, then raise the first error."""
        wait_for_all(self.wait, tickets)

    def discard(self) -> None:
        """Discard everything written since the last commit; the committed generation is unchanged.

        This waits for all outstanding I/O, including reads, because the buffers will be reused. If
        the I/O does not complete in time, or if chunks were written in place, so that no other copy
        exists, the store is marked as failed and cannot be used until it is opened again.
        """
        with self._lock:
            self.health.check()
            stale = self._tracker.claim_all()
        late = self._transfers.drain(stale)
        if self.log is not None:
            try:
                self.log.discard()
            except DeadlineError as error:
                late = late or error
        with self._lock:
            if late is not None:
                self.health.fail(f"I/O did not come back ({late})")
            elif self._tracker.touched and self.health.status is Status.DIRTY:
                self.health.fail("a step that was written in place did not finish")
            self._tracker.begin_generation()

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
            self.health.check()
            new_meta = self._manifest.meta if meta is None else plain_json(meta)
            self._tracker.check_no_writes()
            in_place = self._volume.disk_slots == 1 and self.health.status is not Status.CREATING
            if advance and not in_place:
                self._tracker.check_complete(self.generation + 1)
            elif advance:
                self._tracker.keep_unwritten(self._verification.checksums)
            elif self.health.status is Status.CREATING:
                raise StoreError("commit of meta alone, but the store is still being created")
            else:
                self._tracker.check_untouched(self.generation + 1)
                if self.log is not None and self.log.live:
                    raise StoreError("commit of meta alone, but steps are logged after it")
            generation = self.generation + 1 if advance else self.generation
            checksums = self._tracker.checksums.copy() if advance else self._verification.checksums
            if self._volume.disk_slots == 2 or clean or self.health.status is Status.CREATING:
                data_changed = advance or self.health.status is Status.DIRTY
                folds = self.log is not None and self.log.live
                self._commit_durably(
                    generation, new_meta, checksums if data_changed else None, folds=folds
                )
            else:
                self._manifest = replace(self._manifest, generation=generation, meta=new_meta)
            self._verification.checksums = checksums
            if advance:
                # A chunk that a commit in place did not write still has to be verified.
                self._verification.mark_verified(self._tracker.written_chunks())
                self._tracker.begin_generation()
                if self.log is not None:
                    self.log.folded(self.generation)

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
                self._volume.wait(number, self._transfers.timeout_s)
                digest = checksum(part, digest)
            expected = int(self._verification.checksums[extent.index])
            compare_checksums(self._volume, disk_slot, extent, digest, expected=expected)
        except DeadlineError as error:  # The kernel may still write to the buffer.
            raise self._volume.io_error("read", disk_slot, extent, error) from error
        except StorageIOError as error:
            problem = str(self._volume.io_error("read", disk_slot, extent, error))
        except StoreError as error:
            problem = str(error)
        finally:
            self._transfers.release("read", disk_slot, extent)
        return self._volume.path(disk_slot, extent), problem

    def _readable(self, extent: Extent, *, uncommitted: bool | None) -> tuple[int, int | None]:
        """Return the slot to read, and the expected checksum or None if no check is due."""
        self.health.check(reading=True)
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
        if not uncommitted and not self._verification.committed:
            raise StoreError(
                f"{chunk_name(extent)}: nothing is committed yet; commit first or read the "
                "uncommitted one"
            )
        if extent.fixed:
            return FIXED_DISK_SLOT, self._verification.due(extent)
        if uncommitted:
            crc = int(self._tracker.checksums[extent.index]) if self._verification.always else None
            return self._volume.disk_slot_of(self.generation + 1), crc
        if written and self._volume.disk_slots == 1:
            raise StoreError(
                f"{chunk_name(extent)} was overwritten in place by the step in flight;"
                " read the uncommitted one"
            )
        return self._volume.disk_slot_of(self.generation), self._verification.due(extent)

    def _writable(self, extent: Extent) -> int:
        self.health.check()
        if extent.scratch:
            return SCRATCH_DISK_SLOT
        if extent.fixed:
            if self.health.status is not Status.CREATING:
                raise StoreError(
                    f"{chunk_name(extent)} is fixed: it is written while the store is made and not"
                    " after its first commit"
                )
            return FIXED_DISK_SLOT
        if self._volume.disk_slots == 1 and self.health.status is Status.CLEAN:
            try:
                dirty = replace(self._manifest, clean=False)
                # This is durable before the first write in place.
                write_manifest(self.dirs[0], dirty)
                self._manifest = dirty
            except BaseException as error:
                self.health.fail(f"it could not be marked as written in place ({error})")
                raise
            self.health.status = Status.DIRTY
        return self._volume.disk_slot_of(self.generation + 1)

    def _commit_durably(
        self,
        generation: int,
        meta: dict[str, Any],
        checksums: Checksums | None,
        *,
        folds: bool,
    ) -> None:
        """Write data, then checksums, then the manifest; make each durable before writing the next.

        With `folds`, the state is that of the last logged step, which all ranks have committed in
        their logs, so each rank commits it without the others. If `checksums` is None, the data and
        the checksums on disk are already correct. After a failed sync it is unknown which data
        reached the drive, and after a failed rename or directory sync it is unknown which manifest
        is current. The store is then marked as failed, and only reopening it shows which generation
        is committed.
        """
        primary, crc = self.dirs[0], self._manifest.sums_crc32c
        try:
            if self.health.status is Status.CREATING:
                self._volume.sync(FIXED_DISK_SLOT)
            if checksums is not None:
                disk_slot = self._volume.disk_slot_of(generation)
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
            self.health.fail(f"the commit of generation {generation} failed ({error})")
            raise
        self._manifest, self.health.status = manifest, Status.CLEAN
        self._verification.committed = True
