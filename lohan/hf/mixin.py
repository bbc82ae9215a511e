"""The part of a transformers Trainer that LoHan takes over: optimizer, steps, checkpoints."""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import torch
import transformers
from accelerate.utils import convert_to_fp32
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.overrides import TorchFunctionMode
from transformers.trainer import (
    SCHEDULER_NAME,
    TRAINER_STATE_NAME,
    TRAINING_ARGS_NAME,
    GreedyLR,
)
from transformers.utils import logging

from lohan.capture.blocks import lacks_values
from lohan.checkpoint.adapters import base_of
from lohan.device.ranks import ALONE, ProcessGroup, join
from lohan.engine.attach import STORE_FOLDER, attach
from lohan.engine.head import find_decoder
from lohan.engine.session import Session
from lohan.engine.stored_weights import save_into, stored_weights_of
from lohan.errors import BudgetError, ConfigError, DataError, LohanError, ModelError, StoreError
from lohan.hf.arguments import (
    LohanArguments,
    check_arguments,
    check_optimizer,
    check_push,
    optimizer_of,
)
from lohan.store.admin import describe, find_snapshot, remove, rewind, snapshot
from lohan.store.files import IDENTITY, NoRoomError
from lohan.store.store import Store
from lohan.train.run_folder import Mark, new_mark, read_mark
from lohan.util.files import load_json
from lohan.util.units import counted

logger = logging.get_logger(__name__)
OUTPUT_DIR = "output_dir"  # in a store's meta: the folder that it belongs to
STATE_FOLDER = "lohan-state"  # of a checkpoint: weights and optimizer state of its step


class TooLarge(RuntimeError):
    """A batch that the budget has no room for, in words that auto_find_batch_size looks for."""


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


