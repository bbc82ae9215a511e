"""A run resumed after kill -9 at any instant, Ctrl-C or SIGTERM equals an uninterrupted one."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from lohan.train.run_folder import RunFolder, eval_rows, step_rows
from tests.support import training_runs
from tests.support.forked_commands import (
    TINY_STEPS,
    Boundary,
    Ended,
    Forge,
    Run,
    tiny_arguments,
    tiny_result,
    write_tiny_inputs,
)

COMMIT = {"fsync", "fsync done", "replace", "replace done", "sync", "sync done"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_inputs(tmp_path_factory.mktemp("inputs"))


def evaluated_result(out: Path) -> dict[str, Any]:
    """Return everything that must not depend on interruptions."""
    folder = RunFolder(out)
    samples = out / "samples.jsonl"
    return {
        "steps": [(row["step"], row["loss"]) for row in step_rows(folder)],
        "evaluations": [(row["step"], row["eval_loss"]) for row in eval_rows(folder)],
        "model": training_runs.exported_bytes(folder.model),
        "best": training_runs.exported_bytes(folder.best),
        "samples": samples.read_text() if samples.exists() else "",
    }


def command_options(settings: dict[str, Any]) -> list[str]:
    named = {"model", "data", "out"}
    created: list[str] = []
    for key, value in settings.items():
        if key in named:
            created += [f"--{key}", str(value)]
        else:
            text = value if not isinstance(value, (bool, Path)) else json.dumps(value, default=str)
            created += ["--set", f"{key}={text}"]
    return created


def uninterrupted(forge: Forge, inputs: Path, folder: Path, *more: object):
    """Return the result of a run and the names of its boundaries."""
    ended = forge.run(
        "train", *tiny_arguments(inputs, folder / "run", *more), trace=folder / "trace"
    )
    assert ended.code == 0, ended.err
    names = json.loads((folder / "trace").read_text())
    weights, rows = tiny_result(folder / "run")
    assert [step for step, _, _ in rows] == list(range(1, TINY_STEPS + 1))
    return (weights, rows), names


@pytest.fixture(scope="module")
def whole(forge: Forge, inputs: Path, tmp_path_factory: pytest.TempPathFactory):
    return uninterrupted(forge, inputs, tmp_path_factory.mktemp("whole"))


def go_on(forge: Forge, inputs: Path, out: Path, *more: object, **how: str) -> Ended:
    """Repeat the command after a crash, then follow the advice in its message."""
    ended = forge.run("train", *tiny_arguments(inputs, out, *more), **how)
    if ended.code == 2 and f"lohan resume {out}" in ended.err:
        return forge.run("resume", out, **how)
    return ended


def kill_and_go_on(forge, inputs, whole, out, kill_at, *more) -> None:
    expected, names = whole
    where = f"killed at {kill_at}: {names[kill_at] if isinstance(kill_at, int) else ''}"
    ended = forge.run("train", *tiny_arguments(inputs, out, *more), kill_at=kill_at)
    assert ended.code == -signal.SIGKILL, f"{where}\n{ended.err}"
    ended = go_on(forge, inputs, out, *more)
    assert ended.code == 0, f"{where}\n{ended.out}\n{ended.err}"
    assert tiny_result(out) == expected, where
    assert not [path for path in out.rglob("*") if ".tmp" in path.name], where


def instants(names: list[str], count: int, *, seed: int) -> list[Boundary]:
    """Draw random boundaries, one in each part of the run.

    Half of them are anywhere, half at the operations of a commit.
    """
    draw = random.Random(seed)
    anywhere = range(len(names))
    commit = [i for i in anywhere if names[i] in COMMIT]
    chosen = []
    for number in range(count):
        places = commit if number % 2 else anywhere
        low = len(places) * number // count
        chosen.append(places[draw.randrange(low, len(places) * (number + 1) // count)])
    return [from_last_commit(names, at) for at in chosen]


def from_last_commit(names: list[str], at: int) -> Boundary:
    """Return a boundary as its distance from the last operation of a commit.

    The operations of commits are numbered. How often a run writes and waits can depend on the
    clock, so a boundary near the end, counted from the start, may never be reached.
    """
    begin = next((i for i in range(at, -1, -1) if names[i] in COMMIT), None)
    return at if begin is None else (names[begin], names[:begin].count(names[begin]), at - begin)


def test_kill_instants_occur_in_runs_that_write_less() -> None:
    """Boundaries relative to commits exist also in runs that write less.

    Runs with speculative steps that are updated again write less; their last boundaries are
    those of the export.
    """
    commit, write = ["fsync", "fsync done", "replace", "replace done"], ["write", "write done"]
    longer = [*4 * write, *commit, *6 * write, *4 * commit]
    shorter = [*4 * write, *commit, *3 * write, *4 * commit]
    for at in range(len(longer)):
        actual = from_last_commit(longer, at)
        assert crossed(longer, actual) == at
        assert crossed(shorter, actual) is not None, "the process ends before it is killed"
    assert crossed(shorter, len(longer) - 1) is None  # which is why


def crossed(names: list[str], kill_at: Boundary) -> int | None:
    """Return the boundary at which a run is killed, or None if it reaches its end."""
    if isinstance(kill_at, int):
        return kill_at if kill_at < len(names) else None
    name, count, more = kill_at
    first = [i for i, item in enumerate(names) if item == name][count]
    return first + more if first + more < len(names) else None


def test_phases_from_which_kills_are_drawn_occur(forge, tmp_path):
    """A renamed phase would end the processes of benchmarks/kills.py at once."""
    ended = forge.run(
        "--help",
        before="tests.support.process_hooks:log_phases",
        env={"LOHAN_PHASE": str(tmp_path / "phase")},
    )
    assert ended.code == 0 and (tmp_path / "phase").exists(), ended.err


@pytest.mark.parametrize(
    "number", [n if n == 5 else pytest.param(n, marks=pytest.mark.slow) for n in range(6)]
)
def test_killed_run_resumes_to_the_uninterrupted_result(number, forge, inputs, whole, tmp_path):
    kill_and_go_on(forge, inputs, whole, tmp_path / "run", instants(whole[1], 6, seed=7)[number])


@pytest.mark.parametrize(
    ("optimizer", "moments", "number"),
    [("adamw", "int8", 1), ("lion", "bf16", 2), ("sgd", "int8", 3)],
)
@pytest.mark.slow
def test_kill_with_other_optimizers(optimizer, moments, number, forge, inputs, tmp_path):
    more = ("--optimizer", optimizer, "--moments", moments)
    whole = uninterrupted(forge, inputs, tmp_path, *more)
    kill_at = instants(whole[1], 4, seed=9)[number]
    kill_and_go_on(forge, inputs, whole, tmp_path / "killed", kill_at, *more)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("host", "again", "number"),
    [
        ("300KiB", True, 5),
        *(
            pytest.param(host, host == "300KiB", number, marks=SLOW)
            for host in ("300KiB", "2MiB")
            for number in range(12)
        ),
    ],
)
def test_kill_while_norms_cross_the_limit(host, again, number, forge, inputs, tmp_path):
    """A run killed around clipped steps resumes to the result without overlap.

    Speculative steps run again or, if there is room for all gradients, are updated again.
    """
    more = ("--clip", 3, "--steps", 12, "--schedule", "constant", "--host", host)
    plain, run, killed = (tmp_path / name for name in ("plain", "run", "killed"))
    assert forge.run("train", *tiny_arguments(inputs, plain, *more, "--no-overlap")).code == 0
    assert (
        forge.run("train", *tiny_arguments(inputs, run, *more), trace=tmp_path / "trace").code == 0
    )
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert (
        sum(row["speculated"] for row in rows) >= 6 and sum(row["rolled_back"] for row in rows) == 2
    )
    plan = json.loads((run / "journal.jsonl").read_text().splitlines()[1])["plan"]
    assert bool(plan["spilled_gradients"]) is again
    expected, names = tiny_result(plain), json.loads((tmp_path / "trace").read_text())
    assert tiny_result(run) == expected
    kill_at = instants(names, 12, seed=3)[number]
    kill_and_go_on(forge, inputs, (expected, names), killed, kill_at, *more)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(12))
def test_kill_while_writing_behind(number, forge, inputs, tmp_path):
    """Every step is clipped, and what stays in memory is written beside the next backward."""
    more = ("--clip", 0.001, "--host", "2MiB")
    plain, run, killed = (tmp_path / name for name in ("plain", "run", "killed"))
    assert forge.run("train", *tiny_arguments(inputs, plain, *more, "--no-overlap")).code == 0
    assert (
        forge.run("train", *tiny_arguments(inputs, run, *more), trace=tmp_path / "trace").code == 0
    )
    plan = json.loads((run / "journal.jsonl").read_text().splitlines()[1])["plan"]
    cached = set(plan["host_cached_weights"])
    assert any(group in cached for group, _ in plan["host_cached_state"])
    expected, names = tiny_result(plain), json.loads((tmp_path / "trace").read_text())
    assert tiny_result(run) == expected
    kill_at = instants(names, 12, seed=5)[number]
    kill_and_go_on(forge, inputs, (expected, names), killed, kill_at, *more)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(30))
def test_kill_long_form(number, forge, inputs, whole, tmp_path):
    kill_and_go_on(forge, inputs, whole, tmp_path / "run", instants(whole[1], 30, seed=8)[number])


@pytest.mark.slow
def test_kill_at_every_boundary_of_the_first_commit(forge, inputs, whole, tmp_path):
    """The range is from the last write of the first generation to the log of the first step."""
    names = whole[1]
    first = names.index("sync")
    last = first + 2 * names[first:].index("write")
    for number in range(first - 2, last):
        kill_and_go_on(forge, inputs, whole, tmp_path / str(number), number)


def test_kill_between_first_commit_and_first_step(forge, inputs, whole, tmp_path):
    """The window in which a store is whole and no step has been logged."""
    names = whole[1]
    committed = names.index("replace done", names.index("sync") + 6)
    kill_and_go_on(forge, inputs, whole, tmp_path / "run", committed)


LINKED = ("--device", "emulated", "--device-memory", "2MiB", "--host", "2MiB", "--clip", 0)


@pytest.mark.parametrize("mode", ["balanced", pytest.param("optimized", marks=SLOW)])
def test_kill_between_commit_and_log_on_a_device(mode, forge, inputs, tmp_path):
    """Rows that the log lacks after a kill are restored from the manifest.

    With a device, a step is committed while the next one runs, and its row is logged after
    that.
    """
    more = (*LINKED, "--update-mode", mode)
    expected, _ = uninterrupted(forge, inputs, tmp_path, *more)
    late = 0
    for number in (3,):
        out = tmp_path / str(number)
        ended = forge.run(
            "train",
            *tiny_arguments(inputs, out, *more),
            kill_at=("commit done", number),
            before="tests.support.process_hooks:log_phases",
            env={"LOHAN_PHASE": str(tmp_path / "phase")},
        )
        assert ended.code == -signal.SIGKILL, ended.err
        log = out / "metrics.jsonl"
        rows = len(log.read_text().splitlines()) if log.exists() else 0
        late += rows < number
        ended = forge.run("resume", out)
        assert ended.code == 0, ended.err
        assert tiny_result(out) == expected
    assert late == 1, "every kill came before the row of the step that was committed"


def test_run_killed_while_loading_can_be_started_again(forge, inputs, whole, tmp_path):
    """Nothing is committed: resume reports this, and the same command starts again."""
    out = tmp_path / "run"
    kill_at = whole[1].index("write done") + 4
    assert forge.run("train", *tiny_arguments(inputs, out), kill_at=kill_at).code == -signal.SIGKILL
    ended = forge.run("resume", out)
    assert ended.code == 2 and "start it again" in ended.err and "Traceback" not in ended.err
    ended = forge.run("train", *tiny_arguments(inputs, out))
    assert ended.code == 0, ended.err
    assert tiny_result(out) == whole[0]


def test_run_finishes_although_resumed_processes_are_killed_too(forge, inputs, whole, tmp_path):
    """Every process is killed, including resumed ones, and the run still finishes."""
    out, expected = tmp_path / "run", whole[0]
    draw = random.Random(5)
    ended = forge.run("train", *tiny_arguments(inputs, out), kill_at=len(whole[1]) // 3)
    deaths = 0
    while ended.code == -signal.SIGKILL and deaths < 4:
        deaths += 1
        ended = forge.run("resume", out, kill_at=draw.randrange(20, 90))
    if ended.code:
        ended = forge.run("resume", out)
    assert deaths >= 3, ended.err
    assert ended.code == 0, ended.err
    assert tiny_result(out) == expected


def test_resumes_after_sigkill_at_a_random_moment(forge, inputs, whole, tmp_path):
    """A signal at a moment of the clock's choosing."""
    out = tmp_path / "run"
    run = forge.start("train", *tiny_arguments(inputs, out))
    assert send_after_first_step(run, out, signal.SIGKILL).code == -signal.SIGKILL
    assert forge.run("resume", out).code == 0
    assert tiny_result(out) == whole[0]


