"""The optimizers a user can ask for: what each remembers of a parameter, and its numbers.

The arithmetic is in the native core: `lohan._core` has NAME_fp32, NAME_bf16 and NAME_fp16, by how
master weights are stored. To add an optimizer, add its kernel there (csrc/rules.hpp) and its class
here, to the table at the end; layout, store, planner and settings read the rest from it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from lohan.errors import ConfigError

MOMENTS = ("fp32", "bf16", "int8")
SCALED = 32  # parameters whose moments in int8 share a scale; every tensor begins on such a border


@dataclass(frozen=True)
class Moment:
    """An array of one number per parameter that an optimizer carries from step to step."""

    name: str
    signed: bool = True


@dataclass(frozen=True)
class StateKind:
    """What decides the arrays of a parameter's state, besides its compute type. A store is made
    for one kind and keeps it."""

    optimizer: str = "adamw"
    moments: str = "fp32"
    ema: bool = False  # a moving average of the weights

    def __str__(self) -> str:
        average = " and averaged weights" if self.ema else ""
        return f"{self.optimizer} with {self.moments} moments{average}"

    @property
    def options(self) -> str:
        """Of `lohan train`."""
        average = " --ema DECAY" if self.ema else " and no --ema"
        return f"--optimizer {self.optimizer} --moments {self.moments}{average}"

    @property
    def remembers(self) -> tuple[Moment, ...]:
        return OPTIMIZERS[self.optimizer].remembers


USUAL = StateKind()


@dataclass(frozen=True, kw_only=True)
class Optimizer(ABC):
    """What all of them have. `lr` is a number or a function of the step (from 0). `moments` says
    how they are stored: anything but fp32 rounds them. `ema` keeps an exponential moving average
    of the weights with this decay, such as 0.9999; 0 keeps none."""

    lr: float | Callable[[int], float] = 1e-5
    weight_decay: float = 0.0
    moments: str = "fp32"
    ema: float = 0.0

    name: ClassVar[str]
    remembers: ClassVar[tuple[Moment, ...]]

    def __post_init__(self) -> None:
        if not (self.weight_decay >= 0 and math.isfinite(self.weight_decay)):
            raise self._wrong("weight_decay", self.weight_decay, "be >= 0")
        if not callable(self.lr) and not (self.lr >= 0 and math.isfinite(self.lr)):
            raise self._wrong("lr", self.lr, "be >= 0")
        self._check_shares(ema=self.ema)
        if self.moments not in MOMENTS:
            raise self._wrong("moments", repr(self.moments), f"be one of {', '.join(MOMENTS)}")

    def _wrong(self, name: str, value: object, must: str) -> ConfigError:
        return ConfigError(f"{type(self).__name__} {name} is {value}; it must {must}")

    def _check_shares(self, **values: float) -> None:
        for name, value in values.items():
            if not 0.0 <= value < 1.0:
                raise self._wrong(name, value, "lie in [0, 1)")

    def lr_at(self, step: int) -> float:
        return float(self.lr(step)) if callable(self.lr) else float(self.lr)

    @property
    def kind(self) -> StateKind:
        return StateKind(self.name, self.moments, self.ema > 0)

    @classmethod
    @abstractmethod
    def configured(cls, train: Any, **shared: Any) -> Self:
        """From the settings in [train]; `shared` are the fields above."""

    @abstractmethod
    def numbers(self, step: int) -> dict[str, Any]:
        """Keywords of the kernel besides lr and weight decay, in update number `step` (from 1)."""


@dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """AdamW with decoupled weight decay, as `torch.optim.AdamW`."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    name: ClassVar[str] = "adamw"
    remembers: ClassVar[tuple[Moment, ...]] = (Moment("m"), Moment("v", signed=False))

    def __post_init__(self) -> None:
        self._check_shares(**{f"betas[{i}]": beta for i, beta in enumerate(self.betas)})
        if not (self.eps > 0 and math.isfinite(self.eps)):
            raise self._wrong("eps", self.eps, "be positive")
        super().__post_init__()

    @classmethod
    def configured(cls, train: Any, **shared: Any) -> Self:
        beta2 = cls.betas[1] if train.beta2 is None else train.beta2
        return cls(betas=(train.beta1, beta2), eps=train.eps, **shared)

    def numbers(self, step: int) -> dict[str, Any]:
        beta1, beta2 = self.betas
        return {"beta1": beta1, "beta2": beta2, "eps": self.eps, "step": step}


@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """Gradient descent with momentum, as `torch.optim.SGD` without dampening: weight decay is part
    of the gradient."""

    momentum: float = 0.9
    nesterov: bool = False

    name: ClassVar[str] = "sgd"
    remembers: ClassVar[tuple[Moment, ...]] = (Moment("m"),)

    def __post_init__(self) -> None:
        self._check_shares(momentum=self.momentum)
        super().__post_init__()

    @classmethod
    def configured(cls, train: Any, **shared: Any) -> Self:
        return cls(momentum=train.momentum, **shared)

    def numbers(self, step: int) -> dict[str, Any]:
        return {"momentum": self.momentum, "nesterov": self.nesterov}


@dataclass(frozen=True, kw_only=True)
class Lion(Optimizer):
    """Lion (Chen et al., 2023): steps of one size, by the sign of an interpolated momentum."""

    betas: tuple[float, float] = (0.9, 0.99)

    name: ClassVar[str] = "lion"
    remembers: ClassVar[tuple[Moment, ...]] = (Moment("m"),)

    def __post_init__(self) -> None:
        self._check_shares(**{f"betas[{i}]": beta for i, beta in enumerate(self.betas)})
        super().__post_init__()

    @classmethod
    def configured(cls, train: Any, **shared: Any) -> Self:
        beta2 = cls.betas[1] if train.beta2 is None else train.beta2
        return cls(betas=(train.beta1, beta2), **shared)

    def numbers(self, step: int) -> dict[str, Any]:
        beta1, beta2 = self.betas
        return {"beta1": beta1, "beta2": beta2}


OPTIMIZERS: dict[str, type[Optimizer]] = {cls.name: cls for cls in (AdamW, SGD, Lion)}
