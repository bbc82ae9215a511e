"""Snapshots: a copy of the committed state in one directory, itself a store with one slot.

The copy grows under a temporary name and takes its place by rename; the one that it replaces is
set aside first and removed last, so at every instant one whole snapshot is there. Restoring works
in the same way: the store is copied beside its place and swapped in, and a restore that dies is
repeated from its beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from lohan.errors import ChecksumError, StoreError
from lohan.store.admin import remove_pieces
from lohan.store.engine import Engine, aligned_buffer
from lohan.store.files import (
    IDENTITY,
    NoRoomError,
    check_replaceable,
    rename_durably,
    store_dirs,
    told,
)
from lohan.store.lock import StoreLock
from lohan.store.manifest import read_manifest
from lohan.store.store import State, Store
from lohan.store.verify import verify


@told("a snapshot")
def snapshot(store: Store, target: str | Path, *, engine: str = "auto") -> None:
    """Copies the committed generation to `target`, replacing the snapshot that is there."""
    if store.state is not State.CLEAN:
        raise StoreError(
            f"a snapshot of {store.dirs[0]} needs a clean store, this one is"
            f" {store.state.value}; commit(clean=True) first"
        )
    place = Path(target).absolute()
    partial, old = _partial(place), _old(place)
    if place.exists() and not (place / IDENTITY).exists():
        raise StoreError(f"{place} is there and is not a snapshot; choose another name")
    _remove_if_there(partial)
    with Store.create(
        partial,
        store.regions,
        durability="checkpoint",
        engine=engine,
        first_generation=store.generation,
        with_scratch=False,
    ) as copy:
        _copy_state(store, copy)
        copy.commit(store.meta)
    if place.exists():
        _remove_if_there(old)
        rename_durably(place, old)
    rename_durably(partial, place)
    _remove_if_there(old)


def find_snapshot(target: str | Path) -> Path:
    """The whole snapshot at `target`, also if the process died while replacing it."""
    place = Path(target).absolute()
    for path in (place, _old(place)):
        if (path / IDENTITY).exists():
            return path
    raise StoreError(f"there is no snapshot at {place}; check the path")


def is_whole(dirs: str | Path | Sequence[str | Path]) -> bool:
    """Whether a store is in `dirs` that can go on: finished, and not written in place halfway. A
    restored one has its first directory last, so that stands for all."""
    primary = store_dirs(dirs)[0]
    if not (primary / IDENTITY).exists():
        return False
    manifest = read_manifest(primary)
    return manifest is not None and manifest.clean


@told("restoring a snapshot")
def restore(
    target: str | Path,
    dirs: str | Path | Sequence[str | Path],
    *,
    durability: str = "checkpoint",
    weights: Sequence[float] | None = None,
    engine: str | Engine = "auto",
) -> Store:
    """A store in `dirs` with the snapshot's state, generation and meta, verified chunk by chunk.
    A store that is there, whole or not, makes way when the copy is whole; if there is no room for
    both, before, when the snapshot has been read and found whole."""
    places = store_dirs(dirs)
    partial = tuple(map(_partial, places))
    for place in filter(Path.is_dir, places):
        check_replaceable(place)
    remove_pieces(partial)
    with Store.open(find_snapshot(target), verify="always", with_scratch=False) as source:

        def create() -> Store:
            return Store.create(
                partial,
                source.regions,
                durability=durability,
                weights=weights,
                engine=engine,
                first_generation=source.generation,
                final_dirs=places,
            )

        with _created(create, source, places) as copy:
            _copy_state(source, copy)
            copy.commit(source.meta)
    _swap_in(partial, places)
    return Store.open(places, engine=engine)


def _created(create: Callable[[], Store], source: Store, places: Sequence[Path]) -> Store:
    try:
        return create()
    except NoRoomError:
        if not any(map(Path.is_dir, places)):
            raise
    for finding in verify(source):
        raise ChecksumError(finding.problem)
    remove_pieces(places)
    return create()


def _swap_in(partial: Sequence[Path], places: Sequence[Path]) -> None:
    """The first directory comes last, when the others are where it expects them: until then there
    is no store in its place, and the restore is repeated."""
    lock = StoreLock(partial)
    try:
        remove_pieces(places)
        for new, place in reversed(list(zip(partial, places, strict=True))):
            rename_durably(new, place)
    finally:
        lock.release()


def _copy_state(source: Store, copy: Store) -> None:
    """Chunk by chunk through one buffer of the largest chunk's size."""
    buffer = aligned_buffer(source.layout.largest_chunk)
    for extent in source.layout.state:
        piece = buffer[: extent.nbytes]
        source.wait(source.read(extent.key, extent.chunk, piece))
        ticket = copy.write(extent.key, extent.chunk, piece)
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
        remove_pieces([path])


def _partial(place: Path) -> Path:
    return place.with_name(place.name + ".partial")


def _old(place: Path) -> Path:
    return place.with_name(place.name + ".old")
