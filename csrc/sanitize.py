"""Builds the native core with sanitizers and runs the native tests on it.

    python csrc/sanitize.py                      address and undefined behaviour, then threads
    python csrc/sanitize.py --address | --thread [pytest arguments]

Needs cmake, ninja and nanobind.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = [
    "tests/core/test_adamw.py",
    "tests/core/test_updates.py",
    "tests/core/test_crc.py",
    "tests/store/test_io_engine.py",
]

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


@dataclass(frozen=True)
class Build:
    sanitizers: str  # of the compiler
    library: str  # must be loaded before everything else
    options: dict[str, str]  # environment
    launcher: tuple[str, ...] = ()


BUILDS = {
    "address": Build(
        "address,undefined",
        "libasan.so",
        # Python keeps memory until it ends on purpose; leaks of ours show in the tests instead.
        {
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
            "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        },
    ),
    "thread": Build(
        "thread",
        "libtsan.so",
        # Only the core is built with it: what torch and numpy do with their own threads and locks
        # is not seen whole and would be taken for races.
        # A test forks and goes on with threads of its own.
        {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1:die_after_fork=0:exitcode=66"},
        # Its shadow memory has fixed addresses, which a random layout may have taken.
        ("setarch", "-R"),
    ),
}


def build(name: str, sanitizers: str) -> Path:
    folder = ROOT / "build" / f"sanitize-{name}"
    options = [
        "-G",
        "Ninja",
        "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
        f"-DLOHAN_SANITIZE={sanitizers}",
        f"-DPython_EXECUTABLE={sys.executable}",
    ]
    subprocess.run(["cmake", "-S", ROOT / "csrc", "-B", folder, *options], check=True)
    subprocess.run(["cmake", "--build", folder], check=True)
    return next(folder.glob("_core*.so"))


def runtime_library(name: str) -> str:
    compiler = os.environ.get("CXX", "c++")
    command = [compiler, f"-print-file-name={name}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def run(name: str, arguments: list[str]) -> int:
    result = BUILDS[name]
    extension = build(name, result.sanitizers)
    site = extension.parent / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(SITECUSTOMIZE.format(extension=str(extension)))
    paths = [str(site), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = (
        os.environ
        | result.options
        | {
            # With the sanitizer what throws exceptions.
            "LD_PRELOAD": f"{runtime_library(result.library)} {runtime_library('libstdc++.so')}",
            "PYTHONPATH": os.pathsep.join(paths),
        }
    )
    command = [*result.launcher, sys.executable, "-B", "-m", "pytest", "-q", *arguments]
    print(f"{result.sanitizers}: {' '.join(command)}", flush=True)
    return subprocess.run(command, cwd=ROOT, env=env).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    for name, item in BUILDS.items():
        parser.add_argument(f"--{name}", action="store_true", help=f"only {item.sanitizers}")
    given, arguments = parser.parse_known_args()
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    chosen = [name for name in BUILDS if getattr(given, name)] or list(BUILDS)
    return max(run(name, arguments or TESTS) for name in chosen)


if __name__ == "__main__":
    raise SystemExit(main())
