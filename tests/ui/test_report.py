"""`lohan report`: one file, nothing from outside, nothing unescaped, numbers that are the run's."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from lohan.tools.plan_run import Change
from lohan.train.run_folder import RunFolder, read_rows, step_rows
from lohan.ui.report import MODULES, bundle
from lohan.ui.runs import read_run
from lohan.ui.traces import timeline
from lohan.ui.view import MOST_POINTS, Advice, bottleneck, curve, measured_lanes
from lohan.util.trace import LANE_NAMES
from lohan.util.units import format_bytes
from tests.support.training_runs import (
    PageElements,
    assert_refused,
    finished_fixture,  # noqa: F401 - a fixture
    page_fixture,  # noqa: F401 - a fixture
    view_texts,
    word_model_fixture,  # noqa: F401 - a fixture
)

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\"'"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """Copy the finished run, so that a test can change it."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def report(lohan, tmp_path: Path):
    def make(run: Path) -> str:
        ended = lohan("report", run, "-o", tmp_path / "report.html")
        assert ended.code == 0, ended
        assert ended.out == f"report: {tmp_path / 'report.html'}\n"
        return (tmp_path / "report.html").read_text(encoding="utf-8")

    return make


# -- what it holds --------------------------------------------------------------------------------


def test_numbers_are_those_of_the_run(page, finished):
    rows = step_rows(RunFolder(finished))
    view = PageElements(page).data
    loss = view["charts"]["loss"]
    assert loss[0]["x"] == [row["step"] for row in rows]
    assert loss[0]["y"] == [row["loss"] for row in rows]
    assert loss[1]["name"] == "evaluation" and loss[1]["x"] == [4, 8]
    assert view["charts"].keys() == {"loss", "speed", "rate", "norm", "resident", "busy"}
    tiles = {meaning: value for value, meaning in view["tiles"]}
    assert "8 of 8" in tiles.values() and "written to SSD" in tiles
    assert view["samples"][0][1] == "the cat"
    assert "lr = 0.001" in view["settings"]
    assert {"torch", "transformers"} <= {name for name, _ in view["versions"]}
    assert view["state"]["name"] == "finished"


def test_predicted_beside_measured(page, finished):
    lanes = PageElements(page).data["lanes"]
    assert re.search(r"Predicted from rates measured in step \d", lanes["note"])
    measured = measured_lanes(read_run(RunFolder(finished)))
    assert {"compute", "ssd", "optimizer"} <= measured.keys() and all(measured.values())
    assert [row["measured_s"] for row in lanes["rows"]] == list(measured.values())
    assert lanes["bottleneck"][0] in [LANE_NAMES[lane] for lane in measured]


def test_wear_in_rated_lives_and_money(page, run, report):
    """Also of options that were planned when the run began."""
    shown = PageElements(page).shown
    assert "less than a thousandth of the rated life of" in shown and "less than a cent" in shown
    assert "% of the rated" not in shown and "USD per TB" in shown
    rows = [json.loads(line) for line in RunFolder(run).journal.read_text().splitlines()]
    other = {"option": "--moments int8", "step_s": 2.5, "written_bytes": 1e15, "note": "rounded"}
    for row in rows:
        row.update({"instead": [other]} if row["event"] == "start" else {})
    RunFolder(run).journal.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = PageElements(report(run)).shown
    assert "with --moments int8" in shown and "times the rated life" in shown
    assert "2.5 s per step, as planned; rounded" in shown


def test_the_rest_is_written_at_the_rate_of_the_last_plan(run, report):
    """Not at that of the first steps, which may write all that later ones leave in memory."""
    folder = RunFolder(run)
    steps = [row for row in read_rows(folder.metrics_file) if "loss" in row]
    for number, row in enumerate(steps):
        row["ssd_written_bytes"] = 2**30 if number < 4 else 2**20
    folder.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in steps))
    rows = [json.loads(line) for line in folder.journal.read_text().splitlines()]
    total = len(steps) + 1024
    for row in rows:
        row.update({"total": total} if row["event"] == "start" else {})
        row.update({"step": 0} if row["event"] == "plan" else {})
    folder.journal.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = PageElements(report(run)).shown
    later = sum(2**30 if number == 3 else 2**20 for number in range(3, len(steps)))
    rate = later / (len(steps) - 3)
    assert f"at {format_bytes(rate)} per step from here" in shown


def test_memory_is_the_ledger(page, finished):
    memory = PageElements(page).data["memory"]
    plan = read_run(RunFolder(finished)).last("plan")
    host = {e["owner"]: e["bytes"] for e in plan["plan"]["ledger"] if e["tier"] == "host"}
    shown = {owner["name"]: owner["bytes"][-1] for owner in memory["owners"]}
    assert shown == dict.fromkeys(shown, 0) | host  # what only plans before this one had is 0
    assert memory["budget"] == 300 * 1024 >= sum(host.values())


def test_several_runs_are_in_one_file(lohan, finished, run, tmp_path):
    ended = lohan("report", finished, run, "-o", tmp_path / "both.html")
    assert ended.code == 0, ended
    views = json.loads(PageElements((tmp_path / "both.html").read_text()).raw["data"])["runs"]
    assert [view["path"] for view in views] == [str(finished), str(run)]


def test_timeline_is_two_steps_of_the_trace(finished):
    shown = timeline(RunFolder(finished))
    names = [span[2] for span in shown["spans"]]
    assert names.count("E") == 2 and names.count("C") >= 1
    assert len([name for name in names if name.startswith("F")]) >= 2 * 4  # embedding, 2, head
    assert all(start + length > 0 for *_, start, length in shown["spans"])
    assert all(start <= shown["length"] for *_, start, _ in shown["spans"])
    assert shown["kinds"]["F"] == "forward" and shown["kinds"]["R"] == "read weights"
    assert set(shown["kinds"]) == {name[0] for name in names}