def send_after_first_step(run: Run, out: Path, number: int) -> Ended:
    while not (out / "metrics.jsonl").exists():
        time.sleep(0.001)
        assert Path(f"/proc/{run.pid}").exists()
    os.kill(run.pid, number)
    return run.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stop_signal_finishes_the_step(number, forge, inputs, whole, tmp_path):
    out = tmp_path / "run"
    run = forge.start("train", *tiny_arguments(inputs, out))
    ended = send_after_first_step(run, out, number)
    assert ended.code == 130, ended.err
    assert f"lohan resume {out}" in ended.out
    assert "Traceback" not in ended.err
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1)) and 1 <= len(steps) < TINY_STEPS
    assert f"stopped after step {steps[-1]} of {TINY_STEPS}" in ended.out
    assert not (out / "model").exists()
    ended = forge.run("resume", out)
    assert ended.code == 0, ended.err
    assert f"resuming after step {steps[-1]} of {TINY_STEPS}" in ended.out
    assert tiny_result(out) == whole[0]


def test_resume_of_a_finished_run_exports_nothing_again(forge, inputs, whole, tmp_path):
    """It does if an exported file is missing or the run has more steps."""
    out = tmp_path / "run"
    assert forge.run("train", *tiny_arguments(inputs, out)).code == 0
    weights = out / "model" / "model.safetensors"

    def resumed() -> tuple[bool, str]:
        before = weights.stat().st_ino if weights.exists() else 0
        ended = forge.run("resume", out)
        assert ended.code == 0, ended.err
        assert f"fine-tuned model: {out / 'model'}" in ended.out and tiny_result(out) == whole[0]
        return weights.stat().st_ino != before, ended.out

    again, output = resumed()
    assert not again and f"the run is finished, at step {TINY_STEPS} of {TINY_STEPS}" in output
    assert "written per step" not in output and "exporting" not in output
    for lost in (weights, out / "model" / "config.json"):
        lost.unlink()
        again, output = resumed()
        assert again and lost.exists() and "the run is finished" not in output
        assert not resumed()[0]
    settings = (out / "run.toml").read_text()
    (out / "run.toml").write_text(f"{settings}\n# by hand\n")
    assert not resumed()[0], "a comment is no setting"
    weights.write_bytes(bytes(10))
    ended = forge.run("resume", out)
    assert ended.code == 2 and "which this run did not write or which has changed" in ended.err


