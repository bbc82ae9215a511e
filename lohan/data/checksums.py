"""Checksums of the files in a data cache: written into meta.json, verified when it is opened."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lohan.errors import DataError
from lohan.store.manifest import checksum

META = "meta.json"
BLOCK_BYTES = 2**17  # number of bytes read at a time
SELF = "checksum"  # key in meta.json: CRC-32C of its other keys
FILES = "checksums"  # key in meta.json: CRC-32C of every other file, by name


def sealed(meta: Mapping[str, Any], part: Mapping[str, Path]) -> bytes:
    """Return the contents of meta.json, with checksums of the files in `part` and of itself."""
    complete = {**meta, FILES: {n: _crc_of(path) for n, path in part.items() if n != META}}
    complete[SELF] = _crc_of_meta(complete)
    return json.dumps(complete, indent=1).encode() + b"\n"


def verify(folder: Path, meta: Mapping[str, Any]) -> None:
    """Raise DataError if a file of the cache differs from what was written."""
    _compare(folder / META, _crc_of_meta(meta), meta[SELF])
    for name, expected in meta[FILES].items():
        _compare(folder / name, _crc_of(folder / name), expected)


def check_token_ids(folder: Path, name: str, *, vocab_size: int, ignore: int) -> None:
    """Raise DataError if a file of int32 contains an id outside the vocabulary.

    The id `ignore` is accepted as well.
    """
    with (folder / name).open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            ids = np.frombuffer(block, dtype="<i4")
            wrong = ids[(ids != ignore) & ((ids < 0) | (ids >= vocab_size))]
            if len(wrong):
                raise DataError(
                    f"{folder / name}: token {wrong[0]} is outside the model's vocabulary of "
                    f"{vocab_size}; remove {folder} and resume, which tokenises the data again"
                )


def _crc_of(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            crc = checksum(block, crc)
    return crc


def _crc_of_meta(meta: Mapping[str, Any]) -> int:
    rest = {name: value for name, value in meta.items() if name != SELF}
    return checksum(json.dumps(rest, sort_keys=True).encode())


def _compare(path: Path, actual: int, expected: Any) -> None:
    if actual != expected:
        raise DataError(
            f"{path}: damaged: its checksum is {actual:08x}, and {expected:08x} was written; "
            f"remove {path.parent} and resume, which prepares the same data again"
        )
