"""Commands that look ahead: `profile`, `plan`, `simulate`, `compare`. Nothing here trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lohan.config import help_of
from lohan.errors import BudgetError, ConfigError

if TYPE_CHECKING:
    from lohan.planning.prospect import Question
    from lohan.profile import Profile


def option(dotted: str, *names: str) -> Any:
    """A setting as an option; what is wrong with a path is told by whoever opens it."""
    return typer.Option(*names, help=help_of(dotted), show_default=False, readable=False)


MODEL_HELP = "A preset such as llama-3-8b, a config.json, or a Hugging Face model folder."
MACHINE_HELP = "A preset such as rtx4090, or a TOML file from `lohan profile`."
Model = Annotated[str, typer.Option("--model", help=MODEL_HELP, show_default=False)]
Machine = Annotated[str | None, typer.Option("--machine", help=MACHINE_HELP, show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="For programs.")]
Ssds = Annotated[
    int | None, typer.Option("--ssds", help="Number of drives, all like the machine's first.")
]
Gpus = Annotated[int | None, typer.Option("--gpus", help="Number of GPUs.")]
Host = Annotated[str | None, option("budget.host", "--host")]


def plan(
    model: Annotated[str | None, typer.Option("--model", help=MODEL_HELP)] = None,
    machine: Machine = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="TOML file with any of these settings.")
    ] = None,
    host: Host = None,
    device_memory: Annotated[
        str | None, typer.Option("--device-memory", help="Memory of the GPU, such as 24GiB.")
    ] = None,
    ssds: Ssds = None,
    steps: Annotated[int | None, option("train.steps", "--steps")] = None,
    batch: Annotated[int | None, option("train.batch", "--batch")] = None,
    micro_batch: Annotated[int | None, option("train.micro_batch", "--micro-batch")] = None,
    seq: Annotated[int | None, option("train.seq", "--seq")] = None,
    dtype: Annotated[str | None, option("train.dtype", "--dtype")] = None,
    clip: Annotated[float | None, option("train.clip", "--clip")] = None,
    grad_offload: Annotated[str | None, option("train.grad_offload", "--grad-offload")] = None,
    overlap: Annotated[
        bool | None, typer.Option("--overlap/--no-overlap", help=help_of("train.overlap"))
    ] = None,
    lora: Annotated[int | None, option("train.lora", "--lora")] = None,
    durability: Annotated[str | None, option("budget.durability", "--durability")] = None,
    minimise: Annotated[
        str, typer.Option("--minimise", help="time, or writes: bytes written to the drives.")
    ] = "time",
    max_model: Annotated[
        bool, typer.Option("--max-model", help="The largest model of this preset's family.")
    ] = False,
    max_batch: Annotated[bool, typer.Option("--max-batch", help="The largest batch.")] = False,
    schedule: Annotated[
        bool, typer.Option("--schedule", help="Also the actions of a step, one token each.")
    ] = False,
    activations: Annotated[
        bool, typer.Option("--activations", help="Also what a block could keep, by benefit.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Does it fit, how fast will it be, what limits it? Nothing is written, no weights are read.

    With --machine, or for a preset, the answer comes from shapes alone. For a model folder on this
    machine the model's own blocks are traced, as a run does it.
    """
    from lohan.config import load_config

    overrides = {
        "model": model, "data": ".", "out": ".",  # a plan needs neither data nor a run folder
        "budget.host": host, "budget.durability": durability, "train.batch": batch,
        "train.micro_batch": micro_batch, "train.seq": seq, "train.dtype": dtype,
        "train.clip": clip, "train.grad_offload": grad_offload, "train.overlap": overlap,
        "train.steps": steps, "train.lora": lora,
    }  # fmt: skip
    settings = load_config(config, overrides=overrides)
    named = model if model is not None else str(settings.model)
    if minimise not in ("time", "writes"):
        raise ConfigError(f"--minimise: {minimise!r}; choose time or writes")
    if machine is None and Path(named).is_dir():
        if ssds is not None or device_memory or max_model or max_batch:
            raise ConfigError(
                "--ssds, --device-memory, --max-model and --max-batch are for other machines; "
                "add --machine"
            )
        _plan_here(settings, minimise, schedule=schedule, activations=activations, as_json=as_json)
        return
    if settings.train.lora:
        raise ConfigError(
            f"--lora: {settings.train.lora}, and plans from shapes alone train every weight; give "
            "a model folder, without --machine"
        )
    from lohan import presets

    shape = presets.model(named)
    profile = _machine(machine or "", ssds=ssds, gpus=None, device_memory=device_memory)
    question = _question(shape, profile, settings, minimise)
    if max_model or max_batch:
        _search(question, named, model_too=max_model, as_json=as_json)
    else:
        _look(
            question, steps=settings.train.steps, schedule=schedule, activations=activations,
            as_json=as_json,
        )  # fmt: skip


