"""What the actions of all lanes but compute do: where tokens become I/O, copies and updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from lohan.capture.recompute import ActivationHooks
from lohan.engine.buffers import (
    ChunkChecksums,
    HostPool,
    StateRing,
    StepScalars,
    WeightSlots,
    update_chunk,
)
from lohan.engine.collectives import StepCollectives
from lohan.engine.device_operations import DeviceOperations
from lohan.engine.gradient_transport import GradientSpill, PendingGradients
from lohan.engine.gradients import sum_of_squares
from lohan.engine.host_cache import HostCache
from lohan.engine.offload import ActivationSpill
from lohan.engine.step import Steps
from lohan.errors import LohanError
from lohan.model.layout import Blocks
from lohan.model.plan import Plan
from lohan.model.state import TensorRange, chunks, state_format_of
from lohan.schedule.actions import Action, ScheduleSpec
from lohan.schedule.ops import Op
from lohan.store.admin import remove_unfinished
from lohan.store.files import activation_dirs
from lohan.store.store import Store, Ticket

if TYPE_CHECKING:
    from lohan.engine.context import PlanContext


class ActionRunner:
    """Owner of the buffers that a plan asks for; called by the lanes."""

    def __init__(
        self,
        context: PlanContext,
        plan: Plan,
        spec: ScheduleSpec,
        *,
        store: Store,
        pool: HostPool,
        collectives: StepCollectives,
        steps: Steps,
    ) -> None:
        self.steps = steps
        own, chunk_params = context.shards, plan.chunk_params
        self._groups = groups = own.groups
        self._spec, self._store = spec, store
        self._state_format = state_format = state_format_of(plan.dtype, plan.kind)
        self._chunks = [chunks(group, chunk_params) for group in groups]
        self.slots = WeightSlots(
            store,
            pool,
            state_format=state_format,
            chunk_params=chunk_params,
            slots=spec.slots,
            moving=[g for n, g in enumerate(groups) if n not in spec.host_cached_weights],
            cached=[groups[n] for n in spec.host_cached_weights],
        )
        self._ring = StateRing(
            store,
            pool,
            state_format=state_format,
            chunk_params=chunk_params,
            ring=spec.ring,
            largest=max(g.numel for g in own.trained),
            cached=[(groups[n], chunk) for n, chunk in spec.host_cached_state],
        )
        self._gradient_spill: GradientSpill | None = None
        if plan.spilled_gradients:
            self._gradient_spill = GradientSpill(
                store, pool, groups, buffers=spec.ring, chunk_params=chunk_params
            )
        self.pending = PendingGradients(steps)
        self.host_cache = HostCache(spec, groups, store=store, slots=self.slots, ring=self._ring)
        # Of chunks that are updated and not yet written.
        self._checksums: dict[tuple[int, int], ChunkChecksums] = {}
        self.device_parts: DeviceOperations | None = None
        self.activation_spill = _activation_spill(context.blocks, plan, store, pool)
        try:
            if context.device.has_own_memory:
                self.device_parts = DeviceOperations(
                    context,
                    plan,
                    spec,
                    groups=groups,
                    host_slots=self.slots,
                    pending=self.pending,
                    collectives=collectives,
                    activation_spill=self.activation_spill,
                )
            self.load_host_cached()
        except BaseException:
            self.close()
            raise

    @property
    def activations(self) -> ActivationHooks:
        """What becomes of activations between forward and backward."""
        if self.device_parts is not None:
            return self.device_parts.activation_offload
        return self.activation_spill or ActivationHooks()

    # -- what stays in host memory ----------------------------------------------------------------

    def load_host_cached(self, *, trained: bool = False) -> None:
        """Fill the host cache from the committed generation."""
        self._checksums.clear()
        self.host_cache.load(trained=trained)

    def commit_uncommitted(self) -> None:
        """Commit the last step if it has ended without a commit. The lanes must be idle."""
        if self.steps.uncommitted is not None:
            self.host_cache.write_back()
            self._store.commit(self.steps.uncommitted)
            self.steps.uncommitted = None

    def close(self) -> None:
        if self.activation_spill is not None:
            self.activation_spill.close()

    # -- the ssd lane -----------------------------------------------------------------------------

    def submit(self, action: Action) -> list[Ticket]:
        """Submit the I/O of an ssd action.

        If a request is refused, the requests before it are completed first.
        """
        tickets: list[Ticket] = []
        try:
            for ticket in self._RUN[action.kind](self, action) or ():
                tickets.append(ticket)
        except BaseException:
            with suppress(LohanError):
                self._wait(action, tickets)
            raise
        return tickets

    def complete(self, action: Action, tickets: list[Ticket]) -> None:
        """Wait for the I/O of an ssd action, and do what follows from it."""
        self._wait(action, tickets)
        finish = self._FINISH.get(action.kind)
        if finish is not None:
            finish(self, action)

    def _wait(self, action: Action, tickets: list[Ticket]) -> None:
        if action.kind in (Op.SPILL_ACTIVATIONS, Op.FETCH_ACTIVATIONS):
            assert self.activation_spill is not None
            self.activation_spill.wait(tickets)
        else:
            self._store.wait_all(tickets)

    def _read_weights(self, action: Action) -> Iterable[Ticket]:
        return self.slots.read(self._groups[action.index], action.at[0])

    def _read_state(self, action: Action) -> Iterable[Ticket]:
        yield self._ring.read(self._groups[action.index], action.chunk, action.at[0])

    def _write(self, action: Action) -> Iterable[Ticket]:
        number, chunk = action.index, action.chunk
        group, known = self._groups[number], self._checksums.pop((number, chunk), None)
        state, weights = (None, None) if known is None else (known.state, known.weights)
        yield self._ring.write(group, chunk, action.at[0], crc=state)
        yield self.slots.write(group, chunk, action.at[1], crc=weights)

    def _spill_gradients(self, action: Action) -> Iterable[Ticket]:
        assert self._gradient_spill is not None
        grads = self.pending.on_host.get(action.index, {})  # none: no use of it got a gradient
        yield self._gradient_spill.write(action.index, action.chunk, action.at[0], grads)

    def _gradients_spilled(self, action: Action) -> None:
        if self._is_last(action):
            self.pending.release(action.index)

    def _fetch_gradients(self, action: Action) -> Iterable[Ticket]:
        assert self._gradient_spill is not None
        yield self._gradient_spill.read(action.index, action.chunk, action.at[0])

    def _spill_activations(self, action: Action) -> Iterable[Ticket]:
        assert self.activation_spill is not None
        return self.activation_spill.write(action.index, action.at[0])

    def _activations_spilled(self, action: Action) -> None:
        assert self.activation_spill is not None
        self.activation_spill.written(action.index)

    def _fetch_activations(self, action: Action) -> Iterable[Ticket]:
        assert self.activation_spill is not None
        return self.activation_spill.read(action.index, action.at[0])

    def _end_step(self, action: Action) -> None:
        step = self.steps.ending.popleft()
        if step.commits:
            self._store.commit(step.meta)
        else:
            self._store.check_present()
        self.steps.ended(step)

    # -- the other lanes --------------------------------------------------------------------------

    def run(self, action: Action, scalars: StepScalars) -> None:
        """Run an action of a link, of the net lane or of the optimizer lane from start to end."""
        if self.device_parts is not None and action.lane != "optimizer":
            self.device_parts.run(action)
        else:
            self._RUN[action.kind](self, action, scalars)

    def _sum_squares(self, action: Action, _: StepScalars) -> None:
        number = action.index
        if number not in self.pending.squares:  # over ranks, others have taken them
            self.pending.squares[number] = sum_of_squares(self.pending.on_host.get(number, {}))

    def _is_last(self, action: Action) -> bool:
        return action.chunk == len(self._chunks[action.index]) - 1

    def _update(self, action: Action, scalars: StepScalars) -> None:
        number, group = action.index, self._groups[action.index]
        grads = self.pending.on_host.get(number, {})
        self.steps.unfinished = True
        chunk = self._chunks[number][action.chunk]
        buffer, slot, *staged = action.at

        def grad_of(own_range: TensorRange) -> torch.Tensor | None:
            if staged:
                spill, count = self._gradient_spill, own_range.stop - own_range.start
                assert spill is not None
                return spill.grad(number, staged[0], own_range.tensor, own_range.at, count)
            grad = grads.get(own_range.tensor)
            return None if grad is None else grad.view(-1)[own_range.start : own_range.stop]

        checksums = update_chunk(
            group,
            chunk,
            weights=self.slots.flat(group, slot)[chunk.start : chunk.stop],
            state=self._ring.part(group, action.chunk, buffer).tensor(torch.uint8),
            grad_of=grad_of,
            state_format=self._state_format,
            scalars=scalars,
        )
        if not group.resident:  # the user's code may change those before they are written
            self._checksums[number, action.chunk] = checksums
        if self._is_last(action):
            self.pending.release(number)

    # The branch of each operation; DeviceOperations has those of a device. Those of the ssd lane
    # return the tickets of their requests.
    _RUN: ClassVar[dict[str, Callable[..., Any]]] = {
        Op.READ_WEIGHTS: _read_weights,
        Op.READ_STATE: _read_state,
        Op.WRITE: _write,
        Op.SPILL_GRADIENTS: _spill_gradients,
        Op.FETCH_GRADIENTS: _fetch_gradients,
        Op.SPILL_ACTIVATIONS: _spill_activations,
        Op.FETCH_ACTIVATIONS: _fetch_activations,
        Op.END_STEP: lambda runner, action: (),
        Op.SUM_SQUARES: _sum_squares,
        Op.UPDATE: _update,
    }
    # What follows when the requests of an ssd action have completed.
    _FINISH: ClassVar[dict[str, Callable[[ActionRunner, Action], None]]] = {
        Op.SPILL_GRADIENTS: _gradients_spilled,
        Op.SPILL_ACTIVATIONS: _activations_spilled,
        Op.END_STEP: _end_step,
    }

    # -- steps that are rolled back ---------------------------------------------------------------

    def undo_updates(self) -> None:
        """Return to the committed state; the lanes are idle. Kept gradients are used once more."""
        self.steps.current.keeps_gradients = self.steps.unfinished = False
        self.load_host_cached(trained=True)

    def forget(self) -> None:
        """Discard all gradients and activations that were handed over, after an error."""
        self.pending.clear()
        if self.activation_spill is not None:
            self.activation_spill.forget()
        if self.device_parts is not None:
            self.device_parts.activation_offload.forget()


def _activation_spill(
    blocks: Blocks, plan: Plan, store: Store, pool: HostPool
) -> ActivationSpill | None:
    dirs = activation_dirs(store.dirs)
    remove_unfinished(dirs)  # what a killed session could not give back; the store itself is locked
    if not plan.spilled_sites:
        return None
    numbers = {site.name: number for number, site in enumerate(blocks.sites)}
    sizes = {
        numbers[name]: size
        for name, size in zip(plan.spilled_sites, plan.spilled_site_bytes, strict=True)
    }
    return ActivationSpill(dirs, pool, sizes, buffers=plan.act_buffers)
