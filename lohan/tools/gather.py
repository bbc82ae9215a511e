"""What a run folder tells: the logs, thinned to what a picture can show."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lohan.config import Config
from lohan.errors import ConfigError
from lohan.model.plan import Plan
from lohan.tools.traces import Traced, read_traces
from lohan.train.run_folder import RunFolder, eval_rows, read_rows, step_rows
from lohan.util.trace import LANES
from lohan.util.typed import WrongType, checked

MOST_POINTS = 1200  # of a curve
MOST_SPANS = 12_000  # of the timeline
MOST_SAMPLES = 40
STEADY = 50  # last steps that speed is taken from
SHORT = {
    "gpu": "compute", "h2d": "to the device", "d2h": "from the device", "ssd": "drives",
    "cpu": "optimizer", "net": "to other ranks",
}  # fmt: skip

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Story:
    folder: RunFolder
    config: Config
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    journal: list[dict[str, Any]]

    def last(self, event: str) -> dict[str, Any]:
        """The latest entry of the journal of a kind; empty if there is none."""
        return next((row for row in reversed(self.journal) if row["event"] == event), {})

    @property
    def steady(self) -> list[dict[str, Any]]:
        """Steps with the last plan, without those that were still finding their rhythm."""
        began = max((row["step"] for row in self.journal if row["event"] != "measured"), default=0)
        rows = [row for row in self.steps if row["step"] > began]
        return (rows[2:] or rows or self.steps)[-STEADY:]


def read_run(folder: RunFolder) -> Story:
    config = folder.config()
    steps = step_rows(folder)
    if not steps:
        raise ConfigError(
            f"{folder.path}: no step is in its log yet (metrics.jsonl); report again after the "
            "first one"
        )
    journal = [row for row in read_rows(folder.journal) if "event" in row]
    samples = list(read_rows(folder.samples_file))[-MOST_SAMPLES:]
    evaluations = eval_rows(folder)
    for file, rows, kinds in (
        (folder.metrics_file, steps, _STEP),
        (folder.metrics_file, evaluations, _EVALUATION),
        (folder.samples_file, samples, _SAMPLES),
    ):
        for row in rows:
            _check_row(row, kinds, file)
    for row in journal:
        _check_row(row, {"event": str, **_EVENTS.get(str(row["event"]), {})}, folder.journal)
    return Story(folder, config, steps, evaluations, samples, journal)


Number = int | float
_STEP: dict[str, Any] = {
    "loss": Number, "step_s": float, "rss_bytes": float, "tokens_per_s": float,
    "busy": dict[str, float], "grad_norm": Number | None, "lr": Number | None,
    "ssd_read_bytes": int, "ssd_written_bytes": int,
}  # fmt: skip
_EVALUATION: dict[str, Any] = {"eval_loss": Number}
_SAMPLES: dict[str, Any] = {"samples": list[dict[str, str]]}
_MAY_LACK = {"busy", "ssd_read_bytes", "ssd_written_bytes", "samples", "versions", "machine"}
_PREDICTED = dict[str, Any] | None
_EVENTS: dict[str, dict[str, Any]] = {
    "start": {
        "total": int, "shape": dict[str, int] | None, "versions": dict[str, str],
        "machine": dict[str, str | int], "parameters": int | None, "ranks": int | None,
    },
    "plan": {"host_bytes": int, "plan": Plan, "predicted": _PREDICTED, "origin": str | None},
    "measured": {"profile": dict[str, Any], "predicted": _PREDICTED},
}  # fmt: skip
_FIGURES: dict[str, Any] = {
    "step_s": float, "lane_s": dict[str, float], "tokens": Number, "written_bytes": Number,
}  # fmt: skip


def _check_row(row: Row, kinds: Mapping[str, Any], file: Path) -> None:
    """A row has what a report shows of it; not-a-number may be a loss and nothing else."""
    try:
        for key, kind in kinds.items():
            value = row.get(key)
            if key in _MAY_LACK and key not in row:
                continue
            if kind != Number or not isinstance(value, float):
                checked(value, kind, key)
        if "step_s" in kinds and row["step_s"] <= 0:
            raise WrongType(f"step_s is {row['step_s']}, wants a time")
        machine = checked(row.get("machine") or {}, dict[str, Any], "machine")
        checked(machine.get("memory_bytes", 0), int, "machine.memory_bytes")
        predicted = checked(row.get("predicted") or {}, dict[str, Any], "predicted")
        for key, kind in _FIGURES.items() if predicted else ():
            checked(predicted.get(key), kind, f"predicted.{key}")
    except WrongType as error:
        raise ConfigError(
            f"{file}, step {row['step']}: {error}; remove that line of the log"
        ) from None


# -- curves ---------------------------------------------------------------------------------------


def curve(rows: Sequence[Row], key: str) -> dict[str, list[float]]:
    """Steps and values of a key; means of neighbours where there are too many."""
    points = [(row["step"], row[key]) for row in rows if _is_number(row.get(key))]
    size = -(-len(points) // MOST_POINTS) or 1
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    return {
        "x": [group[-1][0] for group in groups],
        "y": [statistics.fmean(value for _, value in group) for group in groups],
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value


# -- lanes ----------------------------------------------------------------------------------------


def measured_lanes(story: Story) -> dict[str, float]:
    """Seconds per step that each lane was busy, medians of steady steps."""
    rows = story.steady
    found = {}
    for lane in LANES:
        seconds = [row.get("busy", {}).get(lane, 0.0) * row["step_s"] for row in rows]
        if any(seconds):
            found[lane] = statistics.median(seconds)
    return found


def median_of(story: Story, key: str) -> float:
    return statistics.median(row[key] for row in story.steady)


def predicted(story: Story) -> tuple[str, dict[str, Any]]:
    """What the last plan was predicted to do and where that comes from: the machine's profile, or
    else the rates of the first steps that went by it."""
    plan = story.last("plan")
    if plan.get("predicted"):
        return plan["origin"], plan["predicted"]
    for row in story.journal:
        later = row["event"] == "measured" and row["step"] >= plan.get("step", 0)
        if later and row.get("predicted"):
            return f"rates measured in step {row['step']}", row["predicted"]
    return "", {}


# -- memory ---------------------------------------------------------------------------------------


def memory(story: Story) -> dict[str, Any]:
    """The plans' ledgers of host memory from step to step, and what was resident."""
    plans = [row for row in story.journal if row["event"] == "plan"]
    ledgers = [
        {e["owner"]: e["bytes"] for e in row["plan"]["ledger"] if e["tier"] == "host"}
        for row in plans
    ]
    owners = list(dict.fromkeys(owner for ledger in ledgers for owner in ledger))
    owners.sort(key=lambda owner: -max(ledger.get(owner, 0) for ledger in ledgers))
    return {
        "from": [row["step"] for row in plans],
        "owners": [{"name": o, "bytes": [ledger.get(o, 0) for ledger in ledgers]} for o in owners],
        "budget": plans[-1]["host_bytes"] if plans else 0,
        "last": max(row["step"] for row in story.steps),
    }


