"""`lohan doctor` on the command line."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from lohan.cli.options import Json
from lohan.util.terminal import echo

EXIT_PROBLEM = 1


def doctor(
    ssd: Annotated[
        list[Path] | None,
        typer.Option("--ssd", help="Folder on each drive to try; not given: the current folder."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Look at this machine: what a run will find, what is missing, what to do. Takes seconds.

    The exit code is 1 if something keeps a run from working.
    """
    from lohan.util.libraries import set_up_libraries

    set_up_libraries()
    from lohan.tools.doctor import check_machine
    from lohan.tools.drives import check_drives
    from lohan.tools.findings import describe, passed

    found = [*check_machine(), *check_drives(ssd or [Path.cwd()])]
    if as_json:
        made = {"ok": passed(found), "findings": [asdict(finding) for finding in found]}
        echo(json.dumps(made, indent=1))
    else:
        echo("\n".join(describe(found)))
    if not passed(found):
        raise typer.Exit(EXIT_PROBLEM)


def register(app: typer.Typer) -> None:
    app.command()(doctor)
