"""The command line: `plan`, and plans as text and JSON. Nothing here trains."""

from __future__ import annotations

import gc
import json
import textwrap
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from lohan.cli.options import (
    MODEL_HELP,
    ConfigFile,
    Gpus,
    Json,
    Machine,
    Ssds,
    settings_options,
)
from lohan.config import Config, load_config
from lohan.errors import BudgetError, ConfigError
from lohan.model.layout import Blocks
from lohan.model.machine import Profile
from lohan.model.options import MINIMISE
from lohan.model.plan import LOG, Plan
from lohan.model.state import STATE_FORMATS, state_format_of
from lohan.model.workload import BatchWorkload
from lohan.optim import DEFAULT_KIND
from lohan.planner.forecast import BUS, Forecast
from lohan.planner.machine_plan import MachinePlan, PlanRequest
from lohan.planner.wear import wear_lines, wear_of
from lohan.schedule.actions import Action, Schedule, to_text
from lohan.schedule.placement import Phase, UpdateOptions, needs_all_gradients, rule_of
from lohan.tools.plan_request import check_prices, machine_of, request_of
from lohan.util.display import echo
from lohan.util.trace import LANE_NAMES, LANES
from lohan.util.units import counted, format_bytes, format_seconds

WIDTH = 100


# -- for people -----------------------------------------------------------------------------------


def describe(
    planned: MachinePlan, *, steps: int | None, schedule: bool = False, classes: bool = False
) -> list[str]:
    plan, ranks = planned.plan, planned.plan.world
    machine = planned.machine.name if planned.machine is not None else "this machine"
    machine += f" with {ranks} GPUs" if ranks > 1 else ""
    size, host = planned.parameters, format_bytes(ranks * planned.host_bytes)
    count = f"{size / 1e9:.3g}B" if size >= 1e8 else f"{size:,}"
    lines = [
        f"{planned.model} on {machine}: {count} parameters, batch {planned.batch} x "
        f"{planned.workload.seq} tokens, {plan.dtype}, {host} of memory",
        "",
        _verdict(planned),
        "",
        *([f"of each of {ranks} ranks:"] if ranks > 1 else []),
        *plan.describe(host_bytes=planned.host_bytes, device_bytes=planned.device_bytes),
        "",
        *_speed(planned, steps),
        "",
        *(f"{name:16} {text}" for name, text in _choices(planned).items()),
    ]
    if classes:
        lines += activation_lines(planned.workload.in_tiles(plan.tiles), plan)
    return lines + schedule_lines(planned) if schedule else lines


def _verdict(planned: MachinePlan) -> str:
    """Return "fits", with a warning if the drives have no room for the exported model."""
    if planned.has_room_for_export:
        return "fits"
    free_bytes = max(0, planned.drive_bytes - planned.peak_bytes["ssd"])
    return (
        f"fits without the export: it takes {format_bytes(planned.export_bytes)}, and "
        f"{format_bytes(free_bytes)} are left on the drives; put --out on another drive, or add one"
    )


def _speed(planned: MachinePlan, steps: int | None) -> list[str]:
    """Describe how long a step takes, what limits it, and what it writes."""
    foreseen, machine = planned.forecast, planned.machine
    if foreseen is None or machine is None:
        return ["how fast: not known; `lohan profile` measures this machine"]
    step_s, faster_s = foreseen.step_s, planned.without_binding_s
    lines = [f"step          {format_seconds(step_s)}"]
    lines.append(f"tokens/s      {foreseen.tokens_per_s:,.1f}")
    if planned.clipped is not None:
        clipped, speed = planned.clipped.step_s, planned.clipped.tokens_per_s
        lines.append(
            f"if clipped    {format_seconds(clipped)}, {speed:,.1f} tokens/s, with every norm "
            f"above the limit"
        )
    elif planned.plan.clip and _waits(planned.plan):
        lines.append("if clipped    the same: updates wait for every norm")
    if steps is not None:
        lines.append(counted(steps, "step").ljust(14) + format_seconds(steps * step_s))
    if machine.usd:
        rate = foreseen.tokens_per_s * 1000 / machine.usd
        lines.append(
            f"for the money {rate:,.1f} tokens/s per 1000 USD (machine: {machine.usd:,.0f} USD)"
        )
        if machine.gpu_usd or any(drive.usd for drive in machine.drives):
            lines.append(f"price         {_price(machine)}")
    lines += ["", *lane_lines(foreseen)]
    lines.append(
        f"{foreseen.binding} binds: without it a step would take "
        f"{format_seconds(faster_s)} ({step_s / faster_s:.2f}x)"
    )
    written = foreseen.written_bytes
    return [*lines, "", *wear_lines(machine.drives, written, steps=steps, instead=planned.instead)]