def _widened(model: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Logits that are made when they are asked for stay so."""
    make = getattr(outputs, "make_logits", None)
    if make is None:
        return convert_to_fp32(outputs)
    object.__setattr__(outputs, "make_logits", lambda: make().float())
    return outputs


class _LossesInFp32(TorchFunctionMode):
    """Losses get their inputs in fp32, inside the model's forward: not where blocks run again."""

    KINDS = frozenset(
        getattr(nn.functional, name)
        for name in (
            "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
            "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div",
        )
    )  # fmt: skip

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.KINDS:
            args, kwargs = convert_to_fp32((args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def begin(self, *_: Any) -> None:
        self.__enter__()

    def end(self, *_: Any) -> None:
        self.__exit__(None, None, None)


class LohanMixin:
    """What makes a Trainer train out of core. `session` is there from the first training step."""

    over_tokens = False  # its loss is over log-probabilities of tokens, from the head in slices
    args: Any
    model: Any
    accelerator: Any
    optimizer: Any
    lr_scheduler: Any
    state: Any
    model_init: Any
    compute_loss_func: Any
    label_smoother: Any
    model_accepts_loss_kwargs: bool

    def __init__(self, *given: Any, lohan: LohanArguments | None = None, **named: Any) -> None:
        self.lohan = lohan or LohanArguments()
        self.session: Session | None = None
        self._waiting: list[dict[str, Any]] = []  # batches of the current step
        self._resumes = False
        self._beginning: Path | None = None  # stands for the checkpoint of a training that has none
        self._rewind: Path | None = None  # the state to go back to, when the store is opened
        self._lasts = True  # the session, beyond one evaluation
        self._too_large: BudgetError | None = None
        self._ranks: ProcessGroup | None = None  # those that torchrun has started
        args = given[1] if len(given) > 1 else named.get("args")
        if args is not None:
            check_arguments(args)
            if args.push_to_hub:
                check_push(args, self.lohan.budget(args.output_dir).ssd)
        super().__init__(*given, **named)

    # -- set-up -----------------------------------------------------------------------------------

    def _validate_args(self) -> None:
        check_arguments(self.args)  # once more: without any, the library has made its own
        super()._validate_args()  # type: ignore[misc]
        check_optimizer(self)

    def _build_accelerator_args(self, **named: Any) -> dict[str, Any]:
        """bf16 and fp16 are types of the weights here, with an fp32 master, not autocast."""
        made: dict[str, Any] = super()._build_accelerator_args(**named)  # type: ignore[misc]
        return {**made, "mixed_precision": "no"}

    def create_accelerator_and_postprocess(self) -> None:
        """Batches go to the device as ever; the model is neither moved nor wrapped."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        accelerator = self.accelerator

        def prepare_model(model: Any, *_: Any, **__: Any) -> Any:
            if not any(known is model for known in accelerator._models):
                accelerator._models.append(model)
            return model

        accelerator.prepare_model = prepare_model

    def push_to_hub(self, *given: Any, **named: Any) -> Any:
        check_push(self.args, self.lohan.budget(self.args.output_dir).ssd)
        return super().push_to_hub(*given, **named)  # type: ignore[misc]

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
        if self.session is not None and not self.session.closed:
            return self.session
        name = self._store_name() if lasting else f"lohan-evaluation-{uuid4().hex[:12]}"
        args, optimizer = self.args, self.create_optimizer()
        decaying = set(self.get_decay_parameter_names(self.model))  # type: ignore[attr-defined]
        longest = self.lohan.max_length or getattr(args, "max_length", 0)
        replaced: list[Path] = []
        mark: Mark | None = None
        if self._resumes:  # the same plan as before: its slices are part of the result
            shapes = shapes_from_json(self._stored()["shapes"])
            self._go_back()
        else:
            shapes = shapes_for(inputs, longest)
            if self._sharing():
                assert self._ranks is not None
                said = self._ranks.all_gather_object(shapes_to_json(shapes))
                shapes = shapes_from_json(largest_shapes(said))
            if lasting:
                mark, replaced = self._new_store()
                name = self._store_name() if mark is None else mark.store
        try:
            self.session = attach(
                self.model, budget=self.lohan.budget(args.output_dir), resume=self._resumes,
                store_name=name,
                optimizer=optimizer_of(
                    args, lambda _: optimizer.param_groups[0]["lr"], self.lohan.moments
                ),
                batch=shapes, clip=args.max_grad_norm, clip_by=self.lohan.clip_by,
                micro_batch=self.lohan.micro_batch, tiles=self.lohan.tiles,
                meta={
                    "shapes": shapes_to_json(shapes),
                    OUTPUT_DIR: str(Path(args.output_dir).resolve()),
                },
                overlap=self.lohan.overlap, update_mode=self.lohan.update_mode,
                activations=self.lohan.activations, run_again=self._repeatable(),
                decay=lambda name, _: name in decaying,
                dtype="bf16" if args.bf16 else "fp16" if args.fp16 else None,
                device="cpu" if args.device.type == "cpu" else "accelerator",
                compile=args.torch_compile_backend or True if args.torch_compile else False,
                **self._sharing(),
            )  # fmt: skip
        except BudgetError as error:
            if not args.auto_find_batch_size:
                raise
            self._too_large = error
            raise TooLarge(f"{error}: this batch is out of memory.") from None
        if replaced and mark is not None:
            self._replace_stores(mark, replaced)
        if self._ranks is not None and not self._sums_over_ranks():  # as DDP: the mean of all
            self.session.executor.mean_over = self._ranks.world
            if self.session.head is not None:
                self.session.head.ranks_apart = True
        if lasting:
            weakref.finalize(self, _let_go, self.session)
            _OPEN.add(self.session)
        return self.session

    def _replace_stores(self, mark: Mark, replaced: list[Path]) -> None:
        """The new store is there: it is marked, and those of earlier trainings go."""
        assert self.session is not None
        with self.session.process_group.all_or_none():
            if self.session.process_group.ranks.first:
                mark.write(Path(self.args.output_dir))
        _end_others(replaced)
        remove(replaced)

    def _sums_over_ranks(self) -> bool:
        """Whether the loss is that of the sliced head over the tokens of all processes. Otherwise
        each has the mean over its own, as with DDP."""
        head = self.session.head if self.session is not None else None
        own = self.compute_loss_func is not None or self.label_smoother is not None
        counted = self.args.average_tokens_across_devices and self.model_accepts_loss_kwargs
        summed = self.over_tokens or counted
        return head is not None and not own and summed and self._plain_loss()

    def _plain_loss(self) -> bool:
        return type(self).compute_loss.__module__.partition(".")[0] in _LIBRARIES

    def compute_loss(self, *given: Any, **named: Any) -> Any:
        return self._of_all_ranks(super().compute_loss(*given, **named), named)  # type: ignore[misc]

    def _of_all_ranks(self, found: Any, named: Mapping[str, Any]) -> Any:
        """Trainer multiplies a loss by the number of processes, over which DDP takes the mean: not
        where it has the tokens of all of them already."""
        args, head = self.args, self.session.head if self.session is not None else None
        if head is None or args.world_size == 1 or head.ranks_apart or head.runs_whole:
            return found
        if not args.average_tokens_across_devices or not named.get("num_items_in_batch"):
            return found
        loss, *outputs = found if isinstance(found, tuple) else (found,)
        loss = loss / self.accelerator.num_processes
        return (loss, *outputs) if outputs else loss

    def _sharing(self) -> dict[str, Any]:
        """The processes that torchrun has started share the state."""
        if self.args.world_size > 1 and self._ranks is None:
            self._ranks = join()
        return {} if self._ranks is None else {"process_group": self._ranks}

    def _of_rank(self, path: Path) -> Path:
        """Each has a folder of its own."""
        self._sharing()
        ranks = self._ranks
        return path if ranks is None else path.with_name(ranks.ranks.store_name(path.name))

    def _store_dirs(self) -> list[Path]:
        name = self._store_name()
        ssd = self.lohan.budget(self.args.output_dir).ssd
        return [self._of_rank(Path(folder) / name) for folder in ssd]

    def _store_name(self) -> str:
        """In the output folder one name does; on other drives it is that of this training alone,
        which the output folder has in writing. Earlier versions had one name everywhere."""
        mark = read_mark(Path(self.args.output_dir))
        return STORE_FOLDER if mark is None else mark.store

    def _new_store(self) -> tuple[Mark | None, list[Path]]:
        """What the output folder is to be marked with for a new training, if not as it is, and a
        store that goes when the new one is there: until then the mark leads to it. One is replaced
        only if the user says so."""
        out, dirs, group = Path(self.args.output_dir), self._store_dirs(), self._ranks or ALONE
        replaced: list[Path] = []
        with group.all_or_none():
            inside = [path.parent.resolve() for path in dirs] == [out.resolve()]
            known = inside or (read_mark(out) is not None and self._original() is None)
            if known and (dirs[0] / IDENTITY).exists():
                found = describe(dirs)
                if found["state"] != "unfinished" and not self.lohan.overwrite:
                    step = found["meta"].get("progress", {}).get("step", 0)
                    raise StoreError(
                        f"{dirs[0]} holds the state of an earlier training in {out}, at step "
                        f"{step}; go on with train(resume_from_checkpoint=True), give another "
                        "output_dir, or start over with "
                        "Trainer(..., lohan=LohanArguments(overwrite=True))"
                    )
                if found["state"] == "unfinished":
                    _end_others(dirs)
                    remove(dirs)
                else:
                    replaced = dirs
        if all(group.all_gather_object(known and not replaced)):
            return None, []

        def make() -> list[str]:
            out.mkdir(parents=True, exist_ok=True)
            mark = new_mark(out)
            if not replaced:
                mark.write(out)
            return [mark.id, mark.store]

        own, name = group.broadcast_made(make)  # the same for all ranks
        return Mark(own, name), replaced

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
        held = _parameters(self.model) if before is None else []
        try:
            return super().evaluation_loop(*given, **named)  # type: ignore[misc]
        finally:
            if before is None and self.session is not None and not self._lasts:
                session, self.session, self._lasts = self.session, None, True
                dirs = session.store.dirs
                session.close(flush=False)
                remove(dirs)
                for module, name, parameter in held:
                    module._parameters[name] = parameter

    # -- steps ------------------------------------------------------------------------------------

    def train(self, *given: Any, **named: Any) -> Any:
        """Once more: the same weights and optimizer state go on, with a schedule from its start.
        With model_init, a new model begins."""
        self._waiting = []
        if self.model_init is not None and self.session is not None:
            dirs = self.session.store.dirs
            self.session.close(flush=False)
            remove(dirs)
            self.session = None
        self._resumes, self._rewind = False, None
        asked = named.pop("resume_from_checkpoint", None) if not given else given[0]
        with TemporaryDirectory(prefix="lohan-") as work:
            if asked is True:
                asked = self._last_checkpoint(Path(work))
            try:
                output = super().train(asked, *given[1:], **named)  # type: ignore[misc]
            except RuntimeError:
                if self._too_large is None:
                    raise
                raise self._too_large from None
        if self.session is not None:
            self.session.commit()
        return output

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Batches of one optimizer step are one batch here, if their loss is a sum over tokens: it
        is cut into micro-batches inside every block, so that weights move once per step. Others
        are run one by one, and their gradients added."""
        self._waiting.append(inputs)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        parts, self._waiting = self._waiting, []
        joined = self._joined_batch(parts) if num_items_in_batch is not None else None
        batches = parts if joined is None else [joined]
        session = self.attach(batches[0])
        before, loss = session.step, torch.zeros((), device=self.args.device)
        device, recorded = session.executor.device, self._recorded()
        drawn = device.random_state()
        with session.accumulate() if len(batches) > 1 else nullcontext(), self._in_fp32(model):
            for batch in batches:
                loss += super().training_step(model, batch, num_items_in_batch)  # type: ignore[misc]
        if session.must_run_again:
            device.set_random_state(drawn)
            self._record_again(recorded)
            with self._in_fp32(model):
                loss = super().training_step(model, batches[0], num_items_in_batch)  # type: ignore[misc]
        if session.step != before + 1:
            raise ModelError(
                f"{type(self.model).__name__}: backward has reached no parameter that learns, so "
                f"step {before + 1} would change nothing; check what the loss is made of, and "
                "which parameters have requires_grad"
            )
        self._replan(session)
        return loss

    def _replan(self, session: Session) -> None:
        """After some steps a run knows its machine better than any profile, and what its norms are
        like."""
        before, found = session.plan.commits_by_interval, session.replan()
        if not session.process_group.ranks.first:
            return
        if found is not None:
            logger.info(f"after step {session.step}: {found}")
        if session.plan.commits_by_interval and not before:
            logger.warning(
                f"LoHan commits every {session.plan.commit} from here on, and with every "
                "checkpoint: a crash costs the steps since the last commit; "
                "LohanArguments(commit_every='step') commits each"
            )

    @contextmanager
    def _in_fp32(self, model: nn.Module) -> Iterator[None]:
        """With bf16 or fp16, losses are computed in fp32, as under autocast, and what the model
        returns is in fp32, as accelerate makes it, for losses of one's own and smoothed ones."""
        if not (self.args.bf16 or self.args.fp16):
            yield
            return
        losses = _LossesInFp32()
        hooks = [
            model.register_forward_pre_hook(losses.begin),
            model.register_forward_hook(losses.end, always_call=True),
            model.register_forward_hook(_widened),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _repeatable(self) -> bool:
        """Whether a batch can run twice: its loss is known to leave nothing behind but gradients
        and what `_recorded` has."""
        theirs = super().compute_loss.__func__  # type: ignore[misc]
        own = type(self).compute_loss is LohanMixin.compute_loss
        return own and theirs is transformers.Trainer.compute_loss and not self.compute_loss_func

    def _recorded(self) -> Any:
        """What a run of a batch adds to."""

    def _record_again(self, recorded: Any) -> None:
        """As it was before a run that did not count."""

    def _joined_batch(self, parts: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        """All rows in one batch, where its loss is the sum of theirs."""
        if len(parts) == 1:
            return dict(parts[0])
        base: Any = base_of(self.model)
        summed = (
            self._plain_loss() and self.compute_loss_func is None and find_decoder(base) is not None
        )
        if not summed or getattr(base.config, "output_router_logits", False):
            return None
        try:
            return merged(parts)
        except DataError:  # shapes that cannot be filled up
            return None

    def _clip_grad_norm(self, model: Any) -> float | None:
        return self.session.executor.grad_norm if self.session is not None else None

    def _get_grad_norm(self, model: Any, grad_norm: float | None = None) -> float | None:
        return grad_norm

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        """Metrics get logits: then head and loss are the model's own, over all tokens at once."""
        if self.session is None and (
            self.over_tokens or any(lacks_values(p) for p in self.model.parameters())
        ):
            self._lasts = bool(getattr(self, "is_in_train", False))
            self.attach(inputs, lasting=self._lasts)
        head = self.session.head if self.session is not None else None
        sliced = prediction_loss_only or head is None or self.over_tokens
        how = nullcontext() if sliced else head.whole()  # type: ignore[union-attr]
        if head is not None and sliced and not self.over_tokens:
            how = head.apart()  # Trainer gathers the losses of all processes
        with how, self._in_fp32(model):
            return super().prediction_step(  # type: ignore[misc]
                model, inputs, prediction_loss_only, ignore_keys
            )

    # -- checkpoints ------------------------------------------------------------------------------

    def _last_checkpoint(self, work: Path) -> str | bool:
        """The last one that is whole: a process may have died while it saved one, or before it
        saved any, and its steps are in the store all the same. Then one is made in `work` that
        says that no step is done."""
        numbered = {
            int(path.name.rpartition("-")[2]): path
            for path in Path(self.args.output_dir).glob("checkpoint-*")
            if path.name.rpartition("-")[2].isdecimal() and _is_saved(path)
        }
        if numbered:
            return str(numbered[max(numbered)])
        dirs = self._store_dirs()
        if not (dirs[0] / IDENTITY).exists() or describe(dirs)["state"] == "unfinished":
            return True  # which the library refuses: there is nothing to go on with
        self._beginning = work / "checkpoint-0"
        self._beginning.mkdir()
        transformers.TrainerState().save_to_json(str(self._beginning / TRAINER_STATE_NAME))
        return str(self._beginning)

    def _is_beginning(self, checkpoint: str | None) -> bool:
        return self._beginning is not None and checkpoint == str(self._beginning)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Of several processes all take part: each has a shard of the weights."""
        if self._ranks is not None and not self.args.should_save and stored_weights_of(self.model):
            self._save(output_dir)
        super().save_model(output_dir, _internal_call)  # type: ignore[misc]

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        stored = stored_weights_of(self.model)
        if stored is None:
            return super()._save(output_dir, state_dict)  # type: ignore[misc]
        target = Path(output_dir or self.args.output_dir)
        logger.info(f"{target}: weights are written as {stored.dtype}, the type of the model")
        save_into(target, stored)
        if not self.args.should_save:
            return None
        collator = getattr(self, "data_collator", None)
        tokenizer = getattr(self, "processing_class", None) or getattr(collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(target)
        torch.save(self.args, target / TRAINING_ARGS_NAME)
        return None

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """The state of this step is copied, so that training can come back to it."""
        if self.session is not None:
            self._keep_state(self.session, Path(output_dir))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _keep_state(self, session: Session, checkpoint: Path) -> None:
        session.commit()
        state_folder = self._state_folder(checkpoint)
        try:
            snapshot(session.store, state_folder, with_fixed=False)
        except NoRoomError as error:
            logger.warning(
                f"{state_folder}: no room for a copy of the optimizer state ({error}); training "
                "can go on from here only as long as it is the last checkpoint; set "
                "save_total_limit, or save_only_model"
            )

    def _state_folder(self, checkpoint: Path) -> Path:
        return self._of_rank(checkpoint / STATE_FOLDER)

    def _save_checkpoint(self, *given: Any) -> None:
        """Where checkpoints are weights alone, the state of the best one is kept apart, to come
        back to at the end."""
        super()._save_checkpoint(*given)  # type: ignore[misc]
        args, best = self.args, self.state.best_global_step == self.state.global_step
        if args.save_only_model and args.load_best_model_at_end and best and self.session:
            self._keep_state(self.session, Path(args.output_dir))

    def _load_best_model(self) -> None:
        """Weights, and the optimizer state that goes with them, of the best checkpoint."""
        best = Path(self.state.best_model_checkpoint)
        logger.info(f"Loading best model from {best} (score: {self.state.best_metric}).")
        if self.session is None:
            return
        alone = self.args.save_only_model
        state_folder = self._state_folder(Path(self.args.output_dir) if alone else best)
        self.session.rewind(find_snapshot(state_folder))
        if alone:
            remove([find_snapshot(state_folder)])

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Weights and optimizer state are in the store, which is opened when the first batch is
        there. It must be the one that the checkpoint was made from: as far or further, or the
        checkpoint has the state of its step."""
        if self.session is not None:
            self.session.close()
            self.session = None
        _end_others(self._store_dirs())
        checkpoint = Path(resume_from_checkpoint).absolute()
        saved, stored = self._saved_step(checkpoint), self._stored_step()
        later = [
            path.name
            for path in checkpoint.parent.glob("checkpoint-*")
            if path.name.rpartition("-")[2].isdigit() and self._saved_step(path) > saved
        ]
        self._resumes = True
        if stored >= saved and not later:
            return
        try:
            self._rewind = find_snapshot(self._state_folder(checkpoint))
        except StoreError:
            has = f"the store is at step {stored}" + (f" and {later[0]} is later" if later else "")
            raise StoreError(
                f"{checkpoint} is of step {saved}, {has}, and it has no {STATE_FOLDER} (it was "
                "saved with save_only_model, or there was no room); resume from the latest "
                "checkpoint, or start a new training from the weights of this one"
            ) from None

    def _saved_step(self, checkpoint: str | os.PathLike[str]) -> int:
        file = Path(checkpoint) / TRAINER_STATE_NAME
        if not file.is_file():
            return 0
        return int(transformers.TrainerState.load_from_json(str(file)).global_step)

    def _stored_step(self) -> int:
        """Of the training that the store is of."""
        meta = self._stored()
        return int(meta["progress"]["step"]) - int(meta.get("first_step", 0))

    def _stored(self) -> dict[str, Any]:
        """What the store says of itself."""
        dirs = self._store_dirs()
        if not (dirs[0] / IDENTITY).exists():
            there, here = _stored_world_size(dirs[0]), max(1, self.args.world_size)
            if there and there != here:
                raise StoreError(
                    f"{dirs[0].parent} has the state of a training with "
                    f"{counted(there, 'process', 'processes')}, and this one has {here}; resume it "
                    f"with {there}"
                )
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
        """Training resumes after the last step that was committed, not after the checkpoint."""
        known = None if self._is_beginning(resume_from_checkpoint) else resume_from_checkpoint
        found: tuple[int, int] = super()._init_training_state(  # type: ignore[misc]
            max_steps, num_update_steps_per_epoch, num_train_epochs, known, trial
        )
        if not self._resumes:
            if self.session is not None and not self.session.closed and self.session.step:
                first = self.session.step
                self.session.executor.extra_meta = lambda: {"first_step": first}
            return found
        self._beyond = 0 if self._rewind else self._stored_step() - self.state.global_step
        self.state.global_step += self._beyond
        epochs, steps = divmod(self.state.global_step, num_update_steps_per_epoch)
        skip = 0 if self.args.ignore_data_skip else steps * self.args.gradient_accumulation_steps
        return epochs, skip

    def _go_back(self) -> None:
        """The store gets the state of the checkpoint that training resumes from."""
        if self._rewind is not None:
            with Store.open(self._store_dirs()) as store:
                rewind(store, self._rewind)
            self._rewind = None

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if self._is_beginning(checkpoint):
            self.optimizer.step()  # does nothing, and schedulers want it before theirs
        else:
            state = torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True)
            self.lr_scheduler.load_state_dict(state)
        for group, rate in zip(
            self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True
        ):
            group["lr"] = rate
        if not isinstance(self.lr_scheduler, (ReduceLROnPlateau, GreedyLR)):  # not by evaluations
            for _ in range(self._beyond):
                self.lr_scheduler.step()


_LIBRARIES = ("transformers", "trl", "lohan")  # whose losses are known


def _parameters(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    return [(m, name, p) for m in model.modules() for name, p in m._parameters.items()]


def _stored_world_size(store: Path) -> int:
    """How many processes share the training whose store should be here; 0: there is none."""
    base = re.sub(r"-rank\d+of\d+$", "", store.name)
    for path in sorted(store.parent.glob(f"{base}*")):
        match = re.fullmatch(rf"{re.escape(base)}(?:-rank\d+of(\d+))?", path.name)
        if match and (path / IDENTITY).exists():
            return int(match[1] or 1)
    return 0


def _is_saved(checkpoint: Path) -> bool:
    """What is written last is there, and whole."""
    try:
        load_json(checkpoint / TRAINER_STATE_NAME)
    except (OSError, ValueError):
        return False
    return True


_OPEN: weakref.WeakSet[Session] = weakref.WeakSet()


def _end_others(dirs: Sequence[Path]) -> None:
    """An earlier Trainer of this process may have the store still open, as in a notebook: the one
    that goes on with it takes its place."""
    for session in list(_OPEN):
        if not session.closed and {p.resolve() for p in session.store.dirs} & {
            p.resolve() for p in dirs
        }:
            session.close()


def _let_go(session: Session) -> None:
    """When its Trainer is gone, at the latest at the end of the process."""
    try:
        session.close()
        session.process_group.close()
    except LohanError as error:
        logger.warning(f"the store {session.store.dirs[0]} was not closed: {error}")


# -- transformers' Trainer, out of core ------------------------------------------------------------


class Trainer(LohanMixin, transformers.Trainer):
    """transformers.Trainer, but for where weights and optimizer state are."""


# -- Batches of a Trainer: several made one, and the shapes to plan for ----------------------------


# What stands where a row of one batch is shorter than those of another. Behind a row's end nothing
# is learnt and nothing looks back at it.
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
    tensors = {n: t for n, t in inputs.items() if isinstance(t, torch.Tensor)}
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


def largest_shapes(all_ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What is to be planned for where each of several processes has a batch of its own."""
    first = dict(all_ranks[0])
    for other in all_ranks[1:]:
        for name, (shape, dtype) in first.items():
            if name in other and len(other[name][0]) == len(shape):
                first[name] = [list(map(max, shape, other[name][0])), dtype]
    return first


def shapes_to_json(shapes: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {n: [list(t.shape), str(t.dtype).removeprefix("torch.")] for n, t in shapes.items()}


def shapes_from_json(data: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for name, (shape, dtype) in data.items()
    }
