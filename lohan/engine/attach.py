"""The calls `load` and `attach`, which prepare a model for an ordinary training loop.

    model = lohan.load("path/to/hf-folder")
    with lohan.attach(model, optimizer=lohan.AdamW(lr=1e-5),
                      budget=lohan.Budget(host="8GiB", ssd=["/nvme0"])) as session:
        for batch in batches:
            loss = model(**batch).loss
            loss.backward()            # the optimizer step; its end overlaps with the next forward
        session.export("tuned")

The remaining functions of this module open or create the store, and create the executor.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lohan.capture.blocks import check_trainable, cut_for, dtype_of
from lohan.capture.casting import cast_inputs
from lohan.checkpoint.adapters import add_lora, base_of, check_adapters, open_adapter, unify_dtype
from lohan.checkpoint.hf_folder import (
    build_diffusers,
    build_model,
    find_diffusers_folder,
    without_cache,
)
from lohan.checkpoint.packed import pack_base
from lohan.checkpoint.safetensors import ReadFlat
from lohan.checkpoint.store_io import check_same, create_store, groups_that_lose_bits, to_meta
from lohan.checkpoint.train_state import restore_buffers, restore_rng
from lohan.device.base import Device, LinkedCpuDevice
from lohan.device.choose import backend_of, open_device
from lohan.device.determinism import deterministic_algorithms, fix_cublas_workspace
from lohan.device.emulated import EmulatedDevice
from lohan.device.ranks import ALONE, ProcessGroup
from lohan.engine.context import (
    PlanContext,
    _dtype_name,
    _shapes,
    is_tested,
    save_plans,
    workload_of,
)
from lohan.engine.executor import Executor
from lohan.engine.head import SlicedHead, find_decoder
from lohan.engine.logged import fold_log
from lohan.engine.plan_execution import ExecutorAndHead
from lohan.engine.policies import Budget, ModelPolicy, OffloadPolicy, StorePolicy, with_keywords
from lohan.engine.session import Session
from lohan.engine.stored_weights import given_dtype, taking_over, weights_source
from lohan.engine.wrapping import FirstCalls
from lohan.errors import ConfigError, ModelError, StoreError
from lohan.model.layout import Blocks
from lohan.model.machine import Profile
from lohan.model.options import PlanOptions, with_log
from lohan.model.plan import Plan
from lohan.model.state import STATE_FORMATS, stored_model
from lohan.optim import Lora, Optimizer
from lohan.param_groups import HyperParameters, assign, choose, parse_groups
from lohan.planner.given import GivenPlan, accept_plan, read_plan
from lohan.planner.planner import PlanProblem, make_plan
from lohan.store.files import StoreLock, free_bytes
from lohan.store.io_engine import IOEngine
from lohan.store.recovery import CommitState, apply_recovery, commit_state_of, recovery_actions
from lohan.store.store import Store
from lohan.util.libraries import offline
from lohan.util.settings import tile_tokens
from lohan.util.trace import Trace
from lohan.util.units import parse_interval

# -- Agreement of the ranks before the first step --------------------------------------------------
#
# Ranks agree on the device, on one plan, and on the step of their stores. A single process agrees
# with itself.


def rank_device(device: Device, process_group: ProcessGroup) -> Device:
    """Return the device on which a rank computes and gathers blocks, and open collectives on it.

    If several ranks compute on the CPU, this is a device with its own memory, to which the shards
    of all ranks are gathered. A GPU that shares the host's memory is refused with several ranks.
    """
    if process_group.several and not device.has_own_memory:
        if not device.computes_on_cores:
            raise ConfigError(
                f"device {device.name} goes with one rank, this run has {process_group.world}; "
                "start one"
            )
        device = LinkedCpuDevice()
    process_group.open_net(device.torch_device)
    return device


def agreed_plan(context: PlanContext, given_plan: Plan | None) -> tuple[Plan, PlanContext]:
    """Return the plan that all ranks follow, and the context with the memory that it assumes.

    The first rank makes the plan, or accepts the given one, for the smallest memory of any rank.
    """
    group, device, workload = context.process_group, context.device, context.workload
    room = device.memory_bytes() if device.has_own_memory else None
    host, device_bytes = group.least(context.host_bytes, room)
    in_one_memory = group.several and isinstance(device, LinkedCpuDevice)
    problem = PlanProblem(
        context.shards,
        replace(context.options, world=group.world),
        host_bytes=host,
        workload=workload,
        profile=None if in_one_memory else context.profile,
        device_bytes=device_bytes,
        in_one_memory=in_one_memory,
        log_room=context.log_room,
    )

    def make() -> list[Any]:
        planned = make_plan(problem) if given_plan is None else accept_plan(given_plan, problem)
        compute_bytes = (planned.device_bytes or 0) if in_one_memory else 0
        return [planned.plan.to_json(), host - compute_bytes, planned.device_bytes]

    plan_json, host, device_bytes = group.broadcast_made(make)
    if isinstance(device, LinkedCpuDevice) and in_one_memory:
        device.memory = device_bytes
    return Plan.from_json(plan_json), replace(context, host_bytes=host, device_bytes=device_bytes)


def open_store(
    process_group: ProcessGroup, dirs: Sequence[Path], *, engine: str | IOEngine
) -> Store:
    """Open the store of this rank at the commit that all ranks agree on."""
    if not process_group.several:
        alone = Store.open(dirs, engine=engine, replays=True)
        try:
            fold_log(alone)  # Apply the logged steps of a run that was killed.
        except BaseException:
            alone.close()
            raise
        return alone
    with process_group.all_or_none():
        own_state, primary = CommitState(None, None), Path(dirs[0])
        if primary.is_dir():
            with StoreLock([primary]):  # A rank of the previous run may still be shutting down.
                own_state = commit_state_of(primary)
    gathered = process_group.all_gather_object([own_state.committed, own_state.prepared])
    states = [CommitState(*state) for state in gathered]
    moves = recovery_actions(states)
    if moves is None:
        raise StoreError(
            f"the stores of the {process_group.world} ranks were never committed; start the run "
            "again with the same `lohan train` command"
        )
    store: Store | None = None
    try:
        with process_group.all_or_none():
            apply_recovery(Path(dirs[0]), moves[process_group.rank])
            store = Store.open(dirs, engine=engine, barrier=process_group.barrier, replays=True)
            fold_log(store)
    except BaseException:
        if store is not None:
            store.close()
        raise
    return store


# -- Attach ---------------------------------------------------------------------------------------


_OFFLOAD, _MODEL, _STORE = OffloadPolicy(), ModelPolicy(), StorePolicy()


def load(
    folder: str | os.PathLike[str],
    *,
    dtype: str = "fp32",
    lora: Lora | int | None = None,
    adapter: str | os.PathLike[str] | None = None,
) -> nn.Module:
    """Return the model, with its loss, that the config.json of a Hugging Face folder names.

    Structure and buffers are created now, and weights are read at `attach`. For a diffusers folder
    or pipeline, the result is the transformer. `lora` is the rank of an adapter, or its settings.
    With it, the result is a PEFT model in which only the adapter is trained. `adapter` is a PEFT
    folder with a trained adapter, whose training is continued. Nothing is fetched from a network.
    """
    if dtype not in STATE_FORMATS:
        raise ModelError(f"dtype is {dtype!r}; it must be one of {', '.join(STATE_FORMATS)}")
    pipeline, torch_dtype = find_diffusers_folder(folder), dtype_of(STATE_FORMATS[dtype])
    with offline():
        model: nn.Module = (
            build_model(folder, dtype=torch_dtype)
            if pipeline is None
            else build_diffusers(pipeline, dtype=torch_dtype)
        )
        if adapter is not None:
            return open_adapter(model, adapter)
        if lora is None:
            return model
        return add_lora(model, Lora(rank=lora) if isinstance(lora, int) else lora)


@taking_over
def attach(
    model: nn.Module,
    *,
    optimizer: Optimizer,
    budget: Budget,
    param_groups: Sequence[Mapping[str, Any]] | HyperParameters = (),
    batch: Any = None,
    clip: float = 0.0,
    device: str | Device = "cpu",
    offload_policy: OffloadPolicy = _OFFLOAD,
    model_policy: ModelPolicy = _MODEL,
    store_policy: StorePolicy = _STORE,
    process_group: ProcessGroup = ALONE,
    plan: GivenPlan | None = None,
    trace: bool = False,
    **fields: Any,
) -> Session:
    """Move the model's parameters into a store on `budget.ssd` and run its blocks from there.

    Args:
        model: The model to train. If it is attached already, its current weights are used, and its
            earlier session ends.
        optimizer: The update rule and its hyper-parameters.
        budget: The limits of memory, and the directories of the store.
        param_groups: Groups as in torch.optim, `{"params": ..., "lr": ...}`. A value of a group
            replaces the optimizer's value for the parameters of the group, which may be given by
            patterns of names.
        batch: An example of the model's input, or its shapes on the meta device: a tensor, a tuple
            of arguments, or a dict of arguments by name. With it, the plan includes activations,
            and an error is raised before the first step if no plan fits.
        clip: The limit of the global gradient norm; 0 disables clipping.
        device: Where blocks compute: "cpu", "accelerator" (torch's), "auto" (the accelerator if
            there is one), "emulated", or a device from `lohan.device.choose.open_device`, which is
            closed with the session.
        offload_policy: What leaves memory, and what overlaps with compute.
        model_policy: How the model is divided into blocks, and how it computes.
        store_policy: The folder of the store, and whether to open an existing one.
        process_group: The ranks that share the state, from `lohan.device.ranks.join` in a process
            that torchrun started. Every rank calls `attach` with the same arguments except for its
            own rows of the batch, and has its own folder.
        plan: A plan to follow instead of the planner's: an object such as `session.plan`, its JSON,
            or a file written by `lohan plan --json`. An error is raised if it does not fit the
            model and the budget.
        trace: Whether to record the actions of all lanes of the whole run.
        **fields: Fields of the three policies: `attach(model, ..., overlap=False)`.

    `backward` returns before its step is durable; `Session.commit` makes it durable.
    """
    offload_policy, model_policy, store_policy = with_keywords(
        offload_policy, model_policy, store_policy, fields
    )
    parse_interval(budget.commit_every, name="commit_every")
    given_plan = None if plan is None else read_plan(plan)
    make_groups = _groups_maker(model, optimizer, param_groups)
    batch = None if batch is None else arguments_by_name(model, batch)
    source, dtype, blocks, wider = _prepared(
        model, batch, model_policy, new=not store_policy.resume
    )
    groups = make_groups(blocks)
    with ExitStack() as undo:  # Closes what was opened if a later part fails.
        if isinstance(device, str):
            if model_policy.deterministic and device != "cpu":
                fix_cublas_workspace()
            device = open_device(device, memory=budget.device_bytes())
            undo.callback(device.close)
        settings = undo.enter_context(ExitStack())
        if model_policy.deterministic:
            if device.torch_device.type == "cuda":
                fix_cublas_workspace()
            settings.enter_context(deterministic_algorithms(device.torch_device))
        device = rank_device(device, process_group)
        host_bytes = budget.host_bytes(process_group.local_size)
        options = _options(dtype, offload_policy, budget, optimizer, clip)
        context = PlanContext(
            blocks,
            replace(options, device_overhead=device_overhead(device, model, host_bytes)),
            None if batch is None else workload_of(model, blocks, batch, device.torch_device),
            host_bytes,
            machine_with(device, offload_policy.profile),
            device,
            process_group=process_group,
            backend=backend_of(model_policy.compile, device),
            check=not is_tested(model) if model_policy.check is None else model_policy.check,
            settings=settings,
            plan_is_given=given_plan is not None,
        )
        if store_policy.resume:
            store, followed, context = _plan_opened_store(
                model, context, given_plan, optimizer, budget, store_policy, undo
            )
        else:
            assert source is not None
            store, followed, context = _plan_new_store(
                source, wider, context, given_plan, budget, store_policy, undo
            )
            del source  # This also frees weights in memory.
        executor_for = partial(make_executor, model, context, store, groups, Trace(keep=trace))
        to_meta(model)
        session = Session(model, context, executor_for, followed)
        undo.pop_all()
    return session


def _groups_maker(
    model: nn.Module,
    optimizer: Optimizer,
    param_groups: Sequence[Mapping[str, Any]] | HyperParameters,
) -> Callable[[Blocks], HyperParameters]:
    """Return a function that creates the parameter groups when the model has been divided.

    The parameters of the groups are looked up by identity when this function is called, because
    preparing the model may replace them.
    """
    if hasattr(param_groups, "to_json"):
        live: HyperParameters = param_groups  # type: ignore[assignment]
        return lambda blocks: live
    entries = parse_groups(param_groups, optimizer, "param_groups[{}]".format)
    chosen = choose(entries, model)

    def make(blocks: Blocks) -> HyperParameters:
        tensors = (tensor for group in blocks.trained for tensor in group.tensors)
        return assign(optimizer, entries, chosen, [(t.name, t.decay) for t in tensors])

    return make


def arguments_by_name(model: nn.Module, batch: Any) -> Mapping[str, Any]:
    """Return `batch` as the arguments, by name, of a call of the model."""
    if isinstance(batch, Mapping):
        return batch
    if not isinstance(batch, torch.Tensor | tuple | list):
        raise ConfigError(
            f"batch is a {type(batch).__name__}; give what the model is called with: a tensor, a "
            "tuple of arguments, or a dict of arguments by name"
        )
    arguments = (batch,) if isinstance(batch, torch.Tensor) else tuple(batch)
    forward = type(base_of(model)).forward
    names = [
        name
        for name, parameter in list(inspect.signature(forward).parameters.items())[1:]
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    if len(arguments) > len(names):
        raise ConfigError(
            f"batch has {len(arguments)} arguments, and {type(base_of(model)).__name__}.forward "
            f"takes {len(names)} by name ({', '.join(names) or 'none'}); give a dict of arguments "
            "by name, or leave batch out"
        )
    return dict(zip(names, arguments, strict=False))


def _options(
    dtype: str,
    offload: OffloadPolicy,
    budget: Budget,
    optimizer: Optimizer,
    clip: float,
) -> PlanOptions:
    options = PlanOptions(
        dtype=dtype,
        micro_batch=offload.micro_batch,
        overlap=offload.overlap,
        clip=clip,
        tiles=tile_tokens(offload.tiles, "tiles", Path()),
        update_mode=offload.update_mode,
        activations=offload.activations,
        kind=optimizer.kind,
        can_rerun=offload.run_again,
        commit=parse_interval(budget.commit_every, name="commit_every"),
    )
    return with_log(options, budget.log_gradients, commit_every=budget.commit_every)


def _plan_new_store(
    source: ReadFlat,
    wider: Collection[str],
    context: PlanContext,
    given_plan: Plan | None,
    budget: Budget,
    store_policy: StorePolicy,
    undo: ExitStack,
) -> tuple[Store, Plan, PlanContext]:
    """Make the plan that all ranks follow, and create a store with the weights of `source`.

    For frozen parameters that were given in a `wider` type, the store also keeps what rounding
    removes.
    """
    dirs = _store_dirs(context, budget, store_policy)
    context = replace(context, log_room=free_bytes(dirs))
    plan, context = agreed_plan(context, given_plan)
    groups = context.blocks.groups
    exact = context.process_group.broadcast_made(
        lambda: groups_that_lose_bits(source, groups, wider, plan.dtype)
    )
    created = create_store(
        source,
        context.blocks,
        plan,
        dirs=dirs,
        engine=store_policy.engine,
        meta=store_policy.meta or {},
        progress=store_policy.progress,
        process_group=context.process_group,
        exact=exact,
    )
    return undo.enter_context(created), plan, context


def _plan_opened_store(
    model: nn.Module,
    context: PlanContext,
    given_plan: Plan | None,
    optimizer: Optimizer,
    budget: Budget,
    store_policy: StorePolicy,
    undo: ExitStack,
) -> tuple[Store, Plan, PlanContext]:
    """Open the store of an earlier run, and make a plan that fits it.

    The random state and the buffers of that run are restored.
    """
    dirs = _store_dirs(context, budget, store_policy)
    opened = open_store(context.process_group, dirs, engine=store_policy.engine)
    store = undo.enter_context(opened)
    if store.durability != "step":
        raise StoreError(
            f"{dirs[0]} is a snapshot, with one copy of the state that a step would overwrite; "
            'copy it to a new store with lohan.store.admin.restore(..., durability="step")'
        )
    held = stored_model(store.meta, store.layout.regions)
    check_same(store, context.blocks, context.options.dtype, optimizer.kind)
    options = replace(
        context.options,
        chunk_params=held.chunk_params,
        gradients_on_ssd=any(region.scratch for region in store.layout.regions),
    )
    room = free_bytes(dirs) + sum(file.stat().st_size for path in dirs for file in path.iterdir())
    plan, context = agreed_plan(replace(context, options=options, log_room=room), given_plan)
    restore_rng(store.meta, context.device)
    restore_buffers(model, store.meta)
    return store, plan, context


def _store_dirs(context: PlanContext, budget: Budget, store_policy: StorePolicy) -> list[Path]:
    name = context.process_group.ranks.store_name(store_policy.store_name)
    return [Path(folder) / name for folder in budget.ssd]


def _prepared(
    model: nn.Module, batch: Mapping[str, Any] | None, model_policy: ModelPolicy, *, new: bool
) -> tuple[ReadFlat | None, str, Blocks, set[str]]:
    """Check the model, convert it to one compute type and divide it into blocks.

    Return the source of the weights of a `new` store, the dtype, the blocks, and the names of
    the frozen parameters that were given in a wider type.
    """
    check_trainable(model)
    check_adapters(model)
    without_cache(model)
    # Read the types before adapters are converted to the type of their base.
    source = weights_source(model) if new else None
    given_dtypes = {name: given_dtype(p) for name, p in _frozen(model)}
    named = model_policy.dtype
    unify_dtype(model, None if named is None else dtype_of(STATE_FORMATS[named]))
    if named is not None:
        cast_inputs(model)
    dtype = _dtype_name(model)
    wider = {
        name for name, p in _frozen(model) if p.dtype not in (given_dtypes[name], torch.float32)
    }
    shapes = None if batch is None else _shapes(model, batch)
    blocks = cut_for(
        model,
        shapes,
        blocks=model_policy.blocks,
        resident=model_policy.resident,
        decay=model_policy.decay,
    )
    if model_policy.base:
        blocks = pack_base(model, blocks, model_policy.base, STATE_FORMATS[dtype].weight_bytes)
    if dtype == "fp16" and find_decoder(base_of(model)) is None:
        raise ModelError(
            f"{type(model).__name__} in fp16: its loss is its own, so LoHan cannot scale it, and "
            "unscaled fp16 gradients underflow; use bf16 or fp32"
        )
    return source, dtype, blocks, wider


def _frozen(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    named = model.named_parameters(remove_duplicate=False)
    return [(name, p) for name, p in named if not p.requires_grad]


def make_executor(
    model: nn.Module,
    context: PlanContext,
    store: Store,
    groups: HyperParameters,
    trace: Trace,
    plan: Plan,
) -> ExecutorAndHead:
    """Create the executor, which runs the blocks of the model from the store."""
    needs, room = _whole_needs(context, plan)
    base = base_of(model)
    decoder = find_decoder(base)  # This must be done before blocks are wrapped.
    compared = _fit_twice(context, plan) if context.check else None
    executor = Executor(
        model,
        context,
        plan,
        store=store,
        groups=groups,
        trace=trace,
        save_plans=save_plans(context.blocks, plan, context.workload),
    )
    try:
        allocated = executor.pool.ledger()
        for entry in plan.ledger:  # Memory that torch allocates itself counts too.
            if entry.tier == "host" and entry.owner not in allocated:
                executor.pool.reserve(entry.owner, entry.bytes)
        cuts = executor.block_runner.compute.cuts
        cuts.needs, cuts.room = needs, room
        if compared is not None and executor.record.train_state.step == 0:
            executor.block_runner.first_calls = FirstCalls(compared)
        if decoder is None:  # The loss is then the mean over each rank's own rows.
            executor.record.mean_over = context.process_group.world
        return executor, None if decoder is None else SlicedHead(executor, base, decoder)
    except BaseException:
        executor.close()
        raise


def _whole_needs(context: PlanContext, plan: Plan) -> tuple[dict[str, int], int]:
    """Return the bytes that each block needs for all samples at once, and the available bytes.

    The available bytes are those planned for a micro-batch plus the unused part of the budget.
    """
    workload, count = context.workload_for(plan), plan.micro_batch
    if workload is None or context.device.has_own_memory or not count or count >= workload.batch:
        return {}, 0
    unused_bytes = context.host_bytes - sum(e.bytes for e in plan.ledger if e.tier == "host")
    sites = workload.measure(workload.batch).sites
    room = workload.measure(count).peak_bytes + max(0, unused_bytes)
    return {name: site.peak_bytes for name, site in sites.items()}, room


def _fit_twice(context: PlanContext, plan: Plan) -> set[str]:
    """Return the names of the sites that can run once more on a second copy of their weights.

    These are the sites for which free memory can hold the peak of a call and a copy of the weights.
    """
    names = {site.name for site in context.blocks.sites}
    workload = context.workload_for(plan)
    if workload is None:  # The memory that calls need is unknown.
        return names
    tier = "device" if context.device.has_own_memory else "host"
    total = context.device_bytes if tier == "device" else context.host_bytes
    free_bytes = (total or 0) - plan.tier_bytes(tier)
    sizes = STATE_FORMATS[plan.dtype].weight_bytes
    footprints = workload.measure(plan.micro_batch or workload.batch).sites
    groups = context.blocks.by_key
    return {
        site.name
        for site in context.blocks.sites
        if site.name in footprints
        and footprints[site.name].peak_bytes + sum(groups[k].numel * sizes for k in site.groups)
        <= free_bytes
    }


def machine_with(device: Device, profile: Profile | None) -> Profile | None:
    """Return the profile if it was measured with this kind of device, otherwise None.

    For a device with its own memory, the size of that memory replaces the size in the profile, and
    the rates of an emulated link replace the measured ones.
    """
    if profile is None:
        return None
    if not device.has_own_memory:
        same = not profile.has_link and profile.unified != device.computes_on_cores
        return profile if same else None
    rates = device.rates if isinstance(device, EmulatedDevice) else {}
    h2d, d2h = rates.get("h2d") or profile.h2d, rates.get("d2h") or profile.d2h
    if not h2d or not d2h:
        return None
    return replace(profile, device_bytes=device.memory_bytes(), h2d=h2d, d2h=d2h)


def device_overhead(
    device: Device, model: nn.Module, host_bytes: int
) -> tuple[tuple[str, int], ...]:
    """Return the bytes of device memory, by owner, apart from blocks and schedule.

    On a GPU that shares the host's memory, these bytes are part of the host budget.
    """
    lines = device.overhead(host_bytes)
    if device.torch_device.type != "cpu":  # The model's buffers are moved to the device.
        buffers = {id(buffer): buffer for buffer in model.buffers()}.values()
        lines["buffers"] = sum(buffer.numel() * buffer.itemsize for buffer in buffers)
    return tuple((owner, count) for owner, count in lines.items() if count)
