"""The command line: `simulate`, `compare` and `presets`: systems on machines that need not be
here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lohan.cli.options import Gpus, Host, Json, Machine, Model, Ssds, machine_of, option
from lohan.errors import ConfigError
from lohan.util.display import echo

if TYPE_CHECKING:
    from lohan.model.machine import Profile


def simulate(
    model: Model,
    machine: Machine = None,
    policy: Annotated[
        str, typer.Option("--policy", help="auto, lohan, zero-infinity, ...; see `lohan presets`.")
    ] = "auto",
    batch: Annotated[int, option("train.batch")] = 8,
    seq: Annotated[int, option("train.seq")] = 1024,
    ssds: Ssds = None,
    gpus: Gpus = None,
    host: Host = None,
    grad_offload: Annotated[str | None, option("train.grad_offload")] = None,
    activations: Annotated[
        str | None, typer.Option("--activations", help="Activation policy, such as holistic.")
    ] = None,
    clip: Annotated[float | None, option("train.clip")] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="File for a Chrome trace of the step.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run one system's step on a machine that need not be here, lane by lane.

    auto is LoHan with the defaults of training, while no step is clipped; other systems never clip.
    """
    from lohan.cli.compare import describe_simulation, simulate_command
    from lohan.planner import presets

    profile = machine_of(machine or "", ssds=ssds, gpus=gpus, host=host)
    made = simulate_command(
        presets.model(model), profile, policy, batch=batch, seq=seq, grad_offload=grad_offload,
        activations=activations, clip=clip, trace=trace,
    )  # fmt: skip
    echo(json.dumps(made, indent=1) if as_json else "\n".join(describe_simulation(made)))


def compare(
    model: Model,
    machine: Machine = None,
    policy: Annotated[
        list[str] | None, typer.Option("--policy", help="Systems to compare; may be repeated.")
    ] = None,
    batch: Annotated[str, typer.Option("--batch", help="One or several: 8,16,32.")] = "8",
    seq: Annotated[int, option("train.seq")] = 1024,
    host: Annotated[
        str | None, typer.Option("--host", help="Main memory, one or several: 128GB,256GB.")
    ] = None,
    ssds: Annotated[
        str | None, typer.Option("--ssds", help="Drives, one or several: 1,2,4.")
    ] = None,
    gpus: Gpus = None,
    clip: Annotated[float | None, option("train.clip")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Picture, .png or .svg.")] = None,
    as_json: Json = False,
) -> None:
    """Systems side by side over batch sizes, main memory or drives, simulated."""
    from lohan.cli import compare as command
    from lohan.planner import presets
    from lohan.util.units import parse_bytes

    if plot is not None:
        command.check_plot(plot)
    made = command.compare_command(
        presets.model(model), machine_of(machine or "", ssds=None, gpus=gpus),
        batches=_numbers("--batch", batch), ssds=_numbers("--ssds", ssds or ""),
        hosts=[parse_bytes(size, name="--host") for size in (host or "").split(",") if size],
        policies=policy or command.DEFAULT, seq=seq, clip=clip,
    )  # fmt: skip
    echo(json.dumps(made, indent=1) if as_json else "\n".join(command.describe_comparison(made)))
    if plot is not None:
        command.plot(made, plot)


def _numbers(name: str, text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = [0]
    if any(value < 1 for value in values):
        raise ConfigError(f"{name}: {text!r}; give whole numbers from 1, such as 8,16,32")
    return values


def presets() -> None:
    """Names that --machine, --model and --policy know; machines with memory, drives and price."""
    from lohan.planner import presets as known
    from lohan.planner.systems import policy_names

    echo("machines:")
    for line in _machines([known.machine(name) for name in known.machine_names()]):
        echo(f"  {line}")
    for what, names in (("models", known.model_names()), ("policies", policy_names())):
        echo(f"{what}:")
        for name in names:
            echo(f"  {name}")


def _machines(machines: list[Profile]) -> Iterator[str]:
    """A row of a table for each."""
    from lohan.util.units import format_bytes

    rows = [("name", "GPU", "its memory", "host memory", "drives", "rated writes", "USD")]
    for m in machines:
        drive, count = m.drives[0], len(m.drives)
        price = f", {drive.usd:,.0f} USD" if drive.usd else ""
        gpu = f"{m.gpus} x {m.device}" if m.gpus > 1 else m.device
        rows.append((
            m.name, gpu, format_bytes(m.device_bytes), f"{m.host_bytes / 1e9:,.0f} GB",
            f"{count} x {drive.bytes / 1e12:.3g} TB{price}",
            f"{drive.endurance_bytes / 1e15:.2g} PB each", f"{m.usd:,.0f}",
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        yield "  ".join(cell.ljust(width) for cell, width in cells).rstrip()


def register(app: typer.Typer) -> None:
    for command in (simulate, compare, presets):
        app.command()(command)
