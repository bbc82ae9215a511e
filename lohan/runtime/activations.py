"""What a block call leaves behind in forward, and how backward takes it up again.

A call keeps its tensor inputs, the layout of its arguments, and the random state before each
micro-batch slice. Recomputation therefore repeats the forward exactly, dropout included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lohan.errors import ModelError


@dataclass(frozen=True)
class Shape:
    """A tensor that is elsewhere."""

    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Shape:
        return cls(tensor.shape, tensor.dtype)

    @property
    def numel(self) -> int:
        return self.shape.numel()


class SavedCall:
    """Inputs of one block call: save on construction, `restore` slice by slice in backward."""

    def __init__(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.name = name
        self._leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self._where = [i for i, leaf in enumerate(self._leaves) if isinstance(leaf, torch.Tensor)]
        self.tensors: list[torch.Tensor] = [self._leaves[i] for i in self._where]
        self.wants_grad = [t.requires_grad for t in self.tensors]
        self.rng: list[torch.Tensor] = []
        self.kept: list[Any] = []  # results of each slice, where the plan keeps any
        self.away: list[Shape] | None = None  # what is on SSD: inputs, then kept results
        for i in self._where:
            self._leaves[i] = None
        first = next((t for t in self.tensors if t.ndim >= 2), None)
        self.batch = first.shape[0] if first is not None else 1

    def detach(self) -> None:
        self.tensors = [t.detach() for t in self.tensors]

    def go_away(self) -> None:
        """Gives up what was copied elsewhere: inputs that take a gradient, and kept results."""
        self.away = []
        for number, wants in enumerate(self.wants_grad):
            if wants:
                self.away.append(Shape.of(self.tensors[number]))
                self.tensors[number] = self.tensors[number].new_empty(0)
        for kept in self.kept:
            if kept is not None:
                self.away.extend(map(Shape.of, kept.export()))

    def come_back(self, tensors: Sequence[torch.Tensor]) -> None:
        """Takes equal tensors in the order in which they went away."""
        coming = iter(tensors)
        for number, wants in enumerate(self.wants_grad):
            if wants:
                self.tensors[number] = next(coming)
        for kept in self.kept:
            if kept is not None:
                kept.adopt([next(coming) for _ in range(kept.count)])
        self.away = None

    def slices(self, micro_batch: int | None) -> list[slice]:
        step = micro_batch or self.batch
        return [slice(a, min(a + step, self.batch)) for a in range(0, self.batch, step)]

    def sliced(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has the batch dimension. Vectors never do: positions, timesteps and
        the like are passed whole."""
        return tensor.ndim >= 2 and tensor.shape[0] == self.batch

    def restore(
        self, part: slice, *, grad: bool
    ) -> tuple[list[torch.Tensor], tuple[Any, ...], dict[str, Any]]:
        """Tensors, args and kwargs of one slice; with `grad`, fresh leaves for backward."""
        whole = part == slice(0, self.batch)
        tensors = []
        for tensor, wants in zip(self.tensors, self.wants_grad, strict=True):
            piece = tensor if whole or not self.sliced(tensor) else tensor[part]
            tensors.append(piece.detach().requires_grad_(grad and wants))
        leaves = list(self._leaves)
        for i, tensor in zip(self._where, tensors, strict=True):
            leaves[i] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return tensors, args, kwargs

    def check_untouched(self, versions: Sequence[int]) -> None:
        for tensor, version in zip(self.tensors, versions, strict=True):
            if tensor._version != version:
                raise ModelError(
                    f"block {self.name} changes its input in place, so it cannot be recomputed; "
                    "make the operation out of place"
                )

    def versions(self) -> list[int]:
        return [t._version for t in self.tensors]


class Gathered:
    """Joins per-slice tensors of one position along the batch dimension, without a second copy."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self.value: torch.Tensor | None = None

    def put(self, part: slice, piece: torch.Tensor) -> None:
        if part == slice(0, self._batch):
            self.value = piece
            return
        if self.value is None:
            self.value = piece.new_empty((self._batch, *piece.shape[1:]))
        self.value[part] = piece

    def add(self, piece: torch.Tensor) -> None:
        self.value = piece if self.value is None else self.value.add_(piece)
