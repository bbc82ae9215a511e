"""The page: template, style and script from this folder, and what the run tells.

Nothing is loaded from anywhere, and the page forbids it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from string import Template
from typing import Any

from lohan.tools.gather import (
    Story,
    curve,
    measured_lanes,
    median_of,
    memory,
    timeline,
    written_bytes,
)
from lohan.tools.markup import script_json, text
from lohan.tools.sections import (
    lanes_card,
    learning_card,
    memory_card,
    samples_card,
    settings_card,
    timeline_card,
    wear_card,
)
from lohan.tools.words import LANE_NAMES, Advice, duration
from lohan.util.units import format_bytes


def page(story: Story, advice: Advice) -> str:
    shown = timeline(story)
    sections = [
        learning_card(story), lanes_card(story, advice), timeline_card(story, shown),
        memory_card(story), wear_card(story), samples_card(story), settings_card(story),
    ]  # fmt: skip
    name = story.folder.path.name
    return Template(_file("page.html")).substitute(
        title=text(f"{name} - LoHan run report"), heading=text(name), facts=text(_facts(story)),
        style=_file("style.css"), script=_file("script.js"), tiles=_tiles(story),
        sections="\n".join(section for section in sections if section),
        footer=text(_footer(story)), data=script_json(_data(story, shown)),
    )  # fmt: skip


def _file(name: str) -> str:
    return (files("lohan.tools") / name).read_text(encoding="utf-8")


def _data(story: Story, shown: Mapping[str, Any] | None) -> dict[str, Any]:
    loss: list[dict[str, Any]] = [{"name": "loss", "smooth": True, **curve(story.steps, "loss")}]
    if story.evaluations:
        found = curve(story.evaluations, "eval_loss")
        loss.append({"name": "evaluation", "dots": True, **found})
    charts: dict[str, list[dict[str, Any]]] = {
        "loss": loss,
        "speed": [{"name": "tokens/s", **curve(story.steps, "tokens_per_s")}],
        "rate": [{"name": "learning rate", **curve(story.steps, "lr")}],
        "norm": [{"name": "gradient norm", **curve(story.steps, "grad_norm")}],
        "resident": [{"name": "resident memory", **curve(story.steps, "rss_bytes")}],
    }
    charts = {name: lines for name, lines in charts.items() if lines[0]["x"]}
    return {"charts": charts, "memory": memory(story), "timeline": shown}


# -- the top --------------------------------------------------------------------------------------


def _facts(story: Story) -> str:
    train, start = story.config.train, story.last("start")
    count = start.get("parameters")
    parts = [
        story.config.model.name,
        f"{count:,} parameters" if count else "",
        train.dtype or "fp32",
        f"batch {train.batch}",
        start.get("time", "").replace("T", " ")[:16],
    ]
    return " \u00b7 ".join(part for part in parts if part)


def _tiles(story: Story) -> str:
    first, last = story.steps[0], story.steps[-1]
    total = story.last("start").get("total") or last["step"]
    seconds = sum(row["step_s"] for row in story.steps)
    lanes, step_s = measured_lanes(story), median_of(story, "step_s")
    tiles = [
        (f"{last['step']:,} of {total:,}", f"steps in {duration(seconds)}"),
        (f"{first['loss']:.2f} \u2192 {last['loss']:.2f}", "loss, first and last step"),
    ]
    if story.evaluations:
        best = min(story.evaluations, key=lambda row: row["eval_loss"])
        tiles.append((f"{best['eval_loss']:.3f}", f"best evaluation, step {best['step']:,}"))
    speed = median_of(story, "tokens_per_s")
    tiles.append((f"{speed:,.0f}", f"tokens/s, {step_s:.3g} s per step"))
    if lanes:
        lane = max(lanes, key=lambda each: lanes[each])
        share = 100 * lanes[lane] / step_s
        tiles.append((LANE_NAMES[lane], f"busiest lane, {share:.0f} % of a step"))
    tiles.append((format_bytes(sum(written_bytes(story))), "written to SSD"))
    peak = max(row["rss_bytes"] for row in story.steps)
    tiles.append((format_bytes(peak), "resident memory, largest"))
    return "".join(
        f'<div class="tile"><b>{text(value)}</b><span>{text(what)}</span></div>'
        for value, what in tiles
    )


def _footer(story: Story) -> str:
    return f"{story.folder.path} \u00b7 made by lohan report; this file loads nothing."