def _plan_here(
    settings: Any, minimise: str, *, schedule: bool, activations: bool, as_json: bool
) -> None:
    from lohan.libraries import set_up_libraries

    set_up_libraries()
    from lohan.commands.plan import describe, inventory_lines, look_ahead, to_json
    from lohan.profiling.command import latest_profile

    outlook = look_ahead(settings, latest_profile(), minimise=minimise)
    if as_json:
        typer.echo(json.dumps(to_json(outlook, schedule=schedule), indent=1))
    else:
        lines = describe(outlook, schedule=schedule)
        typer.echo("\n".join(lines + (inventory_lines(outlook) if activations else [])))


def _machine(
    name: str, *, ssds: int | None, gpus: int | None, device_memory: str | None = None,
    host: str | None = None,
) -> Profile:  # fmt: skip
    from dataclasses import replace

    from lohan import presets
    from lohan.units import parse_bytes

    if not name:
        from lohan.profiling.command import latest_profile

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


def _question(model: Any, profile: Profile, settings: Any, minimise: str) -> Question:
    from lohan.planning.planner import Wishes
    from lohan.planning.prospect import Question

    train, budget = settings.train, settings.budget
    wishes = Wishes(
        mode=train.dtype or ("bf16" if profile.has_link else "fp32"),
        micro_batch=train.micro_batch, overlap=train.overlap, grad_offload=train.grad_offload,
        clip=train.clip, durability=budget.durability, minimise=minimise,
    )  # fmt: skip
    return Question(
        model=model, machine=profile, wishes=wishes, batch=train.batch, seq=train.seq,
        host=budget.host or profile.host_bytes,
    )  # fmt: skip


def _look(
    question: Question, *, steps: int | None, schedule: bool, activations: bool, as_json: bool
) -> None:
    from lohan.commands.prospect_text import activation_lines, describe, refusal_json, to_json
    from lohan.planning.prospect import load_of, look
    from lohan.schedule.actions import to_text

    try:
        prospect = look(question)
    except BudgetError as refused:
        if not as_json:
            raise
        typer.echo(json.dumps(refusal_json(question, str(refused)), indent=1))
        return
    phases = prospect.forecast.steady_phases()
    if as_json:
        made = to_json(prospect, steps=steps)
        if schedule:
            made["schedule"] = {name: to_text(phase) for name, phase in phases.items()}
        typer.echo(json.dumps(made, indent=1))
        return
    lines = describe(prospect, steps=steps)
    if activations:
        lines += activation_lines(load_of(question), prospect.plan)
    if schedule:
        for name, phase in phases.items():
            lines += ["", f"{name}, {len(phase)} actions", to_text(phase)]
    typer.echo("\n".join(lines))


def _search(question: Question, named: str, *, model_too: bool, as_json: bool) -> None:
    from lohan import presets
    from lohan.planning.prospect import largest_batch, largest_model

    found: dict[str, Any] = {}
    if model_too:
        family = named.split("-")[0]
        models = [presets.model(n) for n in presets.model_names() if n.split("-")[0] == family]
        best = largest_model(question, models or [question.model])
        found = {"largest_model": best.name if best else None, "batch": question.batch}
    else:
        found = {"model": question.model.name, "largest_batch": largest_batch(question)}
    if as_json:
        typer.echo(json.dumps({"machine": question.machine.name, **found}, indent=1))
    else:
        what, value = next((k, v) for k, v in found.items() if k.startswith("largest"))
        typer.echo(f"{what.replace('_', ' ')} on {question.machine.name}: {value or 'none fits'}")


