"""What each action of a schedule does: the only place where tokens become I/O and arithmetic."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from lohan.engine.buffers import (
    DeviceSlots,
    Grads,
    Landing,
    Spill,
    StateRing,
    StepScalars,
    WeightSlots,
    sum_of_squares,
    update_chunk,
)
from lohan.engine.collectives import GradientReducer
from lohan.engine.lanes import wait_all
from lohan.engine.offload import ActivationSpill, DeviceActivationOffload
from lohan.errors import LohanError
from lohan.model.layout import Group
from lohan.model.state import Piece, StateFormat, chunks
from lohan.optim import Optimizer
from lohan.schedule.actions import Action
from lohan.store.store import Store
from lohan.store.transfers import Ticket


@dataclass
class Handover:
    """Gradients of groups whose last use is over, until their updates are done."""

    grads: dict[int, Grads] = field(default_factory=dict)
    on_device: dict[int, Grads] = field(default_factory=dict)  # on their way to host memory
    squares: dict[int, float] = field(default_factory=dict)  # of held groups


@dataclass(frozen=True)
class DeviceParts:
    """What a device with a memory of its own adds to a step."""

    slots: DeviceSlots
    landing: Landing
    activation_offload: DeviceActivationOffload
    place: torch.device
    exchange: GradientReducer | None = None  # with other ranks


class ActionRunner:
    """Binds actions to store, slots, ring and kernels. Called by the lanes."""

    def __init__(
        self, groups: tuple[Group, ...], *, store: Store, slots: WeightSlots, ring: StateRing,
        spill: Spill | None, activation_spill: ActivationSpill | None, optimizer: Optimizer,
        state_format: StateFormat, chunk_params: int, device: DeviceParts | None = None,
    ) -> None:  # fmt: skip
        self.activation_spill, self.device = activation_spill, device
        self._groups, self._store, self._slots, self._ring = groups, store, slots, ring
        self._spill, self._optimizer, self._state_format = spill, optimizer, state_format
        self._chunks = [chunks(group, chunk_params) for group in groups]
        self.handover = Handover()
        self.metas: deque[dict[str, Any]] = deque()  # one for each commit to come
        self.committed: deque[dict[str, Any]] = deque()
        self.unfinished = False  # some updates of a step that is not committed have run

    def submit(self, action: Action) -> list[Ticket]:
        """Submits the I/O of an ssd action; if one is refused, those before it are completed."""
        tickets: list[Ticket] = []
        try:
            for ticket in self._tickets(action):
                tickets.append(ticket)
        except BaseException:
            with suppress(LohanError):
                self._wait(action, tickets)
            raise
        return tickets

    def _wait(self, action: Action, tickets: list[Ticket]) -> None:
        if action.kind in "OI":
            assert self.activation_spill is not None
            self.activation_spill.wait(tickets)
        else:
            wait_all(self._store, tickets)

    def _tickets(self, action: Action) -> Iterator[Ticket]:
        number, chunk = action.index, action.chunk
        if action.kind == "R":
            yield from self._slots.read(self._groups[number], action.at[0])
        elif action.kind == "S":
            yield self._ring.read(self._groups[number], chunk, action.at[0])
        elif action.kind == "W":
            yield self._ring.write(self._groups[number], chunk, action.at[0])
            yield self._slots.write(self._groups[number], chunk, action.at[1])
        elif action.kind == "P":
            assert self._spill is not None
            grads = self.handover.grads.get(number, {})  # none: no use of it got a gradient
            yield self._spill.put(number, chunk, action.at[0], grads)
        elif action.kind == "G":
            assert self._spill is not None
            yield self._spill.get(number, chunk, action.at[0])
        elif action.kind in "OI":
            assert self.activation_spill is not None
            move = self.activation_spill.put if action.kind == "O" else self.activation_spill.get
            yield from move(number, action.at[0])
        elif action.kind != "C":
            raise LohanError(f"{action.token()} is not an action of the ssd lane")

    def complete(self, action: Action, tickets: list[Ticket]) -> None:
        self._wait(action, tickets)
        if action.kind == "C":
            meta = self.metas.popleft()
            self._store.commit(meta)
            self.committed.append(meta)
            self.unfinished = False
        elif action.kind == "O" and self.activation_spill is not None:
            self.activation_spill.was_put(action.index)
        elif action.kind == "P" and action.chunk == len(self._chunks[action.index]) - 1:
            self._let_go(action.index)

    def copy(self, action: Action) -> None:
        """A copy over a link, or an exchange between ranks, from its start to its end."""
        assert self.device is not None
        number = action.index
        if action.kind == "L":
            weights = self._slots.flat(self._groups[number], action.at[0])
            self.device.slots.load(action.at[1], weights)
        elif action.kind == "A":
            self.device.slots.gather(action.at[0], self._groups[number].numel)
        elif action.kind == "X":
            self._exchange(number)
        elif action.kind == "D":
            grads = self.handover.on_device.get(number)
            if grads is not None:  # held here until they have arrived
                landed = self.device.landing.land(number, self._groups[number], grads)
                self.handover.grads[number] = landed
                del self.handover.on_device[number]
        elif action.kind == "K":
            self.device.activation_offload.left(number)
        elif action.kind == "V":
            self.device.activation_offload.bring(number, action.at)
        else:
            raise LohanError(f"{action.token()} is not an action of the links")

    def _exchange(self, number: int) -> None:
        """Whole gradients of this rank become the sum of its piece. Ranks without any take part."""
        assert self.device is not None and self.device.exchange is not None
        grads = dict(self.handover.on_device.pop(number, {}))
        place = self.device.place
        if summed := self.device.exchange.reduce_scatter(number, grads, place):
            self.handover.on_device[number] = summed

    def _let_go(self, number: int) -> None:
        """The gradients of a group are used, or put away."""
        self.handover.grads.pop(number, None)
        if self.device is not None:
            self.device.landing.give_back(number)

    def update(self, action: Action, scalars: StepScalars) -> None:
        """The arithmetic of a cpu action."""
        number, group = action.index, self._groups[action.index]
        grads = self.handover.grads.get(number, {})
        if action.kind == "H":
            self.handover.squares[number] = sum_of_squares(dict(grads))
            return
        self.unfinished = True
        chunk = self._chunks[number][action.chunk]
        buffer, slot, *staged = action.at

        def grad_of(piece: Piece) -> torch.Tensor | None:
            if staged:
                assert self._spill is not None
                count = piece.stop - piece.start
                return self._spill.grad(number, staged[0], piece.tensor, piece.at, count)
            grad = grads.get(piece.tensor)
            return None if grad is None else grad.view(-1)[piece.start : piece.stop]

        update_chunk(
            group, chunk, weights=self._slots.flat(group, slot)[chunk.start : chunk.stop],
            state=self._ring.part(group, action.chunk, buffer).tensor(torch.uint8),
            grad_of=grad_of, optimizer=self._optimizer, state_format=self._state_format,
            scalars=scalars,
        )  # fmt: skip
        if action.chunk == len(self._chunks[number]) - 1:
            self._let_go(number)

    def drop_gradients(self) -> None:
        """What was handed over does not count."""
        self.handover = Handover()
        if self.device is not None:
            self.device.landing.clear()

    def forget(self) -> None:
        """After an error: nothing that was handed over counts."""
        self.drop_gradients()
        self.metas.clear()
        self.unfinished = False
        if self.activation_spill is not None:
            self.activation_spill.forget()
        if self.device is not None:
            self.device.activation_offload.forget()
