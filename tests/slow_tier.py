"""Run the slow tier slice by slice, and record the result of each slice."""

from __future__ import annotations

import argparse
import datetime
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reliability.md"
LIMIT_S = 1800
_FILES, _CALLS = "tests/end_to_end/test_no_file_lost.py", "tests/reliability/test_io_faults.py"
_MODELS, _HALF = "tests/end_to_end/test_every_model.py", "causal or masked or sequence"
SLICES = {
    "crash": ["tests/end_to_end/test_crash.py"],
    "activations": ["tests/engine/test_kept_activations.py"],
    "planner": ["tests/planner/test_machine_plan.py", "tests/cli/test_plan.py"],
    "overlap": [
        "tests/engine/test_overlap.py",
        "tests/device/test_emulated.py",
        "tests/device/test_external_backend.py",
    ],
    "benchmarks": ["tests/benchmarks/test_benchmarks.py"],
    "differential": ["tests/benchmarks/test_differential.py"],
    "models": [_MODELS, "-k", _HALF],
    "more-models": [_MODELS, "-k", f"not ({_HALF})"],
    "layouts": [_FILES, "-k", "first"],
    "more-layouts": [_FILES, "-k", "second"],
    "store": ["tests/store"],
    "faults": ["tests/reliability", f"--ignore={_CALLS}"],
    "failed-transfers": [_CALLS, "-k", "pread or pwrite"],
    "failed-syncs": [_CALLS, "-k", "(write or fsync or fdatasync) and not pwrite"],
    "failed-names": [_CALLS, "-k", "fallocate or rename or io_uring"],
    "trainers": [
        *(
            f"tests/hf/test_{name}.py"
            for name in ("scripts", "stores", "trainer", "trl_preference", "trl_sft")
        ),
        *(f"tests/train/test_{name}.py" for name in ("preference", "reward", "supervised")),
        "tests/train/test_vision_language.py",
    ],
}
REST = "rest"
TABLE = re.compile(r"(<!-- slow tier -->\n)(.*?)(<!-- end -->)", re.DOTALL)
HEAD = "| slice | date | passed | failed | skipped | minutes |\n|---|---|---|---|---|---|\n"


def arguments_of(name: str) -> list[str]:
    if name != REST:
        return SLICES[name]
    named = {word for words in SLICES.values() for word in words if word.startswith("tests/")}
    return ["tests", *(f"--ignore={path}" for path in sorted(named))]


def run(name: str) -> dict[str, str]:
    """Run a slice, showing its output, and return its row."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "slow",
        "-n",
        "logical",
        "--dist",
        "load",
        *arguments_of(name),
    ]
    start, lines = time.monotonic(), []
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        limit = threading.Timer(LIMIT_S, os.killpg, (process.pid, signal.SIGKILL))  # workers too
        limit.start()
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
        limit.cancel()
    if process.returncode == -signal.SIGKILL:
        print(f"{name}: stopped after {LIMIT_S // 60} minutes; make it two slices", flush=True)
    last = lines[-1] if lines else ""
    counts = {
        word: actual[1] if (actual := re.search(rf"(\d+) {word}", last)) else "0"
        for word in ("passed", "failed", "skipped")
    }
    errors = re.search(r"(\d+) errors?", last)
    if errors or (process.returncode not in (0, None) and counts["failed"] == "0"):
        counts["failed"] = errors[1] if errors else "1"
    minutes = f"{(time.monotonic() - start) / 60:.1f}"
    return {"slice": name, "date": datetime.date.today().isoformat(), **counts, "minutes": minutes}


def read_page() -> dict[str, dict[str, str]]:
    match = TABLE.search(PAGE.read_text())
    assert match, f"{PAGE} has no table of the slow tier"
    names, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in match[2].splitlines()
    ]
    return {row[0]: dict(zip(names, row, strict=True)) for row in rows}


def write_page(rows: dict[str, dict[str, str]]) -> None:
    slices = [name for name in (*SLICES, REST) if name in rows]
    table = HEAD + "".join(f"| {' | '.join(rows[name].values())} |\n" for name in slices)
    PAGE.write_text(TABLE.sub(lambda match: match[1] + table + match[3], PAGE.read_text()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("slices", nargs="*", metavar="SLICE")
    parser.add_argument("--list", action="store_true", help="the names of the slices")
    options = parser.parse_args()
    names = [*SLICES, REST]
    if options.list:
        print("\n".join(names))
        return 0
    if unknown := sorted(set(options.slices) - set(names)):
        parser.error(f"no slice {unknown[0]}; there are {', '.join(names)}")
    failed = False
    for name in options.slices or names:
        print(f"-- {name}", flush=True)
        row = run(name)
        write_page({**read_page(), name: row})
        failed |= row["failed"] != "0"
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
