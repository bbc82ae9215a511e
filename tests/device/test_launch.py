"""Ranks as processes: their environment, their exit codes and their signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lohan.device.launch import environment, is_first_to_print, is_rank, launch
from lohan.model.layout import RankInfo
from tests.support import HANG_S

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = HANG_S


def program(tmp_path: Path, body: str) -> list[str]:
    """Write a rank that records its environment, then runs the code of the test."""
    file = tmp_path / "rank.py"
    file.write_text(
        "import json, os, pathlib, signal, sys, time\n"
        "rank = int(os.environ['RANK'])\n"
        f"place = pathlib.Path({str(tmp_path)!r})\n"
        "def say(name, text=''):\n"
        "    (place / f'{name}{rank}.tmp').write_text(text)\n"
        "    (place / f'{name}{rank}.tmp').rename(place / f'{name}{rank}')\n"
        "def wait(name, of):\n"
        "    while not (place / f'{name}{of}').exists(): time.sleep(0.01)\n" + body
    )
    return [str(file)]


def wait_for(*files: Path) -> None:
    end = time.monotonic() + WAIT_S
    while not all(file.exists() for file in files):
        assert time.monotonic() < end, files
        time.sleep(0.01)


def test_ranks_get_the_environment_of_torchrun_and_return_their_exit_code(tmp_path):
    messages: list[str] = []
    ran = launch(
        3, program(tmp_path, "say('env', json.dumps(dict(os.environ)))"), note=messages.append
    )
    assert ran == 0 and not messages
    reported = [json.loads((tmp_path / f"env{rank}").read_text()) for rank in range(3)]
    assert [env["RANK"] for env in reported] == ["0", "1", "2"]
    assert [env["LOCAL_RANK"] for env in reported] == ["0", "1", "2"]
    assert {(env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) for env in reported} == {("3", "3")}
    assert len({(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in reported}) == 1
    assert is_rank(reported[0]) and not is_rank({})


def test_cores_are_shared_unless_the_user_says_how_many():
    cores = len(os.sched_getaffinity(0))
    assert environment(RankInfo(0, 1), 1, {})["OMP_NUM_THREADS"] == str(cores)
    assert environment(RankInfo(1, 2 * cores), 1, {})["OMP_NUM_THREADS"] == "1"
    assert environment(RankInfo(0, 2), 1, {"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"


@pytest.mark.parametrize(("codes", "whole"), [("[0, 130]", 130), ("[130, 2]", 2), ("[0, 3]", 3)])
def test_exit_code_of_the_run_is_the_worst_of_all_ranks(tmp_path, codes, whole):
    assert launch(2, program(tmp_path, f"sys.exit({codes}[rank])"), note=print) == whole


def test_prints_a_message_of_all_ranks_once(tmp_path, monkeypatch, capfd):
    """And what each has found out itself, by each. Ranks of torchrun do not know of each other."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    body = "from lohan.cli.main import fail\nfrom lohan.errors import ConfigError\n"
    body += "fail(ConfigError(sys.argv[1].format(rank=rank)))\n"
    for words, text in (("too small a batch", 1), ("drive {rank} is full", 2)):
        assert launch(2, [*program(tmp_path, body), words], note=print) == 2
        lines = capfd.readouterr().err.splitlines()
        assert len(lines) == text and all(line.startswith("lohan, rank ") for line in lines)
    assert is_first_to_print("the same", {}) and is_first_to_print("the same", {})


def test_ranks_ended_by_ctrl_c_are_not_reported_as_killed(tmp_path):
    messages: list[str] = []
    body = "signal.signal(signal.SIGINT, signal.SIG_DFL)\nos.kill(os.getpid(), signal.SIGINT)\n"
    assert launch(2, program(tmp_path, body), note=messages.append) == 130
    assert messages == ["lohan: interrupted"]


def test_a_killed_rank_is_named_and_those_that_stay_on_are_ended(tmp_path):
    body = (
        "if rank == 1:\n"
        "    wait('there', 0)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "say('there')\n"
        "time.sleep(60)\n"
    )
    messages: list[str] = []
    assert launch(2, program(tmp_path, body), note=messages.append, grace_s=0.3) == 2
    assert messages == ["rank 0 was ended by SIGKILL", "rank 1 was ended by SIGKILL"]


def launcher(tmp_path: Path, body: str) -> subprocess.Popen[bytes]:
    """Start a process that launches two ranks."""
    arguments = program(tmp_path, body)
    text = "from lohan.device.launch import launch\n"
    text += f"raise SystemExit(launch(2, {arguments!r}, note=print))"
    return subprocess.Popen(
        [sys.executable, "-c", text],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
    )


COUNTING = (
    "seen = []\n"
    "for number in (signal.SIGINT, signal.SIGTERM):\n"
    "    signal.signal(number, lambda n, f: seen.append(signal.Signals(n).name))\n"
    "say('there')\n"
    "while len(seen) < 2: time.sleep(0.01)\n"
    "say('seen', json.dumps(seen))\n"
    "sys.exit(130)\n"
)


def test_every_signal_reaches_every_rank_once(tmp_path):
    parent = launcher(tmp_path, COUNTING)
    wait_for(tmp_path / "there0", tmp_path / "there1")
    parent.send_signal(signal.SIGINT)
    time.sleep(0.2)
    assert parent.poll() is None  # one was not enough for the ranks
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(WAIT_S) == 130
    for rank in range(2):
        assert json.loads((tmp_path / f"seen{rank}").read_text()) == ["SIGINT", "SIGTERM"]


def test_ranks_get_sigterm_when_their_launcher_dies(tmp_path):
    body = COUNTING.replace("len(seen) < 2", "len(seen) < 1")
    parent = launcher(tmp_path, body)
    wait_for(tmp_path / "there0", tmp_path / "there1")
    parent.kill()
    parent.wait(WAIT_S)
    wait_for(tmp_path / "seen0", tmp_path / "seen1")
    assert json.loads((tmp_path / "seen1").read_text()) == ["SIGTERM"]


def test_signal_handlers_are_restored(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    launch(1, program(tmp_path, ""), note=print)
    assert signal.getsignal(signal.SIGINT) is before
