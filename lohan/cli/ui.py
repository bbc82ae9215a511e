"""The command line: `ui`, which serves the pages in a browser."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from lohan.errors import ConfigError
from lohan.util.display import echo

PACKAGES = ("starlette", "uvicorn")


def ui(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="The folder with runs, models and data.",
            show_default="the current folder",
        ),
    ] = Path(),
    also: Annotated[
        list[Path] | None,
        typer.Option(
            "--also",
            metavar="DIR",
            help="Another folder that the pages may use, such as a drive; may be repeated.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", min=1, max=65535, help="Port on loopback. Default: a free one."),
    ] = None,
    browser: Annotated[
        bool, typer.Option("--browser", help="Also open the address in a browser.")
    ] = False,
) -> None:
    """Plan, start, watch and try runs in a browser. Ctrl-C stops the pages, not the runs."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"lohan ui: the package {missing[0]} is not installed; pip install 'lohan[ui]'"
        )
    from lohan.ui.places import Places
    from lohan.ui.server import serve

    places = Places.of(folder, tuple(also or ()))

    def ready(address: str) -> None:
        echo(f"{places.root}: open {address}")
        if browser:
            import webbrowser

            webbrowser.open(address)

    serve(places, port=port, ready=ready)


def register(app: typer.Typer) -> None:
    app.command()(ui)