def test_report_without_a_trace_explains_how_to_record_one(report, run):
    (run / "trace.json").unlink()
    view = PageElements(report(run)).data
    assert view["timeline"] is None
    command = f"lohan train --config {run / 'run.toml'} --out NEW --trace"
    assert view["trace_command"] == command


def test_advice_comes_from_the_planner(report, run):
    """The report contains the planner's changes and gains."""
    journal = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    collected = {}
    for slow in ("ssd", "compute"):
        for row in journal:
            if row["event"] == "measured":
                profile = row["profile"]
                profile["compute"] = profile["backward"] = [[1.0, 1e13 if slow == "ssd" else 1e6]]
                profile["head_flops"] = profile["compute"][0][1]
                for drive in profile["drives"]:
                    speed = 1e5 if slow == "ssd" else 1e12
                    drive |= {"read": speed, "write": speed, "mixed": speed}
        (run / "journal.jsonl").write_text("".join(json.dumps(row) + "\n" for row in journal))
        collected[slow] = PageElements(report(run)).shown
    gain = re.search(r"a second drive\s*(?:would give )?(\d\.\d+)x", collected["ssd"])
    assert gain and float(gain[1]) > 1.8
    assert re.search(r"--host (450|600|1200)KiB", collected["ssd"])
    assert "second drive" not in collected["compute"]


def test_a_run_from_before_the_journal(report, run):
    (run / "journal.jsonl").unlink()
    page = PageElements(report(run))
    assert "No advice is available" in page.shown and "No prediction" in page.shown
    assert page.data["charts"]["loss"][0]["y"]


def test_report_of_a_missing_model(report, run):
    text = (run / "run.toml").read_text()
    (run / "run.toml").write_text(re.sub(r'model = ".*"', 'model = "/no/such/model"', text))
    assert "No advice is available: /no/such/model" in PageElements(report(run)).shown


# -- what it must not hold ------------------------------------------------------------------------


def test_report_loads_nothing_from_outside(page):
    for tag, attributes in PageElements(page).tags:
        assert tag not in ("img", "link", "iframe", "object", "embed", "base", "form", "a")
        assert not attributes.keys() & {"src", "href", "action", "srcset"}
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page and "@import" not in page
    assert "url(" not in page.replace("url(#", "")  # a clip path of the page itself
    policy = next(a["content"] for _, a in PageElements(page).tags if a.get("http-equiv"))
    assert policy.startswith("default-src 'none';")


def test_everything_is_escaped(report, run, tmp_path):
    """Prompts, answers, paths, names of owners and versions may contain markup."""
    (run / "samples.jsonl").write_text(
        json.dumps({"step": 1, "samples": [{"prompt": EVIL, "text": EVIL}]}) + "\n"
    )
    journal = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    for row in journal:
        if row["event"] == "start":
            row["versions"][EVIL] = EVIL
            row["machine"]["node"] = EVIL
        if row["event"] == "plan":
            row["plan"]["ledger"][0]["owner"] = EVIL
    (run / "journal.jsonl").write_text("".join(json.dumps(row) + "\n" for row in journal))
    named = tmp_path / "<img src=x onerror=alert(3)>"
    run.rename(named)
    text = report(named)
    clean = PageElements(text)
    assert [tag for tag, _ in clean.tags].count("script") == 2
    assert "img" not in [tag for tag, _ in clean.tags]
    assert not any(key.startswith("on") for _, a in clean.tags for key in a)
    # The title is escaped; everything else is data, in which no tag can begin.
    assert named.name in clean.text and EVIL not in text
    assert clean.shown.count(EVIL) >= 4 and clean.data["name"] == named.name


# -- mistakes -------------------------------------------------------------------------------------


def test_report_rejects_folder_that_is_not_a_run(lohan, tmp_path):
    assert_refused(lohan("report", tmp_path), "is not a run folder")


def test_a_run_without_steps(lohan, run):
    (run / "metrics.jsonl").unlink()
    assert_refused(lohan("report", run), r"no step is in its log yet")


def test_a_broken_trace(lohan, run):
    (run / "trace.json").write_text("{")
    assert_refused(lohan("report", run), r"trace\.json: cannot be read as a trace", "--trace")


def test_a_place_that_cannot_be_written(lohan, finished, tmp_path):
    assert_refused(lohan("report", finished, "-o", tmp_path / "no" / "x.html"), "choose another -o")


# -- parts ----------------------------------------------------------------------------------------


def test_long_curves_are_thinned():
    rows = [{"step": i, "loss": float(i % 2)} for i in range(1, 10_001)]
    result = curve(rows, "loss")
    assert len(result["x"]) <= MOST_POINTS and result["x"][-1] == 10_000
    assert sum(result["y"]) / len(result["y"]) == pytest.approx(0.5, abs=0.01)
    rows = [{"step": 1, "loss": float("nan")}, {"step": 2}, {"step": 3, "loss": 2.0}]
    assert curve(rows, "loss") == {"x": [3], "y": [2.0]}


def test_summarises_the_bottleneck():
    advice = Advice(
        [
            Change("--host 16GiB", 1.9),
            Change("--host 12GiB", 1.2),
            Change("a second drive", 1.6),
            Change("the drives", 9.0, bound=True),
        ]
    )
    assert "".join(view_texts(bottleneck({"ssd": 8.2, "compute": 3.0}, 10.0, advice))) == (
        "drives: busiest lane, 82 % of the step; --host 16GiB would give 1.9x; a second drive 1.6x"
    )


def test_modules_become_one_script():
    script = bundle(MODULES)
    assert not re.search(r"^(import|export) ", script, re.MULTILINE)
    assert script.count("function runPage(") == 1
