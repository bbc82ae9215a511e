"""A write-ahead log of gradients next to a store's committed generation.

The committed generation is the base. Every entry of the log contains the gradients of one step and
a record of what its updates need besides gradients, so that base and entries together determine
the state after the last entry. `log.bin` in each directory has `segments` segments of equal size,
each with room for one entry; `log.json` in the first directory names the base, the entries, the
checksum of every chunk, and the caller's meta. Replacing `log.json` commits a step. The log is live
as long as its base is the committed generation. Committing another generation is called a fold and
frees all segments. docs/storage-format.md specifies the format.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lohan.errors import ChecksumError, StorageIOError, StoreError
from lohan.store import files
from lohan.store.extents import Extent, Layout, Region, layout_from_json, plan_layout
from lohan.store.files import LOG, LOG_DATA, LOG_PREPARED, rename_durably
from lohan.store.io_engine import Buffer, DeadlineError, Volume
from lohan.store.manifest import (
    PROGRESS,
    Manifest,
    checksum,
    malformed,
    plain_json,
    read_json,
    read_manifest,
    write_json,
)
from lohan.store.transfers import Counters, wait_for_all
from lohan.util.files import WrongType, checked, from_json
from lohan.util.units import PAGE


@dataclass(frozen=True)
class LogEntry:
    """The gradients of one committed step; chunks are numbered as in the log's layout."""

    segment: int
    record: dict[str, Any]  # the caller's record of the step
    nbytes: tuple[int, ...]  # the bytes of every chunk that the step has written
    checksums: tuple[int, ...]  # the CRC-32C of these bytes


@dataclass(frozen=True)
class LogManifest:
    """The content of log.json."""

    uuid: str
    generation: int  # the generation of the base
    segments: int
    layout: tuple[dict[str, Any], ...]  # the layout of one segment, in the form of store.json
    entries: tuple[LogEntry, ...]  # oldest first
    meta: dict[str, Any]  # the meta of the last entry's step


def read_log(directory: Path, *, name: str = LOG) -> LogManifest | None:
    """Return the log manifest in the first directory of a store, or None if there is none."""
    path = directory / name
    if not path.exists():
        return None
    try:
        manifest = from_json(LogManifest, read_json(path))
        _check_manifest(manifest)
    except WrongType as error:
        raise malformed(path, error) from None
    return manifest


def _check_manifest(manifest: LogManifest) -> None:
    checked(manifest.meta.get(PROGRESS, {}), dict[str, Any], f"meta.{PROGRESS}")
    segments = [entry.segment for entry in manifest.entries]
    if len(set(segments)) < len(segments) or not all(0 <= s < manifest.segments for s in segments):
        raise WrongType(f"entries are in segments {segments} of {manifest.segments}")


def _check_entries(manifest: LogManifest, layout: Layout, path: Path) -> None:
    extents = layout.durable
    for number, entry in enumerate(manifest.entries):
        if not len(entry.nbytes) == len(entry.checksums) == len(extents):
            raise malformed(
                path,
                WrongType(f"entry {number} has {len(entry.nbytes)} chunks, wants {len(extents)}"),
            )
        for count, extent in zip(entry.nbytes, extents, strict=True):
            if count % PAGE or not 0 < count <= extent.nbytes:
                problem = f"entry {number} has a chunk of {count} bytes in {extent.nbytes}"
                raise malformed(path, WrongType(problem))


def live_log(directory: Path, *, uuid: str, generation: int) -> LogManifest | None:
    """Return the log manifest if it has entries for this generation, or None.

    Entries for an earlier generation are part of the committed one. A log cannot be ahead of its
    base, because the base is committed first.
    """
    return _if_live(read_log(directory), directory, uuid=uuid, generation=generation)


def _if_live(
    manifest: LogManifest | None, directory: Path, *, uuid: str, generation: int
) -> LogManifest | None:
    if manifest is None:
        return None
    if manifest.uuid != uuid or manifest.generation > generation:
        raise StoreError(
            f"{directory / LOG}: belongs to generation {manifest.generation} of store "
            f"{manifest.uuid}, but the manifest is of generation {generation} of {uuid}; these "
            "files are not of one store"
        )
    return manifest if manifest.entries and manifest.generation == generation else None


