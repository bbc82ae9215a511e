"""The implementation of the actions of all lanes except compute: I/O, copies and updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from lohan.capture.recompute import ActivationHooks
from lohan.device.accelerator import read_back
from lohan.device.out_of_memory import is_out_of_memory
from lohan.engine.buffers import (
    ChunkChecksums,
    DeviceSlots,
    HostCache,
    HostPool,
    StateRing,
    StepScalars,
    Update,
    WeightSlots,
    replay_chunk,
    update_chunk,
)
from lohan.engine.gradient_transport import (
    GradientOffload,
    GradientSpill,
    GroupGrads,
)
from lohan.engine.gradients import PendingGradients, StepCollectives, sum_of_squares
from lohan.engine.logged import LoggedGradients
from lohan.engine.offload import ActivationSpill, DeviceActivationOffload
from lohan.engine.step import Steps
from lohan.errors import BudgetError, LohanError
from lohan.model.layout import Blocks, FlatGroup
from lohan.model.plan import Plan
from lohan.model.state import (
    STATE_FORMATS,
    Chunk,
    StateFormat,
    TensorRange,
    chunks,
    state_format_of,
)
from lohan.planner.memory import WAITING
from lohan.schedule.actions import DEVICE_BUFFERS, Action, ScheduleSpec
from lohan.schedule.ops import Op
from lohan.schedule.placement import needs_all_gradients
from lohan.store.admin import remove_unfinished
from lohan.store.files import activation_dirs
from lohan.store.store import Status, Store
from lohan.store.transfers import Ticket
from lohan.util.units import format_bytes

if TYPE_CHECKING:
    from lohan.engine.context import PlanContext


# -- The operations of a device that has its own memory --------------------------------------------


class DeviceOperations:
    """The owner of weight slots on the device, and of transfers of gradients and activations."""

    def __init__(
        self,
        context: PlanContext,
        plan: Plan,
        spec: ScheduleSpec,
        *,
        groups: Sequence[FlatGroup],
        host_slots: WeightSlots,
        pending: PendingGradients,
        collectives: StepCollectives,
        activation_spill: ActivationSpill | None,
    ) -> None:
        device = context.device
        self._groups, self._host_slots, self._pending = groups, host_slots, pending
        self._collectives, self._device = collectives, device
        self._needs_norm = needs_all_gradients(plan)
        self.slots = _device_slots(context, plan, spec)
        self.activation_offload = DeviceActivationOffload(
            device, sites=spec.offloaded, device_buffers=DEVICE_BUFFERS, spill=activation_spill
        )
        waiting = sum(e.bytes for e in plan.ledger if e.owner == WAITING)
        self.gradient_offload = pending.offload = GradientOffload(
            device, waiting, groups=len(context.blocks.groups)
        )

    def run(self, action: Action) -> None:
        """Run a copy over a link, or a collective, and return when it is done."""
        self._RUN[action.kind](self, action)

    def _load_weights(self, action: Action) -> None:
        weights = self._host_slots.flat(self._groups[action.index], action.at[0])
        self.slots.load(action.at[1], weights)

    def _all_gather(self, action: Action) -> None:
        self.slots.gather(action.at[0], self._groups[action.index].numel)

    def _reduce_scatter(self, action: Action) -> None:
        number, pending = action.index, self._pending
        # Ranks without a gradient take part in the collective with an empty dict.
        whole = dict(pending.on_device.pop(number, {}))
        shard = self._collectives.reduce_scatter(number, whole, self._device)
        if self._needs_norm:
            pending.squares[number] = self._squares_of(shard)
        if shard:
            pending.on_device[number] = shard

    def _squares_of(self, shard: GroupGrads) -> float:
        """Return the sum of squares of this rank's shard, computed on the net lane."""
        squares = self.gradient_offload.sum_squares(shard)
        if squares is not None:
            return float(read_back(squares))
        return sum_of_squares({index: grad.cpu() for index, grad in shard.items()})

    def _offload_gradients(self, action: Action) -> None:
        number, pending = action.index, self._pending
        grads = pending.on_device.get(number)
        if grads is not None:  # Keep the gradients alive until their copies have arrived.
            squares = pending.squares_on_device.pop(number, None)
            pending.on_host[number] = self.gradient_offload.offload(
                number, self._groups[number], grads, squares=squares
            )
            del pending.on_device[number]

    def _offload_activations(self, action: Action) -> None:
        self.activation_offload.evict(action.index)

    def _restore_activations(self, action: Action) -> None:
        self.activation_offload.bring_back(action.index, action.at)

    _RUN: ClassVar[dict[str, Callable[[DeviceOperations, Action], None]]] = {
        Op.LOAD_WEIGHTS: _load_weights,
        Op.ALL_GATHER: _all_gather,
        Op.REDUCE_SCATTER: _reduce_scatter,
        Op.OFFLOAD_GRADIENTS: _offload_gradients,
        Op.OFFLOAD_ACTIVATIONS: _offload_activations,
        Op.RESTORE_ACTIVATIONS: _restore_activations,
    }


