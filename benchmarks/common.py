"""Common parts of the benchmarks: the machine, tables and medians.

A number from one run on one machine has little meaning, so every benchmark runs its sides in turn
in one invocation and reports ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


# -- options and files ----------------------------------------------------------------------------


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path.cwd(), help="folder on the SSD to use")
    parser.add_argument("--json", action="store_true", help="print one JSON object, no tables")
    return parser


@contextmanager
def work_folder(parent: Path, name: str) -> Iterator[Path]:
    """Yield a new folder that is removed at the end, also after Ctrl-C or SIGTERM."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"lohan-{name}-", dir=parent.resolve()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# -- the machine ----------------------------------------------------------------------------------


def cores() -> int:
    return len(os.sched_getaffinity(0))


def machine(work: Path) -> dict[str, str]:
    """Return processor, memory and the drive under `work`, as lines of a report."""
    text = Path("/proc/cpuinfo").read_text()
    names = [x.split(":")[1].strip() for x in text.splitlines() if x.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    load = os.getloadavg()[0]
    return {
        "machine": f"{names[0] if names else platform.machine()}, {cores()} cores, "
        f"{memory:.1f} GiB of memory, Linux {platform.release()}, load {load:.1f} at the start",
        "drive": drive_of(work),
    }


def drive_of(folder: Path) -> str:
    """Return the file system, the drive and the free space of a folder."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    kind = source = "unknown"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if left.split()[2] == number:
            kind, source = right.split()[:2]
    model = ""
    for place in (f"/sys/dev/block/{number}", f"/sys/dev/block/{number}/.."):
        with suppress(OSError):
            model = f" ({(Path(place) / 'device' / 'model').read_text().strip()})"
            break
    free = shutil.disk_usage(folder).free / 2**30
    return f"{kind} on {source}{model}, {free:.0f} GiB free"


def versions(*packages: str) -> str:
    collected = [f"Python {platform.python_version()}"]
    for name in packages:
        try:
            collected.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:  # used from its source tree
            collected.append(f"{name} {import_module(name).__version__}")
    return ", ".join(collected)


# -- reports --------------------------------------------------------------------------------------


class Report:
    """Facts and tables of one benchmark, printed one by one, or all as JSON at the end."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._data: dict[str, Any] = {"facts": {}, "tables": {}}

    def head(self, work: Path, *packages: str) -> None:
        command = shlex.join(["python", *sys.orig_argv[1:]])
        self.facts({**machine(work), "versions": versions(*packages), "command": command})

    def facts(self, rows: Mapping[str, str]) -> None:
        self._data["facts"].update(rows)
        for name, value in rows.items():
            self._print(f"{name:10}{value}")

    def table(self, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self._data["tables"][title] = [dict(row) for row in rows]
        self._print(f"\n{title}\n{format_table(rows)}")

    def close(self) -> None:
        if self._as_json:
            print(json.dumps(self._data))

    def _print(self, text: str) -> None:
        if not self._as_json:
            print(text, flush=True)


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return lines with aligned columns: text to the left, numbers to the right."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_cell(row.get(name)) for name in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    left = [any(isinstance(row.get(name), str) for row in rows) for name in names]

    def line(values: Sequence[str]) -> str:
        parts = zip(values, widths, left, strict=True)
        return "  ".join(v.ljust(w) if to_left else v.rjust(w) for v, w, to_left in parts).rstrip()

    return "\n".join([line(names), line(["-" * width for width in widths]), *map(line, cells)])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return str(value)


def note(text: str) -> None:
    """Print progress to stderr, apart from the report."""
    print(text, file=sys.stderr, flush=True)


# -- numbers and peers ---------------------------------------------------------------------------


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def has_deepspeed(python: str) -> bool:
    probe = "import importlib.util as u, sys; sys.exit(u.find_spec('deepspeed') is None)"
    try:
        return subprocess.run([python, "-c", probe], timeout=120).returncode == 0
    except OSError as error:
        raise SystemExit(f"--peer-python {python}: {error.strerror}") from error


def peak_bytes() -> int:
    """Return VmHWM, the peak resident memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status names no VmHWM")
