"""Traces of what each lane did and when: spans, busy shares and Chrome traces."""

from __future__ import annotations

import json
import math
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lohan.util.files import OutputFile, write_atomic

LANE_NAMES = {
    "compute": "compute",
    "h2d": "link to the device",
    "d2h": "link from the device",
    "ssd": "drives",
    "optimizer": "optimizer",
    "net": "exchange between ranks",
}
LANES = tuple(LANE_NAMES)
_WRITER = {"writer": "lohan"}  # Identifies a trace that LoHan has written.


class Span(NamedTuple):
    lane: str
    name: str
    start_s: float
    stop_s: float


class Trace:
    """The spans of the current step until they are taken and, with `keep`, those of the whole run.

    If spans are not taken, only those of the last step are kept, because a run may have very many.
    """

    def __init__(self, *, keep: bool = False) -> None:
        self._keep = keep
        self._all: list[Span] = []
        self._step: list[Span] = []
        self._earlier = 0  # Number of spans in `_step` that belong to earlier steps.
        # Number of spans in `_step` before the last inference pass, or None.
        self._inference: int | None = None
        self.forward_began_s = 0.0  # start of the last forward with gradients
        self.inference_began_s = math.inf  # start of the first one without gradients since then

    def add(self, span: Span) -> None:
        # Lanes add spans from their own threads; list.append is atomic.
        self._step.append(span)

    def end_step(self) -> None:
        """Record that backward has ended; lanes may still add spans of the step."""
        if not self._keep:
            del self._step[: self._earlier]
            self._earlier, self._inference = len(self._step), None

    def begin_forward(self) -> None:
        """Record the beginning of a pass with gradients."""
        self.forward_began_s, self.inference_began_s = time.perf_counter(), math.inf

    def begin_inference(self) -> None:
        """Record the beginning of a pass without gradients.

        Of several passes in a row, only the spans of the last are kept.
        """
        self.inference_began_s = min(self.inference_began_s, time.perf_counter())
        if not self._keep:
            if self._inference is not None:
                del self._step[self._inference :]
            self._inference = len(self._step)

    def take_step(self) -> list[Span]:
        """Return and remove the spans added since the last call.

        If this method is not called after every step, older spans may be missing.
        """
        spans, self._step, self._earlier, self._inference = self._step, [], 0, None
        if self._keep:
            self._all.extend(spans)
        return spans

    def write(self, path: Path) -> None:
        write_chrome_trace(path, [*self._all, *self._step])


def busy_s(spans: Iterable[Span], start_s: float, stop_s: float) -> dict[str, float]:
    """Return the seconds that each lane was busy between two times.

    Overlapping spans of a lane are counted once.
    """
    busy = dict.fromkeys(LANES, 0.0)
    ends = dict.fromkeys(LANES, start_s)
    for span in sorted(spans, key=lambda s: s.start_s):
        low = max(span.start_s, ends[span.lane])
        high = min(span.stop_s, stop_s)
        if high > low:
            busy[span.lane] += high - low
            ends[span.lane] = high
    return busy


def overlap_shares(
    spans: Sequence[Span],
    lanes: Collection[str],
    others: Collection[str],
    start_s: float,
    stop_s: float,
) -> dict[str, float]:
    """Return, for each name of an action, the share of its time in which `others` were busy.

    `others` are names of lanes. Only actions of `lanes` that begin between the two times are
    included. Actions with the same name are added up.
    """
    starts: list[float] = []
    stops: list[float] = []
    before: list[float] = []  # Busy seconds before each start.
    for span in sorted((s for s in spans if s.lane in others), key=lambda s: s.start_s):
        if stops and span.start_s <= stops[-1]:
            stops[-1] = max(stops[-1], span.stop_s)
        else:
            before.append(before[-1] + stops[-1] - starts[-1] if stops else 0.0)
            starts.append(span.start_s)
            stops.append(span.stop_s)

    def busy_until(time_s: float) -> float:
        at = bisect_right(starts, time_s) - 1
        return before[at] + min(time_s, stops[at]) - starts[at] if at >= 0 else 0.0

    took: dict[str, float] = defaultdict(float)
    shared: dict[str, float] = defaultdict(float)
    for span in spans:
        if span.lane in lanes and start_s <= span.start_s < stop_s:
            took[span.name] += span.stop_s - span.start_s
            shared[span.name] += busy_until(span.stop_s) - busy_until(span.start_s)
    return {name: shared[name] / seconds for name, seconds in took.items() if seconds}


def write_chrome_trace(path: Path, spans: Iterable[Span]) -> None:
    write_atomic(path, json.dumps(chrome_trace(list(spans))).encode())


def trace_output(path: Path, remedy: str) -> OutputFile:
    return OutputFile(path, remedy, "a trace", json.dumps(_WRITER)[1:-1].encode())


def chrome_trace(spans: list[Span]) -> dict[str, Any]:
    """Return a trace for chrome://tracing or Perfetto: a row per lane, times in microseconds.

    Actions that overlap on one lane are placed on additional rows below it.
    """
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
    return trace_object(events)


def trace_object(events: list[dict[str, Any]]) -> dict[str, Any]:
    return {"otherData": _WRITER, "traceEvents": events, "displayTimeUnit": "ms"}
