"""`lohan report` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lohan.errors import ConfigError, LohanError
from lohan.util.terminal import echo

if TYPE_CHECKING:
    from lohan.tools.gather import Story
    from lohan.tools.words import Advice


MERGED = "trace-all.json"
GENERATOR, LOOK_AT = b'content="lohan report"', 2048  # by which a report is known, near its begin


def report(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run.", show_default=False)
    ],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="File to write; not given: RUN/report.html."),
    ] = None,
) -> None:
    """Write one HTML file about a run: curves, lanes, memory, wear, and what would help."""
    from lohan.util.libraries import set_up_libraries

    set_up_libraries()
    from lohan.tools.gather import read_run
    from lohan.tools.report import page
    from lohan.tools.traces import read_traces, write_merged
    from lohan.train.run_folder import RunFolder, owner_only
    from lohan.util.atomic import write_atomic

    folder = RunFolder(run.absolute())
    story = read_run(folder)
    target = out or folder.path / "report.html"
    check_report(target)
    text = page(story, advice_for(story))
    try:
        with owner_only():
            write_atomic(target, text.encode())
    except OSError as error:
        raise ConfigError(
            f"{target}: cannot be written: {error.strerror}; choose another -o"
        ) from None
    echo(f"report: {target}")
    traces = read_traces(folder)
    if len(traces) > 1:
        write_merged(folder.path / MERGED, traces)
        echo(f"trace of all ranks: {folder.path / MERGED}")


def check_report(target: Path) -> None:
    """Refuses to replace a file that is not a report."""
    if target.is_file() and GENERATOR not in target.read_bytes()[:LOOK_AT]:
        raise ConfigError(
            f"{target}: is there and is not a report, it is left as it is; choose another -o"
        )


def advice_for(story: Story) -> Advice:
    """From the planner; a run without what that needs gets the reason instead."""
    from lohan.tools.words import Advice

    start, plan, measured = (story.last(event) for event in ("start", "plan", "measured"))
    if not (start.get("shape") and plan and measured):
        return Advice(reason="the run has not measured its lanes, which takes three steps")
    from lohan.tools.advice import case_of, changes

    try:
        return Advice(changes(case_of(story.config, start["shape"], plan, measured)))
    except LohanError as error:
        return Advice(reason=str(error))


def register(app: typer.Typer) -> None:
    app.command()(report)
