"""Plans that the caller gives: reading them, and checking them against model and budget."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from lohan.errors import BudgetError, ConfigError
from lohan.model.options import LOGGED_MODES, PlanOptions
from lohan.model.plan import Plan
from lohan.model.state import chunks
from lohan.planner.memory import MemoryModel
from lohan.planner.planner import (
    Planned,
    PlanProblem,
    lower_hint,
    over_budget,
)
from lohan.util.files import load_json
from lohan.util.units import EVERY_STEP, Interval, counted, format_bytes

GivenPlan = Plan | Mapping[str, Any] | str | os.PathLike[str]

AGAIN = "make the plan again with `lohan plan --json` or from `session.plan` of such a run"


def read_plan(plan: GivenPlan) -> Plan:
    """Return a plan that is given as a Plan, as parsed JSON or as the path of a JSON file.

    The JSON is that of a plan or the output of `lohan plan --json`.
    """
    if isinstance(plan, Plan):
        return plan
    name = "plan" if isinstance(plan, Mapping) else str(plan)
    try:
        data = plan if isinstance(plan, Mapping) else load_json(Path(plan))
        whole = isinstance(data, Mapping) and "plan" in data
        return Plan.from_json(data["plan"] if whole else data)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{name} is not a plan ({error}); `lohan plan --json` writes one"
        ) from None


def accept_plan(plan: Plan, problem: PlanProblem) -> Planned:
    """Return a plan that the user gives, with its ledger for this run.

    The plan decides what leaves memory and when updates run (`update_mode`, `overlap`). Raise an
    error if options that affect results are not those of the run, or if the plan does not fit into
    the budgets.
    """
    _check_options(plan, problem.options)
    _check_names(plan, problem)
    own_memory = bool(problem.device_bytes) or problem.in_one_memory
    _check_buffers(plan, problem, has_own_memory=own_memory)
    options = problem.options
    workload = None if problem.workload is None else problem.workload.in_tiles(plan.tiles)
    memory = MemoryModel(
        problem.blocks,
        plan.dtype,
        workload,
        plan.micro_batch,
        has_own_memory=own_memory,
        gradients_on_ssd=options.gradients_on_ssd,
        kind=plan.kind,
        world=plan.world,
        device_overhead=options.device_overhead,
    )
    plan = memory.with_ledger(plan)
    host, device = problem.host_bytes, problem.device_bytes or 0
    if problem.in_one_memory:
        device = plan.tier_bytes("device")
        host -= device
        if plan.tier_bytes("host") > host:
            needed = plan.tier_bytes("host") + device
            raise BudgetError(
                f"host budget too small: the given plan needs {format_bytes(needed)} on each rank, "
                f"its share of --host is {format_bytes(problem.host_bytes)}; raise --host to "
                f"{format_bytes(plan.world * needed)}, or leave the plan out"
            )
    hint = f", leave the plan out{lower_hint(workload, options)}"
    for tier, limit in (("device", device), ("host", host)):
        if plan.tier_bytes(tier) > limit:
            raise over_budget(plan, tier, limit, what="the given plan", hint=hint)
    return Planned(plan, None, device_bytes=device if own_memory else problem.device_bytes)


def _check_options(plan: Plan, options: PlanOptions) -> None:
    """Raise a ConfigError if the plan's options that affect results differ from the run's.

    If the run leaves an option to the planner, the plan may have any value.
    """
    fixed: dict[str, tuple[object, object]] = {
        "dtype": (plan.dtype, options.dtype),
        "clip": (plan.clip, options.clip),
        "optimizer": (plan.kind, options.kind),
        "number of ranks": (plan.world, options.world),
    }
    if not options.log_choices:
        fixed["log_gradients"] = (plan.log_gradients, options.log_gradients)
    decided: dict[str, tuple[object, object]] = {
        "micro_batch": (plan.micro_batch, options.micro_batch),
        "tiles": (plan.tiles, 0 if options.tiles == "off" else options.tiles),
        "chunk_params": (plan.chunk_params, options.chunk_params),
        "head_tokens": (plan.head_tokens, options.head_tokens),
    }
    if not plan.log_gradients:
        decided["commit_every"] = (plan.commit, options.commit)
    left_open = (None, "auto")
    fixed |= {name: both for name, both in decided.items() if both[1] not in left_open}
    for name, (planned, wanted) in fixed.items():
        if planned != wanted:
            raise ConfigError(
                f"plan: {name} is {_text(planned)}, this run has {_text(wanted)}; change one of "
                f"them, or {AGAIN}"
            )
    if plan.can_rerun and not options.can_rerun:
        raise ConfigError(
            "plan: it is for a loop that runs clipped steps again, and run_again is False; set "
            "run_again=True, or can_rerun=False in the plan"
        )
    if plan.log_gradients and not (plan.overlap and plan.update_mode in LOGGED_MODES):
        raise ConfigError(
            f"plan: it logs gradients, with overlap = {plan.overlap} and update_mode = "
            f"{plan.update_mode!r}; a log needs overlap and {' or '.join(LOGGED_MODES)}, {AGAIN}"
        )
    if plan.log_gradients and plan.commit != Interval(plan.log_gradients, 0.0):
        raise ConfigError(
            f"plan: log_gradients is {plan.log_gradients}, and commit is {_text(plan.commit)}; a "
            f"log is folded every {plan.log_gradients} steps, {AGAIN}"
        )
    held_on_ssd = plan.spilled_gradients and not plan.log_gradients
    if held_on_ssd and options.gradients_on_ssd is False:
        raise ConfigError(
            f"plan: it writes gradients of {counted(len(plan.spilled_gradients), 'group')} to SSD, "
            "and the store was created without room for them; leave spilled_gradients empty, or "
            "start a new run"
        )


def _text(value: object) -> str:
    if isinstance(value, Interval):
        parts = [f"{value.steps} steps"] if value.steps else []
        parts += [f"{value.seconds:g} s"] if value.seconds else []
        return "every step" if value == EVERY_STEP else " or ".join(parts)
    return str(value)


def _check_names(plan: Plan, problem: PlanProblem) -> None:
    """Raise a ConfigError if the plan names something that the model does not have."""
    blocks = problem.blocks
    moving = [group.key for group in blocks.groups if not group.resident]
    trained = [group.key for group in blocks.trained]
    sites = [site.name for site in blocks.sites]
    _check_existing("host_cached_weights", plan.host_cached_weights, "group", moving)
    _check_existing("host_cached_state", dict(plan.host_cached_state), "trained group", trained)
    _check_existing("spilled_gradients", plan.spilled_gradients, "trained group", trained)
    _check_existing("deferred", plan.deferred, "trained group", trained)
    _check_existing("spilled_sites", plan.spilled_sites, "block", sites)
    _check_existing("staying", plan.staying, "block", sites)
    if plan.chunk_params < 1:
        raise ConfigError(f"plan: chunk_params is {plan.chunk_params}; it must be at least 1")
    counts = {group.key: len(chunks(group, plan.chunk_params)) for group in blocks.trained}
    for key, number in plan.host_cached_state:
        if not 0 <= number < counts[key]:
            raise ConfigError(
                f"plan: host_cached_state has chunk {number} of group {key!r}, which has "
                f"{counted(counts[key], 'chunk')} of {plan.chunk_params:,} parameters; {AGAIN}"
            )
    cached = {*plan.host_cached_weights, *(g.key for g in blocks.groups if g.resident)}
    if plan.log_gradients and (apart := dict(plan.host_cached_state).keys() - cached):
        raise ConfigError(
            f"plan: host_cached_state has chunks of group {min(apart)!r}, whose weights are not in "
            f"host_cached_weights; with log_gradients both are cached or neither, {AGAIN}"
        )
    if plan.kept or plan.spilled_sites or plan.staying:
        if problem.workload is None:
            raise ConfigError(
                "plan: it keeps or moves activations, and attach has no batch; give batch=, an "
                "example of what the model is called with"
            )
        shapes = problem.workload.in_tiles(plan.tiles).shapes.values()
        classes = {part.name for shape in shapes for part in shape.activations}
        _check_existing("kept", dict(plan.kept), "class of activations", classes)


def _check_existing(field: str, names: Iterable[str], kind: str, existing: Collection[str]) -> None:
    for name in names:
        if name not in existing:
            some = ", ".join(sorted(existing)[:3])
            raise ConfigError(
                f"plan: {field} names {name!r}, and this model has no such {kind} (it has "
                f"{len(existing)}: {some}{', ...' if len(existing) > 3 else ''}); {AGAIN}"
            )


def _check_buffers(plan: Plan, problem: PlanProblem, *, has_own_memory: bool) -> None:
    cached = set(plan.host_cached_weights)
    sites = problem.blocks.sites
    moving = {group.key for group in problem.blocks.groups if not group.resident}
    widest = max((len(moving.intersection(site.groups)) for site in sites), default=1)
    slots = max((len(moving.intersection(site.groups) - cached) for site in sites), default=1)
    least = {
        "weight_slots": slots,
        "window": 0,
        "ring": 1,
        "grad_groups": 1,
        "act_buffers": 1,
        "head_tokens": 1,
        "device_grads": 1,
        "device_slots": widest if has_own_memory else 0,
    }
    for field, limit in least.items():
        value = getattr(plan, field)
        if value < limit:
            raise ConfigError(f"plan: {field} is {value}, this model needs at least {limit}")
    if plan.device_slots and not has_own_memory:
        raise ConfigError(
            f"plan: device_slots is {plan.device_slots}, and the device of this run computes in "
            f"host memory; set device_slots=0, or {AGAIN}"
        )
