"""The command line: `plan`. Nothing here trains."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lohan.cli.options import (
    MODEL_HELP,
    ConfigFile,
    Gpus,
    Json,
    Machine,
    Ssds,
    machine_of,
    settings_options,
)
from lohan.config import load_config
from lohan.errors import BudgetError, ConfigError
from lohan.model.plan import MINIMISE, activation_policy_of, commit_interval
from lohan.util.display import echo

if TYPE_CHECKING:
    from lohan.model.machine import Profile
    from lohan.planner.machine_plan import MachinePlan, PlanRequest


PLANNED = (
    "budget.host", "budget.durability", "budget.commit_every",
    *(f"train.{key}" for key in (
        "steps", "batch", "micro_batch", "tiles", "seq", "dtype", "optimizer", "moments", "ema",
        "clip", "clip_by", "grad_dtype", "grad_offload", "activations", "overlap", "lora", "base",
    )),
)  # fmt: skip


Minimise = Annotated[
    str,
    typer.Option(
        "--minimise",
        help="time; writes: bytes written to the drives; or cost: machine time and drive wear.",
    ),
]
MaxModel = Annotated[
    bool, typer.Option("--max-model", help="The largest model of this preset's family.")
]
MaxBatch = Annotated[bool, typer.Option("--max-batch", help="The largest batch.")]
ShowSchedule = Annotated[
    bool, typer.Option("--schedule", help="Also the actions of a step, one token each.")
]
ShowClasses = Annotated[
    bool, typer.Option("--classes", help="Also what a block could keep, by benefit.")
]


@settings_options(*PLANNED)
def plan(
    overrides: dict[str, Any],
    model: Annotated[str | None, typer.Option("--model", help=MODEL_HELP)] = None,
    machine: Machine = None,
    config: ConfigFile = None,
    device_memory: Annotated[
        str | None, typer.Option("--device-memory", help="Memory of the GPU, such as 24GiB.")
    ] = None,
    ssds: Ssds = None,
    gpus: Gpus = None,
    minimise: Minimise = "time",
    max_model: MaxModel = False,
    max_batch: MaxBatch = False,
    schedule: ShowSchedule = False,
    classes: ShowClasses = False,
    as_json: Json = False,
) -> None:
    """Does it fit, how fast will it be, what limits it? Nothing is written, no weights are read.

    With --machine, or for a preset, the answer comes from shapes alone. For a model folder on this
    machine the model's own blocks are traced, as a run does it.
    """
    # A plan needs neither data nor a run folder.
    overrides |= {"model": model, "data": ".", "out": ".", "budget.gpus": gpus}
    settings = load_config(config, overrides=overrides)
    named = model if model is not None else str(settings.model)
    if minimise not in MINIMISE:
        raise ConfigError(f"--minimise: {minimise!r}; choose {', '.join(MINIMISE)}")
    if machine is None and Path(named).is_dir():
        if ssds is not None or device_memory or max_model or max_batch:
            raise ConfigError(
                "--ssds, --device-memory, --max-model and --max-batch are for other machines; "
                "add --machine"
            )
        _plan_here(settings, minimise, schedule=schedule, classes=classes, as_json=as_json)
        return
    from lohan.planner import presets

    shape = presets.model(named)
    if settings.train.lora and shape.sample_tokens:
        raise ConfigError(
            f"--lora: is for language models, {named} is a diffusion transformer; leave it out"
        )
    shape = replace(shape, lora=settings.train.lora, base=settings.train.base or "")
    ranks = settings.budget.gpus if gpus is None and settings.budget.gpus > 1 else gpus
    profile = machine_of(machine or "", ssds=ssds, gpus=ranks, device_memory=device_memory)
    request = _request(shape, profile, settings, minimise)
    if max_model and max_batch:
        raise ConfigError("--max-model and --max-batch: one at a time; leave one of them out")
    if max_model or max_batch:
        _search(request, named, model_too=max_model, as_json=as_json)
    else:
        _look(
            request, steps=settings.train.steps, schedule=schedule, classes=classes,
            as_json=as_json,
        )  # fmt: skip


def _plan_here(
    settings: Any, minimise: str, *, schedule: bool, classes: bool, as_json: bool
) -> None:
    from lohan.util.system import set_up_libraries

    set_up_libraries()
    from lohan.cli.plan_run import plan_traced
    from lohan.engine.profile import latest_profile

    profile = latest_profile()
    _check_prices(profile, minimise)
    made = plan_traced(settings, profile, minimise=minimise)
    _show(made, settings.train.steps, schedule=schedule, classes=classes, as_json=as_json)


def _show(
    made: MachinePlan, steps: int | None, *, schedule: bool, classes: bool, as_json: bool
) -> None:
    from lohan.cli.plan_text import describe, to_json

    if as_json:
        echo(json.dumps(to_json(made, steps=steps, schedule=schedule), indent=1))
    else:
        echo("\n".join(describe(made, steps=steps, schedule=schedule, classes=classes)))


def _request(model: Any, profile: Profile, settings: Any, minimise: str) -> PlanRequest:
    from lohan.planner.machine_plan import PlanRequest
    from lohan.planner.planner import PlanOptions

    train, budget = settings.train, settings.budget
    _check_prices(profile, minimise)
    options = PlanOptions(
        mode=train.dtype or ("bf16" if profile.has_link else "fp32"),
        micro_batch=train.micro_batch, tiles=train.tiles, overlap=train.overlap,
        grad_offload=train.grad_offload, activations=activation_policy_of(train.activations),
        clip=train.clip, clip_by=train.clip_by, grad_dtype=train.grad_dtype,
        durability=budget.durability,
        minimise=minimise, kind=train.kind, run_again=True,
        commit=commit_interval(budget.durability, budget.commit_every),
    )  # fmt: skip
    profile = profile if budget.host is None else profile.with_host(budget.host)
    return PlanRequest(
        model=model, machine=profile, options=options, batch=train.batch, seq=train.seq,
        host=profile.host_bytes,
    )  # fmt: skip


def _check_prices(profile: Profile | None, minimise: str) -> None:
    known = profile is not None and profile.usd_per_s and profile.usd_per_written_byte
    if minimise == "cost" and not known:
        name = profile.name if profile is not None else "this machine, which was not measured,"
        raise ConfigError(
            f"--minimise cost: {name} has no prices; give server_usd, and usd and endurance_bytes "
            "of its drives in a TOML file (--machine), or --minimise writes"
        )


def _look(
    request: PlanRequest, *, steps: int | None, schedule: bool, classes: bool, as_json: bool
) -> None:
    from lohan.cli.plan_text import refusal_json
    from lohan.planner.machine_plan import plan_for_machine, with_alternatives

    gc.disable()  # it makes many values, and nearly all of them live as long as the answer
    try:
        made = with_alternatives(request, plan_for_machine(request))
    except BudgetError as refused:
        if not as_json:
            raise
        echo(json.dumps(refusal_json(request, str(refused)), indent=1))
        return
    finally:
        gc.enable()
    _show(made, steps, schedule=schedule, classes=classes, as_json=as_json)


def _search(request: PlanRequest, named: str, *, model_too: bool, as_json: bool) -> None:
    from lohan.planner import presets
    from lohan.planner.machine_plan import largest_batch, largest_model

    found: dict[str, Any] = {}
    if model_too:
        family = named.split("-")[0]
        names = [n for n in presets.model_names() if n.split("-")[0] == family]
        lora, base = request.model.lora, request.model.base
        models = [replace(presets.model(n), lora=lora, base=base) for n in names]
        best = largest_model(request, models or [request.model])
        found = {"largest_model": best.name if best else None, "batch": request.batch}
    else:
        found = {"model": request.model.name, "largest_batch": largest_batch(request)}
    if as_json:
        echo(json.dumps({"machine": request.machine.name, **found}, indent=1))
    else:
        what, value = next((k, v) for k, v in found.items() if k.startswith("largest"))
        with_what = f"batch {request.batch}" if model_too else request.model.name
        seq = request.model.sample_tokens or request.seq
        echo(
            f"{what.replace('_', ' ')} on {request.machine.name}, {with_what}, {seq} tokens a "
            f"sample: {value or 'none fits'}"
        )


def register(app: typer.Typer) -> None:
    app.command()(plan)
