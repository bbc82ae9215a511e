"""Whole stores: find, describe, remove, verify, snapshot, restore."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from lohan.store.manifest import (
    Identity,
    disk_slot_count,
    locate,
    read_identity,
    read_manifest,
    step_of,
)
from lohan.store.store import Status, Store

_DEPTH = 3


def list_stores(root: str | Path) -> list[Path]:
    """Primary directories of the stores in `root` and a few levels below it."""
    found: list[Path] = []
    level = [Path(root).absolute()]
    for _ in range(_DEPTH + 1):
        below: list[Path] = []
        for directory in level:
            if (directory / IDENTITY).is_file():
                if _index_of(directory) in (0, None):  # a damaged one should be seen too
                    found.append(directory)
                continue
            try:
                below += [p for p in directory.iterdir() if p.is_dir() and not p.is_symlink()]
            except OSError:
                continue
        level = below
    return sorted(found)


def describe(dirs: str | Path | Sequence[str | Path]) -> dict[str, Any]:
    """What the small files say; takes no lock, so also of a store in use."""
    paths, primary = locate(dirs)
    manifest = read_manifest(paths[0])
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
    """Removes a store, whole or unfinished: its own files, and its directories if nothing else is
    in them. Directories that are gone already are skipped. Returns those it emptied."""
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
    """Other directories belong to the original of a copied first one, as long as that is there."""
    if not primary.dirs or not (original := Path(primary.dirs[0]) / IDENTITY).is_file():
        return
    if original.parent.samefile(paths[0]) or read_identity(original.parent).uuid != primary.uuid:
        return
    theirs = [Path(path) for path in primary.dirs[1:]]
    for path, own in zip(paths[1:], theirs, strict=True):
        if path.exists() and own.exists() and path.samefile(own):
            raise StoreError(
                f"{paths[0]} is a copy of {original.parent}, and {path} belongs to that store; "
                "nothing was removed; remove the copied folders by hand"
            )


def remove_partial(dirs: Sequence[Path]) -> None:
    """Empties the directories of one store, whichever stores the files in them are of: a removal or
    a swap that died leaves some of one and some of another. A directory with another number in
    its store than here is not the caller's, and nothing is removed."""
    present = [path for path in dirs if path.is_dir()]
    for path in present:
        check_replaceable(path)
        number = dirs.index(path)
        if (path / IDENTITY).exists() and (found := _index_of(path)) not in (number, None):
            raise StoreError(
                f"{path} is directory {found + 1} of its store, given as {number + 1} of"
                f" {len(dirs)}; nothing was removed; name the directories in their order"
            )
    with StoreLock(present):
        _delete(present, primary=dirs[0])
    remove_empty(present)
    for parent in {path.parent for path in present}:
        sync_directory(parent)


def remove_unfinished(dirs: Sequence[Path]) -> None:
    """Takes away what dead processes have left of stores that were never committed. One that a
    process has open stays, and so does everything that is not of a store."""
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
    """The manifest first: without it what is left is an unfinished store. The rest of the primary
    last: until then it leads to the others."""
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
    """None: its identity is damaged."""
    try:
        return read_identity(directory).index
    except StoreError:
        return None


# -- Reads a whole store through one small buffer, and says what is wrong with it ------------------


READ_BYTES = 2**24  # at a time


@dataclass(frozen=True)
class Finding:
    """A chunk of the committed generation that could not be confirmed."""

    key: str
    chunk: int
    path: Path
    offset: int
    nbytes: int
    problem: str


def verify(store: Store, *, progress: Callable[[int, int], None] | None = None) -> list[Finding]:
    """Every chunk of the committed generation against its checksum."""
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
# The copy grows under a temporary name and takes its place by rename; the one that it replaces is
# set aside first and removed last, so at every instant one whole snapshot is there. Restoring
# works in the same way: the store is copied to a sibling directory and swapped in, and a restore
# that dies is repeated from its beginning.


