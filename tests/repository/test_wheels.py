"""Wheels are built for an old glibc, and work where there is no compiler."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What every Linux of the manylinux standard has. The C++ library is linked statically.
LIBRARIES = {b"libc.so.6", b"libm.so.6", b"libpthread.so.0", b"libdl.so.2", b"librt.so.1"}


def native_core(wheel: Path) -> tuple[str, bytes]:
    """Return the name and the bytes of the native core in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".so"))
        return name, archive.read(name)


@pytest.mark.slow
def test_wheel_is_installed_and_trains_without_a_compiler(tmp_path: Path) -> None:
    """Downloads a compiler and the packages that LoHan depends on; takes minutes."""
    script, trial = ROOT / "csrc" / "wheels.py", ROOT / "csrc" / "try_wheel.py"
    subprocess.run([sys.executable, script, "--out", tmp_path], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert "manylinux_2_28" in wheel.name
    name, core = native_core(wheel)
    stable = sys.version_info >= (3, 12)
    assert name == "lohan/_core.abi3.so" if stable else name.startswith("lohan/_core.cpython-3")
    assert ("-abi3-" in wheel.name) is stable
    assert set(re.findall(rb"\0(lib[a-z+]+\.so\.\d+)(?=\0)", core)) <= LIBRARIES
    versions = {int(minor) for minor in re.findall(rb"\0GLIBC_2\.(\d+)", core)}
    assert versions and max(versions) <= 28
    subprocess.run([sys.executable, trial, tmp_path], check=True)
