"""`make test-cuda` as CI runs it: a failing test is a failure.

What cannot be downloaded in time is skipped with one line. The tests themselves are in
softcuda/check_*.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.softcuda import __main__ as suite
from tests.softcuda import environment


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> Any:
    """Return a function that returns exit code, output, and the command that ran the tests."""
    commands: list[list[str]] = []

    def ran(command: list[str], within_s: float | None) -> int:
        commands.append(command)
        return 1

    monkeypatch.setattr(suite, "_run", ran)
    monkeypatch.setattr(suite.shutil, "which", lambda tool: tool)

    def call(*how: str) -> tuple[int, str, list[list[str]]]:
        return suite.main(tmp_path, "2.14.1", *how), capsys.readouterr().out, commands

    return call


def test_skips_downloads_that_take_too_long(run, monkeypatch):
    def fetch(*command: object, timeout_s: float | None = None) -> None:
        if "pip" in command:
            assert timeout_s is not None and timeout_s <= suite.FETCH_S
            raise subprocess.TimeoutExpired("pip", timeout_s)

    monkeypatch.setattr(environment, "run", fetch)
    code, output, commands = run("--ci")
    assert code == 0 and not commands
    assert output == "skipped: torch 2.14.1 for CUDA cannot be had here (not here in time)\n"


def test_skips_without_failure_when_download_fails(run, monkeypatch):
    def fetch(*command: object, timeout_s: float | None = None) -> None:
        assert timeout_s is None
        if "pip" in command:
            raise subprocess.CalledProcessError(1, "pip")

    monkeypatch.setattr(environment, "run", fetch)
    code, output, commands = run()
    assert code == 0 and not commands and output.startswith("skipped: torch 2.14.1 for CUDA cannot")


def test_compile_error_is_a_failure(run, monkeypatch):
    def made(place: Path, version: str, *, within_s: float | None) -> Path:
        (place / environment.COMPILING).touch()
        raise subprocess.CalledProcessError(1, "g++")

    monkeypatch.setattr(suite, "set_up", made)
    with pytest.raises(subprocess.CalledProcessError):
        run("--ci")


@pytest.mark.parametrize("ci", [True, False])
def test_a_test_that_fails_is_a_failure(run, monkeypatch, ci):
    monkeypatch.setattr(suite, "set_up", lambda *_, **__: Path(sys.executable))
    code, output, (command,) = run(*(["--ci"] if ci else []), "--durations=3")
    assert code == 1 and not output and "--durations=3" in command
    assert ("-x" in command) == ci and "--ci" not in command


def test_tests_that_take_too_long_are_stopped_and_no_failure(capsys):
    code = suite._run([sys.executable, "-c", "import time; time.sleep(600)"], 0.2)
    assert code == 0 and "no test had failed by then" in capsys.readouterr().out
    assert suite._run([sys.executable, "-c", "raise SystemExit(1)"], 600) == 1
