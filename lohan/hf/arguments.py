"""What a Trainer is told: LoHan's own arguments, the optimizer, and what cannot be had."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lohan.engine.attach import Budget
from lohan.errors import ConfigError
from lohan.util.units import AUTO

# -- What a Trainer out of core is told beyond transformers' own arguments -------------------------


@dataclass(frozen=True, kw_only=True)
class LohanArguments:
    """What Trainer has no argument for: `Trainer(..., lohan=LohanArguments(host="8GiB"))`. What is
    not given comes from the environment: LOHAN_HOST, LOHAN_SSD (folders, separated as in PATH),
    LOHAN_COMMIT_EVERY. Without `ssd` the state is in the output folder."""

    host: str | int | None = None
    ssd: tuple[str | os.PathLike[str], ...] = ()
    commit_every: str | int = ""
    device_memory: str | int | None = None
    micro_batch: int | None = None
    tiles: int | str = "auto"
    max_length: int | None = None  # of a batch in tokens; not given: what the first batch has
    update_mode: str = "balanced"
    activations: str = "holistic"
    overlap: bool = True
    moments: str | None = None  # how they are stored; not given: as `optim` says

    def budget(self, output_dir: str) -> Budget:
        named = os.environ.get("LOHAN_SSD", "")
        ssd = self.ssd or tuple(part for part in named.split(os.pathsep) if part) or (output_dir,)
        return Budget(
            host=self.host or os.environ.get("LOHAN_HOST"),
            ssd=ssd,
            device=self.device_memory,
            commit_every=self.commit_every or os.environ.get("LOHAN_COMMIT_EVERY", AUTO),
        )


# -- From what TrainingArguments says of the optimizer to one of LoHan's ---------------------------


_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_apex_fused", "adamw_anyprecision")
_LION = ("lion_32bit", "paged_lion_32bit", "lion_8bit", "paged_lion_8bit")
OPTIM = (*_ADAMW, "sgd", *_LION)


def optimizer_name(args: Any) -> str:
    """Return the name of LoHan's optimizer that `args.optim` asks for, or refuse it."""
    name = str(getattr(args.optim, "value", args.optim))
    if name not in OPTIM:
        raise ConfigError(
            f"optim={name!r} cannot be used with lohan.hf: updates run inside backward, by LoHan's "
            f"own kernels; use one of {', '.join(OPTIM)}"
        )
    return "adamw" if name in _ADAMW else "lion" if name in _LION else "sgd"


def optimizer_kwargs(args: Any, name: str) -> dict[str, Any]:
    """Return what TrainingArguments say of this optimizer besides learning rate and weight decay.
    Lion takes its betas from adam_beta1 and adam_beta2, as in transformers; momentum and nesterov
    of SGD come from optim_args."""
    if name == "sgd":
        return _given(args)
    betas = {"betas": (args.adam_beta1, args.adam_beta2)}
    return betas if name == "lion" else {**betas, "eps": args.adam_epsilon}


def moments_of(args: Any, moments: str | None) -> str:
    """Return how moments are stored: as the user says, or as the name of the optimizer does."""
    name = str(getattr(args.optim, "value", args.optim))
    return moments or ("int8" if name in _LION and name.endswith("_8bit") else "fp32")


_SGD: dict[str, Callable[[str], Any]] = {
    "momentum": float,
    "nesterov": lambda text: text.lower() in ("true", "1", "yes"),
}


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


# -- What a Trainer can be asked for and LoHan does not do: each with its reason -------------------


# An argument of TrainingArguments, and why it cannot be set.
REFUSED = {
    "fsdp": "the state lies on SSD and is shared by all processes already; leave it out",
    "deepspeed": "LoHan takes the place of ZeRO and its offloading; leave it out",
    "parallelism_config": "processes share the batch and the state, nothing else; leave it out",
}


def check_arguments(args: Any) -> None:
    """Before Trainer acts on them."""
    for name, reason in REFUSED.items():
        if getattr(args, name, None):
            raise ConfigError(f"{name} cannot be used with lohan.hf: {reason}")
    args._n_gpu = min(1, args.n_gpu)  # no DataParallel
    args.gradient_checkpointing = False  # blocks are recomputed as memory asks for it
    args.bf16_full_eval = args.fp16_full_eval = False  # they save memory, which is planned
    if getattr(args, "activation_offloading", False):
        args.activation_offloading = False  # what blocks keep, and where, is planned
    if args.use_liger_kernel:  # head and loss run in slices already; the rest replaces modules
        own = {"fused_linear_cross_entropy": False, "cross_entropy": False}
        args.liger_kernel_config = {**(args.liger_kernel_config or {}), **own}


def check_push(args: Any, ssd: Sequence[Any]) -> None:
    """Trainer uploads the whole output folder: the store must not be in it."""
    out = Path(args.output_dir).resolve()
    folders = [Path(folder).resolve() for folder in ssd]
    if any(out in (folder, *folder.parents) for folder in folders):
        raise ConfigError(
            f"push_to_hub would upload the training state, which lies in {out}; put it elsewhere "
            "with LOHAN_SSD=/nvme0 or LohanArguments(ssd=...), or upload what save_model wrote "
            "with `hf upload`"
        )
    strategy = str(getattr(args.hub_strategy, "value", args.hub_strategy))
    if "checkpoint" in strategy and not args.save_only_model:
        raise ConfigError(
            f"hub_strategy={strategy!r} would upload the training state in every checkpoint "
            "(lohan-state); set save_only_model=True, or hub_strategy='every_save'"
        )
