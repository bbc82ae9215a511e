"""Small stores with known bytes: every chunk of a generation is filled from its name."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

from lohan.store.extents import Region
from lohan.store.files import IDENTITY
from lohan.store.io_engine import Buffer, aligned_buffer
from lohan.store.manifest import read_manifest
from lohan.store.store import Store
from lohan.util.units import PAGE

REGIONS = (
    Region("block0/weights", (2 * PAGE, PAGE)),
    Region("block0/state", (3 * PAGE, PAGE, PAGE)),
    Region("activations", (PAGE, 2 * PAGE), scratch=True),
)
STATE = tuple((r.key, i, n) for r in REGIONS if not r.scratch for i, n in enumerate(r.chunks))


def content(key: str, chunk: int, nbytes: int, generation: int) -> Buffer:
    seed = zlib.crc32(f"{key}/{chunk}/{generation}".encode())
    buffer = aligned_buffer(nbytes)
    buffer[:] = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    return buffer


def write_all(store: Store, generation: int) -> None:
    tickets = [store.write(key, i, content(key, i, n, generation)) for key, i, n in STATE]
    for ticket in tickets:
        store.wait(ticket)


def step(store: Store) -> None:
    """Write and commit the next generation."""
    generation = store.generation + 1
    write_all(store, generation)
    store.commit({"step": generation})


def read_chunk(
    store: Store, key: str, chunk: int, nbytes: int, *, uncommitted: bool = False
) -> Buffer:
    buffer = aligned_buffer(nbytes)
    store.wait(store.read(key, chunk, buffer, uncommitted=uncommitted))
    return buffer


def is_whole(primary: Path) -> bool:
    """Return whether the first directory of a store is committed, without writes in place.

    A restore renames this directory into place last, so its presence implies that of the others.
    """
    if not (primary / IDENTITY).exists():
        return False
    manifest = read_manifest(primary)
    return manifest is not None and manifest.clean


def assert_holds(store: Store, generation: int) -> None:
    assert store.generation == generation
    assert store.meta == {"step": generation}
    for key, chunk, nbytes in STATE:
        expected = content(key, chunk, nbytes, generation)
        assert np.array_equal(read_chunk(store, key, chunk, nbytes), expected), (key, chunk)


def tree(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*"))


WEIGHTS = Region("base", (4 * PAGE, PAGE), fixed=True)
MIXED = (REGIONS[0], WEIGHTS, *REGIONS[1:])


def write_fixed(store: Store) -> None:
    for chunk, size in enumerate(WEIGHTS.chunks):
        store.wait(store.write("base", chunk, content("base", chunk, size, 0)))
