"""Schedules on the lanes, derived from the calls of the model.

There are three situations:

* The order is known: every step after the first, and passes without gradients in the order of a
  step or of the previous pass. The whole forward, then the whole backward, is scheduled ahead, so
  that reads, updates and writes overlap with compute.
* The order is unknown: the first step or pass, or a model that takes another path. Each block is
  scheduled on demand.
* `overlap=False`: blocks are always scheduled on demand, and actions run one after the other. This
  mode is the specification; the other two situations run the same actions in another order.

A new order of steps is checked once, before anything is scheduled by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch

from lohan.engine.buffers import StepScalars
from lohan.engine.lanes import Lanes
from lohan.errors import RankError
from lohan.model.layout import FlatGroup
from lohan.schedule import phases as sched
from lohan.schedule.actions import Action, ScheduleSpec, empty_buffers
from lohan.schedule.ops import Op
from lohan.schedule.placement import Phase, StepPlacement, UpdateOptions, place
from lohan.schedule.steps import ExecutionOrder, check_order

if TYPE_CHECKING:
    from lohan.engine.step import Steps


class Slots(Protocol):
    """The weight slots of compute, in host memory or on the device."""

    def flat(self, group: FlatGroup, slot: int, /) -> torch.Tensor: ...


class ActionScheduler:
    """The owner of the slot table and of the order in which sites are called."""

    def __init__(
        self,
        groups: Sequence[FlatGroup],
        spec: ScheduleSpec,
        *,
        slots: Slots,
        lanes: Lanes,
        updates: UpdateOptions,
        steps: Steps,
    ) -> None:
        self.steps = steps
        self._groups, self._spec, self._slots = groups, spec, slots
        self._lanes, self._updates = lanes, updates
        self._compiled: dict[tuple[bool, bool], StepPlacement] = {}
        self._buffers = empty_buffers(spec)
        # The writes of the previous step that this backward contains, followed by the end of that
        # step.
        self._behind: tuple[Action, ...] = ()
        # The buffers of the current block's activations: a host buffer, a device buffer, or both.
        self.activation_buffers: tuple[int, ...] = ()
        self._flats: dict[tuple[int, int], torch.Tensor] = {}  # the tensor over each (group, slot)
        self._queued_inference = False  # whether the queued forward is one without gradients
        self._inference_sites: list[int] = []  # sites of the current pass without gradients
        self._last_inference: tuple[int, ...] = ()  # sites of the last such pass

    # -- forward ----------------------------------------------------------------------------------

    def enter_inference(self) -> None:
        """Schedule a whole forward without gradients.

        Its expected order is that of the last such forward or, if there was none, that of training.
        If the forward runs in another order, weights are loaded on demand.
        """
        self._last_inference, self._inference_sites = (
            tuple(self._inference_sites) or self._last_inference,
            [],
        )
        order = self._last_inference or (
            self.steps.last_order.forward if self.steps.last_order is not None else ()
        )
        if self._updates.overlap and order and self._lanes.expected() is None:
            schedule, self._buffers = sched.forward(
                self._spec, self._buffers, order, training=False
            )
            self._lanes.enqueue(schedule)
            self._queued_inference = True

    def begin_forward(
        self, site: int, *, training: bool, backward_follows: bool = True
    ) -> dict[int, torch.Tensor]:
        """Begin the forward of a site, scheduling it if necessary; return its weights by group."""
        name = Op.FORWARD.of(site)
        if training and self._queued_inference:
            # The queued pass without gradients will not continue, and it has no buffers for
            # activations.
            self.drain()
        step = self.steps.current
        if training and not step.forward and self._lanes.expected() is None:
            self._schedule_forward(None)
        if self._lanes.expected() != name:
            self.drain()
            schedule, self._buffers = sched.forward(
                self._spec, self._buffers, [site], training=training
            )
            self._lanes.enqueue(schedule)
        (step.forward if training else self._inference_sites).append(site)
        if training and backward_follows:
            step.reached.append(site)
        return self._weights(site, self._lanes.begin(name).at)

    def end(self) -> None:
        self._lanes.end()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Allow the weights of one site to be read out of order.

        The scheduled actions are cancelled, and the remembered order of forwards without gradients
        does not change.
        """
        self.drain()
        order = self._inference_sites
        self._inference_sites = []
        try:
            yield
        finally:
            self._inference_sites = order

    def drain(self) -> None:
        """Wait for everything that is queued; afterwards, nothing is scheduled ahead."""
        self._write_behind()
        self._lanes.drain()
        self.steps.current.scheduled_ahead = self._queued_inference = False

    def forget_slots(self) -> None:
        """Record that the weight slots in host memory may be overwritten; the lanes are idle."""
        self._buffers = replace(self._buffers, slots=(None,) * self._spec.slots)

    def _write_behind(self) -> None:
        """Schedule the remaining writes of the previous step, because no backward follows."""
        if self._buffers.behind:
            schedule, self._buffers = sched.write_behind(self._spec, self._buffers)
            self._lanes.enqueue(schedule)

    def wait_updated(self, group: int) -> None:
        """Wait until the queued updates of a group are done."""
        chunks = range(self._spec.chunks[group])
        self._lanes.wait_for(*(Op.UPDATE.of(group, chunk) for chunk in chunks))

    # -- backward ---------------------------------------------------------------------------------

    def schedule_backward(
        self, scalars: StepScalars, *, same_order: bool = False, speculates: bool = False
    ) -> None:
        """Schedule the backward after a forward.

        With `same_order`, the whole backward is scheduled now, in the order of the last step, and
        `speculates` states whether updates run in it without waiting for the norm.
        """
        step = self.steps.current
        step.scalars, step.placed = scalars, self._place(speculates=speculates)
        if self._lanes.expected() is not None:
            self.drain()  # These sites were not called this time.
        step.last_uses = None
        if same_order:
            assert self.steps.last_order is not None
            sites, step.scheduled_ahead = self.steps.last_order.backward, True
            step.last_uses = sched.last_uses(self._spec, sites)
            used = {group for groups in step.last_uses for group in groups}
            step.updated_at_end = [n for n in range(len(self._groups)) if n not in used]
            names = [action.name for action in self._buffers.behind]
            schedule, self._buffers = sched.backward(
                self._spec, self._buffers, sites, step.placed, unreached=step.updated_at_end
            )
            # A name may occur twice; the first is the write left over from the previous step.
            first = {action.name: action for action in reversed(schedule)}
            self._behind = tuple(first[name] for name in names)
            self._lanes.enqueue(schedule, scalars)

    def begin_backward(self, site: int) -> dict[int, torch.Tensor]:
        name = Op.BACKWARD.of(site)
        step = self.steps.current
        if step.scheduled_ahead and self._lanes.expected() != name:
            # Backward visits blocks in another order than in the previous step. Actions that belong
            # to the blocks visited so far are completed, later ones are cancelled, and the
            # remaining backward is scheduled on demand.
            # A rank cannot cancel collectives that others may have begun with it.
            if self._spec.net:
                raise RankError(
                    "backward takes another way through the model than in the step before, which "
                    "several ranks cannot follow; keep the blocks in one order, or train on one "
                    "rank"
                )
            self._cancel_rest()
        if not step.scheduled_ahead:
            schedule, self._buffers = sched.one_backward(self._spec, self._buffers, site)
            self._lanes.enqueue(schedule)
        step.backward.append(site)
        return self._weights(site, self._lanes.begin(name).at)

    def _cancel_rest(self) -> None:
        cancelled = set(map(id, self._lanes.cancel_queued()))
        remaining = [action for action in self._behind if id(action) in cancelled]
        # The lanes are idle, and the contents of the slots are unknown.
        behind = (*remaining, *self._buffers.behind)
        self._buffers = replace(empty_buffers(self._spec), behind=behind)
        self._write_behind()
        self._buffers = empty_buffers(self._spec)
        step = self.steps.current
        step.scheduled_ahead, step.last_uses, self._behind = False, None, ()

    def end_site_backward(self, complete: Sequence[int]) -> None:
        """End the backward of a site, after the gradients of `complete` groups were handed over."""
        self._lanes.end()
        step = self.steps.current
        step.complete_groups.update(complete)
        if not step.scheduled_ahead and complete:
            assert step.placed is not None
            schedule, self._buffers = sched.updates(
                self._spec, self._buffers, complete, step.placed
            )
            self._lanes.enqueue(schedule, step.scalars)
            # The gradients of a block must be consumed before the next block computes its own.
            self._lanes.wait_for(*(action.name for action in schedule))

    def end_backward(self) -> None:
        """End the backward, including the compute actions of blocks that it has not reached.

        Groups whose gradients were not handed over by a block are then updated, also those without
        a gradient, whose updates carry weights and state over to the new generation.
        """
        step = self.steps.current
        if not step.scheduled_ahead:
            assert step.placed is not None
            groups = range(len(self._groups))
            step.updated_at_end = [n for n in groups if n not in step.complete_groups]
            schedule, self._buffers = sched.updates(
                self._spec, self._buffers, step.updated_at_end, step.placed, end=True
            )
            self._lanes.enqueue(schedule, step.scalars)
        while (name := self._lanes.expected()) is not None and name != Op.BACKWARD_DONE:
            # This block got no gradient, so its update carries the state over.
            self._lanes.begin(name)
            self._lanes.end()
        self._lanes.begin(Op.BACKWARD_DONE)
        self._learn()
        self._inference_sites = []

    def pause(self) -> None:
        """End a backward whose step continues with another forward."""
        self.drain()
        self._learn()
        self.steps.current.begin_part()
        self._inference_sites = []

    def _learn(self) -> None:
        """Remember the order of this step for the next one."""
        step = self.steps.current
        if self._updates.overlap and not step.parts:
            seen = ExecutionOrder(
                forward=tuple(step.forward),
                backward=tuple(step.backward),
                updates=self._updates,
            )
            if seen != self.steps.last_order:
                check_order(self._spec, seen)
            self.steps.last_order = seen

    def schedule_step_end(self, scalars: StepScalars | None) -> None:
        """Schedule the held updates and the next forward, after BACKWARD_DONE.

        If `scalars` is None, the updates are dropped.
        """
        if self._lanes.computing:  # It is False if the step was rolled back.
            self._lanes.end()
        placed = self.steps.current.placed
        assert placed is not None
        if self._spec.log and scalars is not None:
            schedule, self._buffers = sched.commit_log(self._spec, self._buffers)
            self._lanes.enqueue(schedule)
        if scalars is None:
            self._write_behind()
            self._lanes.drain()
            self._schedule_forward(None)
        elif placed.ends is Phase.AFTER_BACKWARD or not self._updates.overlap:
            schedule, self._buffers = sched.finish_step(self._spec, self._buffers, placed)
            self._lanes.enqueue(schedule, scalars)
            self._lanes.drain()
            self._schedule_forward(None)
        else:
            self._schedule_forward(placed, scalars)

    def roll_back(self) -> None:
        """Discard the updates of this backward, and invalidate all weight slots.

        The previous step is committed first. The current one continues as a step that waits for the
        norm.
        """
        self._lanes.wait_for(Op.END_STEP)
        self._lanes.reset()
        self._buffers = empty_buffers(self._spec)
        self.steps.current.placed = self._place()

    def _place(self, *, speculates: bool = False) -> StepPlacement:
        """Return when each update of this step runs, computed once per kind of step."""
        commits = self.steps.current.commits
        way = speculates, commits
        if way not in self._compiled:
            self._compiled[way] = place(
                self._spec, self._updates, speculates=speculates, commits=commits
            )
        return self._compiled[way]

    def _schedule_forward(
        self, previous: StepPlacement | None, scalars: StepScalars | None = None
    ) -> None:
        """Schedule a whole forward in the last order, with the end of the `previous` step.

        `scalars` are the numbers for the updates of that step.
        """
        if self.steps.last_order is not None:
            schedule, self._buffers = sched.forward(
                self._spec, self._buffers, self.steps.last_order.forward, previous
            )
            self._lanes.enqueue(schedule, scalars)

    def wait_for_squares(self) -> list[int]:
        """Wait until the squares of all groups are summed whose last use was in backward.

        Return the other groups. Their squares are summed after BACKWARD_DONE, so the caller cannot
        wait for them here.
        """
        trained = (group for group, chunks in enumerate(self._spec.chunks) if chunks)
        at_end = self.steps.current.updated_at_end
        self._lanes.wait_for(
            *(Op.SUM_SQUARES.of(group) for group in trained if group not in at_end)
        )
        return at_end

    @property
    def collectives_checksum(self) -> int:
        """A checksum of all collectives between ranks so far."""
        return self._lanes.collectives_checksum

    def finish_earlier_steps(self, *, in_backward: bool) -> None:
        """Commit the earlier steps after a step failed without a failure of a lane.

        If the step failed in forward, updates of earlier steps may be queued behind blocks of the
        failed step, which are skipped. If it failed in backward, earlier steps do not depend on it.
        """
        if in_backward:
            self._cancel_rest()
        self.drain()

    def reset(self) -> None:
        """After an error, make the lanes idle, and mark the contents of all slots as unknown."""
        self._lanes.reset()
        self._buffers = empty_buffers(self._spec)
        self._queued_inference, self._inference_sites = False, []

    def _weights(self, site: int, at: tuple[int, ...]) -> dict[int, torch.Tensor]:
        groups = self._spec.sites[site]
        self.activation_buffers = at[len(groups) :]
        tensors = {}
        for group, slot in zip(groups, at, strict=False):
            if (group, slot) not in self._flats:  # Slots do not move, so a tensor is made once.
                self._flats[group, slot] = self._slots.flat(self._groups[group], slot)
            tensors[group] = self._flats[group, slot]
        return tensors
