"""Snapshots: a copy of the committed state in one directory, itself a store with one slot.

The copy grows under a temporary name and takes its place by rename; the one that it replaces is
set aside first and removed last, so at every instant one whole snapshot is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lohan.errors import ChecksumError, StoreError
from lohan.storage.admin import remove
from lohan.storage.engine import Engine, aligned_buffer
from lohan.storage.files import IDENTITY, sync_directory
from lohan.storage.store import State, Store


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
        place.replace(old)
    partial.replace(place)
    sync_directory(place.parent)
    _remove_if_there(old)


def find_snapshot(target: str | Path) -> Path:
    """The whole snapshot at `target`, also if the process died while replacing it."""
    place = Path(target).absolute()
    for path in (place, _old(place)):
        if (path / IDENTITY).exists():
            return path
    raise StoreError(f"there is no snapshot at {place}; check the path")


def restore(
    target: str | Path,
    dirs: str | Path | Sequence[str | Path],
    *,
    durability: str = "checkpoint",
    weights: Sequence[float] | None = None,
    engine: str | Engine = "auto",
) -> Store:
    """A store in `dirs` with the snapshot's state, generation and meta, verified chunk by chunk.
    A store that is there, whole or not, makes way."""
    primary = Path(dirs) if isinstance(dirs, (str, Path)) else Path(dirs[0])
    with Store.open(find_snapshot(target), verify="always", with_scratch=False) as source:
        if (primary / IDENTITY).exists():
            remove(primary)
        store = Store.create(
            dirs,
            source.regions,
            durability=durability,
            weights=weights,
            engine=engine,
            first_generation=source.generation,
        )
        try:
            _copy_state(source, store)
            store.commit(source.meta)
        except BaseException:
            store.close()
            raise
    return store


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
    if (path / IDENTITY).exists():
        remove(path)


def _partial(place: Path) -> Path:
    return place.with_name(place.name + ".partial")


def _old(place: Path) -> Path:
    return place.with_name(place.name + ".old")
