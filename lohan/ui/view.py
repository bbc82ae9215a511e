"""Everything that the page of a run shows, as JSON: `lohan ui` and `lohan report` share it.

Texts from a run (names, prompts, answers, log lines, settings) are plain strings here. The page
inserts them as text nodes, never as HTML. A cell of a table is a string, {"code": string}, or a
list of these.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lohan.data import Dataset, open_dataset
from lohan.data.dataset import Fields, open_fields
from lohan.data.text import rendered
from lohan.planner.wear import (
    ASSUMED_WEAR,
    describe_wear,
    drives_at,
    format_lives,
    format_usd,
    wear_of,
)
from lohan.train.run_folder import WARM_UP_STEPS
from lohan.ui.runs import STEADY_STEPS, Row, RunRecord, RunState
from lohan.util.display import describe_step
from lohan.util.drives import drives_of
from lohan.util.trace import LANE_NAMES, LANES
from lohan.util.units import counted, format_bytes, format_seconds

if TYPE_CHECKING:
    from lohan.tools.plan_run import Change

MOST_POINTS = 1200  # maximum number of points of a curve
MOST_CHARACTERS = 10_000  # maximum length of the first example's prompt and of its answer
LAST_LINES = 40  # number of lines shown from the end of the log
LEAST_SHARE = 0.01  # share of a step below which a difference is not shown

Cell = str | dict[str, str] | list[Any]


def finite(value: Any) -> Any:
    """Return a value with None in place of non-finite floats, which JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True)
class Advice:
    """The changes that would help, best first; if they are not known, `reason` says why."""

    changes: Sequence[Change] = ()
    reason: str = ""


