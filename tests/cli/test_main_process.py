"""The command line as a process: Ctrl-C at any time, and output to a closed pipe."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from lohan import __version__
from lohan.cli import main
from lohan.store.extents import Region
from lohan.store.io_engine import aligned_buffer
from lohan.store.store import Store
from lohan.train.run_folder import RunFolder, step_rows
from tests.support import HANG_S
from tests.support.generated_cases import thinned
from tests.support.process_hooks import send_while_held
from tests.support.training_runs import (
    data_fixture,  # noqa: F401 - a fixture
    model_fixture,  # noqa: F401 - a fixture
    train_arguments,
)

ROOT = Path(__file__).resolve().parents[2]
PLAN = ("plan", "--model", "gpt-1.55b", "--machine", "rtx4090")
GIVEN_UP = "lohan: interrupted; all committed steps are on disk\n"


def process(*words: object, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        timeout=HANG_S,
        **options,
    )


# -- Ctrl-C ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "where"),
    thinned(
        product(
            ["lohan.cli.main", "typer", "lohan.train.trainer", "torch"],
            ["here", "callback", "swallowed"],
        ),
        *(0, 4, 7, 11),
    ),
)
def test_ctrl_c_while_it_starts(name, where, tmp_path):
    """The message is one line, whichever module is being imported."""
    script = ROOT / "tests" / "support" / "process_hooks.py"
    given = [option for key in ("model", "data", "out") for option in (f"--{key}", tmp_path / key)]
    ended = process(script, where, name, "train", *given, stdout=subprocess.PIPE)
    assert (ended.returncode, ended.stderr) == (130, GIVEN_UP)
    assert ended.stdout == "" and list(tmp_path.iterdir()) == []


def test_error_caused_by_ctrl_c_is_reported_as_interruption(monkeypatch, tmp_path, capsys):
    """Libraries make errors of it, and LoHan a message of those."""
    monkeypatch.setattr(sys, "argv", ["lohan", "resume", str(tmp_path)])
    with pytest.raises(KeyboardInterrupt):
        main.main(stopped=lambda: True)
    assert capsys.readouterr().err == ""


def test_ctrl_c_of_other_commands_and_ranks(monkeypatch):
    """Commands without steps do not mention any; of several ranks only the first prints."""
    script = ROOT / "tests" / "support" / "process_hooks.py"
    ended = process(script, "here", "lohan.planner.machine_plan", *PLAN)
    assert (ended.returncode, ended.stderr) == (130, "lohan: interrupted\n")
    monkeypatch.setenv("RANK", "1")
    ended = process(script, "here", "lohan.planner.machine_plan", *PLAN)
    assert (ended.returncode, ended.stderr) == (130, "")


def test_second_ctrl_c_aborts_the_step(forge, model, data, tmp_path):
    out = tmp_path / "run"
    given = train_arguments(model, data, out, "--steps", 5)
    ended = forge.run(*given, before="tests.support.process_hooks:interrupt_twice_in_a_step")
    assert (ended.code, ended.err) == (130, GIVEN_UP)
    ended = forge.run("resume", out)
    assert ended.code == 0, ended.err
    assert [row["step"] for row in step_rows(RunFolder(out))] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("count", "steps"), [(1, 3), (2, 2)])
def test_ctrl_c_in_a_backward_on_a_device(count, steps, forge, model, data, tmp_path):
    """The first Ctrl-C finishes the step, the second discards it.

    tests/softcuda/check_commands.py tests this on an accelerator, where a device thread runs
    backward.
    """
    out, more = tmp_path / "run", ["--device", "emulated", "--device-memory", "64MiB"]
    given = train_arguments(model, data, out, *more, "--steps", 5, "--commit-every", "step")
    run = forge.start(
        *given, before="tests.support.process_hooks:hold_backward", env={"HOLD": str(tmp_path)}
    )
    send_while_held(run.pid, tmp_path, count)
    ended = run.wait()
    assert ended.code == 130
    assert ended.err.endswith(GIVEN_UP) if count == 2 else "after step 3 of 5" in ended.out, ended
    ended = forge.run("resume", out)
    assert ended.code == 0 and f"resuming after step {steps} of 5" in ended.out, ended
    assert [row["step"] for row in step_rows(RunFolder(out))] == [1, 2, 3, 4, 5]


# -- output ---------------------------------------------------------------------------------------


@pytest.fixture
def unread():
    """Yield the write end of a pipe that nobody reads."""
    end, actual = os.pipe()
    os.close(end)
    yield actual
    os.close(actual)


@pytest.mark.parametrize("words", [("--help",), ("train", "--help"), ("presets",), PLAN])
def test_closed_pipe_ends_the_command_silently(words, unread):
    ended = process("-m", "lohan", *words, stdout=unread)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_closed_pipe_ends_store_ls(unread, tmp_path):
    with Store.create([tmp_path / "store"], [Region("w", (4096,))]) as store:
        store.wait(store.write("w", 0, aligned_buffer(4096)))
        store.commit({})
    ended = process("-m", "lohan", "store", "ls", tmp_path, stdout=unread)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_pipe_closed_after_the_first_line_ends_the_command():
    """As in `lohan plan ... | head -1`, the command may or may not have written everything."""
    command = f"'{sys.executable}' -m lohan {' '.join(PLAN)} | head -1"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        ["sh", "-c", command], env=env, capture_output=True, text=True, timeout=HANG_S
    )
    assert ended.stderr == "" and ended.stdout.startswith("gpt-1.55b on rtx4090")
    assert ended.stdout.count("\n") == 1


def test_prints_version():
    ended = process("-m", "lohan", "--version", stdout=subprocess.PIPE)
    assert (ended.returncode, ended.stdout) == (0, f"lohan {__version__}\n")
