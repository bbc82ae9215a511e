"""Optimizer state in a ring of host buffers, and updates of it, chunk by chunk.

Weights are updated in the slot where backward used them, so they are not read a second time.
A tensor that got no gradient this step keeps weights and state as they are, as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lohan import _core
from lohan.capture.tensors import split
from lohan.engine.pool import HostBuffer, HostPool
from lohan.model.layout import Group, TensorSpec
from lohan.model.state import EMA, Chunk, Mode, Piece, chunks, scale_of, state_key
from lohan.optim import Optimizer
from lohan.store.flight import Ticket
from lohan.store.store import Store

Grads = Mapping[int, torch.Tensor]  # index of the tensor in its group -> gradient
AVERAGED = 2**16  # parameters at a time, whose average moves
BESIDE = {"fp32": (), "bf16": ("remainder",), "fp16": ("master",)}  # what the weights lack


@dataclass(frozen=True)
class StepScalars:
    """The numbers of one step that every update shares."""

    lr: float
    update: int  # from 1
    grad_scale: float
    missed: Mapping[str, int]  # updates that single parameters have missed, by name


class StateRing:
    """Owner of the state buffers: a ring that chunks pass through, then one per pinned chunk."""

    def __init__(
        self, store: Store, pool: HostPool, *, ring: int, pinned: list[tuple[Group, int]],
        largest: int, mode: Mode, chunk_params: int,
    ) -> None:  # fmt: skip
        self._store, self._mode, self._chunk_params = store, mode, chunk_params
        size = mode.state_size(min(chunk_params, largest))
        self._buffers = [pool.allocate("optimizer state ring", size) for _ in range(ring)]
        self._buffers += [
            pool.allocate("pinned optimizer state", self._size(group, chunk))
            for group, chunk in pinned
        ]

    def _size(self, group: Group, chunk: int) -> int:
        cut = chunks(group, self._chunk_params)[chunk]
        return self._mode.state_size(cut.stop - cut.start)

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
    optimizer: Optimizer, mode: Mode, scalars: StepScalars,
) -> None:  # fmt: skip
    """One update of a chunk, in place: `weights` are its weights, `state` its bytes."""
    arrays = split(mode, state, chunk.stop - chunk.start)
    kernel: Callable[..., None] = getattr(_core, f"{optimizer.name}_{mode.name}")
    for piece in chunk.pieces:
        grad = grad_of(piece)
        if grad is None:
            continue
        spec, span = group.tensors[piece.tensor], _span(piece)
        step = scalars.update - scalars.missed.get(spec.name, 0)
        own = {a.name: arrays[a.name][_span(piece, a.per)] for a in mode.arrays}
        kernel(
            weights[span], *(own[name] for name in BESIDE[mode.name]),
            *(own[moment.name] for moment in optimizer.remembers), grad, lr=scalars.lr,
            weight_decay=optimizer.weight_decay if spec.decay else 0.0,
            grad_scale=scalars.grad_scale, **optimizer.numbers(step),
            **_rounding(spec, piece, step, own, optimizer),
        )  # fmt: skip
    if optimizer.ema:
        _average(weights, arrays, mode, optimizer.ema)


def _average(
    weights: torch.Tensor, arrays: Mapping[str, torch.Tensor], mode: Mode, decay: float
) -> None:
    """Moves the average towards the new weights. Every operation rounds once, so an element gets
    the same bits wherever its chunk is cut."""
    for start in range(0, len(weights), AVERAGED):
        span = slice(start, start + AVERAGED)
        master = weights[span]
        if mode.name == "bf16":
            master = torch.empty(len(master))
            _core.join_bf16(weights[span], arrays["remainder"][span], master)
        elif mode.name == "fp16":
            master = arrays["master"][span]
        arrays[EMA][span].mul_(decay).add_(master * (1.0 - decay))


def _span(piece: Piece, per: int = 1) -> slice:
    """Where a piece lies in an array of its chunk, `per` parameters to an element."""
    return slice(piece.at // per, -(-(piece.at + piece.stop - piece.start) // per))


def _rounding(
    spec: TensorSpec, piece: Piece, step: int, own: Mapping[str, torch.Tensor],
    optimizer: Optimizer,
) -> dict[str, Any]:  # fmt: skip
    """What the kernel needs to round moments: by chance, and the same for an element and a step
    however its tensor is cut."""
    if optimizer.moments == "fp32":
        return {}
    scales = [own[scale_of(m)] for m in optimizer.remembers] if optimizer.moments == "int8" else []
    seed = _core.crc32c(spec.name.encode(), step % 2**32)
    return {"scales": scales, "seed": seed, "first": (spec.begin + piece.start) % 2**32}