def run_view(
    run: RunRecord,
    state: RunState | None = None,
    *,
    advice: Advice | None = None,
    log: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return everything that the page of a run shows.

    Without `log`, the last lines are those that the run printed for its steps, recreated from its
    metrics.
    """
    view: dict[str, Any] = {
        "name": run.folder.path.name,
        "path": str(run.folder.path),
        "facts": _facts(run),
        "step": run.step,
        "total": run.total,
        "charts": charts(run),
        "memory": memory(run),
        "ledger": ledger(run),
        "samples": samples(run),
        "example": first_example(run),
        "settings": run.config.to_toml(),
        "versions": versions(run),
        "log": list(log) if log is not None else step_lines(run),
        "log_is_whole": log is not None,
        "trace_command": f"lohan train --config {run.folder.config_file} --out NEW --trace",
    }
    if run.steps:
        view |= {"tiles": tiles(run), "lanes": lanes(run, advice), "wear": wear(run)}
    if state is not None:
        view["state"] = {
            "name": state.name,
            "words": state.words,
            "active": state.active,
            "resumable": state.resumable and not state.active,
            "exportable": state.exportable and not state.active,
            "left_s": run.left_s if state.active else None,
        }
    cleaned: dict[str, Any] = finite(view)
    return cleaned


# -- Heading and tiles -----------------------------------------------------------------------------


def _facts(run: RunRecord) -> list[str]:
    train, start = run.config.train, run.last("start")
    count = start.get("parameters")
    parts = [
        run.config.model.name,
        f"{count:,} parameters" if count else "",
        train.dtype or "fp32",
        f"batch {train.batch}",
        start.get("time", "").replace("T", " ")[:16],
    ]
    return [part for part in parts if part]


def tiles(run: RunRecord) -> list[list[str]]:
    """Return the most important numbers, each with its meaning."""
    first, last = run.steps[0], run.steps[-1]
    total = run.total or last["step"]
    seconds = sum(row["step_s"] for row in run.steps)
    busy_s, step_s = measured_lanes(run), median_of(run, "step_s")
    shown = [
        (f"{last['step']:,} of {total:,}", f"steps in {format_seconds(seconds)}"),
        (f"{first['loss']:.2f} \u2192 {last['loss']:.2f}", "loss, first and last step"),
    ]
    if run.evaluations:
        best = min(run.evaluations, key=lambda row: row["eval_loss"])
        shown.append((f"{best['eval_loss']:.3f}", f"best evaluation, step {best['step']:,}"))
    pairs = [
        row["reward_accuracy"] for row in run.steps[-STEADY_STEPS:] if "reward_accuracy" in row
    ]
    if pairs:
        right = f"{100 * statistics.fmean(pairs):.0f} %"
        shown.append((right, f"of pairs right, last {counted(len(pairs), 'step')}"))
    speed = median_of(run, "tokens_per_s")
    shown.append((f"{speed:,.0f}", f"tokens/s, {step_s:.3g} s per step"))
    if busy_s:
        lane = max(busy_s, key=lambda each: busy_s[each])
        share = 100 * busy_s[lane] / step_s
        shown.append((LANE_NAMES[lane], f"busiest lane, {share:.0f} % of a step"))
    shown.append((format_bytes(run.written_bytes), "written to SSD"))
    peak = max(row["rss_bytes"] for row in run.steps)
    shown.append((format_bytes(peak), "resident memory, largest"))
    return [list(each) for each in shown]


# -- Curves ----------------------------------------------------------------------------------------


def curve(rows: Sequence[Row], key: str) -> dict[str, list[float]]:
    """Return the curve of a metric: the steps whose row has `key`, and the values."""
    return averaged([(row["step"], row.get(key)) for row in rows])


def averaged(pairs: Sequence[tuple[int, Any]]) -> dict[str, list[float]]:
    """Return steps and values as a curve, without values that are not numbers.

    Neighbouring points are averaged if there are more than MOST_POINTS.
    """
    points = [(x, y) for x, y in pairs if isinstance(y, (int, float)) and y == y]
    size = -(-len(points) // MOST_POINTS) or 1
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    return {
        "x": [group[-1][0] for group in groups],
        "y": [sum(value for _, value in group) / len(group) for group in groups],
    }


def charts(run: RunRecord) -> dict[str, list[dict[str, Any]]]:
    """Return the curves of every chart that has data."""
    loss: list[dict[str, Any]] = [{"name": "loss", "smooth": True, **curve(run.steps, "loss")}]
    if run.evaluations:
        loss_curve = curve(run.evaluations, "eval_loss")
        loss.append({"name": "evaluation", "dots": True, **loss_curve})
    shares = [(row["step"], row.get("busy", {})) for row in run.steps]
    busy = {
        lane: averaged([(step, 100 * share[lane]) for step, share in shares if lane in share])
        for lane in LANES
    }
    lines: dict[str, list[dict[str, Any]]] = {
        "loss": loss,
        "speed": [{"name": "tokens/s", **curve(run.steps, "tokens_per_s")}],
        "rate": [{"name": "learning rate", **curve(run.steps, "lr")}],
        "norm": [{"name": "gradient norm", **curve(run.steps, "grad_norm")}],
        "resident": [{"name": "resident memory", **curve(run.steps, "rss_bytes")}],
        "busy": [
            {"name": LANE_NAMES[lane], "ink": f"--c{number}", **busy[lane]}
            for number, lane in enumerate(LANES)
            if busy[lane]["x"]
        ],
        **reward_charts(run),
    }
    return {name: each for name, each in lines.items() if each and each[0]["x"]}


def reward_charts(run: RunRecord) -> dict[str, list[dict[str, Any]]]:
    """Return the reward charts: steps as curves, evaluations as dots."""
    charts = {}
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
            charts[name] = [line for line in lines if line["x"]]
    return charts


# -- Lanes: forecast and measurement ---------------------------------------------------------------


def measured_lanes(run: RunRecord) -> dict[str, float]:
    """Return the busy seconds per step of each lane, as medians of the steady steps."""
    rows = run.steady
    medians = {}
    for lane in LANES:
        seconds = [row.get("busy", {}).get(lane, 0.0) * row["step_s"] for row in rows]
        if any(seconds):
            medians[lane] = statistics.median(seconds)
    return medians


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


def lanes(run: RunRecord, advice: Advice | None) -> dict[str, Any]:
    """Return predicted and measured seconds of each lane, and what would make a step faster."""
    measured, step_s = measured_lanes(run), median_of(run, "step_s")
    origin, promise = predicted(run)
    whole = promise.get("step_s")
    rows = []
    for number, lane in enumerate(LANES):
        wanted = promise.get("lane_s", {}).get(lane, 0.0) if promise else None
        if lane in measured or wanted:
            measured_s, longest = measured.get(lane, 0.0), max(step_s, whole or 0.0)
            rows.append(
                {
                    "name": LANE_NAMES[lane],
                    "ink": f"--c{number}",
                    "predicted_s": wanted,
                    "measured_s": measured_s,
                    "difference": _ratio(wanted, measured_s, longest),
                    "shares": [min(1.0, (s or 0.0) / longest) for s in (wanted, measured_s)],
                }
            )
    note = (
        f"Busy seconds per step. Predicted from {origin}; measured: median of "
        f"{counted(len(run.steady), 'step')} with the last plan."
        if promise
        else "No prediction: the run had no profile of the machine (`lohan profile`) and was too "
        "short to measure itself."
    )
    return {
        "rows": rows,
        "step": {
            "predicted_s": whole,
            "measured_s": step_s,
            "difference": _ratio(whole, step_s, step_s),
        },
        "note": note,
        **_advice(advice, measured, step_s),
    }


def _ratio(wanted: float | None, measured: float, whole: float) -> str:
    """Return how far a measured time is from its prediction, in percent.

    The result is "-" without a prediction, or if both are a negligible share of `whole`.
    """
    if not wanted or max(wanted, measured) < LEAST_SHARE * whole:
        return "-"
    return f"{100 * (measured / wanted - 1):+.0f} %"


def bottleneck(measured: Mapping[str, float], step_s: float, advice: Advice) -> list[Any]:
    """Return a summary of the bottleneck as a cell.

    For example: "drives: busiest lane, 82 % of the step; a second drive would give 1.6x".
    """
    lane = max(measured, key=lambda each: measured[each])
    share = f": busiest lane, {100 * measured[lane] / step_s:.0f} % of the step"
    parts: list[Any] = [LANE_NAMES[lane], share]
    kinds: dict[bool, Change] = {}  # the best change of each kind: more host memory, more drives
    for change in advice.changes:
        if not change.bound:
            kinds.setdefault(change.what.startswith("--"), change)
    for number, change in enumerate(list(kinds.values())[:2]):
        would = "" if number else "would give "
        parts += ["; ", named(change), f" {would}{change.gain:.1f}x"]
    return parts


def named(change: Change) -> Cell:
    """Return the name of a change; command-line options are marked as code."""
    return {"code": change.what} if change.what.startswith("--") else change.what


def _advice(advice: Advice | None, measured: Mapping[str, float], step_s: float) -> dict[str, Any]:
    if not measured:
        return {}
    shown: dict[str, Any] = {"bottleneck": bottleneck(measured, step_s, advice or Advice())}
    if advice is None:
        return shown
    for bound, key in ((False, "changes"), (True, "bounds")):
        shown[key] = [[named(c), f"{c.gain:.2f}x"] for c in advice.changes if c.bound is bound]
    if advice.changes:
        shown["advice_note"] = (
            "Planned and simulated for the rates that this run measured, each change alone."
        )
    elif advice.reason:
        shown["advice_note"] = f"No advice is available: {advice.reason}."
    if not advice.reason and not shown["changes"]:
        shown["no_change"] = "Neither another drive nor more host memory would make it faster."
    return shown


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
        "last": run.step,
    }


def ledger(run: RunRecord) -> list[list[str]]:
    """Return owner, tier, bytes and share of the host budget of every entry of the last plan."""
    plan = run.last("plan")
    return [
        [
            entry["owner"],
            entry["tier"],
            format_bytes(entry["bytes"]),
            f"{100 * entry['bytes'] / plan['host_bytes']:.1f} %" if entry["tier"] == "host" else "",
        ]
        for entry in (plan["plan"]["ledger"] if plan else ())
    ]


# -- Wear ------------------------------------------------------------------------------------------


def _written_per_step(run: RunRecord) -> float:
    """Return the mean bytes written per step with the last plan.

    The warm-up steps are left out if there are later ones.
    """
    since = max((row.get("step", 0) for row in run.journal if row["event"] == "plan"), default=0)
    last = [row for row in run.steps if row["step"] > since + WARM_UP_STEPS] or run.steps
    return float(sum(row.get("ssd_written_bytes", 0) for row in last) / len(last))


def wear(run: RunRecord) -> dict[str, Any]:
    """Return what the run reads and writes, and the share of the drives' rated life."""
    total, steps = run.written_bytes, len(run.steps)
    read = sum(row.get("ssd_read_bytes", 0) for row in run.steps)
    planned = run.last("start").get("total") or steps
    rows: list[list[Cell]] = [
        ["read", format_bytes(read), f"{format_bytes(read / steps)} per step"],
        ["written", format_bytes(total), f"{format_bytes(total / steps)} per step"],
    ]
    rate = _written_per_step(run)
    expected = total + rate * (planned - steps)
    if planned > steps:
        forecast = f"at {format_bytes(rate)} per step from here"
        rows.append(["written by the whole run", format_bytes(expected), forecast])
    folders = run.folder.all_ssd_folders(run.config, run.last("start").get("ranks") or 1)
    drives = drives_at(folders or run.folder.ssd_folders(run.config))
    for what, written in {f"taken by {counted(steps, 'step')}": total, "by all": expected}.items():
        worn = wear_of(drives, written)
        if total and (what != "by all" or planned > steps):
            life = f"{format_lives(worn.lives)} the rated life of {counted(worn.drives, 'drive')}"
            rows.append([what, life, f"{format_usd(worn.usd)} of its price"])
    for other in run.last("start").get("instead", []):
        worn = wear_of(drives, other["written_bytes"]).times(planned)
        rows.append(
            [
                ["with ", {"code": other["option"]}],
                describe_wear(worn),
                f"{format_seconds(other['step_s'])} per step, as planned; {other['note']}",
            ]
        )
    for folder in folders:
        for drive in drives_of(folder):
            health = drive.health
            used = (
                f"{health.used_percent} % of its endurance used" if health else "wear not readable"
            )
            life = f"{format_bytes(health.written_bytes)} written in its life" if health else ""
            rows.append([f"{drive.name} {drive.model or ''}", used, life])
    return {"rows": rows, "note": f"Wear is {ASSUMED_WEAR}, unless the drive's log has it."}


# -- Texts -----------------------------------------------------------------------------------------


def samples(run: RunRecord) -> list[list[str]]:
    return [
        [f"{row['step']:,}", answer.get("prompt", ""), answer.get("text", "")]
        for row in run.samples
        for answer in row.get("samples", [])
    ]


def first_example(run: RunRecord) -> list[str]:
    """Return the first example as the model sees it, with its template and system prompt."""
    examples: Dataset | Fields | None = open_dataset(run.folder.data, seed=0, verified=False)
    examples = examples or open_fields(
        run.folder.data, seed=0, collate=lambda rows: {}, verified=False
    )
    return [] if examples is None else rendered(examples.rendered, most=MOST_CHARACTERS)


def versions(run: RunRecord) -> list[list[str]]:
    start = run.last("start")
    facts = {**start.get("versions", {}), **start.get("machine", {})}
    if "memory_bytes" in facts:
        facts["memory"] = format_bytes(facts.pop("memory_bytes"))
    return [[str(key), str(value)] for key, value in facts.items()]


def step_lines(run: RunRecord) -> list[str]:
    """Return the lines of the last steps, as a run prints them."""
    total = run.total or run.step
    return [
        f"step {row['step']}/{total}  {describe_step(row, lr='lr' in row)}"
        for row in run.steps[-LAST_LINES:]
    ]
