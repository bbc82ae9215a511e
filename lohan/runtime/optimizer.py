"""The update of a group: state chunks stream through a host buffer, Adam runs in place.

Weights are updated in the slot where backward used them, so they are not read a second time.
A tensor that got no gradient this step keeps weights and state as they are, as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lohan import _core
from lohan.blocks import Group
from lohan.optim import AdamW
from lohan.runtime.pool import HostPool
from lohan.state import Chunk, Mode, Piece, chunks, state_key, weight_key
from lohan.storage.store import Store

Grads = Mapping[int, torch.Tensor]  # index of the tensor in its group -> gradient


@dataclass(frozen=True)
class StepScalars:
    """The numbers of one step that every update shares."""

    lr: float
    update: int  # Adam's step count, from 1
    grad_scale: float


class Updater:
    """Owner of the state buffer; applies AdamW to groups, chunk by chunk."""

    def __init__(
        self, store: Store, pool: HostPool, *, adamw: AdamW, mode: Mode, chunk_params: int
    ) -> None:
        self._store = store
        self._adamw = adamw
        self._mode = mode
        self._chunk_params = chunk_params
        self._buffer = pool.allocate("optimizer state", chunk_params * mode.state_bytes)

    def update(
        self, group: Group, weights: torch.Tensor, grads: Grads, scalars: StepScalars
    ) -> None:
        """Reads, updates and writes state and weights of `group`; `weights` change in place."""
        for chunk in chunks(group, self._chunk_params):
            size = (chunk.stop - chunk.start) * self._mode.state_bytes
            state = self._buffer.part(0, size)
            self._store.wait(self._store.read(state_key(group), chunk.index, state.bytes))
            part = weights[chunk.start : chunk.stop]
            self._apply(group, chunk, part, state.tensor(torch.uint8), grads, scalars)
            written = [
                self._store.write(state_key(group), chunk.index, state.bytes),
                self._store.write(
                    weight_key(group), chunk.index, part.view(torch.uint8).numpy()
                ),
            ]  # fmt: skip
            for ticket in written:
                self._store.wait(ticket)

    def _apply(
        self, group: Group, chunk: Chunk, weights: torch.Tensor, state: torch.Tensor,
        grads: Grads, scalars: StepScalars,
    ) -> None:  # fmt: skip
        arrays = self._mode.split(state)
        for piece in chunk.pieces:
            grad = grads.get(piece.tensor)
            if grad is None:
                continue
            decay = self._adamw.weight_decay if group.tensors[piece.tensor].decay else 0.0
            self._adam(piece, weights, arrays, grad, decay, scalars)

    def _adam(
        self, piece: Piece, weights: torch.Tensor, arrays: dict[str, torch.Tensor],
        grad: torch.Tensor, decay: float, scalars: StepScalars,
    ) -> None:  # fmt: skip
        span = slice(piece.at, piece.at + piece.stop - piece.start)
        part = {name: array[span] for name, array in arrays.items()}
        g = grad.reshape(-1)[piece.start : piece.stop]
        settings = {
            "lr": scalars.lr,
            "beta1": self._adamw.betas[0],
            "beta2": self._adamw.betas[1],
            "eps": self._adamw.eps,
            "weight_decay": decay,
            "step": scalars.update,
            "grad_scale": scalars.grad_scale,
        }
        if self._mode.name == "fp32":
            _core.adamw_fp32(weights[span], part["m"], part["v"], g, **settings)
        elif self._mode.name == "bf16":
            _core.adamw_bf16(
                weights[span], part["remainder"], part["m"], part["v"], g, **settings
            )  # fmt: skip
        else:
            _core.adamw_fp16(
                weights[span], part["master"], part["m"], part["v"], g, **settings
            )  # fmt: skip
