"""Examples of several sequences of numbers each, on disk, and those of any step.

Field NAME lies in NAME.bin, one example after the other, and where each begins in NAME.npy.
meta.json says their types and what was found; it is written last and marks a complete folder.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lohan.config import Source
from lohan.data import dataset
from lohan.data.cache import all_or_nothing, create_part
from lohan.util.files import checked, load_json

VERSION = 1
META = "meta.json"
TYPES = {"i": "<i4", "f": "<f4"}  # of whole numbers, and of others

Row = Mapping[str, np.ndarray]  # one example
Batch = dict[str, Any]
Draw = Callable[[Row, np.random.PCG64], Row]
DRAWS = 1 << 32  # streams of random numbers, apart from those of the order


@dataclass(frozen=True, kw_only=True)
class Fields:
    """Examples in a seeded order; those of a step depend on nothing but the step. `collate` makes
    a batch of some of them. `draw` is what is random about an example: drawn for each place of
    each step, and once for evaluation."""

    folder: Path
    seed: int
    count: int  # of those on disk
    types: Mapping[str, str]  # numpy's, by field
    about: Mapping[str, Any]  # what whoever wrote them adds
    collate: Callable[[Sequence[Row]], Batch] = field(compare=False, repr=False)
    draw: Draw | None = field(default=None, compare=False, repr=False)
    members: np.ndarray | None = field(default=None, compare=False)  # a part of them, if not all
    sources: tuple[int, ...] = ()  # examples of each file, in their order
    weights: tuple[float, ...] = ()  # of the files, where they have shares of their own

    @property
    def rendered(self) -> Mapping[str, str]:
        """The first example as the model sees it."""
        found: dict[str, str] = checked(self.about.get("rendered", {}), dict[str, str], "rendered")
        return found

    def __len__(self) -> int:
        return self.count if self.members is None else len(self.members)

    def split(self, share: float) -> tuple[Fields, Fields]:
        """What is trained on, and a share of the examples, chosen by the seed, that is not."""
        train, held = dataset.split(self._numbers, share, seed=self.seed)
        return replace(self, members=train), replace(self, members=held)

    def steps_for(self, epochs: float, batch_size: int) -> int:
        return dataset.steps_for(len(self), epochs, batch_size)

    def batch(self, step: int, batch_size: int) -> Batch:
        if self.weights:
            rows = self._mixture.rows_of(self.seed, step, batch_size)
        else:
            rows = dataset.rows_of(self.seed, step, batch_size, len(self))
        return self._of(rows, [(step, place) for place in range(batch_size)])

    def passes(self, batch_size: int) -> Iterator[Batch]:
        """Every example once; long ones first, so that what does not fit shows at once."""
        lengths = np.max([self._lengths(name) for name in self.types], axis=0)
        rows = np.argsort(-lengths[self._numbers], kind="stable")
        for start in range(0, len(rows), batch_size):
            here = rows[start : start + batch_size]
            yield self._of(here, [(int(self._numbers[row]),) for row in here])

    def longest(self, name: str) -> int:
        return int(self._lengths(name)[self._numbers].max())

    def example(self, number: int) -> dict[str, np.ndarray]:
        """Of those on disk. Read, not mapped, as tokens are."""
        found = {}
        for name, kind in self.types.items():
            begin, end = (4 * int(place) for place in self._offsets[name][number : number + 2])
            path = self.folder / f"{name}.bin"
            data = dataset.read_exactly(path, offset=begin, nbytes=end - begin)
            found[name] = np.frombuffer(data, dtype=kind)
        return found

    def _of(self, rows: np.ndarray, streams: Sequence[tuple[int, ...]]) -> Batch:
        """`streams`: which random numbers each of them has."""
        examples: list[Row] = [self.example(int(self._numbers[row])) for row in rows]
        if self.draw is not None:
            seeds = (np.random.SeedSequence([self.seed, DRAWS, *stream]) for stream in streams)
            bits = map(np.random.PCG64, seeds)
            examples = [self.draw(one, own) for one, own in zip(examples, bits, strict=True)]
        return self.collate(examples)

    @cached_property
    def _mixture(self) -> dataset.Mixture:
        return dataset.mixture_of(self._numbers, self.sources, self.weights)

    @property
    def _numbers(self) -> np.ndarray:
        return np.arange(self.count) if self.members is None else self.members

    def _lengths(self, name: str) -> np.ndarray:
        return np.diff(self._offsets[name])

    @cached_property
    def _offsets(self) -> dict[str, np.ndarray]:
        return {name: np.load(self.folder / f"{name}.npy", mmap_mode="r") for name in self.types}


def write_fields(
    folder: Path, parts: Iterable[tuple[Source, Iterable[Row]]], *,
    about: Callable[[], Mapping[str, Any]], show: Callable[[Row], Mapping[str, str]],
) -> None:  # fmt: skip
    """The examples of several files, all or nothing; `about` is asked when all were seen, and
    `show` has the first for people. They have the same fields."""
    part: dict[str, Path] = {}
    with all_or_nothing(folder, part, doing="preparing the data"):
        types: dict[str, str] = {}
        offsets: dict[str, array[int]] = {}
        found: list[dataset.SourceSummary] = []
        shown: Mapping[str, str] = {}
        with ExitStack() as stack:
            files: dict[str, BinaryIO] = {}
            for source, examples in parts:
                number = 0
                for number, example in enumerate(examples, 1):  # noqa: B007 - counted
                    shown = shown or show(example)
                    for name, values in example.items():
                        if name not in files:
                            types[name] = TYPES["f" if values.dtype.kind == "f" else "i"]
                            offsets[name] = array("q", [0])
                            part[f"{name}.bin"] = folder / f"{name}.bin.part"
                            files[name] = stack.enter_context(create_part(part[f"{name}.bin"]))
                        files[name].write(values.astype(types[name]).tobytes())
                        offsets[name].append(offsets[name][-1] + len(values))
                found.append(dataset.SourceSummary(source.path.name, number, source.weight))
        for name, places in offsets.items():
            part[f"{name}.npy"] = folder / f"{name}.npy.part"
            with create_part(part[f"{name}.npy"]) as file:
                np.save(file, np.asarray(places, dtype="<i8"))
        count = min((len(places) - 1 for places in offsets.values()), default=0)
        meta = {
            "version": VERSION, "count": count, "fields": types,
            "about": {**about(), "rendered": dict(shown)},
            "sources": [asdict(one) for one in found],
        }  # fmt: skip
        part[META] = folder / f"{META}.part"
        with create_part(part[META]) as file:
            file.write(json.dumps(meta, indent=1).encode() + b"\n")


def open_fields(
    folder: Path, *, seed: int, collate: Callable[[Sequence[Row]], Batch], draw: Draw | None = None
) -> Fields | None:
    """The complete examples in a folder, or None; where they came from is not looked at."""
    try:
        meta = load_json(folder / META)
        if meta["version"] != VERSION:
            return None
        files = checked(meta.get("sources", []), list[dataset.SourceSummary], "sources")
        found = Fields(
            folder=folder, seed=seed, count=checked(meta["count"], int, "count"),
            types=checked(meta["fields"], dict[str, str], "fields"),
            about=checked(meta["about"], dict[str, Any], "about"), collate=collate,
            draw=draw, sources=tuple(file.examples for file in files),
            weights=tuple(file.weight for file in files if file.weight is not None),
        )  # fmt: skip
        whole = all(
            len(places) == found.count + 1
            and (folder / f"{name}.bin").stat().st_size == 4 * int(places[-1])
            for name, places in found._offsets.items()
        )
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None
    return found if whole and found.count and found.types else None


def padded(rows: Sequence[np.ndarray], *, value: float, most: int) -> np.ndarray:
    """Rows of one length: the longest, rounded up to 8 but not past `most`."""
    longest = max(map(len, rows))
    width = max(longest, min(-(-longest // 8) * 8, most))
    wide = np.float32 if rows[0].dtype.kind == "f" else np.int64
    made = np.full((len(rows), width), value, dtype=wide)
    for number, row in enumerate(rows):
        made[number, : len(row)] = row
    return made
