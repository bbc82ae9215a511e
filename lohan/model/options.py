"""The options that a plan is made for, besides the model and the machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from lohan.config import Config
from lohan.errors import ConfigError
from lohan.model.plan import Kept, Plan, RunOptions
from lohan.util.files import load_json
from lohan.util.units import EVERY_STEP, Interval, log_steps, parse_interval

# Properties of a step that a plan can minimise; cost includes the machine's time and drive wear.
MINIMISE = ("time", "writes", "cost")


@dataclass(frozen=True, kw_only=True)
class PlanOptions(RunOptions):
    """The decisions of the user that a plan must respect.

    The planner makes the decisions that are left open here, and the plan contains them.
    """

    micro_batch: int | None = None
    # Tokens per tile, "off" or "auto". "auto" uses tiles if the batch does not fit without them, or
    # if they are faster.
    tiles: int | str = "auto"
    chunk_params: int | None = None  # The chunk size of an existing store, which cannot change.
    head_tokens: int | None = None  # The slice size of the head, if the run must not change it.
    # True if the store has space for held gradients. None: the store does not exist yet and will be
    # created with the space that the plan needs.
    gradients_on_ssd: bool | None = None
    commit: Interval | None = EVERY_STEP  # None: the planner chooses an interval of low cost.
    # Values of `log_gradients` that the planner may choose if a log makes steps faster.
    log_choices: tuple[int, ...] = ()
    minimise: str = "time"  # One of MINIMISE.
    activations: str | Kept = "holistic"  # One of ACTIVATIONS, or an explicit choice.
    # Device memory, by owner, that is used besides the blocks and the schedule.
    device_overhead: tuple[tuple[str, int], ...] = ()

    def fixed_by(self, plan: Plan) -> PlanOptions:
        """Return the options for another plan of the same run.

        Micro-batch, tiles, head slices, chunks and the log are fixed to those of `plan`. Whether a
        log pays is not decided again, because a run does not measure writes apart from reads.
        """
        return replace(
            self.logging(plan.log_gradients),
            micro_batch=plan.micro_batch,
            tiles=plan.tiles or "off",
            head_tokens=plan.head_tokens,
            chunk_params=plan.chunk_params,
        )

    def logging(self, steps: int) -> PlanOptions:
        """Return the options with a log whose full state is written every `steps` steps.

        With 0, return the options without a log.
        """
        commit = Interval(steps, 0.0) if steps else self.commit
        return replace(self, log_gradients=steps, log_choices=(), commit=commit)


LOGGED_MODES = ("optimized", "balanced")  # modes of updates that a log can be combined with
# Values of `log_gradients` that the planner tries. More steps write less, read more, and need more
# room on the drives.
LOG_CHOICES = (8, 4)


def with_log(options: PlanOptions, setting: str | int, *, commit_every: str | int) -> PlanOptions:
    """Return the options with a log of gradients, or with the choice left to the planner.

    `setting` is the value of the setting `log_gradients`. Raise ConfigError if the user asks for a
    log and other options do not permit it.
    """
    steps = log_steps(setting)
    if steps == 0:
        return options
    problem = ""
    if not options.overlap:
        problem = "it needs overlap; leave out overlap = false"
    elif options.update_mode not in LOGGED_MODES:
        problem = f"update_mode is {options.update_mode!r}; choose {' or '.join(LOGGED_MODES)}"
    elif options.commit not in (None, EVERY_STEP):
        problem = f"it commits every step, but commit_every is {commit_every!r}; leave that out"
    if steps is None:
        return options if problem else replace(options, log_choices=LOG_CHOICES)
    if problem:
        raise ConfigError(f"log_gradients = {setting}: {problem}, or set log_gradients = off")
    return options.logging(steps)


def options_of(
    config: Config, *, dtype: str, minimise: str = "time", world: int = 1
) -> PlanOptions:
    """Return the plan options of a run with these settings."""
    train, budget = config.train, config.budget
    options = PlanOptions(
        dtype=dtype,
        micro_batch=train.micro_batch,
        tiles=train.tiles,
        overlap=train.overlap,
        update_mode=train.update_mode,
        activations=activation_policy_of(train.activations),
        clip=train.clip,
        kind=train.kind,
        minimise=minimise,
        world=world,
        can_rerun=True,
        commit=parse_interval(budget.commit_every, name="commit_every"),
    )
    return with_log(options, budget.log_gradients, commit_every=budget.commit_every)


def activation_policy_of(policy: str) -> str | Kept:
    """Return `policy`, or the kept activations of a plan if `policy` is the path of a plan file."""
    if not policy.endswith(".json"):
        return policy
    try:
        # The file holds a plan, or the output of `lohan plan --json`.
        data = load_json(Path(policy))
        whole = isinstance(data, dict) and "plan" in data
        return Plan.from_json(data["plan"] if whole else data).kept
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"[train] activations: {policy} is not a plan ({error}); `lohan plan --json` writes one"
        ) from None
