"""From the directories that the caller names to a store that is whole: who belongs to whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lohan.errors import StoreError
from lohan.store.extents import Layout, layout_from_json
from lohan.store.files import MANIFEST, SUMS, store_dirs
from lohan.store.lock import lock_holder
from lohan.store.manifest import (
    DURABILITIES,
    Identity,
    Manifest,
    Sums,
    read_identity,
    read_manifest,
    read_sums,
    write_identity,
)


@dataclass(frozen=True)
class Committed:
    """What the small files of a whole store say."""

    layout: Layout
    manifest: Manifest
    sums: Sums


def slot_count(durability: str) -> int:
    if durability not in DURABILITIES:
        raise StoreError(f'durability {durability!r} is unknown; use "step" or "checkpoint"')
    return 2 if durability == "step" else 1


def write_identities(
    paths: Sequence[Path], final_dirs: Sequence[Path], *, uuid: str, layout: Layout
) -> None:
    """The primary first: as soon as it is there, `lohan store rm` finds the rest."""
    dirs = tuple(map(str, final_dirs))
    for index, path in enumerate(paths):
        described = tuple(layout.to_json()) if index == 0 else ()
        write_identity(path, Identity(uuid, index, len(paths), dirs, described))


def locate(dirs: str | Path | Sequence[str | Path]) -> tuple[tuple[Path, ...], Identity]:
    """All directories of a store, primary first, and the primary's identity.

    The primary alone is enough while it lies where it was made: it lists the others. Once it has
    moved, its list may lead to the directories of the store that it was copied from, so the caller
    names them all.
    """
    paths = store_dirs(dirs)
    primary = read_identity(paths[0])
    if primary.index != 0:
        raise StoreError(
            f"{paths[0]} is directory {primary.index + 1} of {primary.count} of store"
            f" {primary.uuid}; name its first directory, created as {primary.dirs[0]}"
        )
    if len(paths) == 1 and primary.count > 1:
        check_unmoved(paths[0], primary)
        paths = (paths[0], *map(Path, primary.dirs[1:]))
    if len(paths) != primary.count:
        raise StoreError(
            f"store {primary.uuid} in {paths[0]} has {primary.count} directories,"
            f" {len(paths)} given; name the first one or all of them"
        )
    return paths, primary


def check_unmoved(directory: Path, primary: Identity) -> None:
    """The primary lies where it was made, so the list in it is of its own store."""
    made = Path(primary.dirs[0])
    if directory == made or (made.exists() and made.samefile(directory)):
        return
    raise StoreError(
        f"{directory} is the first of {primary.count} directories of store {primary.uuid} and was"
        f" made as {made}: it was moved or copied, so the others that it lists may be another"
        f" store's; name all {primary.count} directories in their order"
    )


def check_members(paths: Sequence[Path], primary: Identity) -> None:
    """Every directory is the one that the primary expects at its place."""
    for index, path in enumerate(paths):
        member = read_identity(path)
        if member.uuid != primary.uuid:
            raise StoreError(
                f"{path} belongs to store {member.uuid}, but {paths[0]} to {primary.uuid};"
                " name the directories of one store"
            )
        if (member.index, member.count) != (index, primary.count):
            raise StoreError(
                f"{path} is directory {member.index + 1} of {member.count} of store"
                f" {primary.uuid}, given as {index + 1} of {primary.count};"
                " name the directories in their order"
            )


def check_finished(primary: Path) -> None:
    if (primary / MANIFEST).exists():
        return
    holder = lock_holder(primary)
    if holder is not None:
        raise StoreError(
            f"{primary} is being created by process {holder or 'unknown'}; wait for it to finish"
        )
    raise StoreError(
        f"{primary} holds a store whose creation did not finish; remove it with"
        f" `lohan store rm {primary}` and start again"
    )


def read_committed(paths: Sequence[Path], primary: Identity) -> Committed:
    """The committed generation's layout, manifest and checksums, checked against each other."""
    check_finished(paths[0])
    layout = layout_from_json(list(primary.layout), directories=primary.count)
    manifest = read_manifest(paths[0])
    assert manifest is not None
    place = paths[0] / MANIFEST
    for name, stated, expected in (
        ("store", manifest.uuid, primary.uuid),
        ("directory count", manifest.count, primary.count),
        ("layout digest", manifest.layout_sha256, layout.digest()),
    ):
        if stated != expected:
            raise StoreError(
                f"{place}: {name} is {stated}, store.json says {expected};"
                " these files are not of one store"
            )
    if not manifest.clean:
        step = manifest.meta.get("step")
        raise StoreError(
            f"{paths[0]}: the process died in the middle of a step: the store was written in place"
            f" after generation {manifest.generation}"
            + (f" (step {step})" if step is not None else "")
            + " and is not whole; resume from the last snapshot"
        )
    slot = manifest.generation % slot_count(manifest.durability)
    sums = read_sums(paths[0] / SUMS[slot], count=len(layout.state), crc=manifest.sums_crc32c)
    return Committed(layout, manifest, sums)
