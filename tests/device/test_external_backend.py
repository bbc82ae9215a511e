"""Test the accelerator path on a torch backend outside torch's tree (backend/).

The backend has streams, events and memory of its own. A process keeps such a backend until it ends,
so the tests run in another process.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.backend import compiler

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    compiler() is None, reason="there is no C++ compiler to build the backend with"
)


def passes(*arguments: str) -> None:
    command = ["-m", "pytest", "-q", "-p", "tests.backend.plugin", "-m", "gpu", *arguments]
    ended = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-3000:]
    last = ended.stdout.strip().rpartition("\n")[2]
    assert "passed" in last and "skipped" not in last


@pytest.mark.slow
def test_the_device_is_strict_and_lohan_has_its_bits_and_stays_within_it():
    """The short form; the first time, the backend is compiled, which takes half a minute."""
    some = "check_device or llama-balanced-all or gpt2-balanced-recompute or quarter or slot"
    some += " or buffer_is or norm_is"
    passes("tests/backend/check_device.py", "tests/backend/check_training.py", "-k", some)


@pytest.mark.slow
@pytest.mark.parametrize(
    "file", ["tests/backend/check_training.py", "tests/end_to_end/test_gpu.py"]
)
def test_passes_every_check_of_the_backend(file):
    passes(file)
