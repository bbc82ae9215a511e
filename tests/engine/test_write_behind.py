"""If every step is clipped, state in memory is written during the next backward.

It is committed there, also if gradients are spilled and other state is streamed. The bits do not
change.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from lohan.device.emulated import EmulatedDevice
from lohan.schedule.ops import Op
from lohan.util.units import MiB
from tests.support.delayed_runs import (
    PlanTuning,
    RunResult,
    net_batches,
    small_net,
    train_with_delays,
    tune_plans,
)
from tests.support.models import attached, stored_bytes

STEPS = 6
CLIP = 1e-3  # far below every norm
PARTLY = PlanTuning(cached=0.5, spilled=0.5)


def plain(rows, kind="plain") -> RunResult:
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as place:
        tune_plans(patch, PlanTuning())
        return train_with_delays(small_net(kind), rows, Path(place), overlap=False, clip=CLIP)


@pytest.fixture(scope="module")
def expected() -> RunResult:
    return plain(net_batches(STEPS))


def phases_of(session) -> list[list[str]]:
    """Return the phases of all steps after the first two, as they are enqueued."""
    phases: list[list[str]] = []
    lanes = session.executor.lanes
    enqueue = lanes.enqueue

    def enqueued(schedule, scalars=None):
        phases.append([action.name for action in schedule])
        enqueue(schedule, scalars)

    for row in net_batches(2):  # the first is scheduled on demand
        session.model(**row).backward()
    lanes.enqueue = enqueued
    for row in net_batches(STEPS)[2:]:
        session.model(**row).backward()
    session.flush()
    lanes.enqueue = enqueue
    return phases


@pytest.mark.parametrize("spilled", [0.0, 0.5, 1.0])
def test_writes_run_beside_backward_and_the_commit_behind_them(
    spilled, expected, tmp_path, monkeypatch
):
    tune_plans(monkeypatch, PlanTuning(cached=0.5, spilled=spilled))
    model = small_net()
    with attached(model, tmp_path, clip=CLIP) as session:
        spec = session.executor.runner.spec
        everything = {f"W{g}.{c}" for g, count in enumerate(spec.chunks) for c in range(count)}
        stay = {f"W{g}.{c}" for g, c in spec.host_cached_state if g in spec.host_cached_weights}
        assert len(stay) > 1 and stay != everything
        phases = phases_of(session)
        backward, forward = phases[:-1:2], phases[1:-1:2]
        assert len(backward) == len(forward) == STEPS - 2
        assert set(phases[-1]) == {*stay, Op.END_STEP}  # of the last step, by flush
        for names in forward:
            assert {name for name in names if name[0] == "W"} == everything - stay
            assert Op.END_STEP not in names
        for names in backward:
            written = [name for name in names if name[0] == "W"]
            assert sorted(written) == sorted(stay)
            commit, last = names.index(Op.END_STEP), names.index(written[-1])
            assert names.index("B5") < names.index(written[0]) and last < commit
            assert commit < names.index(Op.BACKWARD_DONE)
            spills = [i for i, name in enumerate(names) if name[0] == Op.SPILL_GRADIENTS]
            assert bool(spills) is (spilled > 0)
            assert not spills or spills[0] < last  # in between, not behind all writes
        assert stored_bytes(session) == expected.stored


@pytest.mark.parametrize(
    ("tuning", "device"),
    [
        (PARTLY, False),
        (PlanTuning(cached=1.0, spilled=1.0, own_thread=True), False),
        (PlanTuning(cached=0.3, spilled=0.0, ring=1, slots=0, window=0), False),
        (PlanTuning(cached=0.5, spilled=0.5, device_slots=1), True),
        (PlanTuning(cached=0.3, spilled=0.0, slots=1, device_slots=2, device_grads=2), True),
    ],
)
def test_same_bits_on_late_lanes(tuning, device, expected, tmp_path, monkeypatch):
    tune_plans(monkeypatch, tuning)
    more = {"device": EmulatedDevice(64 * MiB)} if device else {}
    train_with_delays(small_net(), net_batches(STEPS), tmp_path, seed=7, clip=CLIP, **more).check(
        expected
    )


@pytest.mark.parametrize("kind", ["tied", "several", "llama", "gpt2"])
@pytest.mark.parametrize("device", [False, True])
def test_models_of_any_shape(kind, device, tmp_path, monkeypatch):
    rows, more = (
        net_batches(STEPS, kind=kind),
        {"device": EmulatedDevice(64 * MiB)} if device else {},
    )
    expected = plain(rows, kind)
    tune_plans(monkeypatch, PlanTuning(cached=0.5, spilled=0.5, device_slots=1))
    train_with_delays(small_net(kind), rows, tmp_path, seed=7, clip=CLIP, **more).check(expected)


@pytest.mark.parametrize("what", ["skip", "still"])
def test_backward_that_visits_other_blocks_keeps_the_bits(what, tmp_path, monkeypatch):
    """Writes that were to run beside backward are written all the same."""
    rows = net_batches(STEPS, **{what: {3: 1, 4: 2}})
    tune_plans(monkeypatch, PARTLY)
    train_with_delays(small_net(), rows, tmp_path, seed=7, clip=CLIP).check(plain(rows))


def test_a_step_is_durable_before_its_backward(expected, tmp_path, monkeypatch):
    """Who flushes between forward and backward finds the step before committed."""
    tune_plans(monkeypatch, PARTLY)
    model = small_net()
    with attached(model, tmp_path, clip=CLIP) as session:
        for step, row in enumerate(net_batches(STEPS)):
            loss = model(**row)
            session.flush()
            assert session.store.meta.get("progress", {"step": 0})["step"] == step
            loss.backward()
        assert stored_bytes(session) == expected.stored


@pytest.mark.parametrize("block", [0, 3])
def test_an_error_in_backward_costs_its_own_step_only(block, expected, tmp_path, monkeypatch):
    """Remaining writes of the previous step are done when the next step is aborted."""
    tune_plans(monkeypatch, PARTLY)
    model, rows = small_net(), net_batches(STEPS)

    def fails(*_):
        raise RuntimeError("a fault of the model")

    with attached(model, tmp_path, clip=CLIP) as session:
        for step, row in enumerate(rows):
            if step == 4:
                hook = model.blocks[block].linear.register_full_backward_hook(fails)
                with pytest.raises(RuntimeError, match="a fault of the model"):
                    model(**row).backward()
                hook.remove()
                with warnings.catch_warnings():
                    warnings.simplefilter("error")  # that steps are lost
                    model(**row)
                assert session.step == 4
                assert session.store.meta["progress"]["step"] == 4
            model(**row).backward()
        assert stored_bytes(session) == expected.stored
