"""The stores of one run, one per rank, and its state resharded for another number of ranks."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from lohan.errors import StoreError
from lohan.model.layout import FlatGroup, RankInfo, parse_store_name
from lohan.model.state import (
    StateArray,
    chunks,
    regions,
    state_key,
    stored,
    stored_model,
    weight_key,
)
from lohan.store.admin import remove
from lohan.store.extents import Region
from lohan.store.files import IDENTITY, StoreLock
from lohan.store.io_engine import Buffer, aligned_buffer
from lohan.store.manifest import (
    COMMITS,
    apply_recovery,
    commit_state_of,
    read_manifest,
    recovery_actions,
    step_of,
)
from lohan.store.store import Store

# -- The stores of one run: one per rank -----------------------------------------------------------
#
# Which are there, which of them count, all of them opened.
#
# While a run changes its number of ranks it has two sets of stores; a crash may leave parts of one
# behind. A set counts if every rank's store is there and all agree on a commit; the one that has
# come furthest is the run's.


FoldersOf = Callable[[int], Sequence[Path]]  # folders in which a rank's store is spread


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
        states = [commit_state_of(path) for path in self.primaries]
        if any(s.committed is None and s.prepared is None for s in states):
            return None
        if recovery_actions(states) is None:
            return None
        manifests = filter(None, map(read_manifest, self.primaries))
        return max(step_of(found) or 0 for found in manifests)

    def remove(self) -> None:
        """Takes away what is there of it; the first rank's comes last, it leads to the rest."""
        for dirs in reversed(self.dirs):
            if (dirs[0] / IDENTITY).exists():
                remove(dirs)


def set_of(folders_of: FoldersOf, name: str, world: int) -> StoreSet:
    """The stores that so many ranks have, or would have."""
    return StoreSet(
        tuple(
            tuple(parent / ranks.store_name(name) for parent in folders_of(ranks.rank))
            for ranks in RankInfo(world=world).all()
        )
    )


def find_sets(folders_of: FoldersOf, name: str, *, seen_by: int = 0) -> list[StoreSet]:
    """Whatever there is of the run's stores where a rank has its own, whole or not; the smallest
    number of ranks first."""
    worlds = set()
    for parent in folders_of(seen_by):
        for folder in parent.iterdir() if parent.is_dir() else ():
            own, ranks = parse_store_name(folder.name)
            if own == name and (folder / IDENTITY).is_file():
                worlds.add(ranks.world)
    return [set_of(folders_of, name, world) for world in sorted(worlds)]


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
            _recover(found)
        opening = (Store.open(dirs, with_scratch=False) for dirs in found.dirs)
        yield tuple(map(opened.enter_context, opening))


def _recover(found: StoreSet) -> None:
    """Brings all ranks to the agreed commit. No process may be using one of them."""
    for rank in found.missing():
        raise StoreError(
            f"rank {rank} of {found.world} has no store at {found.dirs[rank][0]}; mount its drive, "
            "or work on the machine that has all of them"
        )
    with StoreLock([path for dirs in found.dirs for path in dirs]):
        actions = recovery_actions([commit_state_of(path) for path in found.primaries])
        for path, action in zip(found.primaries, actions or (), strict=True):
            apply_recovery(path, action)


# -- The state of a run, resharded for another number of ranks -------------------------------------
#
# Every byte is streamed from the old stores to new ones in the same folders, through a few chunks
# of memory. The old stores go when all new ones are committed: until then they are the run's,
# whatever happens.


OnProgress = Callable[[int, int], None]  # bytes done, in all
RANK, WORLD = "rank", "world"  # in the meta of a rank's store


def reshard_to_world(
    folders_of: FoldersOf, name: str, world: int, *,
    note: Callable[[str], None] = lambda text: None,
    progress: OnProgress = lambda done, total: None,
) -> None:  # fmt: skip
    """Brings a run's stores to those of `world` ranks. What an interrupted change has left behind
    goes. Stores that are not on this machine are left to those who have them."""
    sets = find_sets(folders_of, name)
    now = current_set(sets, wanted=world)
    if now is None:
        if sets and all(found.world != world for found in sets):
            found = sets[-1]
            away = ", ".join(map(str, found.missing()))
            why = (
                f"the stores of rank {away} are not on this machine"
                if away
                else "it was never whole"
            )
            raise StoreError(
                f"the state of {found.describe()} cannot be resharded for {world}: {why}; resume "
                f"with {found.describe()}, or bring all of it here first"
            )
        return
    for other in sets:
        if other != now:
            other.remove()
    if now.world != world:
        note(f"the state of {now.describe()} is resharded for {world}")
        reshard(now, set_of(folders_of, name, world), progress=progress)
        now.remove()


