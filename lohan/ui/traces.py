"""The traces of a run's ranks on one clock, and the timeline of two steps."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lohan.errors import ConfigError
from lohan.model.layout import RankInfo
from lohan.schedule.ops import OPERATIONS, Op
from lohan.train.run_folder import RunFolder
from lohan.util.files import checked, load_json
from lohan.util.trace import LANE_NAMES, LANES, trace_object, trace_output
from lohan.util.units import GiB

# Every rank records its own lanes with its own clock. A collective ends on all ranks at the same
# time, so the ends of collectives give the offsets between the clocks.


NET = LANES.index("net")
ROWS = 100  # A trace file reserves this many thread ids per lane.
MAX_BYTES = GiB
MOST_SPANS = 12_000  # maximum number of spans in the timeline


@dataclass(frozen=True)
class Traced:
    """A span; `start` and `stop` are microseconds since the beginning of its trace file."""

    rank: int
    lane: int
    row: int  # index of the row within the lane
    name: str
    start: float
    stop: float


def read_traces(folder: RunFolder) -> list[list[Traced]]:
    """Return the spans of every rank that wrote a trace, in the order of ranks.

    Times are on the clock of rank 0.
    """
    traces: list[list[Traced]] = []
    while (file := folder.trace_of(RankInfo(len(traces), len(traces) + 1))).is_file():
        spans = _read(file, len(traces))
        by = _clock_offset(spans, traces[0]) if traces else 0.0
        traces.append([replace(s, start=s.start - by, stop=s.stop - by) for s in spans])
    return traces


def _read(file: Path, rank: int) -> list[Traced]:
    try:
        raw = checked(load_json(file, max_bytes=MAX_BYTES), dict[str, Any], "")
        events = checked(raw.get("traceEvents"), list[dict[str, Any]], "traceEvents")
        return [_span(event, rank) for event in events if event.get("ph") == "X"]
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file}: cannot be read as a trace ({error}); remove it or run again with --trace"
        ) from None


def _span(event: Mapping[str, Any], rank: int) -> Traced:
    tid: int = checked(event.get("tid"), int, "tid")
    start, length = (checked(event.get(key), float, key) for key in ("ts", "dur"))
    lane, row = divmod(tid, ROWS)
    if not 0 <= lane < len(LANES):
        raise ValueError(f"tid is {tid}, there are {len(LANES)} lanes")
    return Traced(rank, lane, row, checked(event.get("name"), str, "name"), start, start + length)


def _clock_offset(spans: Sequence[Traced], first: Sequence[Traced]) -> float:
    """Return how far the clock of a rank is ahead of that of rank 0, in microseconds.

    The offset is 0 if the two ranks share no collective.
    """
    own_collectives, other = _collectives(spans), _collectives(first)
    count = min(len(own_collectives), len(other))
    pairs = zip(
        own_collectives[len(own_collectives) - count :], other[len(other) - count :], strict=True
    )
    gaps = [a.stop - b.stop for a, b in pairs if a.name == b.name]
    return statistics.median(gaps) if gaps else 0.0


def _collectives(spans: Sequence[Traced]) -> list[Traced]:
    return sorted((span for span in spans if span.lane == NET), key=lambda span: span.stop)


def write_merged(path: Path, traces: Sequence[Sequence[Traced]]) -> None:
    """Write all ranks into one Chrome trace, each as its own process."""
    origin = min((span.start for spans in traces for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(traces):
        named = {"name": f"rank {rank}"}
        events.append({"name": "process_name", "ph": "M", "pid": rank, "args": named})
        for lane, row in sorted({(span.lane, span.row) for span in spans}):
            title = LANES[lane] + (f" +{row}" if row else "")
            events.append(
                {
                    "name": "thread_name",
                    "ph": "M",
                    "pid": rank,
                    "tid": lane * ROWS + row,
                    "args": {"name": title},
                }
            )
        events += [
            {
                "name": s.name,
                "ph": "X",
                "pid": rank,
                "tid": s.lane * ROWS + s.row,
                "ts": s.start - origin,
                "dur": s.stop - s.start,
            }
            for s in spans
        ]
    trace_output(path, "move it away").write(json.dumps(trace_object(events)).encode())


# -- The timeline ----------------------------------------------------------------------------------


def timeline(folder: RunFolder) -> dict[str, Any] | None:
    """Return the spans of two steps near the end, on all ranks, or None if there is no trace.

    Times are in milliseconds from the start of the two steps. Spans refer to lanes by their index
    in `lanes`. `kinds` maps the letters of operations to their labels.
    """
    traces = read_traces(folder)
    if not traces:
        return None
    low, high = _window([span for span in traces[0] if span.name == Op.BACKWARD_DONE])
    shown = sorted(
        (s for spans in traces for s in spans if s.start < high and s.stop > low),
        key=lambda s: s.start,
    )[:MOST_SPANS]
    if not shown:
        return None
    return {
        "steps": 2,
        "lanes": [
            f"{rank}: {name}" if len(traces) > 1 else name
            for rank in range(len(traces))
            for name in LANE_NAMES.values()
        ],
        "rows": sorted({(_number(span), span.row) for span in shown}),
        "spans": [
            [
                _number(s),
                s.row,
                s.name,
                round((s.start - low) / 1e3, 4),
                round((s.stop - s.start) / 1e3, 4),
            ]
            for s in shown
        ],
        "kinds": {kind: OPERATIONS[kind].label for kind in map(_kind, shown) if kind in OPERATIONS},
        "length": round((high - low) / 1e3, 4),
    }


def _kind(span: Traced) -> str:
    """Return the first letter of a span's name, which is that of its operation."""
    return span.name[:1]


def _number(span: Traced) -> int:
    return span.rank * len(LANES) + span.lane


def _window(ends: Sequence[Traced]) -> tuple[float, float]:
    """Return start and end of a window of two steps near the end of the run.

    The window starts at the end of a backward and ends at the end of the backward two steps later.
    The last step is left out, because no following step overlaps with it.
    """
    stops = sorted(span.stop for span in ends)
    if len(stops) < 3:
        return 0.0, float("inf") if not stops else stops[-1]
    last = -2 if len(stops) > 3 else -1
    return stops[last - 2], stops[last]