def _device_slots(context: PlanContext, plan: Plan, spec: ScheduleSpec) -> DeviceSlots:
    device = context.device
    try:
        return DeviceSlots(
            device,
            groups=[group for group in context.blocks.groups if not group.resident],
            slots=spec.device_slots,
            state_format=STATE_FORMATS[plan.dtype],
            process_group=context.process_group,
        )
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise BudgetError(
            f"{device.name}: no room for {spec.device_slots} weight slots, though the plan is for "
            f"{format_bytes(plan.tier_bytes('device'))} ({str(error).splitlines()[0]}); stop "
            "other programs that use it, or lower --device-memory"
        ) from None


# -- The operations of the optimizer lane ----------------------------------------------------------


@dataclass(eq=False)
class OptimizerOperations:
    """Sums of squares and updates of chunks, and the checksums of what updates have written."""

    groups: Sequence[FlatGroup]
    chunks: Sequence[Sequence[Chunk]]  # of each group
    state_format: StateFormat
    slots: WeightSlots
    ring: StateRing
    pending: PendingGradients
    gradient_spill: GradientSpill | None
    logged: LoggedGradients | None
    steps: Steps
    # The checksums of chunks that were updated and are not yet written.
    checksums: dict[tuple[int, int], ChunkChecksums] = field(default_factory=dict)

    def run(self, action: Action, scalars: StepScalars) -> None:
        """Run H or U, and return when it is done."""
        if action.kind == Op.SUM_SQUARES:
            self._sum_squares(action.index)
        elif self.logged is not None:
            self.steps.partly_updated = True
            buffer, slot, staged = action.at
            updates = self.logged.updates(action.index, staged)
            self.replay(action.index, action.chunk, buffer, slot, updates)
        else:
            self.steps.partly_updated = True
            self._update(action, scalars)

    def _sum_squares(self, number: int) -> None:
        # With several ranks, the net lane has already summed the squares.
        if number not in self.pending.squares:
            self.pending.squares[number] = sum_of_squares(self.pending.on_host.get(number, {}))

    def _update(self, action: Action, scalars: StepScalars) -> None:
        number, group = action.index, self.groups[action.index]
        grads = self.pending.on_host.get(number, {})
        chunk = self.chunks[number][action.chunk]
        buffer, slot, *staged = action.at

        def grad_of(own_range: TensorRange) -> torch.Tensor | None:
            if staged:
                spill, count = self.gradient_spill, own_range.stop - own_range.start
                assert spill is not None
                return spill.grad(number, staged[0], own_range.tensor, own_range.at, count)
            grad = grads.get(own_range.tensor)
            return None if grad is None else grad.view(-1)[own_range.start : own_range.stop]

        checksums = update_chunk(
            group,
            chunk,
            weights=self.slots.flat(group, slot)[chunk.start : chunk.stop],
            state=self.ring.part(group, action.chunk, buffer).tensor(torch.uint8),
            grad_of=grad_of,
            state_format=self.state_format,
            scalars=scalars,
        )
        self._keep_checksums(number, action.chunk, checksums)
        if action.chunk == len(self.chunks[number]) - 1:
            self.pending.release(number)

    def replay(
        self, number: int, chunk: int, buffer: int, slot: int, updates: Sequence[Update]
    ) -> None:
        """Apply logged updates to a chunk in a state buffer, and to its weights in a slot."""
        group, cut = self.groups[number], self.chunks[number][chunk]
        checksums = replay_chunk(
            group,
            cut,
            weights=self.slots.flat(group, slot)[cut.start : cut.stop],
            state=self.ring.part(group, chunk, buffer).tensor(torch.uint8),
            updates=updates,
            state_format=self.state_format,
        )
        self._keep_checksums(number, chunk, checksums)

    def _keep_checksums(self, number: int, chunk: int, checksums: ChunkChecksums) -> None:
        # User code may change resident weights before they are written, which makes the checksums
        # invalid.
        if not self.groups[number].resident:
            self.checksums[number, chunk] = checksums


