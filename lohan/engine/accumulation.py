"""Gradients added up over several backward calls, until one step takes all of them.

They are sums in fp32: in host memory if the budget has room for those of the whole model, otherwise
in a file without a name next to the store, read and written tensor by tensor.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np
import torch

from lohan.engine.buffers import HostPool
from lohan.errors import BudgetError, StorageIOError
from lohan.model.layout import FlatGroup
from lohan.model.state import FLOAT
from lohan.util.units import format_bytes

OWNER = "accumulated gradients"


class Accumulated:
    """Sums by number of group and index of tensor."""

    def __init__(self, groups: Sequence[FlatGroup], pool: HostPool, folder: Path) -> None:
        self._groups = groups
        self._sums: dict[int, dict[int, torch.Tensor]] = {}
        self._file: GradientFile | None = None
        size = sum(group.numel for group in groups if not group.frozen) * FLOAT
        try:
            pool.reserve(OWNER, size)
            self._pool, self._reserved = pool, size
        except BudgetError:
            self._file, self._reserved = GradientFile(groups, folder, size), 0

    def add(self, number: int, grads: Mapping[int, torch.Tensor]) -> None:
        if self._file is not None:
            self._file.add(number, grads)
            return
        sums = self._sums.setdefault(number, {})
        for index, grad in grads.items():
            if index in sums:
                sums[index].add_(grad.to("cpu", torch.float32))
            else:
                sums[index] = grad.to("cpu", torch.float32).contiguous()

    def numbers(self) -> list[int]:
        return sorted(self._sums if self._file is None else self._file.present)

    def take(self, number: int) -> Mapping[int, torch.Tensor]:
        if self._file is None:
            return self._sums.pop(number)
        return self._file.take(number)

    def close(self) -> None:
        """Release the sums. Values that were taken from a file can still be read."""
        self._sums.clear()
        if self._reserved:
            self._pool.unreserve(OWNER, self._reserved)
            self._reserved = 0


class GradientFile:
    """Gradients of all groups at the offsets of their parameters."""

    def __init__(self, groups: Sequence[FlatGroup], folder: Path, size: int) -> None:
        self._groups, self._folder = groups, folder
        self.present: dict[int, set[int]] = {}
        self._starts: dict[int, int] = {}
        at = 0
        for number, group in enumerate(groups):
            if not group.frozen:
                self._starts[number], at = at, at + group.numel * FLOAT
        try:
            self._file: IO[bytes] = TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
            os.posix_fallocate(self._file.fileno(), 0, max(size, 1))
        except OSError as error:
            raise StorageIOError(
                f"{folder}: no file of {format_bytes(size)} for gradients that are added up over "
                f"several backward calls ({error.strerror}); free space there, or run the batches "
                "as one: it is cut into micro-batches, and needs no room for gradients"
            ) from error

    def add(self, number: int, grads: Mapping[int, torch.Tensor]) -> None:
        there = self.present.setdefault(number, set())
        for index, grad in grads.items():
            values = grad.to("cpu", torch.float32)
            if index in there:
                values = self.read(number, index).view(values.shape).add_(values)
            self._move(os.pwritev, number, index, values.contiguous())
            there.add(index)

    def read(self, number: int, index: int) -> torch.Tensor:
        values = torch.empty(self._groups[number].tensors[index].shape, dtype=torch.float32)
        self._move(os.preadv, number, index, values)
        return values

    def take(self, number: int) -> Mapping[int, torch.Tensor]:
        return _InFile(self, number, frozenset(self.present.pop(number)))

    def _move(self, move: Any, number: int, index: int, values: torch.Tensor) -> None:
        start = self._starts[number] + self._groups[number].tensors[index].offset * FLOAT
        raw: Any = values.reshape(-1).numpy().view(np.uint8)
        rest = memoryview(raw)
        while rest:
            try:
                count = move(self._file.fileno(), [rest], start)
            except OSError as error:
                raise self._failed(str(error.strerror)) from error
            if count == 0:
                raise self._failed("the file ends")
            rest, start = rest[count:], start + count

    def _failed(self, why: str) -> StorageIOError:
        return StorageIOError(
            f"{self._folder}: gradients that are added up over several backward calls cannot be "
            f"moved: {why}; check the drive, then resume from the last step"
        )


class _InFile(Mapping[int, torch.Tensor]):
    """Gradients of one group, read when they are asked for; the last one stays."""

    def __init__(self, file: GradientFile, number: int, there: frozenset[int]) -> None:
        self._file, self._number, self._there = file, number, there
        self._last: tuple[int, torch.Tensor] | None = None

    def __getitem__(self, index: int) -> torch.Tensor:
        if index not in self._there:
            raise KeyError(index)
        if self._last is None or self._last[0] != index:
            self._last = None
            self._last = index, self._file.read(self._number, index)
        return self._last[1]

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._there))

    def __len__(self) -> int:
        return len(self._there)