def _price(machine: Profile) -> str:
    """Return the price by part, such as "GPU 1,600 USD, 2 drives 320 USD, the rest 1,500 USD"."""
    parts = {
        counted(machine.gpus, "GPU").removeprefix("1 "): machine.gpus * machine.gpu_usd,
        counted(len(machine.drives), "drive"): sum(drive.usd for drive in machine.drives),
        "the rest": machine.server_usd,
    }
    return ", ".join(f"{name} {usd:,.0f} USD" for name, usd in parts.items() if usd)


def lane_lines(forecast: Forecast) -> list[str]:
    lines = []
    busy_s, names = {**forecast.busy_s, BUS: forecast.bus_s}, {**LANE_NAMES, BUS: "main memory"}
    for lane in (*LANES, BUS):
        if busy := busy_s[lane]:
            bar = "#" * round(30 * min(1.0, busy / forecast.step_s))
            share = f"{100 * busy / forecast.step_s:5.0f} %"
            what = names[lane] if names[lane] != lane else ""
            lines.append(f"{lane:9} {share}  {bar:30}  {what}".rstrip())
    return lines


def _choices(planned: MachinePlan) -> dict[str, str]:
    """Return the decisions of the planner, each with its name as the key."""
    plan, rows = planned.plan, planned.workload.batch
    trained = len(planned.blocks.trained)
    held = trained if needs_all_gradients(plan) else len(plan.deferred)
    moving = [group for group in planned.blocks.groups if not group.resident]
    width = STATE_FORMATS[plan.dtype].weight_bytes
    cached = width * sum(g.numel for g in moving if g.key in plan.host_cached_weights)
    whole = width * sum(group.numel for group in moving)
    scarce = "; the drives have no room for more" if planned.scarce else ""
    return {
        **_optimizer(planned),
        **_frozen(planned.blocks),
        "micro-batch": f"{plan.micro_batch or rows} of {counted(rows, 'example')}",
        **_tiles(plan),
        "chunk": f"{plan.chunk_params:,} parameters",
        "head slice": counted(plan.head_tokens, "token"),
        "weight slots": f"{plan.weight_slots}, {counted(plan.window, 'block')} read ahead",
        "state ring": counted(plan.ring, "buffer"),
        "overlap": "on" if plan.overlap else "off: one action after the other",
        "activations": _activations(plan) + scarce,
        "updates": _updates(plan, trained),
        "commits": _commits(planned),
        **_log(planned),
        "held gradients": "none"
        if plan.log_gradients
        else f"{counted(held - len(plan.spilled_gradients), 'group')} in host memory, "
        f"{len(plan.spilled_gradients)} on SSD",
        "cached weights": f"{len(plan.host_cached_weights)} of {len(moving)} groups, "
        f"{format_bytes(cached)} of {format_bytes(whole)}",
        "cached state": f"{len(plan.host_cached_state)} of {sum(planned.spec.chunks)} chunks",
    }


def _waits(plan: Plan) -> bool:
    """Return whether all updates of every step run in the next forward."""
    updates = UpdateOptions.of(plan)
    return not updates.can_speculate and rule_of(updates).update is Phase.NEXT_FORWARD


def _tiles(plan: Plan) -> dict[str, str]:
    if not plan.tiles:
        return {}
    return {"tiles": f"tiles of {counted(plan.tiles, 'token')} where a block does not mix tokens"}


def _frozen(blocks: Blocks) -> dict[str, str]:
    """Describe what is trained and how frozen weights are stored; empty if nothing is frozen."""
    if not any(group.frozen for group in blocks.groups):
        return {}
    trained = counted(sum(group.numel for group in blocks.trained), "parameter")
    packings = {tensor.packing for _, tensor in blocks.tensors() if tensor.packing}
    packed = f", in blocks as {', '.join(packings)}" if packings else ""
    return {"trained": f"{trained}; the rest is only read{packed}"}


