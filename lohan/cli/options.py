"""Options that several commands have, those made from settings, and the machine that they name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lohan.config import field_of

if TYPE_CHECKING:
    pass


def option(dotted: str) -> Any:
    """Return the command-line option of a setting.

    Paths are not checked here, but when they are opened.
    """
    info = field_of(dotted)
    names = f"{info.option}/--no-{info.option[2:]}" if info.kind.typed is bool else info.option
    return typer.Option(names, help=info.help, show_default=False, readable=False)


def settings_options(*dotted: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add an option for each of these settings to a command.

    The command gets the given values as `overrides`, a dict by setting; values that were not
    given are None.
    """

    def add(command: Callable[..., None]) -> Callable[..., None]:
        names = {name: name.replace(".", "_") for name in dotted}
        parameters = inspect.signature(command, eval_str=True).parameters.values()
        options = [
            inspect.Parameter(
                names[name],
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[field_of(name).kind.typed | None, option(name)],
            )
            for name in dotted
        ]
        options += [
            one.replace(kind=one.KEYWORD_ONLY) for one in parameters if one.name != "overrides"
        ]

        def run(**given: Any) -> None:
            command(overrides={name: given.pop(names[name], None) for name in dotted}, **given)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        return run

    return add


MODEL_HELP = "A preset such as llama-3-8b, a config.json, or a Hugging Face model folder."
MACHINE_HELP = "A preset such as rtx4090, or a TOML file from `lohan profile`."
Model = Annotated[str, typer.Option("--model", help=MODEL_HELP, show_default=False)]
Machine = Annotated[str | None, typer.Option("--machine", help=MACHINE_HELP, show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="For programs.")]
Ssds = Annotated[
    int | None,
    typer.Option("--ssds", help="Number of drives, all like the machine's first."),
]
Gpus = Annotated[int | None, typer.Option("--gpus", min=1, help="Number of GPUs.")]
Host = Annotated[str | None, option("budget.host")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="TOML file with any of these settings.")
]
