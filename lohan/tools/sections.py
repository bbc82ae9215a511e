"""The cards of the page, one function each."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lohan.tools.gather import Story, measured_lanes, median_of, predicted, written_bytes
from lohan.tools.markup import Markup, card, chart, note, table, text
from lohan.tools.words import LANE_NAMES, Advice, bottleneck, named, size
from lohan.util.drive_facts import drives_of
from lohan.util.trace import LANES
from lohan.util.units import counted, format_bytes

RATED_BYTES = 600e12  # writes that drives of 1 TB are usually rated for


def learning_card(story: Story) -> str:
    small = [chart("speed", "Tokens per second"), chart("rate", "Learning rate")]
    if any(row.get("grad_norm") is not None for row in story.steps):
        small.insert(1, chart("norm", "Gradient norm before clipping"))
    return card("Loss", chart("loss", tall=True), f'<div class="pair">{"".join(small)}</div>')


def lanes_card(story: Story, advice: Advice) -> str:
    measured, step_s = measured_lanes(story), median_of(story, "step_s")
    origin, promise = predicted(story)
    lines = [_advice(advice, measured, step_s)]
    rows = []
    for lane in LANES:
        wanted = promise.get("lane_s", {}).get(lane, 0.0)
        if lane in measured or wanted:
            rows.append(_lane_row(lane, wanted if promise else None, measured.get(lane, 0.0),
                                  max(step_s, promise.get("step_s", 0.0))))  # fmt: skip
    whole = promise.get("step_s")
    step = ("whole step", f"{whole:.3g} s" if whole else "-", f"{step_s:.3g} s")
    rows.append([*step, _ratio(whole, step_s), ""])
    head = ("lane", "predicted", "measured", "difference", "predicted above, measured below")
    lines.append(table(head, rows, numbers=(1, 2, 3)))
    lines.append(note(
        f"Busy seconds per step. Predicted from {origin}; measured: median of "
        f"{counted(len(story.steady), 'step')} with the last plan." if promise else
        "No prediction: the run had no profile of the machine (`lohan profile`) and was too short "
        "to measure itself."
    ))  # fmt: skip
    return card("What a step is spent on", *lines)


def _lane_row(lane: str, wanted: float | None, found: float, whole: float) -> list[object]:
    number = LANES.index(lane)
    bars = "".join(
        f'<div class="bar"><i style="width:{100 * min(1.0, (s or 0) / whole):.1f}%;'
        f'background:var(--c{number});opacity:{strength}"></i></div>'
        for s, strength in ((wanted, 0.45), (found, 1))
    )
    shown = "-" if wanted is None else f"{wanted:.3g} s"
    return [LANE_NAMES[lane], shown, f"{found:.3g} s", _ratio(wanted, found), Markup(bars)]


def _ratio(wanted: float | None, found: float) -> str:
    return f"{100 * (found / wanted - 1):+.0f} %" if wanted else "-"


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
        lines.append(note(
            "Planned and simulated for the rates that this run measured, each change alone."
        ))  # fmt: skip
    elif advice.reason:
        lines.append(note(f"What would help is not known: {advice.reason}."))
    return "".join(lines)


def timeline_card(story: Story, shown: Mapping[str, Any] | None) -> str:
    if shown is None:
        command = f"lohan train --config {story.folder.config_file} --out NEW --trace"
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
        tools, '<canvas id="timeline" tabindex="0" aria-label="What every lane did when"></canvas>',
    )  # fmt: skip


def memory_card(story: Story) -> str:
    plan = story.last("plan")
    if not plan:
        return ""
    budget = plan["host_bytes"]
    rows = [
        [entry["owner"], entry["tier"], size(entry["bytes"]),
         f"{100 * entry['bytes'] / budget:.1f} %" if entry["tier"] == "host" else ""]
        for entry in plan["plan"]["ledger"]
    ]  # fmt: skip
    ledger = table(("owner", "tier", "bytes", "of --host"), rows, numbers=(2, 3))
    return card(
        "Memory",
        note("What the plan gives to whom in host memory, and what was resident: Python, torch "
              "and transformers come on top of the plan."),
        '<div class="pair">',
        chart("memory", "Plan of host memory, and --host", tall=True),
        chart("resident", "Resident memory of the process", tall=True),
        "</div>", f"<details><summary>Ledger</summary>{ledger}</details>",
    )  # fmt: skip


def wear_card(story: Story) -> str:
    total, steps = sum(written_bytes(story)), len(story.steps)
    read = sum(row.get("ssd_read_bytes", 0) for row in story.steps)
    planned = story.last("start").get("total") or steps
    rows: list[list[object]] = [
        ["read", size(read), f"{size(read / steps)} per step"],
        ["written", size(total), f"{size(total / steps)} per step"],
    ]
    if planned > steps:
        rows.append(["written by the whole run", size(total / steps * planned), "at this rate"])
    if total:
        lasts = f"{RATED_BYTES * steps / total:,.0f} steps"
        rows.append(
            ["600 TB, a usual rating of 1 TB drives, are written in", lasts, "at this rate"]
        )
    ranks = story.last("start").get("ranks", 1)
    of_rank = partial(story.folder.places, story.config)
    places = dict.fromkeys(place for rank in range(ranks) for place in of_rank(rank))
    for place in filter(Path.is_dir, places):
        for drive in drives_of(place):
            known = drive.health
            worn = f"{known.used_percent} % of its endurance used" if known else "wear not readable"
            written = f"{size(known.written_bytes)} written in its life" if known else ""
            rows.append([f"{drive.name} {drive.model or ''}", worn, written])
    return card("SSD", table(("", "", ""), rows))


def samples_card(story: Story) -> str:
    rows = []
    for row in story.samples:
        for said in row.get("samples", []):
            rows.append(
                [f"{row['step']:,}", _said(said.get("prompt", "")), _said(said.get("text", ""))]
            )
    if not rows:
        return ""
    return card("Samples", table(("step", "prompt", "answer"), rows, numbers=(0,)))


def _said(words: str) -> Markup:
    return Markup(f'<span class="said">{text(words)}</span>')


def settings_card(story: Story) -> str:
    start = story.last("start")
    parts = [f"<pre>{text(story.config.to_toml())}</pre>"]
    facts = {**start.get("versions", {}), **start.get("machine", {})}
    if "memory_bytes" in facts:
        facts["memory"] = format_bytes(facts.pop("memory_bytes"))
    if facts:
        parts.append("<h3>Versions and machine</h3>")
        parts.append(table(("", ""), list(facts.items())))
    return card("Settings", *parts)
