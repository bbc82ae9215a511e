"""The HTML report of `lohan report`: one self-contained file that needs no network."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from lohan.config import Config
from lohan.data import Dataset, open_dataset
from lohan.data.dataset import Fields, open_fields
from lohan.errors import ConfigError
from lohan.model.layout import RankInfo
from lohan.model.plan import Plan
from lohan.planner.wear import (
    ASSUMED_WEAR,
    Alternative,
    describe_wear,
    drives_at,
    format_lives,
    format_usd,
    wear_of,
)
from lohan.schedule.ops import Op
from lohan.train.logs import WARM_UP_STEPS
from lohan.train.run_folder import RunFolder, eval_rows, read_rows, step_rows
from lohan.train.task import rendered
from lohan.util.drives import drives_of
from lohan.util.files import WrongType, checked, load_json
from lohan.util.trace import LANE_NAMES, LANES, trace_object, trace_output
from lohan.util.units import GiB, counted, format_bytes, format_seconds

# -- HTML fragments; all text from a run is escaped here and nowhere else --------------------------


class Markup(str):
    """HTML that is already escaped."""


def text(value: object) -> str:
    return value if isinstance(value, Markup) else escape(str(value))


def script_json(value: Any) -> str:
    """Return JSON that is safe inside a script element, because no tag can begin in it."""
    made = json.dumps(_finite(value), separators=(",", ":"))
    return made.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _finite(value: Any) -> Any:
    """Replace non-finite floats by None, because JSON has no infinity or NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def card(title: str, *parts: str) -> str:
    return f'<section class="card"><h2>{text(title)}</h2>{"".join(parts)}</section>'


def table(
    head: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Sequence[int] = ()
) -> str:
    """Return an HTML table; the columns in `numbers` are right-aligned."""

    def line(tag: str, cells: Sequence[object]) -> str:
        kinds = ['class="n"' if at in numbers else "" for at in range(len(cells))]
        return "".join(
            f"<{tag} {kind}>{text(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True)
        )

    top = f"<tr>{line('th', head)}</tr>" if any(head) else ""
    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    return f'<div class="wide"><table>{top}{body}</table></div>'


def note(words: str) -> str:
    return f'<p class="note">{text(words)}</p>'


def chart(name: str, title: str = "", *, tall: bool = False) -> str:
    head = f"<h3>{text(title)}</h3>" if title else ""
    return f'<div>{head}<div class="chart{" tall" if tall else ""}" id="{name}"></div></div>'


# -- The traces of all ranks on one clock ----------------------------------------------------------
#
# Every rank records its own lanes with its own clock. A collective ends on all ranks at the same
# time, so the ends of collectives give the offsets between the clocks.


NET = LANES.index("net")
ROWS = 100  # A trace file reserves this many thread ids per lane.
MAX_BYTES = GiB


@dataclass(frozen=True)
class Traced:
    """A span; `start` and `stop` are in microseconds from the start of its file."""

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
    found: list[list[Traced]] = []
    while (file := folder.trace_of(RankInfo(len(found), len(found) + 1))).is_file():
        spans = _read(file, len(found))
        by = _clock_offset(spans, found[0]) if found else 0.0
        found.append([replace(s, start=s.start - by, stop=s.stop - by) for s in spans])
    return found


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
    """Return how far a rank's clock is ahead of rank 0's, in microseconds.

    The offset is 0 if the two ranks share no collective.
    """
    own, other = _collectives(spans), _collectives(first)
    count = min(len(own), len(other))
    pairs = zip(own[len(own) - count :], other[len(other) - count :], strict=True)
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


# -- The logs of a run folder, reduced to what a chart can show ------------------------------------


MOST_POINTS = 1200  # per curve
MOST_SPANS = 12_000  # in the timeline
MOST_SAMPLES = 40
MOST_CHARACTERS = 10_000  # of the first example's prompt, and of its answer
STEADY = 50  # number of last steps that give the speed

Row = Mapping[str, Any]


