"""The part of a transformers Trainer that LoHan takes over: optimizer, steps, checkpoints."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import transformers
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers.trainer import (
    SCHEDULER_NAME,
    TRAINER_STATE_NAME,
    TRAINING_ARGS_NAME,
    GreedyLR,
)

from lohan.checkpoint.adapters import base_of, is_adapted
from lohan.checkpoint.hf_folder import persistent_buffers
from lohan.engine.attach import STORE_FOLDER, Budget, attach
from lohan.engine.session import Session, export_store
from lohan.errors import ConfigError, DataError, StoreError
from lohan.optim import SGD, AdamW, Lion, Optimizer
from lohan.store.admin import describe, remove
from lohan.store.files import IDENTITY
from lohan.train.run_folder import new_mark, read_mark
from lohan.util.units import counted

# -- What a Trainer out of core is told beyond transformers' own arguments -------------------------


@dataclass(frozen=True, kw_only=True)
class LohanArguments:
    """What Trainer has no argument for: `Trainer(..., lohan=LohanArguments(host="8GiB"))`. What is
    not given comes from the environment: LOHAN_HOST, LOHAN_SSD (folders, separated as in PATH),
    LOHAN_DURABILITY. The state lies in the output folder if no `ssd` is named. `overwrite`: a new
    training replaces the state of an earlier one in the same output folder."""

    host: str | int | None = None
    ssd: tuple[str | os.PathLike[str], ...] = ()
    durability: str = ""
    device_memory: str | int | None = None
    micro_batch: int | None = None
    max_length: int | None = None  # of a batch in tokens; not given: what the first batch has
    grad_offload: str = "balanced"
    activations: str = "holistic"
    overlap: bool = True
    overwrite: bool = False
    moments: str | None = None  # how they are stored; not given: as `optim` says

    def budget(self, output_dir: str) -> Budget:
        named = os.environ.get("LOHAN_SSD", "")
        ssd = self.ssd or tuple(part for part in named.split(os.pathsep) if part) or (output_dir,)
        return Budget(
            host=self.host or os.environ.get("LOHAN_HOST"), ssd=ssd, device=self.device_memory,
            durability=self.durability or os.environ.get("LOHAN_DURABILITY", "step"),
        )  # fmt: skip


# -- Batches of a Trainer: several made one, and the shapes to plan for ----------------------------


# What stands where a row of one batch is shorter than those of another. Behind a row's end nothing
# is learnt and nothing looks back at it.
OUTPUT_DIR = "output_dir"  # in a store's meta: the folder that it belongs to
FILL = {
    "input_ids": 0,
    "attention_mask": 0,
    "labels": -100,
    "shift_labels": -100,
    "token_type_ids": 0,
    "position_ids": 0,
}


def merged(batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One batch with the rows of all. Rows are filled on the right to the longest."""
    if len(batches) == 1:
        return dict(batches[0])
    made: dict[str, Any] = {}
    for name, first in batches[0].items():
        values = [batch.get(name) for batch in batches]
        if not isinstance(first, torch.Tensor) or first.ndim == 0:
            if any(value != first for value in values):
                raise _unequal(name, "values that are no tensors")
            made[name] = first
            continue
        made[name] = torch.cat(_filled(name, values))
    return made


def _filled(name: str, tensors: Sequence[Any]) -> list[torch.Tensor]:
    if any(not isinstance(t, torch.Tensor) or t.ndim != tensors[0].ndim for t in tensors):
        raise _unequal(name, "different ranks")
    if len({t.shape[1:] for t in tensors}) == 1:
        return list(tensors)
    if name not in FILL or tensors[0].ndim != 2:
        raise _unequal(name, f"shapes {', '.join(str(list(t.shape)) for t in tensors)}")
    longest = max(t.shape[1] for t in tensors)
    return [
        torch.nn.functional.pad(t, (0, longest - t.shape[1]), value=FILL[name]) for t in tensors
    ]


def _unequal(name: str, what: str) -> DataError:
    return DataError(
        f"gradient accumulation: {name!r} has {what} in the batches of one step, so they cannot be "
        "joined; set gradient_accumulation_steps to 1 and raise per_device_train_batch_size"
    )


