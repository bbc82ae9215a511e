"""`lohan plan`: what a run would do with its budget, without a store and without weights.

The model is built on the meta device, its footprint found on fake tensors, the plan made as
`attach` makes it, and the schedule as the pipeline makes it once the order of the blocks is known.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from lohan import schedule as sched
from lohan.api import Budget, load, load_of
from lohan.blocks import RESIDENT, Blocks, cut
from lohan.config import Config
from lohan.plan import Plan
from lohan.planner import Load, Wishes, make_plan
from lohan.runtime.build import shape_of
from lohan.schedule import Action, Schedule, Shape, empty_table
from lohan.state import MODES
from lohan.units import format_bytes

WIDTH = 100
STEADY_AFTER = 3  # steps: slots and rings have found their rhythm


@dataclass(frozen=True)
class Outlook:
    """A plan and what is needed to show it; `phases` are the schedules of a steady step."""

    config: Config
    host_bytes: int
    blocks: Blocks
    plan: Plan
    shape: Shape
    phases: dict[str, Schedule]


def look_ahead(config: Config) -> Outlook:
    """The plan of a run with these settings, or the BudgetError it would end with."""
    train, budget = config.train, config.budget
    mode = train.dtype or "fp32"
    model = load(config.model, dtype=mode).train()
    blocks = cut(model)
    batch = torch.empty((train.batch, train.seq), dtype=torch.long, device="meta")
    asked = load_of(model, blocks, {"input_ids": batch})
    host_bytes = Budget(host=budget.host, ssd=()).host_bytes()
    wishes = Wishes(
        mode=mode, micro_batch=train.micro_batch, overlap=train.overlap,
        grad_offload=train.grad_offload, clip=train.clip, durability=budget.durability,
    )  # fmt: skip
    plan = make_plan(blocks, wishes, host_bytes=host_bytes, load=asked)
    shape = shape_of(blocks, plan, write_pinned=budget.durability == "step")
    order = site_order(model, blocks, asked, plan)
    return Outlook(config, host_bytes, blocks, plan, shape, steady_step(shape, plan, blocks, order))


# -- the schedule ---------------------------------------------------------------------------------


def site_order(model: nn.Module, blocks: Blocks, asked: Load, plan: Plan) -> list[int]:
    """Sites as forward calls them: as the footprint met them, then the head."""
    names = list(asked.measure(plan.micro_batch or asked.batch).sites)
    numbers = {site.name: number for number, site in enumerate(blocks.sites)}
    if asked.head_group is not None:
        head = model.get_output_embeddings()  # type: ignore[operator]
        names += [name for name in numbers if model.get_submodule(name) is head]
    return [numbers[name] for name in names]


def steady_step(
    shape: Shape, plan: Plan, blocks: Blocks, order: Sequence[int]
) -> dict[str, Schedule]:
    """The phases of a step after the first few, as the pipeline schedules them."""
    keys = [group.key for group in blocks.groups]
    later = [n for n, key in enumerate(keys) if plan.holds_all or key in plan.deferred]
    make = _overlapped if plan.overlap else _plain
    table = empty_table(shape)
    phases: dict[str, Schedule] = {}
    for _ in range(STEADY_AFTER):
        phases, table = make(shape, table, plan, list(order), later)
    return {name: phase for name, phase in phases.items() if phase}


def _overlapped(
    shape: Shape, table: sched.Table, plan: Plan, order: list[int], later: list[int]
) -> tuple[dict[str, Schedule], sched.Table]:
    waits = plan.grad_offload != "serial"  # held updates run beside the next forward
    pending = later if waits else []
    forward, table = sched.forward(shape, table, order, pending=pending, commit=bool(pending))
    backward, table = sched.backward(
        shape, table, order[::-1], mode=plan.grad_offload, later=later, rest=_rest(shape, order)
    )
    after: Schedule = ()
    if not waits:
        after, table = sched.forward(shape, table, (), pending=later, commit=True)
    return {"forward": forward, "backward": backward, "after backward": after}, table


def _plain(
    shape: Shape, table: sched.Table, plan: Plan, order: list[int], later: list[int]
) -> tuple[dict[str, Schedule], sched.Table]:
    """Overlap off: each block is scheduled on demand."""
    forward: list[Action] = []
    backward: list[Action] = []
    for site in order:
        made, table = sched.forward(shape, table, [site])
        forward += made
    for site, finished in zip(order[::-1], sched.last_uses(shape, order[::-1]), strict=True):
        made, table = sched.one_backward(shape, table, site)
        backward += made
        made, table = sched.updates(shape, table, finished, after=f"B{site}", later=later)
        backward += made
    made, table = sched.updates(shape, table, _rest(shape, order), after="E", later=later, end=True)
    backward += made
    after, table = sched.forward(shape, table, (), pending=later, commit=bool(later))
    phases = {"forward": tuple(forward), "backward": tuple(backward), "after backward": after}
    return phases, table


def _rest(shape: Shape, order: Sequence[int]) -> list[int]:
    """Groups that no site of the order uses."""
    used = {group for site in order for group in shape.sites[site]}
    return [group for group in range(len(shape.chunks)) if group not in used]


# -- for people -----------------------------------------------------------------------------------


def describe(outlook: Outlook, *, schedule: bool) -> list[str]:
    config, blocks = outlook.config, outlook.blocks
    lines = [
        f"{config.model}: {blocks.parameters:,} parameters in {len(blocks.groups)} groups, "
        f"{outlook.plan.mode}; batch {config.train.batch}, seq {config.train.seq}",
        "",
        *outlook.plan.describe(host_bytes=outlook.host_bytes),
        "",
        *(f"{name:16} {text}" for name, text in choices(outlook).items()),
    ]
    return lines + describe_schedule(outlook) if schedule else lines


def choices(outlook: Outlook) -> dict[str, str]:
    """What the planner decided, by name."""
    plan, batch = outlook.plan, outlook.config.train.batch
    ahead = f"{plan.window} block{'' if plan.window == 1 else 's'} read ahead"
    return {
        "micro-batch": f"{plan.micro_batch or batch} of {batch} examples",
        "chunk": f"{plan.chunk_params:,} parameters",
        "head slice": f"{plan.head_tokens:,} tokens",
        "weight slots": f"{plan.weight_slots}, {ahead}",
        "state ring": f"{plan.ring} buffers",
        "overlap": "on" if plan.overlap else "off: one action after the other",
        "updates": _updates(outlook),
        "held gradients": _held(outlook),
        "pinned weights": _pinned_weights(outlook),
        "pinned state": f"{len(plan.pinned_state)} of {sum(outlook.shape.chunks)} chunks",
    }


def _updates(outlook: Outlook) -> str:
    plan, total = outlook.plan, len(outlook.blocks.groups)
    if plan.grad_offload == "serial" or (plan.holds_all and not plan.overlap):
        return f"{plan.grad_offload}: all {total} groups after backward"
    if plan.holds_all:
        why = f"clipping at norm {plan.clip:g}" if plan.clip else "loss scaling"
        return f"{plan.grad_offload}: all {total} groups in the next forward ({why})"
    return f"{plan.grad_offload}: {len(plan.deferred)} of {total} groups in the next forward"


def _held(outlook: Outlook) -> str:
    plan, total = outlook.plan, len(outlook.blocks.groups)
    held = total if plan.holds_all else len(plan.deferred)
    return f"{held - len(plan.spilled)} groups in host memory, {len(plan.spilled)} on SSD"


def _pinned_weights(outlook: Outlook) -> str:
    groups = [group for group in outlook.blocks.groups if group.key != RESIDENT]
    width = MODES[outlook.plan.mode].weight_bytes
    pinned = sum(g.numel for g in groups if g.key in outlook.plan.pinned_weights) * width
    whole = sum(group.numel for group in groups) * width
    count = len(outlook.plan.pinned_weights)
    return f"{count} of {len(groups)} groups, {format_bytes(pinned)} of {format_bytes(whole)}"


def describe_schedule(outlook: Outlook) -> list[str]:
    """Tokens in their order; a new line with every action of the compute lane."""
    lines = ["", "group  chunks  key"]
    lines += [
        f"{number:5}  {outlook.shape.chunks[number]:6}  {group.key}"
        for number, group in enumerate(outlook.blocks.groups)
    ]
    lines += ["", "site  groups  module"]
    lines += [
        f"{number:4}  {','.join(map(str, outlook.shape.sites[number])):6}  {site.name}"
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


def to_json(outlook: Outlook, *, schedule: bool) -> dict[str, Any]:
    made: dict[str, Any] = {
        "model": str(outlook.config.model),
        "parameters": outlook.blocks.parameters,
        "batch": outlook.config.train.batch,
        "seq": outlook.config.train.seq,
        "host_budget_bytes": outlook.host_bytes,
        "plan": outlook.plan.to_json(),
    }
    if schedule:
        shape = asdict(outlook.shape)
        made["schedule"] = {
            "groups": [group.key for group in outlook.blocks.groups],
            "sites": [site.name for site in outlook.blocks.sites],
            "shape": {**shape, "spilled": sorted(shape["spilled"])},
            "phases": {name: sched.to_text(phase) for name, phase in outlook.phases.items()},
        }
    return made
