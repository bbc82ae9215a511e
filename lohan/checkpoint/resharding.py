"""The stores of a run, one per rank, and resharding them for another number of ranks."""

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
    EXACT_ARRAYS,
    StateArray,
    chunks,
    exact_key,
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
from lohan.store.log import read_latest
from lohan.store.manifest import COMMITS, step_of
from lohan.store.recovery import apply_recovery, commit_state_of, recovery_actions
from lohan.store.store import Store

# -- The stores of one run: one per rank -----------------------------------------------------------
#
# While a run changes its number of ranks it has two sets of stores, and a crash may leave an
# incomplete set behind. A set is complete if the store of every rank exists and all stores agree on
# a commit. The complete set with the highest step is the current one.


FoldersOf = Callable[[int], Sequence[Path]]  # rank -> folders that its store is spread over


@dataclass(frozen=True)
class StoreSet:
    """The directories of every rank's store, with each store's primary directory first."""

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
        """Return the ranks whose store does not exist."""
        numbered = enumerate(self.primaries)
        return [rank for rank, path in numbered if not (path / IDENTITY).is_file()]

    def step(self) -> int | None:
        """Return the last step that all ranks agree on, or None if the set is incomplete."""
        if self.missing():
            return None
        states = [commit_state_of(path) for path in self.primaries]
        if any(s.committed is None and s.prepared is None for s in states):
            return None
        if recovery_actions(states) is None:
            return None
        manifests = filter(None, map(read_latest, self.primaries))
        return max(step_of(manifest) or 0 for manifest in manifests)

    def remove(self) -> None:
        """Remove the existing stores of the set.

        The store of rank 0 is removed last, because it is used to find the others.
        """
        for dirs in reversed(self.dirs):
            if (dirs[0] / IDENTITY).exists():
                remove(dirs)


def set_of(folders_of: FoldersOf, name: str, world: int) -> StoreSet:
    """Return the stores that `world` ranks have or would have.

    `folders_of` returns the directories over which the store of a rank is spread.
    """
    return StoreSet(
        tuple(
            tuple(parent / ranks.store_name(name) for parent in folders_of(ranks.rank))
            for ranks in RankInfo(world=world).all()
        )
    )


def find_sets(folders_of: FoldersOf, name: str, *, seen_by: int = 0) -> list[StoreSet]:
    """Return all sets of stores of a run, complete or not, ordered by number of ranks.

    A set is found if the folders of rank `seen_by` hold one of its stores.
    """
    worlds = set()
    for parent in folders_of(seen_by):
        for folder in parent.iterdir() if parent.is_dir() else ():
            store_name, ranks = parse_store_name(folder.name)
            if store_name == name and (folder / IDENTITY).is_file():
                worlds.add(ranks.world)
    return [set_of(folders_of, name, world) for world in sorted(worlds)]


def current_set(sets: Sequence[StoreSet], *, wanted: int | None = None) -> StoreSet | None:
    """Return the complete set with the highest step, or None if no set is complete.

    If several sets are at the same step, the set with `wanted` ranks is preferred.
    """
    steps = [(one.step(), one.world == wanted, one) for one in sets]
    whole = [(step, same, one) for step, same, one in steps if step is not None]
    return max(whole, key=lambda entry: entry[:2])[2] if whole else None


Fold = Callable[[Store], object]


@contextmanager
def open_set(stores: StoreSet, *, fold: Fold | None = None) -> Iterator[tuple[Store, ...]]:
    """Open all stores of a set for reading, at the commit that they agree on.

    `fold` applies the logged steps of a killed run to each store. Without it, StoreError is raised
    if a store has such steps.
    """
    with ExitStack() as opened:
        if stores.world > 1:
            _recover(stores)
        if fold is not None:
            for dirs in stores.dirs:
                with Store.open(dirs, replays=True) as store:
                    fold(store)
        opening = (Store.open(dirs, with_scratch=False) for dirs in stores.dirs)
        yield tuple(map(opened.enter_context, opening))


def _recover(stores: StoreSet) -> None:
    """Bring all stores to the last commit that all ranks have, holding the locks of all stores."""
    for rank in stores.missing():
        raise StoreError(
            f"rank {rank} of {stores.world} has no store at {stores.dirs[rank][0]}; mount its "
            "drive, or work on the machine that has all of them"
        )
    with StoreLock([path for dirs in stores.dirs for path in dirs]):
        actions = recovery_actions([commit_state_of(path) for path in stores.primaries])
        for path, action in zip(stores.primaries, actions or (), strict=True):
            apply_recovery(path, action)


# -- Resharding a run for another number of ranks --------------------------------------------------
#
# All state is streamed from the old stores to new ones in the same folders, with a few chunks in
# memory. The old stores are removed after all new ones are committed; until then they remain the
# current set.


OnProgress = Callable[[int, int], None]  # called with the bytes done and the total
RANK, WORLD = "rank", "world"  # keys in the metadata of a rank's store