def read_latest(directory: Path) -> Manifest | None:
    """Return the manifest of a store, with the meta of the last step in its log, if it has one.

    The log is read before the manifest, so it is never newer than the manifest, even while a run
    replaces both files.
    """
    log, manifest = read_log(directory), read_manifest(directory)
    if manifest is None:
        return None
    live = _if_live(log, directory, uuid=manifest.uuid, generation=manifest.generation)
    return manifest if live is None else replace(manifest, meta=live.meta)


def remove_log(dirs: Iterable[Path]) -> None:
    """Remove the files of a log that is not live, log.json first."""
    for path in dirs:
        (path / LOG).unlink(missing_ok=True)
        (path / LOG_PREPARED).unlink(missing_ok=True)
    for path in dirs:
        (path / LOG_DATA).unlink(missing_ok=True)


@dataclass(frozen=True, eq=False)
class LogTicket:
    """A read or write of the log in flight, which must be waited for once."""

    kind: Literal["read", "write"]
    segment: int
    extent: Extent
    buffer: Buffer
    # For a write, the CRC of the data. For a read, the expected CRC if a check is due, else None.
    crc: int | None
    engine_ticket: int


class GradientLog:
    """The log of an open store. `Store.start_log` and `Store.open` create it.

    The caller orders reads and writes: a chunk of a segment may be read after its write was waited
    for. Any number of threads may use the log.
    """

    def __init__(
        self,
        volume: Volume,
        manifest: LogManifest,
        layout: Layout,
        *,
        timeout_s: float,
        create: bool,
        barrier: Callable[[], None] | None,
    ) -> None:
        self._volume, self._manifest, self.layout = volume, manifest, layout
        self._barrier = barrier
        self._timeout_s, self._lock = timeout_s, threading.Lock()
        self._outstanding: set[LogTicket] = set()
        self.counters = Counters(0, 0)
        # Entries that an earlier process has written, by segment. They are verified when they are
        # read.
        self._unverified = {entry.segment: entry for entry in manifest.entries}
        # The segment that the next step is written to, or -1 if all of them hold entries.
        self.open_segment = -1
        # Bytes and CRC-32C of each chunk in the open segment, by number of the chunk.
        self._written: dict[int, tuple[int, int]] = {}
        self._begin_segment()
        self._files: dict[int, int] = {}
        for number, path in enumerate(volume.dirs):
            size = manifest.segments * layout.disk_slot_bytes(number)
            if size:
                self._files[number] = volume.open_file(path / LOG_DATA, size=size, create=create)

    @classmethod
    def create(
        cls,
        volume: Volume,
        *,
        uuid: str,
        generation: int,
        regions: Sequence[tuple[str, tuple[int, ...]]],
        segments: int,
        timeout_s: float,
        barrier: Callable[[], None] | None = None,
    ) -> GradientLog:
        """Preallocate a log without entries for `segments` steps after this generation.

        Any other log is replaced, and must not be live.
        """
        # The log is spread over the directories like the chunks of the store.
        sizes = [max(1, volume.layout.disk_slot_bytes(n)) for n in range(len(volume.dirs))]
        layout = plan_layout(
            [Region(key, chunks) for key, chunks in regions],
            directories=len(volume.dirs),
            weights=sizes,
        )
        manifest = LogManifest(uuid, generation, segments, tuple(layout.to_json()), (), {})
        remove_log(volume.dirs)
        needed = {
            path: segments * layout.disk_slot_bytes(number)
            for number, path in enumerate(volume.dirs)
        }
        files.check_free_space(needed)
        try:
            log = cls(volume, manifest, layout, timeout_s=timeout_s, create=True, barrier=barrier)
            log._sync()  # Later appends cannot fail for lack of space.
            for path in volume.dirs:
                files.sync_directory(path)
        except BaseException:
            remove_log(volume.dirs)
            raise
        return log

    @classmethod
    def open(
        cls,
        volume: Volume,
        manifest: LogManifest,
        *,
        timeout_s: float,
        barrier: Callable[[], None] | None = None,
    ) -> GradientLog:
        """Open the log of a store that has logged steps, to apply these steps."""
        layout = layout_from_json(list(manifest.layout), directories=len(volume.dirs))
        _check_entries(manifest, layout, volume.dirs[0] / LOG)
        return cls(volume, manifest, layout, timeout_s=timeout_s, create=False, barrier=barrier)

    @property
    def entries(self) -> tuple[LogEntry, ...]:
        """The committed entries since the base, oldest first."""
        return self._manifest.entries

    @property
    def live(self) -> bool:
        return bool(self._manifest.entries)

    @property
    def meta(self) -> dict[str, Any]:
        return plain_json(self._manifest.meta)

    @property
    def segments(self) -> int:
        return self._manifest.segments

    def _begin_segment(self) -> None:
        """Choose an unused segment for the next step."""
        used = {entry.segment for entry in self._manifest.entries}
        free = [number for number in range(self._manifest.segments) if number not in used]
        self.open_segment, self._written = (free[0] if free else -1), {}

    def append(self, key: str, chunk: int, buffer: Buffer) -> LogTicket:
        """Submit a write of the first bytes of a chunk to the open segment.

        The buffer must not change until the ticket has been waited for.
        """
        extent = self.layout.find(key, chunk)
        if self.open_segment < 0:
            raise StoreError(
                f"the log of gradients has {self.segments} segments, and all of them hold steps "
                "that are not folded; fold them first"
            )
        if not 0 < buffer.nbytes <= extent.nbytes or buffer.nbytes % PAGE:
            raise StoreError(
                f"gradients of {key!r} chunk {chunk} have {buffer.nbytes} bytes; the log has room "
                f"for {extent.nbytes}, and wants a multiple of {PAGE}"
            )
        crc = checksum(buffer)
        with self._lock:
            self._written.pop(extent.index, None)
        return self._submit("write", self.open_segment, extent, buffer, crc)

    def read(self, segment: int, key: str, chunk: int, buffer: Buffer) -> LogTicket:
        """Submit a read of the first bytes of a chunk in a segment.

        If an earlier process wrote the segment's entry, the bytes are verified, and the buffer
        must have the size of what was written.
        """
        extent, entry = self.layout.find(key, chunk), self._unverified.get(segment)
        if entry is not None and buffer.nbytes != entry.nbytes[extent.index]:
            raise StoreError(
                f"gradients of {key!r} chunk {chunk} have {entry.nbytes[extent.index]} bytes in "
                f"segment {segment}, the buffer has {buffer.nbytes}"
            )
        crc = None if entry is None else entry.checksums[extent.index]
        return self._submit("read", segment, extent, buffer, crc)

    def _submit(
        self,
        kind: Literal["read", "write"],
        segment: int,
        extent: Extent,
        buffer: Buffer,
        crc: int | None,
    ) -> LogTicket:
        submit = self._volume.read_file if kind == "read" else self._volume.write_file
        try:
            number = submit(self._files[extent.directory], self._at(segment, extent), buffer)
        except StorageIOError as error:
            raise self._io_error(kind, segment, extent, error) from error
        ticket = LogTicket(kind, segment, extent, buffer, crc, number)
        with self._lock:
            self._outstanding.add(ticket)
        return ticket

    def _at(self, segment: int, extent: Extent) -> int:
        return segment * self.layout.disk_slot_bytes(extent.directory) + extent.offset

    def wait(self, ticket: LogTicket) -> None:
        """Wait until a read or write is complete, and verify a read if a check is due."""
        try:
            self._volume.wait(ticket.engine_ticket, self._timeout_s)
        except StorageIOError as error:
            if not isinstance(error, DeadlineError):
                with self._lock:
                    self._outstanding.discard(ticket)
            raise self._io_error(ticket.kind, ticket.segment, ticket.extent, error) from error
        with self._lock:
            self._outstanding.discard(ticket)
            if ticket.kind == "write":
                assert ticket.crc is not None
                self._written[ticket.extent.index] = ticket.buffer.nbytes, ticket.crc
                self.counters += Counters(0, ticket.buffer.nbytes)
            else:
                self.counters += Counters(ticket.buffer.nbytes, 0)
        if ticket.kind == "read" and ticket.crc is not None:
            self._compare(ticket)

    def wait_all(self, tickets: Iterable[LogTicket]) -> None:
        """Wait for all tickets, then raise the first error."""
        wait_for_all(self.wait, tickets)

    def _compare(self, ticket: LogTicket) -> None:
        actual, extent = checksum(ticket.buffer), ticket.extent
        if actual == ticket.crc:
            return
        step = next(
            number
            for number, entry in enumerate(self._manifest.entries)
            if entry.segment == ticket.segment
        )
        raise ChecksumError(
            f"{self._path(extent)}: the gradients of {extent.key!r} chunk {extent.chunk} in logged "
            f"step {step + 1} of {len(self._manifest.entries)}, {ticket.buffer.nbytes} bytes at "
            f"offset {self._at(ticket.segment, extent)}, have the CRC-32C {actual:#010x}, "
            f"{ticket.crc:#010x} expected: the drive gave back other bytes than were written; "
            "check the drive, then restore a snapshot or start the run again"
        )

    def _path(self, extent: Extent) -> Path:
        return self._volume.dirs[extent.directory] / LOG_DATA

    def _io_error(
        self, kind: str, segment: int, extent: Extent, cause: StorageIOError
    ) -> StorageIOError:
        return type(cause)(
            f"{kind} of the gradients of {extent.key!r} chunk {extent.chunk}, at offset "
            f"{self._at(segment, extent)} of {self._path(extent)}, failed: {cause}"
        )

    def commit(self, generation: int, meta: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        """Commit the open segment as the entry of the last step, with the caller's `meta`.

        `generation` is the committed one. If the entries so far belong to an earlier generation,
        the committed one includes them, and they are dropped. The step is durable when this
        returns.
        """
        missing = [e for e in self.layout.durable if e.index not in self._written]
        if missing:
            first = missing[0]
            raise StoreError(
                f"commit of a logged step: the gradients of {first.key!r} chunk {first.chunk} were "
                f"not written ({len(missing)} of {len(self.layout.durable)} chunks are missing)"
            )
        written = [self._written[extent.index] for extent in self.layout.durable]
        entry = LogEntry(
            self.open_segment,
            plain_json(record),
            tuple(count for count, _ in written),
            tuple(crc for _, crc in written),
        )
        entries = self._manifest.entries if self._manifest.generation == generation else ()
        self._sync()
        self._replace(
            replace(
                self._manifest,
                generation=generation,
                entries=(*entries, entry),
                meta=plain_json(meta),
            )
        )
        self._unverified.pop(self.open_segment, None)
        self._begin_segment()

    def commit_meta(self, meta: Mapping[str, Any]) -> None:
        """Commit new meta for a step that has changed no weight, after the last entry."""
        assert self.live
        self._replace(replace(self._manifest, meta=plain_json(meta)))

    def _replace(self, manifest: LogManifest) -> None:
        primary = self._volume.dirs[0]
        if self._barrier is None:
            write_json(primary / LOG, asdict(manifest))
        else:  # This is a two-phase commit; see recovery.py.
            write_json(primary / LOG_PREPARED, asdict(manifest))
            self._barrier()
            rename_durably(primary / LOG_PREPARED, primary / LOG)
        self._manifest = manifest

    def folded(self, generation: int) -> None:
        """Free the segments of all entries, because the committed generation includes their steps.

        log.json is not changed; its generation shows that it is not live. The open segment stays
        the same, because the next step may have begun to write to it.
        """
        self._manifest = replace(self._manifest, generation=generation, entries=(), meta={})
        self._unverified = {}
        if self.open_segment < 0:
            self._begin_segment()

    def discard(self) -> None:
        """Drop what was appended since the last commit, after waiting for all I/O in flight."""
        with self._lock:
            rest = list(self._outstanding)
        for ticket in rest:
            try:
                self._volume.wait(ticket.engine_ticket, self._timeout_s)
            except DeadlineError:
                raise
            except StorageIOError:
                pass
            with self._lock:
                self._outstanding.discard(ticket)
        self._written = {}

    def close(self) -> None:
        """Stop using the files. The caller removes them if the log is not live."""
        for file in self._files.values():
            self._volume.forget_file(file)

    def _sync(self) -> None:
        for number, file in self._files.items():
            self._volume.sync_file(file, self._volume.dirs[number] / LOG_DATA)
