"""The command line: `profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lohan.cli.options import Json, option
from lohan.config_parse import byte_rate
from lohan.util.terminal import echo
from lohan.util.units import parse_bytes


def profile(
    ssd: Annotated[list[Path] | None, option("budget.ssd", "--ssd")] = None,
    device: Annotated[str, option("budget.device", "--device")] = "auto",
    device_memory: Annotated[str | None, option("budget.device_memory", "--device-memory")] = None,
    link: Annotated[str | None, option("budget.link", "--link")] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="TOML file for the result.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure this machine: compute, links, drives, optimizer, memory. Takes less than a minute."""
    from lohan.util.libraries import set_up_libraries

    set_up_libraries()
    from rich.console import Console

    from lohan.device.choose import known_name
    from lohan.engine.profile import Where, run_profile
    from lohan.util.display import open_display

    where = Where(
        known_name(device),
        parse_bytes(device_memory, name="--device-memory") if device_memory else None,
        byte_rate(link, "--link", Path()) if link else None,
    )
    shown = open_display(Console(stderr=True))
    try:
        text = run_profile(
            ssd or [Path.cwd()], where=where, out=out, as_json=as_json, progress=shown.advance
        )
    finally:
        shown.close()
    echo(text)


def register(app: typer.Typer) -> None:
    app.command()(profile)
