"""When the updates of a step run, and where its gradients, weights and state are until then.

`place` answers this for every group of a step, from the options of the run and its plan. It takes
the first rule of `RULES` that applies. docs/how-it-works.md shows the same table. A step that
speculates and a step that waits for the norm are two compilations of one plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from lohan.model.layout import Blocks
from lohan.model.plan import Plan
from lohan.schedule.actions import ScheduleSpec


class Gate(StrEnum):
    """The condition for the end of a step."""

    NONE = "none"
    NORM = "norm"  # the norm of all gradients, for clipping or loss scaling


class Update(StrEnum):
    """The phase in which a group is updated."""

    BACKWARD = "in backward"  # after the last use of the group
    AFTER_BACKWARD = "after backward"
    NEXT_FORWARD = "in the next forward"  # before the group is used


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

    update: Update
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
    gate: Gate = Gate.NONE
    late: frozenset[int] = frozenset()  # groups that `balanced` updates in the next forward
    logs: bool = False  # whether gradients are appended to a log
    can_speculate: bool = False  # whether updates may run before the norm is known
    every_step_commits: bool = True

    @classmethod
    def of(cls, plan: Plan, blocks: Blocks | None = None) -> UpdateOptions:
        """Return the options of a plan. Without `blocks`, no group is deferred.

        A clipped step can be corrected if its gradients are in memory, or if the loop can run it
        again. The committed generation must be that of the step before, so every step commits.
        """
        gate = gate_of(plan)
        waits = gate is Gate.NORM and plan.overlap and plan.update_mode != "serial"
        correctable = plan.can_rerun or not plan.spilled_gradients
        groups = () if blocks is None else enumerate(blocks.groups)
        return cls(
            mode=plan.update_mode,
            overlap=plan.overlap,
            gate=gate,
            logs=plan.log_gradients > 0,
            late=frozenset(number for number, group in groups if group.key in plan.deferred),
            can_speculate=waits and correctable and plan.commit.every_step,
            every_step_commits=plan.commit.every_step,
        )


def needs_norm(plan: Plan) -> bool:
    """Return whether updates need the norm of all gradients, or wait for all gradients anyway."""
    return plan.clip > 0 or plan.dtype == "fp16" or plan.update_mode == "serial"


def gate_of(plan: Plan) -> Gate:
    """Return what the steps of a plan need before they can end.

    In mode `serial`, all gradients exist before the first update, and with a log, before the next
    forward. In both cases the norm is computed even if no update needs it.
    """
    return Gate.NORM if needs_norm(plan) or plan.log_gradients else Gate.NONE


# -- The rules -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """A row of the table. The texts are for the documentation."""

    condition: str
    runs: str
    committed: str
    # Returns whether the rule applies to a step, given whether it speculates. None: this is decided
    # when backward has ended (engine/step.py).
    applies: Callable[[UpdateOptions, bool], bool] | None
    update: Update = Update.BACKWARD
    late: Update = Update.NEXT_FORWARD  # when the groups that `balanced` defers are updated


RULES = (
    Rule(
        "fp16 overflow",
        "not at all; the step is skipped",
        "at once, or with the next commit",
        None,
    ),
    Rule(
        "`--log-gradients K`",
        "in the next forward, before the block is used, from the last full state and the "
        "[log](#a-log-of-gradients)",
        "when its gradients are appended to the log",
        lambda o, speculates: o.logs,
        Update.NEXT_FORWARD,
    ),
    Rule(
        '`update_mode = "serial"`, or `--no-overlap` with clipping or fp16',
        "after backward",
        "after the updates",
        lambda o, speculates: o.mode == "serial" or (not o.overlap and o.gate is Gate.NORM),
        Update.AFTER_BACKWARD,
        Update.AFTER_BACKWARD,
    ),
    Rule(
        "`--no-overlap` otherwise",
        "in backward, after the last use of the block, one action at a time",
        "at the end of backward",
        lambda o, speculates: not o.overlap,
        late=Update.AFTER_BACKWARD,
    ),
    Rule(
        "no clipping, not fp16; `naive`",
        "in backward, one chunk after the other",
        "at the end of backward",
        lambda o, speculates: o.gate is Gate.NONE and o.mode == "naive",
    ),
    Rule(
        "no clipping, not fp16; `optimized`",
        "in backward, with several chunks in flight",
        "at the end of backward",
        lambda o, speculates: o.gate is Gate.NONE and o.mode == "optimized",
    ),
    Rule(
        "no clipping, not fp16; `balanced`",
        "in backward; for the last blocks, in the next forward before the block is used",
        "at the end of backward, or after the deferred updates",
        lambda o, speculates: o.gate is Gate.NONE,
    ),
    Rule(
        "clipping or fp16; every step is committed, the previous step was not clipped, few of the "
        "last eight were, and this one is not",
        "in backward, without waiting for the norm (speculation)",
        "at the start of the next forward",
        lambda o, speculates: speculates,
        late=Update.BACKWARD,
    ),
    Rule(
        "the same, but this step is clipped",
        "in backward; then the updates are rolled back and repeated with the clip factor, or the "
        "step runs again",
        "after the repeated updates",
        None,
    ),
    Rule(
        "clipping or fp16 in any other case, for example the first step, or commits by interval",
        "in the next forward, before the block is used; gradients are held until then, in memory "
        "or on SSD",
        "in the next forward or the backward after it",
        lambda o, speculates: True,
        Update.NEXT_FORWARD,
    ),
)


def rule_of(options: UpdateOptions, *, speculates: bool = False) -> Rule:
    """Return the first rule that applies to a step."""
    return next(r for r in RULES if r.applies is not None and r.applies(options, speculates))


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
    gate: Gate
    mode: str
    speculates: bool  # updates in backward do not wait for the norm; the end of the step does
    commits: bool

    @cached_property
    def held(self) -> tuple[int, ...]:
        """The groups whose gradients are held when backward has ended."""
        return tuple(
            number
            for number, placement in enumerate(self.groups)
            if placement is not None and placement.update is not Update.BACKWARD
        )

    @cached_property
    def all_held(self) -> bool:
        """True if no update runs in backward, so the drives have little to do in backward."""
        return len(self.held) == sum(placement is not None for placement in self.groups)

    @property
    def in_next_forward(self) -> bool:
        """True if the next forward ends the step, after updates or after the norm is accepted."""
        return self.speculates or any(
            placement is not None and placement.update is Update.NEXT_FORWARD
            for placement in self.groups
        )

    @property
    def ends_in_backward(self) -> bool:
        """True if the step ends with backward, after all updates."""
        return not self.held and not self.speculates

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
    elif all(phase is not Update.BACKWARD for phase in update.values()):
        written = Persist.BEHIND  # The drives have little to do in the backward that follows.
    cached: dict[int, set[int]] = {}
    for group, chunk in spec.host_cached_state:
        cached.setdefault(group, set()).add(chunk)
    weights = set(spec.host_cached_weights)

    def placed(group: int) -> Placement | None:
        if group not in update:
            return None
        held = update[group] is not Update.BACKWARD
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
        gate=options.gate,
        mode=options.mode,
        speculates=speculates,
        commits=commits,
    )
