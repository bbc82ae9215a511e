"""From what TrainingArguments says of the optimizer to one of LoHan's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lohan.errors import ConfigError
from lohan.optim import SGD, AdamW, Lion, Optimizer

_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_apex_fused", "adamw_anyprecision")
_LION = ("lion_32bit", "paged_lion_32bit", "lion_8bit", "paged_lion_8bit")
OPTIM = (*_ADAMW, "sgd", *_LION)


def optim_of(args: Any) -> str:
    """The name that `optim` has, or a refusal."""
    name = str(getattr(args.optim, "value", args.optim))
    if name not in OPTIM:
        raise ConfigError(
            f"optim={name!r} cannot be used with lohan.hf: updates run inside backward, by LoHan's "
            f"own kernels; use one of {', '.join(OPTIM)}"
        )
    return name


def optimizer_of(args: Any, lr: Callable[[int], float], moments: str | None) -> Optimizer:
    """`moments` say how they are stored, if not as the name does. Lion takes its betas from
    adam_beta1 and adam_beta2, as transformers has it; momentum and nesterov of SGD come from
    optim_args."""
    name, betas = optim_of(args), (args.adam_beta1, args.adam_beta2)
    stored = moments or ("int8" if name.endswith("_8bit") else "fp32")
    shared: dict[str, Any] = {"lr": lr, "weight_decay": args.weight_decay, "moments": stored}
    if name in _ADAMW:
        return AdamW(betas=betas, eps=args.adam_epsilon, **shared)
    return Lion(betas=betas, **shared) if name in _LION else SGD(**_given(args), **shared)


def _flag(text: str) -> bool:
    return text.lower() in ("true", "1", "yes")


_SGD: dict[str, Callable[[str], Any]] = {"momentum": float, "nesterov": _flag}


def _given(args: Any) -> dict[str, Any]:
    """What SGD is told: nothing, or momentum=0.9,nesterov=True."""
    found: dict[str, Any] = {"momentum": 0.0}
    for part in filter(None, str(args.optim_args or "").replace(" ", "").split(",")):
        key, _, value = part.partition("=")
        try:
            found[key] = _SGD[key](value)
        except (KeyError, ValueError):
            raise ConfigError(
                f"optim_args={args.optim_args!r}: {part!r} cannot be used with lohan.hf; sgd takes "
                "momentum=NUMBER and nesterov=True"
            ) from None
    return found