@dataclass(frozen=True)
class RunRecord:
    folder: RunFolder
    config: Config
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    journal: list[dict[str, Any]]

    def last(self, event: str) -> dict[str, Any]:
        """Return the latest journal entry of a kind, or an empty dictionary if there is none."""
        return next((row for row in reversed(self.journal) if row["event"] == event), {})

    @property
    def steady(self) -> list[dict[str, Any]]:
        """The steps with the last plan, without the first two of them."""
        began = max((row["step"] for row in self.journal if row["event"] != "measured"), default=0)
        rows = [row for row in self.steps if row["step"] > began]
        return (rows[2:] or rows or self.steps)[-STEADY:]

    @property
    def written_bytes(self) -> int:
        return sum(int(row.get("ssd_written_bytes", 0)) for row in self.steps)


def read_run(folder: RunFolder) -> RunRecord:
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
    return RunRecord(folder, config, steps, evaluations, samples, journal)


Number = int | float
_STEP: dict[str, Any] = {
    "loss": Number,
    "step_s": float,
    "rss_bytes": float,
    "tokens_per_s": float,
    "busy": dict[str, float],
    "grad_norm": Number | None,
    "lr": Number | None,
    "ssd_read_bytes": int,
    "ssd_written_bytes": int,
    "reward_accuracy": Number,
}
_EVALUATION: dict[str, Any] = {"eval_loss": Number}
_SAMPLES: dict[str, Any] = {"samples": list[dict[str, str]]}
_MAY_LACK = {
    "busy",
    "ssd_read_bytes",
    "ssd_written_bytes",
    "reward_accuracy",
    "samples",
    "versions",
    "machine",
    "instead",
}
_PREDICTED = dict[str, Any] | None
_EVENTS: dict[str, dict[str, Any]] = {
    "start": {
        "total": int,
        "shape": dict[str, int] | None,
        "versions": dict[str, str],
        "machine": dict[str, str | int],
        "parameters": int | None,
        "ranks": int | None,
        "instead": list[Alternative],
    },
    "plan": {"host_bytes": int, "plan": Plan, "predicted": _PREDICTED, "origin": str | None},
    "measured": {"profile": dict[str, Any], "predicted": _PREDICTED},
}
_FIGURES: dict[str, Any] = {
    "step_s": float,
    "lane_s": dict[str, float],
    "tokens": Number,
    "written_bytes": Number,
}


def _check_row(row: Row, kinds: Mapping[str, Any], file: Path) -> None:
    """Check that a row has the fields, with the right types, that the report shows.

    NaN is allowed only in fields of type `Number`, such as the loss.
    """
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


# -- Curves ----------------------------------------------------------------------------------------


def curve(rows: Sequence[Row], key: str) -> dict[str, list[float]]:
    """Return the steps and values of a key.

    Neighbouring points are averaged if there are more than MOST_POINTS.
    """
    found = [(row["step"], row.get(key)) for row in rows]
    points = [(x, y) for x, y in found if isinstance(y, (int, float)) and y == y]
    size = -(-len(points) // MOST_POINTS) or 1
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    return {
        "x": [group[-1][0] for group in groups],
        "y": [statistics.fmean(value for _, value in group) for group in groups],
    }


# -- Lanes -----------------------------------------------------------------------------------------


def measured_lanes(run: RunRecord) -> dict[str, float]:
    """Return the busy seconds per step of each lane, as medians of the steady steps."""
    rows = run.steady
    found = {}
    for lane in LANES:
        seconds = [row.get("busy", {}).get(lane, 0.0) * row["step_s"] for row in rows]
        if any(seconds):
            found[lane] = statistics.median(seconds)
    return found


def median_of(run: RunRecord, key: str) -> float:
    return float(statistics.median(row[key] for row in run.steady))


def predicted(run: RunRecord) -> tuple[str, dict[str, Any]]:
    """Return the prediction for the last plan, and a description of where it comes from.

    The prediction comes from the machine's profile or, without one, from the rates measured in the
    first steps with that plan.
    """
    plan = run.last("plan")
    if plan.get("predicted"):
        return plan["origin"], plan["predicted"]
    for row in run.journal:
        later = row["event"] == "measured" and row["step"] >= plan.get("step", 0)
        if later and row.get("predicted"):
            return f"rates measured in step {row['step']}", row["predicted"]
    return "", {}


# -- Memory ----------------------------------------------------------------------------------------


def memory(run: RunRecord) -> dict[str, Any]:
    """Return the host-memory ledgers of all plans with the steps they start at, and the budget."""
    plans = [row for row in run.journal if row["event"] == "plan"]
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
        "last": max(row["step"] for row in run.steps),
    }


