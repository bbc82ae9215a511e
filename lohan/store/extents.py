"""The layout of a store: regions of chunks, striped over directories, one aligned extent per chunk.

A chunk is the unit of I/O. Chunks are distributed over the directories in proportion to weights:
each chunk is assigned to the directory that is furthest below its share. Within a directory, chunks
are laid out in order, so the extents of one region in one directory are contiguous.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

from lohan.errors import StoreError
from lohan.util.files import WrongType, from_json
from lohan.util.units import PAGE


@dataclass(frozen=True)
class Region:
    """A named list of chunks. Chunk sizes are in bytes, and each is a multiple of PAGE.

    A scratch region has one disk slot, no generations and no checksums, and its content is lost
    when the process ends. A fixed region is written only while the store is created. It has
    checksums and a single copy, which all generations share.
    """

    key: str
    chunks: tuple[int, ...]
    scratch: bool = False
    fixed: bool = False


@dataclass(frozen=True, slots=True)
class Extent:
    """The location of a chunk: `nbytes` at `offset` of its file in directory number `directory`."""

    key: str
    chunk: int
    scratch: bool
    index: int  # Index among all durable chunks, or among all scratch chunks.
    directory: int
    offset: int
    nbytes: int
    fixed: bool = False


@dataclass(frozen=True)
class Layout:
    """All extents of a store. Chunks in `durable` have checksums, chunks in `scratch` do not.

    In `durable`, the chunks that have generations precede the fixed ones.
    """

    directories: int
    regions: tuple[Region, ...]
    durable: tuple[Extent, ...]
    scratch: tuple[Extent, ...]
    _by_key: dict[str, tuple[Extent, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        grouped: dict[str, list[Extent]] = {region.key: [] for region in self.regions}
        for extent in (*self.durable, *self.scratch):
            grouped[extent.key].append(extent)
        object.__setattr__(self, "_by_key", {key: tuple(v) for key, v in grouped.items()})

    def find(self, key: str, chunk: int) -> Extent:
        extents = self._by_key.get(key)
        if extents is None:
            raise StoreError(
                f"the store has no region {key!r}; its regions are in Store.layout.regions"
            )
        if not 0 <= chunk < len(extents):
            raise StoreError(f"region {key!r} has chunks 0..{len(extents) - 1}, not {chunk}")
        return extents[chunk]

    def disk_slot_bytes(self, directory: int) -> int:
        """Return the size of one disk slot's file in a directory, or 0 if there is no such file."""
        return _end([e for e in self.durable if not e.fixed], directory)

    def fixed_bytes(self, directory: int) -> int:
        return _end([e for e in self.durable if e.fixed], directory)

    def scratch_bytes(self, directory: int) -> int:
        return _end(self.scratch, directory)

    @property
    def per_generation(self) -> int:
        """The number of durable chunks that are not fixed, so that each generation has its own."""
        return sum(not extent.fixed for extent in self.durable)

    @property
    def largest_chunk(self) -> int:
        return max((extent.nbytes for extent in self.durable), default=0)

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {
                "key": region.key,
                "scratch": region.scratch,
                "fixed": region.fixed,
                "extents": [[e.directory, e.offset, e.nbytes] for e in self._by_key[region.key]],
            }
            for region in self.regions
        ]

    def digest(self) -> str:
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def plan_layout(
    regions: Iterable[Region], *, directories: int, weights: Sequence[float] | None = None
) -> Layout:
    """Assign an extent to every chunk of every region.

    The result is deterministic: the same arguments always give the same layout.
    """
    regions = tuple(regions)
    _check_regions(regions)
    shares = _integer_shares(weights if weights is not None else [1.0] * directories, directories)
    per_generation = _extents_of([r for r in regions if not r.scratch and not r.fixed], shares)
    fixed = _extents_of([r for r in regions if r.fixed], shares, first=len(per_generation))
    scratch = _extents_of([r for r in regions if r.scratch], shares)
    return Layout(directories, regions, (*per_generation, *fixed), scratch)


def layout_from_json(data: list[dict[str, Any]], *, directories: int) -> Layout:
    """Return the layout that `Layout.to_json` described, and raise StoreError if it is invalid."""
    regions: list[Region] = []
    per_generation: list[Extent] = []
    fixed: list[Extent] = []
    scratch: list[Extent] = []
    for number, raw in enumerate(data):
        entry = _entry(raw, number)
        sizes = tuple(nbytes for _, _, nbytes in entry.extents)
        region = Region(entry.key, sizes, entry.scratch, entry.fixed)
        regions.append(region)
        extents = scratch if region.scratch else fixed if region.fixed else per_generation
        for chunk, (directory, offset, nbytes) in enumerate(entry.extents):
            at = (len(extents), directory, offset, nbytes)
            extents.append(Extent(region.key, chunk, region.scratch, *at, region.fixed))
    _check_regions(regions)
    for part in (per_generation, fixed, scratch):
        check_extents(part, directories=directories)
    fixed = [replace(extent, index=extent.index + len(per_generation)) for extent in fixed]
    return Layout(directories, tuple(regions), (*per_generation, *fixed), tuple(scratch))


