"""Remove one wait at a time from the code, and report whether a test notices.

    python benchmarks/remove_waits.py [--out FILE] [--only TEXT] [--softcuda PYTHON]

Each row below identifies a wait of the engine or of a device by its source text, and gives the text
without the wait. The package is copied and changed in one place. tests/engine/test_races.py then
runs on the copy, with one lane delayed at a time on the emulated device. For torch's accelerators,
the tests on the trial backend run as well. The waits of schedules are derived from effects;
tests/schedule/test_effects.py removes those one at a time.

With the Python of an environment of `make test-cuda`, the waits of engine and device are removed on
software CUDA instead.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

import pytest

ROOT = Path(__file__).resolve().parents[1]
RACES = "tests/engine/test_races.py"
BACKEND = "tests/device/test_external_backend.py"
CUDA_TESTS = "tests/softcuda/check_training.py"
CUDA_FIRST = "set_aside or four_slices"  # tests that are short and depend on waits
ON_CUDA = "language_models or every_buffer or padded"
PATIENCE_S = 600
# This code runs in every process of the copy, because an editable install would make `import lohan`
# import the original tree.
SITE = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "_editable" not in type(f).__module__]
"""


@dataclass(frozen=True)
class Wait:
    """A wait in the code: its file, the text with it and the text without it."""

    file: str
    what: str
    text: str
    without: str


WAITS = [
    Wait(
        "engine/lanes.py",
        "a lane waits for the actions that its action names",
        "while not (self._dropped(job) or self._closed or other.done.wait(0.2)):",
        "while False:",
    ),
    Wait(
        "engine/lanes.py",
        "the caller waits for the weights of its block",
        "        self._await(job.waits, job.action)\n        self._current",
        "        self._current",
    ),
    Wait(
        "engine/lanes.py",
        "a compute action ends when the device reaches its event",
        "        event.synchronize()\n        if begun.stamp",
        "        if begun.stamp",
    ),
    Wait(
        "engine/actions.py",
        "a transfer ends when the drive has completed it",
        "        self._wait(action, tickets)\n        finish",
        "        finish",
    ),
    Wait(
        "engine/buffers.py",
        "a weight load waits for its copy",
        "[(self._own_shard(slot, shard.numel()), shard)]).synchronize()",
        "[(self._own_shard(slot, shard.numel()), shard)])",
    ),
    Wait(
        "engine/gradient_transport.py",
        "gradients stay on the device until their copy ends",
        "        offloaded.wait()\n",
        "",
    ),
    Wait(
        "engine/gradient_transport.py",
        "gradients are copied after backward has computed them",
        'self._device.copy("d2h", pairs, after=self._device.mark())',
        'self._device.copy("d2h", pairs)',
    ),
    Wait(
        "engine/gradient_transport.py",
        "gradients are read after their copy",
        "            self.event.synchronize()\n",
        "",
    ),
    Wait(
        "engine/gradient_transport.py",
        "the sum of squares is read after its copy",
        "        self.wait()\n        return float(self._squares)\n",
        "        return float(self._squares)\n",
    ),
    Wait(
        "engine/gradient_transport.py",
        "gradients set aside are copied back after they were copied to the host",
        'self._device.copy("slices", pairs, after=aside.event)',
        'self._device.copy("slices", pairs)',
    ),
    Wait(
        "engine/gradient_transport.py",
        "sums continue after gradients set aside were copied back",
        'self._device.wait(self._device.copy("slices", pairs, after=aside.event))',
        'self._device.copy("slices", pairs, after=aside.event)',
    ),
    Wait(
        "engine/offload.py",
        "a slice is copied after compute has packed it",
        'self._device.copy("d2h", pairs, after=self._device.mark())',
        'self._device.copy("d2h", pairs)',
    ),
    Wait(
        "engine/offload.py",
        "a slice is packed after the previous slice left the buffer",
        "            self._device.wait(offloaded.copies[buffer])\n",
        "            pass\n",
    ),
    Wait(
        "engine/offload.py",
        "activations are freed after their last copy",
        "        offloaded.last.synchronize()\n",
        "",
    ),
    Wait(
        "engine/offload.py",
        "activations are read after their copy",
        'self._device.copy("h2d", pairs).synchronize()',
        'self._device.copy("h2d", pairs)',
    ),
    Wait(
        "engine/offload.py",
        "a slice is recomputed after its results were copied",
        "            self._device.wait(offloaded.copies[number % SLICE_BUFFERS])\n",
        "            pass\n",
    ),
    Wait(
        "engine/offload.py",
        "a slice is loaded after compute has used its buffer",
        "            after=self._device.mark(),\n",
        "",
    ),
    Wait(
        "device/accelerator.py",
        "a stream waits for the given event",
        "            stream.wait_event(after)\n",
        "            pass\n",
    ),
    Wait(
        "device/accelerator.py",
        "memory is reused after a lane has read it",
        "            self.wait(record_event(self._streams[lane]))\n            return\n"
        "        for tensor in tensors:",
        "            return\n        for tensor in ():",
    ),
    Wait(
        "device/accelerator.py",
        "a new slot is used after compute has used its old contents",
        "            stream.wait_event(compute_event)\n",
        "            pass\n",
    ),
]


