"""A tensor that is put together from runs of other tensors, without ever being whole in memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

ReadFlat = Callable[[str, int, int], torch.Tensor]  # name, start, stop -> flattened elements


@dataclass(frozen=True)
class Run:
    """`count` elements of a tensor from `start` on."""

    tensor: str
    start: int
    count: int


@dataclass(frozen=True)
class Assembly:
    """The runs, one after the other, are the flattened tensor."""

    shape: tuple[int, ...]
    runs: tuple[Run, ...]
    _begins: list[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        begins, at = [], 0
        for run in self.runs:
            begins.append(at)
            at += run.count
        assert at == torch.Size(self.shape).numel(), (at, self.shape)
        object.__setattr__(self, "_begins", begins)

    @property
    def sources(self) -> list[str]:
        return list(dict.fromkeys(run.tensor for run in self.runs))

    def read(self, start: int, stop: int, read_flat: ReadFlat) -> torch.Tensor:
        parts = []
        number = max(0, bisect_right(self._begins, start) - 1)
        while start < stop:
            run, begin = self.runs[number], self._begins[number]
            end = min(stop, begin + run.count)
            first = run.start + start - begin
            parts.append(read_flat(run.tensor, first, first + end - start))
            start, number = end, number + 1
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty(0)


def runs_of(rows: torch.Tensor, width: int, sources: Sequence[tuple[str, int]]) -> tuple[Run, ...]:
    """From numbers of rows of `width` elements, counted through all `sources` (name, rows)."""
    flat = rows.reshape(-1).to(torch.int64)
    ends = torch.tensor([count for _, count in sources]).cumsum(0)
    owner = torch.bucketize(flat, ends, right=True)
    breaks = (flat[1:] != flat[:-1] + 1) | (owner[1:] != owner[:-1])
    firsts = [0, *(breaks.nonzero().squeeze(1) + 1).tolist()] if len(flat) else []
    found = []
    for first, last in zip(firsts, [*firsts[1:], len(flat)], strict=False):
        source = int(owner[first])
        begin = int(flat[first]) - (int(ends[source - 1]) if source else 0)
        found.append(Run(sources[source][0], begin * width, (last - first) * width))
    return tuple(found)