def test_resume_of_a_finished_run_can_extend_it(forge, inputs, whole, tmp_path):
    out = tmp_path / "run"
    constant = ["--schedule", "constant"]
    for name, steps in (("long", TINY_STEPS), ("run", 3)):
        given = [*tiny_arguments(inputs, tmp_path / name), *constant, "--steps", steps]
        assert forge.run("train", *given).code == 0
    ended = forge.run("resume", out)
    assert ended.code == 0 and "finished, at step 3 of 3; --steps extends it" in ended.out
    settings = (out / "run.toml").read_text()
    ended = forge.run("resume", out, "--steps", 2)
    assert ended.code == 2 and "--steps 2: the run has done 3 steps already" in ended.err
    assert (out / "run.toml").read_text() == settings
    assert forge.run("resume", out, "--steps", TINY_STEPS).code == 0
    assert tiny_result(out) == tiny_result(tmp_path / "long")


def test_second_start_in_a_folder_is_refused(forge, inputs, whole, tmp_path):
    """One start is refused, and removes nothing of the other."""
    out = tmp_path / "run"
    runs = [forge.start("train", *tiny_arguments(inputs, out)) for _ in range(2)]
    ended = [run.wait() for run in runs]
    assert sorted(e.code for e in ended) == [0, 2], [e.err for e in ended]
    refused = next(e.err for e in ended if e.code == 2)
    assert "is in use by process" in refused or "holds a run already" in refused
    assert tiny_result(out) == whole[0]


