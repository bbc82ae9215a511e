"""Stores from the outside, for the command line: find, describe, remove."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lohan.errors import StorageIOError, StoreError
from lohan.store.extents import layout_from_json
from lohan.store.files import (
    IDENTITY,
    MANIFEST,
    activation_dirs,
    check_replaceable,
    delete_files,
    only_leftovers,
    remove_empty,
    sync_directory,
    unfinished,
)
from lohan.store.locate import locate, slot_count
from lohan.store.lock import StoreLock, lock_holder
from lohan.store.manifest import read_identity, read_manifest, step_of

_DEPTH = 3


def list_stores(root: str | Path) -> list[Path]:
    """Primary directories of the stores in `root` and a few levels below it."""
    found: list[Path] = []
    level = [Path(root).absolute()]
    for _ in range(_DEPTH + 1):
        below: list[Path] = []
        for directory in level:
            if (directory / IDENTITY).is_file():
                if _is_primary(directory):
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
    slots = slot_count(manifest.durability) if manifest is not None else None
    return {
        "uuid": primary.uuid,
        "state": "unfinished" if manifest is None else "clean" if manifest.clean else "not clean",
        "in_use_by": lock_holder(paths[0]),
        "generation": manifest.generation if manifest is not None else None,
        "durability": manifest.durability if manifest is not None else None,
        "step": step_of(manifest) if manifest is not None else None,
        "meta": manifest.meta if manifest is not None else {},
        "regions": len(layout.regions),
        "chunks": len(layout.state),
        "state_bytes": sum(extent.nbytes for extent in layout.state),
        "dirs": [
            {
                "path": str(path),
                "present": (path / IDENTITY).exists(),
                "slot_bytes": layout.slot_bytes(number),
                "fixed_bytes": layout.fixed_bytes(number),
                "scratch_bytes": layout.scratch_bytes(number),
                "slots": slots,
            }
            for number, path in enumerate(paths)
        ],
    }


def remove(dirs: str | Path | Sequence[str | Path]) -> list[Path]:
    """Removes a store, whole or unfinished: its own files, and its directories if nothing else is
    in them. Directories that are gone already are skipped. Returns those it emptied."""
    paths, primary = locate(dirs)
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
    lock = StoreLock(present)
    try:
        _delete(present, primary=paths[0])
    finally:
        lock.release()
    remove_empty(present)
    remove_unfinished(activation_dirs(present))
    return present


def remove_pieces(dirs: Sequence[Path]) -> None:
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
    lock = StoreLock(present)
    try:
        _delete(present, primary=dirs[0])
    finally:
        lock.release()
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


def _is_primary(directory: Path) -> bool:
    """Also a damaged one: it should be seen, and `describe` says what is wrong with it."""
    try:
        return read_identity(directory).index == 0
    except StoreError:
        return True