# -- The operations of the ssd lane ----------------------------------------------------------------


# Operations whose requests go to the log, if there is one.
LOG_OPERATIONS = (Op.SPILL_GRADIENTS, Op.FETCH_GRADIENTS, Op.FETCH_LOGGED)


@dataclass(eq=False)
class SsdOperations:
    """Reads and writes of weights, state, gradients and activations, and the ends of steps."""

    groups: Sequence[FlatGroup]
    spec: ScheduleSpec
    store: Store
    slots: WeightSlots
    ring: StateRing
    optimizer: OptimizerOperations
    pending: PendingGradients
    gradient_spill: GradientSpill | None
    logged: LoggedGradients | None
    activation_spill: ActivationSpill | None
    steps: Steps

    def submit(self, action: Action) -> list[Any]:
        """Submit the I/O of an ssd action, and return the tickets of its requests.

        If a request is refused, the error is raised after the requests before it have completed.
        """
        tickets: list[Any] = []
        try:
            for ticket in self._RUN[action.kind](self, action) or ():
                tickets.append(ticket)
        except BaseException:
            with suppress(LohanError):
                self._wait(action, tickets)
            raise
        return tickets

    def complete(self, action: Action, tickets: list[Any]) -> None:
        """Wait for the I/O of an ssd action, and run the code that depends on it."""
        self._wait(action, tickets)
        finish = self._FINISH.get(action.kind)
        if finish is not None:
            finish(self, action)

    def run(self, action: Action) -> None:
        """Run an action, and return when it is done."""
        self.complete(action, self.submit(action))

    def _wait(self, action: Action, tickets: list[Any]) -> None:
        if action.kind in (Op.SPILL_ACTIVATIONS, Op.FETCH_ACTIVATIONS):
            assert self.activation_spill is not None
            self.activation_spill.wait(tickets)
        elif self.logged is not None and action.kind in LOG_OPERATIONS:
            self.logged.log.wait_all(tickets)
        else:
            self.store.wait_all(tickets)

    def _read_weights(self, action: Action) -> Iterable[Ticket]:
        return self.slots.read(self.groups[action.index], action.at[0])

    def _read_state(self, action: Action) -> Iterable[Ticket]:
        yield self.ring.read(self.groups[action.index], action.chunk, action.at[0])

    def _read_base(self, action: Action) -> Iterable[Ticket]:
        group, chunk = self.groups[action.index], action.chunk
        yield self.ring.read(group, chunk, action.at[0])
        yield self.slots.read_base(group, chunk, action.at[1])

    def _read_base_weights(self, action: Action) -> Iterable[Ticket]:
        group = self.groups[action.index]
        for chunk in range(self.spec.chunks[action.index]):
            yield self.slots.read_base(group, chunk, action.at[0])

    def _write(self, action: Action) -> Iterable[Ticket]:
        number, chunk = action.index, action.chunk
        group, checksums = self.groups[number], self.optimizer.checksums.pop((number, chunk), None)
        state, weights = (None, None) if checksums is None else (checksums.state, checksums.weights)
        yield self.ring.write(group, chunk, action.at[0], crc=state)
        yield self.slots.write(group, chunk, action.at[1], crc=weights)

    def _write_weights(self, action: Action) -> Iterable[Ticket]:
        checksums = self.optimizer.checksums.pop((action.index, action.chunk))
        group, slot = self.groups[action.index], action.at[0]
        yield self.slots.write(group, action.chunk, slot, crc=checksums.weights)

    def _spill_gradients(self, action: Action) -> Iterable[Any]:
        # The dict is empty if no use of the group got a gradient.
        grads = self.pending.on_host.get(action.index, {})
        if self.logged is not None:
            yield self.logged.append(action.index, action.chunk, action.at[0], grads)
            return
        assert self.gradient_spill is not None
        yield self.gradient_spill.write(action.index, action.chunk, action.at[0], grads)

    def _gradients_spilled(self, action: Action) -> None:
        if action.chunk == self.spec.chunks[action.index] - 1:
            self.pending.release(action.index)

    def _fetch_gradients(self, action: Action) -> Iterable[Any]:
        if self.logged is not None:  # A cached chunk lacks only the last step.
            return self.logged.read(action.index, action.chunk, action.at[0], last_only=True)
        assert self.gradient_spill is not None
        return (self.gradient_spill.read(action.index, action.chunk, action.at[0]),)

    def _fetch_logged(self, action: Action) -> Iterable[Any]:
        assert self.logged is not None
        return self.logged.read(action.index, action.chunk, action.at[0])

    def _submit_end(self, _: Action) -> Iterable[Any]:
        if self.logged is not None:
            self.logged.submit_end()
        return ()

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
            self.store.commit(step.meta)
        else:
            self.store.health.check()
        self.steps.ended(step)

    # The function that submits each operation. It returns the tickets of its requests, or None.
    _RUN: ClassVar[dict[str, Callable[..., Any]]] = {
        Op.READ_WEIGHTS: _read_weights,
        Op.READ_STATE: _read_state,
        Op.READ_BASE_WEIGHTS: _read_base_weights,
        Op.READ_BASE: _read_base,
        Op.WRITE: _write,
        Op.WRITE_WEIGHTS: _write_weights,
        Op.SPILL_GRADIENTS: _spill_gradients,
        Op.FETCH_GRADIENTS: _fetch_gradients,
        Op.FETCH_LOGGED: _fetch_logged,
        Op.COMMIT_LOG: lambda ssd, _: ssd.logged.submit_commit(),
        Op.SPILL_ACTIVATIONS: _spill_activations,
        Op.FETCH_ACTIVATIONS: _fetch_activations,
        Op.END_STEP: _submit_end,
    }
    # Functions to call when the requests of an ssd action have completed.
    _FINISH: ClassVar[dict[str, Callable[..., None]]] = {
        Op.SPILL_GRADIENTS: _gradients_spilled,
        Op.SPILL_ACTIVATIONS: _activations_spilled,
        Op.END_STEP: _end_step,
        Op.COMMIT_LOG: lambda ssd, _: ssd.logged.commit(),
    }


