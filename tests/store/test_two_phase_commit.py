"""The stores of several ranks agree on one commit at every instant of a commit."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from lohan.errors import StoreError
from lohan.store.extents import Region
from lohan.store.files import MANIFEST, PREPARED
from lohan.store.io_engine import aligned_buffer
from lohan.store.manifest import COMMITS
from lohan.store.recovery import (
    CommitState,
    Recovery,
    apply_recovery,
    commit_state_of,
    recovery_actions,
)
from lohan.store.store import Store
from lohan.util.units import PAGE

KEEP, PROMOTE = Recovery.KEEP, Recovery.PROMOTE


def test_recovery_promotes_ranks_to_newest_commit():
    assert recovery_actions([CommitState(4, None), CommitState(4, 5)]) == (KEEP, KEEP)
    assert recovery_actions([CommitState(5, None), CommitState(4, 5)]) == (KEEP, PROMOTE)
    assert recovery_actions([CommitState(5, 6), CommitState(4, 5)]) == (KEEP, PROMOTE)
    assert recovery_actions([CommitState(None, 0), CommitState(0, None)]) == (PROMOTE, KEEP)
    assert recovery_actions([CommitState(None, 0), CommitState(None, None)]) is None


@pytest.mark.parametrize(
    "other", [CommitState(3, None), CommitState(3, 4), CommitState(None, None)]
)
def test_stores_of_different_moments_are_refused(other):
    with pytest.raises(StoreError, match="not belong to one step"):
        recovery_actions([CommitState(5, None), other])


def test_every_instant_of_a_run_is_agreed_on():
    """All ranks agree on one commit at every instant of a run."""
    places = []  # of one rank, in order: what its files say, and how many meetings it has passed
    for commit in range(3):
        places += [
            (CommitState(commit - 1 if commit else None, None), commit),
            (CommitState(commit - 1 if commit else None, commit), commit),
            (CommitState(commit - 1 if commit else None, commit), commit + 1),
            (CommitState(commit, None), commit + 1),
        ]
    for chosen in product(range(len(places)), repeat=3):
        ranks = [places[i] for i in chosen]
        # A rank that has passed a meeting: all have come to it.
        came = [met + (state.prepared == met) for state, met in ranks]
        if max(met for _, met in ranks) > min(came):
            continue
        actions = recovery_actions([state for state, _ in ranks])
        renamed = max(-1 if s.committed is None else s.committed for s, _ in ranks)
        assert (actions is None) == (renamed == -1)
        for (state, _), action in zip(ranks, actions or (), strict=False):
            stands = state.prepared if action is PROMOTE else state.committed
            assert stands == renamed


class Killed(BaseException):
    pass


def write(store: Store, value: int) -> None:
    data = aligned_buffer(PAGE)
    data[:] = value
    store.wait(store.write("w", 0, data))


def value_of(store: Store) -> int:
    data = aligned_buffer(PAGE)
    store.wait(store.read("w", 0, data))
    assert (data == data[0]).all()
    return int(data[0])


def test_rank_that_dies_at_the_barrier_leaves_a_common_commit(tmp_path: Path):
    """Rank 1 prepares, rank 0 has renamed: both stand at the step. Before that: at the last one."""
    meetings: list[str] = []

    def meet() -> None:
        meetings.append("met")

    stores = [
        Store.create(tmp_path / f"rank{r}", [Region("w", (PAGE,))], barrier=meet) for r in range(2)
    ]
    for store in stores:
        write(store, 1)
        store.commit({"step": 0})
        assert store.meta == {"step": 0, COMMITS: 0} and len(meetings) == 1
        meetings.clear()

    def dies() -> None:
        assert (stores[1].dirs[0] / PREPARED).exists(), "prepared before it is met"
        raise Killed

    for store in stores:
        write(store, 2)
    stores[0].commit({"step": 1})
    stores[1].barrier = dies
    with pytest.raises(Killed):
        stores[1].commit({"step": 1})
    for store in stores:
        store.close()
    primaries = [tmp_path / "rank0", tmp_path / "rank1"]
    states = [commit_state_of(path) for path in primaries]
    assert states == [CommitState(1, None), CommitState(0, 1)]
    actions = recovery_actions(states)
    assert actions == (KEEP, PROMOTE)
    for path, action in zip(primaries, actions, strict=True):
        apply_recovery(path, action)
        with Store.open(path) as store:
            assert value_of(store) == 2 and store.meta["step"] == 1
            assert not (path / PREPARED).exists()


def test_drops_generation_that_not_all_ranks_prepared(tmp_path: Path):
    path = tmp_path / "rank0"
    store = Store.create(path, [Region("w", (PAGE,))], barrier=lambda: None)
    write(store, 1)
    store.commit({"step": 0})

    def dies() -> None:
        raise Killed

    store.barrier = dies
    write(store, 2)
    with pytest.raises(Killed):
        store.commit({"step": 1})
    store.close()
    assert commit_state_of(path) == CommitState(0, 1)
    apply_recovery(path, KEEP)
    with Store.open(path, barrier=lambda: None) as store:
        assert value_of(store) == 1 and not (path / PREPARED).exists()
        write(store, 3)
        store.commit({"step": 1})
        assert store.meta[COMMITS] == 1


def test_commit_of_meta_alone_is_numbered(tmp_path: Path):
    """A skipped step changes no generation; ranks must still agree whether it was committed."""
    path = tmp_path / "rank0"
    with Store.create(path, [Region("w", (PAGE,))], barrier=lambda: None) as store:
        write(store, 1)
        store.commit({"step": 0})
        store.commit({"step": 1}, advance=False)
        assert (store.generation, store.meta[COMMITS]) == (0, 1)
    assert commit_state_of(path) == CommitState(1, None)


def test_store_with_a_prepared_commit_is_not_removed(tmp_path: Path):
    """Another rank may have seen that it was, and committed."""
    path = tmp_path / "rank0"

    def dies() -> None:
        raise Killed

    store = Store.create(path, [Region("w", (PAGE,))], barrier=dies)
    write(store, 1)
    with pytest.raises(Killed):
        store.commit({"step": 0})
    store.close()
    assert commit_state_of(path) == CommitState(None, 0) and not (path / MANIFEST).exists()
    apply_recovery(path, PROMOTE)
    with Store.open(path) as store:
        assert value_of(store) == 1


def test_alone_no_commit_is_prepared(tmp_path: Path):
    with Store.create(tmp_path / "s", [Region("w", (PAGE,))]) as store:
        write(store, 1)
        store.commit({"step": 0})
        assert store.meta == {"step": 0}
    assert not (tmp_path / "s" / PREPARED).exists()
