"""The page of one or several runs as one self-contained file that needs no network."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from lohan.errors import LohanError
from lohan.ui.runs import RunRecord, state_of
from lohan.ui.traces import timeline
from lohan.ui.view import Advice, finite, run_view

GENERATOR = b'content="lohan report"'  # identifies a file of this command
# The modules that draw the page of a run, each after the modules that it imports.
MODULES = ("dom.js", "charts.js", "timeline.js", "run.js", "report.js")


def page(runs: Sequence[tuple[RunRecord, Advice]]) -> str:
    """Return the page of some runs, each with advice on what would make it faster.

    The content security policy allows the page's style and script by their hashes and nothing else.
    The page can therefore load nothing, and a text from a run cannot become a script.
    """
    views = []
    for run, advice in runs:
        view = run_view(run, state_of(run), advice=advice)
        views.append({**view, "timeline": finite(timeline(run.folder))})
    names = ", ".join(run.folder.path.name for run, _ in runs)
    style, script = f"\n{static_text('style.css')}", f"\n{bundle(MODULES)}"
    return Template(static_text("report.html")).substitute(
        title=escape(f"{names} - LoHan run report"),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        data=script_json({"runs": views}),
    )


def static_text(name: str) -> str:
    """Return the text of a static file of the pages."""
    return (files("lohan.ui") / "static" / name).read_text(encoding="utf-8")


def bundle(names: Sequence[str]) -> str:
    """Return several JavaScript modules joined into one.

    Import statements between the modules, each on a single line, are left out, because all names
    are then in one scope.
    """
    text = "\n".join(static_text(name) for name in names)
    text = re.sub(r"^import .*\n", "", text, flags=re.MULTILINE)
    return re.sub(r"^export ", "", text, flags=re.MULTILINE)


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def script_json(value: Any) -> str:
    """Return JSON that is safe inside a script element, because no tag can begin in it."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def advice_for(run: RunRecord) -> Advice:
    """Return advice from the planner, or the reason why there is none."""
    start, plan, measured = (run.last(event) for event in ("start", "plan", "measured"))
    if not (start.get("shape") and plan and measured):
        return Advice(reason="the run has not measured its lanes, which takes three steps")
    from lohan.tools.plan_run import case_of, changes

    try:
        return Advice(changes(case_of(run.config, start["shape"], plan, measured)))
    except LohanError as error:
        return Advice(reason=str(error))
