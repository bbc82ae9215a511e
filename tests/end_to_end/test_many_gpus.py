"""`--gpus N` and the stores of several ranks: inspection, export, resharding."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from lohan.cli.train import resume
from lohan.config import load_config
from lohan.device import launch as launching
from lohan.errors import ConfigError, StoreError
from lohan.tools.plan_run import plan_traced
from lohan.train.run_folder import RunFolder
from lohan.ui.runs import read_run
from lohan.ui.traces import read_traces, timeline
from lohan.util.trace import LANES
from lohan.util.units import format_bytes
from tests.support import HANG_S, ranks
from tests.support.ranks import (
    assert_equal_runs,
    rank_arguments,
    rank_inputs_fixture,  # noqa: F401 - a fixture
)

ROOT = Path(__file__).resolve().parents[2]
EVEN = ("--clip", 0, "--schedule", "constant", "--update-mode", "balanced")


@pytest.fixture(scope="module")
def launched(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run two ranks, each with a drive of its own, started by one command."""
    place = tmp_path_factory.mktemp("launched")
    words = rank_arguments(
        inputs, place / "run", *EVEN, "--gpus", 2, "--ssd", place / "nvme{rank}", "--trace", steps=5
    )
    ended = subprocess.run(
        [sys.executable, "-m", "lohan", *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("step 3/5") == 1, "one rank speaks"
    return place / "run"


def test_every_rank_has_its_own_folder(launched):
    folder = RunFolder(launched)
    config = folder.config()
    assert config.budget.gpus == 2
    for rank in range(2):
        (place,) = folder.ssd_folders(config, rank)
        assert place == launched.parent / f"nvme{rank}"
        assert [p.name for p in place.iterdir()] == [f"{folder.tag(config)}-rank{rank}of2"]


def test_export_evaluation_and_stores_of_all_ranks(launched, forge, inputs, tmp_path):
    exported = forge.run("export", launched, "--out", tmp_path / "model")
    assert exported.code == 0, exported.err
    assert "weights after step 5" in exported.out
    single, again = (
        (p / "model.safetensors").read_bytes() for p in (launched / "model", tmp_path / "model")
    )
    assert single == again
    actual = [
        forge.run(
            "eval",
            where,
            "--data",
            inputs / "held.jsonl",
            "--host",
            "3MiB",
            "--ssd",
            tmp_path,
            "--json",
        )
        for where in (launched, tmp_path / "model")
    ]
    assert [e.code for e in actual] == [0, 0], actual
    losses = [json.loads(e.out)["loss"] for e in actual]
    assert losses[0] == losses[1]
    listed = forge.run("store", "ls", launched).out.splitlines()
    assert len(listed) == 2 and all("step 5, clean" in line for line in listed)
    verified = forge.run("store", "verify", launched)
    assert verified.code == 0 and verified.out.count("chunks are correct") == 2


def test_the_report_has_all_ranks_on_one_clock(launched, forge):
    ended = forge.run("report", launched)
    assert ended.code == 0, ended.err
    shown = timeline(RunFolder(launched))
    assert shown is not None
    assert shown["lanes"][0] == "0: compute" and shown["lanes"][len(LANES)] == "1: compute"
    lanes = {lane // len(LANES) for lane, *_ in shown["spans"]}
    assert lanes == {0, 1}
    first, second = read_traces(RunFolder(launched))
    net = LANES.index("net")
    ends = [[s for s in spans if s.lane == net] for spans in (first, second)]
    assert [s.name for s in ends[0]] == [s.name for s in ends[1]]
    apart = sorted(abs(a.stop - b.stop) for a, b in zip(*ends, strict=True))
    longest = max(s.stop - s.start for spans in (first, second) for s in spans)
    assert apart[len(apart) // 2] < longest
    merged = json.loads((launched / "trace-all.json").read_text())["traceEvents"]
    assert {event["pid"] for event in merged if event["ph"] == "X"} == {0, 1}
    assert "rank 1" in [e["args"]["name"] for e in merged if e["name"] == "process_name"]


def test_resume_uses_the_number_of_ranks_of_the_run(launched, monkeypatch):
    started: list[tuple[int, list[str]]] = []

    def launch(world: int, words: list[str], **_: object) -> int:
        started.append((world, words))
        return 7

    monkeypatch.setattr(launching, "launch", launch)
    monkeypatch.setattr("sys.argv", ["lohan", "resume", str(launched)])
    for gpus, world in ((None, 2), (3, 3)):
        with pytest.raises(SystemExit) as ended:
            resume(run=launched, gpus=gpus)
        assert ended.value.code == 7
        assert started.pop() == (world, ["-m", "lohan", "resume", str(launched)])
    monkeypatch.setenv("WORLD_SIZE", "2")
    launching.as_ranks(2)  # is one of them
    assert not started
    with pytest.raises(ConfigError, match="--gpus 3, and this is one of 2 ranks"):
        launching.as_ranks(3)


def test_resumed_with_one_rank_then_with_three(forge, inputs, tmp_path):
    """The result equals a run of one rank, and stores of other numbers of ranks are removed."""
    out, alone = tmp_path / "run", tmp_path / "alone"
    ended = ranks.run_ranks(forge, 2, *rank_arguments(inputs, out, *EVEN, steps=3))
    assert [e.code for e in ended] == [0, 0], ranks.errors_of_ranks(ended)
    once = forge.run("resume", out, "--steps", 4, "--gpus", 1)
    assert once.code == 0, once.err
    assert "the state of 2 ranks is resharded for 1" in once.out
    assert sorted(p.name for p in out.glob("store*")) == ["store"]
    ended = ranks.run_ranks(forge, 3, "resume", out, "--steps", 6)
    assert [e.code for e in ended] == [0] * 3, ranks.errors_of_ranks(ended)
    assert sorted(p.name for p in out.glob("store*")) == [f"store-rank{r}of3" for r in range(3)]
    assert forge.run(*rank_arguments(inputs, alone, *EVEN, steps=6)).code == 0
    assert_equal_runs(out, alone)


def test_dry_run_shows_the_plan_that_each_rank_follows(launched, forge, inputs, tmp_path):
    """The plan without a run equals that of the run, for the rows of its data."""
    words = rank_arguments(inputs, tmp_path / "run", *EVEN, "--gpus", 2, "--dry-run", steps=5)
    shown = forge.run(*words)
    assert shown.code == 0, shown.err
    assert "of each of 2 ranks" in shown.out and not (tmp_path / "run").exists()
    followed = read_run(RunFolder(launched)).last("plan")["plan"]
    for entry in followed["ledger"]:
        line = f"{entry['tier']:6}  {entry['owner']:30} {format_bytes(entry['bytes']):>11}"
        assert line in shown.out
    machine_plan = plan_traced(RunFolder(launched).config())
    assert machine_plan.plan.world == followed["world"] == 2
    assert machine_plan.parameters > machine_plan.blocks.parameters


def test_verify_with_several_ranks(forge, inputs, tmp_path):
    words = [
        "verify",
        "--model",
        inputs / "dropping",
        "--data",
        inputs / "data.jsonl",
        "--host",
        "3MiB",
        "--batch",
        5,
        "--seq",
        16,
        "--steps",
        3,
        "--ssd",
        tmp_path,
        "--clip",
        0.7,
    ]
    ended = ranks.run_ranks(forge, 2, *words)
    assert [e.code for e in ended] == [0, 0], ranks.errors_of_ranks(ended) + ended[0].out
    assert "pass: " in ended[0].out and not ended[1].out
    assert not list(tmp_path.iterdir())


def test_names_the_missing_store(forge, inputs, tmp_path):
    out = tmp_path / "run"
    ended = ranks.run_ranks(forge, 2, *rank_arguments(inputs, out, *EVEN, "--no-export", steps=2))
    assert [e.code for e in ended] == [0, 0], ranks.errors_of_ranks(ended)
    (out / "store-rank1of2").rename(tmp_path / "elsewhere")
    for words in (("export", out, "--out", tmp_path / "model"), ("resume", out)):
        refused = forge.run(*words)
        assert refused.code == 2 and "Traceback" not in refused.err
        assert f"not on this machine: rank 1 at {out / 'store-rank1of2'}" in refused.err
    one = forge.run("resume", out, "--gpus", 1)
    assert one.code == 2 and "the stores of rank 1 are not on this machine" in one.err
    assert (out / "store-rank0of2" / "manifest.json").exists()


def config_of(tmp_path: Path, *words: str):
    fixed = [f"model={tmp_path}", f"data={tmp_path}", f"out={tmp_path / 'run'}"]
    return load_config(None, assignments=[*fixed, *words])


def test_replaces_host_and_rank_in_ssd_folders(tmp_path):
    folder = RunFolder(tmp_path / "run")
    config = config_of(tmp_path, 'budget.ssd=["/a/{host}/{rank}", "/b"]')
    assert folder.ssd_folders(config, 3) == [Path("/a") / platform.node() / "3", Path("/b")]
    assert folder.ssd_folders(config_of(tmp_path), 3) == [tmp_path / "run"]


def test_more_ranks_than_rows_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"gpus: 4 are more than the examples of a batch, 3"):
        config_of(tmp_path, "budget.gpus=4", "train.batch=3")


def test_names_the_places_of_missing_stores(tmp_path):
    from lohan.train.run_folder import stores_of

    for more, move in (((), "start it"), (['budget.ssd=["/a"]'], "mount its drive if .* or start")):
        with pytest.raises(StoreError, match=rf"has no store at .*; {move}"):
            stores_of(RunFolder(tmp_path / "run"), config_of(tmp_path, *more))
