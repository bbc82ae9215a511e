"""Commit intervals and drive wear.

This module chooses how often a run commits, computes which share of the drives' rated life and
price its writes use, and plans alternatives that write less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from lohan.errors import BudgetError
from lohan.model.layout import Blocks
from lohan.model.machine import Drive, Profile
from lohan.model.options import PlanOptions
from lohan.model.plan import Plan
from lohan.model.workload import BatchWorkload
from lohan.planner.forecast import Forecast, commit_bytes, step_work
from lohan.schedule.steps import planned_order, spec_of, steps
from lohan.util.drives import DriveFacts, drives_of
from lohan.util.units import EVERY_STEP, Interval, counted, format_bytes, format_seconds

Planned = tuple[Plan, Forecast | None]

# -- The commit interval, if the user does not set it ----------------------------------------------
#
# Every step is committed if that costs little of a step's time and of the drives' life. Otherwise
# cached weights and state are written only by steps that commit, at the shortest interval that
# costs little and at least every 15 minutes. If such a plan is slower, because updates wait for the
# norm between two commits, every step is committed after all.


LONGEST_S = 15 * 60.0  # longest commit interval, which is the work that a crash may lose
COMMIT_TIME_SHARE = 0.02  # share of the step time that commits may add
COMMIT_BYTES_SHARE = 0.2  # commits may add this share of the bytes that steps write without them
# Drives that survive this many seconds of continuous training do not limit the interval.
LEAST_DRIVE_LIFE_S = 5 * 365 * 86400.0
DEFAULT_LIFE = 600.0  # rated bytes written per byte of capacity of consumer drives


def choose_commit_interval(
    profile: Profile, planned: Callable[[Interval], Planned], foreseen: Callable[[Plan], Forecast]
) -> Planned:
    """Return the best plan over commit intervals, and its forecast if it was simulated.

    `planned` returns the plan for an interval, with its forecast if it was simulated. `foreseen`
    simulates a plan.
    """
    every, committing = planned(EVERY_STEP)
    if not any(weights_too(every)):
        return every, committing
    committing = committing or foreseen(every)
    if not adds_much(every, committing):
        return every, committing
    rare, then = planned(Interval(0, LONGEST_S))
    then = then or foreseen(rare)
    added = then.commit
    if added is None or then.step_s > (1 + COMMIT_TIME_SHARE) * committing.step_s:
        return every, committing
    between_s = then.step_s - added.seconds / added.steps
    between = then.written_bytes - added.written_bytes / added.steps
    if committing.step_s <= (1 + COMMIT_TIME_SHARE) * between_s and _adds_little(
        profile, committing.written_bytes - between, between, committing.step_s
    ):
        return every, committing
    most = int(LONGEST_S / between_s)
    if most < 2:
        return every, committing
    steps = min(most, max(2, ceil(added.seconds / (COMMIT_TIME_SHARE * between_s))))
    while steps < most and not _adds_little(
        profile, added.written_bytes / steps, between, between_s
    ):
        steps = min(most, ceil(steps * 1.1))
    return replace(rare, commit=Interval(steps, LONGEST_S)), None


def adds_much(plan: Plan, forecast: Forecast) -> bool:
    """Return whether cached chunks are a considerable share of the bytes that a step writes.

    `forecast` is that of a plan that writes cached chunks in every step.
    """
    layout, stays = forecast.work.per_parameter, sum(weights_too(plan))
    added = plan.world * stays * plan.chunk_params * (layout.state + layout.weight)
    return added > COMMIT_TIME_SHARE * forecast.written_bytes


def weights_too(plan: Plan) -> list[bool]:
    """Return for each cached state chunk whether the weights of its group are cached too.

    Such a chunk need not be written in every step.
    """
    cached = set(plan.host_cached_weights)
    return [key in cached for key, _ in plan.host_cached_state]


def _adds_little(profile: Profile, added: float, anyway: float, step_s: float) -> bool:
    """Return whether the `added` bytes that commits write are acceptable.

    They are if they are a small share of the bytes that the step writes `anyway`, or if the drives
    survive LEAST_DRIVE_LIFE_S of such steps.
    """
    life = sum(drive.endurance_bytes or DEFAULT_LIFE * drive.bytes for drive in profile.drives)
    return (
        added <= COMMIT_BYTES_SHARE * anyway
        or (added + anyway) * LEAST_DRIVE_LIFE_S / step_s <= life
    )


# -- Drive wear ------------------------------------------------------------------------------------


DEFAULT_USD = 80e-12  # price per byte of capacity; an assumption, as in machines.toml
ASSUMED_WEAR = "at 600 TB and 80 USD per TB of capacity, which is usual"
WORN_PERCENT = 5  # percentage used from which the drive's own log is precise enough
DEFAULT_REPORT_STEPS = 1000  # number of steps to report if the length of the run is not known
LEAST_LIVES, LEAST_USD = 0.001, 0.01  # wear below both is not reported
LESS_WRITTEN_SHARE = 0.98  # an alternative is reported if it writes at most this share of the bytes


@dataclass(frozen=True)
class Wear:
    """The wear caused by writes that are spread evenly over all drives."""

    written_bytes: float
    drives: int
    lives: float  # rated lives used of the drive with the shortest life; 0 if not known
    usd: float  # price of the life used, summed over all drives; 0 if not known

    def times(self, count: float) -> Wear:
        return Wear(count * self.written_bytes, self.drives, count * self.lives, count * self.usd)


def wear_of(drives: Sequence[Drive], written_bytes: float) -> Wear:
    each = written_bytes / max(1, len(drives))
    shares = [(each / d.endurance_bytes, d.usd) for d in drives if d.endurance_bytes]
    return Wear(
        written_bytes,
        len(drives),
        max((share for share, _ in shares), default=0.0),
        sum(share * usd for share, usd in shares),
    )


def drives_at(folders: Iterable[Path]) -> list[Drive]:
    """Return the distinct drives that store a run's folders.

    The rated life of a drive is derived from its own log or, if that is not possible, from its
    size. If no drive can be identified, one drive of 1 TB is assumed for each folder.
    """
    by_name = {facts.name: facts for folder in folders for facts in drives_of(folder)}
    return [_rated(name, facts) for name, facts in by_name.items()] or [
        _rated(str(folder), None) for folder in folders
    ]


def _rated(name: str, facts: DriveFacts | None) -> Drive:
    size = (facts.bytes if facts is not None else 0) or 10**12
    health, life = facts.health if facts is not None else None, DEFAULT_LIFE * size
    if health is not None and health.used_percent >= WORN_PERCENT:
        life = 100 * health.written_bytes / health.used_percent
    return Drive(
        name=name, read=0.0, write=0.0, bytes=size, endurance_bytes=life, usd=DEFAULT_USD * size
    )


def written_per_step(
    blocks: Blocks,
    workload: BatchWorkload,
    plan: Plan,
    *,
    has_own_memory: bool,
) -> float:
    """Return the bytes that all ranks write to SSD in a step that is not clipped.

    The step's share of a commit is included if the interval is a number of steps. No profile of the
    machine is needed.
    """
    spec = spec_of(blocks, plan)
    work = step_work(blocks, workload, plan, has_own_memory=has_own_memory)
    order = planned_order(blocks, plan)
    *_, last = steps(spec, order, 2)
    written = sum(work.written(action) for phase in last.values() for action in phase)
    if not plan.commit.every_step and plan.commit.steps:
        written += commit_bytes(work, spec) / plan.commit.steps
    return plan.world * written


# -- Alternatives that write less ------------------------------------------------------------------


@dataclass(frozen=True)
class Alternative:
    """The forecast of the same run with one option changed."""

    option: str
    step_s: float
    written_bytes: float
    note: str = ""


def alternatives(
    now: Forecast,
    options: PlanOptions,
    host_bytes: int,
    planned: Callable[[PlanOptions, int], Forecast],
) -> Iterator[Alternative]:
    """Yield alternatives that write fewer bytes than the current plan, fewest bytes first.

    All alternatives use the micro-batch and the tiles of the current forecast `now`. `host_bytes`
    is the host memory of all ranks. `planned` returns the forecast of the run with other options
    and host memory, or raises a BudgetError.
    """
    options = replace(options, micro_batch=now.plan.micro_batch, tiles=now.plan.tiles or "off")
    planned_options = []
    for option, changed, host, note in _candidates(now, options, host_bytes):
        with suppress(BudgetError):
            forecast = planned(changed, host)
            planned_options.append(
                Alternative(option, forecast.step_s, forecast.written_bytes, note)
            )
    sparing = (
        a for a in planned_options if a.written_bytes <= LESS_WRITTEN_SHARE * now.written_bytes
    )
    yield from sorted(sparing, key=lambda a: a.written_bytes)


def _candidates(
    now: Forecast, options: PlanOptions, host_bytes: int
) -> Iterator[tuple[str, PlanOptions, int, str]]:
    """Yield option, plan options, host bytes and note of every alternative to be planned.

    Because planning takes time, only options that can change the writes of this plan are tried.
    """
    plan, work = now.plan, now.work
    kind = options.kind
    if kind.moments == "fp32":
        small = replace(kind, moments="int8")
        yield "--moments int8", replace(options, kind=small), host_bytes, "rounded moments"
    chunks = sum(-(-numel // work.chunk_params) for numel in work.groups)
    much_in_memory = sum(weights_too(plan)) > (1 - LESS_WRITTEN_SHARE) * chunks
    if plan.commit.every_step and not plan.log_gradients and much_in_memory:
        rare = replace(options, commit=Interval(0, LONGEST_S))
        yield "--commit-every 15min", rare, host_bytes, "a crash may cost as much"
    if plan.spilled_sites and options.activations == "holistic":
        fewer = replace(options, activations="recompute")
        yield "--activations recompute", fewer, host_bytes, "no activations on SSD"
    state = sum(work.groups) * (work.per_parameter.state + work.per_parameter.weight) * plan.world
    if plan.spilled_sites or (len(plan.host_cached_state) < chunks and 4 * host_bytes > state):
        size = format_bytes(2 * host_bytes).replace(" ", "")
        yield f"--host {size}", options, 2 * host_bytes, "twice the memory"


# -- Formatting ------------------------------------------------------------------------------------


def wear_lines(
    drives: Sequence[Drive],
    written_bytes: float,
    *,
    steps: int | None,
    instead: Sequence[Alternative] = (),
) -> list[str]:
    """Return lines that describe the wear of one step, of the whole run, and of alternatives.

    If the number of steps is not known, the wear of 1000 steps is described.
    """
    step, count = wear_of(drives, written_bytes), steps or DEFAULT_REPORT_STEPS
    text = f"{format_bytes(written_bytes)} written per step"
    if step.drives > 1:
        text += f", {format_bytes(written_bytes / step.drives)} to each of {step.drives} drives"
    if not written_bytes or is_nothing(step.times(count)):
        return [text]
    if step.lives:
        text += f"; the rated life of {_them(step.drives)} is {1 / step.lives:,.0f} steps"
    lines = [text, f"{counted(count, 'step')}: {describe_wear(step.times(count))}"]
    width = max((len(other.option) for other in instead), default=0)
    for other in instead:
        less_wear = wear_of(drives, other.written_bytes).times(count)
        lines.append(
            f"with {other.option:{width}}  {describe_wear(less_wear)}; "
            f"{format_seconds(other.step_s)} per step; {other.note}"
        )
    return lines


def is_nothing(wear: Wear) -> bool:
    """Return whether wear is known and too small to be reported."""
    return 0 < wear.lives < LEAST_LIVES and wear.usd < LEAST_USD


def describe_wear(wear: Wear) -> str:
    """Format wear, such as "357.57 TiB written, 4.4 times the rated life of the drives"."""
    text = f"{format_bytes(wear.written_bytes)} written"
    if wear.lives:
        text += f", {format_lives(wear.lives)} the rated life of {_them(wear.drives)}"
    return f"{text}, {format_usd(wear.usd)}" if wear.usd else text


def _them(drives: int) -> str:
    return "the drives" if drives > 1 else "the drive"


def format_lives(lives: float) -> str:
    """Format a number of lives so that "the rated life" can follow it."""
    if lives < LEAST_LIVES:
        return "less than a thousandth of"
    return f"{lives:.2g} of" if lives < 0.995 else f"{lives:,.{1 if lives < 100 else 0}f} times"


def format_usd(usd: float) -> str:
    if usd < LEAST_USD:
        return "less than a cent"
    return f"{usd:,.2f} USD" if usd < 10 else f"{usd:,.0f} USD"
