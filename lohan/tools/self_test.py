"""The driver of `lohan doctor --gpu`, which runs the checks of gpu_checks.py and writes a report.

Each check runs in its own process with a deadline. Its figures are compared with what such a card
should reach.

The report contains versions, figures, tracebacks and the lanes of one step of a synthetic model. It
contains no weights, data or environment variables, and `~` replaces the home folder in every path.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lohan.errors import ConfigError
from lohan.planner.presets import gpu_of
from lohan.tools.gpu_checks import CHECKS, is_real
from lohan.util.units import format_bytes

REPORT = "lohan gpu report 1"  # identifies the format of a report
OK, SLOW, SKIPPED = "ok", "slow", "skipped"
BAD = ("wrong", "failed", "crashed", "timed out")
TAIL = 4000  # The report contains this many of the last characters of a check's output.
MODULE = "lohan.tools.gpu_checks"


# -- What a card should reach ----------------------------------------------------------------------


@dataclass(frozen=True)
class Bound:
    """The lower or upper limit of a figure; exactly one of the two is set."""

    least: float | None = None
    most: float | None = None

    def holds(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (
            self.most is None or value <= self.most
        )


GBS, TFLOPS, GPS = (1e9, "GB/s"), (1e12, "TFLOP/s"), (1e9, "G parameters/s")
UNITS: dict[str, tuple[float, str]] = {
    "pin_rate": GBS,
    "h2d": GBS,
    "d2h": GBS,
    "both_ways": GBS,
    "matmul": TFLOPS,
    "block_forward": TFLOPS,
    "block_backward": TFLOPS,
    "adam": GPS,
    "adam_beside_copies": GPS,
    "free_bytes": (2**30, "GiB"),
}
ADVICE = {
    "free_bytes": "another program holds memory of the device: nvidia-smi names it",
    "pin_rate": "little free memory, or a virtual machine: close other programs",
    "h2d": "the PCIe slot is narrow or old, or the card shares lanes with a drive: look at the "
    "width in the report (current_link_width), and at the mainboard's manual",
    "waiting_cpu": "waits take a core away from the optimizer: send the report",
    "registered_read": "drives are slower into pinned memory: send the report",
    "matmul": "the card is throttled or busy: nvidia-smi shows clocks, power limit and other users",
    "adam": "too few cores, or memory in one channel: OMP_NUM_THREADS must not be set low, and "
    "memory modules belong in pairs",
    "adam_beside_copies": "copies and optimizer share one memory: a second channel helps most",
    "reserved_of_planned": "the plan knows too little of this card's memory; --device-memory 1 GiB "
    "below what is free is safe meanwhile: send the report",
    "step_of_forecast": "the forecast does not fit this machine: send the report",
    "pinnable_share": "plans with more host memory than can be pinned copy through pageable "
    "memory, which is much slower: lower --host to what could be pinned",
    "copy_beside_launches_s": "copies wait while many launches are queued: send the report",
    "alloc_retries": "the allocator frees its cache in the middle of a run, which stops the "
    "device: --device-memory 1 GiB below what is free helps; send the report",
    "device_busy": "the device waits for the host: send the report",
}
ADVICE |= {"d2h": ADVICE["h2d"], "both_ways": ADVICE["h2d"]}
ADVICE |= dict.fromkeys(("block_forward", "block_backward"), ADVICE["matmul"])

# Shares of a preset's figures that count as normal. For a 4090 in a PCIe 4 x16 slot they give 23
# GiB of free memory, 150 TFLOP/s for a matrix product, 120 TFLOP/s for a block, 24 GB/s in one
# direction and 40 GB/s in both.
_FREE, _MATMUL, _BLOCK, _LINK, _BOTH = 0.96, 0.9375, 0.75, 0.76, 1.67
_ANY = {
    "pin_rate": Bound(least=1e9),
    "waiting_cpu": Bound(most=0.25),
    "registered_read": Bound(least=0.95),
    "adam": Bound(least=1.8e9),
    "adam_beside_copies": Bound(least=1.0e9),
    "reserved_of_planned": Bound(most=1.05),
    "pinnable_share": Bound(least=1.0),
    "copy_beside_launches_s": Bound(most=0.02),
    "alloc_retries": Bound(most=0.0),
    "device_busy": Bound(least=0.85),
    "step_of_forecast": Bound(most=1.25),
}


def expected(card: str, pcie_link: Mapping[str, str]) -> dict[str, Bound]:
    """Return the bound of each figure for a card of this name on this PCIe link.

    A card without a preset only gets the bounds that do not depend on the card.
    """
    bounds = dict(_ANY)
    if (lanes := lanes_rate(pcie_link)) is not None:
        link = _LINK * lanes
        bounds |= {"h2d": Bound(link), "d2h": Bound(link), "both_ways": Bound(_BOTH * link)}
    preset = gpu_of(card)
    if preset is not None:
        forward = preset["compute"][-1][1]
        backward = preset.get("backward", preset["compute"])[-1][1]
        bounds |= {
            "free_bytes": Bound(_FREE * preset["device_bytes"]),
            "matmul": Bound(_MATMUL * forward),
            "block_forward": Bound(_BLOCK * forward),
            "block_backward": Bound(_BLOCK * backward),
        }
    return bounds


def lanes_rate(pcie_link: Mapping[str, str]) -> float | None:
    """Return the bytes/s in each direction that card and PCIe link allow together.

    `pcie_link` holds the kernel's strings from sysfs. Return None if they cannot be parsed.
    """
    speed = re.match(r"([\d.]+) GT/s", pcie_link.get("max_link_speed", ""))
    width = pcie_link.get("max_link_width", "")
    if speed is None or not width.isdigit() or not int(width):
        return None
    return float(speed[1]) * 1e9 * (128 / 130) / 8 * int(width)


# -- One check -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """A figure and its bound; `ok` is None if there is no bound."""

    name: str
    value: float
    bound: Bound | None
    ok: bool | None
    note: str = ""

    def __str__(self) -> str:
        scale, unit = UNITS.get(self.name, (1.0, ""))
        text = f"{self.name.replace('_', ' ')} {self.value / scale:.3g} {unit}".rstrip()
        if self.note or self.bound is None:
            return f"{text} ({self.note})" if self.note else text
        sign, limit = (
            ("<=", self.bound.most) if self.bound.least is None else (">=", self.bound.least)
        )
        return f"{text} ({sign} {(limit or 0.0) / scale:.3g})"


@dataclass(frozen=True)
class Checked:
    name: str
    state: str
    figures: tuple[Compared, ...] = ()
    error: str = ""
    result: Mapping[str, Any] = field(default_factory=dict)  # as written by the process
    printed: str = ""
    again: Mapping[str, Any] | None = None  # result of the repetition with CUDA_LAUNCH_BLOCKING=1

    def lines(self, width: int, repeat: str) -> list[str]:
        rest = [figure for figure in self.figures if figure.ok is False]
        summary = self.error.splitlines()[0] if self.error else ", ".join(map(str, self.figures))
        lines = [f"{self.state:9} {self.name:{width}}  {summary}".rstrip()]
        if self.again is not None:
            lines.append(f"{'':9} {'':{width}}  with CUDA_LAUNCH_BLOCKING=1: {self.again['said']}")
        for advice in dict.fromkeys(ADVICE[f.name] for f in rest if f.name in ADVICE):
            lines.append(f"{'':9} {'':{width}}  -> {advice}")
        if self.state not in (OK, SKIPPED):
            lines.append(f"{'':9} {'':{width}}  again: {repeat} --check {self.name}")
        return lines


Run = Callable[..., dict[str, Any]]


def run_check(name: str, device: str, folder: Path, **env: str) -> dict[str, Any]:
    """Run a check in a new process and return its result, or how the process ended."""
    deadline_s = CHECKS[name].deadline_s
    with TemporaryDirectory() as scratch:
        result = Path(scratch) / "result.json"
        command = [sys.executable, "-m", MODULE, name, device, str(folder), str(result)]
        # cuBLAS is deterministic only with this workspace setting, which it reads when it starts.
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", **env},
        )
        try:
            printed, _ = process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            _end(process)
            printed, _ = process.communicate()
            error = f"no answer within {deadline_s:.0f} s"
            return {"state": "timed out", "error": error, "printed": printed[-TAIL:]}
        except BaseException:
            _end(process)
            raise
        with suppress(OSError, ValueError):
            outcome: dict[str, Any] = json.loads(result.read_text())
            return outcome | {"printed": printed[-TAIL:]}
    code = process.returncode
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return {
        "state": "crashed",
        "error": f"the process ended with {how}",
        "printed": printed[-TAIL:],
    }


def _end(process: subprocess.Popen[str]) -> None:
    """Kill the process and everything that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def checked(name: str, device: str, folder: Path, *, run: Run = run_check) -> Checked:
    """Run a check, and return its figures with the bounds that they are compared with.

    A check that crashed or failed unexpectedly runs once more with blocking launches, which shows
    where an error of the device came from.
    """
    outcome = run(name, device, folder)
    state, card = outcome["state"], outcome.get("card", "")
    repetition = None
    if state == "crashed" or (state == "failed" and not outcome["foreseen"]):
        more = run(name, device, folder, CUDA_LAUNCH_BLOCKING="1")
        repetition = {**more, "said": (more.get("error") or "ok").splitlines()[0]}
    figures = compared(outcome.get("figures", {}), card, outcome.get("facts", {}))
    if state == OK and any(figure.ok is False for figure in figures):
        state = SLOW
    if state == OK and "skipped" in outcome.get("facts", {}):
        state = SKIPPED
    error = outcome.get("error", "") or outcome.get("facts", {}).get("skipped", "")
    return Checked(name, state, figures, error, outcome, outcome.get("printed", ""), repetition)


