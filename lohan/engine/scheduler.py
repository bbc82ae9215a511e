"""From what the model does next to schedules on the lanes.

Three situations. A known order (every step after the first, and passes without gradients in the
order of a step or of the pass before): the whole forward, then the whole backward, is scheduled
ahead, so reads, updates and writes overlap with compute. An unknown order (the first step or pass,
a model that takes another path):
each block is scheduled on demand. `overlap=False`: always on demand, one action after the other;
this is the specification, and the other two differ from it in order only. A new order of steps is
checked once, when it has been seen, before anything is scheduled by it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import torch

from lohan.engine.buffers import StepScalars
from lohan.engine.lanes import Lanes
from lohan.errors import RankError
from lohan.model.layout import FlatGroup
from lohan.schedule import phases as sched
from lohan.schedule.actions import Action, ScheduleSpec
from lohan.schedule.buffers import empty_buffers
from lohan.schedule.ops import Op
from lohan.schedule.steps import ExecutionOrder, check_order, spec_for_step


class Slots(Protocol):
    """Where compute finds weights: in host memory or on the device."""

    def flat(self, group: FlatGroup, slot: int, /) -> torch.Tensor: ...


class ActionScheduler:
    """Owner of the slot table and of the order in which sites come."""

    def __init__(
        self,
        groups: Sequence[FlatGroup],
        spec: ScheduleSpec,
        *,
        slots: Slots,
        lanes: Lanes,
        overlap: bool,
        update_mode: str,
        deferred: Sequence[int],
        speculates: bool = False,
        by_interval: bool = False,
    ) -> None:
        self._groups, self._spec, self._slots = groups, spec, slots
        self._lanes, self._overlap, self._update_mode = lanes, overlap, update_mode
        self._deferred = tuple(deferred)  # groups whose updates wait until backward has ended
        self._speculates = speculates
        self.skips_norm_wait = False  # in this step, where there is a norm to wait for
        self._by_interval = by_interval  # commits
        self.commits = True  # this step does
        self._buffers = empty_buffers(spec)
        self._known: ExecutionOrder | None = None  # the order of the last step
        self._forward: list[int] = []
        self._reached: list[int] = []  # those of them that backward will come to
        self._backward: list[int] = []
        self._handed_over: set[int] = set()  # groups whose gradients were handed over in this step
        self._whole_phase = False  # the current phase is scheduled as a whole
        self._paused = False  # between two backward calls of one step
        self._last_uses: list[tuple[int, ...]] | None = None
        # The writes that this backward makes for the step before, and then the end of that step.
        self._behind: tuple[Action, ...] = ()
        self._scalars: StepScalars | None = None
        # Where activations of the current block lie: a host buffer, a device buffer.
        self.activation_buffers: tuple[int, ...] = ()
        self._flats: dict[tuple[int, int], torch.Tensor] = {}  # of a group in a slot
        self._unreached: list[int] = []  # groups whose gradients count only when backward has ended
        self._queued_inference = False  # the forward that is queued is one without gradients
        self._inference_sites: list[int] = []  # sites of the current pass without gradients
        self._last_inference: tuple[int, ...] = ()  # and of the last such pass

    # -- forward ----------------------------------------------------------------------------------

    def enter_inference(self) -> None:
        """Schedule a whole forward without gradients, in the order of the last one or of training.

        If it runs in another order, weights are loaded on demand.
        """
        self._last_inference, self._inference_sites = (
            tuple(self._inference_sites) or self._last_inference,
            [],
        )
        order = self._last_inference or (self._known.forward if self._known is not None else ())
        if self._overlap and order and self._lanes.expected() is None:
            made, self._buffers = sched.forward(self._spec, self._buffers, order, training=False)
            self._lanes.enqueue(made)
            self._queued_inference = True

    def begin_forward(
        self, site: int, *, training: bool, backward_follows: bool = True
    ) -> dict[int, torch.Tensor]:
        """Return the weights of a site, by group, for its forward."""
        name = Op.FORWARD.of(site)
        if training and self._queued_inference:
            # A pass without gradients was expected to go on; it has no buffers for activations.
            self.drain()
        if training and not self._forward and self._lanes.expected() is None:
            self._schedule_forward(())
        if self._lanes.expected() != name:
            self.drain()
            made, self._buffers = sched.forward(
                self._spec, self._buffers, [site], training=training
            )
            self._lanes.enqueue(made)
        (self._forward if training else self._inference_sites).append(site)
        if training and backward_follows:
            self._reached.append(site)
        return self._weights(site, self._lanes.begin(name).at)

    def end(self) -> None:
        self._lanes.end()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Allow the weights of one site to be read out of order.

        The scheduled actions are cancelled, and the order of forwards without gradients is
        not learnt from it.
        """
        self.drain()
        order = self._inference_sites
        self._inference_sites = []
        try:
            yield
        finally:
            self._inference_sites = order

    def drain(self) -> None:
        """Everything that is queued is done; nothing is scheduled ahead."""
        self._write_behind()
        self._lanes.drain()
        self._whole_phase = self._queued_inference = False

    def _write_behind(self) -> None:
        """Schedule the remaining writes of the step before, because no backward follows."""
        if self._buffers.behind:
            made, self._buffers = sched.write_behind(self._spec, self._buffers)
            self._lanes.enqueue(made)

    def wait_updated(self, group: int) -> None:
        """Wait until the queued updates of a group are done."""
        chunks = range(self._spec.chunks[group])
        self._lanes.wait_for(*(Op.UPDATE.of(group, chunk) for chunk in chunks))

    # -- backward ---------------------------------------------------------------------------------

    def schedule_backward(
        self, scalars: StepScalars, *, whole: bool = True, speculate: bool = False
    ) -> None:
        """Schedule the backward after a forward.

        If the order is known, the whole backward is scheduled now, unless it is only part
        of a step (`whole` is False). With `speculate`, updates run in it without waiting
        for the norm.
        """
        self._scalars, self.skips_norm_wait = scalars, False
        if self._lanes.expected() is not None:
            self.drain()  # sites that did not come this time
        known = self._known
        self._last_uses = None
        # If backward comes to every call that it came to last time, what was the last use of a
        # group in its order is the last use in any order that begins like it.
        sure = known is not None and Counter(self._reached) == Counter(known.backward)
        if known is not None and sure and whole and known.forward == tuple(self._forward):
            self._whole_phase, self.skips_norm_wait = True, speculate
            self._last_uses = sched.last_uses(self._spec, known.backward)
            used = {group for groups in self._last_uses for group in groups}
            self._unreached = [group for group in range(len(self._groups)) if group not in used]
            names = [action.name for action in self._buffers.behind]
            made, self._buffers = sched.backward(
                self._writing,
                self._buffers,
                known.backward,
                update_mode=self._update_mode,
                deferred=self._deferred_now,
                unreached=self._unreached,
                speculate=self.skips_norm_wait,
            )
            # What was left behind precedes the writes of this step.
            first = {action.name: action for action in reversed(made)}
            self._behind = tuple(first[name] for name in names)
            self._lanes.enqueue(made, scalars)

    def last_use_groups(self) -> tuple[int, ...] | None:
        """Return the groups whose last use is the current backward, if it was scheduled."""
        return None if self._last_uses is None else self._last_uses[len(self._backward) - 1]

    def begin_backward(self, site: int) -> dict[int, torch.Tensor]:
        name = Op.BACKWARD.of(site)
        if self._whole_phase and self._lanes.expected() != name:
            # It runs blocks in another order than in the step before: what follows from the blocks
            # that it has reached is brought to its end, what was scheduled beyond is cancelled, and
            # the rest goes on demand.
            if self._spec.net:  # ranks cannot cancel what others may have begun with them
                raise RankError(
                    "backward takes another way through the model than in the step before, which "
                    "several ranks cannot follow; keep the blocks in one order, or train on one "
                    "rank"
                )
            self._cancel_rest()
        if not self._whole_phase:
            made, self._buffers = sched.one_backward(self._spec, self._buffers, site)
            self._lanes.enqueue(made)
        self._backward.append(site)
        return self._weights(site, self._lanes.begin(name).at)

    def _cancel_rest(self) -> None:
        cancelled = set(map(id, self._lanes.cancel_queued()))
        left = [action for action in self._behind if id(action) in cancelled]
        # Idle; what slots hold is not known.
        behind = (*left, *self._buffers.behind)
        self._buffers = replace(empty_buffers(self._spec), behind=behind)
        self._write_behind()
        self._buffers = empty_buffers(self._spec)
        self._whole_phase, self._last_uses, self._behind = False, None, ()

    def end_backward(self, site: int, finished: Sequence[int]) -> None:
        """End the backward of a site, after the gradients of `finished` groups were handed over."""
        self._lanes.end()
        self._handed_over.update(finished)
        if not self._whole_phase and finished:
            made, self._buffers = sched.updates(
                self._writing,
                self._buffers,
                finished,
                deferred=self._deferred_now,
                speculate=self.skips_norm_wait,
            )
            self._lanes.enqueue(made, self._scalars)
            # One block at a time: its gradients must be gone before the next makes its own.
            self._lanes.wait_for(*(action.name for action in made))

    def backward_done(self) -> None:
        """Backward has ended. Groups that it did not reach carry weights and state over."""
        if not self._whole_phase:
            self._unreached = [n for n in range(len(self._groups)) if n not in self._handed_over]
            made, self._buffers = sched.updates(
                self._writing,
                self._buffers,
                self._unreached,
                end=True,
                deferred=self._deferred_now,
                speculate=self.skips_norm_wait,
            )
            self._lanes.enqueue(made, self._scalars)
        while (name := self._lanes.expected()) is not None and name != Op.BACKWARD_DONE:
            self._lanes.begin(name)  # its block got no gradient: its update carries the state over
            self._lanes.end()
        self._lanes.begin(Op.BACKWARD_DONE)
        self._learn()
        self._reset_step()
        self._paused = False

    def pause(self) -> None:
        """Backward has ended, and its step goes on with another forward."""
        self.drain()
        self._learn()
        self._reset_step()
        self._paused = True

    def _learn(self) -> None:
        """Remember the order of this step for the next one."""
        if self._overlap and not self._paused:
            seen = ExecutionOrder(
                forward=tuple(self._forward),
                backward=tuple(self._backward),
                update_mode=self._update_mode,
                deferred=self._deferred,
                speculates=self._speculates,
                commits=not self._by_interval,
            )
            if seen != self._known:
                check_order(self._spec, seen)
            self._known = seen

    def close_step(self, scalars: StepScalars | None) -> None:
        """Schedule the held updates and the next forward, after BACKWARD_DONE.

        If `scalars` is None, the updates are dropped.
        """
        if self._lanes.computing:  # not where the step was rolled back
            self._lanes.end()
        deferred = self._deferred_now if scalars is not None else ()
        if self._spec.log and scalars is not None:
            made, self._buffers = sched.commit_log(self._spec, self._buffers)
            self._lanes.enqueue(made)
        ends = bool(deferred) or self.skips_norm_wait
        if self._update_mode == "serial" or not self._overlap or scalars is None:
            made, self._buffers = sched.forward(
                self._writing, self._buffers, (), deferred=deferred, end_step=ends
            )
            self._lanes.enqueue(made, scalars)
            self._lanes.drain()
            deferred, ends = (), False
        self._schedule_forward(deferred, scalars, end_step=ends)

    def roll_back(self) -> None:
        """Discard the updates of this backward, and invalidate all weight slots.

        The step before is committed first.
        """
        self._lanes.wait_for(Op.END_STEP)
        self._lanes.reset()
        self._buffers, self.skips_norm_wait = empty_buffers(self._spec), False

    @property
    def _writing(self) -> ScheduleSpec:
        """The spec by which this step writes."""
        return spec_for_step(self._spec, self.commits)

    @property
    def _deferred_now(self) -> tuple[int, ...]:
        """Groups whose updates wait until backward has ended, in this step."""
        return () if self.skips_norm_wait else self._deferred

    def _schedule_forward(
        self, deferred: Sequence[int], scalars: StepScalars | None = None, *, end_step: bool = False
    ) -> None:
        if self._known is not None:
            made, self._buffers = sched.forward(
                self._writing,
                self._buffers,
                self._known.forward,
                deferred=deferred,
                end_step=end_step,
            )
            self._lanes.enqueue(made, scalars)

    def wait_for_squares(self) -> list[int]:
        """Wait until the squares of all groups that backward has reached are summed.

        Returns the other groups, whose sums follow after BACKWARD_DONE, which waits for the
        caller.
        """
        trained = (group for group, chunks in enumerate(self._spec.chunks) if chunks)
        waits = (Op.SUM_SQUARES.of(group) for group in trained if group not in self._unreached)
        self._lanes.wait_for(*waits)
        return self._unreached

    @property
    def collectives_checksum(self) -> int:
        """All exchanges between ranks so far, as a number."""
        return self._lanes.collectives_checksum

    def finish_earlier_steps(self, *, in_backward: bool) -> None:
        """Bring the earlier steps to their commit after a step broke off without a failed lane.

        In forward, their updates may be queued behind blocks of this step, which are
        skipped. In backward, they wait for nothing of this step.
        """
        if in_backward:
            self._cancel_rest()
        self.drain()

    def reset(self) -> None:
        """After an error: the lanes are idle, and the slots hold nothing that is known."""
        self._lanes.reset()
        self._buffers, self.skips_norm_wait = empty_buffers(self._spec), False
        self._queued_inference = False
        self._reset_step()
        self._paused = False

    def _reset_step(self) -> None:
        self._forward, self._reached, self._backward, self._inference_sites = [], [], [], []
        self._handed_over = set()
        self._whole_phase, self._last_uses = False, None

    def _weights(self, site: int, at: tuple[int, ...]) -> dict[int, torch.Tensor]:
        groups = self._spec.sites[site]
        self.activation_buffers = at[len(groups) :]
        return {group: self._flat(group, slot) for group, slot in zip(groups, at, strict=False)}

    def _flat(self, group: int, slot: int) -> torch.Tensor:
        """Slots stay where they are: the same tensor every time."""
        found = self._flats.get((group, slot))
        if found is None:
            found = self._flats[group, slot] = self._slots.flat(self._groups[group], slot)
        return found