# -- updates in backward, and in the next forward -------------------------------------------------

WAYS = {
    "optimized": ("--clip", 0, "--update-mode", "optimized", "--trace"),
    "balanced": ("--clip", 0, "--update-mode", "balanced", "--host", "500KiB", "--trace"),
}


@pytest.fixture(scope="module")
def ways(forge: Forge, inputs: Path, whole, tmp_path_factory: pytest.TempPathFactory):
    """Run both update modes without clipping; they differ only in when updates happen."""
    collected = {}
    for way, more in WAYS.items():
        folder = tmp_path_factory.mktemp(way)
        collected[way] = uninterrupted(forge, inputs, folder, *more)
        events = json.loads((folder / "run" / "trace.json").read_text())["traceEvents"]
        spans = {e["name"]: e["ts"] + e["dur"] for e in events if e["ph"] == "X"}
        held = [name for name in spans if name.startswith("H")]
        assert bool(held) is (way == "balanced"), "the budget decides whether updates wait"
    assert collected["optimized"][0] == collected["balanced"][0] != whole[0]
    return collected


# In the commit of the n-th step (0 is the load): before the sync of the state, before and after the
# new manifest takes the place of the old one, and at a write of a step in flight.
KILLS = [("sync", 3), ("replace", 4), ("replace done", 5), ("write done", 60)]


