"""Operations on whole stores: list, describe, remove, verify, snapshot, restore and rewind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lohan.errors import ChecksumError, StorageIOError, StoreError
from lohan.store.extents import Extent, layout_from_json
from lohan.store.files import (
    IDENTITY,
    MANIFEST,
    NoRoomError,
    StoreLock,
    activation_dirs,
    check_replaceable,
    delete_files,
    lock_holder,
    only_leftovers,
    remove_empty,
    rename_durably,
    storage_errors,
    store_dirs,
    sync_directory,
    unfinished,
)
from lohan.store.io_engine import IOEngine, aligned_buffer
from lohan.store.log import read_latest
from lohan.store.manifest import (
    Identity,
    disk_slot_count,
    locate,
    read_identity,
    read_manifest,
    step_of,
)
from lohan.store.store import Status, Store
from lohan.util.units import counted

_DEPTH = 3


def list_stores(root: str | Path) -> list[Path]:
    """Return the primary directories of the stores in `root` and up to `_DEPTH` levels below it.

    Directories inside a store are not searched, and symbolic links to directories are not followed.
    """
    stores: list[Path] = []
    level = [Path(root).absolute()]
    for _ in range(_DEPTH + 1):
        below: list[Path] = []
        for directory in level:
            if (directory / IDENTITY).is_file():
                # A store whose identity is damaged (None) is listed as well, so that the user can
                # see it.
                if _index_of(directory) in (0, None):
                    stores.append(directory)
                continue
            try:
                below += [p for p in directory.iterdir() if p.is_dir() and not p.is_symlink()]
            except OSError:
                continue
        level = below
    return sorted(stores)


def describe(dirs: str | Path | Sequence[str | Path]) -> dict[str, Any]:
    """Return what the identity and the manifest record about a store.

    This takes no lock, so a store that is in use can be described too.
    """
    paths, primary = locate(dirs)
    manifest = read_latest(paths[0])
    layout = layout_from_json(list(primary.layout), directories=primary.count)
    disk_slots = disk_slot_count(manifest.durability) if manifest is not None else None
    return {
        "uuid": primary.uuid,
        "state": "unfinished" if manifest is None else "clean" if manifest.clean else "not clean",
        "in_use_by": lock_holder(paths[0]),
        "generation": manifest.generation if manifest is not None else None,
        "durability": manifest.durability if manifest is not None else None,
        "step": step_of(manifest) if manifest is not None else None,
        "meta": manifest.meta if manifest is not None else {},
        "regions": len(layout.regions),
        "chunks": len(layout.durable),
        "state_bytes": sum(extent.nbytes for extent in layout.durable),
        "dirs": [
            {
                "path": str(path),
                "present": (path / IDENTITY).exists(),
                "slot_bytes": layout.disk_slot_bytes(number),
                "fixed_bytes": layout.fixed_bytes(number),
                "scratch_bytes": layout.scratch_bytes(number),
                "slots": disk_slots,
            }
            for number, path in enumerate(paths)
        ],
    }


def remove(dirs: str | Path | Sequence[str | Path]) -> list[Path]:
    """Remove a committed or unfinished store and return the directories that held its files.

    Only files of the store are deleted, and a directory is removed only if that leaves it empty.
    Directories of the store that do not exist are skipped. Unfinished activation stores next to the
    removed directories are removed as well.
    """
    paths, primary = locate(dirs)
    _check_no_copy(paths, primary)
    present: list[Path] = []
    for path in paths:
        if only_leftovers(path):
            present.append(path)
        elif (path / IDENTITY).exists():
            member = read_identity(path)
            if member.uuid != primary.uuid:
                raise StoreError(
                    f"{path} belongs to store {member.uuid}, not to {primary.uuid} of {paths[0]};"
                    " nothing was removed; name the directories of one store"
                )
            present.append(path)
    with StoreLock(present):
        _delete(present, primary=paths[0])
    remove_empty(present)
    remove_unfinished(activation_dirs(present))
    return present


def _check_no_copy(paths: Sequence[Path], primary: Identity) -> None:
    """Raise StoreError if the first directory is a copy and another one belongs to its original.

    The first directory is a copy if the location recorded in its identity is a different directory
    that holds a store with the same uuid. The other directories that it lists then belong to the
    original.
    """
    if not primary.dirs or not (original := Path(primary.dirs[0]) / IDENTITY).is_file():
        return
    if original.parent.samefile(paths[0]) or read_identity(original.parent).uuid != primary.uuid:
        return
    others = [Path(path) for path in primary.dirs[1:]]
    for path, expected in zip(paths[1:], others, strict=True):
        if path.exists() and expected.exists() and path.samefile(expected):
            raise StoreError(
                f"{paths[0]} is a copy of {original.parent}, and {path} belongs to that store; "
                "nothing was removed; remove the copied folders by hand"
            )


def remove_partial(dirs: Sequence[Path]) -> None:
    """Delete the store files in `dirs`, even if they come from different stores.

    An interrupted removal or swap leaves files of two stores in the directories. If a directory
    holds other files, or its identity has a different index than its position in `dirs`, StoreError
    is raised and nothing is removed.
    """
    present = [path for path in dirs if path.is_dir()]
    for path in present:
        check_replaceable(path)
        number = dirs.index(path)
        if (path / IDENTITY).exists() and (index := _index_of(path)) not in (number, None):
            raise StoreError(
                f"{path} is directory {index + 1} of its store, given as {number + 1} of"
                f" {len(dirs)}; nothing was removed; name the directories in their order"
            )
    with StoreLock(present):
        _delete(present, primary=dirs[0])
    remove_empty(present)
    for parent in {path.parent for path in present}:
        sync_directory(parent)


def remove_unfinished(dirs: Sequence[Path]) -> None:
    """Remove the stores in `dirs` that were never committed and that no process has open.

    Files that do not belong to a store are kept.
    """
    for path in filter(unfinished, dirs):
        try:
            lock = StoreLock([path])
        except StoreError:
            continue
        try:
            delete_files(path)
        finally:
            lock.release()
        remove_empty([path])


def _delete(present: Sequence[Path], *, primary: Path) -> None:
    """Delete the files of a store in a crash-safe order.

    The manifest is deleted first: without it, the remaining files are an unfinished store. The
    other files of the primary directory are deleted last, because the primary lists the other
    directories.
    """
    try:
        if primary in present:
            (primary / MANIFEST).unlink(missing_ok=True)
            sync_directory(primary)
        for path in reversed(present):
            delete_files(path)
    except OSError as error:
        raise StorageIOError(
            f"{error.filename or primary}: cannot be removed: {error.strerror or error}; check the"
            " drive and your permissions, then repeat the removal"
        ) from error


def _index_of(directory: Path) -> int | None:
    """Return the index of a directory in its store, or None if its identity is damaged."""
    try:
        return read_identity(directory).index
    except StoreError:
        return None


# -- Verification: read a whole store through one small buffer and compare checksums ---------------


READ_BYTES = 2**24  # The largest number of bytes that `verify` reads at once.


@dataclass(frozen=True)
class Finding:
    """A chunk of the committed generation whose content could not be verified."""

    key: str
    chunk: int
    path: Path
    offset: int
    nbytes: int
    problem: str


def verify(store: Store, *, progress: Callable[[int, int], None] | None = None) -> list[Finding]:
    """Compare every chunk of the committed generation with its checksum and return the mismatches.

    Chunks that cannot be read are returned as well. `progress` is called after each chunk with the
    number of bytes verified so far and the total.
    """
    findings: list[Finding] = []
    total, done = sum(extent.nbytes for extent in store.layout.durable), 0
    buffer = aligned_buffer(min(READ_BYTES, store.layout.largest_chunk))
    for extent in store.layout.durable:
        file, problem = store.check(extent, buffer)
        if problem is not None:
            findings.append(
                Finding(extent.key, extent.chunk, file, extent.offset, extent.nbytes, problem)
            )
        done += extent.nbytes
        if progress is not None:
            progress(done, total)
    return findings


# -- Snapshots: a copy of the committed state in one directory, itself a store with one slot -------
#
# The copy is written under a temporary name and then renamed to its final name. A snapshot that it
# replaces is renamed first and deleted last, so that one complete snapshot exists at any time.
# Restoring works in the same way: the store is copied to sibling directories, which then replace
# the original ones. An interrupted restore is repeated from the beginning.


@storage_errors("a snapshot")
def snapshot(
    store: Store, target: str | Path, *, engine: str = "auto", with_fixed: bool = True
) -> int:
    """Copy the committed generation to `target` and return the number of bytes shared by reflink.

    A snapshot that exists at `target` is replaced. If the file system supports reflinks, chunks
    share their blocks with the store until either copy is overwritten, and no data is read or
    written. Hard links cannot be used, because stores are written in place.

    With `with_fixed=False` the fixed regions are left out. Such a snapshot cannot be restored on
    its own, but `rewind` can bring this store back to it.
    """
    if store.health.status is not Status.CLEAN:
        raise StoreError(
            f"a snapshot of {store.dirs[0]} needs a clean store, this one is"
            f" {store.health.status.value}; commit(clean=True) first"
        )
    if store.log is not None and store.log.live:
        raise StoreError(
            f"a snapshot of {store.dirs[0]} would lack {counted(len(store.log.entries), 'step')} "
            "that only the log of gradients contains; call session.commit() first"
        )
    folder = Path(target).absolute()
    partial, old = _partial(folder), _old(folder)
    if folder.exists() and not (folder / IDENTITY).exists():
        raise StoreError(f"{folder} is there and is not a snapshot; choose another name")
    for path in store.dirs:
        if path in (folder, partial, old) or (folder.exists() and folder.samefile(path)):
            raise StoreError(f"{folder} is the store itself; choose another place for snapshots")
    _remove_if_present(partial)
    with Store.create(
        partial,
        [region for region in store.layout.regions if with_fixed or not region.fixed],
        durability="checkpoint",
        engine=engine,
        first_generation=store.generation,
        with_scratch=False,
    ) as copy:
        extents = [store.layout.find(e.key, e.chunk) for e in copy.layout.durable]
        shared = {extent for extent in extents if copy.share(store, extent)}
        _copy_state(store, copy, [extent for extent in extents if extent not in shared])
        copy.commit(store.meta)
    if folder.exists():
        _remove_if_present(old)
        rename_durably(folder, old)
    rename_durably(partial, folder)
    _remove_if_present(old)
    return sum(extent.nbytes for extent in shared)


def find_snapshot(target: str | Path) -> Path:
    """Return the directory of the complete snapshot at `target`.

    If a process died while it replaced the snapshot, this is the directory of the previous
    snapshot.
    """
    folder = Path(target).absolute()
    for path in (folder, _old(folder)):
        if (path / IDENTITY).exists():
            return path
    raise StoreError(f"there is no snapshot at {folder}; check the path")


def snapshot_generation(target: str | Path) -> int | None:
    """Return the generation of the snapshot at `target`, or None if it cannot be read."""
    try:
        manifest = read_manifest(find_snapshot(target))
    except StoreError:
        return None
    return None if manifest is None else manifest.generation


@storage_errors("restoring a snapshot")
def restore(
    target: str | Path,
    dirs: str | Path | Sequence[str | Path],
    *,
    durability: str = "checkpoint",
    weights: Sequence[float] | None = None,
    engine: str | IOEngine = "auto",
) -> Store:
    """Create a store in `dirs` with the state, generation and meta of a snapshot, and open it.

    Every chunk is verified while it is copied. A store that exists in `dirs`, complete or not, is
    removed after the copy is complete. If there is not enough space for both, the existing store is
    removed before the copy, after every chunk of the snapshot has been verified.
    """
    paths = store_dirs(dirs)
    partial = tuple(map(_partial, paths))
    for path in filter(Path.is_dir, paths):
        check_replaceable(path)
    remove_partial(partial)
    with Store.open(find_snapshot(target), verify="always", with_scratch=False) as source:

        def create() -> Store:
            return Store.create(
                partial,
                source.layout.regions,
                durability=durability,
                weights=weights,
                engine=engine,
                first_generation=source.generation,
                final_dirs=paths,
            )

        try:
            copy = create()
        except NoRoomError:
            if not any(map(Path.is_dir, paths)):
                raise
            for finding in verify(source):
                raise ChecksumError(finding.problem) from None
            remove_partial(paths)
            copy = create()
        with copy:
            _copy_state(source, copy, source.layout.durable)
            copy.commit(source.meta)
    # Rename the first directory last, when the others are where it expects them. Until then there
    # is no store at its location, and an interrupted restore is repeated.
    with StoreLock(partial):
        remove_partial(paths)
        for new, path in reversed(list(zip(partial, paths, strict=True))):
            rename_durably(new, path)
    return Store.open(paths, engine=engine)


@storage_errors("going back to a snapshot")
def rewind(store: Store, target: str | Path, *, meta: Mapping[str, Any] | None = None) -> None:
    """Commit the state of a snapshot of this store as the store's next generation.

    The committed meta is that of the snapshot, updated with `meta`. Each chunk is verified. The
    committed generation of the store does not change before the commit.
    """
    with Store.open(find_snapshot(target), verify="always", with_scratch=False) as source:
        regions = {(r.key, r.chunks) for r in store.layout.regions if not (r.fixed or r.scratch)}
        if regions != {
            (r.key, r.chunks) for r in source.layout.regions if not (r.fixed or r.scratch)
        }:
            raise StoreError(
                f"{target} is a snapshot of another store than {store.dirs[0]}: their regions "
                "differ; name a checkpoint of this training"
            )
        changing = [extent for extent in source.layout.durable if not extent.fixed]
        _copy_state(source, store, changing)
        store.commit({**source.meta, **(meta or {})})


def _copy_state(source: Store, copy: Store, extents: Sequence[Extent]) -> None:
    """Copy chunks one at a time through a single buffer, and verify the checksum of each."""
    buffer = aligned_buffer(source.layout.largest_chunk)
    for extent in extents:
        part = buffer[: extent.nbytes]
        source.wait(source.read(extent.key, extent.chunk, part))
        ticket = copy.write(extent.key, extent.chunk, part)
        copy.wait(ticket)
        expected = source.checksum(extent.key, extent.chunk)
        if ticket.crc != expected:
            raise ChecksumError(
                f"region {extent.key!r} chunk {extent.chunk} of {source.dirs[0]}: CRC-32C is"
                f" {ticket.crc:#010x}, {expected:#010x} expected; check the drive, then restore"
                " an older snapshot or start the run again"
            )


def _remove_if_present(path: Path) -> None:
    if path.exists():
        remove_partial([path])


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.lohan-partial")


def _old(path: Path) -> Path:
    return path.with_name(f".{path.name}.lohan-old")
