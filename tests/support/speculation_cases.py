"""Trainings whose gradient norms cross the clipping limit in both directions."""

from __future__ import annotations

import functools
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from tests.support.delayed_runs import Result, Tuning, data, net, train, tuned

LARGE, OVERFLOW = 50.0, 1e9  # times the loss of other steps
CROSSING = (1.0, 1.0, LARGE, 1.0, 1.0, LARGE, 1.0, 1.0, 1.0, LARGE, LARGE, 1.0)
OVERFLOWING = tuple(OVERFLOW if scale == LARGE else scale for scale in CROSSING)


class Case:
    """What is computed, and the limit that its norms cross back and forth."""

    def __init__(
        self,
        kind: str = "plain",
        *,
        dtype: torch.dtype = torch.float32,
        dropout: float = 0.0,
        micro_batch: int | None = None,
        scales: tuple[float, ...] = CROSSING,
    ) -> None:
        self.kind, self.dtype, self.dropout = kind, dtype, dropout
        self.micro_batch, self.scales = micro_batch, scales

    def model(self):
        return net(self.kind, dtype=self.dtype, dropout=self.dropout)

    def data(self):
        return data(len(self.scales), kind=self.kind, dtype=self.dtype)

    @functools.cached_property
    def waiting(self) -> tuple[float, Result]:
        """The run that waits, one action after the other, and its limit."""
        if OVERFLOW in self.scales:
            return 0.0, self._waits(0.0)
        norms = list(zip(self._waits(1e9).norms, self.scales, strict=True))
        small = max(norm for norm, scale in norms if scale == 1)
        assert 2 * small < min(norm for norm, scale in norms if scale != 1)
        return 1.5 * small, self._waits(1.5 * small)

    def _waits(self, clip: float) -> Result:
        with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as place:
            tuned(patch, Tuning())
            return train(
                self.model(),
                self.data(),
                Path(place),
                clip=clip,
                overlap=False,
                micro_batch=self.micro_batch,
                scale=self.scales.__getitem__,
            )


PLAIN, TIED, SEVERAL, LLAMA = map(Case, ("plain", "tied", "several", "llama"))
DROPS = Case(dtype=torch.bfloat16, dropout=0.3, micro_batch=2)
HALF = Case("gpt2", dtype=torch.float16, scales=OVERFLOWING)
