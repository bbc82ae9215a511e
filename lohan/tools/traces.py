"""The traces of a run's ranks on one clock.

Every rank writes down its own lanes, by a clock of its own. What it exchanges with the others ends
everywhere at the same time, so that tells how far the clocks are apart.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lohan.errors import ConfigError
from lohan.model.shards import Ranks
from lohan.train.run_folder import RunFolder
from lohan.util.json_file import load_json
from lohan.util.trace import LANES
from lohan.util.typed import checked
from lohan.util.units import GiB

NET = LANES.index("net")
ROWS = 100  # thread numbers of a lane in a trace file
MAX_BYTES = GiB


@dataclass(frozen=True)
class Traced:
    """A span: microseconds from the start of its file."""

    rank: int
    lane: int
    row: int  # below the lane
    name: str
    start: float
    stop: float


def read_traces(folder: RunFolder) -> list[list[Traced]]:
    """Spans of every rank that wrote a trace, the first rank first, by its clock."""
    found: list[list[Traced]] = []
    for rank, file in enumerate(_files(folder)):
        spans = _read(file, rank)
        found.append(_moved(spans, _apart(spans, found[0])) if found else spans)
    return found


def _files(folder: RunFolder) -> Iterator[Path]:
    rank = 0
    while (file := folder.trace_of(Ranks(rank, rank + 1))).is_file():
        yield file
        rank += 1


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


def _apart(spans: Sequence[Traced], first: Sequence[Traced]) -> float:
    """How much later a rank's clock is than the first's; 0 if they did nothing together."""
    own, other = _together(spans), _together(first)
    count = min(len(own), len(other))
    pairs = zip(own[len(own) - count :], other[len(other) - count :], strict=True)
    gaps = [a.stop - b.stop for a, b in pairs if a.name == b.name]
    return statistics.median(gaps) if gaps else 0.0


def _together(spans: Sequence[Traced]) -> list[Traced]:
    return sorted((span for span in spans if span.lane == NET), key=lambda span: span.stop)


def _moved(spans: Sequence[Traced], by: float) -> list[Traced]:
    return [replace(span, start=span.start - by, stop=span.stop - by) for span in spans]


def write_merged(path: Path, traces: Sequence[Sequence[Traced]]) -> None:
    """All ranks in one Chrome trace, each as a process of its own."""
    origin = min((span.start for spans in traces for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(traces):
        named = {"name": f"rank {rank}"}
        events.append({"name": "process_name", "ph": "M", "pid": rank, "args": named})
        for lane, row in sorted({(span.lane, span.row) for span in spans}):
            title = LANES[lane] + (f" +{row}" if row else "")
            events.append(
                {"name": "thread_name", "ph": "M", "pid": rank, "tid": lane * ROWS + row,
                 "args": {"name": title}}
            )  # fmt: skip
        events += [
            {"name": s.name, "ph": "X", "pid": rank, "tid": s.lane * ROWS + s.row,
             "ts": s.start - origin, "dur": s.stop - s.start}
            for s in spans
        ]  # fmt: skip
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