def reshard_to_world(
    folders_of: FoldersOf,
    name: str,
    world: int,
    *,
    note: Callable[[str], None] = lambda text: None,
    progress: OnProgress = lambda done, total: None,
    fold: Fold | None = None,
) -> None:
    """Reshard a run's stores for `world` ranks, unless they already have that number.

    Sets of stores that an interrupted reshard left behind are removed. If no complete set exists
    but there are stores for `world` ranks, nothing is done, because the missing stores may be on
    other machines.
    """
    sets = find_sets(folders_of, name)
    current = current_set(sets, wanted=world)
    if current is None:
        if sets and all(one.world != world for one in sets):
            one = sets[-1]
            absent_ranks = ", ".join(map(str, one.missing()))
            why = (
                f"the stores of rank {absent_ranks} are not on this machine"
                if absent_ranks
                else "it was never whole"
            )
            raise StoreError(
                f"the state of {one.describe()} cannot be resharded for {world}: {why}; resume "
                f"with {one.describe()}, or bring all of it here first"
            )
        return
    for other in sets:
        if other != current:
            other.remove()
    if current.world != world:
        note(f"the state of {current.describe()} is resharded for {world}")
        reshard(current, set_of(folders_of, name, world), progress=progress, fold=fold)
        current.remove()


def reshard(
    old: StoreSet,
    new: StoreSet,
    *,
    progress: OnProgress = lambda done, total: None,
    fold: Fold | None = None,
) -> None:
    """Create, fill and commit the stores of `new` with the state of `old`."""
    new.remove()  # Remove what an interrupted attempt has left.
    with open_set(old, fold=fold) as sources, ExitStack() as opened:
        source = _Source(sources)
        targets = []
        for dirs, ranks in zip(new.dirs, RankInfo(world=new.world).all(), strict=True):
            target = Store.create(
                dirs,
                source.regions_of(ranks),
                first_generation=sources[0].generation,
            )
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
    """Return the metadata of a new rank's manifest.

    A rank that existed before continues its random state. A new rank gets a random state derived
    from that of rank 0.
    """
    has_source = ranks.rank < len(sources)
    meta = sources[ranks.rank if has_source else 0].meta
    if not has_source:
        meta["rng"] = _fresh_rng(stored(meta, "rng", str), ranks.rank)
    commits = meta.get(COMMITS, sources[0].generation)
    rank_fields = {RANK: ranks.rank, WORLD: ranks.world, COMMITS: commits} if ranks.several else {}
    return {k: v for k, v in meta.items() if k not in (RANK, WORLD, COMMITS)} | rank_fields


def _fresh_rng(saved_state: str, rank: int) -> str:
    """Return an encoded random state for a new rank, derived from the encoded state of rank 0."""
    import torch  # Imported here, because nothing else in this module needs it.

    seed = int.from_bytes(hashlib.sha256(f"{rank} {saved_state}".encode()).digest()[:7])
    state = torch.Generator().manual_seed(seed).get_state()
    return base64.b64encode(state.numpy().tobytes()).decode()


@dataclass(frozen=True)
class _Span:
    """Elements [start, stop) of a group that lie in one chunk of one rank's store.

    The chunk begins at element `first` of the group and has `count` elements.
    """

    rank: int
    chunk: int
    start: int
    stop: int
    first: int
    count: int


class _Source:
    """The state of all groups, read from the stores of all old ranks."""

    def __init__(self, stores: Sequence[Store]) -> None:
        held = stored_model(stores[0].meta, stores[0].layout.regions)
        self._stores, self._world = stores, RankInfo(world=len(stores))
        self._groups, self._state_format = held.groups, held.state_format
        self._chunk_params, self._exact = held.chunk_params, held.exact
        self._gradients = any(region.scratch for region in stores[0].layout.regions)
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
            exact=self._exact,
        )

    def fill(self, target: Store, ranks: RankInfo) -> Iterator[int]:
        """Write a rank's shards of all groups, and yield the bytes of each chunk written."""
        out = aligned_buffer(target.layout.largest_chunk)
        for group in self._groups:
            cuts, begin = chunks(ranks.shard(group), self._chunk_params), ranks.start(group)
            weights = (StateArray("weights", self._state_format.dtype),)
            kinds: dict[str, tuple[StateArray, ...]] = {weight_key(group): weights}
            if not group.frozen:
                kinds[state_key(group)] = self._state_format.arrays
            if group.key in self._exact:
                kinds[exact_key(group)] = (EXACT_ARRAYS[self._state_format.name],)
            for (key, arrays), chunk in product(kinds.items(), cuts):
                piece = out[: target.layout.find(key, chunk.index).nbytes]
                piece[:] = 0  # zeros after the end of the group and after the last array
                low, high = begin + chunk.start, begin + chunk.stop
                # The last shard may extend past the end of the group.
                for span in self._spans(group, low, min(high, group.numel)):
                    data = self._read(span.rank, key, span.chunk)
                    target_offset = source_offset = (
                        0  # byte offsets of the array in the new and in the old chunk
                    )
                    for array in arrays:
                        size = array.size(span.stop - span.start)
                        to = target_offset + array.size(span.start - low)
                        at = source_offset + array.size(span.start - span.first)
                        piece[to : to + size] = data[at : at + size]
                        target_offset += array.size(high - low)
                        source_offset += array.size(span.count)
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
        """Return a chunk of an old store; the chunk that was read last is cached."""
        store = self._stores[rank]
        data = self._buffer[: store.layout.find(key, chunk).nbytes]
        if self._loaded != (rank, key, chunk):
            self._loaded = None
            store.wait(store.read(key, chunk, data))
            self._loaded = (rank, key, chunk)
        return data
