"""What would make a run faster: the planner's answer for machines that are a little better.

The rates are those that the run measured itself. For every change a plan is made and its steps are
simulated; the gain is against the same simulation of the plan that the run followed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from lohan.config import Config
from lohan.engine.attach import blocks_of, workload_of
from lohan.errors import BudgetError, LohanError
from lohan.model.layout import Blocks
from lohan.model.machine import Profile
from lohan.model.plan import BatchWorkload, Plan, commit_interval
from lohan.planner.forecast import Forecast, forecast, on_machine
from lohan.planner.machine_plan import without_lane
from lohan.planner.planner import PlanOptions, plan_for_budget
from lohan.tools.report import Change
from lohan.train.inputs import task_of
from lohan.util.trace import LANE_NAMES
from lohan.util.units import GiB, MiB, parse_bytes

WORTH = 1.02  # times as fast, to be named
UNITS = ((8 * GiB, "GiB"), (8 * MiB, "MiB"), (0, "KiB"))  # of a budget from so many bytes on


@dataclass(frozen=True)
class Case:
    """The run as the planner sees it."""

    blocks: Blocks
    workload: BatchWorkload
    plan: Plan
    machine: Profile
    options: PlanOptions
    host_bytes: int
    drives: int

    def step_s(self, plan: Plan, machine: Profile) -> float:
        return self.forecast(plan, machine).step_s

    def forecast(self, plan: Plan, machine: Profile) -> Forecast:
        durable = self.options.durability == "step"
        return forecast(machine, self.blocks, self.workload, plan, durable=durable)

    def planned(self, machine: Profile, host_bytes: int) -> Plan:
        options = replace(
            self.options, micro_batch=self.plan.micro_batch, tiles=self.plan.tiles or "off",
            head_tokens=self.plan.head_tokens, chunk_params=self.plan.chunk_params,
        )  # fmt: skip
        return plan_for_budget(
            self.blocks, options, host_bytes=host_bytes, workload=self.workload, profile=machine
        )


def case_of(
    config: Config, shape: Mapping[str, int], plan: Mapping[str, Any], measured: Mapping[str, Any]
) -> Case:
    """From the config, and from the journal the shape of a batch, the last plan and the last
    measured profile. Reads the model's structure, not its weights."""
    train, followed = config.train, Plan.from_json(plan["plan"])
    task = task_of(config)
    model = task.load(config, dtype=followed.mode).train()
    seen = replace(config, train=replace(train, batch=shape["batch"], seq=shape["seq"]))
    batch = task.shapes(seen, [], dtype=followed.mode)
    blocks = blocks_of(model, batch, base=train.base or "", mode=followed.mode)
    options = PlanOptions(
        mode=followed.mode, overlap=train.overlap, grad_offload=train.grad_offload,
        clip=train.clip, clip_by=train.clip_by, grad_dtype=train.grad_dtype,
        durability=config.budget.durability,
        kind=followed.kind, run_again=True,
        commit=commit_interval(config.budget.durability, config.budget.commit_every),
    )  # fmt: skip
    profile = Profile.from_mapping(measured["profile"], source="journal")
    return Case(
        blocks, workload_of(model, blocks, batch), followed, profile, options, plan["host_bytes"],
        max(1, len(config.budget.ssd)),
    )  # fmt: skip


def changes(case: Case) -> list[Change]:
    """What helps, best first. A plan for the rates as they are is no merit of another drive: it
    counts by itself, and the rest is against it."""
    now = case.step_s(case.plan, case.machine)
    again = now
    with suppress(BudgetError):
        again = case.step_s(case.planned(case.machine, case.host_bytes), case.machine)
    found = [Change("a new plan for the measured rates", now / again)]
    best = min(now, again)
    found += [*_drives(case, best), *_host(case, best), *_lanes(case, now)]
    return sorted((c for c in found if c.gain >= WORTH), key=lambda c: -c.gain)


def _drives(case: Case, now: float) -> Iterator[Change]:
    """The measured rate is that of all drives together."""
    for more in (1, case.drives):
        count = case.drives + more
        machine = faster_drives(case.machine, count / case.drives)
        with suppress(BudgetError):
            then = case.step_s(case.planned(machine, case.host_bytes), machine)
            name = {1: "a second drive", 2: "a third drive"}.get(count - 1, f"{count} drives")
            yield Change(name, now / then)
        if more == case.drives:
            return


def faster_drives(machine: Profile, factor: float) -> Profile:
    drives = tuple(
        replace(d, read=d.read * factor, write=d.write * factor, mixed=d.mixed * factor)
        for d in machine.drives
    )
    return replace(machine, drives=drives, ssd_limit=machine.ssd_limit * factor)


def _host(case: Case, now: float) -> Iterator[Change]:
    """Half as much again, twice, and four times the host budget."""
    for factor in (1.5, 2, 4):
        suffix = next(name for least, name in UNITS if case.host_bytes >= least)
        unit = parse_bytes(f"1{suffix}")
        count = int(case.host_bytes * factor) // unit
        with suppress(BudgetError):
            then = case.step_s(case.planned(case.machine, count * unit), case.machine)
            yield Change(f"--host {count}{suffix}", now / then)


def _lanes(case: Case, now: float) -> Iterator[Change]:
    """Bounds: the same plan with one lane out of the way."""
    made = case.forecast(case.plan, case.machine)
    links = ("h2d", "d2h") if case.machine.has_link else ()
    for lane in ("gpu", "ssd", "cpu", *links):
        with suppress(LohanError):
            free = on_machine(made, without_lane(case.machine, lane))
            yield Change(LANE_NAMES[lane], now / free.step_s, bound=True)
