"""Commits by interval change no bit.

The committed generation stays as it is until the next commit.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lohan
from lohan.device.emulated import EmulatedDevice
from lohan.device.ranks import ALONE
from lohan.engine.step import SETTLING_STEPS, CommitClock
from lohan.store.io_engine import aligned_buffer
from lohan.store.store import Store
from lohan.util.units import Interval, MiB
from tests.support import forked_commands, ranks
from tests.support.delayed_runs import (
    DROPOUT_CASE,
    HALF_CASE,
    LLAMA_CASE,
    PLAIN_CASE,
    TIED_CASE,
    PlanTuning,
    RunResult,
    SpeculationCase,
    memory_engine,
    net_batches,
    small_net,
    train_with_delays,
    tune_plans,
)
from tests.support.forked_commands import tiny_arguments, tiny_result, write_tiny_inputs
from tests.support.models import attached, stored_bytes


def budget(place: Path, every: str | int) -> lohan.Budget:
    return lohan.Budget(host="256MiB", ssd=[place], commit_every=every)


# -- exactness --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "tuning", "every"),
    [
        (PLAIN_CASE, PlanTuning(cached=0.4, spilled=0.0), 3),
        (TIED_CASE, PlanTuning(cached=1.0, spilled=0.0, own_thread=True), 5),
        pytest.param(LLAMA_CASE, PlanTuning(ring=1, slots=0, window=0), 4, marks=pytest.mark.slow),
        pytest.param(
            DROPOUT_CASE, PlanTuning(cached=0.4, spilled=0.5), 100, marks=pytest.mark.slow
        ),
        (HALF_CASE, PlanTuning(cached=0.4), 3),
        (TIED_CASE, PlanTuning(spilled=1.0, ring=1, slots=0, window=0), 5),
        (LLAMA_CASE, PlanTuning(cached=0.2, spilled=0.0, own_thread=True), 4),
    ],
)
def test_commit_interval_changes_no_bit(
    case: SpeculationCase, tuning, every, tmp_path, monkeypatch
):
    """Lanes are delayed, norms cross the limit, and some fp16 steps overflow."""
    limit, expected = case.waiting
    tune_plans(monkeypatch, tuning)
    result = train_with_delays(
        case.model(),
        case.data(),
        tmp_path,
        seed=3,
        clip=limit,
        micro_batch=case.micro_batch,
        scale=case.scales.__getitem__,
        budget=budget(tmp_path, every),
    )
    result.check(expected)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """Train without clipping and overlap, with every step committed."""
    with pytest.MonkeyPatch.context() as patch:
        tune_plans(patch, PlanTuning())
        return train_with_delays(
            small_net(), net_batches(8), tmp_path_factory.mktemp("plain"), overlap=False
        )


@pytest.mark.parametrize("mode", ["serial", "naive", "optimized", "balanced"])
def test_commit_interval_changes_no_bit_without_clipping(mode, plain, tmp_path, monkeypatch):
    """Updates run in backward, in place; on a device in one of the modes."""
    tune_plans(monkeypatch, PlanTuning(cached=0.4, device_slots=1))
    more = {"device": EmulatedDevice(64 * MiB)} if mode == "balanced" else {}
    result = train_with_delays(
        small_net(),
        net_batches(8),
        tmp_path,
        seed=5,
        update_mode=mode,
        budget=budget(tmp_path, 3),
        **more,
    )
    replace(result, norms=plain.norms).check(plain)  # serial ones have the norm too


def test_steps_between_commits_change_no_committed_byte(tmp_path, monkeypatch):
    """Steps between two commits do not change a byte of the committed generation.

    What stays in memory is not written in these steps.
    """
    tune_plans(monkeypatch, PlanTuning(cached=0.5, spilled=0.0))
    model, engine = small_net(), memory_engine()
    seen: list[tuple[int, bytes]] = []
    written: list[int] = []
    with attached(model, tmp_path, clip=1.0, budget=budget(tmp_path, 3), engine=engine) as session:
        for batch in net_batches(9):
            before = session.counters.bytes_written
            model(**batch).backward()
            session.flush()
            written.append(session.counters.bytes_written - before)
            seen.append((session.store.meta["progress"]["step"], committed_bytes(session)))
        assert [step for step, _ in seen] == [1, 2, 2, 2, 5, 5, 5, 8, 8]
        for (step, item), (next_step, then) in pairwise(seen):
            assert (item == then) is (step == next_step)
        assert written[2] == written[3] == written[5] < 0.8 * written[1] == 0.8 * written[4]
        session.commit()
        assert session.store.meta["progress"]["step"] == 9


def committed_bytes(session: lohan.Session) -> bytes:
    """Return what a crash would leave of a streamed group and of a cached one."""
    store = session.store
    created = []
    for region in store.layout.regions:
        if not region.scratch:
            buffer = aligned_buffer(region.chunks[0])
            store.wait(store.read(region.key, 0, buffer))
            created.append(buffer.tobytes())
    return b"".join(created)


# -- going back -------------------------------------------------------------------------------


def go_on(session: lohan.Session, batches: list[Any], until: int) -> None:
    while session.step < until:
        session.model(**batches[session.step]).backward()


def test_a_session_that_is_dropped_resumes_from_its_last_commit(plain, tmp_path, monkeypatch):
    tune_plans(monkeypatch, PlanTuning(cached=0.5))
    session = attached(small_net(), tmp_path, budget=budget(tmp_path, 3))
    go_on(session, net_batches(8), 7)
    session.flush()
    session.close(flush=False)
    with attached(small_net(), tmp_path, budget=budget(tmp_path, 3), resume=True) as again:
        assert again.step == 5
        go_on(again, net_batches(8), 8)
        assert stored_bytes(again) == plain.stored


@pytest.mark.parametrize(("clip", "back_to"), [(1e9, 7), (0.0, 5)])
def test_error_in_backward_changes_no_bit_of_later_steps(
    clip, back_to, plain, tmp_path, monkeypatch
):
    """Training continues to the same bits after an error in backward."""
    tune_plans(monkeypatch, PlanTuning(cached=0.5, spilled=0.0))
    model = small_net()
    with attached(model, tmp_path, clip=clip, budget=budget(tmp_path, 3)) as session:
        go_on(session, net_batches(8), 7)
        fails = model.blocks[0].linear.register_full_backward_hook(_fail)
        with warnings.catch_warnings(record=True) as caught, pytest.raises(ArithmeticError):
            warnings.simplefilter("always")
            go_on(session, net_batches(8), 8)
        fails.remove()
        assert session.step == session.store.meta["progress"]["step"] == back_to
        lost = [str(w.message) for w in caught if "had not been committed" in str(w.message)]
        assert bool(lost) is (back_to == 5)
        assert not lost or ("undoes 2 steps" in lost[0] and "after step 5" in lost[0])
        go_on(session, net_batches(8), 8)
        assert stored_bytes(session) == plain.stored


def _fail(*_: object) -> None:
    raise ArithmeticError("the model's own")


def test_commits_every_finished_step_when_interrupted_between_steps(plain, tmp_path, monkeypatch):
    tune_plans(monkeypatch, PlanTuning(cached=0.5))
    with (
        pytest.raises(KeyboardInterrupt),
        attached(small_net(), tmp_path, budget=budget(tmp_path, 100)) as session,
    ):
        go_on(session, net_batches(8), 6)
        raise KeyboardInterrupt
    with Store.open(tmp_path / "lohan-store") as store:
        assert store.meta["progress"]["step"] == 6


def test_a_new_plan_begins_with_a_commit(plain, tmp_path, monkeypatch):
    tune_plans(monkeypatch, PlanTuning(cached=0.5))
    with attached(small_net(), tmp_path, budget=budget(tmp_path, 100)) as session:
        go_on(session, net_batches(8), 4)
        session.follow(session.plan)
        assert session.store.meta["progress"]["step"] == 4
        go_on(session, net_batches(8), 8)
        session.flush()
        assert session.store.meta["progress"]["step"] == 4 + SETTLING_STEPS
        assert stored_bytes(session) == plain.stored


# -- when ---------------------------------------------------------------------------------------


def test_commits_a_step_if_the_next_would_end_too_late(monkeypatch):
    """A step commits if the next would end too late; the first ones of a plan in any case."""
    now = 0.0
    monkeypatch.setattr("lohan.engine.step.time.monotonic", lambda: now)
    plan: Any = SimpleNamespace(commit=Interval(0, 10.0))
    clock, commits, seen = CommitClock(plan, ALONE), True, []
    for _ in range(12):
        seen.append(commits)
        now += 3.0
        commits = clock.after_step(commits=commits)
    assert seen == [True, True, False, False, True, False, False, True, False, False, True, False]


# -- whole runs -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_inputs(tmp_path_factory.mktemp("inputs"))


def test_ranks_commit_the_same_steps(forge, inputs, tmp_path):
    """Ranks commit the same steps, and all rows are in the log."""
    created = []
    for every in ("step", "3"):
        out = tmp_path / every
        more = ("--host", "3MiB", "--commit-every", every, "--steps", 7)
        ended = ranks.run_ranks(forge, 2, "train", *tiny_arguments(inputs, out, *more))
        assert [one.code for one in ended] == [0, 0], ranks.errors_of_ranks(ended)
        created.append(tiny_result(out))
    assert created[0] == created[1]


def test_evaluations_and_snapshots_commit_first(forge, inputs, tmp_path):
    """What is logged or copied at a step belongs to that step, whenever the run dies."""
    more = (
        "--eval-data",
        inputs / "data.jsonl",
        "--eval-every",
        3,
        "--host",
        "2MiB",
        "--set",
        "budget.snapshot_every=4",
    )
    created = []
    for every in ("step", "100"):
        out = tmp_path / every
        given = tiny_arguments(inputs, out, *more, "--commit-every", every)
        assert (ended := forge.run("train", *given)).code == 0, ended.err
        rows = forked_commands.metrics_rows(out)
        created.append((tiny_result(out), [row["eval_loss"] for row in rows if "eval_loss" in row]))
        (file,) = (out / "snapshots").rglob("manifest.json")
        manifest = json.loads(file.read_text())
        assert manifest["meta"]["progress"]["step"] == 4
    assert created[0] == created[1] and created[0][1]
