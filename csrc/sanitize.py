"""Builds the native core with the address and undefined-behaviour sanitizers and runs the native
tests on it: python csrc/sanitize.py [pytest arguments]. Needs cmake, ninja and nanobind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "sanitize"
TESTS = [
    "tests/test_native_adamw.py", "tests/test_native_updates.py", "tests/test_native_crc.py",
    "tests/storage/test_engine.py",
]  # fmt: skip

# Found by every interpreter that the tests start, and ahead of an editable install.
SITECUSTOMIZE = """
import importlib.util, sys

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "lohan._core":
            return importlib.util.spec_from_file_location(name, {extension!r})

sys.meta_path.insert(0, Finder)
"""


def build() -> Path:
    python = f"-DPython_EXECUTABLE={sys.executable}"
    options = ["-G", "Ninja", "-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DLOHAN_SANITIZE=ON", python]
    subprocess.run(["cmake", "-S", ROOT / "csrc", "-B", BUILD, *options], check=True)
    subprocess.run(["cmake", "--build", BUILD], check=True)
    return next(BUILD.glob("_core*.so"))


def runtime_library(name: str) -> str:
    compiler = os.environ.get("CXX", "c++")
    command = [compiler, f"-print-file-name={name}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    extension = build()
    site = BUILD / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(SITECUSTOMIZE.format(extension=str(extension)))
    env = os.environ | {
        # The sanitizer must be loaded before everything else, and with it what throws exceptions.
        "LD_PRELOAD": f"{runtime_library('libasan.so')} {runtime_library('libstdc++.so')}",
        # Python keeps memory until it ends on purpose; leaks of ours show in the tests instead.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "PYTHONPATH": f"{site}{os.pathsep}{ROOT}",
    }
    command = [sys.executable, "-B", "-m", "pytest", "-q", *(sys.argv[1:] or TESTS)]
    return subprocess.run(command, cwd=ROOT, env=env).returncode


if __name__ == "__main__":
    raise SystemExit(main())