@pytest.mark.parametrize(
    ("way", "kill_at"),
    [
        pytest.param(way, kill_at, marks=() if number == 1 + second else pytest.mark.slow)
        for second, way in enumerate(WAYS)
        for number, kill_at in enumerate(KILLS)
    ],
)
def test_kill_without_clipping(way, kill_at, forge, inputs, ways, tmp_path):
    kill_and_go_on(forge, inputs, ways[way], tmp_path / "run", kill_at, *WAYS[way])


@pytest.mark.slow
@pytest.mark.parametrize("number", range(30))
@pytest.mark.parametrize("way", WAYS)
def test_kill_without_clipping_long_form(way, number, forge, inputs, ways, tmp_path):
    kill_at = instants(ways[way][1], 30, seed=9)[number]
    kill_and_go_on(forge, inputs, ways[way], tmp_path / "run", kill_at, *WAYS[way])


# -- commits by interval ----------------------------------------------------------------------

RARELY = {
    "waiting": ("--clip", 1, "--commit-every", 3, "--steps", 9, "--host", "2MiB"),
    "in place": ("--clip", 0, "--commit-every", 3, "--steps", 9),
}


@pytest.mark.parametrize(
    ("way", "number"),
    [
        pytest.param(way, number, marks=() if (way, number) == ("waiting", 6) else SLOW)
        for way in RARELY
        for number in range(12)
    ],
)
def test_kill_between_commits(way, number, forge, inputs, tmp_path):
    """A run killed between commits returns to its last commit and repeats at most three steps.

    Their rows are dropped from the log, and all bits are those of the uninterrupted run.
    """
    more, run, out = RARELY[way], tmp_path / "run", tmp_path / "killed"
    assert (
        forge.run("train", *tiny_arguments(inputs, run, *more), trace=tmp_path / "trace").code == 0
    )
    expected, names = tiny_result(run), json.loads((tmp_path / "trace").read_text())
    kill_at = instants(names, 12, seed=3)[number]
    ended = forge.run("train", *tiny_arguments(inputs, out, *more), kill_at=kill_at)
    assert ended.code == -signal.SIGKILL, ended.err
    logged = step_count(out / "metrics.jsonl")
    ended = go_on(forge, inputs, out, *more)
    assert ended.code == 0, ended.err
    if "the run is finished" not in ended.out:
        assert "commits every 3 steps, and before evaluations, snapshots and" in ended.out
    if "resuming after step " in ended.out:  # not where it died before its first step, or after all
        back_to = int(ended.out.partition("resuming after step ")[2].split()[0])
        assert ("not committed and are repeated" in ended.out) == (logged > back_to)
        assert logged - 3 <= back_to and back_to in (0, 1, 2, 5, 8)
    assert tiny_result(out) == expected


