"""One question for every policy by name, `auto` included: what does it do on this machine?"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from lohan.errors import BudgetError, ConfigError
from lohan.model.machine import Profile
from lohan.model.shapes import ModelShape
from lohan.planner.machine_plan import Prospect, Question, SpaceError, look
from lohan.planner.planner import Wishes
from lohan.planner.policies_activations_part import CHOOSERS
from lohan.planner.policies_systems_part import AUTO, policy, with_choices
from lohan.planner.systems import Outcome, run
from lohan.schedule.phases import GRAD_MODES


def outcome_of(
    name: str, model: ModelShape, machine: Profile, *, batch: int, seq: int,
    grad_offload: str | None = None, activations: str | None = None,
) -> Outcome:  # fmt: skip
    _check("--grad-offload", grad_offload, GRAD_MODES)
    _check("--activations", activations, CHOOSERS)
    if name == AUTO:
        return _auto(
            model, machine, batch=batch, seq=seq, grad_offload=grad_offload,
            activations=activations,
        )  # fmt: skip
    chosen = with_choices(policy(name), grad_offload=grad_offload, activations=activations)
    return run(chosen, model, machine, batch=batch, seq=seq)


def _check(option: str, value: str | None, known: Collection[str]) -> None:
    if value is not None and value not in known:
        raise ConfigError(f"{option}: {value!r}; choose {', '.join(known)}")


def _auto(
    model: ModelShape, machine: Profile, *, batch: int, seq: int, grad_offload: str | None,
    activations: str | None,
) -> Outcome:  # fmt: skip
    """LoHan as it is built here: the planner's choice, forecast."""
    if activations is not None:
        raise ConfigError(
            f"auto chooses activations itself, not {activations}; leave --activations out or use "
            "--policy lohan"
        )
    wishes = Wishes(mode="bf16", grad_offload=grad_offload or "balanced")
    question = Question(
        model=model, machine=machine, wishes=wishes, batch=batch, seq=seq, host=machine.host_bytes
    )
    try:
        prospect = _look(question)
    except BudgetError as refused:
        return Outcome(feasible=False, reason=str(refused))
    made = prospect.forecast
    return Outcome(
        feasible=True, step_s=made.step_s, tokens_per_s=made.tokens_per_s,
        lane_busy_s=made.busy_s, timeline=made.timeline,
        peak_bytes=prospect.peak_bytes,
        kept_bytes=sum(site.kept_bytes for site in made.work.sites),
    )  # fmt: skip


def _look(question: Question) -> Prospect:
    """With every step durable or, where the drives have no room for two generations of the state
    and for activations, with one of them, as other systems have it, if that is faster."""
    one = replace(question, wishes=replace(question.wishes, durability="checkpoint"))
    try:
        made = look(question)
    except SpaceError:
        return look(one)
    return min(made, look(one), key=lambda p: p.forecast.step_s) if made.scarce else made