def make_importable(place: Path, python: Path) -> None:
    """Make the tests import the copy of the package, with its native core."""
    code = "import lohan._core as c, lohan.engine.gradients as g; print(c.__file__, g.__file__)"

    def imported() -> list[str]:
        env = {**os.environ, "PYTHONPATH": str(place)}
        command = [str(python.absolute()), "-c", code]
        return subprocess.run(
            command, cwd=place, env=env, check=True, capture_output=True, text=True
        ).stdout.split()

    core = Path(imported()[0])
    (place / "sitecustomize.py").write_text(SITE)
    if core.parent != place / "lohan":
        shutil.copy2(core, place / "lohan" / core.name)
    for file in imported():
        if not Path(file).is_relative_to(place):
            raise SystemExit(f"{file} is imported instead of the copy in {place}")


def changed(source: str, old: str, new: str, *, file: str) -> str:
    if source.count(old) != 1:
        raise SystemExit(f"{file}: {source.count(old)} places look like {old!r}; mend this script")
    return source.replace(old, new)


def noticed(place: Path, changes: list[tuple[str, str, str]]) -> str:
    """Run the race tests on the copy with these changes; return the first failing test, or ""."""
    before = {}
    for file, old, new in changes:
        path = place / "lohan" / file
        before[path] = path.read_text()
        path.write_text(changed(before[path], old, new, file=file))
    try:
        device = any(file.startswith("device/") for file, _, _ in changes)
        return _run(place, [RACES, *([BACKEND] if device else [])])
    finally:
        for path, text in before.items():
            path.write_text(text)


def _run(place: Path, tests: list[str]) -> str:
    """Run tests in a forked child, so that large libraries are imported once."""
    import numpy  # noqa: F401
    import torch  # noqa: F401
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig  # noqa: F401

    with TemporaryFile("w+") as out:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
            os.chdir(place)
            sys.path.insert(0, str(place))
            exec(SITE)
            options = ["-q", "-x", "--tb=line", "-p", "no:cacheprovider"]
            os._exit(int(pytest.main([*options, *tests])))
        code = _ended(child)
        out.seek(0)
        output = out.read()
    if code is None:
        return "a test that does not end"
    if code == 0:
        return ""
    failed = [line for line in output.splitlines() if line.startswith("FAILED")]
    if not failed:
        raise SystemExit(output[-2000:])
    name = failed[0].split("::")[1].split(" - ")[0]
    if "schedule: " in output:
        return "the check of schedules"
    return f"`{name}`"


def _ended(child: int) -> int | None:
    """Return the exit code of a child, or None if it had to be killed."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def noticed_on_cuda(place: Path, python: Path, wait: Wait) -> str:
    """Return the first test on software CUDA that fails without this wait, or ""."""
    path = place / "lohan" / wait.file
    before = path.read_text()
    path.write_text(changed(before, wait.text, wait.without, file=wait.file))
    try:
        return _run_on_cuda(place, python, CUDA_FIRST) or _run_on_cuda(place, python, ON_CUDA)
    except subprocess.TimeoutExpired:
        return "a test that does not end"
    finally:
        path.write_text(before)


def _run_on_cuda(place: Path, python: Path, tests: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1"}
    command = [
        str(python),
        "-m",
        "pytest",
        "-q",
        "-x",
        "--tb=line",
        "-p",
        "no:cacheprovider",
        "-m",
        "gpu",
        CUDA_TESTS,
        "-k",
        tests,
    ]
    done = subprocess.run(
        command, cwd=place, env=env, capture_output=True, text=True, timeout=PATIENCE_S
    )
    failed = re.search(r"^(?:FAILED|ERROR) \S+::(\S+)", done.stdout, re.MULTILINE)
    if done.returncode and failed is None:
        return f"the process ends with {done.returncode}"
    return f"`{failed[1]}`" if failed else ""


def row(wait: Wait, place: Path) -> str:
    here = (wait.file, wait.text, wait.without)
    return f"| {wait.what} | {wait.file} | {noticed(place, [here]) or '**nothing**'} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="Markdown file for the table")
    parser.add_argument("--only", default="", help="waits whose file or words have this text")
    parser.add_argument("--softcuda", type=Path, help="the Python of software CUDA's environment")
    options = parser.parse_args()
    lines = ["| a wait | in | its removal is noticed by |", "|---|---|---|"]
    print("\n".join(lines))
    with TemporaryDirectory() as place:
        for name in ("lohan", "tests"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, Path(place) / name, ignore=ignored)
        make_importable(Path(place), options.softcuda or Path(sys.executable))
        if options.softcuda is None and (actual := noticed(Path(place), [])):
            raise SystemExit(f"{actual} fails as the code is")
        for wait in WAITS:
            if options.only not in wait.file and options.only not in wait.what:
                continue
            if options.softcuda is None:
                lines.append(row(wait, Path(place)))
            else:
                actual = noticed_on_cuda(Path(place), options.softcuda.absolute(), wait)
                lines.append(f"| {wait.what} | {wait.file} | {actual or '**nothing**'} |")
            print(lines[-1], flush=True)
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