def compared(
    figures: Mapping[str, float], card: str, facts: Mapping[str, Any]
) -> tuple[Compared, ...]:
    if not is_real(card):
        return tuple(Compared(n, v, None, None, "not a real device") for n, v in figures.items())
    bounds = expected(card, facts)
    judged = []
    for name, value in figures.items():
        bound = bounds.get(name)
        ok = None if bound is None else bound.holds(value)
        judged.append(Compared(name, value, bound, ok, "" if bound else "nothing to compare with"))
    return tuple(judged)


# -- All checks ------------------------------------------------------------------------------------


def chosen(names: Sequence[str]) -> list[str]:
    """Return the names of the checks to run: those in `names`, or all if it is empty."""
    for name in names:
        if name not in CHECKS:
            raise ConfigError(f"--check {name}: there is no such check; one of {', '.join(CHECKS)}")
    return [name for name in CHECKS if not names or name in names]


def self_test(
    device: str, folder: Path, names: Sequence[str] = (), *, run: Run = run_check
) -> Iterator[Checked]:
    """Run the checks one by one and yield their results.

    Stop after the check "device" if it fails, because the other checks need a working device.
    """
    for name in chosen(names):
        result = checked(name, device, folder, run=run)
        yield result
        if name == "device" and result.state in BAD:
            return


