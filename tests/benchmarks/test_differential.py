"""The short form of benchmarks/differential.py, and its handling of findings."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import differential
from benchmarks.differential import SIMPLEST, Outcome, Tally, draw, only_changes, shrink
from tests.support.process_hooks import DIFFERENTIAL_CASES

ROOT = Path(__file__).resolve().parents[2]


def test_overlapped_runs_equal_the_serial_path_and_torch(forge, tmp_path):
    ended = forge.run(
        "--help",
        before="tests.support.process_hooks:run_differential_cases",
        env={"LOHAN_CASE": str(tmp_path)},
    )
    assert ended.code == 0, ended.err
    outcomes = json.loads((tmp_path / "outcomes.json").read_text())
    assert [outcome for outcome in outcomes if outcome[0] != "same"] == []
    assert len(outcomes) == len(DIFFERENTIAL_CASES)


@pytest.mark.slow
def test_random_cases_equal_the_serial_path_and_torch(tmp_path):
    script = ROOT / "benchmarks" / "differential.py"
    words = ["--cases", "400", "--minutes", "25", "--seed", "100000", "--work", str(tmp_path)]
    ended = subprocess.run([sys.executable, script, *words], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_case_of_a_number_is_always_the_same():
    assert [draw(number) for number in range(50)] == [draw(number) for number in range(50)]
    drawn = [draw(number) for number in range(800)]
    for axis, values in differential.AXES.items():
        if axis != "events":
            assert {repr(case[axis]) for case in drawn} == {repr(value) for value in values}
    assert {event[1] for case in drawn for event in case["events"]} == set(differential.EVENTS)
    assert all(json.loads(json.dumps(case)) == case for case in drawn)


def test_difference_to_the_serial_path_is_found():
    torch = pytest.importorskip("torch")
    run = {
        "losses": [1.0],
        "norms": [None],
        "evals": [],
        "updated": [True],
        "progress": "1",
        "stored": {"block": "abc"},
        "buffers": {"mean": torch.zeros(2)},
    }
    differential.check_bits(dict(SIMPLEST), run, run)
    for other in (
        {"losses": [1.0 + 2**-52]},
        {"stored": {"block": "abd"}},
        {"updated": [False]},
        {"buffers": {"mean": torch.tensor([0.0, 1e-30])}},
    ):
        with pytest.raises(differential.Found):
            differential.check_bits(dict(SIMPLEST), {**run, **other}, run)


def test_tells_rounding_from_an_error_by_fp64():
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(400, generator=generator, dtype=torch.float64)

    def noisy(size: float) -> torch.Tensor:
        return exact + size * torch.randn(400, generator=generator, dtype=torch.float64)

    case = {**SIMPLEST, "dtype": "bf16"}
    differential.check_tensor(case, "weights w", noisy(1e-4), noisy(1e-4), exact)
    wrong = noisy(1e-4)
    wrong[7] += 1e-3
    differential.check_tensor(case, "weights w", wrong, noisy(1e-4), exact)
    with pytest.raises(differential.Found):
        differential.check_tensor(case, "weights w", noisy(1e-3), noisy(1e-4), exact)
    with pytest.raises(differential.Found):
        differential.check_tensor(dict(SIMPLEST), "weights w", noisy(1e-4), exact, exact)


def test_finding_is_shrunk_to_what_it_needs():
    runs: list[dict] = []

    def run(case: dict) -> Outcome:
        runs.append(case)
        fails = case["device"] == "emulated" and [2, "flush"] in case["events"]
        return Outcome("bits", "other losses") if fails else Outcome("same")

    events = [[0, "eval"], [2, "flush"], [4, "resume"]]
    case = {**SIMPLEST, "device": "emulated", "clip": 1.0, "steps": 5, "events": events}
    small, outcome = shrink(case, run(case), run)
    assert only_changes(small) == {"device": "emulated", "events": [[2, "flush"]]}
    assert outcome.status == "bits"
    assert len(runs) < differential.SHRINKING_TRIES


def test_tally_counts_by_axis():
    tally = Tally()
    tally.add({**SIMPLEST, "events": [[0, "eval"], [1, "eval"]]}, Outcome("same"))
    tally.add({**SIMPLEST, "model": "gpt2"}, Outcome("refused", "no"))
    tally.add({**SIMPLEST, "model": "gpt2"}, Outcome("hang", "no result"))
    assert tally.total == {"drawn": 3, "same": 1, "refused": 1, "found": 1}
    assert tally.counts["model"]["gpt2"] == {"drawn": 2, "refused": 1, "found": 1}
    assert tally.counts["events"]["eval"] == {"drawn": 1, "same": 1}
    assert "gpt2" in tally.table()
