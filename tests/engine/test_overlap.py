"""Overlap changes order only: every run equals the one that does one action after the other."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import lohan
from lohan.config import UPDATE_MODES
from lohan.engine.scheduler import ActionScheduler
from lohan.errors import LohanError, StorageIOError, StoreError
from lohan.schedule import phases as schedule
from lohan.schedule.actions import Action, BufferState, Schedule
from lohan.schedule.check import validate
from lohan.schedule.steps import check_order
from lohan.store.io_engine import open_engine
from tests.support.delayed_runs import (
    NET_KINDS,
    OVERLAP_CLIP,
    OVERLAP_STEPS,
    SERIAL_TUNING,
    Net,
    OverlapCase,
    PlanTuning,
    RunResult,
    check_overlap,
    delay_actions,
    delay_lanes,
    memory_engine,
    net_batches,
    serial_result,
    small_net,
    train_with_delays,
    tune_plans,
)
from tests.support.faults import EngineFault, FaultyEngine
from tests.support.generated_cases import each_value, pairwise, thinned
from tests.support.models import attached, stored_bytes

# -- every mode, window and ring ------------------------------------------------------------------


@pytest.mark.parametrize("clip", [0.0, OVERLAP_CLIP])
def test_serial_path_does_not_depend_on_update_mode(clip, tmp_path):
    for mode in UPDATE_MODES:
        check_overlap(
            OverlapCase(kind="several", clip=clip),
            tmp_path / mode,
            SERIAL_TUNING,
            mode=mode,
            overlap=False,
        )


@pytest.mark.parametrize(
    ("kind", "mode", "clip"), pairwise(NET_KINDS, UPDATE_MODES, [0.0, OVERLAP_CLIP])
)
def test_every_update_mode_equals_the_serial_path(kind, mode, clip, tmp_path):
    case = OverlapCase(kind=kind, clip=clip)
    assert serial_result(case).norms[0] > OVERLAP_CLIP
    tuning = PlanTuning(window=1, ring=3, spilled=0.6, own_thread=kind == "tied")
    check_overlap(case, tmp_path, tuning, mode=mode, seed=1)


@pytest.mark.parametrize(
    ("window", "ring"), [(1, 1), (1, 4), (2, 2), (2, 3), (3, 1), (3, 3), (4, 2), (4, 4)]
)
def test_every_prefetch_window_and_ring_equals_the_serial_path(window, ring, tmp_path):
    mode, clip = UPDATE_MODES[(window + ring) % 4], OVERLAP_CLIP * (ring % 2)
    tuning = PlanTuning(window=window, slots=window, ring=ring, grads=1 + window % 3)
    check_overlap(OverlapCase(kind="tied", clip=clip), tmp_path, tuning, mode=mode, seed=2)


# -- what a loop may do ---------------------------------------------------------------------------


WAYS = [*((mode, 0.0) for mode in UPDATE_MODES), ("balanced", OVERLAP_CLIP)]


@pytest.mark.parametrize(("way", "cached"), each_value(WAYS, [0.4, 1.0]))
def test_cached_state_in_memory_equals_the_serial_path(way, cached, tmp_path):
    mode, clip = way
    tuning = PlanTuning(cached=cached, spilled=0.5)
    check_overlap(OverlapCase(kind="several", clip=clip), tmp_path, tuning, mode=mode, seed=3)


@pytest.mark.parametrize("clip", [0.0, OVERLAP_CLIP])
def test_dropout_and_micro_batches(clip, tmp_path):
    case = OverlapCase(kind="several", clip=clip, micro_batch=3, dropout=0.2)
    assert serial_result(case).losses != serial_result(replace(case, dropout=0.0)).losses
    check_overlap(case, tmp_path, PlanTuning(window=2), mode="balanced", seed=4)


@pytest.mark.parametrize(
    ("mode", "clip"),
    [("serial", OVERLAP_CLIP), ("optimized", 0.0), ("balanced", 0.0), ("balanced", OVERLAP_CLIP)],
)
def test_evaluation_between_steps(mode, clip, tmp_path):
    case = OverlapCase(kind="tied", clip=clip, evaluated=True)
    check_overlap(case, tmp_path, PlanTuning(spilled=0.5), mode=mode, seed=5)


FIRST, TWICE, ONCE = ((0, 2),), ((1, 3), (2, 3)), ((2, 0),)


@pytest.mark.parametrize(
    ("skip", "mode", "clip"),
    [
        (FIRST, "balanced", OVERLAP_CLIP),
        (FIRST, "optimized", 0.0),
        (TWICE, "balanced", 0.0),
        (TWICE, "serial", 0.0),
        (ONCE, "balanced", OVERLAP_CLIP),
        (ONCE, "naive", 0.0),
    ],
)
def test_overlap_changes_no_bit_with_skipped_blocks(skip, mode, clip, tmp_path):
    check_overlap(
        OverlapCase(clip=clip, skip=skip), tmp_path, PlanTuning(spilled=0.5), mode=mode, seed=6
    )


MIDDLE, ENTRY, APART = ((1, 2),), ((1, 0), (3, 0)), ((2, 1), (3, 3))


OTHER_WAYS = [
    ("plain", MIDDLE, "balanced", OVERLAP_CLIP),
    ("plain", MIDDLE, "optimized", 0.0),
    ("plain", APART, "naive", 0.0),
    ("tied", APART, "balanced", 0.0),
    ("several", MIDDLE, "serial", 0.0),
    ("several", ENTRY, "optimized", 0.0),
    ("several", ENTRY, "balanced", OVERLAP_CLIP),
    ("several", APART, "balanced", 0.0),
]


@pytest.mark.parametrize(("way", "own_thread"), each_value(OTHER_WAYS, [False, True]))
def test_backward_that_visits_other_blocks_keeps_the_bits(way, own_thread, tmp_path):
    """The same forward, but a block gets no gradient, and in the next step gets one again."""
    kind, still, mode, clip = way
    tuning = PlanTuning(window=2, ring=3, grads=2, spilled=0.5, own_thread=own_thread)
    check_overlap(
        OverlapCase(kind=kind, clip=clip, still=still), tmp_path, tuning, mode=mode, seed=10
    )


class Fork(Net):
    """A network whose blocks run side by side.

    Autograd visits them from the latest to the earliest, as counted by the thread that ran
    them, so a block that ran on a thread of its own comes last.
    """

    def forward(
        self, x: torch.Tensor, target: torch.Tensor, still: torch.Tensor | None = None
    ) -> torch.Tensor:
        hidden = self.entry(x) + self.shift
        created: list[torch.Tensor] = []
        for number, block in enumerate(self.blocks):
            run = threading.Thread(target=lambda block=block: created.append(block(hidden)))
            if still is not None and int(still) == number:
                run.start()
                run.join()
            else:
                run.run()
        return nn.functional.mse_loss(self.exit(sum(created)), target)


@pytest.mark.parametrize(("mode", "clip"), each_value(UPDATE_MODES, [0.0, OVERLAP_CLIP]))
def test_backward_in_another_order(mode, clip, tmp_path, monkeypatch):
    def run(name: str, tuning: PlanTuning, **options: object) -> RunResult:
        tune_plans(monkeypatch, tuning)
        torch.manual_seed(3)
        batches = net_batches(OVERLAP_STEPS, still={1: 2, 2: 2, 3: 3})
        return train_with_delays(Fork().train(), batches, tmp_path / name, clip=clip, **options)

    back: list[list[int]] = []
    learn = ActionScheduler._learn

    def recorded(self: ActionScheduler) -> None:
        back.append(list(self.steps.current.backward))
        learn(self)

    monkeypatch.setattr(ActionScheduler, "_learn", recorded)
    wanted = run("plain", SERIAL_TUNING, overlap=False, update_mode=mode)
    result = run("overlapped", PlanTuning(window=2, ring=3, spilled=0.5), seed=11, update_mode=mode)
    result.check(wanted)
    assert back[:OVERLAP_STEPS] == back[OVERLAP_STEPS:]
    assert [sites == back[0] for sites in back[:OVERLAP_STEPS]] == [True, False, False, False]
    assert back[1] == back[2] and sorted(back[3]) == sorted(back[1]) != back[3]


@pytest.mark.parametrize(("mode", "clip"), thinned(WAYS, 0, 3, 4))
def test_overlap_changes_no_bit_in_bf16(mode, clip, tmp_path):
    case = OverlapCase(kind="several", clip=clip, dtype=torch.bfloat16, micro_batch=2)
    check_overlap(case, tmp_path, PlanTuning(spilled=0.5), mode=mode, seed=7)


@pytest.mark.parametrize("spilled", [0.0, 1.0])
@pytest.mark.parametrize("overflow", [0, 2])
def test_overlap_changes_no_bit_of_a_skipped_step(overflow, spilled, tmp_path):
    case = OverlapCase(
        kind="gpt2", dtype=torch.float16, overflow=overflow, clip=OVERLAP_CLIP * (spilled == 1)
    )
    assert serial_result(case).progress.skipped_steps == 1
    for mode in ("serial", "balanced"):
        check_overlap(case, tmp_path / mode, PlanTuning(spilled=spilled), mode=mode, seed=8)


def test_fp16_overflow_before_the_last_step_is_committed(tmp_path, monkeypatch):
    """An fp16 overflow is handled while the commit of the previous step is late.

    All weights stay in their slots, since a read would wait for the commit.
    """
    case = OverlapCase(kind="gpt2", dtype=torch.float16, overflow=2)
    late: list[str] = []

    def slow(session: lohan.Session, seed: int) -> None:
        def delay(action: Action) -> None:
            if action.kind == "C":
                late.append(action.name)
                time.sleep(0.2)

        delay_actions(session, delay)

    monkeypatch.setattr("tests.support.delayed_runs.delay_lanes", slow)
    check_overlap(case, tmp_path, PlanTuning(slots=8, spilled=0.0), mode="balanced", seed=0)
    assert late == ["C"] * 3


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("clip", [0.0, OVERLAP_CLIP])
def test_language_model_that_generates_between_steps(kind, clip, tmp_path, monkeypatch):
    """Generation runs the blocks again and again, with other lengths and a cache."""
    batches = net_batches(OVERLAP_STEPS, kind=kind)
    seen: dict[str, list[list[int]]] = {}

    def run(name: str, tuning: PlanTuning, **options: object) -> RunResult:
        def between(model: nn.Module, step: int) -> None:
            prompt = batches[step]["input_ids"][:1, :4]
            result = model.generate(
                prompt, max_new_tokens=3, do_sample=False, pad_token_id=0, use_cache=True
            )
            seen.setdefault(name, []).append(result.tolist())

        tune_plans(monkeypatch, tuning)
        return train_with_delays(
            small_net(kind), batches, tmp_path / name, between=between, clip=clip, **options
        )

    wanted = run("plain", SERIAL_TUNING, overlap=False)
    run("balanced", PlanTuning(window=2), seed=9).check(wanted)
    assert seen["balanced"] == seen["plain"]


# -- the check of a new order ---------------------------------------------------------------------


def test_an_order_is_checked_once_before_it_is_followed(tmp_path, monkeypatch):
    checked: list[int] = []
    check_order.cache_clear()
    monkeypatch.setattr(
        "lohan.schedule.check.validate",
        lambda schedule, *args, **kwargs: (
            checked.append(len(schedule)),
            validate(schedule, *args, **kwargs),
        ),
    )
    tune_plans(monkeypatch, PlanTuning())
    still = {2: 1, 3: 1, 5: 1}
    train_with_delays(small_net(), net_batches(6, still=still), tmp_path, update_mode="optimized")
    assert len(checked) == 2 and checked[0] > checked[1] > 0


@pytest.mark.parametrize("clip", [0.0, OVERLAP_CLIP])
def test_a_wrong_schedule_never_runs(clip, tmp_path, monkeypatch):
    """Backward forgets what an update waits for: the first step, which is on demand, finds out."""
    result = schedule.backward

    def hasty(*args: object, **kwargs: object) -> tuple[Schedule, BufferState]:
        actions, table = result(*args, **kwargs)
        return tuple(a.waiting_for(()) if a.kind in "UH" else a for a in actions), table

    check_order.cache_clear()
    monkeypatch.setattr(schedule, "backward", hasty)
    with (
        attached(small_net(), tmp_path, engine=memory_engine(), clip=clip) as session,
        pytest.raises(LohanError, match=r"schedule: [UH]\d.*: the gradients of B\d may not be"),
    ):
        go_on(session)
    assert session.step == 0


# -- a drive that fails in the middle -------------------------------------------------------------

FAULTS = [
    (EngineFault("eio", "read", 3), "EIO"),
    (EngineFault("short_read", "read", 11), "came back short"),
    (EngineFault("eio", "read", 30), "EIO"),
    (EngineFault("enospc", "write", 2), "ENOSPC"),
    (EngineFault("torn_write", "write", 13), "EIO"),
    (EngineFault("eio", "write", 41), "EIO"),
]


def go_on(session: lohan.Session, until: int = OVERLAP_STEPS) -> list[float]:
    """Run the batches that the session has not counted yet; return the losses of their steps."""
    batches, losses = net_batches(OVERLAP_STEPS), []
    while session.step < until:
        loss = session.model(**batches[session.step])
        loss.backward()
        losses.append(loss.item())
    session.flush()
    return losses


@pytest.mark.parametrize(
    ("failure", "way"), each_value(FAULTS, [("optimized", 0.0), ("balanced", OVERLAP_CLIP)])
)
def test_failed_transfer_loses_only_uncommitted_steps(failure, way, tmp_path, monkeypatch):
    """A failed transfer is one error that names what failed.

    The same session then continues from the last committed step to the result of an undisturbed
    run.
    """
    (fault, cause), (mode, clip) = failure, way
    tune_plans(monkeypatch, PlanTuning(cached=0.3))
    wanted = serial_result(OverlapCase(kind="several", clip=clip))
    engine = FaultyEngine(memory_engine())
    model = small_net("several")
    with attached(model, tmp_path, engine=engine, update_mode=mode, clip=clip) as session:
        delay_lanes(session, fault.nth)
        go_on(session, until=1)
        engine.faults = (replace(fault, nth=engine.counts[fault.op] + fault.nth),)
        with pytest.raises(StorageIOError, match=cause) as raised:
            go_on(session)
        assert raised.value.__notes__[0].startswith("lane ssd, action ")
        assert session.store._tracker._busy == {}  # no buffer is the drive's any more
        assert 1 <= session.step < OVERLAP_STEPS
        assert session.store.meta["progress"]["step"] == session.step
        committed = session.step
        assert go_on(session) == wanted.losses[committed:]
        assert stored_bytes(session) == wanted.stored


@pytest.mark.parametrize("refused", [False, True])
def test_the_other_reads_of_a_failed_action_are_completed(refused, tmp_path, monkeypatch):
    """If one read of an action fails, its other reads are completed.

    The weights of a block are several reads. When one fails or is refused, the others still
    fill a slot that the next step will use.
    """
    tune_plans(monkeypatch, PlanTuning(slots=0, window=0))
    engine = FaultyEngine(memory_engine())
    with attached(small_net("plain"), tmp_path, engine=engine) as session:
        go_on(session, until=1)
        start, submit = session.executor.runner.submit, engine.read
        chunks = session.executor.runner.spec.chunks

        def failing(action: Action) -> object:
            several = action.kind == "R" and chunks[action.index] > 1
            if several and not engine.faults:
                nth = engine.counts["read"] + (2 if refused else 1)
                engine.faults = (EngineFault("eio", "read", nth),)
            return start(action)

        def read(*args: object) -> int:
            if refused and engine.faults and engine.counts["read"] + 1 == engine.faults[0].nth:
                engine.counts["read"] += 1
                raise StorageIOError("EIO: not taken")
            return submit(*args)

        session.executor.runner.submit, engine.read = failing, read
        with pytest.raises(StorageIOError, match="EIO"):
            go_on(session)
        assert session.store._tracker._busy == {}
        go_on(session)
        assert stored_bytes(session) == serial_result(OverlapCase()).stored


@pytest.mark.parametrize(
    ("failure", "mode"),
    each_value(
        [FAULTS[1], (EngineFault("eio", "sync", 2), "EIO"), FAULTS[4]], ["optimized", "balanced"]
    ),
)
def test_a_failed_run_is_resumed(failure, mode, tmp_path, monkeypatch):
    """A failed sync ends the session, and its message says how to resume."""
    fault, cause = failure
    tune_plans(monkeypatch, PlanTuning())
    wanted = serial_result(OverlapCase(kind="tied"))
    engine = FaultyEngine(open_engine("threads"))
    session = attached(small_net("tied"), tmp_path, engine=engine, update_mode=mode)
    go_on(session, until=1)
    engine.faults = (replace(fault, nth=engine.counts[fault.op] + fault.nth),)
    with pytest.raises(StorageIOError, match=cause):
        go_on(session)
    if fault.op == "sync":
        with pytest.raises(StoreError, match=r"cannot go on: the commit .*; resume the run"):
            go_on(session)
    session.close(flush=False)
    with attached(small_net("tied"), tmp_path, resume=True, update_mode=mode) as session:
        begun = session.step
        assert 1 <= begun < OVERLAP_STEPS
        assert go_on(session) == wanted.losses[begun:]
        assert stored_bytes(session) == wanted.stored


# -- anything, many times -------------------------------------------------------------------------


def stress(seed: int, place: Path) -> None:
    """Run a random case with a random plan, with every lane and the drive randomly late."""
    draw = random.Random(seed)
    kind = draw.choice((*NET_KINDS, "llama", "gpt2"))
    narrow = torch.bfloat16 if kind in NET_KINDS else torch.float16
    dtype = draw.choice((torch.float32, torch.float32, narrow))
    skipping = kind in NET_KINDS and draw.random() < 0.3
    stilling = kind in NET_KINDS and draw.random() < 0.3
    case = OverlapCase(
        kind=kind,
        clip=draw.choice((0.0, OVERLAP_CLIP)),
        dtype=dtype,
        micro_batch=draw.choice((None, 1, 3)),
        dropout=draw.choice((0.0, 0.2)),
        skip=((draw.randrange(OVERLAP_STEPS), draw.randrange(4)),) if skipping else (),
        still=((draw.randrange(OVERLAP_STEPS), draw.randrange(4)),) if stilling else (),
        overflow=draw.randrange(OVERLAP_STEPS) if dtype == torch.float16 else -1,
        evaluated=draw.random() < 0.3,
    )
    if case.evaluated:  # which draws random numbers too
        case = replace(case, dropout=0.0)
    tuning = PlanTuning(
        window=draw.randrange(5),
        slots=draw.randrange(4),
        ring=draw.randint(1, 4),
        grads=draw.randint(1, 3),
        cached=draw.choice((0.0, 0.3, 0.7, 1.0)),
        spilled=draw.choice((0.0, 0.5, 1.0)),
        deferred=draw.choice((0.0, 0.5, 1.0)),
        own_thread=draw.random() < 0.5,
    )
    engine = FaultyEngine(memory_engine(), max_delay_s=0.002, seed=seed)
    print(case, tuning)
    check_overlap(case, place, tuning, mode=draw.choice(UPDATE_MODES), seed=seed, engine=engine)


@pytest.mark.parametrize("seed", range(6))
def test_random_cases_equal_the_serial_path(seed, tmp_path):
    stress(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
def test_stress_long_form(seed, tmp_path):
    stress(seed, tmp_path)