def passed(results: Sequence[Checked]) -> bool:
    return all(each.state not in BAD for each in results)


def describe(each: Checked, repeat: str) -> list[str]:
    return each.lines(max(map(len, CHECKS)), repeat)


def summary(results: Sequence[Checked]) -> str:
    bad = [each.name for each in results if each.state in BAD]
    slow = [each.name for each in results if each.state == SLOW]
    if bad:
        return f"{len(bad)} of {len(results)} checks failed: {', '.join(bad)}"
    if slow:
        return f"all numbers are right; slower than such a card should be: {', '.join(slow)}"
    return f"all {len(results)} checks passed"


def report(results: Sequence[Checked], device: str) -> str:
    """Return the report as JSON."""
    from lohan.train.logs import versions
    from lohan.util.memory import total_memory_bytes

    content = {
        "report": REPORT,
        "passed": passed(results),
        "card": next((c.result["card"] for c in results if c.result.get("card")), ""),
        "device": device,
        "versions": versions(),
        "system": f"{platform.system()} {platform.release()}",
        "driver": _driver(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": format_bytes(total_memory_bytes()),
        "checks": [
            {
                "name": each.name,
                "about": CHECKS[each.name].about,
                "state": each.state,
                "error": each.error,
                "figures": [
                    {
                        "name": f.name,
                        "value": f.value,
                        "ok": f.ok,
                        "note": f.note,
                        "least": f.bound and f.bound.least,
                        "most": f.bound and f.bound.most,
                    }
                    for f in each.figures
                ],
                **{
                    key: each.result[key]
                    for key in ("facts", "traceback", "allocator")
                    if key in each.result
                },
                "printed": each.printed,
                "launch_blocking": each.again,
            }
            for each in results
        ],
    }
    return json.dumps(content, indent=1).replace(str(Path.home()), "~") + "\n"


def _driver() -> str:
    with suppress(OSError):
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    return ""
