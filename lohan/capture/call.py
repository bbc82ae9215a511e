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

from lohan.capture.hollow import changed_input
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


@dataclass(frozen=True)
class Cut:
    """How a call falls into slices: which of its tensors have samples in their first dimension, and
    how many rows of each output belong to one sample (0: it is the same for all of them)."""

    inputs: tuple[bool, ...] = ()
    outputs: tuple[int, ...] = ()
    whole: str = ""  # why it cannot be cut


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
        self.cut = Cut(whole="it was not asked for")
        self.buffers: Any = []  # what forward has changed, as it was
        self.ambient: Any = None  # what forward found around it
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
        step = self.batch if self.cut.whole else micro_batch or self.batch
        return [slice(a, min(a + step, self.batch)) for a in range(0, self.batch, step)]

    def restore(
        self, part: slice, *, grad: bool
    ) -> tuple[list[torch.Tensor], tuple[Any, ...], dict[str, Any]]:
        """Tensors, args and kwargs of one slice; with `grad`, fresh leaves for backward."""
        whole = part == slice(0, self.batch)
        tensors = []
        for number, (tensor, wants) in enumerate(zip(self.tensors, self.wants_grad, strict=True)):
            piece = tensor if whole or not self.cut.inputs[number] else tensor[part]
            tensors.append(piece.detach().requires_grad_(grad and wants))
        return tensors, *self.arguments(tensors)

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's arguments with these in the place of its tensors."""
        leaves = list(self._leaves)
        for i, tensor in zip(self._where, tensors, strict=True):
            leaves[i] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return args, kwargs

    def check_untouched(self, versions: Sequence[int]) -> None:
        for tensor, version in zip(self.tensors, versions, strict=True):
            if tensor._version != version:
                raise ModelError(changed_input(self.name))

    def versions(self) -> list[int]:
        return [t._version for t in self.tensors]


class Stash:
    """What becomes of a call's activations between its forward and its backward. This one leaves
    them where they are; others move them and bring them back."""

    def begin(self, site: int, call: SavedCall, places: Sequence[int]) -> None:
        """Forward begins. `places` are those that the schedule names."""

    def keep(self, site: int, call: SavedCall) -> None:
        """One more slice has run."""

    def hold(self, site: int, call: SavedCall) -> None:
        """Forward has ended."""

    def restore(self, site: int, call: SavedCall, places: Sequence[int]) -> None:
        """Backward begins and wants the inputs."""

    def restore_slice(self, site: int, call: SavedCall, number: int) -> None:
        """A slice is about to be recomputed and wants its kept results."""

    def drop_slice(self, site: int, call: SavedCall, number: int) -> None:
        """A slice's backward is given to compute."""

    def drop(self, site: int, call: SavedCall) -> None:
        """Backward has ended."""


class Gathered:
    """Joins per-slice tensors of one position along the batch dimension, without a second copy."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self.value: torch.Tensor | None = None

    def put(self, part: slice, piece: torch.Tensor, *, rows: int = 1) -> None:
        """`rows` belong to each sample."""
        if part == slice(0, self._batch):
            self.value = piece
            return
        if self.value is None:
            self.value = piece.new_empty((self._batch * rows, *piece.shape[1:]))
        self.value[part.start * rows : part.stop * rows] = piece

    def add(self, piece: torch.Tensor) -> None:
        self.value = piece if self.value is None else self.value.add_(piece)


class Output:
    """What a call returns, put together from its slices."""

    def __init__(self, call: SavedCall) -> None:
        self._batch, self._call = call.batch, call
        self._slots: list[Gathered] = []
        self._last: list[Any] = []
        self.spec: Any = None

    def put(self, part: slice, out: Any) -> None:
        self._last, self.spec = pytree.tree_flatten(out)
        self._slots = self._slots or [Gathered(self._batch) for _ in self._last]
        rows = iter(self._call.cut.outputs)
        for slot, leaf in zip(self._slots, self._last, strict=True):
            if isinstance(leaf, torch.Tensor):
                each = next(rows, 1)
                if each:
                    slot.put(part, leaf, rows=each)
                elif slot.value is None:
                    slot.value = leaf

    @property
    def leaves(self) -> list[Any]:
        return [
            leaf if slot.value is None else slot.value
            for slot, leaf in zip(self._slots, self._last, strict=True)
        ]
