"""The small files: who a directory belongs to, which generation is current, the checksums.

Both JSON files carry a CRC-32C of their own canonical text. docs/storage-format.md is the format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lohan._core import crc32c
from lohan.errors import ChecksumError, StorageIOError, StoreError
from lohan.store.engine import Buffer
from lohan.store.files import IDENTITY, MANIFEST, write_durably
from lohan.util.json_file import BadJson, parse_json
from lohan.util.paths import usable_path
from lohan.util.typed import WrongType, checked, from_json
from lohan.util.units import MiB

FORMAT, VERSION = "lohan-store", 2
COMMITS = "commits"  # in the meta of a store that is one of several ranks': number of its commits
PROGRESS = "progress"  # in the meta of a run's store: where it stands, its step among others
DURABILITIES = ("step", "checkpoint")
MAX_BYTES = 256 * MiB  # of a small file: some 25 bytes for each chunk, and the meta
REMEDY = "restore the store from a snapshot or start the run again"
Sums = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Identity:
    """store.json of one directory; `dirs` and `layout` are filled in the primary only."""

    uuid: str
    index: int
    count: int
    dirs: tuple[str, ...] = ()
    layout: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Manifest:
    """manifest.json: the committed generation. Its replacement is the commit."""

    uuid: str
    generation: int
    durability: str
    clean: bool
    count: int
    layout_sha256: str
    sums_crc32c: int
    meta: dict[str, Any]


def checksum(data: Buffer | bytes, seed: int = 0) -> int:
    """CRC-32C; `seed` is the checksum of what came before."""
    return int(crc32c(data, seed))


def plain_json(meta: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `meta` as a later reader will see it."""
    try:
        copy = json.loads(json.dumps(dict(meta)))
    except (TypeError, ValueError) as error:
        raise StoreError(f"the store's meta must be plain JSON: {error}") from error
    assert isinstance(copy, dict)
    return copy


def write_identity(directory: Path, identity: Identity) -> None:
    _write_json(directory / IDENTITY, asdict(identity))


def read_identity(directory: Path) -> Identity:
    path = directory / IDENTITY
    if not path.exists():
        raise StoreError(
            f"{directory} is not a store: it has no {IDENTITY}; check the path, or that its drive"
            " is mounted"
        )
    try:
        identity = from_json(Identity, _read_json(path))
        _check_identity(identity)
    except WrongType as error:
        raise _malformed(path, error) from None
    return identity


def write_manifest(directory: Path, manifest: Manifest, *, name: str = MANIFEST) -> None:
    _write_json(directory / name, asdict(manifest))


def read_manifest(directory: Path, *, name: str = MANIFEST) -> Manifest | None:
    """None: the store was never committed."""
    path = directory / name
    if not path.exists():
        return None
    try:
        manifest = from_json(Manifest, _read_json(path))
        _check_manifest(manifest)
    except WrongType as error:
        raise _malformed(path, error) from None
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
    """Grows with every commit of all ranks, also where the generation stays."""
    number: int = checked(manifest.meta.get(COMMITS, manifest.generation), int, f"meta.{COMMITS}")
    return number


def step_of(manifest: Manifest) -> int | None:
    """The run's last step, of a store that is a run's."""
    progress = checked(manifest.meta.get(PROGRESS, {}), dict[str, Any], f"meta.{PROGRESS}")
    step: int | None = checked(progress.get("step"), int | None, f"meta.{PROGRESS}.step")
    return step


def write_sums(path: Path, sums: Sums) -> int:
    """Writes a slot's checksums, one little-endian uint32 per chunk; returns their CRC-32C."""
    data = sums.astype("<u4").tobytes()
    write_durably(path, data)
    return checksum(data)


def read_sums(path: Path, *, count: int, crc: int) -> Sums:
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


def _write_json(path: Path, fields: Mapping[str, Any]) -> None:
    body = {"format": FORMAT, "version": VERSION, **fields}
    write_durably(path, _canonical({**body, "crc32c": checksum(_canonical(body))}) + b"\n")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        fields = parse_json(_read_bytes(path))
        if not isinstance(fields, dict):
            raise BadJson("not a JSON object")
    except BadJson as error:
        raise _malformed(path, error) from None
    if fields.get("format") != FORMAT:
        raise StoreError(
            f"{path}: format is {str(fields.get('format'))[:60]!r}, {FORMAT!r} expected; not a"
            " store of ours"
        )
    if fields.get("version") != VERSION:
        raise StoreError(
            f"{path}: format version {str(fields.get('version'))[:20]}, this program reads"
            f" {VERSION}; use the version of lohan that wrote it"
        )
    stated = fields.pop("crc32c", None)
    found = checksum(_canonical(fields))
    if stated != found:
        raise ChecksumError(
            f"{path}: CRC-32C is {found:#010x}, the file says {str(stated)[:20]}; it was altered or"
            f" damaged; {REMEDY}"
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


def _malformed(path: Path, error: Exception) -> StoreError:
    return StoreError(
        f"{path}: cannot be understood ({error}); it was altered or damaged; {REMEDY}"
    )
