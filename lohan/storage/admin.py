"""Stores from the outside, for the command line: find, describe, remove."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lohan.errors import StoreError
from lohan.storage.extents import layout_from_json
from lohan.storage.files import IDENTITY, delete_files, only_leftovers, remove_empty
from lohan.storage.locate import locate, slot_count
from lohan.storage.lock import StoreLock, lock_holder
from lohan.storage.manifest import read_identity, read_manifest, step_of

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
        for path in reversed(present):  # the primary last: until then it leads to the rest
            delete_files(path)
    finally:
        lock.release()
    remove_empty(present)
    return present


def _is_primary(directory: Path) -> bool:
    """Also a damaged one: it should be seen, and `describe` says what is wrong with it."""
    try:
        return read_identity(directory).index == 0
    except StoreError:
        return True
