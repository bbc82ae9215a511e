"""Spans of the lanes: busy time, the Chrome trace, and the metrics of a run."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from lohan.engine.step import MAX_PENDING_META
from lohan.util.trace import LANES, Span, Trace, busy_s, chrome_trace, overlap_shares
from tests.support.model_folders import write_random_checkpoint
from tests.support.models import attached, batches, small_model
from tests.support.training_runs import TINY_CONFIG

# -- busy time ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spans", "busy"),
    [
        ([], 0.0),
        ([(1, 3)], 2.0),
        ([(1, 3), (5, 6)], 3.0),
        ([(1, 4), (2, 6)], 5.0),  # overlapping ones count once
        ([(1, 9), (2, 3), (4, 5)], 8.0),  # also those inside another
        ([(4, 5), (2, 3), (1, 9)], 8.0),  # in whatever order they ended
        ([(1, 3), (3, 5)], 4.0),
        ([(-5, 2), (8, 20)], 4.0),  # what lies outside the step does not count
        ([(-5, -1), (11, 12)], 0.0),
        ([(-5, 15)], 10.0),
    ],
)
def test_busy_seconds(spans, busy):
    actual = busy_s([Span("ssd", "R0", low, high) for low, high in spans], 0.0, 10.0)
    assert actual == {lane: busy if lane == "ssd" else 0.0 for lane in LANES}


@pytest.mark.parametrize(
    ("spans", "share"),
    [
        ([], 0.0),
        ([(0, 20)], 1.0),
        ([(2, 3)], 0.1),
        ([(2, 3), (2.5, 4)], 0.2),  # overlapping ones count once
        ([(6, 8), (0, 1), (3, 5)], 0.5),
        ([(-3, 1), (9, 30)], 0.2),
        ([(-3, 0), (10, 30)], 0.0),
    ],
)
def test_the_share_of_an_action_beside_others(spans, share):
    others = [Span("ssd", "R0", low, high) for low, high in spans]
    spans = [
        *others,
        Span("compute", "F0", 0, 10),
        Span("optimizer", "U0.0", 1, 1),
        Span("net", "A0", 0, 1),
    ]
    actual = overlap_shares(spans, ("compute", "optimizer"), ("ssd",), 0, 20)
    assert actual == {"F0": pytest.approx(share)}


def test_only_actions_that_begin_in_time_count():
    spans = [Span("ssd", "R0", 0, 2), *(Span("compute", "F0", at, at + 2) for at in (0, 1, 3, 9))]
    assert overlap_shares(spans, ("compute",), ("ssd",), 1, 9) == {"F0": 0.25}


def test_lanes_are_counted_apart():
    spans = [Span("compute", "F0", 0, 4), Span("ssd", "R1", 1, 2), Span("optimizer", "U0.0", 3, 7)]
    assert busy_s(spans, 0, 10) == {
        "compute": 4,
        "h2d": 0,
        "d2h": 0,
        "ssd": 1,
        "optimizer": 4,
        "net": 0,
    }


def test_a_step_takes_its_spans_once():
    trace = Trace(keep=True)
    trace.add(Span("compute", "F0", 0, 1))
    assert [span.name for span in trace.take_step()] == ["F0"]
    assert trace.take_step() == []


def test_spans_are_forgotten_unless_kept(tmp_path):
    for keep in (True, False):
        trace = Trace(keep=keep)
        trace.add(Span("compute", "F0", 0, 1))
        trace.take_step()
        trace.write(tmp_path / "trace.json")
        loaded = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        assert [event["name"] for event in loaded if event["ph"] == "X"] == ["F0"] * keep


def test_spans_that_nobody_takes_do_not_pile_up():
    trace = Trace()
    for number in range(100):
        trace.add(Span("compute", f"F{number}", number, number + 1))
        trace.end_step()
    assert [span.name for span in trace.take_step()] == ["F99"]
    trace.add(Span("compute", "F100", 100, 101))
    trace.end_step()
    trace.add(Span("ssd", "W0.0", 101, 102))  # what the step leaves to the next
    assert [span.name for span in trace.take_step()] == ["F100", "W0.0"]


def test_keeps_only_the_last_pass_without_gradients():
    trace = Trace()
    trace.add(Span("compute", "B0", 0, 1))
    trace.end_step()
    for number in range(100):
        trace.begin_inference()
        trace.add(Span("compute", f"F{number}", number, number + 1))
    assert [span.name for span in trace.take_step()] == ["B0", "F99"]


def test_custom_loop_leaves_no_spans(tmp_path):
    """It takes neither spans nor what the steps' manifests carry, for as many steps as it likes."""
    model, data = small_model("llama"), batches(40, batch=2, seq=8)
    with attached(model, tmp_path, batch=data[0]) as session:
        for batch in data:
            model(**batch).loss.backward()
        session.flush()
        names = [span.name for span in session.executor.trace.take_step()]
        assert 1 <= names.count("F0") <= 2
        finished = [meta["progress"]["step"] for meta in session.take_finished()]
        assert finished == list(range(40 - MAX_PENDING_META + 1, 41))