def step_count(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_stopping_commits_the_uncommitted_steps(forge, inputs, tmp_path):
    """Ctrl-C between two commits costs no step."""
    out, more = tmp_path / "run", ("--commit-every", "1h", "--steps", 400, "--host", "2MiB")
    run = forge.start("train", *tiny_arguments(inputs, out, *more))
    while step_count(out / "metrics.jsonl") < 4:
        time.sleep(0.001)
        assert Path(f"/proc/{run.pid}").exists()
    os.kill(run.pid, signal.SIGINT)
    ended = run.wait()
    steps = step_count(out / "metrics.jsonl")
    assert ended.code == 130 and f"stopped after step {steps} of 400" in ended.out, ended.err
    ended = forge.run("resume", out, "--steps", steps)
    assert f"is at step {steps} of {steps} already" in ended.out, ended.err


# -- replanning in the middle ------------------------------------------------------------------

ANEW = ("--activations", "holistic", "--host", "450KiB")


@pytest.fixture(scope="module")
def replanned(forge: Forge, inputs: Path, whole, tmp_path_factory: pytest.TempPathFactory):
    """Run a training that changes its plan after the third step."""
    folder = tmp_path_factory.mktemp("replanned")
    given = [*tiny_arguments(inputs, folder / "run"), *ANEW]
    ended = forge.run(
        "train", *given, trace=folder / "trace", before="tests.support.process_hooks:replan_at_once"
    )
    assert ended.code == 0, ended.err
    assert "after step 3: measured the first steps; a new plan" in ended.out
    assert tiny_result(folder / "run") == whole[0]
    return json.loads((folder / "trace").read_text())


@pytest.mark.parametrize(
    "share",
    [
        pytest.param(0.45, marks=pytest.mark.slow),
        pytest.param(0.55, marks=pytest.mark.slow),
        0.62,
        pytest.param(0.8, marks=pytest.mark.slow),
    ],
)
def test_kill_around_a_new_plan(share, forge, inputs, whole, replanned, tmp_path):
    """The kills begin with the third step; a resumed run starts with its first plan and replans."""
    given = [*tiny_arguments(inputs, tmp_path / "run"), *ANEW]
    kill_at = int(share * len(replanned))
    ended = forge.run(
        "train", *given, kill_at=kill_at, before="tests.support.process_hooks:replan_at_once"
    )
    assert ended.code == -signal.SIGKILL, ended.err
    ended = forge.run(
        "resume", tmp_path / "run", before="tests.support.process_hooks:replan_at_once"
    )
    assert ended.code == 0, f"killed at {kill_at}: {replanned[kill_at]}\n{ended.err}"
    assert tiny_result(tmp_path / "run") == whole[0]
    assert not list((tmp_path / "run").glob("*-activations"))


def test_kill_between_evaluations(forge, tmp_path_factory, tmp_path):
    """Best evaluation, early-stop count and samples survive a kill.

    This includes a kill between an evaluation and its row in the log.
    """
    inputs = training_runs.write_evaluated_inputs(tmp_path_factory.mktemp("held"))
    whole = training_runs.worsening_settings(inputs, tmp_path / "whole")
    ended = forge.run("train", *command_options(whole), trace=tmp_path / "trace")
    assert ended.code == 0, ended.err
    expected = evaluated_result(tmp_path / "whole")
    assert len(expected["evaluations"]) > 3
    names = json.loads((tmp_path / "trace").read_text())
    exported = [i for i, name in enumerate(names) if name == "rename done"]
    for place in (exported[1] + 1, len(names) * 2 // 3):
        out = tmp_path / f"killed-{place}"
        given = command_options(training_runs.worsening_settings(inputs, out))
        assert forge.run("train", *given, kill_at=place).code == -signal.SIGKILL
        ended = forge.run("resume", out)
        assert ended.code == 0, ended.err
        assert evaluated_result(out) == expected, names[place]