# -- The buffers of a plan -------------------------------------------------------------------------


class ActionRunner:
    """The owner of the buffers of a plan, and the implementation of the lanes' actions."""

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
        shards, chunk_params = context.shards, plan.chunk_params
        groups = shards.groups
        self.spec, self._store = spec, store
        state_format = state_format_of(plan.dtype, plan.kind)
        self.slots = WeightSlots(
            store,
            pool,
            state_format=state_format,
            chunk_params=chunk_params,
            slots=spec.slots,
            moving=[g for n, g in enumerate(groups) if n not in spec.host_cached_weights],
            cached=[groups[n] for n in spec.host_cached_weights],
        )
        ring = StateRing(
            store,
            pool,
            state_format=state_format,
            chunk_params=chunk_params,
            ring=spec.ring,
            largest=max(g.numel for g in shards.trained),
            cached=[(groups[n], chunk) for n, chunk in spec.host_cached_state],
        )
        gradient_spill: GradientSpill | None = None
        self.logged: LoggedGradients | None = None
        if plan.log_gradients:
            self.logged = LoggedGradients(
                store,
                pool,
                groups,
                buffers=spec.ring,
                chunk_params=chunk_params,
                most_steps=plan.log_gradients,
            )
        elif plan.spilled_gradients:
            gradient_spill = GradientSpill(
                store, pool, groups, buffers=spec.ring, chunk_params=chunk_params
            )
        self.pending = PendingGradients(steps)
        self.host_cache = HostCache(spec, groups, store=store, slots=self.slots, ring=ring)
        self._optimizer = OptimizerOperations(
            groups,
            [chunks(group, chunk_params) for group in groups],
            state_format,
            slots=self.slots,
            ring=ring,
            pending=self.pending,
            gradient_spill=gradient_spill,
            logged=self.logged,
            steps=steps,
        )
        self.activation_spill = _activation_spill(context.blocks, plan, store, pool)
        self._ssd = SsdOperations(
            groups,
            spec,
            store=store,
            slots=self.slots,
            ring=ring,
            optimizer=self._optimizer,
            pending=self.pending,
            gradient_spill=gradient_spill,
            logged=self.logged,
            activation_spill=self.activation_spill,
            steps=steps,
        )
        self.device_parts: DeviceOperations | None = None
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
        """The hooks that keep, move or recompute activations between forward and backward."""
        if self.device_parts is not None:
            return self.device_parts.activation_offload
        return self.activation_spill or ActivationHooks()

    # -- the cache in host memory -----------------------------------------------------------------

    def load_host_cached(self, *, trained: bool = False) -> None:
        """Fill the host cache from the committed generation."""
        self._optimizer.checksums.clear()
        self.host_cache.load(trained=trained)

    def commit_uncommitted(self) -> None:
        """Commit the last step if it has ended without a commit.

        The caller makes sure that the lanes are idle; this is not checked.
        """
        uncommitted = self.steps.uncommitted
        if uncommitted is not None:
            if self.logged is not None:
                self.fold(uncommitted)
            else:
                self.host_cache.write_back()
                self._store.commit(uncommitted)
            self.steps.uncommitted = None

    def fold(self, meta: dict[str, Any], *, cached_is_base: bool = False) -> None:
        """Apply all logged steps to the weights and state, and commit the result as a generation.

        Cached chunks are assumed to be up to date, so they are only written. With
        `cached_is_base`, they contain the committed generation, so logged steps are applied to
        them too. Groups that are not cached pass through the first weight slot. The caller makes
        sure that the lanes are idle; this is not checked.
        """
        assert self.logged is not None
        slot_of = {n: self.spec.slots + i for i, n in enumerate(self.spec.host_cached_weights)}
        cached = {key: self.spec.ring + i for i, key in enumerate(self.spec.host_cached_state)}
        for number, count in enumerate(self.spec.chunks):
            for chunk in range(count):
                buffer, slot = cached.get((number, chunk), 0), slot_of.get(number, 0)
                if (number, chunk) not in cached:
                    self._ssd.run(Action(Op.READ_BASE, number, chunk, (buffer, slot)))
                if (number, chunk) not in cached or cached_is_base:
                    self._ssd.run(Action(Op.FETCH_LOGGED, number, chunk, (0,)))
                    updates = self.logged.updates(number, 0)
                    self._optimizer.replay(number, chunk, buffer, slot, updates)
                self._ssd.run(Action(Op.WRITE, number, chunk, (buffer, slot)))
        self._store.commit(meta)
        self.logged.folded()

    def recover_log(self) -> None:
        """After an error, apply all committed steps of the log, and commit the result.

        Call this only while the lanes are idle, and after the cache in host memory was filled from
        the committed generation. Neither is checked.
        """
        if self.logged is not None:
            self.logged.reset()
            if self.logged.log.live:
                self.fold(self._store.meta, cached_is_base=True)

    def close(self) -> None:
        if self.activation_spill is not None:
            self.activation_spill.close()
        usable = self._store.health.status in (Status.CLEAN, Status.DIRTY)
        if self.logged is not None and usable and not self.logged.log.live:
            self._store.stop_log()

    # -- the actions of the lanes -----------------------------------------------------------------

    def submit(self, action: Action) -> list[Any]:
        """Submit the I/O of an ssd action, and return the tickets of its requests."""
        return self._ssd.submit(action)

    def complete(self, action: Action, tickets: list[Any]) -> None:
        """Wait for the I/O of an ssd action, and run the code that depends on it."""
        self._ssd.complete(action, tickets)

    def run(self, action: Action, scalars: StepScalars) -> None:
        """Run an action of the h2d, d2h, net or optimizer lane, and return when it is done."""
        if action.lane == "optimizer":
            self._optimizer.run(action, scalars)
        else:
            assert self.device_parts is not None
            self.device_parts.run(action)

    # -- steps that are rolled back ---------------------------------------------------------------

    def undo_updates(self) -> None:
        """Undo the updates of the current step in memory.

        The host cache is read again from the committed generation. Gradients that were kept can be
        used again. The caller makes sure that the lanes are idle; this is not checked.
        """
        self.steps.current.keeps_gradients = self.steps.partly_updated = False
        self.load_host_cached(trained=True)

    def forget(self) -> None:
        """After an error, discard all gradients handed over to updates and all kept activations."""
        self.pending.clear()
        if self.activation_spill is not None:
            self.activation_spill.forget()
        if self.device_parts is not None:
            self.device_parts.activation_offload.forget()


def _activation_spill(
    blocks: Blocks, plan: Plan, store: Store, pool: HostPool
) -> ActivationSpill | None:
    dirs = activation_dirs(store.dirs)
    # Remove the activation stores of sessions that were killed. No running session uses them,
    # because this session holds the lock of the store.
    remove_unfinished(dirs)
    if not plan.spilled_sites:
        return None
    numbers = {site.name: number for number, site in enumerate(blocks.sites)}
    sizes = {
        numbers[name]: size
        for name, size in zip(plan.spilled_sites, plan.spilled_site_bytes, strict=True)
    }
    return ActivationSpill(dirs, pool, sizes, buffers=plan.act_buffers)
