"""The suite neither reads nor writes the cache, configuration or home folder of its user."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lohan.engine.profile import cache_file
from lohan.model.machine import Drive, Profile

ROOT = Path(__file__).resolve().parents[2]
# Tests whose result depends on a cached profile, on budgets in the environment, or on a file in
# the home folder. The first fails as soon as the cache contains any profile.
SENSITIVE = (
    "test_schedule_in_text_and_json_is_the_same or test_latest_profile_ignores_other_formats "
    "or test_suite_has_its_own_home"
)
FILES = (
    "tests/cli/test_plan.py",
    "tests/engine/test_profile.py",
    "tests/repository/test_isolation.py",
)


def test_suite_has_its_own_home() -> None:
    home = Path.home()
    assert home.name.startswith("lohan-test-home-")
    assert cache_file([]).is_relative_to(home)
    assert not [name for name in os.environ if name.startswith("LOHAN_")]


@pytest.mark.parametrize("collected", [FILES, pytest.param(("tests",), marks=pytest.mark.slow)])
def test_suite_passes_with_hostile_home(collected: tuple[str, ...], tmp_path: Path) -> None:
    """Run the sensitive tests as a user whose home folder is full.

    The slow form collects every test of the suite.
    """
    home = tmp_path / "home"
    hostile = {
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "HF_HOME": str(home / "hf"),
        "HF_TOKEN": "no-such-token",
        "LOHAN_HOST": "1KiB",
        "LOHAN_SSD": "/nonexistent",
        "LOHAN_SYNC_TIMEOUT": "never",
        "WORLD_SIZE": "2",
        "RANK": "1",
    }
    measured = Profile(
        name="other",
        device="cpu",
        compute=((1.0, 1e11),),
        head_flops=1e11,
        host_bytes=2**34,
        adam=5e8,
        drives=(Drive(name="/drive" * 30, read=2e9, write=2e9, mixed=2e9),),
    )
    files = {
        home / "cache" / "lohan" / cache_file([]).name: measured.to_toml(),
        home / ".cache" / "lohan" / cache_file([]).name: measured.to_toml(),
        home / "hf" / "token": "no-such-token",
        home / ".config" / "lohan.toml": "not = [valid",
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "--basetemp",
            str(tmp_path / "base"),
            "-k",
            SENSITIVE,
            *collected,
        ],
        cwd=ROOT,
        env={**os.environ, **hostile},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "3 passed" in run.stdout
    assert {path: path.read_text() for path in home.rglob("*") if path.is_file()} == files
