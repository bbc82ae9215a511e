"""The parts of a store, made anew or found: directories, lock, data files, ledger."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from lohan.store import files
from lohan.store.engine import Engine
from lohan.store.extents import Region, plan_layout
from lohan.store.ledger import Ledger, first_ledger
from lohan.store.locate import (
    check_finished,
    check_members,
    locate,
    read_committed,
    slot_count,
    write_identities,
)
from lohan.store.lock import StoreLock
from lohan.store.manifest import plain_json
from lohan.store.volume import FIXED_SLOT, Volume, needed_bytes

Dirs = str | Path | Sequence[str | Path]


@dataclass(frozen=True)
class Parts:
    volume: Volume
    ledger: Ledger
    lock: StoreLock
    created: tuple[Path, ...] = ()  # directories that were not there before


def new_parts(
    dirs: Dirs, regions: Iterable[Region], *, meta: Mapping[str, Any], durability: str,
    weights: Sequence[float] | None, engine: str | Engine, first_generation: int,
    with_scratch: bool,
) -> Parts:  # fmt: skip
    """Locked directories with room for a store, and nothing in them yet."""
    paths, slots = files.store_dirs(dirs), slot_count(durability)
    layout = plan_layout(regions, directories=len(paths), weights=weights)
    first_meta = plain_json(meta)
    for path in paths:
        files.check_vacant(path)
    needed = needed_bytes(paths, layout, slots=slots, with_scratch=with_scratch)
    files.check_free_space(needed, slots=slots)
    volume = Volume(paths, layout, slots=slots, engine=engine)
    ledger = first_ledger(
        volume, uuid=str(uuid4()), durability=durability, generation=first_generation - 1,
        meta=first_meta, sums=np.zeros(len(layout.state), dtype=np.uint32),
    )  # fmt: skip
    created: list[Path] = []
    try:
        created = files.make_directories(paths)
        lock = StoreLock(paths, vacant=True)
    except BaseException:
        volume.close()
        files.remove_empty(created)
        raise
    return Parts(volume, ledger, lock, tuple(created))


def write_files(
    parts: Parts, *, with_scratch: bool, final_dirs: Sequence[Path] | None = None
) -> None:
    """Identities and empty data files of a new store."""
    volume = parts.volume
    write_identities(
        volume.dirs, final_dirs or volume.dirs, uuid=parts.ledger.manifest.uuid,
        layout=volume.layout,
    )  # fmt: skip
    volume.create_files(with_scratch=with_scratch)
    for slot in (*range(volume.slots), FIXED_SLOT):  # size and place of files, also of the slot
        volume.sync(slot)  # that the first commit does not write
    for path in volume.dirs:
        files.sync_directory(path)


def found_parts(dirs: Dirs, *, engine: str | Engine, with_scratch: bool) -> Parts:
    """A whole store, locked. The first directory finds the others."""
    paths, primary = locate(dirs)
    check_finished(paths[0])
    check_members(paths, primary)
    lock = StoreLock(paths)
    volume: Volume | None = None
    try:
        committed = read_committed(paths, primary)
        slots = slot_count(committed.manifest.durability)
        volume = Volume(paths, committed.layout, slots=slots, engine=engine)
        committed_slot = committed.manifest.generation % slots
        volume.open_files(committed=committed_slot, with_scratch=with_scratch)
    except BaseException:
        if volume is not None:
            volume.close()
        lock.release()
        raise
    return Parts(volume, Ledger(volume, committed.manifest, committed.sums), lock)
