"""Resharding keeps the state for any number of ranks, even if it is interrupted."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lohan.checkpoint import resharding
from lohan.checkpoint.resharding import (
    current_set,
    find_sets,
    open_set,
    reshard,
    reshard_to_world,
    set_of,
)
from lohan.checkpoint.train_state import restore_rng
from lohan.device.base import CpuDevice
from lohan.errors import StoreError
from lohan.model.layout import (
    FROZEN,
    GROUP_ALIGN,
    RESIDENT,
    Blocks,
    FlatGroup,
    RankInfo,
    TensorSpec,
)
from lohan.model.state import EXACT_ARRAYS, regions, state_format_of
from lohan.optim import StateKind
from lohan.store.files import MANIFEST, PREPARED
from lohan.store.io_engine import aligned_buffer
from lohan.store.manifest import COMMITS
from lohan.store.recovery import commit_state_of
from lohan.store.store import Store

CHUNK = 3 * GROUP_ALIGN
# Pieces that end inside a chunk, in the padding, and ranks that have nothing but padding.
SIZES = {"embed": 7, "block.0": 20, "block.1": 20, "block.1" + FROZEN: 5, RESIDENT: 1}


def groups():
    created = []
    for key, units in SIZES.items():
        numel = units * GROUP_ALIGN
        frozen = key.endswith(FROZEN)
        spec = TensorSpec(f"{key}.weight", (numel - 100,), 0, numel - 100, True, not frozen)
        created.append(FlatGroup(key, (spec,), numel))
    return tuple(created)


DEFAULT = StateKind()


def make_store(places: list[Path], name: str, *, step: int = 4, kind: StateKind = DEFAULT) -> None:
    """Create the store of one rank with random bytes; zeros fill the last page of state chunks."""
    random, state_format = np.random.default_rng(7), state_format_of(name, kind)
    exact = [key for key in SIZES if key.endswith(FROZEN) and name in EXACT_ARRAYS]
    result = regions(
        groups(), state_format=state_format, chunk_params=CHUNK, gradients=True, exact=exact
    )
    used = {
        state_format.state_size(n): sum(array.size(n) for array in state_format.arrays)
        for n in range(GROUP_ALIGN, CHUNK + 1, GROUP_ALIGN)
    }
    with Store.create(places, result, first_generation=3) as store:
        for extent in store.layout.durable:
            buffer = aligned_buffer(extent.nbytes)
            buffer[:] = random.integers(0, 256, extent.nbytes, dtype=np.uint8)
            if extent.key.startswith("s/"):
                buffer[used[extent.nbytes] :] = 0
            store.wait(store.write(extent.key, extent.chunk, buffer))
        layout = Blocks(groups(), (), ()).to_json()
        store.commit(
            {
                "mode": name,
                "chunk_params": CHUNK,
                "layout": layout,
                "progress": {"step": step},
                "kind": asdict(kind),
                "rng": "r0",
            }
        )


def content(place: Path) -> dict[tuple[str, int], bytes]:
    collected = {}
    with Store.open(place) as store:
        for extent in store.layout.durable:
            buffer = aligned_buffer(extent.nbytes)
            store.wait(store.read(extent.key, extent.chunk, buffer))
            collected[extent.key, extent.chunk] = buffer.tobytes()
    return collected


@pytest.fixture
def places(tmp_path):
    """Return the folders of two drives."""
    return lambda rank: [tmp_path / "a", tmp_path / "b"]


def make_run(places, dtype: str = "bf16", **facts) -> None:
    make_store([place / "run" for place in places(0)], dtype, **facts)


def dirs_of(places, world: int) -> list[Path]:
    return set_of(places, "run", world).primaries


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        ("fp32", DEFAULT),
        ("bf16", DEFAULT),
        ("fp16", DEFAULT),
        ("bf16", StateKind("adamw", "int8")),
    ],
)
def test_resharding_over_several_worlds_keeps_every_byte(places, dtype, kind):
    make_run(places, dtype, kind=kind)
    before = content(places(0)[0] / "run")
    seen = []
    for world in (3, 2, 1):
        reshard_to_world(
            places, "run", world, progress=lambda done, total: seen.append(done / total)
        )
        assert seen == sorted(seen) and seen[-1] == 1.0, world
        seen.clear()
        assert [item.world for item in find_sets(places, "run")] == [world]
    assert content(places(0)[0] / "run") == before


def test_every_rank_has_its_piece_of_every_group(places):
    make_run(places, "fp32")
    whole = content(places(0)[0] / "run")
    reshard_to_world(places, "run", 3)
    for group in groups():
        flat = b"".join(data for (key, _), data in sorted(whole.items()) if key == f"w/{group.key}")
        pieces = [content(dirs) for dirs in dirs_of(places, 3)]
        joined = b"".join(
            data
            for piece in pieces
            for (key, _), data in sorted(piece.items())
            if key == f"w/{group.key}"
        )
        assert len(joined) == 4 * RankInfo(world=3).padded(group)
        assert joined[: len(flat)] == flat and not any(joined[len(flat) :])


def test_manifests_record_rank_and_step(places):
    make_run(places, step=9)
    reshard_to_world(places, "run", 2)
    with open_set(set_of(places, "run", 2)) as stores:
        metas = [store.meta for store in stores]
        assert [meta["rank"] for meta in metas] == [0, 1]
        assert {meta["world"] for meta in metas} == {2}
        assert {meta["progress"]["step"] for meta in metas} == {9}
        assert len({meta[COMMITS] for meta in metas}) == 1
        assert {store.generation for store in stores} == {3}
        assert all(any(region.scratch for region in store.layout.regions) for store in stores)
        assert metas[0]["rng"] == "r0" != metas[1]["rng"]
        with torch.random.fork_rng():
            restore_rng(metas[1], CpuDevice())  # is one that torch takes
    reshard_to_world(places, "run", 1)
    with Store.open([place / "run" for place in places(0)]) as store:
        assert not {"rank", "world", COMMITS} & set(store.meta)
        assert store.meta["progress"] == {"step": 9} and store.generation == 3


KILLED = 9


@pytest.mark.parametrize("after", ["fill", "one commit", "all commits", "part of the removal"])
def test_a_death_on_the_way_leaves_one_whole_set_and_the_next_attempt_ends(
    places, after, monkeypatch
):
    make_run(places)
    before = content(places(0)[0] / "run")
    reshard_to_world(places, "run", 2)
    child = os.fork()
    if not child:
        _die(monkeypatch, after)
        reshard_to_world(places, "run", 3)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED
    now = current_set(find_sets(places, "run"))
    assert now is not None and now.world in (2, 3) and now.step() == 4
    reshard_to_world(places, "run", 3)
    assert [item.world for item in find_sets(places, "run")] == [3]
    reshard_to_world(places, "run", 1)
    assert content(places(0)[0] / "run") == before


def _die(patched, after: str) -> None:
    commits = 0
    commit, remove = Store.commit, resharding.StoreSet.remove

    def counted(store, meta, **how):
        nonlocal commits
        if after == "fill" or (after == "one commit" and commits == 1):
            os._exit(KILLED)
        commits += 1
        commit(store, meta, **how)

    def removing(stores):
        if stores.world == 2:
            if after == "part of the removal":
                remove(replace(stores, dirs=stores.dirs[1:]))
            os._exit(KILLED)
        remove(stores)

    patched.setattr(Store, "commit", counted)
    if after in ("all commits", "part of the removal"):
        patched.setattr(resharding.StoreSet, "remove", removing)


def test_prefers_the_complete_set_with_more_steps(places, tmp_path):
    make_run(places, step=4)
    reshard(set_of(places, "run", 1), set_of(places, "run", 2))
    sets = find_sets(places, "run")
    assert current_set(sets, wanted=1).world == 1
    assert current_set(sets, wanted=2).world == 2
    with open_set(set_of(places, "run", 2)) as stores:
        metas = [store.meta for store in stores]
    for dirs, meta in zip(set_of(places, "run", 2).dirs, metas, strict=True):
        with Store.open(dirs) as store:
            store.commit({**meta, "progress": {"step": 5}}, advance=False)
    assert current_set(find_sets(places, "run"), wanted=1).world == 2


def test_a_commit_that_one_rank_has_finished_is_finished_for_all(places):
    make_run(places)
    reshard_to_world(places, "run", 2)
    first, second = dirs_of(places, 2)
    _two_phase_commit(first, step=5)
    _two_phase_commit(second, step=5)
    (second / MANIFEST).rename(second / PREPARED)  # it died just before its own rename
    actual = current_set(find_sets(places, "run"))
    assert actual is not None and actual.step() == 5
    with open_set(actual) as stores:
        assert [store.meta["progress"]["step"] for store in stores] == [5, 5]
    assert commit_state_of(second).prepared is None


def _two_phase_commit(primary: Path, *, step: int) -> None:
    with Store.open(primary, barrier=lambda: None) as store:
        store.commit({**store.meta, "progress": {"step": step}}, advance=False)


def test_stores_on_other_machines_are_named(places):
    make_run(places)
    reshard_to_world(places, "run", 3)
    replace(set_of(places, "run", 3), dirs=set_of(places, "run", 3).dirs[1:2]).remove()
    with pytest.raises(StoreError, match=r"3 ranks cannot be resharded for 2: .* rank 1"):
        reshard_to_world(places, "run", 2)
    reshard_to_world(places, "run", 3)  # those who have the others will open them
    assert len(find_sets(places, "run")) == 1
    with (
        pytest.raises(StoreError, match="rank 1 of 3 has no store at"),
        open_set(set_of(places, "run", 3)),
    ):
        pass


def test_a_store_in_use_is_not_touched(places):
    make_run(places)
    reshard_to_world(places, "run", 2)
    with (
        Store.open(dirs_of(places, 2)[1]),
        pytest.raises(StoreError, match="in use by process"),
    ):
        reshard_to_world(places, "run", 1)
    assert current_set(find_sets(places, "run")).world == 2
