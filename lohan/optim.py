"""Optimizers, learning-rate schedules and adapters that a user can ask for."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from lohan.errors import ConfigError

# -- The optimizers a user can ask for: the moments of each, and its numbers -----------------------
#
# The arithmetic is in the native core: `lohan._core` has NAME_fp32, NAME_bf16 and NAME_fp16, by
# how master weights are stored. To add an optimizer, add its kernel there (csrc/rules.hpp) and its
# class here, to the table at the end; layout, store, planner and settings read the rest from it.


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
    def settings(self) -> str:
        """In [train] of a run."""
        decay = "DECAY" if self.ema else "0"
        return f'optimizer = "{self.optimizer}", moments = "{self.moments}", ema = {decay}'

    @property
    def call(self) -> str:
        """In Python."""
        average = ", ema=DECAY" if self.ema else ""
        name = OPTIMIZERS[self.optimizer].__name__
        return f"lohan.{name}(moments={self.moments!r}{average})"

    @property
    def moment_specs(self) -> tuple[Moment, ...]:
        return OPTIMIZERS[self.optimizer].moment_specs


DEFAULT_KIND = StateKind()


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
    moment_specs: ClassVar[tuple[Moment, ...]]

    def __post_init__(self) -> None:
        self._check("weight_decay", self.weight_decay, "be >= 0", lambda x: x >= 0)
        if not callable(self.lr):
            self._check("lr", self.lr, "be >= 0, or a function of the step", lambda x: x >= 0)
        self._check_shares(ema=self.ema)
        if self.moments not in MOMENTS:
            raise self._wrong("moments", self.moments, f"be one of {', '.join(MOMENTS)}")

    def _wrong(self, name: str, value: object, must: str) -> ConfigError:
        return ConfigError(f"{type(self).__name__} {name} is {value!r}; it must {must}")

    def _check(
        self, name: str, value: object, must: str, accepts: Callable[[float], bool]
    ) -> float:
        number = _finite(value)
        if number is None or not accepts(number):
            raise self._wrong(name, value, must)
        return number

    def _check_shares(self, **values: object) -> None:
        for name, value in values.items():
            self._check(name, value, "lie in [0, 1)", lambda x: 0.0 <= x < 1.0)

    def _check_betas(self, betas: object) -> None:
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise self._wrong("betas", betas, "be two numbers, such as (0.9, 0.99)")
        self._check_shares(**{f"betas[{i}]": beta for i, beta in enumerate(betas)})

    def lr_at(self, step: int) -> float:
        if not callable(self.lr):
            return float(self.lr)
        return self._check(f"lr({step})", self.lr(step), "be a number", lambda x: True)

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


def _finite(value: Any) -> float | None:
    """As a number; text is none, even where it could be read as one."""
    try:
        number = math.nan if isinstance(value, (str, bytes, bool)) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


@dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """AdamW with decoupled weight decay, as `torch.optim.AdamW`."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    name: ClassVar[str] = "adamw"
    moment_specs: ClassVar[tuple[Moment, ...]] = (Moment("m"), Moment("v", signed=False))

    def __post_init__(self) -> None:
        self._check_betas(self.betas)
        self._check("eps", self.eps, "be positive", lambda x: x > 0)
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
    moment_specs: ClassVar[tuple[Moment, ...]] = (Moment("m"),)

    def __post_init__(self) -> None:
        self._check_shares(momentum=self.momentum)
        if not isinstance(self.nesterov, bool):
            raise self._wrong("nesterov", self.nesterov, "be True or False")
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
    moment_specs: ClassVar[tuple[Moment, ...]] = (Moment("m"),)

    def __post_init__(self) -> None:
        self._check_betas(self.betas)
        super().__post_init__()

    @classmethod
    def configured(cls, train: Any, **shared: Any) -> Self:
        beta2 = cls.betas[1] if train.beta2 is None else train.beta2
        return cls(betas=(train.beta1, beta2), **shared)

    def numbers(self, step: int) -> dict[str, Any]:
        beta1, beta2 = self.betas
        return {"beta1": beta1, "beta2": beta2}


OPTIMIZERS: dict[str, type[Optimizer]] = {cls.name: cls for cls in (AdamW, SGD, Lion)}


# -- Learning-rate schedules as one pure function of the step number -------------------------------
#
# Steps count from 0. Without warm-up the values are those of transformers'
# `get_{constant,linear,cosine}_schedule_with_warmup`. Warm-up differs on purpose: transformers
# gives step s the factor s / warmup, so its first step has rate 0 and trains nothing; here it is
# (s + 1) / warmup, so the first step counts and step warmup - 1 is the first at the peak rate.


SCHEDULES = ("constant", "linear", "cosine")


def lr_at(
    step: int,
    *,
    total_steps: int,
    peak_lr: float,
    schedule: str = "constant",
    warmup_steps: int = 0,
    min_lr_ratio: float = 0.0,
) -> float:
    """The learning rate of a step, counted from 0.

    The decay goes from the peak at step `warmup_steps` to `min_lr_ratio * peak_lr` at step
    `total_steps`, which is the first step after the run; later steps stay there.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(f"schedule: unknown {schedule!r}; choose {', '.join(SCHEDULES)}")
    if step < warmup_steps:
        return peak_lr * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak_lr
    done = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    left = 1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return peak_lr * (min_lr_ratio + (1.0 - min_lr_ratio) * left)


# -- Adapters a user asks for: few parameters that learn, added to a frozen base -------------------


PACKINGS = ("nf4", "int8", "fp8")  # of weights that are only read


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Two thin matrices of `rank` added to every layer that `targets` names, or to all linear
    layers of the blocks. Their product counts `alpha / rank` times; not given, twice."""

    rank: int
    alpha: float | None = None
    targets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"Lora rank is {self.rank}; it must be at least 1")
