"""Inject a second fault into the recovery of a session.

A session continues when the recovery is repeated, or refuses to. Wrong weights are never trained
on, committed or returned.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lohan
from lohan.checkpoint.train_state import KEY
from lohan.engine.buffers import HostPool
from lohan.engine.executor import Executor
from lohan.errors import LohanError, StorageIOError, StoreError
from lohan.schedule.actions import Action
from lohan.store.admin import describe
from lohan.store.io_engine import open_engine
from lohan.store.store import Store
from tests.support import HANG_S
from tests.support.delayed_runs import (
    TIED_STEPS,
    PlanTuning,
    committed_bytes,
    delay_actions,
    finished_bytes,
    net_batches,
    open_tied_session,
    train_until,
    tune_plans,
)
from tests.support.faults import InjectedError, NumberedEngine, NumberedFaults
from tests.support.generated_cases import each_value


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return finished_bytes(tmp_path_factory.mktemp("all"))


class Broken(Exception):
    pass


@contextmanager
def breaking(session: lohan.Session) -> Iterator[None]:
    """Fail in the middle of backward, in the user's code."""

    def broken(grad: torch.Tensor) -> None:
        raise Broken

    def forward(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        out.register_hook(broken)

    handle = session.model.blocks[1].register_forward_hook(forward)
    try:
        yield
    finally:
        handle.remove()


# -- a roll-back that fails -----------------------------------------------------------------------


@pytest.mark.parametrize("error", [StorageIOError("no"), KeyboardInterrupt()])
def test_failed_roll_back_blocks_further_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, expected: Any
) -> None:
    tune_plans(monkeypatch, PlanTuning(cached=1.0))
    session = open_tied_session(tmp_path, update_mode="optimized", overlap=False)
    train_until(session, until=2)

    def fails() -> None:
        raise error

    with breaking(session), pytest.raises(Broken):
        session.model(**net_batches(TIED_STEPS)[2]).backward()
    with monkeypatch.context() as patch:  # the next forward rolls it back
        patch.setattr(type(session.executor.runner), "load_host_cached", lambda runner: fails())
        with pytest.raises((StoreError, KeyboardInterrupt)):
            train_until(session)
    for use in (
        lambda: train_until(session),
        session.flush,
        session.commit,
        lambda: session.export(tmp_path / "out"),
        lambda: session.follow(session.plan),
    ):
        with pytest.raises(StoreError, match=r"roll.*close the session and resume"):
            use()
    session.close()
    with open_tied_session(tmp_path, resume=True) as again:
        assert again.step == 2
        train_until(again)
        assert committed_bytes(again) == expected


# -- a step that fails while the one before it is not committed yet -------------------------------


