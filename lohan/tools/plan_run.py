"""The plan of a run on this machine, and advice on what would make a run faster.

The model is traced as `attach` traces it, but without weights and without training. The advice is
based on the planner's results for slightly better machines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from lohan.config import BASE, Config
from lohan.device.choose import open_device
from lohan.engine.attach import device_overhead, machine_with
from lohan.engine.context import blocks_of, workload_of
from lohan.engine.policies import Budget
from lohan.errors import BudgetError, LohanError
from lohan.model.layout import Blocks, RankInfo
from lohan.model.machine import Profile
from lohan.model.options import PlanOptions, options_of
from lohan.model.plan import Plan
from lohan.model.workload import BatchWorkload
from lohan.planner.forecast import Forecast, Simulator, on_machine
from lohan.planner.machine_plan import (
    MachinePlan,
    MachineProblem,
    faster_drives,
    solve,
    with_alternatives,
    without_lane,
)
from lohan.planner.planner import PlanProblem, make_plan
from lohan.train.inputs import (
    Inputs,
    cached_profile_of,
    check_machine,
    check_room,
    make_base,
    open_inputs,
    task_of,
)
from lohan.train.logs import check_loggers
from lohan.train.run_folder import RunFolder, check_vacant
from lohan.util.display import Display
from lohan.util.trace import LANE_NAMES
from lohan.util.units import GiB, MiB, parse_bytes


def plan_traced(
    config: Config,
    profile: Profile | None = None,
    *,
    minimise: str = "time",
    inputs: Inputs | None = None,
) -> MachinePlan:
    """Return the plan of a run with these settings, its forecast and the alternatives.

    Raise the same BudgetError as the run would. The forecast is for a machine with `profile`;
    without one, there is no forecast. `inputs` gives the shapes of the data.
    """
    return with_alternatives(solve(traced_problem(config, profile, minimise, inputs)))


def traced_problem(
    config: Config, profile: Profile | None, minimise: str, inputs: Inputs | None
) -> MachineProblem:
    """Return the planning problem of a run.

    The model is built on the meta device, and its footprint is measured with fake tensors. Batches
    have the shapes of the data if `inputs` is given. With several ranks, this is the problem of
    each rank, with its share of the batch and of the machine.
    """
    world, whole_batch = config.budget.gpus, config.train.batch
    config = config.of_rank(world)
    train, budget = config.train, config.budget
    device = open_device(budget.device, memory=budget.device_memory, link=budget.link)
    device_bytes = device.memory_bytes() if device.has_own_memory else None
    machine, dtype = machine_with(device, profile), train.dtype or device.default_dtype
    if world > 1 and machine is not None and not machine.has_link:
        machine = None  # Ranks on the CPU use a link that no profile contains.
    task = task_of(config)
    model = task.load(config, dtype=dtype).train()
    batch = inputs.shapes(config) if inputs else task.shapes(config, [], dtype=dtype)
    whole = blocks_of(model, batch, base=train.base or "", dtype=dtype)
    workload, blocks = workload_of(model, whole, batch), RankInfo(world=world).shards(whole)
    options = options_of(config, dtype=dtype, minimise=minimise, world=world)
    host_bytes = Budget(host=budget.host, ssd=()).host_bytes(world)
    overhead = device_overhead(device, model, host_bytes)
    device.close()
    if world > 1 and device_bytes is None:  # Ranks on the CPU compute in their own host memory.
        shared = PlanProblem(
            blocks, options, host_bytes=host_bytes, workload=workload, in_one_memory=True
        )
        device_bytes = make_plan(shared).device_bytes
        assert device_bytes is not None
        host_bytes -= device_bytes
    return MachineProblem(
        model=str(config.model),
        parameters=whole.parameters,
        batch=whole_batch,
        machine=machine,
        options=options,
        host_bytes=host_bytes,
        device_bytes=device_bytes,
        overhead=lambda host_bytes: overhead,
        blocks=blocks,
        workload=workload,
        site_order=partial(site_order, model, blocks, workload),
    )


def site_order(model: nn.Module, blocks: Blocks, workload: BatchWorkload, plan: Plan) -> list[int]:
    """Return the sites in the order of forward: as the footprint visited them, then the head."""
    workload = workload.in_tiles(plan.tiles)
    names = list(workload.measure(plan.micro_batch or workload.batch).sites)
    numbers = {site.name: number for number, site in enumerate(blocks.sites)}
    if workload.head_group is not None:
        head = model.get_output_embeddings()  # type: ignore[operator]
        names += [name for name in numbers if model.get_submodule(name) is head]
    return [numbers[name] for name in names]


def dry_run(config: Config, display: Display) -> tuple[int, MachinePlan]:
    """Return the number of steps and the plan for the given data, for `lohan train --dry-run`.

    Raise the same error as the run would. Tokens are written to a temporary folder, which is
    removed.
    """
    folder = RunFolder(config.out)
    check_vacant(folder, config)
    check_loggers(config.output.log)
    check_machine(config)
    with TemporaryDirectory(prefix="lohan-dry-run-") as work:
        if config.init is not None:
            config = replace(config, out=Path(work), model=Path(work) / BASE)
            make_base(config, config.model)
        inputs = open_inputs(RunFolder(Path(work)), config, display)
        folders = folder.ssd_folders(config)
        seen = replace(config, train=replace(config.train, steps=inputs.total))
        planned = plan_traced(seen, cached_profile_of(folders, seen.budget), inputs=inputs)
    if inputs.prompts is not None:
        check_room(planned.plan, inputs.prompts)
    return inputs.total, planned


# -- What would make a run faster ------------------------------------------------------------------
#
# The rates are those that the run measured. For every change, a plan is made and its steps are
# simulated. The gain is relative to the same simulation of the plan that the run followed.


LEAST_SPEEDUP = 1.02  # smallest speedup worth listing
# Pairs of the smallest budget in bytes that is expressed in a unit, and the unit.
UNITS = ((8 * GiB, "GiB"), (8 * MiB, "MiB"), (0, "KiB"))


@dataclass(frozen=True)
class Change:
    """A change that would make a run `gain` times as fast.

    `bound` marks an upper bound that cannot be reached in practice.
    """

    what: str
    gain: float
    bound: bool = False


@dataclass(frozen=True)
class Case:
    """A recorded run in the form that the planner takes."""

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
        simulator = Simulator(machine, self.blocks, self.workload)
        return simulator.forecast(plan)

    def planned(self, machine: Profile, host_bytes: int) -> Plan:
        problem = PlanProblem(
            self.blocks,
            self.options.fixed_by(self.plan),
            host_bytes=host_bytes,
            workload=self.workload,
            profile=machine,
        )
        return make_plan(problem).plan


def case_of(
    config: Config, shape: Mapping[str, int], plan: Mapping[str, Any], measured: Mapping[str, Any]
) -> Case:
    """Return the case of a recorded run.

    `shape`, `plan` and `measured` come from the journal: the shape of a batch, the last plan and
    the last measured profile. Only the structure of the model is read, not its weights.
    """
    train, followed = config.train, Plan.from_json(plan["plan"])
    task = task_of(config)
    model = task.load(config, dtype=followed.dtype).train()
    seen = replace(config, train=replace(train, batch=shape["batch"], seq=shape["seq"]))
    batch = task.shapes(seen, [], dtype=followed.dtype)
    blocks = blocks_of(model, batch, base=train.base or "", dtype=followed.dtype)
    options = replace(options_of(config, dtype=followed.dtype), kind=followed.kind)
    profile = Profile.from_mapping(measured["profile"], source="journal")
    return Case(
        blocks,
        workload_of(model, blocks, batch),
        followed,
        profile,
        options,
        plan["host_bytes"],
        max(1, len(config.budget.ssd)),
    )


def changes(case: Case) -> list[Change]:
    """Return the changes that would help, best first.

    Replanning for the measured rates is listed as a change of its own. The gains of drives and host
    memory are relative to the better of the current plan and the new one, so they do not include
    the gain of replanning.
    """
    current_s = case.step_s(case.plan, case.machine)
    replanned_s = current_s
    with suppress(BudgetError):
        replanned_s = case.step_s(case.planned(case.machine, case.host_bytes), case.machine)
    options = [Change("a new plan for the measured rates", current_s / replanned_s)]
    best = min(current_s, replanned_s)
    options += [*_drives(case, best), *_host(case, best), *_lanes(case, current_s)]
    return sorted((c for c in options if c.gain >= LEAST_SPEEDUP), key=lambda c: -c.gain)


def _drives(case: Case, current_s: float) -> Iterator[Change]:
    """Yield the gain of one more drive and of twice as many drives.

    The measured rate is that of all drives together, and it is scaled with the number of drives.
    `current_s` is the step time that gains are relative to.
    """
    for more in (1, case.drives):
        count = case.drives + more
        machine = faster_drives(case.machine, count / case.drives)
        with suppress(BudgetError):
            changed_s = case.step_s(case.planned(machine, case.host_bytes), machine)
            name = {1: "a second drive", 2: "a third drive"}.get(count - 1, f"{count} drives")
            yield Change(name, current_s / changed_s)
        if more == case.drives:
            return


def _host(case: Case, current_s: float) -> Iterator[Change]:
    """Yield the gain of 1.5, 2 and 4 times the host budget."""
    for factor in (1.5, 2, 4):
        suffix = next(name for least, name in UNITS if case.host_bytes >= least)
        unit = parse_bytes(f"1{suffix}")
        count = int(case.host_bytes * factor) // unit
        with suppress(BudgetError):
            changed_s = case.step_s(case.planned(case.machine, count * unit), case.machine)
            yield Change(f"--host {count}{suffix}", current_s / changed_s)


def _lanes(case: Case, current_s: float) -> Iterator[Change]:
    """Yield upper bounds: the same plan with one lane so fast that it never binds."""
    forecast = case.forecast(case.plan, case.machine)
    links = ("h2d", "d2h") if case.machine.has_link else ()
    for lane in ("compute", "ssd", "optimizer", *links):
        with suppress(LohanError):
            free = on_machine(forecast, without_lane(case.machine, lane))
            yield Change(LANE_NAMES[lane], current_s / free.step_s, bound=True)