def _optimizer(planned: MachinePlan) -> dict[str, str]:
    """Describe the optimizer's state and, if it is not the default, what the default would need."""
    plan, default_plan = planned.plan, planned.default_plan
    rows = {"optimizer": f"{plan.kind}: {bytes_of(plan):g} bytes per parameter and copy on SSD"}
    if plan.kind == DEFAULT_KIND:
        return rows
    costs = "it would not fit"
    if default_plan is not None:
        costs = f"{format_bytes(default_plan.peak_bytes['ssd'])} on SSD"
        if default_plan.forecast is not None:
            costs += f", {format_bytes(default_plan.forecast.written_bytes)} written per step"
            costs += f", {format_seconds(default_plan.step_s)} per step"
    return {**rows, "instead of": f"{DEFAULT_KIND}: {costs}"}


def bytes_of(plan: Plan) -> float:
    """Return the bytes of weights and optimizer state per parameter."""
    state_format = state_format_of(plan.dtype, plan.kind)
    return state_format.weight_bytes + state_format.state_bytes


def _activations(plan: Plan) -> str:
    kept = ", ".join(f"{name} of {counted(n, 'block')}" for name, n in plan.kept_counts.items())
    text = "block inputs" + (f", {kept}" if kept else "") + "; the rest is recomputed"
    if not plan.spilled_sites:
        return text
    return f"{text}; those of {counted(len(plan.spilled_sites), 'block')} go to SSD"


def _updates(plan: Plan, groups: int) -> str:
    updates = UpdateOptions.of(plan)
    update = rule_of(updates).update
    if update is Phase.AFTER_BACKWARD:
        return f"{plan.update_mode}: all {groups} groups after backward"
    if updates.can_speculate and plan.clip:
        repetition = "run again" if plan.spilled_gradients else "updated again"
        if plan.most_clipped < 0:
            return f"{plan.update_mode}: in the next forward, which is as fast as in backward"
        return (
            f"{plan.update_mode}: in backward; above norm {plan.clip:g} {repetition}; "
            f"they wait if over {100 * plan.most_clipped:.0f} % are"
        )
    if updates.can_speculate:
        return f"{plan.update_mode}: in backward; a step that overflows is rolled back"
    if plan.log_gradients:
        return f"{plan.update_mode}: all {groups} groups in the next forward, from the log"
    if update is Phase.NEXT_FORWARD:
        why = f"clipping at norm {plan.clip:g}" if plan.clip else "loss scaling"
        return f"{plan.update_mode}: all {groups} groups in the next forward ({why})"
    return f"{plan.update_mode}: {len(plan.deferred)} of {groups} groups in the next forward"


def _commits(planned: MachinePlan) -> str:
    """Describe how often steps are committed, what a crash can cost, and what this saves."""
    plan, foreseen = planned.plan, planned.forecast
    if plan.log_gradients:
        return "every step, by its gradients: a crash costs the one in flight"
    if plan.commit.every_step:
        return "every step: a crash costs the one in flight and at most the one before it"
    text = f"every {plan.commit}"
    if foreseen is None or (added := foreseen.commit) is None:
        return f"{text}: a crash costs as much"
    share, minutes = 1 - 1 / added.steps, added.steps * foreseen.step_s / 60
    saved = f"{format_seconds(share * added.seconds)} and " if added.seconds else ""
    saved += f"{format_bytes(share * added.written_bytes)} of writes per step"
    saved += ", against a commit in every step of this plan"
    return f"{text}: a crash costs up to {minutes:.2g} min; saves {saved}"


def _log(planned: MachinePlan) -> dict[str, str]:
    """Describe the log of gradients, if there is one: its interval, its size, and what it saves."""
    plan = planned.plan
    if not plan.log_gradients:
        return {}
    room = sum(entry.bytes for entry in plan.ledger if entry.owner == LOG)
    rows = {
        "log": f"{format_bytes(room)} on the drives for gradients of {plan.log_gradients + 1} "
        f"steps; the full state is written every {counted(plan.log_gradients, 'step')}"
    }
    logged, unlogged = planned.forecast, planned.unlogged
    if logged is None or unlogged is None:
        return rows
    saved_s, saved = unlogged.step_s - logged.step_s, unlogged.written_bytes - logged.written_bytes
    verb = "saves" if saved_s >= 0 else "costs"
    text = f"{verb} {format_seconds(abs(saved_s))} of {format_seconds(unlogged.step_s)} per step"
    if saved > 0:
        longer = unlogged.written_bytes / logged.written_bytes
        text += (
            f"; {format_bytes(saved)} less is written, so drives last {longer:.1f} times as long"
        )
    return {**rows, "the log": text}


