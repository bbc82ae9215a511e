"""What each action of a schedule does: the only place where tokens become I/O and arithmetic."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from lohan.blocks import Group
from lohan.errors import LohanError
from lohan.optim import AdamW
from lohan.runtime.gradients import sum_of_squares
from lohan.runtime.optimizer import Grads, StateRing, StepScalars, update_chunk
from lohan.runtime.spill import Spill
from lohan.runtime.weights import WeightSlots
from lohan.schedule import Action
from lohan.state import Mode, Piece, chunks
from lohan.storage.flight import Ticket
from lohan.storage.store import Store


@dataclass
class Handover:
    """Gradients of groups whose last use is over, until their updates are done."""

    grads: dict[int, Grads] = field(default_factory=dict)
    squares: dict[int, float] = field(default_factory=dict)  # of held groups


class StepWork:
    """Binds actions to store, slots, ring and kernels. Called by the lanes."""

    def __init__(
        self, groups: tuple[Group, ...], *, store: Store, slots: WeightSlots, ring: StateRing,
        spill: Spill | None, adamw: AdamW, mode: Mode, chunk_params: int,
    ) -> None:  # fmt: skip
        self._groups, self._store, self._slots, self._ring = groups, store, slots, ring
        self._spill, self._adamw, self._mode = spill, adamw, mode
        self._chunks = [chunks(group, chunk_params) for group in groups]
        self.handover = Handover()
        self.metas: deque[dict[str, Any]] = deque()  # one for each commit to come
        self.committed: deque[dict[str, Any]] = deque()

    def start(self, action: Action) -> list[Ticket]:
        """Submits the I/O of an ssd action."""
        group = self._groups[action.index] if action.index >= 0 else None
        if group is None:
            return []
        if action.kind == "R":
            return self._slots.read(group, action.at[0])
        if action.kind == "S":
            return [self._ring.read(group, action.chunk, action.at[0])]
        if action.kind == "W":
            return [
                self._ring.write(group, action.chunk, action.at[0]),
                self._slots.write(group, action.chunk, action.at[1]),
            ]
        assert self._spill is not None
        if action.kind == "P":
            grads = self.handover.grads[action.index]
            return [self._spill.put(action.index, action.chunk, action.at[0], grads)]
        if action.kind == "G":
            return [self._spill.get(action.index, action.chunk, action.at[0])]
        raise LohanError(f"{action.token()} is not an action of the ssd lane")

    def complete(self, action: Action, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            self._store.wait(ticket)
        if action.kind == "C":
            meta = self.metas.popleft()
            self._store.commit(meta)
            self.committed.append(meta)
        elif action.kind == "P" and action.chunk == len(self._chunks[action.index]) - 1:
            del self.handover.grads[action.index]

    def run(self, action: Action, scalars: StepScalars) -> None:
        """The arithmetic of a cpu action."""
        number, group = action.index, self._groups[action.index]
        grads = self.handover.grads.get(number, {})
        if action.kind == "H":
            self.handover.squares[number] = sum_of_squares(dict(grads))
            return
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
            grad_of=grad_of, adamw=self._adamw, mode=self._mode, scalars=scalars,
        )  # fmt: skip
        if action.chunk == len(self._chunks[number]) - 1:
            self.handover.grads.pop(number, None)

    def forget(self) -> None:
        """After an error: nothing that was handed over counts."""
        self.handover = Handover()
        self.metas.clear()
