"""Run the GPU suite on software CUDA, in an environment that is created in PLACE.

    python -m tests.softcuda PLACE VERSION [--ci] [pytest's arguments]

If the environment cannot be created, this prints one line and does not fail; a failing test does.

With `--ci`, the time is limited: a download that takes longer is abandoned, testing stops at the
first failure, and tests that have not run when the time is over are left out.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from tests.softcuda.environment import COMPILING, set_up

ROOT = Path(__file__).resolve().parents[2]
FILES = ("device", "order", "training", "integrated", "commands")
FETCH_S, TESTS_S = 8 * 60, 12 * 60  # in CI, where `make test` has taken most of the time
INTERRUPTED = 2  # pytest's


def main(place: Path, version: str, *more: str) -> int:
    in_ci = "--ci" in more
    missing = [tool for tool in ("g++", "gcc", "nm", "readelf") if shutil.which(tool) is None]
    if missing:
        print(f"skipped: software CUDA is built with {', '.join(missing)}, not found here")
        return 0
    try:
        python = set_up(place, version, within_s=FETCH_S if in_ci else None)
    except (subprocess.SubprocessError, OSError) as error:
        if (place / COMPILING).exists():
            raise
        why = "not here in time" if isinstance(error, subprocess.TimeoutExpired) else str(error)
        print(f"skipped: torch {version} for CUDA cannot be had here ({why})")
        return 0
    files = [f"tests/softcuda/check_{name}.py" for name in FILES]
    command = [python, "-m", "pytest", "-q", "-m", "gpu", "-n", "logical", *files]
    command += [
        "tests/end_to_end/test_gpu.py",
        *(argument for argument in more if argument != "--ci"),
    ]
    if in_ci:
        command.append("-x")
    return _run(list(map(str, command)), TESTS_S if in_ci else None)


def _run(command: list[str], within_s: float | None) -> int:
    """Run a command; with -x, tests stopped at the time limit have not failed."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SOFTCUDA_ORDER": "1"}
    child = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True)
    try:
        return child.wait(within_s)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGINT)
        code = _ended(child)
        print(
            f"software CUDA: stopped after {within_s / 60:.0f} minutes; no test had failed by then"
        )
        return 0 if code in (INTERRUPTED, -signal.SIGINT, None) else code
    except BaseException:
        os.killpg(child.pid, signal.SIGKILL)
        raise


def _ended(child: subprocess.Popen[bytes]) -> int | None:
    try:
        return child.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        return None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
