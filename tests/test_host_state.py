"""State that stays in host memory: durability "step" writes it through, "checkpoint" writes it at
snapshots and at a clean stop only."""

from __future__ import annotations

import shutil
from functools import partial

import pytest

import lohan
from lohan.errors import StoreError
from lohan.store.admin import describe, restore, snapshot
from tests.support import tied_sessions
from tests.support.delayed_runs import Tuning, data, tuned
from tests.support.tied_sessions import STEPS, contents, finished, go_on

MODES = [("optimized", 0.0), ("balanced", 0.0), ("balanced", 0.3)]
opened = partial(tied_sessions.opened, durability="checkpoint")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return finished(tmp_path_factory.mktemp("all"))


def written(session: lohan.Session) -> int:
    session.flush()
    return session.store.counters.bytes_written


def state_bytes(session: lohan.Session) -> int:
    return sum(sum(r.chunks) for r in session.store.regions if not r.scratch)


@pytest.mark.parametrize(("mode", "clip"), MODES)
@pytest.mark.parametrize("cached", [0.4, 1.0])
def test_every_committed_step_is_on_disk(cached, mode, clip, tmp_path, monkeypatch):
    """durability = step: a process that dies after any step, with everything in memory lost, goes
    on from that step."""
    tuned(monkeypatch, Tuning(cached=cached))
    options = {"durability": "step", "update_mode": mode, "clip": clip}
    session = opened(tmp_path / "run", **options)
    reference = None
    for step in range(1, STEPS + 1):
        before = session.store.counters.bytes_written
        go_on(session, until=step)
        session.flush()
        spilled = sum(sum(r.chunks) for r in session.store.regions if r.scratch)
        assert session.store.counters.bytes_written - before >= state_bytes(session)
        assert session.store.counters.bytes_written - before <= state_bytes(session) + spilled
        if step in (2, 3):  # as a crash leaves it: nothing was closed
            shutil.copytree(tmp_path / "run" / "lohan-store", tmp_path / str(step) / "lohan-store")
    reference = contents(session)
    session.close()
    for step in (2, 3):
        with opened(tmp_path / str(step), resume=True, **options) as again:
            assert again.step == step
            go_on(again)
            assert contents(again) == reference


@pytest.mark.parametrize(("mode", "clip"), MODES)
def test_nothing_is_written_until_a_clean_stop(mode, clip, tmp_path, monkeypatch, expected):
    """durability = checkpoint, everything in memory."""
    tuned(monkeypatch, Tuning(cached=1.0, spilled=0.0))
    with opened(tmp_path, update_mode=mode, clip=clip) as session:
        first = written(session)
        go_on(session, until=3)
        assert written(session) == first
        assert describe(tmp_path / "lohan-store")["meta"]["progress"]["step"] == 0
        session.commit()
        assert written(session) == first + state_bytes(session)
        go_on(session, until=4)
        assert written(session) == first + state_bytes(session)
    facts = describe(tmp_path / "lohan-store")
    assert facts["state"] == "clean" and facts["meta"]["progress"]["step"] == 4
    with opened(tmp_path, resume=True, update_mode=mode, clip=clip) as session:
        assert session.step == 4
        go_on(session)
        if not clip:
            assert contents(session) == expected


def test_only_what_is_not_in_memory_is_written(tmp_path, monkeypatch, expected):
    """A chunk stays unwritten only if both its weights and its state are in memory."""
    tuned(monkeypatch, Tuning(cached=0.5))
    with opened(tmp_path) as session:
        first = written(session)
        go_on(session, until=2)
        step = (written(session) - first) // 2
        shape = session.executor.spec
        stays = [(g, c) for g, c in shape.host_cached_state if g in shape.host_cached_weights]
        assert stays
        assert 0 < step < state_bytes(session)
        go_on(session)
        assert contents(session) == expected


def test_snapshot_and_restore(tmp_path, monkeypatch, expected):
    tuned(monkeypatch, Tuning(cached=1.0))
    with opened(tmp_path / "run") as session:
        go_on(session, until=2)
        session.commit()
        snapshot(session.store, tmp_path / "snapshots")
        go_on(session, until=4)
    shutil.rmtree(tmp_path / "run" / "lohan-store")
    restore(tmp_path / "snapshots", [tmp_path / "run" / "lohan-store"]).close()
    with opened(tmp_path / "run", resume=True) as session:
        assert session.step == 2
        go_on(session)
        assert contents(session) == expected


class Broken(Exception):
    pass


def fail_once(session: lohan.Session, *, where: str) -> None:
    """An error in the user's own code, in forward or in the middle of backward."""
    block = session.model.blocks[1]

    def forward(module, args, out):
        if where == "forward":
            raise Broken
        out.register_hook(broken)

    def broken(grad):
        raise Broken

    handle = block.register_forward_hook(forward)
    with pytest.raises(Broken):
        session.model(**data(STEPS)[session.step]).backward()
    handle.remove()


@pytest.mark.parametrize("cached", [0.0, 0.5, 1.0])
def test_an_error_in_forward_costs_nothing(cached, tmp_path, monkeypatch, expected):
    """The SSD is behind what is in memory: nothing may be read back from it."""
    tuned(monkeypatch, Tuning(cached=cached))
    with opened(tmp_path, update_mode="optimized") as session:
        go_on(session, until=3)
        session.flush()
        fail_once(session, where="forward")
        assert session.step == 3
        go_on(session)
        assert contents(session) == expected


@pytest.mark.parametrize("cached", [0.0, 0.5, 1.0])
def test_an_error_in_backward_cannot_be_undone_in_place(cached, tmp_path, monkeypatch, expected):
    """Some blocks are updated, some are not, and no copy of the step before exists but the one of
    the last clean stop: the session says so, and does not overwrite that."""
    tuned(monkeypatch, Tuning(cached=cached))
    session = opened(tmp_path, update_mode="optimized")
    go_on(session, until=2)
    session.commit()
    fail_once(session, where="backward")
    with pytest.raises(StoreError, match="did not finish"):
        go_on(session)
    with pytest.raises(StoreError, match="did not finish"):
        session.commit()
    session.close(flush=False)
    if cached == 1.0:  # nothing was written in place
        with opened(tmp_path, resume=True) as session:
            assert session.step == 2
            go_on(session)
            assert contents(session) == expected
    else:
        assert describe(tmp_path / "lohan-store")["state"] == "not clean"


def test_an_error_in_backward_is_undone_where_steps_are_durable(tmp_path, monkeypatch, expected):
    tuned(monkeypatch, Tuning(cached=0.5))
    with opened(tmp_path, durability="step") as session:
        go_on(session, until=2)
        fail_once(session, where="backward")
        assert session.step <= 2
        go_on(session)
        assert contents(session) == expected
