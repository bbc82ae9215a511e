"""`lohan plan` and `lohan train --dry-run` for a model that is here."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from lohan.cli.plan_text import Costs, activation_lines, lane_lines, optimizer_json, optimizer_rows
from lohan.config import Config
from lohan.device.choose import open_device
from lohan.engine.attach import Budget, blocks_of, machine_with, workload_of
from lohan.errors import BudgetError
from lohan.model.layout import Blocks, Ranks
from lohan.model.machine import Profile
from lohan.model.plan import BatchWorkload, Plan
from lohan.model.state import MODES
from lohan.optim import DEFAULT_KIND
from lohan.planner.forecast import Forecast, forecast
from lohan.planner.planner import PlanOptions, make_plan, plan_in_one_memory
from lohan.schedule.actions import Action, Schedule, ScheduleSpec, to_text
from lohan.schedule.steps import ExecutionOrder, check_order, later_of, spec_of, steady_step
from lohan.train.inputs import Inputs, check_room, known_profile, open_inputs, task_of
from lohan.train.logs import check_loggers
from lohan.train.run_folder import RunFolder, check_vacant
from lohan.util.display import Display
from lohan.util.units import counted, format_bytes, format_seconds

# -- `lohan plan`: what a run would do with its budget, without a store and without weights --------
#
# The model is built on the meta device, its footprint found on fake tensors, the plan made as
# `attach` makes it, and the schedule as the pipeline makes it once the order of the blocks is
# known.


WIDTH = 100


@dataclass(frozen=True)
class LocalPlan:
    """A plan and what is needed to show it; `phases` are the schedules of a steady step."""

    config: Config
    parameters: int
    host_bytes: int
    blocks: Blocks  # of several ranks, each one's pieces
    plan: Plan
    spec: ScheduleSpec
    phases: dict[str, Schedule]
    workload: BatchWorkload
    forecast: Forecast | None  # where the machine was measured
    device_bytes: int | None = None  # of a device with a memory of its own
    usual: Costs | None = None  # of AdamW with fp32 moments, where the optimizer is another


def look_ahead(
    config: Config, profile: Profile | None = None, *, minimise: str = "time",
    inputs: Inputs | None = None,
) -> LocalPlan:  # fmt: skip
    """The plan of a run with these settings, or the BudgetError it would end with; and what it
    will do on a machine of this profile. Batches are as the data has them, if that is known. Of
    several ranks it is the plan of each, with its share of the batch and of the machine."""
    world = config.budget.gpus
    config = config.of_rank(world)
    train, budget = config.train, config.budget
    device = open_device(budget.device, memory=budget.device_memory, link=budget.link)
    device_bytes = device.memory_bytes() if device.has_own_memory else None
    profile, mode = _seen(machine_with(device, profile), world), train.dtype or device.default_dtype
    device.close()
    task = task_of(config)
    model = task.load(config, dtype=mode).train()
    batch = inputs.shapes(config) if inputs else task.shapes(config, [], dtype=mode)
    whole = blocks_of(model, batch)
    asked, blocks = workload_of(model, whole, batch), Ranks(world=world).shards(whole)
    host_bytes = Budget(host=budget.host, ssd=()).host_bytes(world)
    options = PlanOptions(
        mode=mode, micro_batch=train.micro_batch, overlap=train.overlap,
        grad_offload=train.grad_offload, clip=train.clip, durability=budget.durability,
        minimise=minimise, kind=train.kind, world=world,
    )  # fmt: skip
    if world > 1 and device_bytes is None:  # the CPU's ranks compute in their host memory
        _, device_bytes = plan_in_one_memory(blocks, options, host_bytes=host_bytes, workload=asked)
        host_bytes -= device_bytes
    planned = partial(
        make_plan, blocks, host_bytes=host_bytes, workload=asked, profile=profile,
        device_bytes=device_bytes,
    )  # fmt: skip
    plan = planned(options)
    spec = spec_of(blocks, plan, write_pinned=budget.durability == "step")
    sites = site_order(model, blocks, asked, plan)
    order = ExecutionOrder(
        forward=tuple(sites), backward=tuple(sites[::-1]), mode=plan.grad_offload,
        later=later_of(blocks, plan), overlap=plan.overlap,
    )  # fmt: skip
    check_order(spec, order)
    durable = budget.durability == "step"

    def foreseen(plan: Plan) -> Forecast | None:
        if profile is None:
            return None
        return forecast(profile, blocks, asked, plan, write_pinned=durable)

    phases, made = steady_step(spec, order), foreseen(plan)
    return LocalPlan(
        config, whole.parameters, host_bytes, blocks, plan, spec, phases, asked, made,
        device_bytes,
        _usual(options, planned, foreseen),
    )  # fmt: skip


def _seen(profile: Profile | None, world: int) -> Profile | None:
    """The machine as a rank sees it. Those on the CPU have a link that no profile knows."""
    if profile is None or (world > 1 and not profile.has_link):
        return None
    return profile.share(world)


def _usual(
    options: PlanOptions,
    planned: Callable[[PlanOptions], Plan],
    foreseen: Callable[[Plan], Forecast | None],
) -> Costs | None:
    """Of the same run with the usual optimizer, if this is another and that one fits."""
    if options.kind == DEFAULT_KIND:
        return None
    try:
        plan = planned(replace(options, kind=DEFAULT_KIND))
    except BudgetError:
        return None
    made = foreseen(plan)
    if made is None:
        return Costs(plan.tier_bytes("ssd"))
    return Costs(plan.tier_bytes("ssd"), made.step_s, made.written_bytes)


# -- the schedule ---------------------------------------------------------------------------------


def site_order(model: nn.Module, blocks: Blocks, asked: BatchWorkload, plan: Plan) -> list[int]:
    """Sites as forward calls them: as the footprint met them, then the head."""
    names = list(asked.measure(plan.micro_batch or asked.batch).sites)
    numbers = {site.name: number for number, site in enumerate(blocks.sites)}
    if asked.head_group is not None:
        head = model.get_output_embeddings()  # type: ignore[operator]
        names += [name for name in numbers if model.get_submodule(name) is head]
    return [numbers[name] for name in names]


# -- for people -----------------------------------------------------------------------------------


def inventory_lines(outlook: LocalPlan) -> list[str]:
    """What a block could keep, found by tracing it."""
    return activation_lines(outlook.workload, outlook.plan)


def describe(outlook: LocalPlan, *, schedule: bool) -> list[str]:
    config, blocks = outlook.config, outlook.blocks
    lines = [
        f"{config.model}: {outlook.parameters:,} parameters in {len(blocks.groups)} groups, "
        f"{outlook.plan.mode}; batch {config.train.batch}, seq {outlook.workload.seq}",
        *([f"of each of {world} ranks"] if (world := outlook.plan.world) > 1 else []),
        "",
        *outlook.plan.describe(host_bytes=outlook.host_bytes, device_bytes=outlook.device_bytes),
        "",
        *(f"{name:16} {text}" for name, text in choices(outlook).items()),
        *_speed(outlook.forecast, config.train.steps),
    ]
    return lines + describe_schedule(outlook) if schedule else lines


def _speed(made: Forecast | None, steps: int | None) -> list[str]:
    if made is None:
        return ["", "how fast: not known; `lohan profile` measures this machine"]
    lines = ["", f"{'step':16} {format_seconds(made.step_s)}, {made.tokens_per_s:,.0f} tokens/s"]
    if steps is not None:
        lines.append(f"{counted(steps, 'step'):16} {format_seconds(steps * made.step_s)}")
    return [*lines, "", *lane_lines(made)]


def choices(outlook: LocalPlan) -> dict[str, str]:
    """What the planner decided, by name."""
    plan, batch = outlook.plan, outlook.config.train.batch
    ahead = f"{counted(plan.window, 'block')} read ahead"
    return {
        **optimizer_rows(plan, outlook.usual),
        "micro-batch": f"{plan.micro_batch or batch} of {counted(batch, 'example')}",
        "chunk": f"{plan.chunk_params:,} parameters",
        "head slice": counted(plan.head_tokens, "token"),
        "weight slots": f"{plan.weight_slots}, {ahead}",
        "state ring": counted(plan.ring, "buffer"),
        "overlap": "on" if plan.overlap else "off: one action after the other",
        "updates": _updates(outlook),
        "held gradients": _held(outlook),
        "pinned weights": _pinned_weights(outlook),
        "pinned state": f"{len(plan.pinned_state)} of {sum(outlook.spec.chunks)} chunks",
    }


def _updates(outlook: LocalPlan) -> str:
    plan, total = outlook.plan, len(outlook.blocks.trained)
    if plan.grad_offload == "serial" or (plan.holds_all and not plan.overlap):
        return f"{plan.grad_offload}: all {total} groups after backward"
    if plan.holds_all:
        why = f"clipping at norm {plan.clip:g}" if plan.clip else "loss scaling"
        return f"{plan.grad_offload}: all {total} groups in the next forward ({why})"
    return f"{plan.grad_offload}: {len(plan.deferred)} of {total} groups in the next forward"


def _held(outlook: LocalPlan) -> str:
    plan, total = outlook.plan, len(outlook.blocks.trained)
    held = total if plan.holds_all else len(plan.deferred)
    here = counted(held - len(plan.spilled), "group")
    return f"{here} in host memory, {len(plan.spilled)} on SSD"


def _pinned_weights(outlook: LocalPlan) -> str:
    groups = [group for group in outlook.blocks.groups if not group.resident]
    width = MODES[outlook.plan.mode].weight_bytes
    pinned = sum(g.numel for g in groups if g.key in outlook.plan.pinned_weights) * width
    whole = sum(group.numel for group in groups) * width
    count = len(outlook.plan.pinned_weights)
    return f"{count} of {len(groups)} groups, {format_bytes(pinned)} of {format_bytes(whole)}"


def describe_schedule(outlook: LocalPlan) -> list[str]:
    """Tokens in their order; a new line with every action of the compute lane."""
    lines = ["", "group  chunks  key"]
    lines += [
        f"{number:5}  {outlook.spec.chunks[number]:6}  {group.key}"
        for number, group in enumerate(outlook.blocks.groups)
    ]
    lines += ["", "site  groups  module"]
    lines += [
        f"{number:4}  {','.join(map(str, outlook.spec.sites[number])):6}  {site.name}"
        for number, site in enumerate(outlook.blocks.sites)
    ]
    for name, phase in outlook.phases.items():
        lines += ["", f"{name}, {len(phase)} actions"]
        for row in _rows(phase):
            text = " ".join(action.token() for action in row)
            lines += textwrap.wrap(
                text, WIDTH, initial_indent="  ", subsequent_indent="    ",
                break_long_words=False, break_on_hyphens=False,
            )  # fmt: skip
    return lines


def _rows(phase: Schedule) -> list[list[Action]]:
    rows: list[list[Action]] = [[]]
    for action in phase:
        if action.lane == "gpu":
            rows.append([])
        rows[-1].append(action)
    return [row for row in rows if row]


# -- for programs ---------------------------------------------------------------------------------


def to_json(outlook: LocalPlan, *, schedule: bool) -> dict[str, Any]:
    made: dict[str, Any] = {
        "model": str(outlook.config.model),
        "parameters": outlook.parameters,
        "batch": outlook.config.train.batch,
        "seq": outlook.workload.seq,
        "host_budget_bytes": outlook.host_bytes,
        **optimizer_json(outlook.plan, outlook.usual),
        "plan": outlook.plan.to_json(),
    }
    if outlook.forecast is not None:
        made |= {
            "step_s": outlook.forecast.step_s, "tokens_per_s": outlook.forecast.tokens_per_s,
            "lane_busy_s": outlook.forecast.busy_s, "binding_lane": outlook.forecast.binding,
        }  # fmt: skip
    if schedule:
        spec = {
            name: sorted(value) if isinstance(value, frozenset) else value
            for name, value in asdict(outlook.spec).items()
        }
        made["schedule"] = {
            "groups": [group.key for group in outlook.blocks.groups],
            "sites": [site.name for site in outlook.blocks.sites],
            "spec": spec,
            "phases": {name: to_text(phase) for name, phase in outlook.phases.items()},
        }
    return made


# -- `lohan train --dry-run` -----------------------------------------------------------------------
#
# What the run would begin with, or the message it would end with.


def plan_lines(config: Config, display: Display) -> list[str]:
    """The plan for the data that is there. Tokens go to a temporary folder, which is removed."""
    folder = RunFolder(config.out)
    check_vacant(folder, config)
    check_loggers(config.output.log)
    with TemporaryDirectory(prefix="lohan-dry-run-") as place:
        inputs = open_inputs(RunFolder(Path(place)), config, display)
        places = folder.places(config)
        seen = replace(config, train=replace(config.train, steps=inputs.total))
        outlook = look_ahead(seen, known_profile(places, seen.budget), inputs=inputs)
    if inputs.prompts is not None:
        check_room(outlook.plan, inputs.prompts)
    return [counted(inputs.total, "step"), *describe(outlook, schedule=False)]
