"""What one slice of a block call keeps besides its inputs: results of chosen operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from lohan.capture.operations import OpKey
from lohan.errors import LohanError


@dataclass(frozen=True)
class Recipe:
    """What one slice of a block call keeps. `skip` are operations that need not run again then;
    they hold only for a call that runs exactly `ops` (empty: any)."""

    keep: frozenset[OpKey]
    skip: frozenset[OpKey] = frozenset()
    ops: tuple[str, ...] = ()


class Layout(NamedTuple):
    """A tensor without its values."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def over(self, flat: torch.Tensor) -> torch.Tensor:
        """A tensor of this layout over flat values. It is not a view to autograd."""
        made = flat.new_empty(0)
        return made.set_(flat.untyped_storage(), flat.storage_offset(), self.shape, self.stride)


@dataclass
class Result:
    """How to do without one operation: the layouts of its results, where their values are in
    `Kept.tensors` (None: nowhere, they are not needed), and the random state behind it."""

    called_with: list[Any]
    leaves: list[Any]
    spec: Any
    first: int | None
    in_place: bool
    random: tuple[torch.device, torch.Tensor] | None


@dataclass
class Kept:
    """Results of one slice of one call. `tensors` are flat and contiguous; whoever takes them with
    `export`, to another tier say, gives equal ones back with `adopt` before backward."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    lost: str = ""  # why the slice has to be recomputed in full
    ops: list[Any] = field(default_factory=list)
    results: dict[int, Result] = field(default_factory=dict)
    _versions: list[int] = field(default_factory=list)
    _sizes: list[tuple[torch.dtype, int]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.itemsize for tensor in self.tensors)

    @property
    def count(self) -> int:
        """Of the tensors that `export` gives and `adopt` takes."""
        return 0 if self.lost else len(self._sizes)

    def export(self) -> list[torch.Tensor]:
        """Hands the tensors over; none, if there is nothing that backward can use."""
        self.check()
        taken, self.tensors, self._versions = self.tensors, [], []
        return taken

    def adopt(self, tensors: Sequence[torch.Tensor]) -> None:
        """Takes tensors of the values that `export` gave."""
        found = [(tensor.dtype, tensor.numel()) for tensor in tensors]
        if found != self._sizes and not (self.lost and not tensors):
            raise LohanError(
                f"a slice keeps {len(self._sizes)} results of {self._sizes} elements and got back "
                f"{len(found)} of {found}; give back what export returned, in its order"
            )
        self.tensors, self._versions = list(tensors), []

    def release(self, why: str = "") -> None:
        self.lost = self.lost or why
        self.tensors, self._versions = [], []
        self.ops, self.results = [], {}

    def seal(self) -> None:
        """The tensors are as forward left them now, and must stay so."""
        self._versions = [tensor._version for tensor in self.tensors]
        self._sizes = [(tensor.dtype, tensor.numel()) for tensor in self.tensors]

    def check(self) -> None:
        if not self.lost and len(self.tensors) != len(self._sizes):
            raise LohanError(
                f"backward needs {len(self._sizes)} kept results and has {len(self.tensors)}; give "
                "those taken with export back with adopt"
            )
        versions = [tensor._version for tensor in self.tensors[: len(self._versions)]]
        if versions != self._versions:
            self.release("a kept result was changed in place after the block had returned it")

    def take(self, result: Result) -> list[Any]:
        """The values of an operation's results; they are no longer kept then."""
        made, position = [], result.first
        for leaf in result.leaves:
            if isinstance(leaf, Layout) and position is not None:
                flat = self.tensors[position]
                made.append(leaf.over(flat))
                self.tensors[position] = flat.new_empty(0)
                position += 1
            else:
                made.append(leaf.empty() if isinstance(leaf, Layout) else leaf)
        return made