def activation_lines(workload: BatchWorkload, plan: Plan) -> list[str]:
    """Return a table of the activations that a block could keep, in the order of the planner."""
    if not workload.shapes:
        return []
    width, kept, tokens = STATE_FORMATS[plan.dtype].weight_bytes, plan.kept_counts, workload.tokens
    shape = next(iter(workload.shapes.values()))
    inputs = format_bytes(shape.input_elements * tokens * width)
    lines = [
        "",
        f"{'activations of a block':48} {'bytes':>11} {'GFLOPs saved':>13} {'per byte':>9}",
        f"{'(its input, always kept)':48} {inputs:>11}",
    ]
    for part in shape.by_benefit(workload.seq):
        size, saved = part.elements * tokens * width, part.flops_at(workload.seq) * tokens
        blocks = kept.get(part.name, 0)
        note = f"  kept in {blocks} of {len(workload.shapes)} blocks" if blocks else ""
        lines.append(
            f"{part.name[:48]:48} {format_bytes(size):>11} {saved / 1e9:13,.2f} "
            f"{saved / size:9,.1f}{note}"
        )
    return lines


def schedule_lines(planned: MachinePlan) -> list[str]:
    """Return the tokens of the schedule; each action of the compute lane starts a line."""
    blocks, spec = planned.blocks, planned.spec
    lines = ["", "group  chunks  key"]
    lines += [f"{n:5}  {spec.chunks[n]:6}  {group.key}" for n, group in enumerate(blocks.groups)]
    lines += ["", "site  groups  module"]
    lines += [
        f"{number:4}  {','.join(map(str, spec.sites[number])):6}  {site.name}"
        for number, site in enumerate(blocks.sites)
    ]
    for name, phase in planned.phases.items():
        lines += ["", f"{name}, {len(phase)} actions"]
        for row in _rows(phase):
            lines += textwrap.wrap(
                to_text(row),
                WIDTH,
                initial_indent="  ",
                subsequent_indent="    ",
                break_long_words=False,
                break_on_hyphens=False,
            )
    return lines


def _rows(phase: Schedule) -> list[list[Action]]:
    rows: list[list[Action]] = [[]]
    for action in phase:
        if action.lane == "compute":
            rows.append([])
        rows[-1].append(action)
    return [row for row in rows if row]


# -- for programs ---------------------------------------------------------------------------------


def to_json(planned: MachinePlan, *, steps: int | None, schedule: bool) -> dict[str, Any]:
    plan, foreseen, clipped, machine = (
        planned.plan,
        planned.forecast,
        planned.clipped,
        planned.machine,
    )
    facts: dict[str, Any] = {
        "model": planned.model,
        "machine": machine.name if machine is not None else None,
        "gpus": plan.world,
        "parameters": planned.parameters,
        "batch": planned.batch,
        "seq": planned.workload.seq,
        "fits": True,
    }
    if not planned.has_room_for_export:
        facts |= {"fits_export": False, "export_bytes": planned.export_bytes}
    if foreseen is not None and machine is not None:
        written, drives, usd = foreseen.written_bytes, machine.drives, machine.usd
        wear = wear_of(drives, written)
        facts |= {
            "step_s": foreseen.step_s,
            "tokens_per_s": foreseen.tokens_per_s,
            "steps": steps,
            "step_s_clipped": None if clipped is None else clipped.step_s,
            "tokens_per_s_clipped": None if clipped is None else clipped.tokens_per_s,
            "total_s": None if steps is None else steps * foreseen.step_s,
            "lane_busy_s": foreseen.busy_s,
            "binding_lane": foreseen.binding,
            "step_s_without_binding_lane": planned.without_binding_s,
            "tokens_per_s_per_1000_usd": foreseen.tokens_per_s * 1000 / usd if usd else None,
            "written_bytes_per_step": written,
            "commit": None if foreseen.commit is None else asdict(foreseen.commit),
            "without_log": None
            if planned.unlogged is None
            else {
                "step_s": planned.unlogged.step_s,
                "written_bytes_per_step": planned.unlogged.written_bytes,
            },
            "written_bytes_per_drive": [written / len(drives)] * len(drives) if drives else [],
            "machine_usd": usd or None,
            "drive_lives_per_step": wear.lives or None,
            "drive_usd_per_step": wear.usd or None,
            "instead": [
                {
                    "option": other.option,
                    "step_s": other.step_s,
                    "written_bytes_per_step": other.written_bytes,
                    "drive_usd_per_step": wear_of(drives, other.written_bytes).usd or None,
                }
                for other in planned.instead
            ],
        }
    facts |= {"peak_bytes": planned.peak_bytes, "bytes_per_parameter": bytes_of(plan)}
    if plan.kind != DEFAULT_KIND:
        facts["usual"] = None if planned.default_plan is None else _costs(planned.default_plan)
    facts["plan"] = plan.to_json()
    phases = {name: to_text(phase) for name, phase in planned.phases.items()} if schedule else {}
    if planned.traced:
        facts["host_budget_bytes"] = planned.host_bytes
    if planned.traced and schedule:
        spec = {
            name: sorted(value) if isinstance(value, frozenset) else value
            for name, value in asdict(planned.spec).items()
        }
        facts["schedule"] = {
            "groups": [group.key for group in planned.blocks.groups],
            "sites": [site.name for site in planned.blocks.sites],
            "shape": spec,
            "phases": phases,
        }
    elif schedule:
        facts["schedule"] = phases
    return facts


