"""Wheels are built for an old glibc, and work where there is no compiler."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_wheel_is_installed_and_trains_without_a_compiler(tmp_path: Path) -> None:
    """Downloads a compiler and the packages that LoHan depends on; takes minutes."""
    script, trial = ROOT / "csrc" / "wheels.py", ROOT / "csrc" / "try_wheel.py"
    subprocess.run([sys.executable, script, "--out", tmp_path], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert "manylinux_2_28" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        assert any(name.startswith("lohan/_core.") for name in archive.namelist())
    subprocess.run([sys.executable, trial, tmp_path], check=True)
