"""Arrays and hyper-parameters for tests of the native update kernels."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from lohan import _core
from tests.support.reference_updates import HYPER, SIGNED, aligned, aligned_copy

RULES, MOMENTS = list(SIGNED), ["fp32", "bf16", "int8"]
MASTERS = ["fp32", "bf16", "fp16"]
HOT = 12 * 1024  # elements that are checksummed at a time; a thread updates twice as many
kinds = pytest.mark.parametrize(("rule", "moments"), list(itertools.product(RULES, MOMENTS)))


class State:
    """Arrays of one optimizer, filled from one seed."""

    def __init__(self, rule: str, moments: str, count: int, master: str = "fp32") -> None:
        rng = np.random.default_rng(0)
        self.rule, self.moments, self.master, self.count = rule, moments, master, count
        self.p = aligned_copy(rng.standard_normal(count).astype(np.float32))
        self.w, self.r = aligned(count, "u2"), aligned(count, "i2")
        if master == "bf16":
            _core.split_bf16(self.p, self.w, self.r)
        kind = {"fp32": ("f4", "f4"), "bf16": ("u2", "u2"), "int8": ("i1", "u1")}[moments]
        self.m = [aligned(count, k) for k, _ in zip(kind, SIGNED[rule], strict=False)]
        blocks = -(-count // 32)
        self.scales = [aligned(blocks, "f4") for _ in self.m] if moments == "int8" else []

    def gradient(self, t: int) -> np.ndarray:
        """Return gradients whose neighbours differ by orders of magnitude; some are zero."""
        rng = np.random.default_rng([1, t])
        g = rng.standard_normal(self.count) * 10.0 ** rng.integers(-4, 2, self.count)
        g[rng.random(self.count) < 0.1] = 0
        return g.astype(np.float32)

    def step(self, t: int, start: int = 0, stop: int | None = None, **more: Any) -> Any:
        part, g = slice(start, stop), self.gradient(t)[start:stop]
        kernel = getattr(_core, f"{self.rule}_{self.master}")
        masters = {"fp32": [self.p], "bf16": [self.w, self.r], "fp16": [self.w, self.p]}
        numbers = HYPER[self.rule] | ({"step": t} if self.rule == "adamw" else {})
        blocks = slice(start // 32, None if stop is None else -(-stop // 32))
        scales = [s[blocks] for s in self.scales]
        return kernel(
            *(a[part] for a in masters[self.master]),
            *(m[part] for m in self.m),
            g,
            scales=scales,
            seed=77 + t,
            first=start,
            **numbers | more,
        )

    def bits(self) -> list[bytes]:
        return [a.tobytes() for a in (self.p, self.w, self.r, *self.m, *self.scales)]
