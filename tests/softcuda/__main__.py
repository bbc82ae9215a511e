"""`python -m tests.softcuda PLACE VERSION [pytest's arguments]`: the GPU suite on software CUDA, in
an environment that is made in PLACE. Where one cannot be had, this says so and is no failure."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.softcuda.environment import COMPILING, set_up

ROOT = Path(__file__).resolve().parents[2]
FILES = ("device", "training", "commands")


def main(place: Path, version: str, *more: str) -> int:
    missing = [tool for tool in ("g++", "gcc", "nm", "readelf") if shutil.which(tool) is None]
    if missing:
        print(f"skipped: software CUDA is built with {', '.join(missing)}, not found here")
        return 0
    try:
        python = set_up(place, version)
    except (subprocess.CalledProcessError, OSError) as error:
        if (place / COMPILING).exists():
            raise
        print(f"skipped: torch {version} for CUDA cannot be had here ({error})")
        return 0
    files = [f"tests/softcuda/check_{name}.py" for name in FILES]
    command = [python, "-m", "pytest", "-q", "-m", "gpu", *files, "tests/test_gpu.py", *more]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(list(map(str, command)), cwd=ROOT, env=env).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
