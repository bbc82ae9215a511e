"""LoHan's arguments for a Trainer, the mapping of `optim`, and the arguments that are refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lohan.engine.policies import Budget
from lohan.errors import ConfigError
from lohan.util.units import AUTO

# -- LoHan's arguments -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LohanArguments:
    """The settings of LoHan that `TrainingArguments` does not have.

    They are passed as `Trainer(..., lohan=LohanArguments(host="8GiB"))`. Settings that are left
    out are read from the environment variables LOHAN_HOST, LOHAN_SSD (folders separated as in
    PATH) and LOHAN_COMMIT_EVERY. Without `ssd`, the training state is stored in the output
    folder.
    """

    host: str | int | None = None
    ssd: tuple[str | os.PathLike[str], ...] = ()
    commit_every: str | int = ""
    log_gradients: str | int = AUTO
    device_memory: str | int | None = None
    micro_batch: int | None = None
    tiles: int | str = "auto"
    max_length: int | None = None  # longest row in tokens; None means that of the first batch
    update_mode: str = "balanced"
    activations: str = "holistic"
    overlap: bool = True
    # the format in which moments are stored; None means the format that `optim` implies
    moments: str | None = None

    def budget(self, output_dir: str) -> Budget:
        named = os.environ.get("LOHAN_SSD", "")
        ssd = self.ssd or tuple(part for part in named.split(os.pathsep) if part) or (output_dir,)
        return Budget(
            host=self.host or os.environ.get("LOHAN_HOST"),
            ssd=ssd,
            device=self.device_memory,
            commit_every=self.commit_every or os.environ.get("LOHAN_COMMIT_EVERY", AUTO),
            log_gradients=self.log_gradients,
        )


# -- The optimizer that TrainingArguments names ----------------------------------------------------


_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_apex_fused", "adamw_anyprecision")
_LION = ("lion_32bit", "paged_lion_32bit", "lion_8bit", "paged_lion_8bit")
OPTIM = (*_ADAMW, "sgd", *_LION)


def optimizer_name(args: Any) -> str:
    """Return the name of LoHan's optimizer that corresponds to `args.optim`, or refuse it."""
    name = str(getattr(args.optim, "value", args.optim))
    if name not in OPTIM:
        raise ConfigError(
            f"optim={name!r} cannot be used with lohan.hf: updates run inside backward, by LoHan's "
            f"own kernels; use one of {', '.join(OPTIM)}"
        )
    return "adamw" if name in _ADAMW else "lion" if name in _LION else "sgd"


def optimizer_kwargs(args: Any, name: str) -> dict[str, Any]:
    """Return the optimizer arguments other than learning rate and weight decay.

    Lion takes its betas from adam_beta1 and adam_beta2, as in transformers. SGD takes momentum
    and nesterov from optim_args.
    """
    if name == "sgd":
        return _sgd_kwargs(args)
    betas = {"betas": (args.adam_beta1, args.adam_beta2)}
    return betas if name == "lion" else {**betas, "eps": args.adam_epsilon}


def moments_of(args: Any, moments: str | None) -> str:
    """Return how moments are stored: as the user specifies or, by default, as `optim` implies."""
    name = str(getattr(args.optim, "value", args.optim))
    return moments or ("int8" if name in _LION and name.endswith("_8bit") else "fp32")


_SGD: dict[str, Callable[[str], Any]] = {
    "momentum": float,
    "nesterov": lambda text: text.lower() in ("true", "1", "yes"),
}


def _sgd_kwargs(args: Any) -> dict[str, Any]:
    """Parse `optim_args` for SGD: empty, or a text such as "momentum=0.9,nesterov=True"."""
    values: dict[str, Any] = {"momentum": 0.0}
    for part in filter(None, str(args.optim_args or "").replace(" ", "").split(",")):
        key, _, value = part.partition("=")
        try:
            values[key] = _SGD[key](value)
        except (KeyError, ValueError):
            raise ConfigError(
                f"optim_args={args.optim_args!r}: {part!r} cannot be used with lohan.hf; sgd takes "
                "momentum=NUMBER and nesterov=True"
            ) from None
    return values


# -- Arguments that LoHan refuses ------------------------------------------------------------------


# Arguments of TrainingArguments that cannot be set, each with the reason.
REFUSED = {
    "fsdp": "the state lies on SSD and is shared by all processes already; leave it out",
    "deepspeed": "LoHan takes the place of ZeRO and its offloading; leave it out",
    "parallelism_config": "processes share the batch and the state, nothing else; leave it out",
}


def check_arguments(args: Any) -> None:
    """Refuse arguments that LoHan cannot follow, and disable those that it replaces."""
    for name, reason in REFUSED.items():
        if getattr(args, name, None):
            raise ConfigError(f"{name} cannot be used with lohan.hf: {reason}")
    args._n_gpu = min(1, args.n_gpu)  # no DataParallel
    args.gradient_checkpointing = False  # the planner decides what is recomputed
    args.bf16_full_eval = args.fp16_full_eval = False  # the planner manages memory
    if getattr(args, "activation_offloading", False):
        args.activation_offloading = False  # the planner places activations
    # The head and the loss run in slices anyway; Liger's other kernels replace modules.
    if args.use_liger_kernel:
        disabled = {"fused_linear_cross_entropy": False, "cross_entropy": False}
        args.liger_kernel_config = {**(args.liger_kernel_config or {}), **disabled}


def check_push(args: Any, ssd: Sequence[Any]) -> None:
    """Refuse to push a folder to the hub that contains the training state."""
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
