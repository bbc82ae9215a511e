"""The optimizer a user asks for. The arithmetic is in the native core."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from lohan.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """AdamW with decoupled weight decay. `lr` is a number or a function of the step (from 0)."""

    lr: float | Callable[[int], float] = 1e-5
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("betas[0]", self.betas[0]), ("betas[1]", self.betas[1])):
            if not 0.0 <= value < 1.0:
                raise ConfigError(f"AdamW {name} is {value}; it must lie in [0, 1)")
        if not (self.eps > 0 and math.isfinite(self.eps)):
            raise ConfigError(f"AdamW eps is {self.eps}; it must be positive")
        if not (self.weight_decay >= 0 and math.isfinite(self.weight_decay)):
            raise ConfigError(f"AdamW weight_decay is {self.weight_decay}; it must be >= 0")
        if not callable(self.lr) and not (self.lr >= 0 and math.isfinite(self.lr)):
            raise ConfigError(f"AdamW lr is {self.lr}; it must be >= 0")

    def lr_at(self, step: int) -> float:
        return float(self.lr(step)) if callable(self.lr) else float(self.lr)