def commit_late(session: lohan.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Delay a commit until some time after the step is abandoned."""
    go, abort = threading.Event(), Executor.abort_step

    def delay(action: Action) -> None:
        if action.kind == "C":
            go.wait(HANG_S)

    def given_up(executor: Executor) -> None:
        threading.Timer(0.1, go.set).start()
        abort(executor)

    delay_actions(session, delay)
    monkeypatch.setattr(Executor, "abort_step", given_up)


@pytest.mark.parametrize("closed", [False, True])
def test_a_finished_step_is_committed_when_the_next_one_fails(
    closed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: Any
) -> None:
    """The error is in the user's own code, between two blocks of backward."""
    tune_plans(monkeypatch, PlanTuning(cached=1.0))  # so that compute need not wait for reads
    session = open_tied_session(tmp_path, clip=0.0)
    train_until(session, until=2)
    session.flush()
    commit_late(session, monkeypatch)
    train_until(session, until=3)
    if closed:
        with pytest.raises(Broken), session, breaking(session):
            session.model(**net_batches(TIED_STEPS)[3]).backward()
        session = open_tied_session(tmp_path, clip=0.0, resume=True)
    else:
        with breaking(session), pytest.raises(Broken):
            session.model(**net_batches(TIED_STEPS)[3]).backward()
        session.model(**net_batches(TIED_STEPS)[3])  # gives up what broke off
    with session:
        assert session.step == 3
        train_until(session)
        assert committed_bytes(session) == expected


def test_warns_of_a_finished_step_that_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune_plans(monkeypatch, PlanTuning())
    session = open_tied_session(tmp_path, clip=1e9)
    train_until(session, until=2)
    session.flush()

    def fails(action: Action) -> None:
        if action.kind == "C":
            raise StorageIOError("no")

    delay_actions(session, fails)
    train_until(session, until=3)
    with (
        pytest.warns(UserWarning, match="training continues after step 2"),
        pytest.raises(StorageIOError),
    ):
        session.flush()
    session.close()


# -- buffers --------------------------------------------------------------------------------------


class Counting(nn.Module):
    """A module with one buffer that changes early and another that changes late."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("early", torch.zeros(1))
        self.register_buffer("late", torch.zeros(1))
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, now: str) -> torch.Tensor:
        getattr(self, now).add_(1)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("how", ["resume", "follow"])
def test_a_committed_buffer_stays_committed(tmp_path: Path, how: str) -> None:
    def counting(**options: Any) -> lohan.Session:
        torch.manual_seed(0)
        budget = lohan.Budget(host="64MiB", ssd=[tmp_path])
        return lohan.attach(Counting(), optimizer=lohan.AdamW(), budget=budget, **options)

    session = counting()
    session.model(torch.ones(2, 4), "early").backward()
    if how == "resume":
        session.close()
        session = counting(resume=True)
    else:
        session.follow(session.plan)
    session.model(torch.ones(2, 4), "late").backward()
    session.flush()
    assert session.store.meta[KEY].keys() == {"early", "late"}
    session.close()
    with counting(resume=True) as again:
        assert (again.model.early, again.model.late) == (1, 1)


# -- a change of plan that fails ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "for_good"),
    each_value([torch.OutOfMemoryError("no"), KeyboardInterrupt(), MemoryError()], [False, True]),
)
def test_a_plan_that_cannot_be_followed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    for_good: bool,
    expected: Any,
) -> None:
    tune_plans(monkeypatch, PlanTuning(cached=0.5))
    session = open_tied_session(tmp_path)
    train_until(session, until=2)
    with monkeypatch.context() as patch:
        real, tries = session.execution._make_executor, 0

        def run(plan: Any) -> Any:
            nonlocal tries
            tries += 1
            if tries == 1 or for_good:
                raise error
            return real(plan)

        patch.setattr(session.execution, "_make_executor", run)
        with pytest.raises(type(error)):
            session.follow(session.plan)
    if not for_good:
        train_until(session)
        assert committed_bytes(session) == expected
        session.close()
        return
    for use in (session.flush, session.commit, lambda: session.step, lambda: session.plan):
        with pytest.raises(StoreError, match=r"no plan.*close the session and resume"):
            use()
    assert [row["progress"]["step"] for row in session.take_finished()] == [1, 2]
    session.close()
    with open_tied_session(tmp_path, resume=True) as again:
        train_until(again)
        assert committed_bytes(again) == expected


def test_failed_plan_leaves_the_model_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: Any
) -> None:
    """The new executor had taken the model over when its memory turned out too small."""

    def fails(*given: Any) -> None:
        raise MemoryError

    tune_plans(monkeypatch, PlanTuning(cached=0.5))
    with open_tied_session(tmp_path) as session:
        train_until(session, until=2)
        with monkeypatch.context() as patch:
            calls = chain([fails], repeat(HostPool.ledger))
            patch.setattr(HostPool, "ledger", lambda *given: next(calls)(*given))
            with pytest.raises(MemoryError):
                session.follow(session.plan)
        hooks = session.model._forward_pre_hooks
        assert len(hooks) == 1
        train_until(session)
        assert committed_bytes(session) == expected


# -- errors between two steps ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cached", "when"),
    each_value([0.0, 0.5, 1.0], ["between", "after forward", "in backward"]),
)
def test_an_error_between_two_steps_leaves_a_whole_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: float, when: str, expected: Any
) -> None:
    tune_plans(monkeypatch, PlanTuning(cached=cached))
    with pytest.raises(Broken), open_tied_session(tmp_path) as session:
        train_until(session, until=3)
        if when == "in backward":
            with breaking(session):
                session.model(**net_batches(TIED_STEPS)[3]).backward()
        if when == "after forward":
            session.model(**net_batches(TIED_STEPS)[3])
        raise Broken
    facts = describe(tmp_path / "lohan-store")
    assert facts["state"] == "clean" and facts["meta"]["progress"]["step"] == 3
    with open_tied_session(tmp_path, resume=True) as again:
        train_until(again)
        assert committed_bytes(again) == expected


# -- activations of killed sessions ---------------------------------------------------------------


def test_activations_of_a_killed_session_go_at_the_next_open(tmp_path: Path) -> None:
    from tests.support.stores import REGIONS

    open_tied_session(tmp_path).close()
    left = Store.create(tmp_path / "lohan-store-activations", REGIONS, engine="threads")
    left._store_lock.release()  # as a killed process
    with open_tied_session(tmp_path, resume=True):
        assert [p.name for p in tmp_path.iterdir()] == ["lohan-store"]


# -- a second fault at every call -----------------------------------------------------------------


def abort(session: lohan.Session, arm: Callable[[], None]) -> None:
    with breaking(session), suppress(Broken):
        session.model(**net_batches(TIED_STEPS)[2]).backward()
    arm()
    session.flush()  # rolls it back


def follow(session: lohan.Session, arm: Callable[[], None]) -> None:
    arm()
    session.follow(replace(session.plan, overlap=False))


def close(session: lohan.Session, arm: Callable[[], None]) -> None:
    arm()
    session.close()


OPERATIONS = {"abort": abort, "follow": follow, "close": close}


def hit(
    start: Path,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    operation: str,
    at: int,
    error: InjectedError,
    expected: dict[str, bytes],
) -> str | None:
    """Run a session of two steps whose `operation` fails at its n-th call; return the outcome.

    None means that there was no such call.
    """
    shutil.copytree(start, place)
    engine = NumberedEngine(open_engine("threads"))
    session = open_tied_session(place, engine=engine, overlap=False, resume=True)
    train_until(session, until=2)
    faults = engine.faults = NumberedFaults(at=at, error=error)
    met: BaseException | None = None
    with pytest.MonkeyPatch.context() as patch:
        armed = faults.armed(patch)
        try:
            OPERATIONS[operation](session, armed.__enter__)
        except (LohanError, OSError, KeyboardInterrupt) as caught:
            met = caught
        finally:
            armed.__exit__(None, None, None)
    if met is None and not faults.reached:
        session.close()
        engine.close()
        return None
    outcome = "went on"
    if operation != "close":
        try:
            train_until(session)
            assert committed_bytes(session) == expected
        except LohanError:
            outcome = "refused"
    try:
        session.close()
    except LohanError:
        outcome = "refused"
        session.close(flush=False)
    engine.close()
    with open_tied_session(place, resume=True) as again:
        train_until(again)
        assert committed_bytes(again) == expected
    return outcome


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tune_plans(monkeypatch, PlanTuning(cached=0.5))
    open_tied_session(tmp_path / "start").close()
    return tmp_path / "start"


def campaign(
    start: Path,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    stride: int,
    error: InjectedError,
    first: int,
    **case: Any,
) -> dict[str, int]:
    tally: dict[str, int] = {}
    at = first
    while True:
        run = place / f"run{at}"
        outcome = hit(start, run, monkeypatch, at=at, error=error, **case)
        shutil.rmtree(run)
        if outcome is None:
            return tally
        tally[outcome] = tally.get(outcome, 0) + 1
        at += stride


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_second_fault(
    operation: str,
    start: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    expected: dict[str, bytes],
) -> None:
    stride = 97 if operation == "follow" else 31
    for error, first in ((OSError, 1), (KeyboardInterrupt, 6)):
        tally = campaign(
            start,
            tmp_path,
            monkeypatch,
            operation=operation,
            expected=expected,
            stride=stride,
            error=error,
            first=first,
        )
        assert tally or first > 1, "nothing was hit"


@pytest.mark.slow
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_second_fault_at_every_call(
    operation: str,
    error: InjectedError,
    start: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    expected: dict[str, bytes],
) -> None:
    tally = campaign(
        start,
        tmp_path,
        monkeypatch,
        operation=operation,
        expected=expected,
        stride=1,
        error=error,
        first=1,
    )
    print(f"{operation}, {error.__name__}: {tally}")
    assert tally