# -- The timeline ----------------------------------------------------------------------------------


def timeline(run: RunRecord) -> dict[str, Any] | None:
    """Return the spans of two late steps on all ranks, or None if there is no trace.

    Times are in milliseconds from the start of the two steps. Spans refer to lanes by their index
    in `lanes`.
    """
    traces = read_traces(run.folder)
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
        "length": round((high - low) / 1e3, 4),
    }


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


# -- What the numbers mean -------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A change that would make a run `gain` times as fast.

    `bound` marks an upper bound that cannot be reached in practice.
    """

    what: str
    gain: float
    bound: bool = False


@dataclass(frozen=True)
class Advice:
    """The changes that would help, best first; or `reason`, why they are not known."""

    changes: Sequence[Change] = ()
    reason: str = ""


def bottleneck(measured: Mapping[str, float], step_s: float, advice: Advice) -> str:
    """Return a summary of the bottleneck as HTML.

    For example: "ssd binds 82 % of the step; a second drive would give 1.6x; --host 16GiB 1.2x".
    """
    lane = max(measured, key=lambda each: measured[each])
    parts = [f"<b>{lane}</b> binds {100 * measured[lane] / step_s:.0f} % of the step"]
    kinds: dict[bool, Change] = {}  # the best change of each kind: more host memory, more drives
    for change in advice.changes:
        if not change.bound:
            kinds.setdefault(change.what.startswith("--"), change)
    for change in list(kinds.values())[:2]:
        would = "would give " if len(parts) == 1 else ""
        parts.append(f"{named(change)} {would}{change.gain:.1f}x")
    return "; ".join(parts)


def named(change: Change) -> Markup:
    """Return the name of a change; command-line options are marked up as code."""
    name = text(change.what)
    return Markup(f"<code>{name}</code>" if change.what.startswith("--") else name)


# -- The cards of the page, one function each ------------------------------------------------------


def learning_card(run: RunRecord) -> str:
    small = [chart("speed", "Tokens per second"), chart("rate", "Learning rate")]
    if any(row.get("grad_norm") is not None for row in run.steps):
        small.insert(1, chart("norm", "Gradient norm before clipping"))
    return card("Loss", chart("loss", tall=True), f'<div class="pair">{"".join(small)}</div>')


def rewards_card(run: RunRecord) -> str:
    """Return the card of rewards, or "" if the run is not a preference or reward run."""
    charts = reward_charts(run)
    if not charts:
        return ""
    said = [chart(name, REWARDS[name], tall=name == "rewards") for name in charts]
    return card("Rewards", said[0], f'<div class="pair">{"".join(said[1:])}</div>')


REWARDS = {
    "rewards": "Rewards of chosen and rejected answers",
    "margins": "Margin: chosen minus rejected",
    "accuracy": "Accuracy: share of pairs with the chosen answer ahead",
}


def reward_charts(run: RunRecord) -> dict[str, list[dict[str, Any]]]:
    """Return the reward charts: steps as curves, evaluations as dots."""
    found = {}
    for name, keys in (
        ("rewards", ("chosen", "rejected")),
        ("margins", ("margin",)),
        ("accuracy", ("accuracy",)),
    ):
        lines = []
        for number, key in enumerate(keys):
            ink = {"ink": f"--c{2 * number}"}
            lines.append({"name": key, "smooth": True, **ink, **curve(run.steps, f"reward_{key}")})
            held = curve(run.evaluations, f"eval_reward_{key}")
            ink = {"ink": f"--c{2 * number + 1}"}
            lines.append({"name": f"{key}, evaluation", "dots": True, **ink, **held})
        if any(line["x"] for line in lines):
            found[name] = [line for line in lines if line["x"]]
    return found


def lanes_card(run: RunRecord, advice: Advice) -> str:
    measured, step_s = measured_lanes(run), median_of(run, "step_s")
    origin, promise = predicted(run)
    lines = [_advice(advice, measured, step_s)]
    rows = []
    for lane in LANES:
        wanted = promise.get("lane_s", {}).get(lane, 0.0)
        if lane in measured or wanted:
            rows.append(
                _lane_row(
                    lane,
                    wanted if promise else None,
                    measured.get(lane, 0.0),
                    max(step_s, promise.get("step_s", 0.0)),
                )
            )
    whole = promise.get("step_s")
    step = ("whole step", f"{whole:.3g} s" if whole else "-", f"{step_s:.3g} s")
    rows.append([*step, _ratio(whole, step_s, step_s), ""])
    head = ("lane", "predicted", "measured", "difference", "predicted above, measured below")
    lines.append(table(head, rows, numbers=(1, 2, 3)))
    lines.append(
        note(
            f"Busy seconds per step. Predicted from {origin}; measured: median of "
            f"{counted(len(run.steady), 'step')} with the last plan."
            if promise
            else "No prediction: the run had no profile of the machine (`lohan profile`) and was too short "  # noqa: E501
            "to measure itself."
        )
    )
    return card("What a step is spent on", *lines)


TRIFLE = 0.01  # share of a step below which a difference is not shown


def _lane_row(lane: str, wanted: float | None, found: float, whole: float) -> list[object]:
    number = LANES.index(lane)
    bars = "".join(
        f'<div class="bar"><i style="width:{100 * min(1.0, (s or 0) / whole):.1f}%;'
        f'background:var(--c{number});opacity:{strength}"></i></div>'
        for s, strength in ((wanted, 0.45), (found, 1))
    )
    shown = "-" if wanted is None else f"{wanted:.3g} s"
    return [LANE_NAMES[lane], shown, f"{found:.3g} s", _ratio(wanted, found, whole), Markup(bars)]


def _ratio(wanted: float | None, found: float, whole: float) -> str:
    """Return how far a time is from its prediction, or "-" if both are negligible."""
    if not wanted or max(wanted, found) < TRIFLE * whole:
        return "-"
    return f"{100 * (found / wanted - 1):+.0f} %"


def _advice(advice: Advice, measured: Mapping[str, float], step_s: float) -> str:
    lines = [f'<p class="advice">{bottleneck(measured, step_s, advice)}</p>'] if measured else []
    tables = []
    for bound, head in ((False, "with"), (True, "at most, with one lane out of the way")):
        rows = [[named(c), f"{c.gain:.2f}x"] for c in advice.changes if c.bound is bound]
        if rows:
            tables.append(table((head, "speed"), rows, numbers=(1,)))
    if measured and not advice.reason and all(change.bound for change in advice.changes):
        lines.append(note("Neither another drive nor more host memory would make it faster."))
    lines.append(f'<div class="pair">{"".join(tables)}</div>')
    if advice.changes:
        lines.append(
            note("Planned and simulated for the rates that this run measured, each change alone.")
        )
    elif advice.reason:
        lines.append(note(f"What would help is not known: {advice.reason}."))
    return "".join(lines)


def timeline_card(run: RunRecord, shown: Mapping[str, Any] | None) -> str:
    if shown is None:
        command = f"lohan train --config {run.folder.config_file} --out NEW --trace"
        hint = f"<p>This run has no trace. <code>{text(command)}</code> records one.</p>"
        return card("Timeline", hint)
    tools = (
        '<div class="tools"><button data-zoom="0.5">zoom in</button>'
        '<button data-zoom="2">zoom out</button><button data-zoom="1000000">all</button>'
        "<span>drag to move, Ctrl and wheel or double click to zoom; with the keyboard: arrows, "
        "+, - and 0</span></div>"
    )
    return card(
        "Timeline of two steps",
        note("From the end of one backward to that of the one after the next."),
        tools,
        '<canvas id="timeline" tabindex="0" aria-label="What every lane did when"></canvas>',
    )


def memory_card(run: RunRecord) -> str:
    plan = run.last("plan")
    if not plan:
        return ""
    budget = plan["host_bytes"]
    rows = [
        [
            entry["owner"],
            entry["tier"],
            format_bytes(entry["bytes"]),
            f"{100 * entry['bytes'] / budget:.1f} %" if entry["tier"] == "host" else "",
        ]
        for entry in plan["plan"]["ledger"]
    ]
    ledger = table(("owner", "tier", "bytes", "of --host"), rows, numbers=(2, 3))
    return card(
        "Memory",
        note(
            "What the plan gives to whom in host memory, and what was resident: Python, torch "
            "and transformers come on top of the plan."
        ),
        '<div class="pair">',
        chart("memory", "Plan of host memory, and --host", tall=True),
        chart("resident", "Resident memory of the process", tall=True),
        "</div>",
        f"<details><summary>Ledger</summary>{ledger}</details>",
    )


def _written_per_step(run: RunRecord) -> float:
    """Return the mean bytes written per step with the last plan.

    The warm-up steps are left out if there are later ones.
    """
    since = max((row.get("step", 0) for row in run.journal if row["event"] == "plan"), default=0)
    last = [row for row in run.steps if row["step"] > since + WARM_UP_STEPS] or run.steps
    return float(sum(row.get("ssd_written_bytes", 0) for row in last) / len(last))


def wear_card(run: RunRecord) -> str:
    total, steps = run.written_bytes, len(run.steps)
    read = sum(row.get("ssd_read_bytes", 0) for row in run.steps)
    planned = run.last("start").get("total") or steps
    rows: list[list[object]] = [
        ["read", format_bytes(read), f"{format_bytes(read / steps)} per step"],
        ["written", format_bytes(total), f"{format_bytes(total / steps)} per step"],
    ]
    rate = _written_per_step(run)
    expected = total + rate * (planned - steps)
    if planned > steps:
        left = f"at {format_bytes(rate)} per step from here"
        rows.append(["written by the whole run", format_bytes(expected), left])
    folders = run.folder.all_ssd_folders(run.config, run.last("start").get("ranks", 1))
    drives = drives_at(folders or run.folder.ssd_folders(run.config))
    for told, written in {f"taken by {counted(steps, 'step')}": total, "by all": expected}.items():
        wear = wear_of(drives, written)
        if total and (written == total or planned > steps):
            life = f"{format_lives(wear.lives)} the rated life of {counted(wear.drives, 'drive')}"
            rows.append([told, life, f"{format_usd(wear.usd)} of its price"])
    for other in run.last("start").get("instead", []):
        wear = wear_of(drives, other["written_bytes"]).times(planned)
        rows.append(
            [
                Markup(f"with <code>{text(other['option'])}</code>"),
                describe_wear(wear),
                f"{format_seconds(other['step_s'])} per step, as planned; {other['note']}",
            ]
        )
    for folder in folders:
        for drive in drives_of(folder):
            known = drive.health
            worn = f"{known.used_percent} % of its endurance used" if known else "wear not readable"
            life = f"{format_bytes(known.written_bytes)} written in its life" if known else ""
            rows.append([f"{drive.name} {drive.model or ''}", worn, life])
    return card(
        "SSD", table(("", "", ""), rows), note(f"Wear is {ASSUMED_WEAR}, unless a log tells.")
    )


def samples_card(run: RunRecord) -> str:
    rows = []
    for row in run.samples:
        for said in row.get("samples", []):
            rows.append(
                [f"{row['step']:,}", _said(said.get("prompt", "")), _said(said.get("text", ""))]
            )
    if not rows:
        return ""
    return card("Samples", table(("step", "prompt", "answer"), rows, numbers=(0,)))


def example_card(run: RunRecord) -> str:
    """Return the card with the first example as the model sees it."""
    found: Dataset | Fields | None = open_dataset(run.folder.data, seed=0, verified=False)
    found = found or open_fields(run.folder.data, seed=0, collate=lambda rows: {}, verified=False)
    lines = [] if found is None else rendered(found.rendered, most=MOST_CHARACTERS)
    return card("First example", f"<pre>{text(chr(10).join(lines))}</pre>") if lines else ""


def _said(words: str) -> Markup:
    return Markup(f'<span class="said">{text(words)}</span>')


def settings_card(run: RunRecord) -> str:
    start = run.last("start")
    parts = [f"<pre>{text(run.config.to_toml())}</pre>"]
    facts = {**start.get("versions", {}), **start.get("machine", {})}
    if "memory_bytes" in facts:
        facts["memory"] = format_bytes(facts.pop("memory_bytes"))
    if facts:
        parts.append("<h3>Versions and machine</h3>")
        parts.append(table(("", ""), list(facts.items())))
    return card("Settings", *parts)


# -- The page: the template, style and script of this package, and the run's data ------------------
#
# The page loads no external resources, and its content security policy forbids them.


def page(run: RunRecord, advice: Advice) -> str:
    shown = timeline(run)
    sections = [
        learning_card(run),
        rewards_card(run),
        lanes_card(run, advice),
        timeline_card(run, shown),
        memory_card(run),
        wear_card(run),
        samples_card(run),
        example_card(run),
        settings_card(run),
    ]
    name = run.folder.path.name
    return Template(_file("page.html")).substitute(
        title=text(f"{name} - LoHan run report"),
        heading=text(name),
        facts=text(_facts(run)),
        style=_file("style.css"),
        script=_file("script.js"),
        tiles=_tiles(run),
        sections="\n".join(section for section in sections if section),
        footer=text(f"{run.folder.path} \u00b7 made by lohan report; this file loads nothing."),
        data=script_json(_data(run, shown)),
    )


def _file(name: str) -> str:
    return (files("lohan.tools") / name).read_text(encoding="utf-8")


def _data(run: RunRecord, shown: Mapping[str, Any] | None) -> dict[str, Any]:
    loss: list[dict[str, Any]] = [{"name": "loss", "smooth": True, **curve(run.steps, "loss")}]
    if run.evaluations:
        found = curve(run.evaluations, "eval_loss")
        loss.append({"name": "evaluation", "dots": True, **found})
    charts: dict[str, list[dict[str, Any]]] = {
        "loss": loss,
        "speed": [{"name": "tokens/s", **curve(run.steps, "tokens_per_s")}],
        "rate": [{"name": "learning rate", **curve(run.steps, "lr")}],
        "norm": [{"name": "gradient norm", **curve(run.steps, "grad_norm")}],
        "resident": [{"name": "resident memory", **curve(run.steps, "rss_bytes")}],
        **reward_charts(run),
    }
    charts = {name: lines for name, lines in charts.items() if lines[0]["x"]}
    return {"charts": charts, "memory": memory(run), "timeline": shown}


# -- Heading and tiles -----------------------------------------------------------------------------


def _facts(run: RunRecord) -> str:
    train, start = run.config.train, run.last("start")
    count = start.get("parameters")
    parts = [
        run.config.model.name,
        f"{count:,} parameters" if count else "",
        train.dtype or "fp32",
        f"batch {train.batch}",
        start.get("time", "").replace("T", " ")[:16],
    ]
    return " \u00b7 ".join(part for part in parts if part)


def _tiles(run: RunRecord) -> str:
    first, last = run.steps[0], run.steps[-1]
    total = run.last("start").get("total") or last["step"]
    seconds = sum(row["step_s"] for row in run.steps)
    lanes, step_s = measured_lanes(run), median_of(run, "step_s")
    tiles = [
        (f"{last['step']:,} of {total:,}", f"steps in {format_seconds(seconds)}"),
        (f"{first['loss']:.2f} \u2192 {last['loss']:.2f}", "loss, first and last step"),
    ]
    if run.evaluations:
        best = min(run.evaluations, key=lambda row: row["eval_loss"])
        tiles.append((f"{best['eval_loss']:.3f}", f"best evaluation, step {best['step']:,}"))
    pairs = [row["reward_accuracy"] for row in run.steps[-STEADY:] if "reward_accuracy" in row]
    if pairs:
        right = f"{100 * statistics.fmean(pairs):.0f} %"
        tiles.append((right, f"of pairs right, last {counted(len(pairs), 'step')}"))
    speed = median_of(run, "tokens_per_s")
    tiles.append((f"{speed:,.0f}", f"tokens/s, {step_s:.3g} s per step"))
    if lanes:
        lane = max(lanes, key=lambda each: lanes[each])
        share = 100 * lanes[lane] / step_s
        tiles.append((LANE_NAMES[lane], f"busiest lane, {share:.0f} % of a step"))
    tiles.append((format_bytes(run.written_bytes), "written to SSD"))
    peak = max(row["rss_bytes"] for row in run.steps)
    tiles.append((format_bytes(peak), "resident memory, largest"))
    return "".join(
        f'<div class="tile"><b>{text(value)}</b><span>{text(what)}</span></div>'
        for value, what in tiles
    )
