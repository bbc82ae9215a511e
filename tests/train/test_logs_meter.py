"""Rows of metrics: from the end of one to the end of the next, with nothing left out."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lohan.engine.actions import ActionRunner
from lohan.schedule.actions import Action
from lohan.store.transfers import Counters
from lohan.train import logs as module
from lohan.train.logs import Meter
from lohan.util.trace import Span, Trace
from tests.support.model_folders import write_random_checkpoint
from tests.support.training_runs import TINY_CONFIG

STEPS, LATE_S = 4, 0.01


@dataclass
class Drive:
    """The part of a store that a meter uses."""

    counters: Counters = field(default_factory=lambda: Counters(0, 0))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    yield now


def test_rows_follow_each_other(clock):
    drive, trace = Drive(), Trace()
    trace.add(Span("ssd", "R0", 90.0, 99.0))  # before the loop
    meter = Meter(drive, trace)
    clock[0], drive.counters = 102.0, Counters(10, 4)
    trace.add(Span("compute", "B0", 100.5, 102.0))
    first = meter.row(tokens=8)
    assert (first["step_s"], first["tokens_per_s"]) == (2.0, 4.0)
    assert (first["ssd_read_bytes"], first["ssd_written_bytes"]) == (10, 4)
    assert (first["busy"], first["binding"]) == ({"compute": 0.75}, "compute")
    trace.add(Span("optimizer", "U0.0", 102.0, 105.0))  # an update after the row
    clock[0], drive.counters = 106.0, Counters(10, 20)
    second = meter.row(tokens=8)
    assert (second["step_s"], second["busy"]) == (4.0, {"optimizer": 0.75})
    assert (second["ssd_read_bytes"], second["ssd_written_bytes"]) == (0, 16)


def test_leaves_time_and_bytes_outside_of_steps_out(clock):
    drive = Drive()
    meter = Meter(drive, Trace())
    with meter.aside():
        clock[0], drive.counters = 150.0, Counters(1000, 0)
    clock[0], drive.counters = 152.0, Counters(1010, 5)
    row = meter.row(tokens=2)
    assert (row["step_s"], row["ssd_read_bytes"], row["ssd_written_bytes"]) == (2.0, 10, 5)
    clock[0] = 153.0
    assert meter.row(tokens=2)["step_s"] == 1.0


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_random_checkpoint(folder / "model", TINY_CONFIG)
    data = [{"input_ids": [(i * j) % 64 for j in range(1, 12)]} for i in range(12)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, data)))
    return folder


@pytest.mark.parametrize(
    "more",
    [
        ("--clip", 0, "--update-mode", "serial"),
        ("--clip", 0, "--no-overlap"),
        ("--clip", 1, "--no-overlap"),
    ],
)
def test_late_updates_are_in_some_row(more, lohan, inputs, tmp_path, monkeypatch):
    """Wherever the updates run, the rows after the first hold the time of a whole step's."""
    run, late = ActionRunner.run, [0]

    def slow(self: ActionRunner, action: Action, context: object) -> None:
        if action.kind == "U":
            late[0] += 1
            time.sleep(LATE_S)
        run(self, action, context)

    monkeypatch.setattr(ActionRunner, "run", slow)
    start = time.perf_counter()
    ended = lohan(
        "train",
        "--model",
        inputs / "model",
        "--data",
        inputs / "data.jsonl",
        "--out",
        tmp_path / "run",
        "--host",
        "400KiB",
        "--steps",
        STEPS,
        "--batch",
        2,
        "--seq",
        16,
        "--no-export",
        *more,
    )
    assert ended.code == 0, ended.err
    whole_s = time.perf_counter() - start
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len(rows) == STEPS and late[0] % STEPS == 0
    step_late_s = late[0] // STEPS * LATE_S
    for row in rows[1:]:
        assert row["step_s"] >= step_late_s
        assert row["busy"]["optimizer"] * row["step_s"] >= step_late_s * 0.99
    assert sum(row["step_s"] for row in rows) <= whole_s
