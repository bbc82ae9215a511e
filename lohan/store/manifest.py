"""The small files of a store: identity, manifest and checksums.

The identity records which store a directory belongs to, the manifest which generation is committed.
Both are JSON files with a CRC-32C of their own canonical text. docs/storage-format.md specifies the
format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lohan._core import crc32c
from lohan.errors import ChecksumError, StorageIOError, StoreError
from lohan.store.extents import Layout, layout_from_json
from lohan.store.files import (
    CHECKSUM_FILES,
    IDENTITY,
    MANIFEST,
    TEMPORARY,
    lock_holder,
    store_dirs,
)
from lohan.store.io_engine import Buffer
from lohan.util.files import (
    BadJson,
    WrongType,
    checked,
    from_json,
    parse_json,
    usable_path,
    write_atomic,
)
from lohan.util.units import MiB

FORMAT, VERSION = "lohan-store", 2
# Key in the meta of a store that belongs to one of several ranks: the number of its commits.
COMMITS = "commits"
PROGRESS = "progress"  # Key in the meta of a run's store: its progress, including the step.
DURABILITIES = ("step", "checkpoint")
# The largest accepted size of a small file. A layout takes about 25 bytes per chunk, plus the meta.
MAX_BYTES = 256 * MiB
REMEDY = "restore the store from a snapshot or start the run again"
Checksums = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Identity:
    """The content of store.json in one directory. Only the primary directory has a `layout`."""

    uuid: str
    index: int
    count: int
    dirs: tuple[str, ...] = ()
    layout: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json: the committed generation. Replacing the file is the commit."""

    uuid: str
    generation: int
    durability: str
    clean: bool
    count: int
    layout_sha256: str
    sums_crc32c: int
    meta: dict[str, Any]


def checksum(data: Buffer | bytes, seed: int = 0) -> int:
    """Return the CRC-32C of `data`; `seed` is the checksum of the preceding data."""
    return int(crc32c(data, seed))