def reshard(
    old: StoreSet, new: StoreSet, *, progress: OnProgress = lambda done, total: None
) -> None:
    """Fills and commits the stores of `new` with the state of `old`."""
    new.remove()  # what is left of an attempt that did not end
    with open_set(old) as sources, ExitStack() as opened:
        source = _Source(sources)
        targets = []
        for dirs, ranks in zip(new.dirs, RankInfo(world=new.world).all(), strict=True):
            target = Store.create(
                dirs, source.regions_of(ranks), durability=sources[0].durability,
                first_generation=sources[0].generation,
            )  # fmt: skip
            targets.append((opened.enter_context(target), ranks))
        total = sum(extent.nbytes for target, _ in targets for extent in target.layout.durable)
        done = 0
        for target, ranks in targets:
            for size in source.fill(target, ranks):
                done += size
                progress(done, total)
        for target, ranks in targets:
            target.commit(_meta(sources, ranks))


def _meta(sources: Sequence[Store], ranks: RankInfo) -> dict[str, Any]:
    """What the manifest of a new rank carries. Random numbers go on where those of the old rank
    end; a rank that was not there begins with its own."""
    there = ranks.rank < len(sources)
    meta = sources[ranks.rank if there else 0].meta
    if not there:
        meta["rng"] = _fresh_rng(stored(meta, "rng", str), ranks.rank)
    commits = meta.get(COMMITS, sources[0].generation)
    own = {RANK: ranks.rank, WORLD: ranks.world, COMMITS: commits} if ranks.several else {}
    return {k: v for k, v in meta.items() if k not in (RANK, WORLD, COMMITS)} | own


def _fresh_rng(known: str, rank: int) -> str:
    """A random state, as manifests have it, that follows from that of the first rank."""
    import torch  # nothing else here needs it

    seed = int.from_bytes(hashlib.sha256(f"{rank} {known}".encode()).digest()[:7])
    state = torch.Generator().manual_seed(seed).get_state()
    return base64.b64encode(state.numpy().tobytes()).decode()


@dataclass(frozen=True)
class _Span:
    """Elements [start, stop) of a group that lie in one chunk of one rank's store, which begins
    at `first` and has `count` elements."""

    rank: int
    chunk: int
    start: int
    stop: int
    first: int
    count: int


class _Source:
    """The state of all groups, whichever stores it lies in."""

    def __init__(self, stores: Sequence[Store]) -> None:
        held = stored_model(stores[0].meta, stores[0].regions)
        self._stores, self._world = stores, RankInfo(world=len(stores))
        self._groups, self._state_format = held.groups, held.state_format
        self._chunk_params = held.chunk_params
        self._gradients = any(region.scratch for region in stores[0].regions)
        largest = max(store.layout.largest_chunk for store in stores)
        self._buffer = aligned_buffer(largest)
        self._loaded: tuple[int, str, int] | None = None

    def regions_of(self, ranks: RankInfo) -> list[Region]:
        shards = tuple(map(ranks.shard, self._groups))
        return regions(
            shards,
            state_format=self._state_format,
            chunk_params=self._chunk_params,
            gradients=self._gradients,
        )

    def fill(self, target: Store, ranks: RankInfo) -> Iterator[int]:
        """Writes a rank's shards of all groups; tells the bytes of each chunk."""
        out = aligned_buffer(target.layout.largest_chunk)
        for group in self._groups:
            cuts, begin = chunks(ranks.shard(group), self._chunk_params), ranks.start(group)
            weights = (StateArray("weights", self._state_format.dtype),)
            kinds: dict[str, tuple[StateArray, ...]] = {weight_key(group): weights}
            if not group.frozen:
                kinds[state_key(group)] = self._state_format.arrays
            for (key, arrays), chunk in product(kinds.items(), cuts):
                piece = out[: target.layout.find(key, chunk.index).nbytes]
                piece[:] = 0  # padding behind the group's end and behind the last array
                low, high = begin + chunk.start, begin + chunk.stop
                # The group's elements [low, high), as far as it has them.
                for span in self._spans(group, low, min(high, group.numel)):
                    data = self._read(span.rank, key, span.chunk)
                    here = there = 0  # where the array begins in the new chunk and in the old one
                    for array in arrays:
                        size = array.size(span.stop - span.start)
                        to = here + array.size(span.start - low)
                        at = there + array.size(span.start - span.first)
                        piece[to : to + size] = data[at : at + size]
                        here += array.size(high - low)
                        there += array.size(span.count)
                target.wait(target.write(key, chunk.index, piece))
                yield piece.nbytes

    def _spans(self, group: FlatGroup, low: int, high: int) -> Iterator[_Span]:
        each, size = self._world.shard_numel(group), self._chunk_params
        while low < high:
            rank, inside = divmod(low, each)
            chunk = inside // size
            first = rank * each + chunk * size
            count = min(size, each - chunk * size)
            stop = min(high, first + count)
            yield _Span(rank, chunk, low, stop, first, count)
            low = stop

    def _read(self, rank: int, key: str, chunk: int) -> Buffer:
        """A chunk of an old store; the last one that was read is still there."""
        store = self._stores[rank]
        data = self._buffer[: store.layout.find(key, chunk).nbytes]
        if self._loaded != (rank, key, chunk):
            self._loaded = None
            store.wait(store.read(key, chunk, data))
            self._loaded = (rank, key, chunk)
        return data
