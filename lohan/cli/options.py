"""Options that several commands have, and the machine that they name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from lohan.config import help_of
from lohan.errors import ConfigError

if TYPE_CHECKING:
    from lohan.model.machine import Profile


def option(dotted: str, *names: str) -> Any:
    """A setting as an option; what is wrong with a path is told by whoever opens it."""
    return typer.Option(*names, help=help_of(dotted), show_default=False, readable=False)


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
Host = Annotated[str | None, option("budget.host", "--host")]


def machine_of(
    name: str, *, ssds: int | None, gpus: int | None, device_memory: str | None = None,
    host: str | None = None,
) -> Profile:  # fmt: skip
    from dataclasses import replace

    from lohan.planner import presets
    from lohan.util.units import parse_bytes

    if ssds is not None and ssds < 1:
        raise ConfigError(f"--ssds {ssds}: give a whole number from 1")
    if not name:
        from lohan.engine.profile import latest_profile

        found = latest_profile()
        if found is None:
            raise ConfigError(
                "--machine: not given, and this machine was not measured yet; run `lohan profile`, "
                f"or choose one of {', '.join(presets.machine_names())}"
            )
        profile = found
    else:
        profile = presets.machine(name)
    if device_memory is not None:
        size = parse_bytes(device_memory, name="--device-memory")
        profile = replace(profile, device_bytes=size)
    if host is not None:
        profile = replace(profile, host_bytes=parse_bytes(host, name="--host"))
    if gpus is not None:
        profile = replace(profile, gpus=gpus)
    return profile if ssds is None else profile.with_drives(ssds)
