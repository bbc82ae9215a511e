"""Examples of named arrays on disk, all of one shape, and those of any step.

Field NAME lies in NAME.bin, one record after the other; meta.json says type and shape, and is
written last: it marks a complete folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lohan.data import arrange
from lohan.data.cache import all_or_nothing
from lohan.data.dataset import REBUILD
from lohan.errors import DataError

RECORDS_VERSION = 1
META = "meta.json"

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Field:
    """What every record of a name is: numpy's name of its type, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return np.dtype(self.dtype).itemsize * prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Records:
    """Examples in a seeded order; those of a step depend on nothing but the step."""

    folder: Path
    seed: int
    count: int  # of those on disk
    fields: Mapping[str, Field]
    about: Mapping[str, Any] = field(default_factory=dict)  # what whoever wrote them adds
    members: np.ndarray | None = field(default=None, compare=False)  # a part of them, if not all

    def __len__(self) -> int:
        return self.count if self.members is None else len(self.members)

    def split(self, share: float) -> tuple[Records, Records]:
        """What is trained on, and a share of the examples, chosen by the seed, that is not."""
        whole = np.arange(self.count) if self.members is None else self.members
        train, held = arrange.split(whole, share, seed=self.seed)
        return replace(self, members=train), replace(self, members=held)

    def of_step(self, step: int, batch_size: int) -> dict[str, np.ndarray]:
        """The examples of a step, stacked."""
        return self.stacked(arrange.rows_of(self.seed, step, batch_size, len(self)).tolist())

    def stacked(self, rows: Sequence[int]) -> dict[str, np.ndarray]:
        numbers = rows if self.members is None else [int(self.members[row]) for row in rows]
        return {
            name: np.stack([self._read(name, kind, number) for number in numbers])
            for name, kind in self.fields.items()
        }

    def _read(self, name: str, kind: Field, number: int) -> np.ndarray:
        """Read, not mapped, as tokens are."""
        path = self.folder / f"{name}.bin"
        try:
            with path.open("rb") as file:
                file.seek(number * kind.nbytes)
                data = file.read(kind.nbytes)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}; {REBUILD}") from None
        if len(data) != kind.nbytes:
            raise DataError(
                f"{path}: {kind.nbytes} bytes wanted at offset {number * kind.nbytes}, "
                f"{len(data)} there; {REBUILD}"
            )
        return np.frombuffer(data, dtype=kind.dtype).reshape(kind.shape)


def write_records(
    folder: Path, examples: Iterable[tuple[str, Arrays]], *, seed: int, about: Mapping[str, Any]
) -> Records:
    """Writes examples, each with the place that it comes from, and opens them; all or nothing."""
    part: dict[str, Path] = {}
    with all_or_nothing(folder, part, doing="preparing the data"):
        fields, count = _write(folder, examples, part)
        meta = {
            "version": RECORDS_VERSION, "count": count, "about": dict(about),
            "fields": {name: [kind.dtype, list(kind.shape)] for name, kind in fields.items()},
        }  # fmt: skip
        part[META] = folder / f"{META}.part"
        part[META].write_text(json.dumps(meta, indent=1) + "\n")
    found = open_records(folder, seed=seed)
    if found is None:
        raise DataError(f"{folder}: does not hold what was just written there; {REBUILD}")
    return found


def _write(
    folder: Path, examples: Iterable[tuple[str, Arrays]], part: dict[str, Path]
) -> tuple[dict[str, Field], int]:
    fields: dict[str, Field] = {}
    first, count = "", 0
    with ExitStack() as stack:
        files: dict[str, BinaryIO] = {}
        for place, arrays in examples:
            found = {name: plain(array) for name, array in arrays.items()}
            kinds = {name: Field(a.dtype.str, a.shape) for name, a in found.items()}
            if not fields:
                fields, first = kinds, place
                for name in fields:
                    part[f"{name}.bin"] = folder / f"{name}.bin.part"
                    files[name] = stack.enter_context(part[f"{name}.bin"].open("wb"))
            _check_alike(place, kinds, first, fields)
            for name, array in found.items():
                files[name].write(array.tobytes())
            count += 1
    return fields, count


def plain(array: np.ndarray) -> np.ndarray:
    """Little-endian, and as wide as batches have it at most: half or single precision, or whole
    numbers of 64 bits."""
    if array.dtype.kind == "f":
        return array.astype("<f2" if array.dtype.itemsize == 2 else "<f4")
    return array.astype("<i8")


def _check_alike(
    place: str, kinds: Mapping[str, Field], first: str, fields: Mapping[str, Field]
) -> None:
    if kinds.keys() != fields.keys():
        raise DataError(
            f"{place}: has {', '.join(kinds)}, {first} has {', '.join(fields)}; every example must "
            "have the same"
        )
    for name, kind in kinds.items():
        if kind != fields[name]:
            raise DataError(
                f"{place}: {name} is {_words(kind)}, that of {first} {_words(fields[name])}; all "
                "examples must be of one shape and type"
            )


def _words(kind: Field) -> str:
    size = " x ".join(map(str, kind.shape)) or "one"
    return f"{size} of {np.dtype(kind.dtype).name}"


def open_records(folder: Path, *, seed: int) -> Records | None:
    """The complete records in a folder, or None; where they came from is not looked at."""
    try:
        meta = json.loads((folder / META).read_text())
        if meta["version"] != RECORDS_VERSION:
            return None
        fields = {name: Field(dtype, tuple(s)) for name, (dtype, s) in meta["fields"].items()}
        found = Records(
            folder=folder, seed=seed, count=meta["count"], fields=fields, about=meta["about"]
        )
        sizes = {name: (folder / f"{name}.bin").stat().st_size for name in fields}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    whole = all(sizes[name] == found.count * kind.nbytes for name, kind in fields.items())
    return found if whole and found.count else None