@dataclass(frozen=True)
class _Entry:
    """A region in JSON. Each extent is a triple of directory, offset and size."""

    key: str
    scratch: bool
    fixed: bool
    extents: tuple[tuple[int, int, int], ...]


def _entry(raw: object, number: int) -> _Entry:
    try:
        return from_json(_Entry, raw, name=f"layout[{number}]")
    except WrongType as error:
        raise StoreError(
            f"store.json cannot be understood: {error}; restore the store from a snapshot or start"
            " the run again"
        ) from None


def check_extents(extents: Sequence[Extent], *, directories: int) -> None:
    """Check that the extents of a file set are aligned, in known directories and disjoint."""
    end = [0] * directories
    for e in sorted(extents, key=lambda e: e.offset):
        if not 0 <= e.directory < directories:
            raise StoreError(
                f"region {e.key!r} chunk {e.chunk} lies in directory {e.directory} of {directories}"
            )
        if e.offset < 0 or e.offset % PAGE or e.nbytes % PAGE:
            raise StoreError(
                f"region {e.key!r} chunk {e.chunk}: offset {e.offset} and size {e.nbytes} must be"
                f" positive multiples of {PAGE}"
            )
        if e.offset < end[e.directory]:
            raise StoreError(
                f"region {e.key!r} chunk {e.chunk} at offset {e.offset} of directory"
                f" {e.directory} overlaps the chunk that ends at {end[e.directory]}"
            )
        end[e.directory] = e.offset + e.nbytes


def allot(sizes: Sequence[int], shares: Sequence[int]) -> list[int]:
    """Return for each size the number of the directory that is then furthest below its share.

    No directory ever gets more than its share plus one chunk. The computation uses integers only
    and resolves ties in favour of the lowest number, so the result is the same on every machine.
    """
    total_share, total = sum(shares), 0
    assigned = [0] * len(shares)
    chosen: list[int] = []
    for size in sizes:
        total += size
        deficits = [
            share * total - total_share * got for share, got in zip(shares, assigned, strict=True)
        ]
        best = deficits.index(max(deficits))
        assigned[best] += size
        chosen.append(best)
    return chosen


def _extents_of(
    regions: Sequence[Region], shares: Sequence[int], *, first: int = 0
) -> tuple[Extent, ...]:
    """Return the extents of one file set, with indices starting at `first`."""
    chunks = [(r, chunk, size) for r in regions for chunk, size in enumerate(r.chunks)]
    end = [0] * len(shares)
    extents = []
    directories = allot([size for _, _, size in chunks], shares)
    for index, ((r, chunk, size), at) in enumerate(zip(chunks, directories, strict=True), first):
        extents.append(Extent(r.key, chunk, r.scratch, index, at, end[at], size, r.fixed))
        end[at] += size
    return tuple(extents)


def _integer_shares(weights: Sequence[float], directories: int) -> list[int]:
    if directories < 1 or len(weights) != directories:
        raise StoreError(
            f"{len(weights)} weights for {directories} directories; give one weight for each"
        )
    if not all(isfinite(w) and w > 0 for w in weights):
        raise StoreError(f"weights {list(weights)} must all be positive; leave the directory out")
    return [max(1, round(w / sum(weights) * 1_000_000)) for w in weights]


def _check_regions(regions: Sequence[Region]) -> None:
    seen: set[str] = set()
    for region in regions:
        if not region.key or region.key in seen:
            raise StoreError(f"region key {region.key!r} is empty or used twice")
        if region.scratch and region.fixed:
            raise StoreError(f"region {region.key!r} is scratch and fixed; it can be one of them")
        seen.add(region.key)
        for chunk, size in enumerate(region.chunks):
            if size <= 0 or size % PAGE:
                raise StoreError(
                    f"region {region.key!r} chunk {chunk} has {size} bytes; a chunk must be a"
                    f" positive multiple of {PAGE}"
                )
    if not any(region.chunks for region in regions if not region.scratch and not region.fixed):
        raise StoreError("a store needs at least one state chunk; none of its regions has one")


def _end(extents: Sequence[Extent], directory: int) -> int:
    return max((e.offset + e.nbytes for e in extents if e.directory == directory), default=0)
