"""What each lane did when: spans, busy shares, and a Chrome trace."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

LANES = ("gpu", "h2d", "d2h", "ssd", "cpu", "net")


class Span(NamedTuple):
    lane: str
    name: str
    start_s: float
    stop_s: float


class Trace:
    """Spans of the step under way, and with `keep` of the whole run."""

    def __init__(self, *, keep: bool = False) -> None:
        self._keep = keep
        self._all: list[Span] = []
        self._step: list[Span] = []

    def add(self, span: Span) -> None:
        self._step.append(span)  # list.append is atomic: lanes add from their own threads

    def take_step(self) -> list[Span]:
        """Spans that ended since the last call."""
        spans, self._step = self._step, []
        if self._keep:
            self._all.extend(spans)
        return spans

    def write(self, path: Path) -> None:
        write_chrome_trace(path, [*self._all, *self._step])


def busy_s(spans: Iterable[Span], start_s: float, stop_s: float) -> dict[str, float]:
    """Seconds each lane had anything under way between two times; overlapping spans count once."""
    busy = dict.fromkeys(LANES, 0.0)
    ends = dict.fromkeys(LANES, start_s)
    for span in sorted(spans, key=lambda s: s.start_s):
        low = max(span.start_s, ends[span.lane])
        high = min(span.stop_s, stop_s)
        if high > low:
            busy[span.lane] += high - low
            ends[span.lane] = high
    return busy


def write_chrome_trace(path: Path, spans: Iterable[Span]) -> None:
    path.write_text(json.dumps(chrome_trace(list(spans))))


def chrome_trace(spans: list[Span]) -> dict[str, Any]:
    """For chrome://tracing or Perfetto: a row per lane, microseconds. Actions that are in flight
    together on one lane are put on rows of their own below it."""
    origin = min((span.start_s for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    ends: dict[str, list[float]] = {lane: [] for lane in LANES}
    for span in sorted(spans, key=lambda s: s.start_s):
        rows = ends[span.lane]
        row = next((i for i, end in enumerate(rows) if end <= span.start_s), len(rows))
        if row == len(rows):
            rows.append(0.0)
        rows[row] = span.stop_s
        events.append(
            {
                "name": span.name,
                "ph": "X",
                "pid": 0,
                "tid": LANES.index(span.lane) * 100 + row,
                "ts": (span.start_s - origin) * 1e6,
                "dur": (span.stop_s - span.start_s) * 1e6,
            }
        )
    for lane, rows in ends.items():
        for row in range(len(rows)):
            name = lane if row == 0 else f"{lane} +{row}"
            tid = LANES.index(lane) * 100 + row
            events.append(
                {"name": "thread_name", "ph": "M", "pid": 0, "tid": tid, "args": {"name": name}}
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