def _costs(planned: MachinePlan) -> dict[str, Any]:
    foreseen = planned.forecast
    return {
        "ssd_bytes": planned.peak_bytes["ssd"],
        "step_s": None if foreseen is None else foreseen.step_s,
        "written_bytes": None if foreseen is None else foreseen.written_bytes,
    }


def refusal_json(request: PlanRequest, reason: str) -> dict[str, Any]:
    return {
        "model": request.model.name,
        "machine": request.machine.name,
        "parameters": request.model.parameters,
        "batch": request.batch,
        "fits": False,
        "reason": reason,
    }


# -- The command -----------------------------------------------------------------------------------


PLANNED = (
    "budget.host",
    "budget.commit_every",
    "budget.log_gradients",
    *(
        f"train.{key}"
        for key in (
            "steps",
            "epochs",
            "batch",
            "micro_batch",
            "tiles",
            "seq",
            "dtype",
            "optimizer",
            "moments",
            "ema",
            "clip",
            "update_mode",
            "activations",
            "overlap",
            "lora",
            "base",
        )
    ),
)


Minimise = Annotated[
    str,
    typer.Option(
        "--minimise",
        help="What to minimise: time, writes to the drives, or cost of machine time and wear.",
    ),
]
MaxModel = Annotated[
    bool,
    typer.Option("--max-model", help="Find the largest model of this preset's family that fits."),
]
MaxBatch = Annotated[bool, typer.Option("--max-batch", help="Find the largest batch that fits.")]
ShowSchedule = Annotated[
    bool, typer.Option("--schedule", help="Also print the actions of a step, one token each.")
]
ShowClasses = Annotated[
    bool,
    typer.Option(
        "--classes", help="Also print the activations that a block could keep, by benefit."
    ),
]


