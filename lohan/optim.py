"""The optimizers, learning-rate schedules and adapters that a user can choose."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from lohan.errors import ConfigError

# -- Optimizers: the moments and hyper-parameters of each ------------------------------------------
#
# The arithmetic is in the native core: `lohan._core` has the kernels NAME_fp32, NAME_bf16 and
# NAME_fp16, which differ in how master weights are stored. To add an optimizer, add its kernel
# there (csrc/rules.hpp), and its class here and in the table at the end. Layout, store, planner and
# settings take everything else from the class.


MOMENTS = ("fp32", "bf16", "int8")
# Number of parameters whose int8 moments share a scale. Every tensor starts on a multiple of it.
PARAMETERS_PER_SCALE = 32


@dataclass(frozen=True)
class Moment:
    """An array with one number per parameter that an optimizer carries from step to step."""

    name: str
    signed: bool = True


@dataclass(frozen=True)
class StateKind:
    """The properties that, together with the compute type, determine a parameter's state arrays.

    The kind of a store is fixed when the store is created.
    """

    optimizer: str = "adamw"
    moments: str = "fp32"
    ema: bool = False  # True if a moving average of the weights is kept.

    def __str__(self) -> str:
        average = " and averaged weights" if self.ema else ""
        return f"{self.optimizer} with {self.moments} moments{average}"

    @property
    def settings(self) -> str:
        """The settings in [train] that select this kind of state, for messages."""
        decay = "DECAY" if self.ema else "0"
        return f'optimizer = "{self.optimizer}", moments = "{self.moments}", ema = {decay}'

    @property
    def call(self) -> str:
        """The Python expression that creates such an optimizer, for messages."""
        average = ", ema=DECAY" if self.ema else ""
        name = OPTIMIZERS[self.optimizer].__name__
        return f"lohan.{name}(moments={self.moments!r}{average})"

    @property
    def moment_specs(self) -> tuple[Moment, ...]:
        return OPTIMIZERS[self.optimizer].moment_specs


DEFAULT_KIND = StateKind()


@dataclass(frozen=True, kw_only=True)
class Optimizer(ABC):
    """Base class of the optimizers, with their common fields.

    * `lr` is a number or a function of the step, counted from 0.
    * `moments` is the type in which moments are stored; any type but fp32 rounds them.
    * `ema` is the decay of an exponential moving average of the weights, such as 0.9999; with 0
      there is none.
    """

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
        """Create the optimizer from the settings in [train]; `shared` are the common fields."""

    @abstractmethod
    def numbers(self, step: int) -> dict[str, Any]:
        """Return the keyword arguments of the kernel for update `step`, counted from 1.

        They do not include the learning rate and the weight decay.
        """


def _finite(value: Any) -> float | None:
    """Return a value as a finite number, or None; text is never a number."""
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
    """Gradient descent with momentum, as `torch.optim.SGD` without dampening.

    Weight decay is added to the gradient.
    """

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
    """Lion (Chen et al., 2023): updates by the sign of an interpolated momentum."""

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


# -- Learning-rate schedules as a pure function of the step number ---------------------------------
#
# Steps count from 0. Without warm-up, the values are those of
# `get_{constant,linear,cosine}_schedule_with_warmup` in transformers. Warm-up differs deliberately:
# transformers uses the factor s / warmup for step s, so its first step has rate 0 and trains
# nothing. Here the factor is (s + 1) / warmup, so the first step has an effect and step warmup - 1
# is the first with the peak rate.


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
    """Return the learning rate of a step, counted from 0.

    The rate decays from the peak at step `warmup_steps` to `min_lr_ratio * peak_lr` at step
    `total_steps`, the first step after the run, and is constant from there.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(f"schedule: unknown {schedule!r}; choose {', '.join(SCHEDULES)}")
    if step < warmup_steps:
        return peak_lr * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak_lr
    done = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    remaining = 1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return peak_lr * (min_lr_ratio + (1.0 - min_lr_ratio) * remaining)


# -- Adapters: a few trained parameters added to a frozen model ------------------------------------


PACKINGS = ("nf4", "int8", "fp8")  # Storage formats for frozen weights.


@dataclass(frozen=True, kw_only=True)
class Lora:
    """LoRA: two matrices of rank `rank` added to each layer that `targets` names.

    Without `targets`, all linear layers of the blocks get an adapter. The product of the matrices
    is scaled by `alpha / rank`, or by 2 if `alpha` is None.
    """

    rank: int
    alpha: float | None = None
    targets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"Lora rank is {self.rank}; it must be at least 1")