def shapes_for(inputs: Mapping[str, Any], max_length: int | None) -> dict[str, torch.Tensor]:
    """The batch to plan for: this one, with its tokens as long as batches may become."""
    tensors = {n: t for n, t in inputs.items() if isinstance(t, torch.Tensor) and n != "labels"}
    ids = tensors.get("input_ids")
    if ids is None or ids.ndim != 2:
        return tensors
    length = ids.shape[1]
    longest = max(length, max_length or 0)

    def shaped(tensor: torch.Tensor) -> torch.Tensor:
        longer = tensor.ndim >= 2 and tensor.shape[1] == length
        size = (tensor.shape[0], longest, *tensor.shape[2:]) if longer else tensor.shape
        return torch.empty(size, dtype=tensor.dtype, device="meta")

    return {name: shaped(t) for name, t in tensors.items() if t.ndim}


def shapes_to_json(shapes: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {n: [list(t.shape), str(t.dtype).removeprefix("torch.")] for n, t in shapes.items()}


def shapes_from_json(data: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for name, (shape, dtype) in data.items()
    }


# -- From what TrainingArguments says of the optimizer to one of LoHan's ---------------------------


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


# -- What a Trainer can be asked for and LoHan does not do: each with its reason -------------------


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


# -- The part of a Trainer that LoHan takes over: optimizer, steps, checkpoints --------------------


PARTIAL = ".lohan-export"


class StepInBackward(torch.optim.Optimizer):
    """Stands where Trainer wants an optimizer. Its learning rate is the real one, which schedulers
    set; its step has happened in backward by the time it is called."""

    def __init__(self, lr: float) -> None:
        super().__init__([torch.nn.Parameter(torch.zeros(()))], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ConfigError("an optimizer closure cannot run: the step is inside backward")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients have left with the step."""


class LohanMixin:
    """What makes a Trainer train out of core. `session` is there from the first training step."""

    args: Any
    model: Any
    accelerator: Any
    optimizer: Any
    lr_scheduler: Any
    state: Any
    model_init: Any

    def __init__(self, *given: Any, lohan: LohanArguments | None = None, **named: Any) -> None:
        self.lohan = lohan or LohanArguments()
        self.session: Session | None = None
        self._waiting: list[dict[str, Any]] = []  # batches of the current step
        self._resumes = False
        self._lasts = True  # the session, beyond one evaluation
        args = given[1] if len(given) > 1 else named.get("args")
        if args is not None:
            check_arguments(args)
        super().__init__(*given, **named)

    # -- set-up -----------------------------------------------------------------------------------

    def _validate_args(self) -> None:
        super()._validate_args()  # type: ignore[misc]
        check_optimizer(self)
        if self.model_init is not None:
            raise ConfigError("model_init cannot be used with lohan.hf: give the model itself")
        self.accelerator.device_placement = False

    def _build_accelerator_args(self, **named: Any) -> dict[str, Any]:
        """bf16 and fp16 are types of the weights here, with an fp32 master, not autocast."""
        made: dict[str, Any] = super()._build_accelerator_args(**named)  # type: ignore[misc]
        return {**made, "mixed_precision": "no"}

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Weights go from the store to the device, block by block."""

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        check_optimizer(self)
        if self.optimizer is None:
            self.optimizer = StepInBackward(self.args.learning_rate)
        optimizer: torch.optim.Optimizer = self.optimizer
        return optimizer

    def attach(self, inputs: Mapping[str, Any], *, lasting: bool = True) -> Session:
        """The session; made for a batch like this one if it is not there yet. One that is not
        `lasting` has a store of its own, which goes after the evaluation that it is for."""
        if self.session is None:
            name = self._store_name() if lasting else f"lohan-evaluation-{uuid4().hex[:12]}"
            args, optimizer = self.args, self.create_optimizer()
            decaying = set(self.get_decay_parameter_names(self.model))  # type: ignore[attr-defined]
            longest = self.lohan.max_length or getattr(args, "max_length", 0)
            if self._resumes:  # the same plan as before: its slices are part of the result
                shapes = shapes_from_json(self._stored()["shapes"])
            else:
                shapes = shapes_for(inputs, longest)
                name = self._new_store() if lasting else name
            self.session = attach(
                self.model, budget=self.lohan.budget(args.output_dir), resume=self._resumes,
                store_name=name,
                optimizer=optimizer_of(
                    args, lambda _: optimizer.param_groups[0]["lr"], self.lohan.moments
                ),
                batch=shapes, clip=args.max_grad_norm, micro_batch=self.lohan.micro_batch,
                meta={
                    "shapes": shapes_to_json(shapes),
                    OUTPUT_DIR: str(Path(args.output_dir).resolve()),
                },
                overlap=self.lohan.overlap, grad_offload=self.lohan.grad_offload,
                activations=self.lohan.activations, decay=lambda name, _: name in decaying,
                dtype="bf16" if args.bf16 else "fp16" if args.fp16 else None,
                device="cpu" if args.device.type == "cpu" else "accelerator",
            )  # fmt: skip
            if lasting:
                weakref.finalize(self, Session.close, self.session)
        return self.session

    def _store_dirs(self) -> list[Path]:
        name = self._store_name()
        return [Path(d) / name for d in self.lohan.budget(self.args.output_dir).ssd]

    def _store_name(self) -> str:
        """In the output folder one name does; on other drives it is that of this training alone,
        which the output folder has in writing. Earlier versions had one name everywhere."""
        mark = read_mark(Path(self.args.output_dir))
        return STORE_FOLDER if mark is None else mark.store

    def _new_store(self) -> str:
        """The name for the store of a new training. One that is there is replaced only if the user
        says so."""
        out, dirs = Path(self.args.output_dir), self._store_dirs()
        places = [path.parent for path in dirs]
        marked = read_mark(out) is not None and self._original() is None
        inside = [place.resolve() for place in places] == [out.resolve()]
        if (marked or inside) and (dirs[0] / IDENTITY).exists():
            found = describe(dirs)
            if found["state"] != "unfinished" and not self.lohan.overwrite:
                step = found["meta"].get("progress", {}).get("step", 0)
                raise StoreError(
                    f"{dirs[0]} holds the state of an earlier training in {out}, at step {step}; "
                    "go on with train(resume_from_checkpoint=True), give another output_dir, or "
                    "start over with Trainer(..., lohan=LohanArguments(overwrite=True))"
                )
            remove(dirs)
        if marked or inside:
            return dirs[0].name
        out.mkdir(parents=True, exist_ok=True)
        mark = new_mark(out)
        mark.write(out)
        return mark.store

    def _original(self) -> Path | None:
        """Of an output folder that was copied, the one that the store on another drive is of."""
        out, dirs = Path(self.args.output_dir), self._store_dirs()
        mark = read_mark(out)
        if mark is None or not (dirs[0] / IDENTITY).exists():
            return None
        first = Path(describe(dirs).get("meta", {}).get(OUTPUT_DIR, out))
        theirs = read_mark(first)
        same = theirs is not None and theirs.id == mark.id and not first.samefile(out)
        return first if same else None

    def evaluation_loop(self, *given: Any, **named: Any) -> Any:
        """Before a training, weights that are not in memory stream from a store that goes again."""
        before = self.session
        try:
            return super().evaluation_loop(*given, **named)  # type: ignore[misc]
        finally:
            if before is None and self.session is not None and not self._lasts:
                session, self.session, self._lasts = self.session, None, True
                dirs = session.store.dirs
                session.close(flush=False)
                remove(dirs)

    # -- steps ------------------------------------------------------------------------------------

    def train(self, *given: Any, **named: Any) -> Any:
        if self.session is not None and self.session.step:
            raise ConfigError(
                f"this Trainer has trained {counted(self.session.step, 'step')} already; make a "
                "new one for another training, or pass resume_from_checkpoint to a new one to go on"
            )
        output = super().train(*given, **named)  # type: ignore[misc]
        if self.session is not None:
            self.session.settle()
        return output

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Batches of one optimizer step are one batch here: it is cut into micro-batches inside
        every block, so that weights move once per step."""
        self._waiting.append(inputs)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        parts, self._waiting = self._waiting, []
        if len(parts) > 1 and num_items_in_batch is None:
            raise ConfigError(
                f"gradient_accumulation_steps is {len(parts)}, and the loss of this model is not a "
                "sum over tokens, so batches cannot be joined; set it to 1 and raise "
                "per_device_train_batch_size instead"
            )
        batch = merged(parts)
        self.attach(batch)
        return super().training_step(model, batch, num_items_in_batch)  # type: ignore[misc]

    def _clip_grad_norm(self, model: Any) -> float | None:
        return self.session.executor.grad_norm if self.session is not None else None

    def _get_grad_norm(self, model: Any, grad_norm: float | None = None) -> float | None:
        return grad_norm

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        if self.session is None and any(p.is_meta for p in self.model.parameters()):
            self._lasts = bool(getattr(self, "is_in_train", False))
            self.attach(inputs, lasting=self._lasts)
        base: Any = base_of(self.model)
        sliced = self.session is not None and self.session.head is not None
        if prediction_loss_only or not sliced or inputs.get("labels") is None:
            return super().prediction_step(  # type: ignore[misc]
                model, inputs, prediction_loss_only, ignore_keys
            )
        inputs = self._prepare_inputs(inputs)  # type: ignore[attr-defined]
        labels = inputs["labels"]
        with torch.no_grad():  # with labels there would be a loss and no logits
            logits = model(**{k: v for k, v in inputs.items() if k != "labels"}).logits
            vocabulary = base.config.get_text_config().vocab_size
            loss = base.loss_function(logits=logits, labels=labels, vocab_size=vocabulary)
        return loss, logits, labels

    # -- checkpoints ------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if self.session is None:
            return super()._save(output_dir, state_dict)  # type: ignore[misc]
        target = Path(output_dir or self.args.output_dir)
        target.mkdir(parents=True, exist_ok=True)
        made = self._export(target / PARTIAL)
        for path in sorted(made.iterdir()):
            path.replace(target / path.name)
        made.rmdir()
        collator = getattr(self, "data_collator", None)
        tokenizer = getattr(self, "processing_class", None) or getattr(collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(target)
        torch.save(self.args, target / TRAINING_ARGS_NAME)
        return None

    def _export(self, folder: Path) -> Path:
        """Weights as they are now, and the config as training has left it."""
        session = self.attach({})
        session.settle()
        made = export_store(
            session.store, folder, source_folder=None, overwrite=True, model=self.model,
            buffers=persistent_buffers(base_of(self.model)),
        )  # fmt: skip
        generation = getattr(self.model, "generation_config", None)
        if generation is not None and not is_adapted(self.model):
            generation.save_pretrained(made)
        return made

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.session is not None:
            self.session.settle()
        torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Weights and optimizer state are in the store, which is opened when the first batch is
        there. It must be the one that the checkpoint was made from, as far or further."""
        saved, stored = self._saved_step(resume_from_checkpoint), self._stored()["progress"]["step"]
        later = [
            path.name
            for path in Path(resume_from_checkpoint).absolute().parent.glob("checkpoint-*")
            if path.name.rpartition("-")[2].isdigit() and self._saved_step(path) > saved
        ]
        if stored < saved or later:
            has = f"the store is at step {stored}" + (f" and {later[0]} is later" if later else "")
            raise StoreError(
                f"{resume_from_checkpoint} is of step {saved}, {has}; the store keeps the state of "
                "its last step only: resume from the latest checkpoint, or start a new training "
                "from the weights of this one"
            )
        self._resumes = True

    def _saved_step(self, checkpoint: str | os.PathLike[str]) -> int:
        file = Path(checkpoint) / TRAINER_STATE_NAME
        if not file.is_file():
            return 0
        return int(transformers.TrainerState.load_from_json(str(file)).global_step)

    def _stored(self) -> dict[str, Any]:
        """What the store says of itself."""
        dirs = self._store_dirs()
        if not (dirs[0] / IDENTITY).exists():
            raise StoreError(
                f"there is no store in {dirs[0].parent}, and a checkpoint alone has no optimizer "
                "state; name the folders that training began with (LohanArguments.ssd, LOHAN_SSD), "
                "or start a new training from the weights of the checkpoint"
            )
        if (first := self._original()) is not None:
            raise StoreError(
                f"{self.args.output_dir} is a copy of {first}, and both have one store at "
                f"{dirs[0]}; go on in that one, or move it away"
            )
        meta: dict[str, Any] = describe(dirs)["meta"]
        return meta

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int,
        resume_from_checkpoint: str | None, trial: Any,
    ) -> tuple[int, int]:  # fmt: skip
        """Every step is durable: training goes on after the last one, not after the checkpoint."""
        found: tuple[int, int] = super()._init_training_state(  # type: ignore[misc]
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if not self._resumes:
            return found
        self._beyond = int(self._stored()["progress"]["step"]) - self.state.global_step
        self.state.global_step += self._beyond
        epochs, steps = divmod(self.state.global_step, num_update_steps_per_epoch)
        skip = 0 if self.args.ignore_data_skip else steps * self.args.gradient_accumulation_steps
        return epochs, skip

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        state = torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True)
        self.lr_scheduler.load_state_dict(state)
        for group, rate in zip(
            self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True
        ):
            group["lr"] = rate
        if not isinstance(self.lr_scheduler, (ReduceLROnPlateau, GreedyLR)):  # not by evaluations
            for _ in range(self._beyond):
                self.lr_scheduler.step()


# -- transformers' Trainer, out of core ------------------------------------------------------------


class Trainer(LohanMixin, transformers.Trainer):
    """transformers.Trainer, but for where weights and optimizer state are."""