# -- the timeline ---------------------------------------------------------------------------------


def timeline(story: Story) -> dict[str, Any] | None:
    """Spans of two late steps of all ranks, milliseconds from their start; None without a trace.
    Lanes have numbers in `lanes`."""
    traces = read_traces(story.folder)
    if not traces:
        return None
    low, high = _window([span for span in traces[0] if span.name == "E"])
    shown = sorted(
        (s for spans in traces for s in spans if s.start < high and s.stop > low),
        key=lambda s: s.start,
    )[:MOST_SPANS]
    if not shown:
        return None
    several = len(traces) > 1
    return {
        "steps": 2,
        "lanes": [
            f"{rank}: {SHORT[lane]}" if several else SHORT[lane]
            for rank in range(len(traces))
            for lane in LANES
        ],
        "rows": sorted({(_number(span), span.row) for span in shown}),
        "spans": [
            [_number(s), s.row, s.name, round((s.start - low) / 1e3, 4),
             round((s.stop - s.start) / 1e3, 4)]
            for s in shown
        ],
        "length": round((high - low) / 1e3, 4),
    }  # fmt: skip


def _number(span: Traced) -> int:
    return span.rank * len(LANES) + span.lane


def _window(ends: Sequence[Traced]) -> tuple[float, float]:
    """From the end of one backward to that two steps later, near the end of the run: the last step
    has no successor to overlap with."""
    stops = sorted(span.stop for span in ends)
    if len(stops) < 3:
        return 0.0, float("inf") if not stops else stops[-1]
    last = -2 if len(stops) > 3 else -1
    return stops[last - 2], stops[last]


def written_bytes(story: Story) -> Iterator[int]:
    yield from (int(row.get("ssd_written_bytes", 0)) for row in story.steps)
