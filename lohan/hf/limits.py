"""What a Trainer can be asked for and LoHan does not do: each with its reason."""

from __future__ import annotations

from typing import Any

from lohan.errors import ConfigError
from lohan.hf.optimizers import optim_of

# An argument of TrainingArguments, and why it cannot be set.
REFUSED = {
    "fsdp": "the state lies on SSD, there is nothing to shard; leave it out",
    "deepspeed": "LoHan takes the place of ZeRO and its offloading; leave it out",
    "parallelism_config": "training runs in one process; leave it out",
    "torch_compile": "weights change place block by block, which a compiled model cannot follow",
    "use_liger_kernel": "head and loss run in slices already; leave it out",
    "auto_find_batch_size": "memory is planned before the first step; set lohan's budget instead",
    "load_best_model_at_end": "weights lie on SSD and would have to be replaced there; load "
    "`trainer.state.best_model_checkpoint` with from_pretrained when training has ended",
    "fp16_full_eval": "evaluation computes in the type of training",
    "bf16_full_eval": "evaluation computes in the type of training",
    "activation_offloading": "LoHan plans what blocks keep and where; leave it out",
}


def check_arguments(args: Any) -> None:
    """Before Trainer acts on them."""
    for name, reason in REFUSED.items():
        if getattr(args, name, None):
            raise ConfigError(f"{name} cannot be used with lohan.hf: {reason}")
    if args.world_size > 1:
        raise ConfigError(
            f"lohan.hf trains in one process, {args.world_size} were started; start the script "
            "with python, not with torchrun or accelerate launch"
        )
    args._n_gpu = min(1, args.n_gpu)  # no DataParallel
    args.gradient_checkpointing = False  # blocks are recomputed as memory asks for it


def check_optimizer(trainer: Any) -> None:
    """It is one of LoHan's, inside backward."""
    given = trainer.optimizer
    own = given is None or type(getattr(given, "optimizer", given)).__name__ == "StepInBackward"
    if not own or trainer.optimizer_cls_and_kwargs is not None:
        kind = given if not own else trainer.optimizer_cls_and_kwargs[0]
        name = kind.__name__ if isinstance(kind, type) else type(kind).__name__
        raise ConfigError(
            f"a {name} cannot be used with lohan.hf: updates run inside backward, by LoHan's "
            "own kernels; choose one with optim, and set learning_rate, adam_beta1, adam_beta2, "
            "adam_epsilon and weight_decay"
        )
    optim_of(trainer.args)
