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
from lohan.storage.engine import Buffer
from lohan.storage.files import IDENTITY, MANIFEST, write_durably

FORMAT, VERSION = "lohan-store", 2
COMMITS = "commits"  # in the meta of a store that is one of several ranks': number of its commits
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
    fields = _read_json(path)
    try:
        return Identity(
            uuid=str(fields["uuid"]),
            index=int(fields["index"]),
            count=int(fields["count"]),
            dirs=tuple(fields["dirs"]),
            layout=tuple(fields["layout"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _malformed(path, error) from error


def write_manifest(directory: Path, manifest: Manifest, *, name: str = MANIFEST) -> None:
    _write_json(directory / name, asdict(manifest))


def read_manifest(directory: Path, *, name: str = MANIFEST) -> Manifest | None:
    """None: the store was never committed."""
    path = directory / name
    if not path.exists():
        return None
    fields = _read_json(path)
    try:
        return Manifest(
            uuid=str(fields["uuid"]),
            generation=int(fields["generation"]),
            durability=str(fields["durability"]),
            clean=bool(fields["clean"]),
            count=int(fields["count"]),
            layout_sha256=str(fields["layout_sha256"]),
            sums_crc32c=int(fields["sums_crc32c"]),
            meta=dict(fields["meta"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _malformed(path, error) from error


def commit_number(manifest: Manifest) -> int:
    """Grows with every commit of all ranks, also where the generation stays."""
    return int(manifest.meta.get(COMMITS, manifest.generation))


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
        fields = json.loads(_read_bytes(path))
        if not isinstance(fields, dict):
            raise ValueError("not a JSON object")
    except ValueError as error:
        raise _malformed(path, error) from error
    if fields.get("format") != FORMAT:
        raise StoreError(
            f"{path}: format is {fields.get('format')!r}, {FORMAT!r} expected; not a store of ours"
        )
    if fields.get("version") != VERSION:
        raise StoreError(
            f"{path}: format version {fields.get('version')}, this program reads {VERSION};"
            " use the version of lohan that wrote it"
        )
    stated = fields.pop("crc32c", None)
    found = checksum(_canonical(fields))
    if stated != found:
        raise ChecksumError(
            f"{path}: CRC-32C is {found:#010x}, the file says {stated}; it was altered or damaged;"
            " restore the store from a snapshot or start the run again"
        )
    return fields


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StorageIOError(
            f"{path}: cannot read: {error.strerror}; check the drive, or restore from a snapshot"
        ) from error


def _malformed(path: Path, error: Exception) -> StoreError:
    return StoreError(
        f"{path}: cannot be understood ({error}); it was altered or damaged;"
        " restore the store from a snapshot or start the run again"
    )
