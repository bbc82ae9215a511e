"""Build wheels of the package that run on every Linux with glibc 2.28 or later.

The compiler is Clang as the PyPI package `ziglang` ships it, because it links against the symbols
of an older glibc than that of the building machine. One wheel is built for CPython 3.11, and one
with the stable ABI for CPython 3.12 and later:

    python csrc/wheels.py --python python3.11 --python python3.12

Each interpreter needs its headers. Without --python, the running interpreter builds its own wheel.
`auditwheel` checks the symbols of the native core and sets the platform tag.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GLIBC = "2.28"
PLATFORM = f"manylinux_{GLIBC.replace('.', '_')}"
# The requirements of pyproject.toml's build system, the compiler, and the check.
TOOLS = ("scikit-build-core>=0.10", "nanobind>=2.4", "cmake", "ninja", "ziglang", "auditwheel")
# nanobind's headers use stderr, which Python's header of the stable ABI does not declare. Python's
# header then repeats two definitions of the included file.
CXXFLAGS = ("-include", "stdio.h", "-Wno-macro-redefined")
REPAIR_TOOLS = ("patchelf",)


def run(*command: str | Path, env: dict[str, str] | None = None) -> str:
    """Run a command and return its output; end with that output if it fails."""
    done = subprocess.run(
        [str(part) for part in command], env=env, text=True, capture_output=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def architecture() -> str:
    """Return the name of this machine's processor, as in the tag of a wheel."""
    return platform.machine()


def build(python: str, target: Path, work: Path) -> Path:
    """Build the wheel of one interpreter, and return the file in `target`."""
    environment = work / "environment"
    run(python, "-m", "venv", environment)
    interpreter = environment / "bin" / "python"
    run(
        interpreter,
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        *TOOLS,
        *REPAIR_TOOLS,
    )
    target_flag = f"-target {architecture()}-linux-gnu.{GLIBC}"
    env = {
        **os.environ,
        "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "CXX": f"{interpreter} -m ziglang c++ {target_flag}",
        "CC": f"{interpreter} -m ziglang cc {target_flag}",
        "CXXFLAGS": " ".join((os.environ.get("CXXFLAGS", ""), *CXXFLAGS)).strip(),
    }
    pip = [interpreter, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-deps"]
    place = ["-C", f"build-dir={work / 'build'}", "-w", work / "raw"]
    run(*pip, "--no-build-isolation", *place, ROOT, env=env)
    raw = next((work / "raw").glob("*.whl"))
    repair = ["-m", "auditwheel", "repair", "--plat", f"{PLATFORM}_{architecture()}"]
    run(interpreter, *repair, "-w", work / "repaired", raw, env=env)
    wheel = next((work / "repaired").glob("*.whl"))
    target.mkdir(parents=True, exist_ok=True)
    return wheel.replace(target / wheel.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", action="append", help="interpreter to build for; repeatable")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheels")
    options = parser.parse_args()
    for python in options.python or [sys.executable]:
        with tempfile.TemporaryDirectory(prefix="lohan-wheel-") as work:
            wheel = build(python, options.out, Path(work))
        print(f"{wheel}  {wheel.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