def profile(
    ssd: Annotated[list[Path] | None, option("budget.ssd", "--ssd")] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="TOML file for the result.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure this machine: compute, drives, optimizer, memory. Takes less than a minute."""
    from lohan.libraries import set_up_libraries

    set_up_libraries()
    from rich.console import Console

    from lohan.display import open_display
    from lohan.profiling.command import run_profile

    shown = open_display(Console(stderr=True))
    try:
        text = run_profile(ssd or [Path.cwd()], out=out, as_json=as_json, progress=shown.advance)
    finally:
        shown.close()
    typer.echo(text)


def simulate(
    model: Model,
    machine: Machine = None,
    policy: Annotated[
        str, typer.Option("--policy", help="auto, lohan, zero-infinity, ...; see `lohan presets`.")
    ] = "auto",
    batch: Annotated[int, option("train.batch", "--batch")] = 8,
    seq: Annotated[int, option("train.seq", "--seq")] = 1024,
    ssds: Ssds = None,
    gpus: Gpus = None,
    host: Host = None,
    grad_offload: Annotated[str | None, option("train.grad_offload", "--grad-offload")] = None,
    activations: Annotated[
        str | None, typer.Option("--activations", help="Activation policy, such as holistic.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="File for a Chrome trace of the step.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run one system's step on a machine that need not be here, lane by lane. No clipping."""
    from lohan import presets
    from lohan.commands.simulate import describe, simulate_command

    profile = _machine(machine or "", ssds=ssds, gpus=gpus, host=host)
    made = simulate_command(
        presets.model(model), profile, policy, batch=batch, seq=seq, grad_offload=grad_offload,
        activations=activations, trace=trace,
    )  # fmt: skip
    typer.echo(json.dumps(made, indent=1) if as_json else "\n".join(describe(made)))


def compare(
    model: Model,
    machine: Machine = None,
    policy: Annotated[
        list[str] | None, typer.Option("--policy", help="Systems to compare; may be repeated.")
    ] = None,
    batch: Annotated[str, typer.Option("--batch", help="One or several: 8,16,32.")] = "8",
    seq: Annotated[int, option("train.seq", "--seq")] = 1024,
    host: Annotated[
        str | None, typer.Option("--host", help="Main memory, one or several: 128GB,256GB.")
    ] = None,
    ssds: Annotated[
        str | None, typer.Option("--ssds", help="Drives, one or several: 1,2,4.")
    ] = None,
    gpus: Gpus = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Picture, .png or .svg.")] = None,
    as_json: Json = False,
) -> None:
    """Systems side by side over batch sizes, main memory or drives, simulated."""
    from lohan import presets
    from lohan.commands import compare as command
    from lohan.units import parse_bytes

    made = command.compare_command(
        presets.model(model), _machine(machine or "", ssds=None, gpus=gpus),
        batches=_numbers("--batch", batch), ssds=_numbers("--ssds", ssds or ""),
        hosts=[parse_bytes(size, name="--host") for size in (host or "").split(",") if size],
        policies=policy or command.DEFAULT, seq=seq,
    )  # fmt: skip
    typer.echo(json.dumps(made, indent=1) if as_json else "\n".join(command.describe(made)))
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
    """Names that --machine, --model and --policy know."""
    from lohan import presets as known
    from lohan.policies.systems import policy_names

    for what, names in (
        ("machines", known.machine_names()), ("models", known.model_names()),
        ("policies", policy_names()),
    ):  # fmt: skip
        typer.echo(f"{what}:")
        for name in names:
            typer.echo(f"  {name}")


def register(app: typer.Typer) -> None:
    for command in (profile, plan, simulate, compare, presets):
        app.command()(command)
