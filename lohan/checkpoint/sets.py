"""The stores of one run: one per rank. Which are there, which of them count, all of them opened.

While a run changes its number of ranks it has two sets of stores; a crash may leave parts of one
behind. A set counts if every rank's store is there and all agree on a commit; the one that has come
furthest is the run's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from lohan.errors import StoreError
from lohan.model.shards import Ranks, parse_store_name
from lohan.store.admin import remove
from lohan.store.agreement import agreed_moves, make_move, standing_of
from lohan.store.files import IDENTITY
from lohan.store.lock import StoreLock
from lohan.store.manifest import read_manifest, step_of
from lohan.store.store import Store

Places = Callable[[int], Sequence[Path]]  # folders in which a rank's store is spread


@dataclass(frozen=True)
class StoreSet:
    """Directories of every rank's store, its first one first."""

    dirs: tuple[tuple[Path, ...], ...]

    @property
    def world(self) -> int:
        return len(self.dirs)

    @property
    def primaries(self) -> list[Path]:
        return [dirs[0] for dirs in self.dirs]

    def describe(self) -> str:
        return "one rank" if self.world == 1 else f"{self.world} ranks"

    def missing(self) -> list[int]:
        """Ranks whose store is not there."""
        found = enumerate(self.primaries)
        return [rank for rank, path in found if not (path / IDENTITY).is_file()]

    def step(self) -> int | None:
        """The last step of all ranks; None: some have never committed one."""
        if self.missing():
            return None
        standings = [standing_of(path) for path in self.primaries]
        if any(s.committed is None and s.prepared is None for s in standings):
            return None
        if agreed_moves(standings) is None:
            return None
        manifests = filter(None, map(read_manifest, self.primaries))
        return max(step_of(found) or 0 for found in manifests)

    def remove(self) -> None:
        """Takes away what is there of it; the first rank's comes last, it leads to the rest."""
        for dirs in reversed(self.dirs):
            if (dirs[0] / IDENTITY).exists():
                remove(dirs)


def set_of(places: Places, name: str, world: int) -> StoreSet:
    """The stores that so many ranks have, or would have."""
    return StoreSet(
        tuple(
            tuple(place / ranks.store_name(name) for place in places(ranks.rank))
            for ranks in Ranks(world=world).all()
        )
    )


def find_sets(places: Places, name: str, *, seen_by: int = 0) -> list[StoreSet]:
    """Whatever there is of the run's stores where a rank has its own, whole or not; the smallest
    number of ranks first."""
    worlds = set()
    for place in places(seen_by):
        for folder in place.iterdir() if place.is_dir() else ():
            own, ranks = parse_store_name(folder.name)
            if own == name and (folder / IDENTITY).is_file():
                worlds.add(ranks.world)
    return [set_of(places, name, world) for world in sorted(worlds)]


def current_set(sets: Sequence[StoreSet], *, wanted: int | None = None) -> StoreSet | None:
    """The one that has come furthest, of equal ones that of `wanted` ranks; None: none is whole."""
    steps = [(found.step(), found.world == wanted, found) for found in sets]
    whole = [(step, same, found) for step, same, found in steps if step is not None]
    return max(whole, key=lambda entry: entry[:2])[2] if whole else None


@contextmanager
def open_set(found: StoreSet) -> Iterator[tuple[Store, ...]]:
    """All stores of a set at the commit that they agree on, to read from."""
    with ExitStack() as opened:
        if found.world > 1:
            _agree(found)
        opening = (Store.open(dirs, with_scratch=False) for dirs in found.dirs)
        yield tuple(map(opened.enter_context, opening))


def _agree(found: StoreSet) -> None:
    """Brings all ranks to the agreed commit. No process may be using one of them."""
    for rank in found.missing():
        raise StoreError(
            f"rank {rank} of {found.world} has no store at {found.dirs[rank][0]}; mount its drive, "
            "or work on the machine that has all of them"
        )
    lock = StoreLock([path for dirs in found.dirs for path in dirs])
    try:
        moves = agreed_moves([standing_of(path) for path in found.primaries])
        for path, move in zip(found.primaries, moves or (), strict=True):
            make_move(path, move)
    finally:
        lock.release()