@storage_errors("a snapshot")
def snapshot(
    store: Store, target: str | Path, *, engine: str = "auto", with_fixed: bool = True
) -> int:
    """Copies the committed generation to `target`, replacing the snapshot that is there. Without
    what is fixed it is no store to restore, but `rewind` takes this one back to it. Where the file
    system can, nothing is read or written: it shares so many bytes with the store, until that is
    written over. A hard link would not do: stores are written in place."""
    if store.status is not Status.CLEAN:
        raise StoreError(
            f"a snapshot of {store.dirs[0]} needs a clean store, this one is"
            f" {store.status.value}; commit(clean=True) first"
        )
    made = Path(target).absolute()
    partial, old = _partial(made), _old(made)
    if made.exists() and not (made / IDENTITY).exists():
        raise StoreError(f"{made} is there and is not a snapshot; choose another name")
    for path in store.dirs:
        if path in (made, partial, old) or (made.exists() and made.samefile(path)):
            raise StoreError(f"{made} is the store itself; choose another place for snapshots")
    _remove_if_there(partial)
    with Store.create(
        partial, [region for region in store.regions if with_fixed or not region.fixed],
        durability="checkpoint", engine=engine, first_generation=store.generation,
        with_scratch=False,
    ) as copy:  # fmt: skip
        extents = [store.layout.find(e.key, e.chunk) for e in copy.layout.durable]
        shared = {extent for extent in extents if copy.share(store, extent)}
        _copy_state(store, copy, [extent for extent in extents if extent not in shared])
        copy.commit(store.meta)
    if made.exists():
        _remove_if_there(old)
        rename_durably(made, old)
    rename_durably(partial, made)
    _remove_if_there(old)
    return sum(extent.nbytes for extent in shared)


def find_snapshot(target: str | Path) -> Path:
    """The whole snapshot at `target`, also if the process died while replacing it."""
    made = Path(target).absolute()
    for path in (made, _old(made), made.with_name(made.name + ".old")):
        if (path / IDENTITY).exists():  # the last: as earlier versions called it
            return path
    raise StoreError(f"there is no snapshot at {made}; check the path")


def snapshot_generation(target: str | Path) -> int | None:
    """Of the snapshot at `target`; None: there is none that can be read."""
    try:
        manifest = read_manifest(find_snapshot(target))
    except StoreError:
        return None
    return None if manifest is None else manifest.generation


def is_whole(dirs: str | Path | Sequence[str | Path]) -> bool:
    """Whether a store is in `dirs` that can go on: finished, and not written in place halfway. A
    restored one has its first directory last, so that stands for all."""
    primary = store_dirs(dirs)[0]
    if not (primary / IDENTITY).exists():
        return False
    manifest = read_manifest(primary)
    return manifest is not None and manifest.clean


@storage_errors("restoring a snapshot")
def restore(
    target: str | Path,
    dirs: str | Path | Sequence[str | Path],
    *,
    durability: str = "checkpoint",
    weights: Sequence[float] | None = None,
    engine: str | IOEngine = "auto",
) -> Store:
    """A store in `dirs` with the snapshot's state, generation and meta, verified chunk by chunk.
    A store that is there, whole or not, makes way when the copy is whole; if there is no room for
    both, before, when the snapshot has been read and found whole."""
    paths = store_dirs(dirs)
    partial = tuple(map(_partial, paths))
    for path in filter(Path.is_dir, paths):
        check_replaceable(path)
    remove_partial(partial)
    with Store.open(find_snapshot(target), verify="always", with_scratch=False) as source:

        def create() -> Store:
            return Store.create(
                partial, source.regions, durability=durability, weights=weights, engine=engine,
                first_generation=source.generation, final_dirs=paths,
            )  # fmt: skip

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
    # The first directory comes last, when the others are where it expects them: until then there
    # is no store in its place, and the restore is repeated.
    with StoreLock(partial):
        remove_partial(paths)
        for new, path in reversed(list(zip(partial, paths, strict=True))):
            rename_durably(new, path)
    return Store.open(paths, engine=engine)


@storage_errors("going back to a snapshot")
def rewind(store: Store, target: str | Path) -> None:
    """The state of a snapshot of this very store becomes its next generation. Each chunk is
    verified; until the commit the store holds what it held."""
    with Store.open(find_snapshot(target), verify="always", with_scratch=False) as source:
        own = {(r.key, r.chunks) for r in store.regions if not (r.fixed or r.scratch)}
        if own != {(r.key, r.chunks) for r in source.regions if not (r.fixed or r.scratch)}:
            raise StoreError(
                f"{target} is a snapshot of another store than {store.dirs[0]}: their regions "
                "differ; name a checkpoint of this training"
            )
        changing = [extent for extent in source.layout.durable if not extent.fixed]
        _copy_state(source, store, changing)
        store.commit(source.meta)


def _copy_state(source: Store, copy: Store, extents: Sequence[Extent]) -> None:
    """Chunk by chunk through one buffer of the largest chunk's size."""
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


def _remove_if_there(path: Path) -> None:
    if path.exists():
        remove_partial([path])


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.lohan-partial")


def _old(path: Path) -> Path:
    return path.with_name(f".{path.name}.lohan-old")