# -- the Chrome trace -----------------------------------------------------------------------------


def rows(events: list[dict]) -> dict[str, list[dict]]:
    """Spans by the name of their row; a row holds one span at a time."""
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert len(names) == len(set(names.values()))
    collected: dict[str, list[dict]] = {}
    for event in events:
        if event["ph"] == "X":
            collected.setdefault(names[event["tid"]], []).append(event)
    for row in collected.values():
        row.sort(key=lambda e: e["ts"])
        for one, two in pairwise(row):
            assert one["ts"] + one["dur"] <= two["ts"] + 1e-6
    return collected


def test_chrome_trace():
    spans = [
        Span("ssd", "R0", 100.0, 101.0),
        Span("ssd", "R1", 100.5, 102.0),
        Span("ssd", "R2", 101.5, 103.0),
        Span("compute", "F0", 101.0, 101.25),
    ]
    result = chrome_trace(spans)
    actual = rows(result["traceEvents"])
    assert {row: [e["name"] for e in events] for row, events in actual.items()} == {
        "compute": ["F0"],
        "ssd": ["R0", "R2"],
        "ssd +1": ["R1"],
    }
    first = actual["compute"][0]
    assert (first["ts"], first["dur"]) == (1e6, 0.25e6)  # microseconds from the first span on
    assert {e["pid"] for e in result["traceEvents"]} == {0}
    assert chrome_trace([])["traceEvents"] == []


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_random_checkpoint(folder / "model", TINY_CONFIG)
    data = [{"input_ids": [(i * j) % 64 for j in range(1, 12)]} for i in range(12)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, data)))
    return folder


def run(lohan, inputs: Path, out: Path, *more: object) -> list[dict]:
    ended = lohan(
        "train",
        "--model",
        inputs / "model",
        "--data",
        inputs / "data.jsonl",
        "--out",
        out,
        "--host",
        "400KiB",
        "--steps",
        4,
        "--batch",
        2,
        "--seq",
        16,
        "--no-export",
        *more,
    )
    assert ended.code == 0, ended.err
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("more", [("--clip", 0), ("--clip", 1), ("--no-overlap",)])
def test_train_writes_a_trace_and_metrics(more, lohan, inputs, tmp_path):
    metrics = run(lohan, inputs, tmp_path / "run", "--trace", *more)
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    actual = rows(events)
    assert (
        {"compute", "ssd", "optimizer"}
        <= actual.keys()
        <= {"compute", "ssd", "optimizer"} | {f"ssd +{n}" for n in range(1, 40)}
    )
    kinds = {lane: [] for lane in ("compute", "ssd", "optimizer")}
    for row, spans in actual.items():
        kinds[row.split(" ")[0]] += [span["name"][0] for span in spans]
    assert set(kinds["compute"]) == {"F", "B", "E"} and kinds["compute"].count("E") == 4
    assert {"S", "W", "C"} <= set(kinds["ssd"]) and kinds["ssd"].count("C") == 4
    assert kinds["optimizer"].count("U") == kinds["ssd"].count("W") > 0
    if more == ("--no-overlap",):  # one after the other: no two spans at the same time
        rows(
            [{**event, "tid": 0} for event in events if event["ph"] == "X"]
            + [{"ph": "M", "tid": 0, "args": {"name": "all"}}]
        )
    for number, row in enumerate(metrics):
        assert row["busy"].keys() <= set(LANES)
        assert {"compute", "optimizer"} <= row["busy"].keys()
        # With clipping the first step's updates come in the second, and nothing else need move.
        assert "ssd" in row["busy"] or number == 0 or more == ("--no-overlap",)
        assert all(0 < share <= 1.0001 for share in row["busy"].values())
        assert row["busy"][row["binding"]] == max(row["busy"].values())
        assert ("grad_norm" in row) is (more != ("--clip", 0))


def test_writes_no_trace_by_default(lohan, inputs, tmp_path):
    assert len(run(lohan, inputs, tmp_path / "run")) == 4
    assert not (tmp_path / "run" / "trace.json").exists()


def test_resuming_a_finished_run_keeps_its_trace(lohan, inputs, tmp_path):
    run(lohan, inputs, tmp_path / "run", "--trace")
    before = (tmp_path / "run" / "trace.json").read_text()
    assert lohan("resume", tmp_path / "run").code == 0
    assert (tmp_path / "run" / "trace.json").read_text() == before
