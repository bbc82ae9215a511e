"""Updates that do not wait for the norm: kept, redone and run again with the bits of waiting."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lohan.device.emulated import EmulatedDevice
from lohan.util.units import MiB
from tests.support import forked_commands, ranks
from tests.support.delayed_runs import (
    CROSSING_SCALES,
    DROPOUT_CASE,
    HALF_CASE,
    LLAMA_CASE,
    PLAIN_CASE,
    SEVERAL_CASE,
    TIED_CASE,
    PlanTuning,
    RunResult,
    SpeculationCase,
    delay_lanes,
    memory_engine,
    tune_plans,
)
from tests.support.forked_commands import tiny_arguments, write_tiny_inputs
from tests.support.generated_cases import thinned
from tests.support.models import attached, stored_bytes

HELD, KEPT, REDONE = (0, 0), (1, 0), (1, 1)
EXPECTED = [HELD, KEPT, REDONE, HELD, KEPT, REDONE, HELD, KEPT, KEPT, REDONE, HELD, HELD]


def check(
    case: SpeculationCase,
    place: Path,
    tuning: PlanTuning,
    *,
    rerun: bool,
    seed: int = 3,
    share: float = 0.25,
    ways: list[tuple[int, int]] = EXPECTED,
    **options,
):
    """Check a case against a run that waits for every norm.

    With `rerun`, held gradients would go to SSD, and clipped steps run again. `share` is the
    share of recent steps that may be clipped.
    """
    limit, expected = case.waiting
    losses, norms, counts = [], [], []
    options.setdefault("engine", memory_engine())
    with pytest.MonkeyPatch.context() as patch:
        tune_plans(patch, replace(tuning, most_clipped=share))
        model = case.model()
        session = attached(
            model, place, clip=limit, micro_batch=case.micro_batch, run_again=rerun, **options
        )
    with session:
        executor = session.executor
        executor.lanes.stall_s = 15.0
        delay_lanes(session, seed)
        torch.manual_seed(11)
        for batch, scale in zip(case.data(), case.scales, strict=True):
            before = torch.get_rng_state()
            for _ in range(2):
                loss = model(**batch)
                loss = loss if isinstance(loss, torch.Tensor) else loss.loss
                (loss * scale).backward()
                if not session.must_run_again:
                    break
                torch.set_rng_state(before)
            losses.append(loss.item())
            norms.append(session.grad_norm)
            actual = executor.clipping.counts
            counts.append(
                tuple(actual[key] for key in ("speculated", "rolled_back") if key in actual)
            )
        RunResult(losses, norms, stored_bytes(session), executor.record.train_state).check(expected)
        assert counts == ways
        assert not executor.runner.pending.on_host


@pytest.mark.parametrize(
    ("case", "tuning", "rerun"),
    thinned(
        [
            (PLAIN_CASE, PlanTuning(cached=0.4, spilled=0.0), False),
            (TIED_CASE, PlanTuning(cached=1.0, spilled=0.0), False),
            (SEVERAL_CASE, PlanTuning(cached=0.0, spilled=0.0, ring=1, slots=0, window=0), False),
            (LLAMA_CASE, PlanTuning(cached=0.4, spilled=0.0, own_thread=True), False),
            (DROPOUT_CASE, PlanTuning(cached=0.4, spilled=0.0), False),
            (HALF_CASE, PlanTuning(cached=0.4, spilled=0.0), False),
            (PLAIN_CASE, PlanTuning(cached=0.4, own_thread=True), True),
            (TIED_CASE, PlanTuning(cached=0.0, ring=3, grads=2), True),
            (SEVERAL_CASE, PlanTuning(cached=1.0, spilled=0.5), True),
            (LLAMA_CASE, PlanTuning(cached=0.4), True),
            (DROPOUT_CASE, PlanTuning(cached=0.4), True),
            (HALF_CASE, PlanTuning(cached=0.4, own_thread=True), True),
            (DROPOUT_CASE, PlanTuning(spilled=0.5), True),
            (HALF_CASE, PlanTuning(spilled=0.5), True),
        ],
        0,
        2,
        4,
        5,
        6,
        7,
        8,
        9,
        13,
    ),
)
def test_speculative_updates_have_the_bits_of_waiting(case, tuning, rerun, tmp_path):
    """Speculated and kept, redone from held gradients or run again, and held, on late lanes."""
    check(case, tmp_path, tuning, rerun=rerun)


@pytest.mark.parametrize("rerun", [False, True])
@pytest.mark.parametrize("mode", ["naive", "balanced"])
def test_speculative_updates_on_a_device_have_the_bits_of_waiting(mode, rerun, tmp_path):
    tuning = PlanTuning(cached=0.2, spilled=float(rerun), device_slots=1)
    device = EmulatedDevice(64 * MiB)
    check(TIED_CASE, tmp_path, tuning, rerun=rerun, update_mode=mode, device=device)


@pytest.mark.parametrize(
    ("share", "ways"),
    [
        (-0.1, [HELD] * len(CROSSING_SCALES)),
        (0.0, [HELD, KEPT, REDONE, *[HELD] * 9]),
        (0.5, [*EXPECTED[:-1], HELD]),
    ],
)
def test_the_plan_says_how_many_steps_may_be_clipped(share, ways, tmp_path):
    check(PLAIN_CASE, tmp_path, PlanTuning(spilled=0.0), rerun=False, share=share, ways=ways)


# -- whole runs -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.mark.parametrize(
    ("world", "more"),
    [
        (1, ("--lora", 4, "--clip", 0.65, "--host", "2MiB")),
        (2, ("--clip", 3, "--host", "3MiB")),
        pytest.param(2, ("--clip", 3, "--host", "700KiB"), marks=pytest.mark.slow),
    ],
)
def test_speculation_with_adapters_or_ranks_changes_no_bit(world, more, forge, inputs, tmp_path):
    """Runs with dropout whose norms cross the limit twice, against one action after the other."""
    created = {}
    for way in ("--overlap", "--no-overlap"):
        out = tmp_path / way
        given = ("--steps", 10, "--schedule", "constant", "--lr", "1e-2", *more, way)
        ended = ranks.run_ranks(forge, world, "train", *tiny_arguments(inputs, out, *given))
        assert [one.code for one in ended] == [0] * world, ranks.errors_of_ranks(ended)
        created[way] = forked_commands.metrics_rows(out), exported(out)
    rows, weights = created["--overlap"]
    assert (
        sum(row["rolled_back"] for row in rows) == 2 and sum(row["speculated"] for row in rows) > 4
    )
    assert sum(row["clipped"] for row in rows) >= 2
    plain, expected = created["--no-overlap"]
    assert weights == expected
    assert [row["loss"] for row in rows] == [row["loss"] for row in plain]
    assert [row["grad_norm"] for row in rows] == [row["grad_norm"] for row in plain]


def exported(out: Path) -> bytes:
    """Return the weights of the exported model or adapter."""
    (file,) = (out / "model").glob("*model.safetensors")
    return file.read_bytes()