def plain_json(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `meta` after a round trip through JSON, equal to what a reader will get."""
    try:
        copy = json.loads(json.dumps(dict(meta)))
    except (TypeError, ValueError) as error:
        raise StoreError(f"the store's meta must be plain JSON: {error}") from error
    assert isinstance(copy, dict)
    return copy


def read_identity(directory: Path) -> Identity:
    path = directory / IDENTITY
    if not path.exists():
        raise StoreError(
            f"{directory} is not a store: it has no {IDENTITY}; check the path, or that its drive"
            " is mounted"
        )
    try:
        identity = from_json(Identity, read_json(path))
        _check_identity(identity)
    except WrongType as error:
        raise malformed(path, error) from None
    return identity


def write_manifest(directory: Path, manifest: Manifest, *, name: str = MANIFEST) -> None:
    write_json(directory / name, asdict(manifest))


def read_manifest(directory: Path, *, name: str = MANIFEST) -> Manifest | None:
    """Return the manifest of a store, or None if the store was never committed."""
    path = directory / name
    if not path.exists():
        return None
    try:
        manifest = from_json(Manifest, read_json(path))
        _check_manifest(manifest)
    except WrongType as error:
        raise malformed(path, error) from None
    return manifest


def _check_identity(identity: Identity) -> None:
    if len(identity.dirs) != identity.count or not 0 <= identity.index < identity.count:
        raise WrongType(
            f"it is directory {identity.index} of {identity.count} and names {len(identity.dirs)}"
        )
    for number, path in enumerate(identity.dirs):
        if not usable_path(path):
            raise WrongType(f"dirs[{number}] is {path[:60]!r}, wants a path")


def _check_manifest(manifest: Manifest) -> None:
    if manifest.durability not in DURABILITIES:
        raise WrongType(f"durability is {manifest.durability[:60]!r}, wants one of {DURABILITIES}")
    if manifest.generation < 0 or manifest.count < 1 or not 0 <= manifest.sums_crc32c < 2**32:
        raise WrongType(
            f"generation {manifest.generation}, count {manifest.count} and sums_crc32c"
            f" {manifest.sums_crc32c} are not all in their range"
        )
    commit_number(manifest)
    step_of(manifest)


def commit_number(manifest: Manifest) -> int:
    """Return the number of the commit.

    With several ranks, the number increases with every commit, even if the generation does not.
    """
    number: int = checked(manifest.meta.get(COMMITS, manifest.generation), int, f"meta.{COMMITS}")
    return number


def step_of(manifest: Manifest) -> int | None:
    """Return the last committed step of a run, or None if the store does not belong to a run."""
    progress = checked(manifest.meta.get(PROGRESS, {}), dict[str, Any], f"meta.{PROGRESS}")
    step: int | None = checked(progress.get("step"), int | None, f"meta.{PROGRESS}.step")
    return step


def write_checksums(path: Path, checksums: Checksums) -> int:
    """Write the checksums of a disk slot and return the CRC-32C of the file.

    The file holds one little-endian uint32 per chunk.
    """
    data = checksums.astype("<u4").tobytes()
    write_durably(path, data)
    return checksum(data)


def read_checksums(path: Path, *, count: int, crc: int) -> Checksums:
    data = _read_bytes(path)
    if len(data) != 4 * count:
        raise StoreError(
            f"{path}: has {len(data)} bytes, {4 * count} expected for {count} chunks;"
            " restore the store from a snapshot or start the run again"
        )
    if checksum(data) != crc:
        raise ChecksumError(
            f"{path}: CRC-32C is {checksum(data):#010x}, the manifest says {crc:#010x};"
            " restore the store from a snapshot or start the run again"
        )
    return np.frombuffer(data, dtype="<u4").astype(np.uint32)


def _canonical(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def write_durably(path: Path, data: bytes) -> None:
    """Replace a file atomically and durably.

    After a crash the file holds either all of the old or all of the new bytes.
    """
    try:
        write_atomic(path, data, mode=0o600, temporary=path.with_name(path.name + TEMPORARY))
    except OSError as error:
        raise StorageIOError(
            f"{path}: cannot write {len(data)} bytes: {error.strerror or error};"
            " free some space or check the drive, then resume the run"
        ) from error


def write_json(path: Path, fields: Mapping[str, Any]) -> None:
    body = {"format": FORMAT, "version": VERSION, **fields}
    write_durably(path, _canonical({**body, "crc32c": checksum(_canonical(body))}) + b"\n")


def read_json(path: Path) -> dict[str, Any]:
    try:
        fields = parse_json(_read_bytes(path))
        if not isinstance(fields, dict):
            raise BadJson("not a JSON object")
    except BadJson as error:
        raise malformed(path, error) from None
    if fields.get("format") != FORMAT:
        raise StoreError(
            f"{path}: format is {str(fields.get('format'))[:60]!r}, {FORMAT!r} expected; not a"
            " LoHan store"
        )
    if fields.get("version") != VERSION:
        raise StoreError(
            f"{path}: format version {str(fields.get('version'))[:20]}, this program reads"
            f" {VERSION}; use the version of lohan that wrote it"
        )
    stated = fields.pop("crc32c", None)
    actual = checksum(_canonical(fields))
    if stated != actual:
        raise ChecksumError(
            f"{path}: CRC-32C is {actual:#010x}, the file says {str(stated)[:20]}; it was altered "
            f"or damaged; {REMEDY}"
        )
    del fields["format"], fields["version"]
    return fields


def _read_bytes(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise StoreError(
                f"{path}: has {path.stat().st_size:,} bytes, {MAX_BYTES:,} at most expected; not a"
                f" file of a store; {REMEDY}"
            )
        return path.read_bytes()
    except OSError as error:
        raise StorageIOError(
            f"{path}: cannot read: {error.strerror}; check the drive, or restore from a snapshot"
        ) from error


def malformed(path: Path, error: Exception) -> StoreError:
    return StoreError(
        f"{path}: cannot be understood ({error}); it was altered or damaged; {REMEDY}"
    )


# -- From the directories named by the caller to a consistent store --------------------------------


def disk_slot_count(durability: str) -> int:
    if durability not in DURABILITIES:
        raise StoreError(f'durability {durability!r} is unknown; use "step" or "checkpoint"')
    return 2 if durability == "step" else 1


def write_identities(
    paths: Sequence[Path], final_dirs: Sequence[Path], *, uuid: str, layout: Layout
) -> None:
    """Write store.json to every directory, to the primary first.

    As soon as the primary has its identity, `lohan store rm` can find the other directories.
    """
    dirs = tuple(map(str, final_dirs))
    for index, path in enumerate(paths):
        described = tuple(layout.to_json()) if index == 0 else ()
        identity = Identity(uuid, index, len(paths), dirs, described)
        write_json(path / IDENTITY, asdict(identity))


def locate(dirs: str | Path | Sequence[str | Path]) -> tuple[tuple[Path, ...], Identity]:
    """Return all directories of a store, primary first, and the primary's identity.

    The primary lists the other directories, so it is sufficient as long as it is where it was
    created. After it was moved or copied, its list may refer to the directories of the store that
    it was copied from, so the caller must name all directories.
    """
    paths = store_dirs(dirs)
    primary = read_identity(paths[0])
    if primary.index != 0:
        raise StoreError(
            f"{paths[0]} is directory {primary.index + 1} of {primary.count} of store"
            f" {primary.uuid}; name its first directory, created as {primary.dirs[0]}"
        )
    if len(paths) == 1 and primary.count > 1:
        created = Path(primary.dirs[0])
        if paths[0] != created and not (created.exists() and created.samefile(paths[0])):
            raise StoreError(
                f"{paths[0]} is the first of {primary.count} directories of store {primary.uuid} "
                f"and was made as {created}: it was moved or copied, so the others that it lists "
                f"may be another store's; name all {primary.count} directories in their order"
            )
        paths = (paths[0], *map(Path, primary.dirs[1:]))
    if len(paths) != primary.count:
        raise StoreError(
            f"store {primary.uuid} in {paths[0]} has {primary.count} directories,"
            f" {len(paths)} given; name the first one or all of them"
        )
    return paths, primary


def check_members(paths: Sequence[Path], primary: Identity) -> None:
    """Check that every directory is the one that the primary expects at its position."""
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


def read_committed(paths: Sequence[Path], primary: Identity) -> tuple[Layout, Manifest, Checksums]:
    """Return the committed layout, manifest and checksums, checked against each other."""
    check_finished(paths[0])
    layout = layout_from_json(list(primary.layout), directories=primary.count)
    manifest = read_manifest(paths[0])
    assert manifest is not None
    file = paths[0] / MANIFEST
    for name, stated, expected in (
        ("store", manifest.uuid, primary.uuid),
        ("directory count", manifest.count, primary.count),
        ("layout digest", manifest.layout_sha256, layout.digest()),
    ):
        if stated != expected:
            raise StoreError(
                f"{file}: {name} is {stated}, store.json says {expected};"
                " these files are not of one store"
            )
    if not manifest.clean:
        progress = manifest.meta.get(PROGRESS)
        step = progress.get("step") if isinstance(progress, dict) else None
        raise StoreError(
            f"{paths[0]}: the process died in the middle of a step: the store was written in place"
            f" after generation {manifest.generation}"
            + (f" (step {step})" if step is not None else "")
            + " and is incomplete; resume from the last snapshot"
        )
    disk_slot = manifest.generation % disk_slot_count(manifest.durability)
    checksums = read_checksums(
        paths[0] / CHECKSUM_FILES[disk_slot], count=len(layout.durable), crc=manifest.sums_crc32c
    )
    return layout, manifest, checksums
