"""When the updates of a step run, and where its gradients, weights and state are until then.

`place` answers this for every group of a step, from the options of the run and its plan. It takes
the first rule of `RULES` that applies. docs/how-it-works.md shows the same table. `speculates`
decides at the start of each backward whether the step waits for the norm. `place` does not depend
on events in backward, so the schedule may update a group later than its placement says: groups
whose gradients are not complete when their block has run are updated after the end of backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from lohan.model.layout import Blocks
from lohan.model.plan import Plan
from lohan.schedule.actions import ScheduleSpec


class Phase(StrEnum):
    """A phase in which groups are updated, or in which a step ends."""

    BACKWARD = "in backward"  # updates: after the last use of the group
    AFTER_BACKWARD = "after backward"
    NEXT_FORWARD = "in the next forward"  # updates: before the group is used


class Gradient(StrEnum):
    """The tier that holds the gradients of a group until its update."""

    HOST = "host"
    SSD = "ssd"


class Residence(StrEnum):
    """The tier that holds weights or state between two uses."""

    STREAM = "stream"  # on SSD
    CACHED = "cached"  # in host memory


class Persist(StrEnum):
    """When chunks are written. For chunks that are not cached, this is NOW or LOG."""

    NOW = "now"  # after their update
    BEHIND = "behind"  # in the backward after the updates
    AT_COMMIT = "at commit"  # by a later step, which commits
    # The log can restore the chunks, and a later step writes them. Weights that are not cached are
    # also written after the update, because backward reads them.
    LOG = "by its gradients"


@dataclass(frozen=True)
class Placement:
    """When a group is updated in a step, and where its data is until then."""

    update: Phase
    gradient: Gradient = Gradient.HOST
    weights: Residence = Residence.STREAM
    cached_chunks: frozenset[int] = frozenset()  # chunks whose state is CACHED
    persist: Persist = Persist.NOW
    persist_uncached: Persist = Persist.NOW

    def persist_of(self, chunk: int) -> Persist:
        """Return when a chunk is written."""
        return self.persist if chunk in self.cached_chunks else self.persist_uncached


# -- The options -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class UpdateOptions:
    """The options of a run, and the choices of its plan, that decide when updates run."""

    mode: str = "optimized"  # serial | naive | optimized | balanced
    overlap: bool = True
    needs_all_gradients: bool = False  # whether a step cannot end before its norm is known
    late: frozenset[int] = frozenset()  # groups that `balanced` updates in the next forward
    logs: bool = False  # whether gradients are appended to a log
    can_speculate: bool = False  # whether updates may run before the norm is known
    every_step_commits: bool = True

    @classmethod
    def of(cls, plan: Plan, blocks: Blocks | None = None) -> UpdateOptions:
        """Return the options of a plan. Without `blocks`, no group is late."""
        groups = () if blocks is None else enumerate(blocks.groups)
        return cls(
            mode=plan.update_mode,
            overlap=plan.overlap,
            needs_all_gradients=needs_all_gradients(plan),
            logs=plan.log_gradients > 0,
            late=frozenset(number for number, group in groups if group.key in plan.deferred),
            can_speculate=can_speculate(plan),
            every_step_commits=plan.commit.every_step,
        )


def needs_norm(plan: Plan) -> bool:
    """Return whether updates need the norm of all gradients, or wait for all gradients anyway."""
    return plan.clip > 0 or plan.dtype == "fp16" or plan.update_mode == "serial"


def needs_all_gradients(plan: Plan) -> bool:
    """Return whether the steps of a plan need the norm of all gradients before they can end.

    In mode `serial`, all gradients exist before the first update, and with a log, before the next
    forward. In both cases the norm is computed even if no update needs it.
    """
    return needs_norm(plan) or plan.log_gradients > 0


# -- Speculation -----------------------------------------------------------------------------------


RECENT_STEPS = 8  # The plan limits how many of this many last steps may be clipped.


def can_speculate(plan: Plan) -> bool:
    """Return whether steps of a plan may run updates before the norm is known.

    A clipped step can be corrected if its gradients are in memory, or if the loop can run it again.
    The committed generation must be that of the step before, so every step commits.
    """
    waits = needs_all_gradients(plan) and plan.overlap and plan.update_mode != "serial"
    correctable = plan.can_rerun or not plan.spilled_gradients
    return waits and correctable and plan.commit.every_step


def speculates(
    plan: Plan,
    *,
    clipped: Sequence[bool],
    same_order: bool,
    repeatable: bool,
    factor_is_known: bool,
) -> bool:
    """Return whether the next backward runs updates before the norm is known.

    `clipped` says for each of the last RECENT_STEPS steps, oldest first, whether it was clipped.
    `same_order` states that the model calls its blocks in the order of the previous step, so that
    the whole backward can be scheduled. `repeatable` states that no buffer has changed and that no
    parameter has a gradient hook, so a second run of the batch has the same result.
    `factor_is_known` states that this is such a second run.
    """
    if not same_order or factor_is_known:
        return same_order
    correctable = repeatable or not plan.spilled_gradients
    unclipped = bool(clipped) and not clipped[-1]
    few_clipped = sum(clipped) <= plan.most_clipped * RECENT_STEPS
    return can_speculate(plan) and correctable and unclipped and few_clipped


# -- The rules -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """A row of the table. The texts are for the documentation."""

    condition: str
    runs: str
    committed: str
    # Returns whether the rule applies to a step, given whether it speculates.
    applies: Callable[[UpdateOptions, bool], bool]
    update: Phase = Phase.BACKWARD
    late: Phase = Phase.NEXT_FORWARD  # when the groups that `balanced` defers are updated


RULES = (
    Rule(
        "`--log-gradients K`",
        "in the next forward, before the block is used, from the last full state and the "
        "[log](#a-log-of-gradients)",
        "when its gradients are appended to the log",
        lambda o, speculates: o.logs,
        Phase.NEXT_FORWARD,
    ),
    Rule(
        '`update_mode = "serial"`, or `--no-overlap` with clipping or fp16',
        "after backward",
        "after the updates",
        lambda o, speculates: o.mode == "serial" or (not o.overlap and o.needs_all_gradients),
        Phase.AFTER_BACKWARD,
        Phase.AFTER_BACKWARD,
    ),
    Rule(
        "`--no-overlap` otherwise",
        "in backward, after the last use of the block, one action at a time",
        "after the updates",
        lambda o, speculates: not o.overlap,
        late=Phase.AFTER_BACKWARD,
    ),
    Rule(
        "no clipping, not fp16",
        "in backward, after the last use of the block; with `balanced`, some blocks in the next "
        "forward, before the block is used",
        "after the updates",
        lambda o, speculates: not o.needs_all_gradients,
    ),
    Rule(
        "clipping or fp16; [the step speculates](#steps-that-speculate)",
        "in backward, after the last use of the block, without waiting for the norm",
        "at the start of the next forward, if the step is not clipped",
        lambda o, speculates: speculates,
        late=Phase.BACKWARD,
    ),
    Rule(
        "clipping or fp16 in any other case, for example the first step, or commits by interval",
        "in the next forward, before the block is used; gradients are held until then, in memory "
        "or on SSD",
        "in the next forward or the backward after it",
        lambda o, speculates: True,
        Phase.NEXT_FORWARD,
    ),
)


def rule_of(options: UpdateOptions, *, speculates: bool = False) -> Rule:
    """Return the first rule that applies to a step."""
    return next(rule for rule in RULES if rule.applies(options, speculates))


def table() -> list[str]:
    """Return the rules in Markdown, as docs/how-it-works.md shows them."""
    lines = [
        "| row | condition | the update of a block runs | the step is committed |",
        "|---|---|---|---|",
    ]
    return lines + [
        f"| {number} | {rule.condition} | {rule.runs} | {rule.committed} |"
        for number, rule in enumerate(RULES, 1)
    ]


# -- Placements ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepPlacement:
    """The placements of all groups in one step, by number. Frozen groups have None."""

    groups: tuple[Placement | None, ...]
    mode: str
    speculates: bool  # updates in backward do not wait for the norm; the end of the step does
    commits: bool

    @cached_property
    def held(self) -> tuple[int, ...]:
        """The groups whose gradients are held when backward has ended."""
        return tuple(
            number
            for number, placement in enumerate(self.groups)
            if placement is not None and placement.update is not Phase.BACKWARD
        )

    @cached_property
    def all_held(self) -> bool:
        """True if no update runs in backward, so the drives have little to do in backward."""
        return len(self.held) == sum(placement is not None for placement in self.groups)

    @cached_property
    def ends(self) -> Phase:
        """The phase in which the step ends: that of its last update, or of accepting the norm."""
        updated = {placement.update for placement in self.groups if placement is not None}
        if self.speculates or Phase.NEXT_FORWARD in updated:
            return Phase.NEXT_FORWARD
        return Phase.AFTER_BACKWARD if Phase.AFTER_BACKWARD in updated else Phase.BACKWARD

    def of(self, group: int) -> Placement:
        """Return the placement of a trained group."""
        placement = self.groups[group]
        assert placement is not None
        return placement


def place(
    spec: ScheduleSpec, options: UpdateOptions, *, speculates: bool = False, commits: bool = True
) -> StepPlacement:
    """Return when and where every group is updated in a step.

    `speculates` is whether the step runs updates before the norm is known, and `commits` whether it
    is committed. A step that is not committed does not write what is cached.
    """
    rule = rule_of(options, speculates=speculates)
    trained = [group for group, chunks in enumerate(spec.chunks) if chunks]
    update = {group: rule.late if group in options.late else rule.update for group in trained}
    written = Persist.NOW
    if not commits:
        written = Persist.AT_COMMIT
    elif all(phase is not Phase.BACKWARD for phase in update.values()):
        written = Persist.BEHIND  # The drives have little to do in the backward that follows.
    cached: dict[int, set[int]] = {}
    for group, chunk in spec.host_cached_state:
        cached.setdefault(group, set()).add(chunk)
    weights = set(spec.host_cached_weights)

    def placed(group: int) -> Placement | None:
        if group not in update:
            return None
        held = update[group] is not Phase.BACKWARD
        stays = group in weights
        return Placement(
            update=update[group],
            gradient=Gradient.SSD if held and group in spec.spilled_gradients else Gradient.HOST,
            weights=Residence.CACHED if stays else Residence.STREAM,
            cached_chunks=frozenset(cached.get(group, ())),
            persist=written if stays else Persist.NOW,
            persist_uncached=Persist.LOG if options.logs and not commits else Persist.NOW,
        )

    return StepPlacement(
        groups=tuple(map(placed, range(len(spec.chunks)))),
        mode=options.mode,
        speculates=speculates,
        commits=commits,
    )