@settings_options(*PLANNED, panels=True)
def plan(
    overrides: dict[str, Any],
    model: Annotated[str | None, typer.Option("--model", help=MODEL_HELP)] = None,
    machine: Machine = None,
    config: ConfigFile = None,
    device_memory: Annotated[
        str | None,
        typer.Option(
            "--device-memory",
            help="Memory of the GPU, such as 24GiB. Default: that of the machine.",
        ),
    ] = None,
    ssds: Ssds = None,
    gpus: Gpus = None,
    examples: Annotated[
        int | None, typer.Option("--examples", min=1, help="Number of examples in an epoch.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="Data file whose examples are counted for an epoch."),
    ] = None,
    minimise: Minimise = "time",
    max_model: MaxModel = False,
    max_batch: MaxBatch = False,
    schedule: ShowSchedule = False,
    classes: ShowClasses = False,
    as_json: Json = False,
) -> None:
    """Say whether a run fits, how fast it is and what limits it.

    With --machine, or for a preset, the plan is computed from shapes alone. For a model folder
    on this machine, the blocks of the model are traced, as in a run. No weights are read.
    """
    # A plan needs neither data nor a run folder.
    overrides |= {"model": model, "data": ".", "out": ".", "budget.gpus": gpus}
    settings = load_config(config, overrides=overrides)
    if overrides["train.epochs"] is not None or examples is not None or data is not None:
        count = _steps_of_epochs(settings, examples, data)
        settings = replace(settings, train=replace(settings.train, steps=count))
    named = model if model is not None else str(settings.model)
    if minimise not in MINIMISE:
        raise ConfigError(f"--minimise: {minimise!r}; choose {', '.join(MINIMISE)}")
    if machine is None and Path(named).is_dir():
        if ssds is not None or device_memory or max_model or max_batch:
            raise ConfigError(
                "--ssds, --device-memory, --max-model and --max-batch are for other machines; "
                "add --machine"
            )
        _plan_traced(settings, minimise, schedule=schedule, classes=classes, as_json=as_json)
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
    request = request_of(shape, profile, settings, minimise)
    if max_model and max_batch:
        raise ConfigError("--max-model and --max-batch: one at a time; leave one of them out")
    if max_model or max_batch:
        _search(request, named, model_too=max_model, as_json=as_json)
    else:
        _plan_from_shapes(
            request,
            steps=settings.train.steps,
            schedule=schedule,
            classes=classes,
            as_json=as_json,
        )


def _steps_of_epochs(settings: Config, examples: int | None, data: Path | None) -> int:
    """Return the number of steps for --epochs over --examples, or over the rows of --data."""
    from lohan.data.cache import check_source
    from lohan.data.dataset import steps_for
    from lohan.data.reading import count_rows

    if settings.train.steps is not None:
        raise ConfigError("--steps: --epochs, --examples and --data say how many; leave one out")
    if (examples is None) == (data is None):
        raise ConfigError("--epochs: give --examples N or --data FILE, one of them, or --steps")
    if data is not None:
        check_source(data, "--data")
        examples = count_rows(data)
    assert examples is not None
    return steps_for(examples, settings.train.epochs, settings.train.batch)


def _plan_traced(
    settings: Config, minimise: str, *, schedule: bool, classes: bool, as_json: bool
) -> None:
    from lohan.util.libraries import set_up_libraries

    set_up_libraries()
    from lohan.engine.profile import latest_profile
    from lohan.tools.plan_run import plan_traced

    profile = latest_profile()
    check_prices(profile, minimise)
    planned = plan_traced(settings, profile, minimise=minimise)
    _show(planned, settings.train.steps, schedule=schedule, classes=classes, as_json=as_json)


def _show(
    planned: MachinePlan, steps: int | None, *, schedule: bool, classes: bool, as_json: bool
) -> None:
    if as_json:
        echo(json.dumps(to_json(planned, steps=steps, schedule=schedule), indent=1))
    else:
        echo("\n".join(describe(planned, steps=steps, schedule=schedule, classes=classes)))


def _plan_from_shapes(
    request: PlanRequest, *, steps: int | None, schedule: bool, classes: bool, as_json: bool
) -> None:
    from lohan.planner.machine_plan import plan_for_machine, with_alternatives

    gc.disable()  # planning creates many objects, and nearly all of them are kept to the end
    try:
        planned = with_alternatives(plan_for_machine(request))
    except BudgetError as refused:
        if not as_json:
            raise
        echo(json.dumps(refusal_json(request, str(refused)), indent=1))
        return
    finally:
        gc.enable()
    _show(planned, steps, schedule=schedule, classes=classes, as_json=as_json)


def _search(request: PlanRequest, named: str, *, model_too: bool, as_json: bool) -> None:
    from lohan.planner import presets
    from lohan.planner.machine_plan import largest_batch, largest_model

    result: dict[str, Any] = {}
    if model_too:
        family = named.split("-")[0]
        names = [n for n in presets.model_names() if n.split("-")[0] == family]
        lora, base = request.model.lora, request.model.base
        models = [replace(presets.model(n), lora=lora, base=base) for n in names]
        best = largest_model(request, models or [request.model])
        result = {"largest_model": best.name if best else None, "batch": request.batch}
    else:
        result = {"model": request.model.name, "largest_batch": largest_batch(request)}
    if as_json:
        echo(json.dumps({"machine": request.machine.name, **result}, indent=1))
    else:
        what, value = next((k, v) for k, v in result.items() if k.startswith("largest"))
        with_what = f"batch {request.batch}" if model_too else request.model.name
        seq = request.model.sample_tokens or request.seq
        echo(
            f"{what.replace('_', ' ')} on {request.machine.name}, {with_what}, {seq} tokens "
            f"per example: {value or 'none fits'}"
        )


def register(app: typer.Typer) -> None:
    app.command()(plan)
