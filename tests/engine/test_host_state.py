"""State that is cached in host memory is written with every commit and read again after errors."""

from __future__ import annotations

import shutil

import pytest

import lohan
from lohan.store.admin import restore, snapshot
from tests.support.delayed_runs import (
    TIED_STEPS,
    PlanTuning,
    committed_bytes,
    finished_bytes,
    net_batches,
    open_tied_session,
    train_until,
    tune_plans,
)

MODES = [("optimized", 0.0), ("balanced", 0.0), ("balanced", 0.3)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return finished_bytes(tmp_path_factory.mktemp("all"))


def state_bytes(session: lohan.Session) -> int:
    return sum(sum(r.chunks) for r in session.store.layout.regions if not r.scratch)


@pytest.mark.parametrize(("mode", "clip"), MODES)
@pytest.mark.parametrize("cached", [0.4, 1.0])
def test_every_committed_step_is_on_disk(cached, mode, clip, tmp_path, monkeypatch):
    """A process that loses its memory after any step continues from that step."""
    tune_plans(monkeypatch, PlanTuning(cached=cached))
    options = {"update_mode": mode, "clip": clip}
    session = open_tied_session(tmp_path / "run", **options)
    reference = None
    for step in range(1, TIED_STEPS + 1):
        before = session.store.counters.bytes_written
        train_until(session, until=step)
        session.flush()
        spilled = sum(sum(r.chunks) for r in session.store.layout.regions if r.scratch)
        assert session.store.counters.bytes_written - before >= state_bytes(session)
        assert session.store.counters.bytes_written - before <= state_bytes(session) + spilled
        if step in (2, 3):  # as a crash leaves it: nothing was closed
            shutil.copytree(tmp_path / "run" / "lohan-store", tmp_path / str(step) / "lohan-store")
    reference = committed_bytes(session)
    session.close()
    for step in (2, 3):
        with open_tied_session(tmp_path / str(step), resume=True, **options) as again:
            assert again.step == step
            train_until(again)
            assert committed_bytes(again) == reference


def test_snapshot_and_restore(tmp_path, monkeypatch, expected):
    tune_plans(monkeypatch, PlanTuning(cached=1.0))
    with open_tied_session(tmp_path / "run") as session:
        train_until(session, until=2)
        session.commit()
        snapshot(session.store, tmp_path / "snapshots")
        train_until(session, until=4)
    shutil.rmtree(tmp_path / "run" / "lohan-store")
    restore(tmp_path / "snapshots", [tmp_path / "run" / "lohan-store"], durability="step").close()
    with open_tied_session(tmp_path / "run", resume=True) as session:
        assert session.step == 2
        train_until(session)
        assert committed_bytes(session) == expected


class Broken(Exception):
    pass


def fail_once(session: lohan.Session, *, where: str) -> None:
    """Raise an error in the user's code, in forward or in the middle of backward."""
    block = session.model.blocks[1]

    def forward(module, args, out):
        if where == "forward":
            raise Broken
        out.register_hook(broken)

    def broken(grad):
        raise Broken

    handle = block.register_forward_hook(forward)
    with pytest.raises(Broken):
        session.model(**net_batches(TIED_STEPS)[session.step]).backward()
    handle.remove()


@pytest.mark.parametrize("cached", [0.0, 0.5, 1.0])
def test_an_error_in_forward_costs_nothing(cached, tmp_path, monkeypatch, expected):
    tune_plans(monkeypatch, PlanTuning(cached=cached))
    with open_tied_session(tmp_path, update_mode="optimized") as session:
        train_until(session, until=3)
        session.flush()
        fail_once(session, where="forward")
        assert session.step == 3
        train_until(session)
        assert committed_bytes(session) == expected


def test_an_error_in_backward_is_undone(tmp_path, monkeypatch, expected):
    tune_plans(monkeypatch, PlanTuning(cached=0.5))
    with open_tied_session(tmp_path) as session:
        train_until(session, until=2)
        fail_once(session, where="backward")
        assert session.step <= 2
        train_until(session)
        assert committed_bytes(session) == expected
