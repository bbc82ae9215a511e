"""A pytest plugin that shows the CPU time of each test file: `make test-times`.

The CPU time includes all processes that a test has started. Unlike elapsed time, it hardly depends
on what else the machine does. Imports count for the first file that needs them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SHOWN = 40  # files in the table
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_previous_s = [0.0]  # CPU time of this process and its descendants at the end of the last test
_by_file: Counter[str] = Counter()


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, its descendants, and those of them that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [child for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return 0.0  # it has ended meanwhile, and its parent counts it
    process_s = sum(map(int, fields[11:15])) / TICKS_PER_S
    return process_s + sum(cpu_seconds(int(child)) for child in children)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    report: Any = yield
    if report.when == "teardown":
        now_s = cpu_seconds(os.getpid())
        report.cpu_s, _previous_s[0] = now_s - _previous_s[0], now_s
    return report


def pytest_runtest_logreport(report: Any) -> None:
    """Add up the times; with several workers, the reports arrive in the controlling process."""
    _by_file[report.nodeid.partition("::")[0]] += getattr(report, "cpu_s", 0.0)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_sep("=", f"CPU time: {sum(_by_file.values()) / 60:.1f} minutes")
    for file, seconds in _by_file.most_common(SHOWN):
        terminalreporter.write_line(f"{seconds:7.1f} s  {file}")
