"""`lohan plan` and `lohan train --dry-run` for a model that is here."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import nn

from lohan.cli.plan import describe
from lohan.config import BASE, Config
from lohan.device.choose import open_device
from lohan.engine.attach import Budget, blocks_of, device_overhead, machine_with, workload_of
from lohan.errors import BudgetError
from lohan.model.layout import Blocks, Ranks
from lohan.model.machine import Profile
from lohan.model.plan import BatchWorkload, Plan, activation_policy_of, commit_interval
from lohan.optim import DEFAULT_KIND
from lohan.planner.forecast import Forecast, forecast
from lohan.planner.machine_plan import MachinePlan, forecasts, with_binding_lane
from lohan.planner.planner import PlanOptions, plan_for_budget, plan_in_one_memory
from lohan.planner.wear import Alternative, alternatives
from lohan.schedule.steps import check_order, planned_order, spec_of
from lohan.train.inputs import Inputs, check_room, known_profile, make_base, open_inputs, task_of
from lohan.train.logs import check_loggers
from lohan.train.run_folder import RunFolder, check_vacant
from lohan.util.display import Display
from lohan.util.units import counted


def plan_traced(
    config: Config, profile: Profile | None = None, *, minimise: str = "time",
    inputs: Inputs | None = None,
) -> MachinePlan:  # fmt: skip
    """The plan of a run with these settings, or the BudgetError it would end with; and what it will
    do on a machine of this profile. The model is built on the meta device and its footprint found
    on fake tensors; the plan is made as `attach` makes it, and the schedule as the pipeline does
    once it knows the order of the blocks. Batches are as the data has them, if that is known. Of
    several ranks it is the plan of each, with its share of the batch and of the machine."""
    world, whole_batch = config.budget.gpus, config.train.batch
    config = config.of_rank(world)
    train, budget = config.train, config.budget
    device = open_device(budget.device, memory=budget.device_memory, link=budget.link)
    device_bytes = device.memory_bytes() if device.has_own_memory else None
    machine, mode = machine_with(device, profile), train.dtype or device.default_dtype
    if world > 1 and machine is not None and not machine.has_link:
        machine = None  # ranks on the CPU have a link that no profile knows
    task = task_of(config)
    model = task.load(config, dtype=mode).train()
    batch = inputs.shapes(config) if inputs else task.shapes(config, [], dtype=mode)
    whole = blocks_of(model, batch, base=train.base or "", mode=mode)
    workload, blocks = workload_of(model, whole, batch), Ranks(world=world).shards(whole)
    host_bytes = Budget(host=budget.host, ssd=()).host_bytes(world)
    options = PlanOptions(
        mode=mode, micro_batch=train.micro_batch, tiles=train.tiles, overlap=train.overlap,
        grad_offload=train.grad_offload, activations=activation_policy_of(train.activations),
        clip=train.clip, clip_by=train.clip_by, grad_dtype=train.grad_dtype,
        durability=budget.durability,
        minimise=minimise, kind=train.kind, world=world,
        commit=commit_interval(budget.durability, budget.commit_every),
        run_again=True, device_overhead=device_overhead(device, model, host_bytes),
    )  # fmt: skip
    device.close()
    if world > 1 and device_bytes is None:  # the CPU's ranks compute in their host memory
        _, device_bytes = plan_in_one_memory(
            blocks, options, host_bytes=host_bytes, workload=workload
        )
        host_bytes -= device_bytes
    seen = None if machine is None else machine.share(world)

    def answer(options: PlanOptions) -> MachinePlan:
        plan = plan_for_budget(
            blocks, options, host_bytes=host_bytes, workload=workload, profile=seen,
            device_bytes=device_bytes,
        )  # fmt: skip
        durable, made, clipped = options.durability == "step", None, None
        if seen is not None:
            tokens = whole_batch * workload.seq
            made, clipped = forecasts(seen, blocks, workload, plan, durable=durable, tokens=tokens)
        order = planned_order(
            blocks, plan, site_order(model, blocks, workload, plan), durable=durable
        )
        check_order(spec_of(blocks, plan, durable=durable), order)
        return MachinePlan(
            model=str(config.model), parameters=whole.parameters, batch=whole_batch,
            machine=machine, options=options, host_bytes=host_bytes, device_bytes=device_bytes,
            blocks=blocks, workload=workload, plan=plan, order=order,
            forecast=made, clipped=clipped, traced=True,
        )  # fmt: skip

    made, usual = with_binding_lane(answer(options)), None
    if options.kind != DEFAULT_KIND:
        with suppress(BudgetError):
            usual = answer(replace(options, kind=DEFAULT_KIND))
    instead: tuple[Alternative, ...] = ()
    if seen is not None and made.forecast is not None:

        def planned(options: PlanOptions, host: int) -> Forecast:
            plan = plan_for_budget(
                blocks, options, host_bytes=host // world, workload=workload, profile=seen,
                device_bytes=device_bytes,
            )  # fmt: skip
            durable = options.durability == "step"
            return forecast(seen, blocks, workload, plan, durable=durable)

        instead = tuple(alternatives(made.forecast, options, world * host_bytes, planned))
    return replace(made, usual=usual, instead=instead)


def site_order(model: nn.Module, blocks: Blocks, workload: BatchWorkload, plan: Plan) -> list[int]:
    """Sites as forward calls them: as the footprint met them, then the head."""
    workload = workload.in_tiles(plan.tiles)
    names = list(workload.measure(plan.micro_batch or workload.batch).sites)
    numbers = {site.name: number for number, site in enumerate(blocks.sites)}
    if workload.head_group is not None:
        head = model.get_output_embeddings()  # type: ignore[operator]
        names += [name for name in numbers if model.get_submodule(name) is head]
    return [numbers[name] for name in names]


# -- `lohan train --dry-run` -----------------------------------------------------------------------
#
# What the run would begin with, or the message it would end with.


def plan_lines(config: Config, display: Display) -> list[str]:
    """The plan for the data that is there. Tokens go to a temporary folder, which is removed."""
    folder = RunFolder(config.out)
    check_vacant(folder, config)
    check_loggers(config.output.log)
    with TemporaryDirectory(prefix="lohan-dry-run-") as place:
        if config.init is not None:
            config = replace(config, out=Path(place), model=Path(place) / BASE)
            make_base(config, config.model)
        inputs = open_inputs(RunFolder(Path(place)), config, display)
        places = folder.places(config)
        seen = replace(config, train=replace(config.train, steps=inputs.total))
        made = plan_traced(seen, known_profile(places, seen.budget), inputs=inputs)
    if inputs.prompts is not None:
        check_room(made.plan, inputs.prompts)
    return [counted(inputs.total, "step"), *describe(made, steps=inputs.total)]
