"""Optimizer state in a ring of host buffers, and AdamW on it, chunk by chunk.

Weights are updated in the slot where backward used them, so they are not read a second time.
A tensor that got no gradient this step keeps weights and state as they are, as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from lohan import _core
from lohan.layout import Group
from lohan.optim import AdamW
from lohan.runtime.pool import HostBuffer, HostPool
from lohan.state import Chunk, Mode, Piece, chunks, state_key
from lohan.storage.flight import Ticket
from lohan.storage.store import Store
from lohan.tensors import split

Grads = Mapping[int, torch.Tensor]  # index of the tensor in its group -> gradient


@dataclass(frozen=True)
class StepScalars:
    """The numbers of one step that every update shares."""

    lr: float
    update: int  # Adam's step count, from 1
    grad_scale: float
    missed: Mapping[str, int]  # updates that single parameters have missed, by name


class StateRing:
    """Owner of the state buffers: a ring that chunks pass through, then one per pinned chunk."""

    def __init__(
        self, store: Store, pool: HostPool, *, ring: int, pinned: list[tuple[Group, int]],
        largest: int, mode: Mode, chunk_params: int,
    ) -> None:  # fmt: skip
        self._store, self._mode, self._chunk_params = store, mode, chunk_params
        size = min(chunk_params, largest) * mode.state_bytes
        self._buffers = [pool.allocate("optimizer state ring", size) for _ in range(ring)]
        self._buffers += [
            pool.allocate("pinned optimizer state", self._size(group, chunk))
            for group, chunk in pinned
        ]

    def _size(self, group: Group, chunk: int) -> int:
        cut = chunks(group, self._chunk_params)[chunk]
        return (cut.stop - cut.start) * self._mode.state_bytes

    def part(self, group: Group, chunk: int, buffer: int) -> HostBuffer:
        return self._buffers[buffer].part(0, self._size(group, chunk))

    def read(self, group: Group, chunk: int, buffer: int) -> Ticket:
        place = self.part(group, chunk, buffer).bytes
        return self._store.read(state_key(group), chunk, place, fresh=None)

    def write(self, group: Group, chunk: int, buffer: int) -> Ticket:
        return self._store.write(state_key(group), chunk, self.part(group, chunk, buffer).bytes)


def update_chunk(
    group: Group, chunk: Chunk, *, weights: torch.Tensor, state: torch.Tensor,
    grad_of: Callable[[Piece], torch.Tensor | None],
    adamw: AdamW, mode: Mode, scalars: StepScalars,
) -> None:  # fmt: skip
    """AdamW on one chunk, in place: `weights` are its weights, `state` its bytes."""
    arrays = split(mode, state)
    for piece in chunk.pieces:
        grad = grad_of(piece)
        if grad is not None:
            spec = group.tensors[piece.tensor]
            decay = adamw.weight_decay if spec.decay else 0.0
            step = scalars.update - scalars.missed.get(spec.name, 0)
            _adam(
                piece, weights, arrays, grad, decay=decay, step=step, adamw=adamw, mode=mode,
                s=scalars,
            )  # fmt: skip


def _adam(
    piece: Piece, weights: torch.Tensor, arrays: dict[str, torch.Tensor], grad: torch.Tensor, *,
    decay: float, step: int, adamw: AdamW, mode: Mode, s: StepScalars,
) -> None:  # fmt: skip
    span = slice(piece.at, piece.at + piece.stop - piece.start)
    w, m, v = weights[span], arrays["m"][span], arrays["v"][span]
    beta1, beta2 = adamw.betas
    kernels: dict[str, tuple[Callable[..., None], tuple[str, ...]]] = {
        "fp32": (_core.adamw_fp32, ()),
        "bf16": (_core.adamw_bf16, ("remainder",)),
        "fp16": (_core.adamw_fp16, ("master",)),
    }
    kernel, extra = kernels[mode.name]
    kernel(
        w, *(arrays[name][span] for name in extra), m, v, grad, lr=s.lr, beta1=beta1, beta2=beta2,
        eps=adamw.eps, weight_decay=decay, step=step, grad_scale=s.grad_scale,
    )  # fmt: skip
