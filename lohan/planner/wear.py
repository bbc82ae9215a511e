"""What a run writes to its drives: how often it commits, what its writes take of their rated life
and in money, and what would take less of it, planned like the run itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from lohan.errors import BudgetError
from lohan.model.layout import Blocks
from lohan.model.machine import Drive, Profile
from lohan.model.plan import BatchWorkload, Plan, PlanOptions
from lohan.planner.forecast import Forecast, commit_bytes, step_work
from lohan.schedule.steps import planned_order, spec_of, steps
from lohan.util.system import DriveFacts, drives_of
from lohan.util.units import EVERY_STEP, Interval, counted, format_bytes, format_seconds

Planned = tuple[Plan, Forecast | None]

# -- How often a run commits its steps, where the user leaves that open ----------------------------
#
# Every step, if that costs little: of a step's time, and of the drives' life. Otherwise by a plan
# whose steps leave what stays in memory unwritten, at the shortest interval that costs little, at
# least every quarter of an hour; unless that plan is slower, since updates wait for the norm
# between two commits.


LONGEST_S = 15 * 60.0  # that a crash may cost
SLOWER = 0.02  # of a step, that commits may cost
MORE_BYTES = 0.2  # of what steps write anyway, that they may add
LASTING_S = 5 * 365 * 86400.0  # of training without a pause: what drives survive is no wear
DEFAULT_LIFE = 600.0  # bytes written per byte of capacity that consumer drives are rated for


def choose_commit_interval(
    profile: Profile, planned: Callable[[Interval], Planned], foreseen: Callable[[Plan], Forecast]
) -> Planned:
    """`planned` makes the plan for an interval, and what it does if it was simulated."""
    every, now = planned(EVERY_STEP)
    if not any(weights_too(every)):
        return every, now
    now = now or foreseen(every)
    if not adds_much(every, now):
        return every, now
    rare, then = planned(Interval(0, LONGEST_S))
    then = then or foreseen(rare)
    added = then.commit
    if added is None or then.step_s > (1 + SLOWER) * now.step_s:
        return every, now
    between_s = then.step_s - added.seconds / added.steps
    between = then.written_bytes - added.written_bytes / added.steps
    if now.step_s <= (1 + SLOWER) * between_s and _adds_little(
        profile, now.written_bytes - between, between, now.step_s
    ):
        return every, now
    most = int(LONGEST_S / between_s)
    if most < 2:
        return every, now
    steps = min(most, max(2, ceil(added.seconds / (SLOWER * between_s))))
    while steps < most and not _adds_little(
        profile, added.written_bytes / steps, between, between_s
    ):
        steps = min(most, ceil(steps * 1.1))
    return replace(rare, commit=Interval(steps, LONGEST_S)), None


def adds_much(plan: Plan, made: Forecast) -> bool:
    """Whether writing what stays in memory takes more than little of the bytes of a step, and so of
    its time; `made`: what a plan does that writes it in every step."""
    layout, stays = made.work.per_parameter, sum(weights_too(plan))
    added = plan.world * stays * plan.chunk_params * (layout.state + layout.weight)
    return added > SLOWER * made.written_bytes


def weights_too(plan: Plan) -> list[bool]:
    """Of the state that stays in memory, whether its weights do: then it need not be written."""
    cached = set(plan.host_cached_weights)
    return [key in cached for key, _ in plan.host_cached_state]


def _adds_little(profile: Profile, added: float, anyway: float, step_s: float) -> bool:
    """Bytes that commits add to what a step writes anyway."""
    life = sum(drive.endurance_bytes or DEFAULT_LIFE * drive.bytes for drive in profile.drives)
    return added <= MORE_BYTES * anyway or (added + anyway) * LASTING_S / step_s <= life


# -- What writes take of the drives' life ----------------------------------------------------------


DEFAULT_USD = 80e-12  # per byte of capacity; assumed, as in machines.toml
ASSUMED_WEAR = "at 600 TB and 80 USD per TB of capacity, which is usual"
WORN_PERCENT = 5  # of its life, from which a drive's log tells how long that is
SPOKEN = 1000  # steps to speak of, where their number is not known
LEAST_LIVES, LEAST_USD = 0.001, 0.01  # below both, wear is nothing to speak of
LESS = 0.98  # times the bytes, of an option that is worth a line


@dataclass(frozen=True)
class Wear:
    """Of writes that go to all drives alike; 0 lives or USD: not known."""

    written_bytes: float
    drives: int
    lives: float  # times that the drive with the shortest life is worn out
    usd: float  # share of the drives' price

    def times(self, count: float) -> Wear:
        return Wear(count * self.written_bytes, self.drives, count * self.lives, count * self.usd)


def wear_of(drives: Sequence[Drive], written_bytes: float) -> Wear:
    each = written_bytes / max(1, len(drives))
    shares = [(each / d.endurance_bytes, d.usd) for d in drives if d.endurance_bytes]
    return Wear(
        written_bytes, len(drives), max((share for share, _ in shares), default=0.0),
        sum(share * usd for share, usd in shares),
    )  # fmt: skip


def drives_at(folders: Iterable[Path]) -> list[Drive]:
    """The drives below a run's folders, each once, with the life that their own log tells, or that
    is usual for their size. Where none can be seen: one of 1 TB for each folder."""
    found = {facts.name: facts for folder in folders for facts in drives_of(folder)}
    return [_rated(name, facts) for name, facts in found.items()] or [
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
    blocks: Blocks, workload: BatchWorkload, plan: Plan, *, two_generations: bool,
    has_own_memory: bool,
) -> float:  # fmt: skip
    """Bytes to SSD of a step that is not clipped, of all ranks, with its share of the commits if
    these go by steps: no machine need be known for it."""
    spec = spec_of(blocks, plan, two_generations=two_generations)
    work = step_work(blocks, workload, plan, has_own_memory=has_own_memory)
    order = planned_order(blocks, plan, two_generations=two_generations)
    *_, last = steps(spec, order, 2)
    written = sum(work.written(action) for phase in last.values() for action in phase)
    if not order.commits and plan.commit.steps:
        written += commit_bytes(work, spec) / plan.commit.steps
    return plan.world * written


# -- what would take less --------------------------------------------------------------------------


@dataclass(frozen=True)
class Alternative:
    """A plan of the same run with one option changed."""

    option: str
    step_s: float
    written_bytes: float
    note: str = ""


def alternatives(
    now: Forecast, options: PlanOptions, host_bytes: int,
    planned: Callable[[PlanOptions, int], Forecast],
) -> Iterator[Alternative]:  # fmt: skip
    """Options with which fewer bytes are written, most sparing first, in the slices of `now`.
    `host_bytes`: of all ranks; `planned`: what the run does with other options and memory, or a
    BudgetError."""
    options = replace(
        options, micro_batch=now.plan.micro_batch, tiles=now.plan.tiles or "off"
    )  # fmt: skip
    found = []
    for option, changed, host, note in _candidates(now, options, host_bytes):
        with suppress(BudgetError):
            made = planned(changed, host)
            found.append(Alternative(option, made.step_s, made.written_bytes, note))
    sparing = (a for a in found if a.written_bytes <= LESS * now.written_bytes)
    yield from sorted(sparing, key=lambda a: a.written_bytes)


def _candidates(
    now: Forecast, options: PlanOptions, host_bytes: int
) -> Iterator[tuple[str, PlanOptions, int, str]]:
    """Only what can change the writes of this plan: planning takes time."""
    plan, work = now.plan, now.work
    kind = options.kind
    if kind.moments == "fp32":
        small = replace(kind, moments="int8")
        yield "--moments int8", replace(options, kind=small), host_bytes, "rounded moments"
    chunks = sum(-(-numel // work.chunk_params) for numel in work.groups)
    much_in_memory = sum(weights_too(plan)) > (1 - LESS) * chunks
    if options.two_generations and not plan.commits_by_interval and much_in_memory:
        rare = replace(options, commit=Interval(0, LONGEST_S))
        yield "--commit-every 15min", rare, host_bytes, "a crash may cost as much"
    if plan.spilled_sites and options.activations == "holistic":
        fewer = replace(options, activations="recompute")
        yield "--activations recompute", fewer, host_bytes, "no activations on SSD"
    state = sum(work.groups) * (work.per_parameter.state + work.per_parameter.weight) * plan.world
    if plan.spilled_sites or (len(plan.host_cached_state) < chunks and 4 * host_bytes > state):
        size = format_bytes(2 * host_bytes).replace(" ", "")
        yield f"--host {size}", options, 2 * host_bytes, "twice the memory"


# -- for people ------------------------------------------------------------------------------------


def wear_lines(
    drives: Sequence[Drive], written_bytes: float, *, steps: int | None,
    instead: Sequence[Alternative] = (),
) -> list[str]:  # fmt: skip
    """Of one step, of all of them or of a thousand, and with other options."""
    step, count = wear_of(drives, written_bytes), steps or SPOKEN
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
        then = wear_of(drives, other.written_bytes).times(count)
        lines.append(
            f"with {other.option:{width}}  {describe_wear(then)}; "
            f"{format_seconds(other.step_s)} per step; {other.note}"
        )
    return lines


def is_nothing(wear: Wear) -> bool:
    """Less than anyone would replace a drive for, or count."""
    return 0 < wear.lives < LEAST_LIVES and wear.usd < LEAST_USD


def describe_wear(wear: Wear) -> str:
    """Such as "357.57 TiB written, 4.4 times the rated life of the drives, 1,408 USD"."""
    text = f"{format_bytes(wear.written_bytes)} written"
    if wear.lives:
        text += f", {format_lives(wear.lives)} the rated life of {_them(wear.drives)}"
    return f"{text}, {format_usd(wear.usd)}" if wear.usd else text


def _them(drives: int) -> str:
    return "the drives" if drives > 1 else "the drive"


def format_lives(lives: float) -> str:
    """The beginning of "... the rated life": plain numbers, however few or many."""
    if lives < LEAST_LIVES:
        return "less than a thousandth of"
    return f"{lives:.2g} of" if lives < 0.995 else f"{lives:,.{1 if lives < 100 else 0}f} times"


def format_usd(usd: float) -> str:
    if usd < LEAST_USD:
        return "less than a cent"
    return f"{usd:,.2f} USD" if usd < 10 else f"{usd:,.0f} USD"
